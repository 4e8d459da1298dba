"""From the arguments of a call to an AttentionProblem and canonical Tensors. Nothing behind this validates again.

Two steps: `Options.of` checks what is no tensor (once, in the public function, so that torch.compile sees plain
numbers), and `bind` checks the tensors and brings them into canonical form, inside the operator.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from . import settings
from .errors import ArgumentError, ArgumentTypeError
from .problem import DTYPES, AttentionProblem, Tensors, Window

UNBOUNDED = -1
_GRADS = ("q", "k", "v", "bias", "sinks")
_FLOAT32_MAX, _FLOAT32_TINY = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny


class Options(NamedTuple):
    """The plain numbers of a call, in the form the operators take them. Window ends: -1 is unbounded."""

    left: int
    right: int
    top_left: bool
    scale: float
    softcap: float  # 0: none
    dropout_p: float
    deterministic: bool

    @staticmethod
    def of(
        head_dim: int,
        causal: bool,
        causal_alignment: str,
        window: Sequence[int | None] | None,
        scale: float | None,
        softcap: float | None,
        dropout_p: float = 0.0,
        deterministic: bool | None = None,
    ) -> Options:
        """Check and normalise. Raises ArgumentError or ArgumentTypeError naming the argument."""
        if not isinstance(causal, bool):
            raise ArgumentTypeError(f"causal: needs True or False, got {causal!r}")
        if causal_alignment not in ("bottom_right", "top_left"):
            raise ArgumentError(f"causal_alignment: needs 'bottom_right' or 'top_left', got {causal_alignment!r}")
        left, right = _window(window)
        if causal:
            right = 0
        if deterministic is None:
            deterministic = torch.are_deterministic_algorithms_enabled()
        elif not isinstance(deterministic, bool):
            raise ArgumentTypeError(f"deterministic: needs True, False or None, got {deterministic!r}")
        return Options(
            left,
            right,
            causal_alignment == "top_left",
            _default_scale(head_dim) if scale is None else _number("scale", scale),
            0.0 if softcap is None else _positive("softcap", softcap),
            _probability(dropout_p),
            deterministic,
        )


def _default_scale(head_dim: int) -> float:
    if head_dim == 0:
        raise ArgumentError("q: needs head_dim of at least 1, got 0")
    return head_dim**-0.5


def _window(window: Sequence[int | None] | None) -> tuple[int, int]:
    if window is None:
        return UNBOUNDED, UNBOUNDED
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ArgumentTypeError(f"window: needs a pair (left, right) of ints >= 0 or None, got {window!r}")
    ends: list[Any] = []
    for end in window:
        if end is None:
            ends.append(UNBOUNDED)
        elif isinstance(end, bool) or not isinstance(end, (int, numbers.Integral, torch.SymInt)):
            raise ArgumentTypeError(f"window: needs ints >= 0 or None, got {window!r}")
        elif end < 0:
            raise ArgumentError(f"window: needs ints >= 0 or None (None is unbounded), got {window!r}")
        else:
            ends.append(end if isinstance(end, torch.SymInt) else min(int(end), 1 << 40))
    return ends[0], ends[1]


def _number(name: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float, numbers.Real, torch.SymFloat, torch.SymInt)):
        raise ArgumentTypeError(f"{name}: needs a number, got {value!r} of type {type(value).__name__}")
    if isinstance(value, (torch.SymFloat, torch.SymInt)):
        return value
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not number - number == 0:  # NaN or infinite, in a form that torch.compile can trace
        raise ArgumentError(f"{name}: needs a finite number, got {value!r}")
    return number


def _positive(name: str, value: Any) -> float:
    number = _number(name, value)
    if not number > 0:
        raise ArgumentError(f"{name}: needs a finite number above 0, or None, got {value!r}")
    return number


def _probability(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, numbers.Real)):
        raise ArgumentTypeError(f"dropout_p: needs a number from 0 to 1, got {value!r} of type {type(value).__name__}")
    number = float(value)
    if not 0.0 <= number <= 1.0:
        raise ArgumentError(f"dropout_p: needs a number from 0 to 1, got {value!r}")
    return number


class Operands(NamedTuple):
    """The tensors of a call as the operators take them, before any check."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    block_mask: torch.Tensor | None = None
    q_lens: torch.Tensor | None = None
    kv_lens: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    dropout_seed: torch.Tensor | None = None
    k_new: torch.Tensor | None = None
    v_new: torch.Tensor | None = None
    new_lens: torch.Tensor | None = None


