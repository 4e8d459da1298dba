"""The suite over several processes, resumable: python -m attnlib.conformance.parallel --backend cuda --level full

Checks go one by one to whichever process is free. Each outcome is appended to --log as one line of JSON; a check that
the log holds as passed or refused is not run again, so that a run that was cut short can go on. A process that dies, or
whose GPU context no longer answers, costs one failed check and is replaced; a check that hangs is stopped.
--mutants runs the backend's deliberate faults in the same way; each must be killed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from ..errors import ArgumentError
from .items import items_for
from .runner import FAILED, PASSED, REFUSED, Outcome, Report, chosen, make_report, run_item
from .subject import opened

HANGS = 120.0  # seconds after which a check is stopped
STARTS = 120.0  # seconds that a process may take to start
KILLED, SURVIVED = "killed", "survived"


# --- a process --------------------------------------------------------------------------------------------------------


def _serve(pipe: Connection, work: str, backend: str, device: str | None, level: str) -> None:
    """Answer names of checks (or faults) with their outcomes until None comes or the device is lost."""
    torch.set_num_threads(1)
    if work == "mutants":
        from .mutants import run_mutants

        for name in iter(pipe.recv, None):
            found = run_mutants(backend, device=device, level=level, faults=[name])["mutants"][0]
            killed = found["killer"] is not None
            message = f"{found['killer']}: {found['message']}" if killed else f"passed {found['checks']} checks"
            pipe.send(_outcome(name, KILLED if killed else SURVIVED, found["seconds"], message))
        return
    with opened(backend, device) as subject:
        items = {item.name: item for item in items_for(level, subject)}
        for name in iter(pipe.recv, None):
            outcome = run_item(subject, items[name])
            lost = subject.device.type == "cuda" and _lost(subject.device)
            pipe.send(outcome)
            if lost:
                return


def _lost(device: torch.device) -> bool:
    try:
        torch.cuda.synchronize(device)
    except Exception:
        return True
    return False


def _outcome(name: str, outcome: str, seconds: float, message: str) -> Outcome:
    return Outcome(name=name, outcome=outcome, seconds=seconds, message=message, refusals=[], measured=[])


def _start(pipe: Connection, serve: Callable[..., None], *arguments: Any) -> None:
    pipe.send(None)  # imports are done, which counts as no check's time
    serve(pipe, *arguments)


class _Worker:
    """One process with what it is working on."""

    def __init__(self, context: Any, serve: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_start, args=(other, serve, *arguments), daemon=True)
        self.process.start()
        other.close()
        self.name: str | None = None
        self.ready = False
        self.answers = 0
        self.since = time.monotonic()

    def give(self, name: str | None) -> bool:
        """Whether the process took it."""
        self.name, self.since = name, time.monotonic()
        try:
            self.pipe.send(name)
        except OSError:
            return False
        return True

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


# --- the run ----------------------------------------------------------------------------------------------------------


def run_parallel(
    names: Sequence[str],
    arguments: tuple[Any, ...],
    *,
    jobs: int,
    done: Callable[[Outcome], None],
    until: float | None = None,
    hangs: float = HANGS,
    serve: Callable[..., None] = _serve,
) -> list[str]:
    """Run every name; `done` gets each outcome. Returns the names that were not run by the time `until`.

    serve: what a process runs, with its pipe and then `arguments`.
    """
    context = multiprocessing.get_context("spawn")
    waiting = list(reversed(names))
    workers: list[_Worker] = []
    leaving: list[_Worker] = []  # told to end

    def feed(worker: _Worker) -> None:
        """The next name, or the end."""
        if not waiting:
            worker.give(None)
            workers.remove(worker)
            leaving.append(worker)
        elif not worker.give(name := waiting.pop()):
            waiting.append(name)
            replace(worker)

    def replace(worker: _Worker) -> None:
        worker.stop()
        workers.remove(worker)
        if waiting:
            workers.append(_Worker(context, serve, arguments))
            feed(workers[-1])

    for _ in range(min(jobs, len(names))):
        workers.append(_Worker(context, serve, arguments))
    for worker in list(workers):
        feed(worker)
    while workers:
        ready = wait([worker.pipe for worker in workers], timeout=1.0)
        now = time.monotonic()
        for worker in list(workers):
            if worker.name is None:
                continue
            if worker.pipe in ready:
                try:
                    outcome = worker.pipe.recv()
                except (EOFError, OSError):
                    worker.process.join(5)
                    if worker.answers and worker.process.exitcode == 0:  # it left, having lost its device
                        waiting.append(worker.name)
                    else:
                        text = f"the process died: {worker.process.exitcode}"
                        done(_outcome(worker.name, FAILED, now - worker.since, text))
                    replace(worker)
                    continue
                if worker.ready:
                    worker.answers += 1
                    done(outcome)
                    feed(worker)
                else:
                    worker.ready, worker.since = True, now
            elif now - worker.since > (hangs if worker.ready else max(hangs, STARTS)):
                done(_outcome(worker.name, FAILED, now - worker.since, f"stopped after {hangs:.0f} s"))
                replace(worker)
        if until is not None and now > until:
            break
    left = list(reversed(waiting)) + [worker.name for worker in workers if worker.name is not None]
    patience = time.monotonic() + 5
    for worker in leaving:
        worker.process.join(max(0.0, patience - time.monotonic()))
    for worker in workers + leaving:
        worker.stop()
    return left


def read_log(path: Path | None) -> dict[str, Outcome]:
    """The last outcome of each check in a log; a line cut short is left out."""
    found: dict[str, Outcome] = {}
    if path is not None and path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                outcome = json.loads(line)
                found[outcome["name"]] = outcome
            except (ValueError, KeyError):
                continue
    return found


def _without(names: list[str], file: str | None) -> list[str]:
    """names but those that a file has, a name a line. Raises ArgumentError for one that is no check's."""
    if file is None:
        return names
    try:
        lines = [line.strip() for line in Path(file).read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise ArgumentError(f"--leave-out: needs a file of names, got {file!r}: {error.strerror}") from error
    out = {line for line in lines if line and not line.startswith("#")}
    if unknown := sorted(out - set(names)):
        raise ArgumentError(f"--leave-out: needs names of the checks that were chosen, got {unknown[0]!r} in {file}")
    print(f"{len(out)} of {len(names)} are left out, by {file}", flush=True)
    return [name for name in names if name not in out]


def _order(names: Iterable[str], log: Mapping[str, Outcome]) -> list[str]:
    """What took longest comes first, so that the end is not spent waiting for one process."""
    slow = ("AB-034", "AB-035", "AB-037", "AB-038", "memory/", "dropout/mask")
    return sorted(names, key=lambda name: (-log[name]["seconds"] if name in log else 0.0, not name.startswith(slow)))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m attnlib.conformance.parallel", description=__doc__.split("\n")[0])
    parser.add_argument("--backend", required=True)
    parser.add_argument("--device", help="a torch device (default: one the backend runs on)")
    parser.add_argument("--level", choices=("core", "full"), default="full")
    parser.add_argument("--shard", metavar="I/N", help="only the I-th of N parts of the checks")
    parser.add_argument("--only", action="append", metavar="TEXT", help="checks (faults) whose name has this text")
    parser.add_argument("--leave-out", metavar="FILE", help="of checks that are not run, a name a line")
    parser.add_argument("--mutants", action="store_true", help="run the backend's faults instead of its checks")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    parser.add_argument("--time-limit", type=float, metavar="S", help="stop, with what there is, after S seconds")
    parser.add_argument("--hangs", type=float, default=HANGS, metavar="S", help="stop a check after S seconds")
    parser.add_argument("--log", metavar="FILE", help="append outcomes here; what it has passed is not run again")
    parser.add_argument("--report", metavar="FILE", help="write the JSON report here")
    options = parser.parse_args(arguments)
    started, start = time.strftime("%Y-%m-%dT%H:%M:%S%z"), time.perf_counter()
    shard = None
    if options.shard:
        part, _, parts = options.shard.partition("/")
        if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
            parser.error(f"--shard: needs I/N with I from 1 to N, got {options.shard!r}")
        shard = int(part), int(parts)
    try:
        with opened(options.backend, options.device) as subject:
            if options.mutants:
                from .mutants import faults_of

                names = list(faults_of(subject.backend))
                if options.only:
                    names = [name for name in names if any(text in name for text in options.only)]
            else:
                names = [item.name for item in chosen(subject, options.level, shard, options.only)]
            names = _without(names, options.leave_out)
    except ArgumentError as error:
        print(error, file=sys.stderr)
        return 2
    log = Path(options.log) if options.log else None
    before = read_log(log)
    outcomes = {name: before[name] for name in names if name in before and before[name]["outcome"] != FAILED}
    todo = _order([name for name in names if name not in outcomes], before)
    if outcomes:
        print(f"{len(outcomes)} of {len(names)} are done already", flush=True)

    def done(outcome: Outcome) -> None:
        outcomes[outcome["name"]] = outcome
        if log is not None:
            with log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(outcome, default=str) + "\n")
        bad = outcome["outcome"] in (FAILED, SURVIVED)
        if bad or options.mutants:
            last = (outcome["message"].strip().splitlines() or [""])[-1]
            text = f"{outcome['outcome'].upper()} {outcome['name']} ({outcome['seconds']:.1f} s): {last[:300]}"
            print(text, flush=True)
        count = len(outcomes)
        if count % 100 == 0 or count == len(names):
            seconds = time.perf_counter() - start
            print(f"{count}/{len(names)}, {seconds:.0f} s: {_counts(outcomes.values())}", flush=True)

    until = None if options.time_limit is None else time.monotonic() + options.time_limit
    work = "mutants" if options.mutants else "checks"
    left = run_parallel(
        todo, (work, options.backend, options.device, options.level), jobs=options.jobs, done=done, until=until,
        hangs=options.hangs,
    )  # fmt: skip
    ordered = [outcomes[name] for name in names if name in outcomes]
    with opened(options.backend, options.device) as subject:
        report: Report = make_report(
            subject, ordered, level=options.level, shard=shard, config={}, started=started,
            seconds=time.perf_counter() - start,
        )  # fmt: skip
    if options.report:
        value = {**report, "not_run": left, "jobs": options.jobs}
        Path(options.report).parent.mkdir(parents=True, exist_ok=True)
        Path(options.report).write_text(json.dumps(value, indent=1, default=str), encoding="utf-8")
    print(f"{options.backend}, {work}: {_counts(ordered)}, {len(left)} not run, {report['seconds']:.0f} s")
    return 1 if left or any(o["outcome"] in (FAILED, SURVIVED) for o in ordered) else 0


def _counts(outcomes: Iterable[Outcome]) -> str:
    found = [outcome["outcome"] for outcome in outcomes]
    kinds = [kind for kind in (PASSED, REFUSED, FAILED, KILLED, SURVIVED) if kind in found]
    return ", ".join(f"{found.count(kind)} {kind}" for kind in kinds) or "nothing"


if __name__ == "__main__":
    sys.exit(main())
