"""Partial attention results into the whole, by their logsumexp."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .adapters import arrays
from .arguments import check_dense, check_memory
from .errors import ArgumentError, ArgumentTypeError
from .problem import DTYPES


def merge(outs: Sequence[Any], lses: Sequence[Any]) -> tuple[Any, Any]:
    """Attention over a union of key sets from the attention over each: out = sum_n exp(lse_n - lse) out_n.

    Plain differentiable torch. A part whose lse is -inf weighs nothing, whatever its out holds. Sinks may be in one
    part at most.

    Args:
        outs: a list of float tensors of one dtype and shape, [batch, seqlen_q, num_heads_q, head_dim_v] or packed
            [total_q, num_heads_q, head_dim_v]; or of arrays that speak DLPack, and the results are of their kind,
            without gradients.
        lses: as many, [batch, num_heads_q, seqlen_q] or packed [num_heads_q, total_q], natural logarithms.

    Returns:
        out in the dtype of outs, and lse = log(sum_n exp(lse_n)) in float32 (float64 for float64 outs).

    Raises:
        ArgumentError: no parts, not as many outs as lses, or shapes or devices that do not fit together.
        ArgumentTypeError: no list of tensors, no floats, or dtypes that differ.

    Example:
        >>> parts = [attnlib.attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(0, 50), slice(50, None))]
        >>> out, lse = attnlib.merge([p[0] for p in parts], [p[1] for p in parts])
    """
    outs, lses = _parts("outs", outs), _parts("lses", lses)
    if not outs or len(outs) != len(lses):
        raise ArgumentError(f"outs, lses: need as many of each, at least one, got {len(outs)} and {len(lses)}")
    if arrays.is_array(outs[0]):
        tensors = [
            [arrays.to_torch(part, f"{name}[{index}]")[0] for index, part in enumerate(parts)]
            for name, parts in (("outs", outs), ("lses", lses))
        ]
        back = arrays.to_torch(outs[0])[1]
        with torch.no_grad():
            out, lse = merge(*tensors)
        return back(out), back(lse)
    _check(outs, lses)
    dtype = torch.float64 if outs[0].dtype == torch.float64 else torch.float32
    stacked = torch.stack([lse.to(dtype) for lse in lses])
    top = stacked.detach().amax(0)
    top = torch.where(top == -torch.inf, torch.zeros_like(top), top)
    empty = stacked == -torch.inf
    weights = torch.where(empty, 0.0, torch.exp(torch.where(empty, 0.0, stacked) - top))
    total = weights.sum(0)
    nothing = total == 0
    lse = torch.where(nothing, -torch.inf, top + torch.log(torch.where(nothing, 1.0, total)))
    shares = weights / torch.where(nothing, 1.0, total)
    out = torch.full_like(outs[0], -0.0, dtype=dtype)  # -0.0 + x is x to the bit
    for part, share, hidden in zip(outs, shares, empty):
        hidden_rows = hidden.transpose(-1, -2).unsqueeze(-1)
        weighed = share.transpose(-1, -2).unsqueeze(-1) * torch.where(hidden_rows, 0.0, part.to(dtype))
        out = torch.where(hidden_rows, out, out + weighed)
    out = torch.where(nothing.transpose(-1, -2).unsqueeze(-1), 0.0, out)
    return out.to(outs[0].dtype), lse


def _parts(name: str, parts: Any) -> list[Any]:
    """The parts as a list. One tensor is none: its batch would be taken for the parts."""
    if isinstance(parts, torch.Tensor) or arrays.is_array(parts) or not isinstance(parts, Iterable):
        raise ArgumentTypeError(f"{name}: needs a sequence of tensors or arrays, got one {type(parts).__name__}")
    return list(parts)


def _check(outs: list[Any], lses: list[Any]) -> None:
    named = [(f"outs[{index}]", out) for index, out in enumerate(outs)]
    named += [(f"lses[{index}]", lse) for index, lse in enumerate(lses)]
    for name, tensor in named:
        first = outs[0] if name.startswith("outs") else lses[0]
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentTypeError(f"{name}: needs a tensor, as outs[0] is, got {type(tensor).__name__}")
        check_dense(name, tensor)
        if tensor.dtype not in DTYPES:
            got = str(tensor.dtype).removeprefix("torch.")
            raise ArgumentTypeError(f"{name}: needs float64, float32, float16 or bfloat16, got {got}")
        if tensor.device != outs[0].device:
            raise ArgumentError(f"{name}: needs device {outs[0].device}, as outs[0] has, got {tensor.device}")
        if tensor.dtype != first.dtype:
            raise ArgumentTypeError(f"{name}: needs {first.dtype}, as {name[:4]}[0] has, got {tensor.dtype}")
        if tensor.shape != first.shape:
            raise ArgumentError(f"{name}: needs shape {list(first.shape)}, got {list(tensor.shape)}")
    shape = outs[0].shape
    if len(shape) not in (3, 4):
        raise ArgumentError(
            "outs: need shape [batch, seqlen_q, num_heads_q, head_dim_v] or [total_q, num_heads_q, head_dim_v], got "
            f"{list(shape)}"
        )
    rows = [*shape[:-3], shape[-2], shape[-3]]
    if list(lses[0].shape) != rows:
        raise ArgumentError(f"lses: need shape {rows} for outs of {list(shape)}, got {list(lses[0].shape)}")
    if not torch.compiler.is_compiling():
        check_memory(named)
