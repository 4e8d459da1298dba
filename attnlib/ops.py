"""The torch operators behind the public functions: schemas, fake kernels, autograd and vmap.

attnlib::forward and attnlib::backward are opaque to torch.compile; checking, dispatch and plans live inside them.
attnlib::append_forward is forward for a cache that grows; it declares the caches as mutated. Plain tensors that
nothing watches skip the dispatcher, which costs more than a small problem's kernel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, get_type_hints

import torch
from torch._C import (
    _are_functorch_transforms_active,
    _get_tracing_state,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)  # fmt: skip
from torch._C._autograd import _profiler_enabled
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.compiler import is_compiling

from . import dispatch
from .arguments import check_devices, check_memory
from .errors import ArgumentError, UnsupportedError
from .operands import DIFFERENTIABLE, NUM_COMMON, PLAIN, Operands, Scalars, differentiable, grads_of
from .run import Prepared, prepare, run_backward, run_forward

_TYPES = {bool: "bool", float: "float", int: "SymInt"}
_COMMON = ", ".join(f"Tensor? {name}" for name in Operands._fields[3:NUM_COMMON])
_SCALARS = ", ".join(
    f"{'int' if name == 'grads' else _TYPES[kind]} {name}" for name, kind in get_type_hints(Scalars).items()
)
_ARGUMENTS = f"{_COMMON}, {_SCALARS}, str backend"

library = torch.library.Library("attnlib", "DEF")
library.define(f"forward(Tensor q, Tensor k, Tensor v, {_ARGUMENTS}) -> (Tensor out, Tensor lse, Tensor stats)")
library.define(
    f"backward(Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, Tensor stats, Tensor q, Tensor k, Tensor v, "
    f"{_ARGUMENTS}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)"
)
library.define(
    f"append_forward(Tensor k_new, Tensor v_new, Tensor? new_lens, Tensor q, Tensor(a!) k, Tensor(b!) v, "
    f"{_ARGUMENTS}) -> (Tensor out, Tensor lse)"
)


# --- operators ------------------------------------------------------------------------------------------------------


def split(args: Sequence[Any]) -> tuple[Operands, Scalars, str]:
    return Operands(*args[:NUM_COMMON]), Scalars(*args[NUM_COMMON:-1]), args[-1]


def _forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    operands, scalars, spec = split(args)
    out, lse, stats = run_forward(_prepared(operands, scalars, spec), operands)
    return out, lse, _present(stats, lse)


def _prepared(operands: Operands, scalars: Scalars, spec: str) -> Prepared:
    check_memory(zip(Operands._fields, operands))
    return prepare(operands, scalars, dispatch.resolved(spec))


def _backward(dout: Any, dlse: Any, out: Any, lse: Any, stats: Any, *args: Any) -> tuple[torch.Tensor, ...]:
    operands, scalars, spec = split(args)
    grads = run_backward(_prepared(operands, scalars, spec), operands, dout, dlse, out, lse, stats)
    return tuple(_present(grad, out) for grad in grads)


def _present(tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """An operator cannot return None: what was not asked for is empty."""
    return torch.empty(0, dtype=like.dtype, device=like.device) if tensor is None else tensor


def _append_forward(k_new: Any, v_new: Any, new_lens: Any, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    operands, scalars, spec = split(args)
    operands = operands._replace(k_new=k_new, v_new=v_new, new_lens=new_lens)
    return run_forward(_prepared(operands, scalars, spec), operands)[:2]


def _forward_fake(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    operands, scalars, _ = split(args)
    check_devices(operands)
    q, v = operands.q, operands.v
    packed = operands.cu_seqlens_q is not None
    rows = (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1])
    accumulate = torch.float64 if q.dtype == torch.float64 else torch.float32
    needs_stats = scalars.grads and (operands.bias is not None or operands.alibi_slopes is not None)
    return (
        q.new_empty((*q.shape[:-1], v.shape[-1])),
        q.new_empty(rows, dtype=accumulate),
        q.new_empty((2, *rows) if needs_stats else (0,), dtype=accumulate),
    )


def _append_forward_fake(k_new: Any, v_new: Any, new_lens: Any, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _forward_fake(*args)[:2]


def _backward_fake(dout: Any, dlse: Any, out: Any, lse: Any, stats: Any, *args: Any) -> tuple[torch.Tensor, ...]:
    operands, scalars, _ = split(args)
    return tuple(
        out.new_empty(0) if tensor is None or not scalars.grads >> bit & 1 else tensor.new_empty(tensor.shape)
        for bit, tensor in enumerate(differentiable(operands))
    )


for _name, _kernel, _fake in (
    ("forward", _forward, _forward_fake),
    ("backward", _backward, _backward_fake),
    ("append_forward", _append_forward, _append_forward_fake),
):
    library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"attnlib::{_name}", _fake, lib=library)

forward_op = torch.ops.attnlib.forward.default
backward_op = torch.ops.attnlib.backward.default
append_forward_op = torch.ops.attnlib.append_forward.default


# --- autograd -------------------------------------------------------------------------------------------------------

_GRADS_AT = NUM_COMMON + Scalars._fields.index("grads")


def _has_tangents() -> bool:
    return forward_ad._current_level >= 0


def _apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """function.apply at one level of autograd, which under torch.func is what a kernel of the Autograd key works on."""
    if not _are_functorch_transforms_active():
        return function.apply(*args)
    with enable_single_level_autograd_function():
        return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


@contextlib.contextmanager
def _below() -> Iterator[None]:
    """Below this level of autograd. Under torch.func, levels further out still record: a Function switches that off."""
    if not _are_functorch_transforms_active():
        with torch._C._AutoDispatchBelowAutograd():
            yield
        return
    with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad(), _set_fwd_grad_enabled(True):
        yield


def _forward_autograd(*args: Any) -> Any:
    """forward at the autograd level: what needs a gradient is asked here, since transforms hide it further up."""
    needed = grads_of(Operands(*args[:NUM_COMMON]))  # at this level of autograd
    if needed:
        return _apply(Attention, *args[:_GRADS_AT], needed, *args[_GRADS_AT + 1 :])
    if _has_tangents():
        return _apply(Attention, *args)
    with torch._C._AutoDispatchBelowAutograd():
        return forward_op(*args)


def _backward_autograd(*args: Any) -> Any:
    watched = torch.is_grad_enabled() and any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
    if watched or _has_tangents():
        return _apply(AttentionBackward, *args)
    with torch._C._AutoDispatchBelowAutograd():
        return backward_op(*args)


def _append_forward_autograd(*args: Any) -> Any:
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise ArgumentError("attention_kvcache has no backward: needs operands without requires_grad=True")
    if _has_tangents() and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise UnsupportedError("attention_kvcache has no forward-mode derivative, got an operand with a tangent")
    with torch._C._AutoDispatchBelowAutograd():
        result = append_forward_op(*args)
    torch.autograd.graph.increment_version((args[4], args[5]))  # k and v were written
    return result


for _name, _kernel in (
    ("forward", _forward_autograd),
    ("backward", _backward_autograd),
    ("append_forward", _append_forward_autograd),
):
    library.impl(_name, _kernel, "Autograd")


def _wanted(grads: Sequence[torch.Tensor], scalars: Scalars) -> tuple[torch.Tensor | None, ...]:
    """What backward_op found, with None for what was not asked for."""
    return tuple(grad if scalars.grads >> bit & 1 else None for bit, grad in enumerate(grads))


class Attention(torch.autograd.Function):
    """forward_op with its gradient. Inputs are forward_op's arguments; outputs are out, lse and stats."""

    @staticmethod
    def forward(*args: Any) -> Any:
        with _below():
            return forward_op(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:NUM_COMMON], *output)
        ctx.numbers = inputs[NUM_COMMON:]
        ctx.mark_non_differentiable(output[2])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any, _: Any) -> tuple[Any, ...]:
        *operands, out, lse, stats = ctx.saved_tensors
        found = backward_op(dout, dlse, out, lse, stats, *operands, *ctx.numbers)
        grads: list[Any] = [None] * (len(operands) + len(ctx.numbers))
        for name, grad in zip(DIFFERENTIABLE, _wanted(found, Scalars(*ctx.numbers[:-1]))):
            grads[Operands._fields.index(name)] = grad
        return tuple(grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise UnsupportedError("attention has no forward-mode derivative; backend='reference' has")


class AttentionBackward(torch.autograd.Function):
    """backward_op where a second derivative might be asked for: asking raises instead of giving zeros."""

    @staticmethod
    def forward(*args: Any) -> Any:
        with _below():
            return backward_op(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise UnsupportedError("attention is differentiable once; backend='reference' gives second derivatives")

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise UnsupportedError("attention is differentiable once; backend='reference' gives second derivatives")


class PlainAttention(torch.autograd.Function):
    """Attention for plain tensors outside every transform: the same, without the way through torch's dispatcher.

    Inputs are differentiable(operands) and what run_forward takes. lse is an output only where it is asked for, as
    every output costs.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Any, k: Any, v: Any, bias: Any, sinks: Any, prepared: Prepared, operands: Operands,
        scalars: Scalars, with_lse: bool,
    ) -> Any:  # fmt: skip
        out, lse, stats = run_forward(prepared, operands)
        ctx.save_for_backward(out, lse, stats, *operands[: 3 if prepared.as_is else NUM_COMMON])
        ctx.numbers = (scalars, prepared.pinned)
        ctx.set_materialize_grads(False)
        return (out, lse) if with_lse else out

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any = None) -> tuple[Any, ...]:
        out, lse, stats, *saved = ctx.saved_tensors
        operands, (scalars, spec) = Operands(*saved), ctx.numbers
        given = (dout, dlse, out, lse, stats)
        if is_unwatched((*given, *saved)) and _in_memory(given) and not torch.is_grad_enabled():
            prepared = prepare(operands, scalars, spec)
            if prepared.in_memory:
                return (*run_backward(prepared, operands, *given), None, None, None, None)
        given = (dout, dlse, out, lse, _present(stats, lse))
        grads = backward_op(*given, *operands[:NUM_COMMON], *scalars, spec)
        return (*_wanted(grads, scalars), None, None, None, None)


# Function.apply inspects the signature of forward at every call, which costs more than the kernel of a small problem.
_plain_apply = super(torch.autograd.Function, PlainAttention).apply


def apply_plain(operands: Operands, prepared: Prepared, scalars: Scalars, with_lse: bool) -> Any:
    """out, or (out, lse) with with_lse, recorded by autograd."""
    return _plain_apply(*differentiable(operands), prepared, operands, scalars, with_lse)


def _in_memory(operands: Sequence[Any]) -> bool:
    """Whether addresses hold the values: no negative view, no symbolic zero, nothing freed, no legacy batch."""
    try:
        for tensor in operands:
            if tensor is not None and (tensor.is_neg() or not tensor.data_ptr()):
                return False
    except RuntimeError:  # it has no address at all
        return False
    return True


# What is true where something watches calls, beside a compiler and forward mode; attnlib._front asks them as well.
WATCHERS = (
    _are_functorch_transforms_active, _len_torch_dispatch_stack, _len_torch_function_stack, _get_tracing_state,
    _profiler_enabled,
)  # fmt: skip


def is_unwatched(operands: Sequence[Any]) -> bool:
    """Whether nothing watches this call: no compiler, transform, dispatch mode, tracer, profiler or subclass."""
    if is_compiling() or _has_tangents():
        return False
    for watches in WATCHERS:
        if watches():
            return False
    return PLAIN.issuperset(map(type, operands))


def outside_transforms(operands: Sequence[Any]) -> bool:
    """Whether nothing watches this call, and the addresses of its operands hold their values."""
    return is_unwatched(operands) and _in_memory(operands)


def call(operands: Operands, scalars: Scalars, spec: str, with_lse: bool) -> tuple[Any, Any]:
    """out and lse of one call, with autograd where something needs a gradient; lse may be None if not with_lse."""
    if is_unwatched(operands) and not operands.q.is_meta:
        prepared = prepare(operands, scalars, spec)
        if prepared.in_memory:
            if not scalars.grads:
                return run_forward(prepared, operands)[:2]
            result = apply_plain(operands, prepared, scalars, with_lse)
            return result if with_lse else (result, None)
    check_devices(operands)  # the dispatcher would answer for an operand on another device
    return forward_op(*operands[:NUM_COMMON], *scalars, spec)[:2]
