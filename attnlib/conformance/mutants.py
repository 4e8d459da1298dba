"""Whether the suite sees what is wrong: each deliberate fault of a backend must be killed by a check.

    python -m attnlib.conformance.mutants [--backend NAME] [--fault NAME ...] [--report FILE]

A backend offers faults by an attribute `faults`, a mapping from name to description (or to `faults.Fault`, which also
says where to look first), and by taking {"fault": name} as a plan config. A kill counts only if the same check passes
without the fault. Exit status 1 if one survives.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import torch

from ..backend import Backend
from ..errors import ArgumentError
from .faults import FAULTS, Fault
from .items import Item
from .runner import FAILED, PASSED, chosen, run_item
from .subject import Subject, opened


class Kill(TypedDict):
    """What became of one mutant. killer is None for a survivor."""

    fault: str
    description: str
    killer: str | None
    message: str
    checks: int
    seconds: float


class MutantReport(TypedDict):
    """All mutants of a backend."""

    backend: str
    device: str
    killed: int
    survived: list[str]
    seconds: float
    mutants: list[Kill]


def run_mutants(
    backend: str | Backend = "tiled",
    *,
    device: torch.device | str | None = None,
    level: str = "core",
    faults: Sequence[str] | None = None,
    report: str | os.PathLike[str] | None = None,
    progress: Callable[[Kill], None] | None = None,
) -> MutantReport:
    """Run the suite on every mutant of a backend, each until its first kill.

    Args:
        backend, device, level: as in run_check.
        faults: names of some faults only.
        report: file for the JSON report.
        progress: called with each result.

    Raises:
        ArgumentError: the backend has no faults, or none of that name.
    """
    start = time.perf_counter()
    kills: list[Kill] = []
    with opened(backend, device) as subject:
        offered = faults_of(subject.backend)
        for name in faults or ():
            if name not in offered:
                raise ArgumentError(f"fault: {subject.name} has no fault {name!r}; it has {', '.join(offered)}")
        items = chosen(subject, level)
        sound: dict[str, bool] = {}
        for name in faults or offered:
            kills.append(_hunt(subject, name, offered[name], items, sound))
            if progress is not None:
                progress(kills[-1])
        found = MutantReport(
            backend=subject.name, device=str(subject.target), killed=sum(kill["killer"] is not None for kill in kills),
            survived=[kill["fault"] for kill in kills if kill["killer"] is None],
            seconds=time.perf_counter() - start, mutants=kills,
        )  # fmt: skip
    if report is not None:
        Path(report).write_text(json.dumps(found, indent=1))
    return found


def faults_of(backend: Backend) -> dict[str, Fault]:
    """The deliberate faults that a backend offers. Raises ArgumentError if there are none."""
    offered: Mapping[str, Any] = getattr(backend, "faults", {})
    if not offered:
        raise ArgumentError(f"backend: {backend.name} offers no faults")
    return {name: _described(name, value) for name, value in offered.items()}


def _described(name: str, value: str | Fault) -> Fault:
    """A fault that shares its name with one of the tiled backend is looked for in the same places."""
    if isinstance(value, Fault):
        return value
    return Fault(value, FAULTS[name].killers if name in FAULTS else ())


def _hunt(subject: Subject, name: str, fault: Fault, items: Iterable[Item], sound: dict[str, bool]) -> Kill:
    """Run checks on one mutant, likely killers first, until one fails that passes without the fault."""
    start = time.perf_counter()
    count = 0
    with subject.configured(name, {"fault": name}) as mutant:
        for item in _ordered(items, fault.killers):
            count += 1
            outcome = run_item(mutant, item)
            if outcome["outcome"] != FAILED:
                continue
            if item.name not in sound:
                sound[item.name] = run_item(subject, item)["outcome"] == PASSED
            if sound[item.name]:
                return Kill(
                    fault=name, description=fault.description, killer=item.name, checks=count,
                    message=outcome["message"].strip().splitlines()[-1], seconds=time.perf_counter() - start,
                )  # fmt: skip
    return Kill(
        fault=name, description=fault.description, killer=None, message="", checks=count,
        seconds=time.perf_counter() - start,
    )  # fmt: skip


def _ordered(items: Iterable[Item], killers: Sequence[str]) -> list[Item]:
    def rank(item: Item) -> int:
        return next((place for place, text in enumerate(killers) if text in item.name), len(killers))

    return sorted(items, key=rank)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m attnlib.conformance.mutants", description=__doc__.split("\n")[0])
    parser.add_argument("--backend", default="tiled", help="a backend that offers faults (default tiled)")
    parser.add_argument("--device", help="a torch device")
    parser.add_argument("--level", choices=("core", "full"), default="core")
    parser.add_argument("--fault", action="append", help="only this fault; repeatable")
    parser.add_argument("--report", metavar="FILE", help="write the JSON report here")
    options = parser.parse_args(arguments)

    def show(kill: Kill) -> None:
        what = f"killed by {kill['killer']}" if kill["killer"] else "SURVIVED"
        print(f"{kill['fault']:32} {what}  ({kill['checks']} checks, {kill['seconds']:.1f} s)", flush=True)

    try:
        found = run_mutants(
            options.backend, device=options.device, level=options.level, faults=options.fault, report=options.report,
            progress=show,
        )  # fmt: skip
    except ArgumentError as error:
        print(error, file=sys.stderr)
        return 2
    total = len(found["mutants"])
    print(f"{found['killed']} of {total} mutants of {found['backend']} killed in {found['seconds']:.0f} s")
    if found["survived"]:
        print(f"survived: {', '.join(found['survived'])}")
    return 1 if found["survived"] else 0


if __name__ == "__main__":
    sys.exit(main())