class Scalars(NamedTuple):
    """The plain numbers of a call as the operators take them. max_seqlen_* are -1 where not given."""

    max_seqlen_q: int
    max_seqlen_k: int
    left: int
    right: int
    top_left: bool
    scale: float
    softcap: float
    dropout_p: float
    block_q: int
    block_k: int
    grads: int  # bit i: a gradient for q, k, v, bias, sinks
    deterministic: bool
    tf32: bool


_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_NOTHING = frozenset({type(None)})
_TENSORS_OR_NONE = _TENSORS | _NOTHING


def check_types(operands: Operands) -> None:
    """Raises ArgumentTypeError for an operand that is not a tensor."""
    if _TENSORS.issuperset(map(type, operands[:3])) and _TENSORS_OR_NONE.issuperset(map(type, operands[3:])):
        return
    for index, (name, tensor) in enumerate(zip(Operands._fields, operands)):
        if not isinstance(tensor, torch.Tensor) and (tensor is not None or index < 3):
            raise ArgumentTypeError(f"{name}: needs a tensor, got {type(tensor).__name__}")


def check_devices(operands: Operands) -> None:
    """Raises for an operand that is not a plain strided tensor on q's device."""
    device = operands.q.device
    for name, tensor in zip(Operands._fields, operands):
        if tensor is None:
            continue
        if tensor.layout != torch.strided:
            raise ArgumentTypeError(f"{name}: needs a dense (strided) tensor, got layout {tensor.layout}")
        if tensor.device != device:
            raise ArgumentError(f"{name}: needs device {device}, as q has, got {tensor.device}")


def check(operands: Operands, scalars: Scalars) -> AttentionProblem:
    """The problem of a call, from shapes, dtypes and devices alone. Raises before any memory is touched."""
    q, k, v = operands.q, operands.k, operands.v
    _check_dtypes(operands)
    packed = operands.cu_seqlens_q is not None or operands.cu_seqlens_k is not None
    paged = operands.page_table is not None
    _rank("q", q, 3 if packed else 4)
    _rank("k", k, 3 if packed and not paged else 4)
    _rank("v", v, 3 if packed and not paged else 4)
    num_heads_q, head_dim = q.shape[-2], q.shape[-1]
    num_heads_kv, head_dim_v = k.shape[-2], v.shape[-1]
    if head_dim == 0:
        raise ArgumentError(f"q: needs head_dim of at least 1, got shape {_shape(q)}")
    if k.shape[-1] != head_dim:
        raise ArgumentError(f"k: needs head_dim {head_dim}, as q has, got shape {_shape(k)}")
    if v.shape[:-1] != k.shape[:-1]:
        raise ArgumentError(f"v: needs shape {[*_shape(k)[:-1], 'head_dim_v']}, as k has, got {_shape(v)}")
    _check_heads(num_heads_q, num_heads_kv)
    if packed:
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            _vector(name, getattr(operands, name), None)
        batch = operands.cu_seqlens_q.shape[0] - 1  # type: ignore[union-attr]
        if batch < 0 or operands.cu_seqlens_k.shape[0] != batch + 1:  # type: ignore[union-attr]
            raise ArgumentError(
                "cu_seqlens_q, cu_seqlens_k: need the same length, batch + 1, of at least 1, got "
                f"{_shape(operands.cu_seqlens_q)} and {_shape(operands.cu_seqlens_k)}"
            )
        seqlen_q = _longest(scalars.max_seqlen_q, operands, 2, q.shape[0])
    else:
        batch, seqlen_q = q.shape[0], q.shape[1]
    if operands.page_table is not None:
        table = operands.page_table
        if table.dim() != 2 or table.shape[0] != batch:
            raise ArgumentError(f"page_table: needs shape [{batch}, max_pages], got {_shape(table)}")
        if k.shape[1] == 0:
            raise ArgumentError(f"k: needs pages of at least one token when page_table is given, got {_shape(k)}")
        seqlen_k = table.shape[1] * k.shape[1]
        if packed and 0 <= scalars.max_seqlen_k < seqlen_k:
            seqlen_k = scalars.max_seqlen_k
    elif packed:
        seqlen_k = _longest(scalars.max_seqlen_k, operands, 3, k.shape[0])
    else:
        if k.shape[0] != batch:
            raise ArgumentError(f"k: needs batch {batch}, as q has, got shape {_shape(k)}")
        seqlen_k = k.shape[1]
    _check_extras(operands, scalars, batch, num_heads_q, num_heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v)
    if q.dtype != torch.float64:
        for name, value in (("scale", scalars.scale), ("softcap", scalars.softcap)):
            if abs(value) > _FLOAT32_MAX or 0 < abs(value) < _FLOAT32_TINY:
                raise ArgumentError(f"{name}: needs a number that float32 holds as normal, got {value!r}")
    if operands.k_new is not None:
        _check_growing(operands)
    # what lies past seqlen_q + seqlen_k changes nothing, and kernels add it to positions
    left, right = (min(end, seqlen_q + seqlen_k) for end in (scalars.left, scalars.right))
    return AttentionProblem(
        dtype=q.dtype,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        num_heads_q=num_heads_q,
        num_heads_kv=num_heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        scale=scalars.scale,
        total_q=q.shape[0] if packed else batch * seqlen_q,
        total_k=k.shape[0] if packed and not paged else batch * seqlen_k,
        packed=packed,
        window=Window(None if left < 0 else left, None if right < 0 else right),
        top_left=scalars.top_left,
        softcap=scalars.softcap or None,
        bias=operands.bias.dtype if operands.bias is not None else None,
        mask=operands.mask is not None,
        alibi=operands.alibi_slopes is not None,
        sinks=operands.sinks.dtype if operands.sinks is not None else None,
        block_mask=(scalars.block_q, scalars.block_k) if operands.block_mask is not None else None,
        lengths=operands.q_lens is not None or operands.kv_lens is not None,
        page_size=k.shape[1] if paged else None,
        append=operands.k_new is not None,
        dropout_p=int(scalars.dropout_p * 65536 + 0.5) / 65536,
        grads=tuple(name for bit, name in enumerate(_GRADS) if scalars.grads >> bit & 1),
        deterministic=scalars.deterministic,
        tf32=scalars.tf32,
        aligned=all(_aligned(t) for t in (q, k, v, operands.k_new, operands.v_new) if t is not None),
    )


