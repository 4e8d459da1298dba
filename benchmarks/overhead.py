"""What a call costs before and after its kernel: python -m benchmarks.overhead

A backend whose kernels do nothing is registered, and attention over one query and one key is timed on it, so that
what remains is attnlib's own work: checks, dispatch, allocation, torch's operator and autograd. The median of the
rounds goes into benchmarks/results/overhead.json, beside the same calls of torch's own attention.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import timeit
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import attnlib
from attnlib import dispatch
from attnlib.backend import BackendBase, Capabilities, Family, Target
from attnlib.inspection import problem_of
from attnlib.problem import DTYPES, AttentionProblem, Tensors

from . import record

NAME = "noop"
# Microseconds that a call may take on the host, kernel excluded; None: reported only.
BUDGETS: Mapping[str, float | None] = {
    "dispatch, cached": 2.0,
    "forward, no gradient": 15.0,
    "forward, with gradient": 25.0,
    "forward and backward": None,
}


class NoopPlan:
    """Kernels that leave everything as they find it."""

    def forward(self, problem: AttentionProblem, tensors: Tensors) -> None:
        pass

    def backward(self, problem: AttentionProblem, tensors: Tensors) -> None:
        pass

    def describe(self) -> Mapping[str, Any]:
        return {}


class NoopBackend(BackendBase):
    """Takes everything on the CPU and computes nothing."""

    def __init__(self) -> None:
        capabilities = Capabilities(device_kinds=frozenset({"cpu"}), dtypes=frozenset(DTYPES))
        super().__init__(NAME, (Family("", capabilities),))

    def plan(
        self, problem: AttentionProblem, family: str, target: Target, config: Mapping[str, Any] | None = None
    ) -> NoopPlan:
        return NoopPlan()


def calls() -> dict[str, tuple[Callable[[], Any], Callable[[], Any] | None]]:
    """By name: what attnlib does, and the same of torch where there is such a thing."""
    q, k, v = (torch.randn(1, 1, 1, 8) for _ in range(3))
    gq, gk, gv = (x.clone().requires_grad_() for x in (q, k, v))
    dout = torch.ones(1, 1, 1, 8)
    problem = problem_of(q, k, v)
    target = dispatch.target_of(torch.device("cpu"))
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def both() -> Any:
        return torch.autograd.grad(attnlib.attention(gq, gk, gv, backend=NAME), (gq, gk, gv), dout)

    def torch_both() -> Any:
        return torch.autograd.grad(sdpa(gq, gk, gv), (gq, gk, gv), dout)

    return {
        "dispatch, cached": (lambda: dispatch.select(problem, target, NAME), None),
        "forward, no gradient": (lambda: attnlib.attention(q, k, v, backend=NAME), lambda: sdpa(q, k, v)),
        "forward, with gradient": (
            lambda: attnlib.attention(gq, gk, gv, backend=NAME),
            lambda: sdpa(gq, gk, gv),
        ),
        "forward and backward": (both, torch_both),
    }


def microseconds(call: Callable[[], Any], count: int) -> float:
    return timeit.timeit(call, number=count) / count * 1e6


def measure(rounds: int, count: int) -> list[dict[str, Any]]:
    """One record per kind of call; rounds are interleaved."""
    todo = calls()
    samples: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds + 1):
        for name, pair in todo.items():
            for owner, call in zip(("attnlib", "torch"), pair):
                if call is not None:
                    samples.setdefault((name, owner), []).append(microseconds(call, count))
    found = []
    for name in todo:
        mine, theirs = samples[name, "attnlib"][1:], samples.get((name, "torch"), [])[1:]  # the first one warms up
        found.append(
            {
                "call": name,
                "attnlib_us": round(statistics.median(mine), 2),
                "torch_us": round(statistics.median(theirs), 2) if theirs else None,
                "budget_us": BUDGETS[name],
            }
        )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.overhead", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds (default 9)")
    parser.add_argument("--count", type=int, default=2000, help="calls per sample (default 2000)")
    parser.add_argument("--dry", action="store_true", help="print, and write no file")
    options = parser.parse_args(arguments)
    attnlib.register_backend(NoopBackend())
    found = measure(options.rounds, options.count)
    over = False
    for row in found:
        late = row["budget_us"] is not None and row["attnlib_us"] > row["budget_us"]
        over = over or late
        theirs = "" if row["torch_us"] is None else f", torch {row['torch_us']:.1f} us"
        budget = "" if row["budget_us"] is None else f", budget {row['budget_us']:.0f} us"
        print(f"{row['call']:<24} {row['attnlib_us']:7.2f} us{theirs}{budget}{'  OVER' if late else ''}")
    if not options.dry:
        value = {"benchmark": "overhead", **record.origin(torch.device("cpu")), "rounds": options.rounds,
                 "results": found}  # fmt: skip
        print(Path(record.write("overhead", value)).relative_to(record.ROOT))
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
