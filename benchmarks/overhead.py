"""What a call costs before and after its kernel: python -m benchmarks.overhead

A backend whose kernels do nothing is registered, and attention over one query and one key is timed on it, so that
what remains is attnlib's own work: checks, dispatch, allocation, torch's operator and autograd. What counts is the
time that the thread has a processor, in many short rounds, so that other processes cost little. The median of the
rounds, which is held against the budget, and the least go into benchmarks/results/overhead.json, beside the same calls
of torch's own attention and beside calls that say how fast the machine was.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
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
    return timeit.timeit(call, number=count, timer=time.thread_time) / count * 1e6


def yardstick() -> dict[str, Callable[[], Any]]:
    """What says how fast the machine is while it measures."""
    x = torch.randn(1, 1, 1, 8)

    def nothing() -> None:
        pass

    def ten_calls() -> None:
        for _ in range(10):
            nothing()

    return {"ten function calls": ten_calls, "torch.empty_like": lambda: torch.empty_like(x)}


def measure(rounds: int, count: int) -> tuple[list[dict[str, Any]], dict[str, dict[str, float]]]:
    """One record per kind of call, and the yardstick; rounds are interleaved."""
    pairs = calls()
    todo = {(name, owner): call for name, pair in pairs.items() for owner, call in zip(("attnlib", "torch"), pair)}
    todo |= {(name, "yardstick"): call for name, call in yardstick().items()}
    samples: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds + 1):
        for key, call in todo.items():
            if call is not None:
                samples.setdefault(key, []).append(microseconds(call, count))
    found = {  # the first round warms up
        key: {"us": round(statistics.median(values[1:]), 2), "least_us": round(min(values[1:]), 2)}
        for key, values in samples.items()
    }
    rows = []
    for name in pairs:
        row: dict[str, Any] = {"call": name, "budget_us": BUDGETS[name]}
        for owner in ("attnlib", "torch"):
            figures = found.get((name, owner), {"us": None, "least_us": None})
            row |= {f"{owner}_{statistic}": value for statistic, value in figures.items()}
        rows.append(row)
    return rows, {name: figures for (name, owner), figures in found.items() if owner == "yardstick"}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.overhead", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=201, help="interleaved rounds (default 201)")
    parser.add_argument("--count", type=int, default=100, help="calls per sample (default 100)")
    parser.add_argument("--dry", action="store_true", help="print, and write no file")
    options = parser.parse_args(arguments)
    attnlib.register_backend(NoopBackend())
    rows, speed = measure(options.rounds, options.count)
    over = False
    for row in rows:
        late = row["budget_us"] is not None and row["attnlib_us"] > row["budget_us"]
        over = over or late
        theirs = "" if row["torch_us"] is None else f"; torch {row['torch_us']:.1f}, least {row['torch_least_us']:.1f}"
        budget = "" if row["budget_us"] is None else f"; budget {row['budget_us']:.0f}{', OVER' if late else ''}"
        print(f"{row['call']:<24} {row['attnlib_us']:7.2f} us, least {row['attnlib_least_us']:7.2f}{theirs}{budget}")
    for name, figures in speed.items():
        print(f"{name:<24} {figures['us']:7.2f} us, least {figures['least_us']:7.2f}")
    if not options.dry:
        value = {"benchmark": "overhead", **record.origin(torch.device("cpu")), "rounds": options.rounds,
                 "yardstick": speed, "results": rows}  # fmt: skip
        print(Path(record.write("overhead", value)).relative_to(record.ROOT))
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
