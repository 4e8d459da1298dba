"""Runs the suite on a backend and counts what passed, what was refused and what failed, each apart."""

from __future__ import annotations

import collections
import json
import os
import platform
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import torch

from ..backend import Backend
from ..errors import ArgumentError
from ..numerics import Record
from .items import Item, items_for
from .subject import CheckFailed, Refused, Subject, opened

PASSED, REFUSED, FAILED = "passed", "refused", "failed"
FORMAT = 1


class Outcome(TypedDict):
    """One check. measured: per quantity and comparison the error and its bound."""

    name: str
    outcome: str
    seconds: float
    message: str
    refusals: list[str]
    measured: list[dict[str, Any]]


class Report(TypedDict):
    """A whole run, ready for json.dump."""

    format: int
    attnlib: str
    backend: str
    family: str
    device: str
    level: str
    shard: str | None
    config: dict[str, Any]
    versions: dict[str, str]
    started: str
    seconds: float
    passed: int
    refused: int
    failed: int
    checks: list[Outcome]


Progress = Callable[[int, int, Outcome], None]


def run_check(
    backend: str | Backend,
    *,
    device: torch.device | str | None = None,
    level: str = "core",
    shard: tuple[int, int] | None = None,
    report: str | os.PathLike[str] | None = None,
    progress: bool | Progress | None = None,
    config: Mapping[str, Any] | None = None,
    fault: str | None = None,
    only: str | Sequence[str] | None = None,
) -> Report:
    """Run the conformance suite on a backend.

    Args:
        backend: a name ("cpu", "cpu:avx2", "tiled") or a backend object that need not be registered.
        device: where to run; default one that is present and that the backend declares.
        level: "core", or "full" for every pair of features and the wide sweeps.
        shard: (i, n) runs the i-th of n parts, i from 1.
        report: file for the report; Markdown if its name ends in .md, else JSON.
        progress: True for a progress bar, or a function called with (done, total, outcome) after every check.
        config: handed to every Backend.plan. fault: short for config={"fault": name}, for mutants.
        only: run the checks whose name contains this text, or one of these texts.

    Returns:
        Report, a dict that json can write: counts, versions, and one entry a check.

    Raises:
        ArgumentError: no such backend, level, shard or device.

    Example:
        >>> run_check("tiled", only="forward/causal")["failed"]
        0
    """
    if level not in ("core", "full"):
        raise ArgumentError(f"level: needs core or full, got {level!r}")
    if shard is not None and not 1 <= shard[0] <= shard[1]:
        raise ArgumentError(f"shard: needs (i, n) with i from 1 to n, got {shard}")
    settings = {**(config or {}), **({"fault": fault} if fault else {})}
    started, start = time.strftime("%Y-%m-%dT%H:%M:%S%z"), time.perf_counter()
    with opened(backend, device, settings) as subject:
        items = chosen(subject, level, shard, only)
        outcomes = run_items(subject, items, progress)
        found = make_report(
            subject, outcomes, level=level, shard=shard, config=settings, started=started,
            seconds=time.perf_counter() - start,
        )  # fmt: skip
    if report is not None:
        path = Path(report)
        path.write_text(to_markdown(found) if path.suffix == ".md" else json.dumps(found, indent=1, default=str))
    return found


def make_report(
    subject: Subject, outcomes: list[Outcome], *, level: str, shard: tuple[int, int] | None,
    config: Mapping[str, Any], started: str, seconds: float,
) -> Report:  # fmt: skip
    """The report of outcomes, however they came about."""
    return Report(
        format=FORMAT, attnlib=_version(), backend=subject.name, family=subject.family.name,
        device=str(subject.target), level=level, shard=f"{shard[0]}/{shard[1]}" if shard else None,
        config=dict(config), versions=_versions(subject), started=started, seconds=seconds,
        passed=_count(outcomes, PASSED), refused=_count(outcomes, REFUSED), failed=_count(outcomes, FAILED),
        checks=outcomes,
    )  # fmt: skip


def chosen(
    subject: Subject, level: str, shard: tuple[int, int] | None = None, only: str | Sequence[str] | None = None
) -> list[Item]:
    """The checks of a level for this subject's device, cut to a shard and to names that contain one of `only`."""
    items = items_for(level, subject)
    if only is not None:
        texts = (only,) if isinstance(only, str) else only
        items = [item for item in items if any(text in item.name for text in texts)]
    return items[shard[0] - 1 :: shard[1]] if shard is not None else items


