"""From q.k to scores.

    s = scale * x;  s = softcap * tanh(s / softcap);  s += alibi + bias;  s = -inf where not visible.

Scores are kept in units of log 2, or natural in float32 and where a bias or ALiBi is added: what is subtracted goes
first, then units change, so that a score as large as the maximum gives exactly 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .call import Place

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _tanh(x):
    """tanh to 2^-21: an odd polynomial near zero, 1 - 2 / (1 + exp(2x)) elsewhere."""
    a = tl.abs(x)
    y = x * x
    near = -0.053968254 + y * (0.021869489 + y * -0.008863235)
    near = x * (1.0 + y * (-0.333333333 + y * (0.133333333 + y * near)))
    far = 1.0 - 2.0 / (1.0 + tl.exp2(a * (2 * LOG2E)))
    far = tl.where(x < 0, -far, far)
    return tl.where(a < 0.4, near, far)


@triton.jit
def at_keys(place, j0, C: tl.constexpr):
    """The same queries by the tile of keys from j0 on."""
    j = j0 + tl.arange(0, C.block_n)
    return Place(place.b, place.head, place.head0, place.i, j[None, :], place.i0, j0)


@triton.jit
def inside(place, seq, extras):
    """Which pairs of a tile bias and mask have elements for."""
    return (place.i < tl.minimum(seq.q_len, extras.rows)) & (place.j < tl.minimum(seq.kv_len, extras.columns))


@triton.jit
def _address(operand, place, C: tl.constexpr):
    """Address of a tile's first element and offsets within the tile, which may be negative."""
    first = operand.ptr + place.b.to(tl.int64) * operand.b + place.head0.to(tl.int64) * operand.h
    if C.pack:
        return first, (place.head - place.head0) * operand.h
    else:
        return first, 0


@triton.jit
def _look_up(operand, place, ok, C: tl.constexpr):
    first, offsets = _address(operand, place, C)
    first += tl.cast(place.i0, tl.int64) * operand.i + tl.cast(place.j0, tl.int64) * operand.j
    offsets = offsets + (place.i - place.i0) * operand.i + (place.j - place.j0) * operand.j
    return tl.load(first + offsets, mask=ok, other=0)


@triton.jit
def _block_rows(extras, place, ok, C: tl.constexpr):
    """The block mask of a tile, element by element."""
    first, offsets = _address(extras.blocks, place, C)
    i0 = place.i0 // extras.block_q
    j0 = place.j0 // extras.block_k
    first += tl.cast(i0, tl.int64) * extras.blocks.i + tl.cast(j0, tl.int64) * extras.blocks.j
    rows = (place.i // extras.block_q - i0) * extras.blocks.i
    offsets = offsets + rows + (place.j // extras.block_k - j0) * extras.blocks.j
    return tl.load(first + offsets, mask=ok, other=0) != 0


@triton.jit
def visible(place, seq, scalars, C: tl.constexpr):
    """Which pairs of a tile are visible by length and window."""
    stop = seq.kv_len
    if C.right:
        stop = tl.minimum(place.i + (seq.shift + scalars.right + 1), stop)
    seen = place.j < stop
    if C.left:
        seen = seen & (place.j >= place.i + (seq.shift - scalars.left))
    return seen


@triton.jit
def _bend(x, scalars, C: tl.constexpr):
    """q . k scaled and capped, and tanh of the softcap (anything without one)."""
    if C.softcap:
        t = _tanh(x * scalars.factor)
        return t * scalars.cap, t
    else:
        return x * scalars.factor, x


@triton.jit
def scores(x, place, seq, extras, scalars, EDGE: tl.constexpr, C: tl.constexpr):
    """From q . k to s, -inf where hidden, and what `_bend` says."""
    s, t = _bend(x, scalars, C)
    if C.alibi:
        slope, offsets = _address(extras.alibi, place, C)
        distance = tl.abs((place.i + seq.shift - place.j).to(tl.float32))
        s -= tl.load(slope + offsets) * distance
    if C.bias or C.mask or C.blocks:
        ok = inside(place, seq, extras)
        if C.bias:
            s += _look_up(extras.bias, place, ok, C).to(tl.float32)
        if C.mask:
            s = tl.where(_look_up(extras.mask, place, ok, C) != 0, s, float("-inf"))
        if C.blocks:
            s = tl.where(_block_rows(extras, place, ok, C), s, float("-inf"))
    if EDGE:
        s = tl.where(visible(place, seq, scalars, C), s, float("-inf"))
    return s, t


@triton.jit
def any_block(extras, place, seq, C: tl.constexpr):
    """Whether the block mask shows anything of a tile."""
    shown = _block_rows(extras, place, inside(place, seq, extras), C)
    return tl.max(tl.max(shown.to(tl.int32), 1), 0) != 0
