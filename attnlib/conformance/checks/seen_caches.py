"""AB-nnn/*: inputs that broke attention libraries in public, each with the right answer under this contract.

Here: caches, pages and packed sequences.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from ...numerics import Result
from ..inputs import given
from ..items import Item, add, check
from ..subject import Subject, require, same_bits
from .interface import raises

# --- caches -----------------------------------------------------------------------------------------------------------


def _cache(subject: Subject, batch: int, capacity: int, fill: float = math.nan) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (batch, capacity, 2, 64)
    made = (torch.full(shape, fill, dtype=subject.dtype, device=subject.device) for _ in range(2))
    first, second = made
    return first, second


@check("AB-016/unused_slots")
def unused_slots(subject: Subject) -> None:
    """Pages of 4, 13 tokens: NaN, infinity or 0 in the unused slots of the last page give the same bits."""
    q = subject.randn(16, 1, 4, 64)
    k, v = (subject.randn(13, 2, 64, seed=s) for s in (1, 2))
    found = []
    for fill in (0.0, math.nan, math.inf):
        k_pages, v_pages = _cache(subject, 6, 4, fill)
        order = [5, 1, 3, 2]
        for page, where in enumerate(order):
            part = slice(4 * page, min(13, 4 * page + 4))
            k_pages[where, : len(k[part])], v_pages[where, : len(v[part])] = k[part], v[part]
        table = subject.ints(*order, -1).expand(16, 5).contiguous()
        lens = subject.ints(*[13] * 16)
        found.append(subject.call("attention_kvcache", q, k_pages, v_pages, lens, page_table=table))
        for got, want in zip(found[-1], found[0], strict=True):
            same_bits(f"result with {fill} in unused slots", got, want)
    dense = given(q, k.expand(16, -1, -1, -1), v.expand(16, -1, -1, -1))
    subject.check(dense, result=Result(*found[0]))


@check("AB-017/pages_before_the_window")
def pages_before_the_window(subject: Subject) -> None:
    """A window of (8, 0) over 64 tokens: recycled pages that lie wholly before it hold NaN."""
    q = subject.randn(32, 1, 4, 64)
    k, v = (subject.randn(64, 2, 64, seed=s) for s in (1, 2))
    k_pages, v_pages = _cache(subject, 4, 16)
    k_pages[2, :], v_pages[2, :] = k[48:], v[48:]
    table = subject.ints(0, 1, 3, 2).expand(32, 4).contiguous()
    lens = subject.ints(*[64] * 32)
    arguments: dict[str, Any] = {"window": (8, 0)}
    found = subject.call("attention_kvcache", q, k_pages, v_pages, lens, page_table=table, **arguments)
    dense = given(q, k.expand(32, -1, -1, -1), v.expand(32, -1, -1, -1), **arguments)
    subject.check(dense, result=Result(*found))


@check("AB-019/shared_pages")
def shared_pages(subject: Subject) -> None:
    """Two sequences that share their first page: each is its own dense gather."""
    q = subject.randn(2, 16, 4, 64)
    pages = [subject.randn(5, 16, 2, 64, seed=s) for s in (1, 2)]
    table, lens = torch.tensor([[3, 0], [3, 4]], dtype=torch.int32, device=subject.device), (17, 20)
    out, lse = subject.call("attention_kvcache", q, *pages, subject.ints(*lens), page_table=table, causal=True)
    for b, length in enumerate(lens):
        k, v = (x[table[b].long()].flatten(0, 1)[None, :length] for x in pages)
        subject.check(
            given(q[b : b + 1], k, v, causal=True), result=Result(out[b : b + 1], lse[b : b + 1].contiguous())
        )


@check("AB-020/beyond_the_cache")
def beyond_the_cache(subject: Subject) -> None:
    """Lengths past the pages: ValueError with the limit where the host sees it, else NaN rows; no page is touched."""
    q, new = subject.randn(2, 1, 4, 64), subject.randn(2, 1, 2, 64, seed=5)
    for lens, arguments in (((33, 4), {}), ((32, 4), {"k_new": new, "v_new": new})):
        k, v = (subject.randn(6, 16, 2, 64, seed=s) for s in (1, 2))
        table = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32, device=subject.device)
        before = k.clone(), v.clone()

        def call(lens: Any = lens, arguments: Any = arguments, k: Any = k, v: Any = v, table: Any = table) -> Any:
            return subject.call("attention_kvcache", q, k, v, subject.ints(*lens), page_table=table, **arguments)

        if subject.device.type == "cpu":
            raises(ValueError, "32", call)
            same_bits("the cache of keys", k, before[0])
            same_bits("the cache of values", v, before[1])
        else:
            out, lse = call()
            require(torch.isnan(out[0]), "out of a sequence that does not fit is not NaN")
            require(torch.isnan(lse[0]), "lse of a sequence that does not fit is not NaN")
            require(torch.isfinite(out[1]), "a sequence that fits is not finite")
            same_bits("other pages", k[[0, 1, 2, 5]], before[0][[0, 1, 2, 5]])


@check("AB-023/append_at_each_length")
def append_at_each_length(subject: Subject) -> None:
    """One new token for rows of length 0, 5 and 2: each at its own place, every other slot keeps its bytes."""
    lens, count = (0, 5, 2), 1
    for paged in (False, True):
        q, k_new, v_new = (
            subject.randn(3, 1, 16, 64),
            subject.randn(3, count, 8, 64, seed=1),
            subject.randn(3, count, 8, 64, seed=2),
        )
        k, v = (subject.randn(3, 8, 8, 64, seed=s) for s in (3, 4))
        before, arguments = (k.clone(), v.clone()), {}
        if paged:
            arguments["page_table"] = torch.tensor([[2], [0], [1]], dtype=torch.int32, device=subject.device)
        rows = [2, 0, 1] if paged else [0, 1, 2]
        kv_lens = subject.ints(*lens)
        out, lse = subject.call("attention_kvcache", q, k, v, kv_lens, k_new=k_new, v_new=v_new, **arguments)
        require(kv_lens.tolist() == list(lens), "kv_lens was changed")
        for b, length in enumerate(lens):
            for cache, old, new in ((k, before[0], k_new), (v, before[1], v_new)):
                want = old[rows[b]].clone()
                want[length : length + count] = new[b]
                same_bits(f"the cache of sequence {b}", cache[rows[b]], want)
            seen = slice(0, length + count)
            alone = given(q[b : b + 1], k[rows[b], seen][None], v[rows[b], seen][None])
            subject.check(alone, result=Result(out[b : b + 1], lse[b : b + 1].contiguous()))


@check("AB-025/rows_of_empty_sequences")
def rows_of_empty_sequences(subject: Subject) -> None:
    """Sequences without keys and query rows past the last sequence are written: 0 and -inf."""
    q, k, v = subject.randn(2, 5, 2, 32), subject.randn(2, 3, 2, 32, seed=1), subject.randn(2, 3, 2, 32, seed=2)
    out, lse = subject.attention(q, k, v, kv_lens=subject.ints(3, 0))
    require(out[1] == 0, "out of a sequence without keys is not 0")
    require(lse[1] == -math.inf, "lse of a sequence without keys is not -inf")
    out, lse = subject.call(
        "attention_varlen", q.reshape(10, 2, 32)[:8], k.reshape(6, 2, 32), v.reshape(6, 2, 32),
        subject.ints(0, 2, 5), subject.ints(0, 3, 6),
    )  # fmt: skip
    require(out[5:] == 0, "out of rows past the last sequence is not 0")
    require(lse[:, 5:] == -math.inf, "lse of rows past the last sequence is not -inf")
    require(torch.isfinite(lse[:, :5]), "lse of real rows is not finite")


# --- packed sequences -------------------------------------------------------------------------------------------------


def few_tokens(which: int, subject: Subject) -> None:
    """One query at most, empty sequences, grouped heads, fewer tokens than sequences."""
    (q_ends, k_ends), heads, kv_heads, dim = (
        (((0, 1, 1, 2), (0, 3, 3, 8)), 9, 3, 64), (((0, 0, 0, 0, 1), (0, 0, 0, 0, 1)), 21, 7, 120),
    )[which]  # fmt: skip
    q = subject.randn(q_ends[-1], heads, dim)
    k, v = (subject.randn(k_ends[-1], kv_heads, dim, seed=s) for s in (1, 2))
    tables = {"cu_seqlens_q": subject.ints(*q_ends), "cu_seqlens_k": subject.ints(*k_ends)}
    for longest in (None, 1):
        arguments: dict[str, Any] = {} if longest is None else {"max_seqlen_q": longest}
        inputs = given(q.clone(), k.clone(), v.clone(), tables=tables, causal=True, grads=("q", "k", "v"),
                       dout=torch.ones_like(q), **arguments)  # fmt: skip
        subject.check(inputs, cancels=True)


add(Item("AB-026/empty_sequences_among_others", functools.partial(few_tokens, 0)))
add(Item("AB-026/fewer_tokens_than_sequences", functools.partial(few_tokens, 1)))


@check("AB-028/rows_past_the_last_sequence")
def rows_past_the_last_sequence(subject: Subject) -> None:
    """Rows past cu_seqlens[-1] of out, dq, dk and dv are 0, and nothing of them is read."""
    q, k, v, dout = (subject.randn(10, 2, 32, seed=s) for s in range(4))
    for tensor in (q, k, v, dout):
        tensor[7:] = math.nan
    ends = subject.ints(0, 3, 7)
    inputs = given(
        q, k, v, tables={"cu_seqlens_q": ends, "cu_seqlens_k": ends}, causal=True, grads=("q", "k", "v"), dout=dout
    )
    result = subject.run(inputs)
    for name in ("out", "dq", "dk", "dv"):
        tensor = getattr(result, name)
        require(tensor[7:] == 0, f"{name} of rows past the last sequence is not 0")
        require(torch.isfinite(tensor), f"{name} is not finite")


@check("AB-029/wrong_cu_seqlens")
def wrong_cu_seqlens(subject: Subject) -> None:
    """cu_seqlens that cannot be: ValueError or TypeError naming them, before anything runs."""
    q, ends = subject.randn(256, 2, 32), subject.ints(0, 100, 256)

    def call(cu: torch.Tensor, **arguments: Any) -> Any:
        return subject.call("attention_varlen", q, q, q, cu, cu, **arguments)

    raises(ValueError, "cu_seqlens", call, ends[None])
    raises(TypeError, "cu_seqlens", call, ends.float())
    if subject.device.type == "cpu":
        for wrong in ((0, 256, 512, 768), (0, 200, 100, 256), (1, 100, 256)):
            raises(ValueError, "cu_seqlens", call, subject.ints(*wrong))
        raises(ValueError, "max_seqlen", call, ends, max_seqlen_q=100)
    else:
        raises(ValueError, "cu_seqlens", call, ends.cpu())