def _check_dtypes(operands: Operands) -> None:
    check_types(operands)
    q = operands.q
    for name in ("q", "k", "v"):
        tensor = getattr(operands, name)
        if tensor.dtype not in DTYPES:
            raise ArgumentTypeError(f"{name}: needs float64, float32, float16 or bfloat16, got {_name(tensor.dtype)}")
        if tensor.dtype != q.dtype:
            raise ArgumentTypeError(f"{name}: needs {_name(q.dtype)}, as q has, got {_name(tensor.dtype)}")
    check_devices(operands)
    for name in ("bias", "sinks"):
        tensor = getattr(operands, name)
        if tensor is not None and tensor.dtype not in DTYPES:
            raise ArgumentTypeError(f"{name}: needs a float dtype, got {_name(tensor.dtype)}")
    for name in ("mask", "block_mask"):
        tensor = getattr(operands, name)
        if tensor is not None and tensor.dtype != torch.bool:
            hint = "; a float mask that is added to the scores goes into bias" if tensor.is_floating_point() else ""
            raise ArgumentTypeError(f"{name}: needs bool, got {_name(tensor.dtype)}{hint}")
    slopes = operands.alibi_slopes
    if slopes is not None and slopes.dtype != torch.float32:
        raise ArgumentTypeError(f"alibi_slopes: needs float32, got {_name(slopes.dtype)}")
    for name in ("q_lens", "kv_lens", "new_lens", "cu_seqlens_q", "cu_seqlens_k", "page_table"):
        tensor = getattr(operands, name)
        if tensor is not None and tensor.dtype not in (torch.int32, torch.int64):
            raise ArgumentTypeError(f"{name}: needs int32 or int64, got {_name(tensor.dtype)}")
    for name in ("k_new", "v_new"):
        tensor = getattr(operands, name)
        if tensor is not None and tensor.dtype != q.dtype:
            raise ArgumentTypeError(f"{name}: needs {_name(q.dtype)}, as q has, got {_name(tensor.dtype)}")


