"""`scaled_dot_product_attention` with torch's signature, layout and conventions, computed by attnlib.

What differs between the two interfaces, and is translated here: torch's layout is [..., heads, seqlen, head_dim];
its causal mask is aligned top-left; its `attn_mask` is a mask if boolean and a bias if floating; grouped heads must
be announced by `enable_gqa`.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .. import attention
from ..errors import ArgumentError, ArgumentTypeError


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """Attention as torch.nn.functional.scaled_dot_product_attention defines it.

    Args:
        query: [..., Hq, Sq, D]; without a head or batch dimension too.
        key: [..., Hkv, Sk, D].
        value: [..., Hkv, Sk, Dv].
        attn_mask: broadcastable to [..., Hq, Sq, Sk]: bool (True = takes part), or floating (added to the scores),
            or a torch.nn.attention.bias.CausalBias.
        dropout_p: probability with which a weight is dropped. As in torch it applies whenever it is not 0.
        is_causal: key j is visible to query i iff j <= i (top-left alignment, whatever Sq and Sk).
        scale: factor of the scores; default 1 / sqrt(D).
        enable_gqa: allow Hq to be a multiple of Hkv.
        backend: an attnlib backend by name; the one argument that torch does not have.

    Returns:
        [..., Hq, Sq, Dv] in query's dtype. A query that sees no key gives 0.

    Raises:
        ArgumentError: attn_mask together with is_causal; shapes that do not go together.
        ArgumentTypeError: attn_mask of an integer dtype.
        UnsupportedError: no backend takes the call.

    Example:
        >>> from attnlib.adapters.sdpa import scaled_dot_product_attention
        >>> q = k = v = torch.randn(2, 8, 128, 64)
        >>> scaled_dot_product_attention(q, k, v, is_causal=True).shape
        torch.Size([2, 8, 128, 64])
    """
    options: dict[str, Any] = {}
    alignment = _causal_bias_alignment(attn_mask)
    if is_causal and attn_mask is not None:
        raise ArgumentError("attn_mask: needs to be None with is_causal=True, got both; fold the causal part into it")
    if alignment is not None:
        options.update(causal=True, causal_alignment=alignment)
        attn_mask = None
    elif is_causal:
        options.update(causal=True, causal_alignment="top_left")

    shape = query.shape
    query, key, value = (_with_heads(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    lead = _common_lead(query, key, value, enable_gqa)
    if attn_mask is not None:
        options.update(_mask_or_bias(attn_mask, len(shape), lead, query.shape[-3]))

    out = attention(
        _canonical(query, lead),
        _canonical(key, lead),
        _canonical(value, lead),
        scale=scale,
        dropout_p=dropout_p,
        backend=backend,
        **options,
    )
    return out.transpose(1, 2).reshape(*shape[:-1], value.shape[-1]) if len(shape) != 4 else out.transpose(1, 2)


def _causal_bias_alignment(attn_mask: torch.Tensor | None) -> str | None:
    """The alignment that a CausalBias stands for, None for any other mask."""
    if attn_mask is None or type(attn_mask) is torch.Tensor:
        return None
    from torch.nn.attention.bias import CausalBias, CausalVariant

    if not isinstance(attn_mask, CausalBias):
        return None
    return "top_left" if attn_mask.variant == CausalVariant.UPPER_LEFT else "bottom_right"


def _with_heads(name: str, x: torch.Tensor) -> torch.Tensor:
    """x with at least the dimensions [batch, heads, seqlen, head_dim]; torch allows to leave out the first two."""
    if x.dim() < 2:
        raise ArgumentError(f"{name}: needs at least 2 dimensions, [..., seqlen, head_dim], got {tuple(x.shape)}")
    if x.dim() == 2:
        return x[None, None]
    return x[:, None] if x.dim() == 3 else x


def _common_lead(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool) -> torch.Size:
    """The batch dimensions of the call; like torch's, they broadcast."""
    heads_q, heads_k, heads_v = (x.shape[-3] for x in (query, key, value))
    if heads_k != heads_v:
        raise ArgumentError(f"value: needs as many heads as key, {heads_k}, got {heads_v}")
    if heads_q != heads_k and heads_k != 1 and not enable_gqa:
        raise ArgumentError(
            f"enable_gqa: needs to be True for {heads_q} query and {heads_k} key/value heads, got {enable_gqa}"
        )
    try:
        return torch.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value)))
    except RuntimeError:
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        raise ArgumentError(f"query, key, value: need batch dimensions that go together, got {shapes}") from None


def _canonical(x: torch.Tensor, lead: torch.Size) -> torch.Tensor:
    """[lead..., heads, seqlen, dim] as [batch, seqlen, heads, dim], a view wherever that is possible."""
    if x.shape[:-3] != lead:
        x = x.expand(*lead, *x.shape[-3:])
    if x.dim() != 4:
        x = x.reshape(math.prod(lead), *x.shape[-3:])
    return x.transpose(1, 2)


def _mask_or_bias(attn_mask: torch.Tensor, dims: int, lead: torch.Size, heads: int) -> dict[str, torch.Tensor]:
    """attn_mask under attnlib's name for it, with the dimensions [batch or 1, heads or 1, Sq or 1, Sk or 1]."""
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise ArgumentTypeError(f"attn_mask: needs a bool or floating dtype, got {attn_mask.dtype}")
    mask = attn_mask
    if dims == 3 and mask.dim() == 3:
        mask = mask[:, None]  # [batch, Sq, Sk]: there is no head dimension
    if mask.dim() > len(lead) + 3:
        raise ArgumentError(f"attn_mask: needs at most {dims} dimensions, got {tuple(attn_mask.shape)}")
    while mask.dim() < 4:
        mask = mask[None]
    if len(lead) > 1:
        while mask.dim() < len(lead) + 3:
            mask = mask[None]
        own = mask.shape[:-3]
        batch = 1 if all(size == 1 for size in own) else math.prod(lead)
        mask = (mask if batch == 1 else mask.expand(*lead, *mask.shape[-3:])).reshape(batch, *mask.shape[-3:])
    return {"mask" if mask.dtype == torch.bool else "bias": mask}
