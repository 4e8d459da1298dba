"""Tiles between memory and registers, in chunks.

A row of head_dim elements is held as one or two chunks whose widths are powers of two; the last one may reach beyond
head_dim and is masked.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tokens import head_of


@triton.jit
def _load_chunk(ptr, offsets, ok, FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, EDGE: tl.constexpr):
    column = FIRST + tl.arange(0, WIDTH)
    where = ptr + offsets[:, None] + column[None, :]
    if FIRST + WIDTH > DIM:
        within = (column < DIM)[None, :]
        if EDGE:
            within = within & ok[:, None]
        return tl.load(where, mask=within, other=0.0)
    elif EDGE:
        return tl.load(where, mask=ok[:, None], other=0.0)
    else:
        return tl.load(where)


@triton.jit
def load(ptr, offsets, ok, VALUES: tl.constexpr, EDGE: tl.constexpr, C: tl.constexpr):
    """Rows (of values, or of queries and keys) at ptr + offsets as chunks; EDGE: zeros, not read, where not ok."""
    FIRST: tl.constexpr = C.v_first if VALUES else C.k_first
    REST: tl.constexpr = C.v_rest if VALUES else C.k_rest
    DIM: tl.constexpr = C.head_dim_v if VALUES else C.head_dim
    first = _load_chunk(ptr, offsets, ok, 0, FIRST, DIM, EDGE)
    if REST == 0:
        return (first,)
    else:
        return (first, _load_chunk(ptr, offsets, ok, FIRST, REST, DIM, EDGE))


@triton.jit
def narrow(x, dtype: tl.constexpr, C: tl.constexpr):
    """x in dtype, rounded to nearest even: the interpreter's own conversion to bfloat16 cuts off."""
    if C.interpret and dtype == tl.bfloat16:
        bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
        bits = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), bits | 0x10000)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def _store_chunk(ptr, offsets, ok, x, FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, C: tl.constexpr):
    column = FIRST + tl.arange(0, WIDTH)
    where = ptr + offsets[:, None] + column[None, :]
    x = narrow(x, ptr.dtype.element_ty, C)
    if FIRST + WIDTH > DIM:
        tl.store(where, x, mask=ok[:, None] & (column < DIM)[None, :])
    else:
        tl.store(where, x, mask=ok[:, None])


@triton.jit
def store(ptr, offsets, ok, x, VALUES: tl.constexpr, C: tl.constexpr):
    """Chunks to rows at ptr + offsets, where ok."""
    FIRST: tl.constexpr = C.v_first if VALUES else C.k_first
    REST: tl.constexpr = C.v_rest if VALUES else C.k_rest
    DIM: tl.constexpr = C.head_dim_v if VALUES else C.head_dim
    _store_chunk(ptr, offsets, ok, x[0], 0, FIRST, DIM, C)
    if REST > 0:
        _store_chunk(ptr, offsets, ok, x[1], FIRST, REST, DIM, C)


@triton.jit
def zeros(ROWS: tl.constexpr, VALUES: tl.constexpr, C: tl.constexpr):
    FIRST: tl.constexpr = C.v_first if VALUES else C.k_first
    REST: tl.constexpr = C.v_rest if VALUES else C.k_rest
    first = tl.zeros((ROWS, FIRST), tl.float32)
    if REST == 0:
        return (first,)
    else:
        return (first, tl.zeros((ROWS, REST), tl.float32))


@triton.jit
def scaled(x, by):
    """Chunks times `by`, a number or a column."""
    if len(x) == 1:
        return (x[0] * by,)
    else:
        return (x[0] * by, x[1] * by)


@triton.jit
def added(x, y):
    """The sum of chunks."""
    if len(x) == 1:
        return (x[0] + y[0],)
    else:
        return (x[0] + y[0], x[1] + y[1])


@triton.jit
def only(x, ok):
    """Chunks whose rows are zero where not ok, whatever they hold."""
    if len(x) == 1:
        return (tl.where(ok[:, None], x[0], 0.0),)
    else:
        return (tl.where(ok[:, None], x[0], 0.0), tl.where(ok[:, None], x[1], 0.0))


@triton.jit
def flipped(x, C: tl.constexpr):
    """Chunks with the other sign."""
    if len(x) == 1:
        return (narrow(-x[0].to(tl.float32), x[0].dtype, C),)
    else:
        return (narrow(-x[0].to(tl.float32), x[0].dtype, C), narrow(-x[1].to(tl.float32), x[1].dtype, C))


@triton.jit
def _load_mapped(map, seq, head, row, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Rows from `row` on through a tensor map [batch, heads, rows, dim]."""
    return tl.reshape(map.load([seq.index, head, row, 0]), (ROWS, WIDTH))


@triton.jit
def load_keys(call, seq, head, j0, VALUES: tl.constexpr, EDGE: tl.constexpr, C: tl.constexpr):
    """A tile of keys, or of values, from j0 on: chunks, and where they come from (see scores_dot)."""
    if VALUES:
        rows = call.v
    else:
        rows = call.k
    key = tl.arange(0, C.block_n)
    j = j0 + key
    ok = (j >= seq.lo) & (j < seq.kv_len)
    if C.paged:
        at = call.table + seq.index.to(tl.int64) * call.table_row + j // call.page_size
        page = tl.load(at, mask=ok, other=0)
        ptr = rows.ptr + head.to(tl.int64) * rows.h
        offsets = page.to(tl.int64) * rows.b + j % call.page_size * rows.i
    else:
        ptr = head_of(rows, seq, head) + (seq.k_row + tl.cast(j0, tl.int64)) * rows.i
        offsets = key * rows.i
    if C.maps and (C.even or not EDGE):
        if VALUES:
            tile = _load_mapped(call.v_map, seq, head, seq.k_row + j0, C.block_n, C.v_first)
        else:
            tile = _load_mapped(call.k_map, seq, head, seq.k_row + j0, C.block_n, C.k_first)
        return (tile,), (ptr, offsets, ok)
    else:
        return load(ptr, offsets, ok, VALUES, EDGE, C), (ptr, offsets, ok)


@triton.jit
def load_queries(rows, map, seq, head, i0, VALUES: tl.constexpr, EDGE: tl.constexpr, C: tl.constexpr):
    """As load_keys, of an operand laid out like the queries; VALUES: its rows are as wide as those of values."""
    row = tl.arange(0, C.block_m)
    ok = i0 + row < seq.q_len
    ptr = head_of(rows, seq, head) + (seq.q_row + tl.cast(i0, tl.int64)) * rows.i
    offsets = row * rows.i
    if C.maps and (C.even or not EDGE):
        WIDTH: tl.constexpr = C.v_first if VALUES else C.k_first
        return (_load_mapped(map, seq, head, seq.q_row + i0, C.block_m, WIDTH),), (ptr, offsets, ok)
    else:
        return load(ptr, offsets, ok, VALUES, EDGE, C), (ptr, offsets, ok)
