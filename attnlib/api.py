"""The public functions. What they mean is written once, in docs/semantics.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.compiler import is_compiling

from . import dispatch, front, ops, run
from . import vmap as _vmap  # noqa: F401  registers itself
from .arguments import check_devices, check_memory
from .calls import (
    BlockMask,
    autocast,
    blocks_of,
    check_cache,
    length_hint,
    scalars_of,
    seed_tensor,
)
from .errors import ArgumentError, ArgumentTypeError, AttnlibError
from .operands import Operands, Scalars
from .options import check_flag

Result = Any  # a tensor, or (out, lse) with return_lse=True


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    causal_alignment: str = "bottom_right",
    window: Sequence[int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    block_mask: BlockMask | None = None,
    q_lens: Any = None,
    kv_lens: Any = None,
    dropout_p: float = 0.0,
    dropout_seed: Any = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str | None = None,
) -> Result:
    """Exact attention, softmax(scale * q k^T + bias) v, computed in tiles without the seqlen_q x seqlen_k matrix.

    Differentiable in q, k, v, bias and sinks, through out and lse. Works under autocast (which casts q, k and v),
    torch.compile, torch.export, activation checkpointing, torch.func.grad and vmap.
    Source: FlashAttention, Dao et al., 2022, https://arxiv.org/abs/2205.14135, and FlashAttention-2, Dao, 2023.

    Args:
        q: [batch, seqlen_q, num_heads_q, head_dim], float64, float32, float16 or bfloat16. A torch tensor, or any
            array that speaks DLPack (NumPy, CuPy, JAX): the result is of the same kind, without gradients.
        k: [batch, seqlen_k, num_heads_kv, head_dim], dtype and device of q; num_heads_q is a multiple of num_heads_kv.
        v: [batch, seqlen_k, num_heads_kv, head_dim_v], likewise.
        causal: query i sees keys up to its own position, pos(i) = i + kv_len - q_len.
        causal_alignment: "bottom_right", or "top_left" for pos(i) = i.
        window: (left, right): a query sees keys from pos - left to pos + right, both inclusive; None is unbounded.
        scale: finite factor of q k^T; default 1 / sqrt(head_dim).
        softcap: if given, scores become softcap * tanh(scores / softcap), before bias and masks.
        bias: added to the scores; any float dtype, broadcastable to [batch, num_heads_q, seqlen_q, seqlen_k].
            -inf hides a key. Never expanded in memory.
        mask: bool, broadcasts alike; True is visible.
        alibi_slopes: float32 [num_heads_q] or [batch, num_heads_q]: adds -slope * |pos(i) - j|. No gradient.
        sinks: float [num_heads_q]: a score that every row of the head has beside its keys, with no value.
        block_mask: which blocks of the score matrix are visible.
        q_lens: int32 [batch], queries of each sequence in a padded batch; rows past them give 0 and lse -inf.
        kv_lens: int32 [batch], keys of each sequence; what lies past them is never read into a result.
        dropout_p: probability from 0 to 1 of dropping each (query, key) pair after the softmax.
        dropout_seed: int in [-2**63, 2**63), or an int64 tensor of one element on q's device; default drawn from
            torch's generator. The same seed drops the same pairs on every backend, see dropout_mask.
        return_lse: also return lse, the natural logarithm of each row's softmax denominator.
        deterministic: a bitwise repeatable backward; default torch.are_deterministic_algorithms_enabled().
        backend: name or comma list, e.g. "cpu" or "cuda:sm_90a"; default use_backend(), then ATTNLIB_BACKEND, then
            the best that takes the problem. explain() shows the choice.

    Returns:
        out [batch, seqlen_q, num_heads_q, head_dim_v] in q's dtype; with return_lse also lse [batch, num_heads_q,
        seqlen_q] in float32 (float64 for float64). A row that sees no key gives 0, and -inf or its sink as lse.

    Raises:
        ArgumentError: a value or shape is outside what is said above (also a ValueError).
        ArgumentTypeError: a type or dtype is (also a TypeError).
        UnsupportedError: no backend takes the problem; it carries every backend's reasons.

    Example:
        >>> import torch, attnlib
        >>> q = torch.randn(2, 128, 8, 64)
        >>> k, v = torch.randn(2, 128, 2, 64), torch.randn(2, 128, 2, 64)
        >>> attnlib.attention(q, k, v, causal=True).shape
        torch.Size([2, 128, 8, 64])
    """
    if not isinstance(q, torch.Tensor):
        return _through_arrays(attention, locals())
    form: front.Form | None = None
    if front.find is not None and not is_compiling():
        form = (
            q, k, v, causal, causal_alignment, window, scale, softcap, bias, mask, alibi_slopes, sinks, block_mask,
            q_lens, kv_lens, dropout_p, dropout_seed, return_lse, deterministic, backend,
        )  # fmt: skip
        found = front.find(*form)
        if found is not None and found is not False:
            return found
        if found is None:
            form = None
    operands = Operands(
        q, k, v, bias, mask, alibi_slopes, sinks, blocks_of(block_mask), q_lens, kv_lens, None, None, None,
        seed_tensor(q, dropout_p, dropout_seed),
    )  # fmt: skip
    return _run(
        operands, return_lse, backend, causal, causal_alignment, window, scale, softcap, dropout_p, deterministic,
        block_mask, form=form,
    )  # fmt: skip


def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    page_table: Any = None,
    causal: bool = False,
    causal_alignment: str = "bottom_right",
    window: Sequence[int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    block_mask: BlockMask | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Any = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str | None = None,
) -> Result:
    """Attention over sequences of different lengths packed one after the other, without padding.

    Sequence b holds rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q, and likewise of k and v. Rows of q past the
    last sequence are padding: out 0, lse -inf, no gradient. Everything else is as in attention, with positions,
    bias, mask and dropout counted inside each sequence.

    Args:
        q: [total_q, num_heads_q, head_dim].
        k: [total_k, num_heads_kv, head_dim]; with page_table [num_pages, page_size, num_heads_kv, head_dim].
        v: [total_k, num_heads_kv, head_dim_v]; with page_table [num_pages, page_size, num_heads_kv, head_dim_v].
        cu_seqlens_q: int32 [batch + 1] from 0, non-decreasing, on q's device: where each sequence starts.
        cu_seqlens_k: likewise for k; with page_table only its differences count, as lengths.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths, ints or one-element tensors; hints. With bias, mask
            or block_mask they give the last two dimensions these broadcast to (default: taken from bias or mask).
        page_table: int32 [batch, max_pages], the pages of each sequence in order.

    Returns:
        out [total_q, num_heads_q, head_dim_v]; with return_lse also lse [num_heads_q, total_q].

    Raises:
        As attention. cu_seqlens are checked where the host can see them, and clamped inside the kernels elsewhere.

    Example:
        >>> cu = torch.tensor([0, 3, 8], dtype=torch.int32)
        >>> x = torch.randn(8, 4, 64)
        >>> attnlib.attention_varlen(x, x, x, cu, cu, causal=True).shape
        torch.Size([8, 4, 64])
    """
    if not isinstance(q, torch.Tensor):
        return _through_arrays(attention_varlen, locals())
    for name, tensor in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if tensor is None:
            raise ArgumentTypeError(f"{name}: needs an int32 tensor [batch + 1], got None")
    operands = Operands(
        q, k, v, bias, mask, alibi_slopes, sinks, blocks_of(block_mask), None, None, cu_seqlens_q, cu_seqlens_k,
        page_table, seed_tensor(q, dropout_p, dropout_seed),
    )  # fmt: skip
    return _run(
        operands, return_lse, backend, causal, causal_alignment, window, scale, softcap, dropout_p, deterministic,
        block_mask, length_hint("max_seqlen_q", max_seqlen_q), length_hint("max_seqlen_k", max_seqlen_k),
    )  # fmt: skip


def attention_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    kv_lens: Any,
    *,
    page_table: Any = None,
    k_new: Any = None,
    v_new: Any = None,
    new_lens: Any = None,
    q_lens: Any = None,
    causal: bool = False,
    window: Sequence[int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Result:
    """Attention of new queries over a key/value cache, contiguous or paged, appending new keys and values first.

    Token t of row b of k_new and v_new is written to the cache at kv_lens[b] + t for t < new_lens[b]; attention then
    sees kv_lens + new_lens keys. The caches are changed in place, kv_lens is not. No gradient, no dropout; positions
    are bottom-right. Pages that two sequences share may be read; appending into one is the caller's mistake.

    Args:
        q: [batch, seqlen_q, num_heads_q, head_dim].
        k_cache: [batch, capacity, num_heads_kv, head_dim], or paged [num_pages, page_size, num_heads_kv, head_dim].
        v_cache: likewise with head_dim_v.
        kv_lens: int32 [batch], tokens in the cache before the call.
        page_table: int32 [batch, max_pages]; entries past a sequence's length are never read.
        k_new: [batch, seqlen_new, num_heads_kv, head_dim]; needs v_new.
        v_new: [batch, seqlen_new, num_heads_kv, head_dim_v].
        new_lens: int32 [batch], tokens of k_new to append; default all.
        q_lens: int32 [batch], queries of each row; default seqlen_q.
        bias, mask: broadcastable to [batch, num_heads_q, seqlen_q, capacity].
        causal, window, scale, softcap, alibi_slopes, sinks, return_lse, backend: as in attention.

    Returns:
        out [batch, seqlen_q, num_heads_q, head_dim_v]; with return_lse also lse [batch, num_heads_q, seqlen_q].

    Raises:
        ArgumentError: also if a length does not fit the cache, where the host can see it; elsewhere nothing is
            written out of bounds and the rows of that sequence are NaN. Also if an input requires a gradient.

    Example:
        >>> k_cache, v_cache = torch.zeros(2, 64, 2, 32), torch.zeros(2, 64, 2, 32)
        >>> lens = torch.tensor([5, 9], dtype=torch.int32)
        >>> new = torch.randn(2, 1, 2, 32)
        >>> attnlib.attention_kvcache(torch.randn(2, 1, 8, 32), k_cache, v_cache, lens, k_new=new, v_new=new).shape
        torch.Size([2, 1, 8, 32])
    """
    if not isinstance(q, torch.Tensor):
        return _through_arrays(attention_kvcache, locals())
    operands = Operands(
        q, k_cache, v_cache, bias, mask, alibi_slopes, sinks, None, q_lens, kv_lens, None, None, page_table, None,
        k_new, v_new, new_lens,
    )  # fmt: skip
    check_cache(operands)
    return _run(operands, return_lse, backend, causal, "bottom_right", window, scale, softcap, 0.0, False, cache=True)


# --- from the public functions to the operators ----------------------------------------------------------------------


def _run(
    operands: Operands,
    return_lse: bool,
    backend: str | None,
    causal: bool,
    causal_alignment: str,
    window: Sequence[int | None] | None,
    scale: float | None,
    softcap: float | None,
    dropout_p: float,
    deterministic: bool | None,
    block_mask: BlockMask | None = None,
    longest_q: int = -1,
    longest_k: int = -1,
    cache: bool = False,
    form: front.Form | None = None,
) -> Result:
    check_flag("return_lse", return_lse)
    try:
        if torch._C._is_any_autocast_enabled():
            operands = autocast(operands, cache)
        spec = dispatch.requested(backend)
        scalars = scalars_of(
            operands, causal, causal_alignment, window, scale, softcap, dropout_p, deterministic, block_mask,
            longest_q, longest_k,
        )  # fmt: skip
        if operands.k_new is not None:
            result = _append(operands, scalars, spec)
        elif "reference" in spec.lower() and not torch.compiler.is_compiling() and dispatch.wants_reference(spec):
            check_memory(zip(Operands._fields, operands))
            result = run.run_reference(operands, scalars, spec) or ops.call(operands, scalars, spec, return_lse)
        else:
            result = ops.call(operands, scalars, spec, return_lse)
            if form is not None:
                front.keep(form, operands, scalars, spec)
    except Exception as error:
        if torch.compiler.is_compiling():
            raise
        found = _named(error, operands, cache)
        if found is error:
            raise
        raise found from error
    return result if return_lse else result[0]


def _named(error: Exception, operands: Operands, cache: bool) -> Exception:
    """error, or a better one: what operand is no dense tensor with memory, under the name that the caller used."""
    if not isinstance(error, AttnlibError):
        try:
            check_devices(operands)
            check_memory(zip(Operands._fields, operands))
        except (ArgumentError, ArgumentTypeError) as found:
            error = found
    name, colon, rest = str(error).partition(":")
    if cache and name in ("k", "v") and isinstance(error, (ArgumentError, ArgumentTypeError)):
        return type(error)(f"{name}_cache{colon}{rest}")
    return error


def _append(operands: Operands, scalars: Scalars, spec: str) -> tuple[torch.Tensor, torch.Tensor]:
    check_devices(operands)
    for name, written in (("k_cache", operands.k), ("v_cache", operands.v)):
        if written.is_neg() or written._is_zerotensor():
            got = "a negative view (see resolve_neg)" if written.is_neg() else "a symbolic zero"
            raise ArgumentError(f"{name}: needs plain memory to be written, got {got}")
    *common, k_new, v_new, new_lens = operands
    return ops.append_forward_op(k_new, v_new, new_lens, *common, *scalars, spec)


def _through_arrays(function: Any, arguments: dict[str, Any]) -> Any:
    """Run function on torch views of DLPack arrays and hand the result back as arrays of q's kind."""
    from .adapters import arrays

    return arrays.call(function, arguments)
