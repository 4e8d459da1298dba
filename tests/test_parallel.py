"""The suite over several processes, and the list of problems it asks for."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from attnlib.conformance import parallel, problems


def main(*arguments: str) -> int:
    return parallel.main(["--backend", "tiled", "--level", "core", "--jobs", "1", *arguments])


def test_runs_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the log holds as passed is not run again; what failed, or was cut short while it was written, is."""
    log, report = tmp_path / "log.jsonl", tmp_path / "report.json"
    options = ["--only", "forward/plain/", "--log", str(log), "--report", str(report)]
    names = [f"forward/plain/{dtype}" for dtype in ("float32", "bfloat16", "float16", "float64")]
    before = [parallel._outcome(names[0], "passed", 1.0, ""), parallel._outcome(names[1], "failed", 1.0, "once")]
    log.write_text("\n".join([*map(json.dumps, before), '{"name": "forward/pl']) + "\n")
    assert main(*options) == 0
    assert "1 of 4 are done already" in capsys.readouterr().out
    found = json.loads(report.read_text())
    assert found["passed"] == 4 and found["failed"] == 0 and found["not_run"] == []
    assert [check["name"] for check in found["checks"]] == names
    assert {name for name, outcome in parallel.read_log(log).items() if outcome["outcome"] == "passed"} == set(names)
    assert main(*options) == 0  # nothing is left: no process is started
    assert "4 of 4 are done already" in capsys.readouterr().out


def test_mutants(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("--mutants", "--only", "head_modulo") == 0
    assert "1 killed" in capsys.readouterr().out


def test_checks_that_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, out = tmp_path / "report.json", tmp_path / "out.txt"
    options = ["--only", "forward/plain/", "--report", str(report), "--leave-out", str(out)]
    out.write_text("# slow\nforward/plain/float32\n\nforward/plain/float64\n")
    assert main(*options) == 0
    assert "2 of 4 are left out" in capsys.readouterr().out
    assert [check["name"] for check in json.loads(report.read_text())["checks"]] == [
        "forward/plain/bfloat16", "forward/plain/float16",
    ]  # fmt: skip
    out.write_text("forward/plain/float32\nforward/plane/float32\n")
    assert main(*options) == 2
    assert "forward/plane/float32" in capsys.readouterr().err
    assert main("--leave-out", str(tmp_path / "none")) == 2
    assert "none" in capsys.readouterr().err


def test_unknown_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert parallel.main(["--backend", "nobody"]) == 2
    assert "nobody" in capsys.readouterr().err


def serve(pipe: Any, *_: Any) -> None:
    """A process that dies, hangs or answers, as it is told."""
    for name in iter(pipe.recv, None):
        if name.startswith("dies"):
            os._exit(3)
        if name.startswith("hangs"):
            time.sleep(60)
        if name.startswith("slow"):
            time.sleep(1)
        pipe.send(parallel._outcome(name, "passed", 0.0, ""))
        if name.startswith("leaves"):
            return


def test_processes_that_die_or_hang_cost_one_check() -> None:
    found: dict[str, Any] = {}
    names = ["a", "dies", "hangs", "leaves", "b"]
    left = parallel.run_parallel(
        names, (), jobs=2, done=lambda o: found.__setitem__(o["name"], o), hangs=3.0, serve=serve
    )
    assert left == [] and set(found) == set(names)
    failed = {name: outcome["message"] for name, outcome in found.items() if outcome["outcome"] == "failed"}
    assert set(failed) == {"dies", "hangs"}
    assert "died: 3" in failed["dies"] and "stopped after" in failed["hangs"]


def test_time_limit_leaves_the_rest() -> None:
    found: list[str] = []
    names = [f"slow {number}" for number in range(60)]
    until = time.monotonic() + 3
    left = parallel.run_parallel(names, (), jobs=2, done=lambda o: found.append(o["name"]), until=until, serve=serve)
    assert time.monotonic() < until + 10
    assert left and set(found) | set(left) == set(names) and not set(found) & set(left)


def test_problems_of_a_backend_without_its_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from attnlib import precompile
    from attnlib_cuda import config

    found = problems.collect("cuda", "sm_90", "core", only=("/plain/", "/everything/", "decode-paged/"))
    assert {problem.dtype for problem in found} >= {torch.float32, torch.bfloat16}
    assert any(problem.grads for problem in found) and any(problem.page_size for problem in found)
    path = tmp_path / "problems.json"
    path.write_text(json.dumps([problems.record(problem) for problem in found]))
    assert precompile.read_problems(path) == found
    assert all(config.kernels(problem, "sm_90a") for problem in found)
    assert problems.main(["--backend", "cuda", "--arch", "gfx942"]) == 2
    assert "gfx942" in capsys.readouterr().err
