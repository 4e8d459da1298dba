"""Products of tiles, in the precision that a configuration asks for."""

from __future__ import annotations

import triton
import triton.language as tl

from .chunks import narrow


@triton.jit
def _operand(x, C: tl.constexpr):
    """Chunk x as a product takes it. For tf32 it is rounded to nearest: tensor cores would cut off 13 bits."""
    if C.precision == "tf32":
        bits = x.to(tl.uint32, bitcast=True)
        rounded = ((bits + 0x1000) & 0xFFFFE000).to(tl.float32, bitcast=True)
        return tl.where(x == x, rounded, x)
    else:
        return x


@triton.jit
def _dot(a, b, acc, C: tl.constexpr):
    """acc + a @ b in float32. The interpreter multiplies bfloat16 as if it were integers, and float16 slowly."""
    if C.interpret:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision=C.precision)


@triton.jit
def _rows_dot(a, b, C: tl.constexpr):
    """a @ b^T, both in chunks."""
    s = _dot(_operand(a[0], C), tl.trans(_operand(b[0], C)), None, C)
    if len(a) == 2:
        s = _dot(_operand(a[1], C), tl.trans(_operand(b[1], C)), s, C)
    return s


@triton.jit
def _slice(rows, column, DIM: tl.constexpr):
    ptr, offsets, ok = rows
    mask = ok[:, None] & (column < DIM)[None, :]
    return tl.load(ptr + offsets[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def scores_dot(a, a_rows, b, b_rows, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    """q.k, of A queries by B keys or transposed. *_rows: where a and b were loaded from: address, offsets, which.

    exact: plain float32 products in the order of head_dim, the same bits in forward and backward; read anew in slices,
    since whole rows as such a product needs them do not fit into registers.
    """
    if C.exact:
        return _sliced_dot(a_rows, b_rows, A, B, C.head_dim)
    else:
        return _rows_dot(a, b, C)


@triton.jit
def values_dot(a, a_rows, b, b_rows, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    """dO.v, arguments as in scores_dot; in slices where it is made of plain float32 products anyway."""
    if C.exact and C.precision == "ieee":
        return _sliced_dot(a_rows, b_rows, A, B, C.head_dim_v)
    else:
        return _rows_dot(a, b, C)


@triton.jit
def _sliced_dot(a_rows, b_rows, A: tl.constexpr, B: tl.constexpr, DIM: tl.constexpr):
    x = tl.zeros((A, B), tl.float32)
    for first in tl.range(0, DIM, 32):
        column = first + tl.arange(0, 32)
        x = tl.dot(_slice(a_rows, column, DIM), tl.trans(_slice(b_rows, column, DIM)), x, input_precision="ieee")
    return x


@triton.jit
def add_product(weights, x, acc, C: tl.constexpr):
    """acc + weights @ x, x and acc in chunks; the weights are rounded as x is."""
    weights = _operand(narrow(weights, x[0].dtype, C), C)
    first = _dot(weights, _operand(x[0], C), acc[0], C)
    if len(x) == 1:
        return (first,)
    else:
        return (first, _dot(weights, _operand(x[1], C), acc[1], C))
