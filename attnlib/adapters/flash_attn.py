"""The functions of the flash-attn package under their own argument names, computed by attnlib.

    from attnlib.adapters.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

Layouts and causal alignment (bottom-right) are the same in both libraries. Translated here: -1 in `window_size` is
"unbounded", `softcap=0.0` is none, `block_table` is `page_table`, `cache_seqlens` is `kv_lens`. Arguments whose
effect attnlib does not have are refused by name, never ignored. Two results differ in their convention: lse of a
query that sees no key is -inf (flash-attn: +inf), and dropout draws its mask as docs/semantics.md says.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import attention, attention_kvcache, attention_varlen
from ..errors import ArgumentError, ArgumentTypeError, UnsupportedError


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q [B, Sq, Hq, D] over k, v [B, Sk, Hkv, D].

    Args:
        dropout_p: probability with which a weight is dropped.
        softmax_scale: factor of the scores; default 1 / sqrt(D).
        causal: bottom-right aligned.
        window_size: (left, right), -1 is unbounded.
        softcap: scores become softcap * tanh(score / softcap); 0 is none.
        alibi_slopes: float32 [Hq] or [B, Hq].
        deterministic: a bitwise repeatable backward; False follows torch.use_deterministic_algorithms.
        return_attn_probs: return (out, lse, None); lse is [B, Hq, Sq]. The third, flash-attn's dropout debug
            matrix, exists nowhere here, so True together with dropout is refused.

    Raises:
        UnsupportedError: return_attn_probs with dropout, or no backend takes the call.
    """
    result = attention(
        q,
        k,
        v,
        causal=causal,
        window=_window(window_size),
        scale=softmax_scale,
        softcap=_softcap(softcap),
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
        deterministic=True if deterministic else None,
        return_lse=_wants_lse(return_attn_probs, dropout_p),
    )
    return (*result, None) if return_attn_probs else result


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Any:
    """Attention of packed sequences: q [Tq, Hq, D], k and v [Tk, Hkv, D], cu_seqlens_* int32 [B + 1].

    Args:
        max_seqlen_q, max_seqlen_k: the longest sequence.
        block_table: int32 [B, max_pages]; k and v are then [num_pages, page_size, Hkv, D].
        The others: as in flash_attn_func; lse is [Hq, Tq].

    Raises:
        UnsupportedError: return_attn_probs with dropout, or no backend takes the call.
    """
    result = attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        page_table=block_table,
        causal=causal,
        window=_window(window_size),
        scale=softmax_scale,
        softcap=_softcap(softcap),
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
        deterministic=True if deterministic else None,
        return_lse=_wants_lse(return_attn_probs, dropout_p),
    )
    return (*result, None) if return_attn_probs else result


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention of q [B, Sq, Hq, D] over a cache, after appending k and v to it in place.

    Args:
        k_cache, v_cache: [B, S_max, Hkv, D], or [num_pages, page_size, Hkv, D] with block_table.
        k, v: [B, Snew, Hkv, D], written behind the first cache_seqlens tokens of each sequence before attention.
        cache_seqlens: an int, or int32 [B]: tokens in the cache before the call; None is a full cache.
        cache_batch_idx: int32 [B], the row of the cache that belongs to each query; not with block_table.
        block_table: int32 [B, max_pages].
        return_softmax_lse: return (out, lse).
        rotary_cos, rotary_sin, cache_leftpad: refused unless None. num_splits: refused unless 0, attnlib chooses.
        The others: as in flash_attn_func. rotary_interleaved has no effect without rotary_cos.

    Raises:
        UnsupportedError: an argument that attnlib does not have, or no backend takes the call.
        ArgumentError: cache_batch_idx together with block_table.
    """
    _refuse("rotary_cos", rotary_cos, "apply the rotation to q and k before the call")
    _refuse("rotary_sin", rotary_sin, "apply the rotation to q and k before the call")
    _refuse("cache_leftpad", cache_leftpad, "store every sequence from slot 0 on")
    _refuse("num_splits", num_splits or None, "attnlib chooses the number of splits; pass 0")
    if cache_batch_idx is not None:
        if block_table is not None:
            raise ArgumentError("cache_batch_idx: needs to be None with block_table, got both")
        # A cache of whole rows is a paged one whose page is a row.
        block_table = cache_batch_idx.to(torch.int32)[:, None]
    return attention_kvcache(
        q,
        k_cache,
        v_cache,
        _cache_lengths(cache_seqlens, q, k_cache, block_table, appends=k is not None),
        page_table=block_table,
        k_new=k,
        v_new=v,
        causal=causal,
        window=_window(window_size),
        scale=softmax_scale,
        softcap=_softcap(softcap),
        alibi_slopes=alibi_slopes,
        return_lse=return_softmax_lse,
    )


def _window(window_size: tuple[int, int]) -> tuple[int | None, int | None] | None:
    if len(window_size) != 2 or not all(isinstance(end, int) for end in window_size):
        raise ArgumentTypeError(f"window_size: needs two ints, got {window_size!r}")
    left, right = (None if end < 0 else end for end in window_size)
    return None if left is None and right is None else (left, right)


def _softcap(softcap: float) -> float | None:
    return None if softcap == 0 else softcap


def _wants_lse(return_attn_probs: bool, dropout_p: float) -> bool:
    if return_attn_probs and dropout_p:
        raise UnsupportedError(
            "return_attn_probs: needs dropout_p=0, got "
            f"{dropout_p}; attnlib has no dropout debug matrix (attnlib.dropout_mask gives the mask of a seed)"
        )
    return bool(return_attn_probs)


def _refuse(name: str, value: Any, remedy: str) -> None:
    if value is not None:
        got = f"a tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise UnsupportedError(f"{name}: attnlib does not have it, got {got} ({remedy})")


def _cache_lengths(
    cache_seqlens: int | torch.Tensor | None,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    *,
    appends: bool,
) -> torch.Tensor:
    """kv_lens [B] from flash-attn's int, tensor or None."""
    if isinstance(cache_seqlens, torch.Tensor):
        return cache_seqlens
    if cache_seqlens is None:
        if appends:
            raise ArgumentError("cache_seqlens: needs the tokens that the cache holds when k is given, got None")
        cache_seqlens = k_cache.shape[1] * (block_table.shape[1] if block_table is not None else 1)
    return torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)
