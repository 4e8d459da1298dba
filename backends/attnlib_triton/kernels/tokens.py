"""Where tokens lie: the tile a program owns, a sequence's rows and lengths, the keys that its queries see."""

from __future__ import annotations

import triton
import triton.language as tl

from .call import Sequence


@triton.jit
def bounded(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def _unit_and_tile(pid, units, tiles, section, REVERSED: tl.constexpr):
    """Programs go through the tiles of `section` units side by side, the longest first."""
    each = tiles * section
    first = pid // each * section
    width = tl.minimum(section, units - first)
    rest = pid % each
    tile = rest // width
    if REVERSED:
        tile = tiles - 1 - tile
    return first + rest % width, tile


@triton.jit
def _packed_tile(cu, batch, total, tile, ROWS: tl.constexpr):
    """The sequence that tile number `tile` serves, and the tile's number within it.

    Sequence b starts at tile cu[b] // ROWS + b, which never overlaps; what follows the last one is number `batch`.
    """
    low = 0
    high = batch
    while low < high:
        middle = (low + high + 1) // 2
        if bounded(tl.load(cu + middle), 0, total) // ROWS + middle <= tile:
            low = middle
        else:
            high = middle - 1
    return low, tile - (bounded(tl.load(cu + low), 0, total) // ROWS + low)


@triton.jit
def own_tile(
    units, tiles, section, heads, cu, batch, total, ROWS: tl.constexpr, PACKED: tl.constexpr, REVERSED: tl.constexpr
):
    """Sequence, head and tile that this program works on. ROWS: a tile's rows."""
    unit, tile = _unit_and_tile(tl.program_id(0), units, tiles, section, REVERSED)
    if PACKED:
        index, tile = _packed_tile(cu, batch, total, tile, ROWS)
        return index, unit, tile
    else:
        return unit // heads, unit % heads, tile


@triton.jit
def sequence(lengths, scalars, b, C: tl.constexpr):
    """Sequence number b; every length is brought into its bounds."""
    valid = True
    if C.packed:
        exists = b < lengths.batch
        q_row = bounded(tl.load(lengths.cu_q + b), 0, lengths.total_q)
        q_end = tl.load(lengths.cu_q + b + 1, mask=exists, other=lengths.total_q)
        rows = bounded(q_end, q_row, lengths.total_q) - q_row
        q_len = tl.where(exists, rows, 0)
        k_begin = tl.load(lengths.cu_k + b)
        k_end = tl.load(lengths.cu_k + b + 1, mask=exists, other=lengths.total_k)
        if C.paged:
            k_row = 0
            wide = k_end.to(tl.int64) - k_begin.to(tl.int64)
            valid = (wide <= lengths.seqlen_k) | (exists == 0)
            kv_len = tl.where(exists & valid, bounded(wide, 0, lengths.seqlen_k), 0).to(tl.int32)
            keys = lengths.seqlen_k
        else:
            k_row = bounded(k_begin, 0, lengths.total_k)
            keys = bounded(k_end, k_row, lengths.total_k) - k_row
            kv_len = tl.where(exists, keys, 0)
    else:
        q_row = 0
        k_row = 0
        rows = lengths.seqlen_q
        keys = lengths.seqlen_k
        q_len = rows
        kv_len = keys
        if C.lengths:
            q_len = tl.load(lengths.q_lens + b, mask=(lengths.given & 1) != 0, other=rows)
            kv_wide = tl.load(lengths.kv_lens + b, mask=(lengths.given & 2) != 0, other=keys).to(tl.int64)
            if C.append:
                added = tl.load(lengths.new_lens + b, mask=(lengths.given & 4) != 0, other=lengths.new_tokens)
                valid = (kv_wide >= 0) & (added >= 0) & (added <= lengths.new_tokens)
                kv_wide += added
            valid = valid & (q_len >= 0) & (q_len <= rows) & (kv_wide >= 0) & (kv_wide <= keys)
            q_len = bounded(q_len, 0, rows)
            kv_len = tl.where(valid, bounded(kv_wide, 0, keys), 0).to(tl.int32)
    shift = 0
    if not C.top_left:
        shift = kv_len - q_len
    lo = 0
    if C.left:
        lo = bounded(shift - scalars.left, 0, kv_len)
    return Sequence(b, q_len, kv_len, q_row, k_row, rows, keys, shift, lo, valid)


@triton.jit
def row_zero(lengths, seq, head, heads, lines, C: tl.constexpr):
    """Place of a head's query 0 in tensors laid out like lse, with `lines` rows a head of a sequence unless packed."""
    if C.packed:
        return head.to(tl.int64) * lengths.total_q + seq.q_row
    else:
        return (seq.index.to(tl.int64) * heads + head) * lines


@triton.jit
def head_of(rows, seq, head):
    """Address of row 0 of one head of a sequence in an operand that is not paged."""
    return rows.ptr + seq.index.to(tl.int64) * rows.b + head.to(tl.int64) * rows.h


@triton.jit
def key_range(i0, count, seq, scalars, C: tl.constexpr):
    """The keys [start, stop) that queries [i0, i0 + count) may see, start at a tile's; up to `whole` all see them."""
    last = tl.minimum(i0 + count, seq.q_len) - 1
    stop = seq.kv_len
    whole = seq.kv_len
    start = 0
    if C.right:
        stop = bounded(last + seq.shift + scalars.right + 1, 0, stop)
        whole = bounded(i0 + seq.shift + scalars.right + 1, 0, whole)
    if C.left:
        start = bounded(i0 + seq.shift - scalars.left, 0, stop) // C.block_n * C.block_n
    if i0 >= seq.q_len:
        stop = start
    return start, stop, whole
