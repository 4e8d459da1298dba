"""Named commands run one after another, each timed against a budget: what ci/check and ci/gpu share."""

from __future__ import annotations

import argparse
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 4.0  # a step that takes this many budgets is hung, not slow


@dataclass(frozen=True)
class Step:
    """One command. `budget` is in seconds; `needs` are files of the tree without which there is nothing to do yet."""

    name: str
    budget: int
    command: tuple[str, ...]
    needs: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    step: Step
    status: str  # passed, failed, skipped
    seconds: float = 0.0
    cpu: float = 0.0  # processor seconds: far below the cores' worth of `seconds` on a machine that others use
    note: str = ""


def processor_seconds() -> float:
    """What the processes waited for so far have used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def python(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, *arguments)


def run(step: Step, patience: float = PATIENCE) -> Result:
    """Run one step, its output going straight to the terminal; it is stopped after patience times its budget."""
    absent = [path for path in step.needs if not (ROOT / path).exists()]
    if absent:
        return Result(step, "skipped", note=f"no {absent[0]}")
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **step.environment}
    started, used = time.monotonic(), processor_seconds()
    process = subprocess.Popen(step.command, cwd=ROOT, env=environment, start_new_session=True)
    note = ""
    try:
        status = process.wait(step.budget * patience)
    except subprocess.TimeoutExpired:
        note = f"stopped after {step.budget * patience:.0f} s"
        status = 1
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds = time.monotonic() - started
    if status == 0 and seconds > step.budget:
        note = "over budget"
    if status != 0 and not note:
        note = f"exit status {status}"
    return Result(step, "passed" if status == 0 else "failed", seconds, processor_seconds() - used, note)


def summary(results: Sequence[Result]) -> str:
    """A table of what became of each step."""
    rows = [("step", "result", "seconds", "processor", "budget", "")]
    rows += [(r.step.name, r.status, f"{r.seconds:.1f}", f"{r.cpu:.1f}", str(r.step.budget), r.note) for r in results]
    seconds, cpu = sum(r.seconds for r in results), sum(r.cpu for r in results)
    rows.append(("total", "", f"{seconds:.1f}", f"{cpu:.1f}", str(sum(r.step.budget for r in results)), ""))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    aligned = (str.ljust, str.ljust, str.rjust, str.rjust, str.rjust)
    lines = []
    for row in rows:
        cells = [align(cell, width) for align, cell, width in zip(aligned, row, widths)]
        lines.append("  ".join([*cells, row[5]]).rstrip())
    return "\n".join(lines)


def pick(steps: Sequence[Step], only: str | None, skip: str | None) -> list[Step]:
    """The steps that --only and --skip leave."""
    known = {step.name for step in steps}
    chosen = set(only.split(",")) if only else set(known)
    left_out = set(skip.split(",")) if skip else set()
    unknown = sorted((chosen | left_out) - known)
    if unknown:
        raise SystemExit(f"no step named {', '.join(unknown)}; the steps are {', '.join(sorted(known))}")
    return [step for step in steps if step.name in chosen - left_out]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", metavar="STEPS", help="run these, separated by commas")
    parser.add_argument("--skip", metavar="STEPS", help="leave these out")
    parser.add_argument("--list", action="store_true", help="print the steps and stop")


def show(steps: Sequence[Step]) -> None:
    """What --list prints."""
    for step in steps:
        print(f"{step.name:<12} {step.budget:>4} s  {shlex.join(step.command)}")


def run_all(
    steps: Sequence[Step],
    patience: float = PATIENCE,
    ready: Callable[[Step], str] = lambda step: "",
    ended: Callable[[Sequence[Result]], None] = lambda results: None,
) -> list[Result]:
    """Run the steps in order, each announced, and print the summary and what failed.

    ready: why a step whose turn has come is left out; empty if it is not. ended: told the results after each step.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a step in progress is stopped too
    results = []
    for number, step in enumerate(steps, 1):
        print(f"\n=== [{number}/{len(steps)}] {step.name}, budget {step.budget} s", flush=True)
        left_out = ready(step)
        results.append(Result(step, "skipped", note=left_out) if left_out else run(step, patience))
        ended(results)
        last = results[-1]
        print(f"=== {step.name}: {last.status}, {last.seconds:.1f} s {last.note}".rstrip(), flush=True)
    print(f"\n{summary(results)}")
    failed = [r.step.name for r in results if r.status == "failed"]
    if failed:
        print(f"\nFAILED: {', '.join(failed)}")
    return results