def run_items(subject: Subject, items: Sequence[Item], progress: bool | Progress | None = None) -> list[Outcome]:
    """The outcome of each check, in order."""
    if progress is True:
        with _Bar(subject.name, len(items)) as bar:
            return _run_all(subject, items, bar)
    return _run_all(subject, items, progress or None)


def _run_all(subject: Subject, items: Sequence[Item], progress: Progress | None) -> list[Outcome]:
    outcomes = []
    for done, item in enumerate(items, 1):
        outcomes.append(run_item(subject, item))
        if progress is not None:
            progress(done, len(items), outcomes[-1])
    return outcomes


def run_item(subject: Subject, item: Item) -> Outcome:
    """Run one check; whatever it raises but Refused is a failure."""
    subject.records.clear()
    start = time.perf_counter()
    outcome, message, refusals = PASSED, "", []
    records: Sequence[Record] = ()
    state = torch.random.get_rng_state()
    try:
        item.run(subject)
    except Refused as refused:
        outcome, refusals = REFUSED, [str(refusal) for refusal in refused.refusals]
        message = str(refused)
    except CheckFailed as failure:
        outcome, message, records = FAILED, str(failure), failure.records
    except Exception:
        outcome, message = FAILED, traceback.format_exc(limit=-8)
    torch.random.set_rng_state(state)
    seconds = time.perf_counter() - start
    measured = [
        {"quantity": record.quantity, "check": check.name, "error": check.error, "bound": check.bound,
         "passed": check.passed}
        for record in (records or subject.records)
        for check in record.checks
    ]  # fmt: skip
    return Outcome(
        name=item.name, outcome=outcome, seconds=seconds, message=message, refusals=refusals, measured=measured
    )


def _count(outcomes: Iterable[Outcome], kind: str) -> int:
    return sum(outcome["outcome"] == kind for outcome in outcomes)


def _version() -> str:
    from .. import __version__

    return __version__


def _versions(subject: Subject) -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__, "platform": platform.platform()}
    found["threads"] = str(torch.get_num_threads())
    if subject.device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(subject.device)
        found["cuda"] = str(torch.version.cuda or torch.version.hip)
    return found


def refusal_counts(report: Report) -> dict[str, int]:
    """How many checks each reason refused, the most frequent first; a check may have several."""
    counts = collections.Counter(reason for check in report["checks"] for reason in set(check["refusals"]))
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def to_markdown(report: Report) -> str:
    """The report for people: counts, failures with the figures that exceeded, refusals by reason, slowest checks."""
    lines = [
        f"# Conformance of {report['backend']}", "",
        f"attnlib {report['attnlib']}, level {report['level']}"
        + (f", shard {report['shard']}" if report["shard"] else "")
        + f", {report['device']}, {report['started']}, {report['seconds']:.0f} s",
        ", ".join(f"{name} {version}" for name, version in report["versions"].items()), "",
        "| passed | refused | failed |", "|---|---|---|",
        f"| {report['passed']} | {report['refused']} | {report['failed']} |",
    ]  # fmt: skip
    failed = [check for check in report["checks"] if check["outcome"] == FAILED]
    if failed:
        lines += ["", "## Failed"]
        for check in failed:
            lines += ["", f"### {check['name']}", "", "```", check["message"].strip(), "```"]
            beyond = [m for m in check["measured"] if not m["passed"]]
            if beyond:
                lines += ["", "| quantity | check | error | bound |", "|---|---|---|---|"]
                lines += [f"| {m['quantity']} | {m['check']} | {m['error']:.3g} | {m['bound']:.3g} |" for m in beyond]
    if reasons := refusal_counts(report):
        lines += ["", "## Refused", "", "| reason | checks |", "|---|---|"]
        lines += [f"| {reason} | {count} |" for reason, count in reasons.items()]
    slowest = sorted(report["checks"], key=lambda check: -check["seconds"])[:10]
    lines += ["", "## Slowest", "", "| check | seconds |", "|---|---|"]
    lines += [f"| {check['name']} | {check['seconds']:.2f} |" for check in slowest]
    return "\n".join(lines) + "\n"


class _Bar:
    """A progress bar that prints each failure as it comes."""

    def __init__(self, name: str, total: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns)
        self._task = self._progress.add_task(name, total=total)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, done: int, total: int, outcome: Outcome) -> None:
        if outcome["outcome"] == FAILED:
            first = outcome["message"].strip().splitlines()[-1:] or [""]
            self._progress.console.print(f"FAILED {outcome['name']}: {first[0]}", markup=False)
        self._progress.update(self._task, completed=done)
