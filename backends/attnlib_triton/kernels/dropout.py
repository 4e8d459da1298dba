"""Which weights dropout keeps: one call of Philox for eight of them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _philox(c0, c1, c2, c3, seed):
    """Philox4x32-10 (Salmon et al., 2011). Operands broadcast: the first rounds work on rows or columns only."""
    key0 = seed.to(tl.uint32)
    key1 = (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        low0 = c0 * 0xD2511F53
        low1 = c2 * 0xCD9E8D57
        high0 = tl.umulhi(c0, tl.full([], 0xD2511F53, tl.uint32))
        high1 = tl.umulhi(c2, tl.full([], 0xCD9E8D57, tl.uint32))
        c0 = high1 ^ c1 ^ key0
        c2 = high0 ^ c3 ^ key1
        c1 = low1
        c3 = low0
        key0 = key0 + 0x9E3779B9
        key1 = key1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def keeps(seed, place, threshold, M: tl.constexpr, N: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Which of M queries from place.i0 (a multiple of 16) by N keys from j0 (of 32) are kept, [M, N] or transposed.

    A call of Philox serves rows {i, i+8} and columns {j, j+8, j+16, j+24}, so M/2 by N/4 calls serve the tile; their
    eight numbers each are then put where they belong.
    """
    row = (place.i0 // 16 * 8 + tl.arange(0, M // 2)).to(tl.uint32)[:, None]
    column = (place.j0 // 32 * 8 + tl.arange(0, N // 4)).to(tl.uint32)[None, :]
    w0, w1, w2, w3 = _philox(column, row, tl.cast(place.head0, tl.uint32), tl.cast(place.b, tl.uint32), seed)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [M/2, N/4, 2, 2]: word 2 p + q
    low = (words & 0xFFFF).to(tl.int32) >= threshold
    high = (words >> 16).to(tl.int32) >= threshold
    kept = tl.join(low.to(tl.int8), high.to(tl.int8))
    kept = tl.reshape(kept, (M // 16, 8, N // 32, 8, 2, 2, 2))
    if TRANSPOSED:
        kept = tl.reshape(tl.permute(kept, (2, 4, 5, 3, 0, 6, 1)), (N, M))
    else:
        kept = tl.reshape(tl.permute(kept, (0, 6, 1, 2, 4, 5, 3)), (M, N))
    return kept != 0
