"""From the tensors of a call to an AttentionProblem and canonical Tensors. Nothing behind this validates again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from .errors import ArgumentError, ArgumentTypeError
from .lengths import check_values
from .operands import DIFFERENTIABLE, INTEGERS, PLAIN, TENSORS, Operands, Scalars
from .options import drop_threshold
from .problem import DTYPES, AttentionProblem, Tensors, Window

_FLOAT32_MAX, _FLOAT32_TINY = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny


def check_types(operands: Operands) -> None:
    """Raises ArgumentTypeError for an operand that is not a tensor."""
    if TENSORS.issuperset(map(type, operands[:3])) and PLAIN.issuperset(map(type, operands[3:])):
        return
    for index, (name, tensor) in enumerate(zip(Operands._fields, operands)):
        if not isinstance(tensor, torch.Tensor) and (tensor is not None or index < 3):
            raise ArgumentTypeError(f"{name}: needs a tensor, got {type(tensor).__name__}")


def check_devices(operands: Operands) -> None:
    """Raises for an operand that is not a plain strided tensor on q's device."""
    check_types(operands)
    for name, tensor in zip(Operands._fields, operands):
        if tensor is not None:
            check_dense(name, tensor)
    device = operands.q.device
    for name, tensor in zip(Operands._fields, operands):
        if tensor is not None and tensor.device != device:
            raise ArgumentError(f"{name}: needs device {device}, as q has, got {tensor.device}")


def check_dense(name: str, tensor: torch.Tensor) -> None:
    """Raises ArgumentTypeError for a tensor that has no shape and strides of one dense block."""
    if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
        got = f"an {type(tensor).__name__}"
    elif tensor.layout != torch.strided:
        got = f"layout {tensor.layout}"
    elif tensor.is_nested or tensor.is_quantized:
        got = "a nested tensor" if tensor.is_nested else "a quantized tensor"
    else:
        return
    raise ArgumentTypeError(f"{name}: needs a dense (strided) tensor, got {got}")


def check_memory(named: Iterable[tuple[str, torch.Tensor | None]]) -> None:
    """Raises ArgumentError for a tensor whose values are nowhere: freed, or a fake one among real ones."""
    given = [(name, tensor) for name, tensor in named if tensor is not None]
    all_fake = all(isinstance(tensor, FakeTensor) for _, tensor in given)
    for name, tensor in given:
        if not all_fake and (isinstance(tensor, FakeTensor) or _is_freed(tensor)):
            raise ArgumentError(f"{name}: needs a tensor that has memory, got a {type(tensor).__name__} without any")


def _is_freed(tensor: torch.Tensor) -> bool:
    if tensor.is_meta or tensor._is_zerotensor() or type(tensor) not in TENSORS:
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or torch._is_functional_tensor(tensor):
        return False
    return tensor.numel() > 0 and not tensor.data_ptr()


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
        dropout_p=drop_threshold(scalars.dropout_p) / 65536,
        grads=tuple(name for bit, name in enumerate(DIFFERENTIABLE) if scalars.grads >> bit & 1),
        deterministic=scalars.deterministic,
        tf32=scalars.tf32,
        aligned=all(dim * q.element_size() % 16 == 0 for dim in (head_dim, head_dim_v))  # so that every copy is, too
        and all(_aligned(t) for t in (q, k, v, operands.k_new, operands.v_new) if t is not None),
    )


def _check_dtypes(operands: Operands) -> None:
    check_devices(operands)
    q = operands.q
    for name in ("q", "k", "v"):
        tensor = getattr(operands, name)
        if tensor.dtype not in DTYPES:
            raise ArgumentTypeError(f"{name}: needs float64, float32, float16 or bfloat16, got {_name(tensor.dtype)}")
        if tensor.dtype != q.dtype:
            raise ArgumentTypeError(f"{name}: needs {_name(q.dtype)}, as q has, got {_name(tensor.dtype)}")
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
    for name in INTEGERS:
        tensor = getattr(operands, name)
        if tensor is not None and tensor.dtype not in (torch.int32, torch.int64):
            raise ArgumentTypeError(f"{name}: needs int32 or int64, got {_name(tensor.dtype)}")
    for name in ("k_new", "v_new"):
        tensor = getattr(operands, name)
        if tensor is not None and tensor.dtype != q.dtype:
            raise ArgumentTypeError(f"{name}: needs {_name(q.dtype)}, as q has, got {_name(tensor.dtype)}")


def check_growing(operands: Operands) -> Operands:
    """A cache that is written must hold each element once; new tokens that lie in a cache are copied first."""
    k, v = operands.k, operands.v
    for name, cache in (("k_cache", k), ("v_cache", v)):
        reach = 0
        for stride, size in sorted(zip(cache.stride(), cache.shape)):
            if size > 1 and stride <= reach and cache.numel():
                raise ArgumentError(
                    f"{name}: needs memory of its own for every element when k_new is given, got shape "
                    f"{_shape(cache)} with strides {list(cache.stride())}"
                )
            reach += stride * (size - 1)
    if k.numel() and v.numel() and _overlap((v.data_ptr() - k.data_ptr()) // k.element_size(), k, v):
        raise ArgumentError("k_cache, v_cache: need memory of their own when k_new is given, got views that overlap")
    homes = {k.untyped_storage().data_ptr(), v.untyped_storage().data_ptr()}
    fresh = [
        new if new is None or new.untyped_storage().data_ptr() not in homes else new.clone()
        for new in (operands.k_new, operands.v_new)
    ]
    return operands._replace(k_new=fresh[0], v_new=fresh[1])


def _overlap(distance: int, left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two views of the same strides, right starting distance elements behind left, share an element."""
    if left.stride() != right.stride():
        return distance == 0
    dims = sorted(zip(left.stride(), left.shape, right.shape), reverse=True)

    def meets(rest: int, depth: int) -> bool:
        if depth == len(dims):
            return rest == 0
        stride, n, m = dims[depth]
        if stride == 0:
            return meets(rest, depth + 1)
        steps = {rest // stride, rest // stride + 1}
        return any(-m < step < n and meets(rest - step * stride, depth + 1) for step in steps)

    return meets(distance, 0)


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


def is_canonical(operands: Operands) -> bool:
    """Whether q, k and v are as Tensors asks for, and there is no other operand."""
    return all(tensor is None for tensor in operands[3:]) and all(_unit_stride(t) is t for t in operands[:3])


def bind(operands: Operands, problem: AttentionProblem) -> Tensors:
    """Canonical operands of a checked call; out, lse and gradients are still missing (out and lse hold q).

    Raises ArgumentError for lengths that do not fit, where the host can see them.
    """
    q, k, v = _unit_stride(operands.q), _unit_stride(operands.k), _unit_stride(operands.v)
    if v.shape[-1] != problem.head_dim_v:
        v = v.new_zeros((*v.shape[:-1], problem.head_dim_v))
    check_values(operands, problem)
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
    )


def bind_dout(dout: torch.Tensor, problem: AttentionProblem) -> torch.Tensor:
    """The gradient of out in canonical form."""
    dout = _unit_stride(dout)
    if not problem.aligned or (dout.is_contiguous() and not dout.data_ptr() & 15) or _aligned(dout):
        return dout
    return dout.clone(memory_format=torch.contiguous_format)


def _values_new(v_new: torch.Tensor, problem: AttentionProblem) -> torch.Tensor:
    if v_new.shape[-1] != problem.head_dim_v:
        return v_new.new_zeros((*v_new.shape[:-1], problem.head_dim_v))
    return _unit_stride(v_new)


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
