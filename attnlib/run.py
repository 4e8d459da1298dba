"""One direction of one call, from operands to results: check, choose, allocate, run the plan."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from . import dispatch, registry, settings, settle
from .arguments import bind, bind_dout, check, check_growing, is_canonical
from .backend import Plan
from .memory import allocate_like, poison
from .operands import Operands, Scalars
from .problem import AttentionProblem, Tensors

_NOTHING = frozenset({None})


Layout = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides


class Prepared(NamedTuple):
    """All that shapes, strides, dtypes, devices and numbers decide of a call, found when such a call comes first."""

    problem: AttentionProblem
    plan: Plan
    name: str  # of the backend and family
    pinned: str  # the spec that names them, for backward
    device: torch.device
    gpu: int | None  # to be made the current one
    in_memory: bool  # no negative view, and nothing without an address: a symbolic zero, or what was freed
    as_is: bool  # q, k and v are canonical as they come, and there is no other operand
    out: Layout
    lse: Layout
    lse_dtype: torch.dtype

    def allocate(self) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse; empty_strided is the quickest of torch's ways."""
        return (
            torch.empty_strided(*self.out, dtype=self.problem.dtype, device=self.device),
            torch.empty_strided(*self.lse, dtype=self.lse_dtype, device=self.device),
        )


def prepare(operands: Operands, scalars: Scalars, spec: str) -> Prepared:
    """Check the call and find its plan; the second call of the same form is one dictionary look-up."""
    q, k, v = operands[:3]
    extras = operands[3:]
    alone = _NOTHING.issuperset(extras)
    key = (
        *_form(q), *_form(k), *_form(v), None if alone else tuple(map(_form, extras)), scalars, spec,
        registry.generation,
    )  # fmt: skip
    found = dispatch.ready.get(key)
    if found is None:
        found = _prepare(operands, scalars, spec)
        if dispatch.settled(found.problem, dispatch.target_of(q.device), spec):
            dispatch.ready.put(key, found)
    return found


def _form(tensor: torch.Tensor | None) -> tuple[Hashable, ...]:
    """All of a tensor but its values. Raises RuntimeError for one that is no dense block of memory."""
    if tensor is None:
        return ()
    address = tensor.data_ptr()
    return (
        tensor.shape, tensor.stride(), tensor.dtype, tensor.device, address & 15 if address else None, tensor.is_neg(),
    )  # fmt: skip


def _prepare(operands: Operands, scalars: Scalars, spec: str) -> Prepared:
    problem = check(operands, scalars)
    if problem.head_dim_v == 0:  # an empty out, but an lse: run with values of zeros
        problem = dataclasses.replace(problem, head_dim_v=problem.head_dim, aligned=False)
    q, v = operands.q, operands.v
    device = q.device
    target = dispatch.target_of(device)
    sizes = (
        problem.batch, problem.num_heads_q, problem.seqlen_q, problem.seqlen_k, problem.total_q, problem.total_k,
    )  # fmt: skip
    plan: Plan
    if 0 in sizes:
        name, plan = dispatch.choose(problem, target, spec).name, settle
    else:
        with _on(device):
            name, plan = dispatch.plan_for(problem, target, spec)
    return Prepared(
        problem,
        plan,
        name,
        dispatch.pinned(spec, name),
        device,
        device.index if device.type == "cuda" else None,
        all(t is None or (t.data_ptr() and not t.is_neg()) for t in operands),
        v.shape[-1] == problem.head_dim_v and is_canonical(operands),
        _contiguous((*q.shape[:-1], problem.head_dim_v)),
        _contiguous(problem.lse_shape),
        problem.accumulate_dtype,
    )


def _contiguous(shape: tuple[int, ...]) -> Layout:
    return shape, torch.empty(shape, device="meta").stride()


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make device torch's current one, where that is a notion."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return contextlib.nullcontext()


def _run(step: Callable[[AttentionProblem, Tensors], None], call: Prepared, tensors: Tensors) -> None:
    """Run one direction of a plan with its device current and autocast off."""
    if torch._C._is_any_autocast_enabled() or (call.gpu is not None and call.gpu != torch.cuda.current_device()):
        with _on(call.device), torch.autocast(call.device.type, enabled=False):
            step(call.problem, tensors)
    else:
        step(call.problem, tensors)


