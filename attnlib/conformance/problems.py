"""Every problem that the suite asks of a backend, found without its device: python -m attnlib.conformance.problems

    python -m attnlib.conformance.problems --backend cuda --arch sm_90 --level full > problems.json
    attnlib compile --arch sm_90 --problems problems.json

The checks run on the CPU, on a stand-in that declares and refuses what the named backend does on the architecture,
notes each problem it is asked to plan, and computes with the cpu backend; accuracy is not judged. Checks that need
a device cannot run here: what only they ask for is compiled when they run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from ..backend import Backend, BackendBase, Family, Plan, Refusal, Target, arch_matches
from ..errors import ArgumentError
from ..problem import AttentionProblem
from ..targets import parse_target
from .items import items_for
from .runner import run_item
from .subject import Subject, backend_named, opened

Problems = dict[AttentionProblem, None]  # an ordered set


class StandIn(BackendBase):
    """A backend for a device that is not here: its declarations and refusals, the cpu backend's results."""

    def __init__(self, inner: Backend, target: Target, worker: Backend) -> None:
        families = [
            Family(f.name, dataclasses.replace(f.capabilities, device_kinds=frozenset({"cpu"}), archs=()), f.note)
            for f in inner.families
            if target.kind in f.capabilities.device_kinds and arch_matches(target.arch, f.capabilities.archs)
        ]
        if not families:
            raise ArgumentError(f"--arch: {inner.name} has no family for {target.arch}")
        super().__init__(f"{inner.name}_stand_in", families[:1])
        self.inner, self.target, self.worker = inner, target, worker
        self.problems: Problems = {}
        self.test_configs = getattr(inner, "test_configs", ())

    def check(self, problem: AttentionProblem, family: str, target: Target) -> tuple[Refusal, ...]:
        return self.inner.check(problem, family, self.target)

    def size_class(self, problem: AttentionProblem, family: str, target: Target) -> Hashable:
        return self.inner.size_class(problem, family, self.target)

    def plan(
        self, problem: AttentionProblem, family: str, target: Target, config: Mapping[str, Any] | None = None
    ) -> Plan:
        self.problems[problem] = None
        return self.worker.plan(problem, self.worker.families[0].name, target)


class Unjudged(Subject):
    """A subject whose results are not compared with the oracle."""

    def check(self, inputs: Any, *, result: Any = None, **_: Any) -> Any:
        return self.run(inputs) if result is None else result


def collect(
    backend: str = "cuda",
    arch: str = "sm_90",
    level: str = "full",
    *,
    only: Sequence[str] = ("",),
    progress: Callable[[int, int], None] | None = None,
) -> list[AttentionProblem]:
    """The problems that a level of the suite asks of a backend on an architecture, each once.

    Args:
        only: those of checks whose name has one of these texts.

    Raises:
        ArgumentError: no such backend, or none of its kernels is for the architecture.
    """
    stand_in = StandIn(backend_named(backend), parse_target(arch), backend_named("cpu"))
    with opened(stand_in, "cpu") as found:
        subject = Unjudged(**{item.name: getattr(found, item.name) for item in dataclasses.fields(Subject)})
        items = [item for item in items_for(level, subject) if any(text in item.name for text in only)]
        for done, item in enumerate(items, 1):
            run_item(subject, item)
            if progress is not None:
                progress(done, len(items))
    return list(stand_in.problems)


def record(problem: AttentionProblem) -> dict[str, Any]:
    """A problem for JSON, in the form that `attnlib compile --problems` reads."""
    values = {item.name: getattr(problem, item.name) for item in dataclasses.fields(problem)}
    return {
        name: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
        for name, value in values.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m attnlib.conformance.problems", description=__doc__.split("\n")[0])
    parser.add_argument("--backend", default="cuda", help="whose problems (default cuda)")
    parser.add_argument("--arch", default="sm_90", help="the architecture it would run on (default sm_90)")
    parser.add_argument("--level", choices=("core", "full"), default="full")
    options = parser.parse_args(arguments)

    def show(done: int, total: int) -> None:
        if sys.stderr.isatty() or done % 100 == 0 or done == total:
            print(f"\r{done}/{total} checks", end="" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)

    try:
        problems = collect(options.backend, options.arch, options.level, progress=show)
    except ArgumentError as error:
        print(error, file=sys.stderr)
        return 2
    print("[\n" + ",\n".join(json.dumps(record(problem)) for problem in problems) + "\n]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
