"""The torch operators behind the public functions: schemas, fake kernels, autograd and vmap.

attnlib::forward and attnlib::backward are opaque to torch.compile; checking, dispatch and plans live inside them.
attnlib::append_forward is forward for a cache that grows; it declares the caches as mutated. Plain tensors that
nothing watches skip the dispatcher, which costs more than a small problem's kernel.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function

from . import dispatch, registry, settings, settle
from .arguments import Operands, Scalars, bind, check, check_devices
from .backend import Plan
from .errors import ArgumentError, UnsupportedError
from .memory import allocate, poison
from .problem import AttentionProblem, Tensors

_COMMON = (
    "Tensor? bias, Tensor? mask, Tensor? alibi_slopes, Tensor? sinks, Tensor? block_mask, Tensor? q_lens, "
    "Tensor? kv_lens, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? page_table, Tensor? dropout_seed, "
)
_SCALARS = (
    "SymInt max_seqlen_q, SymInt max_seqlen_k, SymInt left, SymInt right, bool top_left, float scale, float softcap, "
    "float dropout_p, SymInt block_q, SymInt block_k, int grads, bool deterministic, bool tf32, str backend"
)
_NUM_OPERANDS = 14  # q, k, v and _COMMON

library = torch.library.Library("attnlib", "DEF")
library.define(f"forward(Tensor q, Tensor k, Tensor v, {_COMMON}{_SCALARS}) -> (Tensor out, Tensor lse, Tensor stats)")
library.define(
    f"backward(Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, Tensor stats, Tensor q, Tensor k, Tensor v, "
    f"{_COMMON}{_SCALARS}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)"
)
library.define(
    f"append_forward(Tensor k_new, Tensor v_new, Tensor? new_lens, Tensor q, Tensor(a!) k, Tensor(b!) v, "
    f"{_COMMON}{_SCALARS}) -> (Tensor out, Tensor lse)"
)


# --- running a plan -------------------------------------------------------------------------------------------------


def prepare(operands: Operands, scalars: Scalars, spec: str) -> tuple[AttentionProblem, Plan | None, str]:
    """Check the call and find its plan; the second call of the same shapes is one dictionary look-up.

    The plan is None where there is nothing for a kernel to do: no query, no key or no head.
    """
    q, k, v = operands[:3]
    key = (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
        q.device, k.device, v.device, (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15,
        *[None if t is None else (t.shape, t.dtype, t.device) for t in operands[3:]],
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


# --- operators ------------------------------------------------------------------------------------------------------


def _split(args: Sequence[Any]) -> tuple[Operands, Scalars, str]:
    return Operands(*args[:_NUM_OPERANDS]), Scalars(*args[_NUM_OPERANDS:-1]), args[-1]


def _forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out, lse, stats, _ = run_forward(*_split(args))
    return out, lse, _present(stats, lse)


def _backward(dout: Any, dlse: Any, out: Any, lse: Any, stats: Any, *args: Any) -> tuple[torch.Tensor, ...]:
    return tuple(_present(grad, out) for grad in run_backward(dout, dlse, out, lse, stats, *_split(args)))


def _present(tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """An operator cannot return None: what was not asked for is empty."""
    return torch.empty(0, dtype=like.dtype, device=like.device) if tensor is None else tensor


def _append_forward(k_new: Any, v_new: Any, new_lens: Any, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    operands, scalars, spec = _split(args)
    out, lse, _, _ = run_forward(operands._replace(k_new=k_new, v_new=v_new, new_lens=new_lens), scalars, spec)
    return out, lse


def _forward_fake(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    operands, scalars, _ = _split(args)
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
    operands, scalars, _ = _split(args)
    sources = (operands.q, operands.k, operands.v, operands.bias, operands.sinks)
    return tuple(
        out.new_empty(0) if tensor is None or not scalars.grads >> bit & 1 else tensor.new_empty(tensor.shape)
        for bit, tensor in enumerate(sources)
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

_GRADS_AT = _NUM_OPERANDS + Scalars._fields.index("grads")


def _needed(args: Sequence[Any]) -> int:
    """Which of q, k, v, bias, sinks need a gradient at this level of autograd, as Scalars.grads."""
    if not torch.is_grad_enabled():
        return 0
    sources = (args[0], args[1], args[2], args[3], args[6])
    return sum(1 << bit for bit, tensor in enumerate(sources) if tensor is not None and tensor.requires_grad)


def _has_tangents() -> bool:
    return torch.autograd.forward_ad._current_level >= 0


def _apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """function.apply at one level of autograd, which under torch.func is what a kernel of the Autograd key works on."""
    if not torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    with enable_single_level_autograd_function():
        return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def _forward_autograd(*args: Any) -> Any:
    """forward at the autograd level: what needs a gradient is asked here, since transforms hide it further up."""
    needed = _needed(args)
    if needed:
        return _apply(Attention, *args[:_GRADS_AT], needed, *args[_GRADS_AT + 1 :])
    if _has_tangents():
        return _apply(Attention, *args)
    with torch._C._AutoDispatchBelowAutograd():
        return forward_op(*args)


def _backward_autograd(*args: Any) -> Any:
    if torch.is_grad_enabled() and any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args):
        return _apply(AttentionBackward, *args)
    with torch._C._AutoDispatchBelowAutograd():
        return backward_op(*args)


def _append_forward_autograd(*args: Any) -> Any:
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise ArgumentError("attention_kvcache has no backward: needs operands without requires_grad=True")
    if _has_tangents() and any(torch.autograd.forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise UnsupportedError("attention_kvcache has no forward-mode derivative, got an operand with a tangent")
    with torch._C._AutoDispatchBelowAutograd():
        return append_forward_op(*args)


for _name, _kernel in (
    ("forward", _forward_autograd),
    ("backward", _backward_autograd),
    ("append_forward", _append_forward_autograd),
):
    library.impl(_name, _kernel, "Autograd")


class Attention(torch.autograd.Function):
    """forward_op with its gradient. Inputs are forward_op's arguments; outputs are out, lse and stats."""

    @staticmethod
    def forward(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return forward_op(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:_NUM_OPERANDS], *output)
        ctx.numbers = inputs[_NUM_OPERANDS:]
        ctx.mark_non_differentiable(output[2])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any, _: Any) -> tuple[Any, ...]:
        *operands, out, lse, stats = ctx.saved_tensors
        found = backward_op(dout, dlse, out, lse, stats, *operands, *ctx.numbers)
        grads = Scalars(*ctx.numbers[:-1]).grads
        dq, dk, dv, dbias, dsinks = [grad if grads >> bit & 1 else None for bit, grad in enumerate(found)]
        return (dq, dk, dv, dbias, None, None, dsinks) + (None,) * (_NUM_OPERANDS - 7 + len(ctx.numbers))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise UnsupportedError("attention has no forward-mode derivative; backend='reference' has")