def run_forward(call: Prepared, operands: Operands) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """out, lse and stats (None where backward does not need them)."""
    problem, debug = call.problem, settings.current()
    if call.as_is:
        tensors = Tensors(operands.q, operands.k, operands.v, *call.allocate())
    else:
        if problem.append:
            operands = check_growing(operands)
        tensors = bind(operands, problem)
        tensors.out, tensors.lse = call.allocate()
        if problem.needs_stats:
            tensors.stats = tensors.lse.new_empty((2, *tensors.lse.shape))
    if debug.debug:
        poison(tensors.out, tensors.lse, tensors.stats)
    _run(call.plan.forward, call, tensors)
    if problem.append:
        _write_back(operands, tensors)
    if debug.debug or debug.shadow:
        _after(call, tensors, debug.shadow)
    if call.as_is or operands.v.shape[-1]:
        return tensors.out, tensors.lse, tensors.stats
    return tensors.out[..., :0].contiguous(), tensors.lse, tensors.stats


def run_reference(operands: Operands, scalars: Scalars, spec: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    """out and lse as plain differentiable torch, if the reference is what dispatch chooses; else None."""
    from . import reference

    problem = check(operands, scalars)
    if dispatch.choose(problem, dispatch.target_of(operands.q.device), spec).name != "reference":
        return None
    return reference.attention(problem, bind(operands, problem))


def run_backward(
    call: Prepared,
    operands: Operands,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    stats: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """dq, dk, dv, dbias, dsinks of one call; None where not asked for."""
    problem, debug = call.problem, settings.current()
    if call.as_is:
        tensors = Tensors(operands.q, operands.k, operands.v, out.contiguous(), lse.contiguous())
    else:
        tensors = bind(operands, problem)
        tensors.out = out.contiguous() if operands.v.shape[-1] else torch.zeros_like(tensors.q)
        tensors.lse = lse.contiguous()
        tensors.stats = stats.contiguous() if problem.needs_stats and stats is not None else None
    if dout is None or not out.shape[-1]:
        dout = tensors.out.new_zeros(()).expand_as(tensors.out)
    tensors.dout = bind_dout(dout, problem)
    tensors.dlse = None if dlse is None else dlse.contiguous()
    if "q" in problem.grads:
        tensors.dq = allocate_like(tensors.q)
    if "k" in problem.grads:
        tensors.dk = allocate_like(tensors.k)
    if "v" in problem.grads:
        tensors.dv = allocate_like(tensors.v)
    dbias = dsinks = None
    if "bias" in problem.grads:
        dbias = _zeros_like(operands.bias, problem)
        tensors.dbias = dbias.expand(problem.batch, problem.num_heads_q, problem.seqlen_q, problem.seqlen_k)
    if "sinks" in problem.grads:
        dsinks = tensors.dsinks = _zeros_like(operands.sinks, problem)
    _run(call.plan.backward, call, tensors)
    if debug.debug:
        _after(call, tensors)
    dv = tensors.dv
    if dv is not None and not out.shape[-1]:
        dv = dv[..., :0].contiguous()
    return (
        tensors.dq, tensors.dk, dv, None if dbias is None else dbias.to(problem.bias),
        None if dsinks is None else dsinks.to(problem.sinks),
    )  # fmt: skip


def _zeros_like(operand: Any, problem: AttentionProblem) -> torch.Tensor:
    return torch.zeros(operand.shape, dtype=problem.accumulate_dtype, device=operand.device)


def _write_back(operands: Operands, tensors: Tensors) -> None:
    """A cache whose innermost stride is not 1 was worked on as a copy."""
    for given, used in ((operands.k, tensors.k), (operands.v, tensors.v)):
        if used.data_ptr() != given.data_ptr():
            given.copy_(used)


_dice = random.Random()  # its own, so that shadow checks leave the user's generators alone


def _after(call: Prepared, tensors: Tensors, shadow: float = 0.0) -> None:
    """What ATTNLIB_DEBUG asks for behind a run; shadow is the share of forward runs to check."""
    if call.gpu is not None and "sync" in settings.current().debug:
        torch.cuda.synchronize(call.gpu)
    if _dice.random() < shadow:
        from .numerics import check_forward

        check_forward(call.problem, tensors, call.name)
