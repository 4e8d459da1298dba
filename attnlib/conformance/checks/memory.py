"""poison/*, repeatable/*, deterministic/*, canary/*: memory that nobody may read or write, and repeatability.

Outputs are filled with NaN before every launch while the suite runs. Here the inputs' surroundings change as well:
padding rows, unused slots, pages before the window and pages of nobody hold NaN, infinities or large numbers, and no
result may change by a bit.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import torch

from ... import dispatch
from ...numerics import Result
from ...problem import Feature, Tensors
from ..cases import Case, named
from ..items import Item, add, check
from ..recipes import make
from ..subject import Subject, require, same_bits

QUANTITIES = ("out", "lse", "dq", "dk", "dv", "dbias", "dsinks")


def same_results(what: str, got: Result, want: Result) -> None:
    for name in QUANTITIES:
        first, second = getattr(got, name), getattr(want, name)
        if first is not None and second is not None:
            same_bits(f"{name} {what}", first, second)


def poison(case: Case, direction: str, subject: Subject) -> None:
    """The same results to the bit, whatever lies where nobody may read."""
    if direction == "backward" and Feature.DETERMINISTIC in subject.capabilities.features:
        case = replace(case, deterministic=True)
    elif direction == "backward":  # gradients may differ from run to run; those beside NaN are judged with the cases
        direction = "forward"
    results = [
        subject.run(make(case, subject.dtype, subject.device, direction=direction, fill=fill))
        for fill in (0.0, math.nan, math.inf, 3e4)
    ]
    for fill, result in zip(("NaN", "infinity", "30000"), results[1:], strict=True):
        same_results(f"with {fill} instead of 0 around it", result, results[0])


def repeatable(case: Case, subject: Subject) -> None:
    """The same call gives the same bits."""
    first, *others = [subject.run(make(case, subject.dtype, subject.device)) for _ in range(4)]
    for other in others:
        same_results("of another run", other, first)


def deterministic(case: Case, subject: Subject) -> None:
    """deterministic=True: backward gives the same bits, on one CPU thread as on many."""
    case = replace(case, deterministic=True)
    threads = torch.get_num_threads()
    first = subject.run(make(case, subject.dtype, subject.device, direction="backward"))
    try:
        for count in (threads, 1, 2, threads, threads):
            torch.set_num_threads(count)
            again = subject.run(make(case, subject.dtype, subject.device, direction="backward"))
            same_results(f"of another run on {count} threads", again, first)
    finally:
        torch.set_num_threads(threads)


def canary(case: Case, subject: Subject) -> None:
    """A plan writes all of its outputs and nothing beside them; run directly, with guard elements around each."""
    inputs = make(case, subject.dtype, subject.device, direction=case.directions[-1])
    problem = inputs.problem()
    subject.run(inputs)  # refusals, and a result of the public function
    inputs = make(case, subject.dtype, subject.device, direction=case.directions[-1])
    tensors = inputs.tensors(problem)
    guards: list[tuple[str, torch.Tensor]] = []

    def output(name: str, shape: Any, dtype: torch.dtype, start: float = math.nan) -> torch.Tensor:
        size = math.prod(shape)
        whole = torch.full((size + 128,), -77.0, dtype=dtype, device=subject.device)
        guards.append((name, whole))
        return whole[64 : 64 + size].fill_(start).view(tuple(shape))

    tensors.out = output("out", (*tensors.q.shape[:-1], problem.head_dim_v), problem.dtype)
    tensors.lse = output("lse", problem.lse_shape, problem.accumulate_dtype)
    if problem.needs_stats:
        tensors.stats = output("stats", (2, *problem.lse_shape), problem.accumulate_dtype)
    _, plan = dispatch.plan_for(problem, subject.target, subject.name)
    plan.forward(problem, tensors)
    if problem.grads:
        _backward(plan, problem, tensors, inputs.bias_shape, output)
    for name, whole in guards:
        require(whole[:64] == -77.0, f"{name}: memory before it was written")
        require(whole[-64:] == -77.0, f"{name}: memory after it was written")
    for name in ("out", "dq", "dk", "dv"):
        tensor = getattr(tensors, name)
        require(tensor is None or not torch.isnan(tensor).any(), f"{name}: elements were not written")
    require(~torch.isnan(tensors.lse), "lse: elements were not written")


def _backward(plan: Any, problem: Any, tensors: Tensors, bias_shape: Any, output: Any) -> None:
    for name in ("q", "k", "v"):
        setattr(tensors, f"d{name}", output(f"d{name}", getattr(tensors, name).shape, problem.dtype))
    if "bias" in problem.grads:
        full = (problem.batch, problem.num_heads_q, problem.seqlen_q, problem.seqlen_k)
        tensors.dbias = output("dbias", bias_shape, problem.accumulate_dtype, 0.0).expand(full)
    if "sinks" in problem.grads:
        tensors.dsinks = output("dsinks", (problem.num_heads_q,), problem.accumulate_dtype, 0.0)
    plan.backward(problem, tensors)


def _register() -> None:
    for name in (
        "lengths", "varlen", "everything-lengths", "everything-packed", "packed-paged", "sinks-lengths-causal",
        "packed-window",
    ):  # fmt: skip
        case = named("varlen-paged" if name == "packed-paged" else name)
        add(Item(f"poison/{name}", functools.partial(poison, case, "backward")))
    for name in ("cache", "paged", "append", "decode-paged", "decode-paged-window-sinks", "prefill-append-q_lens"):
        add(Item(f"poison/{name}", functools.partial(poison, named(name), "forward")))
    for name in ("plain", "gqa", "varlen", "everything", "decode-paged", "long"):
        add(Item(f"repeatable/{name}", functools.partial(repeatable, named(name))))
    for name in ("plain", "causal", "gqa", "window", "varlen", "everything", "bias-shared-by-many", "head_dim-128-96"):
        add(Item(f"deterministic/{name}", functools.partial(deterministic, named(name))))
    for name in (
        "plain", "size-127x63-causal", "size-1x129", "varlen", "lengths", "everything", "paged", "decode-paged",
        "head_dim-40", "multi_query",
    ):  # fmt: skip
        add(Item(f"canary/{name}", functools.partial(canary, named(name))))


_register()


@check("memory/fresh_outputs")
def fresh_outputs(subject: Subject) -> None:
    """out and lse are new memory: the next call leaves the last one's results alone, and inputs stay as they were."""
    q, k, v = (subject.randn(2, 70, 2, 32, seed=s) for s in range(3))
    kept = [x.clone() for x in (q, k, v)]
    out, lse = subject.attention(q, k, v)
    before = out.clone(), lse.clone()
    subject.attention(v, k, q)
    same_bits("out after another call", out, before[0])
    same_bits("lse after another call", lse, before[1])
    for name, tensor, want in zip("qkv", (q, k, v), kept, strict=True):
        same_bits(f"{name} after a call", tensor, want)