def _check_growing(operands: Operands) -> None:
    """A cache that is written must hold each of its elements once."""
    for name in ("k", "v"):
        cache = getattr(operands, name)
        if any(stride == 0 and size > 1 for stride, size in zip(cache.stride(), cache.shape)):
            raise ArgumentError(
                f"{name}_cache: needs memory of its own for every element when k_new is given, got strides "
                f"{list(cache.stride())}"
            )
    if operands.k.numel() and operands.v.numel() and operands.k.data_ptr() == operands.v.data_ptr():
        raise ArgumentError("k_cache, v_cache: need memory of their own when k_new is given, got the same address")


def _check_heads(num_heads_q: int, num_heads_kv: int) -> None:
    if num_heads_q == 0 and num_heads_kv == 0:
        return
    if num_heads_kv == 0 or num_heads_q % num_heads_kv:
        raise ArgumentError(
            f"q, k: need num_heads_q to be a multiple of num_heads_kv, got {num_heads_q} query heads "
            f"and {num_heads_kv} key/value heads"
        )


def _check_extras(
    operands: Operands,
    scalars: Scalars,
    batch: int,
    num_heads_q: int,
    num_heads_kv: int,
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int,
    head_dim_v: int,
) -> None:
    full = [batch, num_heads_q, seqlen_q, seqlen_k]
    for name in ("bias", "mask"):
        _broadcast(name, getattr(operands, name), full)
    slopes = operands.alibi_slopes
    if slopes is not None and _shape(slopes) not in ([num_heads_q], [batch, num_heads_q]):
        raise ArgumentError(
            f"alibi_slopes: needs shape [{num_heads_q}] or [{batch}, {num_heads_q}], got {_shape(slopes)}"
        )
    if operands.sinks is not None and _shape(operands.sinks) != [num_heads_q]:
        raise ArgumentError(f"sinks: needs shape [{num_heads_q}], got {_shape(operands.sinks)}")
    if operands.block_mask is not None:
        blocks_q, blocks_k = -(-seqlen_q // scalars.block_q), -(-seqlen_k // scalars.block_k)
        shape = _shape(operands.block_mask)
        if (
            len(shape) != 4
            or shape[0] not in (1, batch)
            or shape[1] not in (1, num_heads_q)
            or (shape[2:] != [blocks_q, blocks_k])
        ):
            raise ArgumentError(
                f"block_mask: needs shape [1 or {batch}, 1 or {num_heads_q}, {blocks_q}, {blocks_k}] for blocks of "
                f"{scalars.block_q} queries and {scalars.block_k} keys, got {shape}"
            )
    for name in ("q_lens", "kv_lens", "new_lens"):
        tensor = getattr(operands, name)
        if tensor is not None:
            _vector(name, tensor, batch)
    seed = operands.dropout_seed
    if seed is not None and (seed.dtype != torch.int64 or seed.numel() != 1):
        raise ArgumentError(
            f"dropout_seed: needs an int or an int64 tensor of one element, got {_name(seed.dtype)} {_shape(seed)}"
        )
    if operands.k_new is not None:
        new = operands.k_new
        length = new.shape[1] if new.dim() == 4 else "new"
        for name, tensor, dim in (("k_new", new, head_dim), ("v_new", operands.v_new, head_dim_v)):
            needed = [batch, length, num_heads_kv, dim]
            if tensor is None or _shape(tensor) != needed:
                raise ArgumentError(f"{name}: needs shape {needed}, got {None if tensor is None else _shape(tensor)}")


def bind(operands: Operands, problem: AttentionProblem, dout: torch.Tensor | None = None) -> Tensors:
    """Canonical operands of a checked call; out, lse and gradients are still missing (out and lse hold q).

    Raises ArgumentError for lengths that do not fit, where the host can see them.
    """
    q, k, v = _unit_stride(operands.q), _unit_stride(operands.k), _unit_stride(operands.v)
    if v.shape[-1] != problem.head_dim_v:
        v = v.new_zeros((*v.shape[:-1], problem.head_dim_v))
    if dout is not None:
        dout = _unit_stride(dout)
        if problem.aligned and not _aligned(dout):
            dout = dout.clone(memory_format=torch.contiguous_format)
    if _NOTHING.issuperset(map(type, operands[3:])):
        return Tensors(q, k, v, q, q, dout=dout)
    _check_values(operands, problem)
    full = (problem.batch, problem.num_heads_q, problem.seqlen_q, problem.seqlen_k)
    slopes, block_mask = operands.alibi_slopes, operands.block_mask
    return Tensors(
        q=q,
        k=k,
        v=v,
        out=q,
        lse=q,
        bias=None if operands.bias is None else operands.bias.expand(full),
        mask=None if operands.mask is None else operands.mask.expand(full),
        alibi_slopes=None if slopes is None else slopes.expand(problem.batch, problem.num_heads_q),
        sinks=None if operands.sinks is None else operands.sinks.contiguous(),
        block_mask=None if block_mask is None else block_mask.expand(full[:2] + tuple(block_mask.shape[2:])),
        q_lens=_int32(operands.q_lens),
        kv_lens=_int32(operands.kv_lens),
        cu_seqlens_q=_int32(operands.cu_seqlens_q),
        cu_seqlens_k=_int32(operands.cu_seqlens_k),
        page_table=_int32(operands.page_table),
        k_new=None if operands.k_new is None else _unit_stride(operands.k_new),
        v_new=None if operands.v_new is None else _values_new(operands.v_new, problem),
        new_lens=_int32(operands.new_lens),
        dropout_seed=operands.dropout_seed.reshape(1) if operands.dropout_seed is not None else None,
        dout=dout,
    )


def _values_new(v_new: torch.Tensor, problem: AttentionProblem) -> torch.Tensor:
    if v_new.shape[-1] != problem.head_dim_v:
        return v_new.new_zeros((*v_new.shape[:-1], problem.head_dim_v))
    return _unit_stride(v_new)


# --- values the host can see ----------------------------------------------------------------------------------------

_VALUED = ("q_lens", "kv_lens", "new_lens", "cu_seqlens_q", "cu_seqlens_k", "page_table")


def _check_values(operands: Operands, problem: AttentionProblem) -> None:
    """Lengths and tables: on CPU always, elsewhere under ATTNLIB_DEBUG=bounds (it costs a synchronisation)."""
    if all(getattr(operands, name) is None for name in _VALUED):
        return
    if operands.q.device.type != "cpu" and "bounds" not in settings.current().debug:
        return
    values = {name: getattr(operands, name) for name in _VALUED}
    table = values.pop("page_table")
    lists: dict[str, Any] = {name: None if tensor is None else tensor.tolist() for name, tensor in values.items()}
    if problem.packed:
        q_lens = _check_cumulative("q", lists["cu_seqlens_q"], problem.total_q, problem.seqlen_q)
        limit = None if table is not None else problem.total_k
        kv_lens = cached = _check_cumulative("k", lists["cu_seqlens_k"], limit, problem.seqlen_k)
    else:
        _check_range("q_lens", lists["q_lens"], 0, problem.seqlen_q)
        _check_range("kv_lens", lists["kv_lens"], 0, problem.seqlen_k)
        q_lens = lists["q_lens"] or [problem.seqlen_q] * problem.batch
        kv_lens = cached = lists["kv_lens"] or [problem.seqlen_k] * problem.batch
        if operands.k_new is not None:
            length = operands.k_new.shape[1]
            _check_range("new_lens", lists["new_lens"], 0, length)
            new_lens = lists["new_lens"] or [length] * problem.batch
            kv_lens = [before + new for before, new in zip(cached, new_lens)]
            for b, total in enumerate(kv_lens):
                if total > problem.seqlen_k:
                    raise ArgumentError(
                        f"kv_lens: needs kv_lens + new_lens of at most {problem.seqlen_k}, the capacity of the cache, "
                        f"got {cached[b]} + {new_lens[b]} for sequence {b}"
                    )
    if table is not None:
        _check_pages(problem, table, operands.k.shape[0], q_lens, cached, kv_lens)


def _check_pages(
    problem: AttentionProblem,
    table: torch.Tensor,
    pages: int,
    q_lens: list[int],
    cached: list[int],
    kv_lens: list[int],
) -> None:
    """Table entries that are read or written; those before a window's first key or past the last one may hold anything."""
    size, left = problem.page_size or 1, problem.window.left
    rows = table[:, : -(-max(kv_lens, default=0) // size)].tolist()
    for b, row in enumerate(rows):
        first = 0 if problem.top_left else kv_lens[b] - q_lens[b]
        lo = 0 if left is None else max(0, first - left)
        written = kv_lens[b] - cached[b]
        if q_lens[b] == 0 or written:
            lo = cached[b] if q_lens[b] == 0 else min(lo, cached[b])
        for slot in range(lo // size, -(-kv_lens[b] // size)):
            if not 0 <= row[slot] < pages:
                raise ArgumentError(f"page_table: needs pages from 0 to {pages - 1}, got {row[slot]} at [{b}, {slot}]")


def _check_range(name: str, values: list[int] | None, low: int, high: int) -> None:
    for b, value in enumerate(values or ()):
        if not low <= value <= high:
            raise ArgumentError(f"{name}: needs values from {low} to {high}, got {value} for sequence {b}")


def _check_cumulative(side: str, values: list[int], total: int | None, longest: int) -> list[int]:
    name = f"cu_seqlens_{side}"
    if values[0] != 0:
        raise ArgumentError(f"{name}: needs to start at 0, got {values[0]}")
    lens = [after - before for before, after in zip(values, values[1:])]
    for b, length in enumerate(lens):
        if length < 0:
            raise ArgumentError(f"{name}: needs to be non-decreasing, got {values[b]} then {values[b + 1]}")
        if length > longest:
            raise ArgumentError(
                f"max_seqlen_{side}: needs at least {length}, the length of sequence {b}, got {longest}"
            )
    if total is not None and values[-1] > total:
        raise ArgumentError(f"{name}: needs to end at most at {total}, the rows of {side}, got {values[-1]}")
    return lens


# --- small helpers --------------------------------------------------------------------------------------------------


def _unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.stride(-1) == 1:
        return tensor
    if tensor.shape[-1] == 1:  # the stride of a single element says nothing
        return tensor.as_strided(tensor.shape, (*tensor.stride()[:-1], 1))
    return tensor.contiguous()


def _int32(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None:
        return None
    if tensor.dtype == torch.int64:
        tensor = tensor.clamp(min=-(2**31), max=2**31 - 1).to(torch.int32)
    return tensor.contiguous()


def _aligned(tensor: torch.Tensor) -> bool:
    """Whether 16-byte accesses at every row are allowed."""
    size = tensor.element_size()
    try:
        bits = tensor.data_ptr()
    except RuntimeError:  # a functorch wrapper or a fake tensor: the address is not known yet
        bits = 0
    for stride, length in zip(tensor.stride()[:-1], tensor.shape):
        if length > 1:
            bits |= stride * size
    return bits % 16 == 0


def _longest(hint: int, operands: Operands, dim: int, total: int) -> int:
    """Upper bound of a packed sequence's length: the hint, else what bias and mask were made for, else the total."""
    shaped = [t for t in (operands.bias, operands.mask) if t is not None and t.dim() >= 4 - dim]
    if hint >= 0:
        return hint if shaped or operands.block_mask is not None else min(hint, total)
    return max((t.shape[dim - 4] for t in shaped if t.shape[dim - 4] != 1), default=total)


def _broadcast(name: str, tensor: torch.Tensor | None, full: list[int]) -> None:
    if tensor is None:
        return
    shape = _shape(tensor)
    if len(shape) > 4 or any(size not in (1, want) for size, want in zip(reversed(shape), reversed(full))):
        raise ArgumentError(
            f"{name}: needs a shape that broadcasts to [batch, num_heads_q, seqlen_q, seqlen_k] = {full}, got {shape}"
        )


def _vector(name: str, tensor: torch.Tensor | None, length: int | None) -> None:
    if tensor is None:
        raise ArgumentTypeError(f"{name}: needs a tensor when its counterpart is given, got None")
    if tensor.dim() != 1 or (length is not None and tensor.shape[0] != length):
        raise ArgumentError(f"{name}: needs shape [{'batch + 1' if length is None else length}], got {_shape(tensor)}")


def _rank(name: str, tensor: torch.Tensor, rank: int) -> None:
    if tensor.dim() != rank:
        layout = "[tokens, heads, head_dim]" if rank == 3 else "[batch, seqlen, heads, head_dim]"
        raise ArgumentError(f"{name}: needs {rank} dimensions {layout}, got shape {_shape(tensor)}")


def _shape(tensor: torch.Tensor | None) -> list[Any]:
    return [] if tensor is None else list(tensor.shape)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
