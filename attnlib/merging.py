"""Partial attention results into the whole, by their logsumexp."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .errors import ArgumentError, ArgumentTypeError


def merge(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a union of key sets from the attention over each: out = sum_n exp(lse_n - lse) out_n.

    Plain differentiable torch. A part whose lse is -inf weighs nothing, whatever its out holds. Sinks may be in one
    part at most.

    Args:
        outs: tensors of one shape, [batch, seqlen_q, num_heads_q, head_dim_v] or packed [total_q, num_heads_q, .].
        lses: as many, [batch, num_heads_q, seqlen_q] or packed [num_heads_q, total_q], natural logarithms.

    Returns:
        out in the dtype of outs[0], and lse = log(sum_n exp(lse_n)).

    Raises:
        ArgumentError: no parts, as many outs as lses not given, or shapes that do not fit together.

    Example:
        >>> parts = [attnlib.attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(0, 50), slice(50, None))]
        >>> out, lse = attnlib.merge([p[0] for p in parts], [p[1] for p in parts])
    """
    outs, lses = list(outs), list(lses)
    if not outs or len(outs) != len(lses):
        raise ArgumentError(f"outs, lses: need as many of each, at least one, got {len(outs)} and {len(lses)}")
    for name, tensors in (("outs", outs), ("lses", lses)):
        for index, tensor in enumerate(tensors):
            if not isinstance(tensor, torch.Tensor):
                raise ArgumentTypeError(f"{name}[{index}]: needs a tensor, got {type(tensor).__name__}")
            if tensor.dtype != tensors[0].dtype or tensor.device != tensors[0].device:
                needed, got = (f"{t.dtype} on {t.device}" for t in (tensors[0], tensor))
                raise ArgumentError(f"{name}[{index}]: needs {needed}, got {got}")
            if tensor.shape != tensors[0].shape:
                raise ArgumentError(f"{name}[{index}]: needs shape {list(tensors[0].shape)}, got {list(tensor.shape)}")
    shape = outs[0].shape
    rows = (shape[1], shape[0]) if len(shape) == 3 else (shape[0], shape[2], shape[1]) if len(shape) == 4 else None
    if rows is None or tuple(lses[0].shape) != rows:
        raise ArgumentError(
            f"lses: need shape {rows and list(rows)} for outs of {list(shape)}, got {list(lses[0].shape)}"
        )
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
