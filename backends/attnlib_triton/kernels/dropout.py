"""Which weights dropout keeps: one call of Philox for eight of them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _product(x, FACTOR: tl.constexpr, PTX: tl.constexpr):
    """Both halves of x * FACTOR by one instruction. As 64-bit arithmetic on NVIDIA, words would cross shared memory."""
    if PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .b64 wide; mul.wide.u32 wide, $2, $3; mov.b64 {$0, $1}, wide; }", "=r,=r,r,r",
            [x, tl.full([], FACTOR, tl.uint32)], dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        wide = x.to(tl.uint64) * FACTOR
        return wide.to(tl.uint32), (wide >> 32).to(tl.uint32)


@triton.jit
def _philox(c0, c1, c2, c3, seed, PTX: tl.constexpr):
    """Philox4x32-10 (Salmon et al., 2011). Operands broadcast: the first rounds work on rows or columns only."""
    key0 = seed.to(tl.uint32)
    key1 = (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        low0, high0 = _product(c0, 0xD2511F53, PTX)
        low1, high1 = _product(c2, 0xCD9E8D57, PTX)
        c0 = high1 ^ c1 ^ key0
        c2 = high0 ^ c3 ^ key1
        c1 = low1
        c3 = low0
        key0 = key0 + 0x9E3779B9
        key1 = key1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def keeps(seed, place, threshold, M: tl.constexpr, N: tl.constexpr, TRANSPOSED: tl.constexpr, PTX: tl.constexpr):
    """Which of M queries from place.i0 (a multiple of 16) by N keys from j0 (of 32) are kept, [M, N] or transposed.

    A call of Philox serves rows {i, i+8} and columns {j, j+8, j+16, j+24}, so M/2 by N/4 calls serve the tile; their
    eight numbers each are then put where they belong.
    """
    row = (place.i0 // 16 * 8 + tl.arange(0, M // 2)).to(tl.uint32)[:, None]
    column = (place.j0 // 32 * 8 + tl.arange(0, N // 4)).to(tl.uint32)[None, :]
    w0, w1, w2, w3 = _philox(column, row, tl.cast(place.head0, tl.uint32), tl.cast(place.b, tl.uint32), seed, PTX)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [M/2, N/4, 2, 2]: word 2 p + q
    numbers = tl.reshape(tl.join(words << 16, words), (M // 16, 8, N // 32, 8, 2, 2, 2))  # in the upper halves
    if TRANSPOSED:
        numbers = tl.reshape(tl.permute(numbers, (2, 4, 5, 3, 0, 6, 1)), (N, M))
    else:
        numbers = tl.reshape(tl.permute(numbers, (0, 6, 1, 2, 4, 5, 3)), (M, N))
    # what 65536 leaves, one in 2^32, is multiplied by 0
    bound = tl.where(threshold >= 65536, 0xFFFFFFFF, threshold.to(tl.uint32) << 16).to(tl.uint32)
    return numbers >= bound


@triton.jit
def kept_of(x, keep, PTX: tl.constexpr):
    """x where kept, else 0. The compiler would round first and then choose, which takes apart pairs of halves."""
    x = tl.where(keep, x, 0.0)
    if PTX:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return x
