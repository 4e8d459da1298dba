"""What a call costs before and after its kernel: python -m benchmarks.overhead [--device cuda]

A backend whose kernels do nothing is registered, and attention over one query and one key is timed on it, so that
what remains is attnlib's own work: checks, dispatch, allocation, torch's operator and autograd. On the CPU a tiny
problem follows with its kernel, which is to take no longer than torch's: SMALL, on one thread. What counts is the
time that the thread has a processor, in many short rounds, so that other processes cost little. The median of the
rounds, which is held against the budget, and the least go into benchmarks/results/overhead.json, beside the same calls
of torch's own attention and beside calls that say how fast the machine was. With --device cuda the tensors are a
GPU's, and the calls of the cuda backend, its launches included, follow; the file is overhead-cuda.json.
"""

from __future__ import annotations

import argparse
import functools
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
# Microseconds that a call may take on the host without its kernel and that one's launch; other calls are reported only.
BUDGETS: Mapping[str, float] = {
    "dispatch, cached": 2.0,
    "forward, no gradient": 15.0,
    "forward, with gradient": 25.0,
}
SMALL = (1, 16, 4, 64)  # batch, tokens, heads, head_dim; on the cpu backend, with its kernel
NO_LATER_THAN_TORCH = frozenset({"16 tokens, no gradient"})


class NoopPlan:
    """Kernels that leave everything as they find it."""

    def forward(self, problem: AttentionProblem, tensors: Tensors) -> None:
        pass

    def backward(self, problem: AttentionProblem, tensors: Tensors) -> None:
        pass


class NoopBackend(BackendBase):
    """Takes everything and computes nothing."""

    def __init__(self) -> None:
        capabilities = Capabilities(device_kinds=frozenset({"cpu", "cuda"}), dtypes=frozenset(DTYPES))
        super().__init__(NAME, (Family("", capabilities),))

    def plan(
        self, problem: AttentionProblem, family: str, target: Target, config: Mapping[str, Any] | None = None
    ) -> NoopPlan:
        return NoopPlan()


def calls(device: str = "cpu") -> dict[str, tuple[Callable[[], Any], Callable[[], Any] | None]]:
    """By name: what attnlib does, and the same of torch where there is such a thing."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = (torch.randn(1, 1, 1, 8, device=device, dtype=dtype) for _ in range(3))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    dout = torch.ones_like(q)
    problem = problem_of(q, k, v)
    target = dispatch.target_of(q.device)
    sdpa: Callable[..., Any] = torch.nn.functional.scaled_dot_product_attention

    def both(attend: Callable[..., Any]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(attend(*leaves), leaves, dout)

    def named(backend: str) -> dict[str, tuple[Callable[[], Any], Callable[[], Any] | None]]:
        attend = functools.partial(attnlib.attention, backend=backend)
        return {
            "forward, no gradient": (lambda: attend(q, k, v), lambda: sdpa(q, k, v)),
            "forward, with gradient": (lambda: attend(*leaves), lambda: sdpa(*leaves)),
            "forward and backward": (both(attend), both(sdpa)),
        }

    found = {"dispatch, cached": (lambda: dispatch.select(problem, target, NAME), None), **named(NAME)}
    if device == "cpu":
        small = [torch.randn(SMALL) for _ in range(3)]
        recorded = [x.clone().requires_grad_() for x in small]

        def with_kernel(operands: Sequence[torch.Tensor]) -> tuple[Callable[[], Any], Callable[[], Any]]:
            heads_first = [x.transpose(1, 2) for x in operands]
            return lambda: attnlib.attention(*operands, backend="cpu"), lambda: sdpa(*heads_first)

        found["16 tokens, no gradient"] = with_kernel(small)
        found["16 tokens, with gradient"] = with_kernel(recorded)
    if device == "cuda":
        found |= {f"{name}, launched": pair for name, pair in named("cuda").items()}
    return found


def microseconds(call: Callable[[], Any], count: int) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # so that the queue of launches never fills
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


def measure(rounds: int, count: int, device: str = "cpu") -> tuple[list[dict[str, Any]], dict[str, dict[str, float]]]:
    """One record per kind of call, and the yardstick; rounds are interleaved."""
    pairs = calls(device)
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
        row: dict[str, Any] = {"call": name, "budget_us": BUDGETS.get(name)}
        for owner in ("attnlib", "torch"):
            figures = found.get((name, owner), {"us": None, "least_us": None})
            row |= {f"{owner}_{statistic}": value for statistic, value in figures.items()}
        rows.append(row)
    return rows, {name: figures for (name, owner), figures in found.items() if owner == "yardstick"}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.overhead", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=201, help="interleaved rounds (default 201)")
    parser.add_argument("--count", type=int, default=100, help="calls per sample (default 100)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--output", metavar="DIR", help="where the file goes instead of benchmarks/results")
    parser.add_argument("--dry", action="store_true", help="print, and write no file")
    options = parser.parse_args(arguments)
    attnlib.register_backend(NoopBackend())
    torch.set_num_threads(1)  # nothing here is worth a second
    rows, speed = measure(options.rounds, options.count, options.device)
    over = False
    for row in rows:
        budget = row["torch_us"] if row["call"] in NO_LATER_THAN_TORCH else row["budget_us"]
        late = budget is not None and row["attnlib_us"] > budget
        over = over or late
        theirs = "" if row["torch_us"] is None else f"; torch {row['torch_us']:.1f}, least {row['torch_least_us']:.1f}"
        allowed = "" if budget is None else f"; budget {budget:.0f}{', OVER' if late else ''}"
        print(f"{row['call']:<32} {row['attnlib_us']:7.2f} us, least {row['attnlib_least_us']:7.2f}{theirs}{allowed}")
    for name, figures in speed.items():
        print(f"{name:<32} {figures['us']:7.2f} us, least {figures['least_us']:7.2f}")
    if not options.dry:
        name = "overhead" if options.device == "cpu" else f"overhead-{options.device}"
        value = {"benchmark": name, **record.origin(torch.device(options.device)), "rounds": options.rounds,
                 "yardstick": speed, "results": rows}  # fmt: skip
        print(record.write_to(Path(options.output or record.RESULTS) / f"{name}.json", value))
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