class AttentionBackward(torch.autograd.Function):
    """backward_op where a second derivative might be asked for: asking raises instead of giving zeros."""

    @staticmethod
    def forward(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return backward_op(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise UnsupportedError("attention is differentiable once; backend='reference' gives second derivatives")


class PlainAttention(torch.autograd.Function):
    """Attention for plain tensors outside every transform: the same, without the way through torch's dispatcher."""

    @staticmethod
    def forward(
        ctx: Any, q: Any, k: Any, v: Any, bias: Any, sinks: Any, operands: Operands, scalars: Scalars, spec: str
    ) -> Any:
        out, lse, stats, name = run_forward(operands, scalars, spec)
        ctx.save_for_backward(*operands[:_NUM_OPERANDS], out, lse, stats)
        ctx.numbers = (scalars, dispatch.pinned(spec, name))
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
        *operands, out, lse, stats = ctx.saved_tensors
        scalars, spec = ctx.numbers
        if outside_transforms((*operands, dout, dlse)) and not torch.is_grad_enabled():
            grads = run_backward(dout, dlse, out, lse, stats, Operands(*operands), scalars, spec)
        else:
            found = backward_op(dout, dlse, out, lse, _present(stats, lse), *operands, *scalars, spec)
            grads = tuple(grad if scalars.grads >> bit & 1 else None for bit, grad in enumerate(found))
        return (*grads, None, None, None)


# Function.apply inspects the signature of forward at every call, which costs more than the kernel of a small problem.
_plain_apply = super(torch.autograd.Function, PlainAttention).apply

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, type(None)})


