"""Where results are kept and what every result says of its origin."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import torch

from attnlib import bench

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def origin(device: torch.device) -> dict[str, Any]:
    """Machine, versions, commit and date."""
    return {
        "machine": bench.machine(device),
        "versions": bench.versions(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }


def commit() -> str:
    """The commit measured; "+" says that the tree had changes beside the results themselves.

    The variable GIT_COMMIT says it where the tree is a copy of another one.
    """
    if told := os.environ.get("GIT_COMMIT"):
        return told.rstrip("+")[:12] + "+" * told.endswith("+")

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", ".", ":!benchmarks/results", ":!docs", ":!README.md")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def cpu_name(name: str) -> str:
    """The name of a result of the cpu backend: with AMX other kernels run, torch's too."""
    return f"{name}_amx" if "amx_bf16" in bench.machine(torch.device("cpu"))["isa"] else name


def write(name: str, value: dict[str, Any]) -> Path:
    """Write benchmarks/results/NAME.json."""
    return write_to(RESULTS / f"{name}.json", value)


def write_to(path: Path, value: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    return path


def read(name: str) -> dict[str, Any] | None:
    """The value of benchmarks/results/NAME.json, None if there is none."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
