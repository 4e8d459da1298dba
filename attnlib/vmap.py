"""torch.func.vmap over the operators: fold the new dimension into batch, or run slice by slice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .errors import ArgumentError
from .operands import NUM_COMMON, Operands
from .ops import backward_op, forward_op, library, split


def _forward_vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    return _vmap(forward_op, 0, info, in_dims, args)


def _backward_vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    return _vmap(backward_op, 5, info, in_dims, args)


def _vmap(op: Callable[..., Any], first: int, info: Any, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
    """Fold the new dimension into batch where that changes no result; run slice by slice elsewhere.

    Folding would renumber the sequences that dropout counts, and mix gradients that are sums over the batch.
    """
    if info.batch_size == 0:
        raise ArgumentError("vmap: needs at least one slice, got a dimension of size 0")
    operands, scalars, _ = split(args[first:])
    dims = dict(zip(Operands._fields, in_dims[first:]))
    mixes = first and scalars.grads >> 3
    others = any(dims.get(name) is not None for name in Operands._fields[3:NUM_COMMON])
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
