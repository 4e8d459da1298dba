"""One direction of one call, from operands to results: check, choose, allocate, run the plan."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import dispatch, registry, settings, settle
from .arguments import bind, check, check_growing
from .backend import Plan
from .memory import allocate, poison
from .operands import Operands, Scalars
from .problem import AttentionProblem, Tensors


def prepare(operands: Operands, scalars: Scalars, spec: str) -> tuple[AttentionProblem, Plan | None, str]:
    """Check the call and find its plan; the second call of the same shapes is one dictionary look-up.

    The plan is None where there is nothing for a kernel to do: no query, no key or no head.
    """
    q, k, v = operands[:3]
    k_new: Any = operands.k_new
    v_new: Any = operands.v_new
    key = (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
        q.device, k.device, v.device, (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15,
        *[None if t is None else (t.shape, t.dtype, t.device, t.layout) for t in operands[3:]],
        k_new if k_new is None else (k_new.stride(), v_new.stride(), (k_new.data_ptr() | v_new.data_ptr()) & 15),
        scalars, spec, registry.generation,
    )  # fmt: skip
    found = dispatch.ready.get(key)
    if found is None:
        problem = check(operands, scalars)
        if problem.head_dim_v == 0:  # an empty out, but an lse: run with values of zeros
            problem = dataclasses.replace(problem, head_dim_v=problem.head_dim, aligned=False)
        target = dispatch.target_of(q.device)
        if 0 in (
            problem.batch,
            problem.num_heads_q,
            problem.seqlen_q,
            problem.seqlen_k,
            problem.total_q,
            problem.total_k,
        ):
            found = (problem, None, dispatch.choose(problem, target, spec).name)
        else:
            with _on(q.device):
                name, plan = dispatch.plan_for(problem, target, spec)
            found = (problem, plan, name)
        dispatch.ready.put(key, found)
    return found


@contextlib.contextmanager
def _environment(device: torch.device) -> Iterator[None]:
    with _on(device), torch.autocast(device.type, enabled=False):
        yield


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make device torch's current one, where that is a notion."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return contextlib.nullcontext()


def _run(step: Callable[[AttentionProblem, Tensors], None], problem: AttentionProblem, tensors: Tensors) -> None:
    """Run one direction of a plan with its device current and autocast off."""
    device = tensors.q.device
    if torch.is_autocast_enabled(device.type) or (
        device.type == "cuda" and device.index != torch.cuda.current_device()
    ):
        with _environment(device):
            step(problem, tensors)
    else:
        step(problem, tensors)


def run_forward(
    operands: Operands, scalars: Scalars, spec: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, str]:
    """out, lse, stats (None where backward does not need them) and the full name of what ran."""
    problem, plan, name = prepare(operands, scalars, spec)
    if operands.k_new is not None:
        operands = check_growing(operands)
    tensors = bind(operands, problem)
    q = tensors.q
    if problem.head_dim_v == problem.head_dim:
        tensors.out = torch.empty_like(q, memory_format=torch.contiguous_format)
    else:
        tensors.out = q.new_empty((*q.shape[:-1], problem.head_dim_v))
    tensors.lse = q.new_empty(lse_shape(problem), dtype=problem.accumulate_dtype)
    if problem.needs_stats:
        tensors.stats = q.new_empty((2, *lse_shape(problem)), dtype=problem.accumulate_dtype)
    if settings.current().debug:
        poison(tensors.out, tensors.lse, *(() if tensors.stats is None else (tensors.stats,)))
    if plan is None:
        settle.forward(problem, tensors)
    else:
        _run(plan.forward, problem, tensors)
    if problem.append:
        _write_back(operands, tensors)
    _after(problem, tensors, name)
    out = tensors.out if operands.v.shape[-1] else tensors.out[..., :0].contiguous()
    return out, tensors.lse, tensors.stats, name


def run_reference(operands: Operands, scalars: Scalars, spec: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    """out and lse as plain differentiable torch, if the reference is what dispatch chooses; else None."""
    from . import reference

    problem = check(operands, scalars)
    if dispatch.choose(problem, dispatch.target_of(operands.q.device), spec).name != "reference":
        return None
    return reference.attention(problem, bind(operands, problem))


def run_backward(
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    stats: torch.Tensor | None,
    operands: Operands,
    scalars: Scalars,
    spec: str,
) -> tuple[torch.Tensor | None, ...]:
    """dq, dk, dv, dbias, dsinks of one call; None where not asked for."""
    problem, plan, name = prepare(operands, scalars, spec)
    tensors = bind(operands, problem, dout=_dense_dout(dout, out, operands, problem))
    device, wanted = out.device, problem.grads
    tensors.out = out.contiguous() if operands.v.shape[-1] else torch.zeros_like(tensors.q)
    tensors.lse = lse.contiguous()
    tensors.stats = stats.contiguous() if problem.needs_stats and stats is not None else None
    tensors.dlse = None if dlse is None else dlse.contiguous()
    for grad in ("q", "k", "v"):
        if grad in wanted:
            operand = getattr(tensors, grad)
            setattr(tensors, f"d{grad}", allocate(operand.shape, operand.dtype, device))
    dbias = dsinks = None
    if "bias" in wanted and operands.bias is not None:
        dbias = torch.zeros(operands.bias.shape, dtype=problem.accumulate_dtype, device=device)
        tensors.dbias = dbias.expand(problem.batch, problem.num_heads_q, problem.seqlen_q, problem.seqlen_k)
    if "sinks" in wanted and operands.sinks is not None:
        dsinks = tensors.dsinks = torch.zeros(operands.sinks.shape, dtype=problem.accumulate_dtype, device=device)
    if plan is None:
        settle.backward(problem, tensors)
    else:
        _run(plan.backward, problem, tensors)
    _after(problem, None, name)
    if dbias is not None and operands.bias is not None:
        dbias = dbias.to(operands.bias.dtype)
    if dsinks is not None and operands.sinks is not None:
        dsinks = dsinks.to(operands.sinks.dtype)
    dv = tensors.dv
    if dv is not None and not operands.v.shape[-1]:
        dv = dv[..., :0].contiguous()
    return tensors.dq, tensors.dk, dv, dbias, dsinks


def _dense_dout(
    dout: torch.Tensor | None, out: torch.Tensor, operands: Operands, problem: AttentionProblem
) -> torch.Tensor:
    if dout is None or not operands.v.shape[-1]:
        return torch.zeros((), dtype=out.dtype, device=out.device).expand(*out.shape[:-1], problem.head_dim_v)
    return dout


def lse_shape(problem: AttentionProblem) -> tuple[int, ...]:
    if problem.packed:
        return (problem.num_heads_q, problem.total_q)
    return (problem.batch, problem.num_heads_q, problem.seqlen_q)


def _write_back(operands: Operands, tensors: Tensors) -> None:
    """A cache whose innermost stride is not 1 was worked on as a copy."""
    for given, used in ((operands.k, tensors.k), (operands.v, tensors.v)):
        if used.data_ptr() != given.data_ptr():
            given.copy_(used)


_dice = random.Random()  # its own, so that shadow checks leave the user's generators alone


def _after(problem: AttentionProblem, tensors: Tensors | None, name: str) -> None:
    debug = settings.current()
    if not debug.debug and not debug.shadow:
        return
    if "sync" in debug.debug and torch.cuda.is_initialized():
        torch.cuda.synchronize(None if tensors is None or not tensors.q.is_cuda else tensors.q.device)
    if tensors is not None and _dice.random() < debug.shadow:
        from .numerics import check_forward

        check_forward(problem, tensors, name)