def outside_transforms(operands: Sequence[Any]) -> bool:
    """Whether nothing watches this call: no compiler, transform, dispatch mode, tracer, profiler or subclass."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._get_tracing_state() is not None
        or torch.autograd._profiler_enabled()
        or _has_tangents()
    ) and PLAIN.issuperset(map(type, operands))


def call(operands: Operands, scalars: Scalars, spec: str) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of one call, with autograd where something needs a gradient."""
    if outside_transforms(operands) and operands.q.device.type != "meta":
        if scalars.grads:
            return _plain_apply(
                operands.q, operands.k, operands.v, operands.bias, operands.sinks, operands, scalars, spec
            )
        return run_forward(operands, scalars, spec)[:2]
    check_devices(operands)  # the dispatcher would answer for an operand on another device
    return forward_op(*operands[:_NUM_OPERANDS], *scalars, spec)[:2]


# --- vmap -----------------------------------------------------------------------------------------------------------


def _forward_vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    return _vmap(forward_op, 0, info, in_dims, args)


def _backward_vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    return _vmap(backward_op, 5, info, in_dims, args)


def _vmap(op: Callable[..., Any], first: int, info: Any, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
    """Fold the new dimension into batch where that changes no result; run slice by slice elsewhere.

    Folding would renumber the sequences that dropout counts, and mix gradients that are sums over the batch.
    """
    operands, scalars, _ = _split(args[first:])
    dims = dict(zip(Operands._fields, in_dims[first:]))
    mixes = first and scalars.grads >> 3
    others = any(dims.get(name) is not None for name in Operands._fields[3:14])
    if others or mixes or operands.cu_seqlens_q is not None or operands.page_table is not None or scalars.dropout_p > 0:
        return _vmap_slices(op, info.batch_size, in_dims, args)
    size = info.batch_size
    if any(
        t is not None and t.dim() == 4 and t.shape[0] != 1 for t in (operands.bias, operands.mask, operands.block_mask)
    ):
        return _vmap_slices(op, size, in_dims, args)
    folded: list[Any] = list(args)
    for index, (arg, dim) in enumerate(zip(args, in_dims)):
        if not isinstance(arg, torch.Tensor):
            continue
        name = Operands._fields[index - first] if index >= first else ("dout", "dlse", "out", "lse", "stats")[index]
        if name in ("q", "k", "v", "dout", "dlse", "out", "lse"):
            moved = arg.movedim(dim, 0) if dim is not None else arg.expand(size, *arg.shape)
            folded[index] = moved.reshape(-1, *moved.shape[2:])
        elif name == "stats" and arg.dim() > 1:
            moved = arg.movedim(dim, 0) if dim is not None else arg.expand(size, *arg.shape)
            folded[index] = moved.transpose(0, 1).reshape(moved.shape[1], -1, *moved.shape[3:])
        elif name in ("q_lens", "kv_lens"):
            folded[index] = arg.repeat(size)
        elif name == "alibi_slopes" and arg.dim() == 2:
            folded[index] = arg.repeat(size, 1)
        elif name == "stats" and dim is not None:
            folded[index] = arg.movedim(dim, 0)[0]
    results = op(*folded)
    outputs: list[torch.Tensor] = []
    out_dims: list[int | None] = []
    for position, result in enumerate(results):
        if result.dim() <= 1:  # an output that was not asked for
            outputs.append(result)
            out_dims.append(None)
            continue
        lead = 1 if not first and position == 2 else 0
        outputs.append(result.unflatten(lead, (size, -1)))
        out_dims.append(lead)
    return tuple(outputs), tuple(out_dims)


def _vmap_slices(op: Callable[..., Any], size: int, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
    slices = []
    for index in range(size):
        one = [arg if dim is None else arg.select(dim, index) for arg, dim in zip(args, in_dims)]
        slices.append(op(*one))
    outputs = tuple(torch.stack(parts) for parts in zip(*slices))
    return outputs, (0,) * len(outputs)


torch.library.register_vmap("attnlib::forward", _forward_vmap, lib=library)
torch.library.register_vmap("attnlib::backward", _backward_vmap, lib=library)
