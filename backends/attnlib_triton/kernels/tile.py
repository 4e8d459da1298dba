"""What the kernels share: where tokens lie, which keys a query sees, scores, dropout, products.

    s = scale * x;  s = softcap * tanh(s / softcap);  s += alibi + bias;  s = -inf where not visible.

Scores are kept in units of log 2, or natural in float32 and where a bias or ALiBi is added: what is subtracted goes
first, then units change, so that a score as large as the maximum gives exactly 1.
`C` is a frozen configuration (config.Features and its children), the only compile-time argument. A row of head_dim
elements is held as one or two chunks whose widths are powers of two; the last one may reach beyond head_dim and is
masked. Offsets inside a tile are as wide as the strides given; what leads to a tile is added to its pointer in 64 bits.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


class Rows(NamedTuple):
    """An operand [batch, rows, heads, dim]: address and strides."""

    ptr: tl.tensor
    b: tl.tensor
    i: tl.tensor
    h: tl.tensor


class Map(NamedTuple):
    """An operand [batch, heads, rows, columns]: address and strides."""

    ptr: tl.tensor
    b: tl.tensor
    h: tl.tensor
    i: tl.tensor
    j: tl.tensor


class Lengths(NamedTuple):
    """Sizes of the call. given: bit 0 q_lens, bit 1 kv_lens, bit 2 new_lens. seqlen_k is a cache's capacity."""

    q_lens: tl.tensor
    kv_lens: tl.tensor
    new_lens: tl.tensor
    cu_q: tl.tensor
    cu_k: tl.tensor
    given: tl.tensor
    batch: tl.tensor
    seqlen_q: tl.tensor
    seqlen_k: tl.tensor
    total_q: tl.tensor
    total_k: tl.tensor
    new_tokens: tl.tensor


class Sequence(NamedTuple):
    """Where one sequence lies. rows, keys: tokens that it owns, padding included; shift: position of query 0.

    lo: first key that any query may see. valid is False where a length on the device does not fit: NaN results.
    """

    index: tl.tensor
    q_len: tl.tensor
    kv_len: tl.tensor
    q_row: tl.tensor
    k_row: tl.tensor
    rows: tl.tensor
    keys: tl.tensor
    shift: tl.tensor
    lo: tl.tensor
    valid: tl.tensor


class Extras(NamedTuple):
    """What is looked up for each score. rows, columns: sizes of bias and mask."""

    bias: Map
    mask: Map
    blocks: Map
    alibi: Map
    block_q: tl.tensor
    block_k: tl.tensor
    rows: tl.tensor
    columns: tl.tensor


class Scalars(NamedTuple):
    """factor: x -> s, or x -> argument of tanh; cap: softcap in the unit of s; left, right: the window."""

    factor: tl.tensor
    cap: tl.tensor
    left: tl.tensor
    right: tl.tensor
    threshold: tl.tensor
    keep_scale: tl.tensor


class Call(NamedTuple):
    """What the tiles of a call have in common."""

    k: Rows
    v: Rows
    k_map: tl.tensor
    v_map: tl.tensor
    table: tl.tensor
    table_row: tl.tensor
    page_size: tl.tensor
    lengths: Lengths
    extras: Extras
    scalars: Scalars
    seed: tl.tensor


class Place(NamedTuple):
    """A tile of scores: queries i and keys j, shaped to broadcast against each other, from i0 and j0 on.

    head is head0, or a vector shaped like i where the heads of a group share a tile.
    """

    b: tl.tensor
    head: tl.tensor
    head0: tl.tensor
    i: tl.tensor
    j: tl.tensor
    i0: tl.tensor
    j0: tl.tensor


@triton.jit
def call_of(
    K, V, K_MAP, V_MAP, BIAS, MASK, BLOCKS, ALIBI, Q_LENS, KV_LENS, NEW_LENS, CU_Q, CU_K, TABLE, SEED, k_b, k_i, k_h,
    v_b, v_i, v_h, bias_b, bias_h, bias_i, bias_j, mask_b, mask_h, mask_i, mask_j, blocks_b, blocks_h, blocks_i,
    blocks_j, alibi_b, alibi_h, table_row, given, batch, seqlen_q, seqlen_k, total_q, total_k, new_tokens, columns,
    left, right, page_size, block_q, block_k, threshold, factor, cap, keep_scale, C: tl.constexpr,
):  # fmt: skip
    """The arguments that the kernels for tiles of scores share, put in order."""
    lengths = Lengths(
        Q_LENS, KV_LENS, NEW_LENS, CU_Q, CU_K, given, batch, seqlen_q, seqlen_k, total_q, total_k, new_tokens
    )
    extras = Extras(
        Map(BIAS, bias_b, bias_h, bias_i, bias_j), Map(MASK, mask_b, mask_h, mask_i, mask_j),
        Map(BLOCKS, blocks_b, blocks_h, blocks_i, blocks_j), Map(ALIBI, alibi_b, alibi_h, 0, 0),
        block_q, block_k, seqlen_q, columns,
    )  # fmt: skip
    scalars = Scalars(factor, cap, left, right, threshold, keep_scale)
    seed = 0
    if C.dropout:
        seed = tl.load(SEED)
    k = Rows(K, k_b, k_i, k_h)
    v = Rows(V, v_b, v_i, v_h)
    return Call(k, v, K_MAP, V_MAP, TABLE, table_row, page_size, lengths, extras, scalars, seed)


# --- where tokens lie -------------------------------------------------------------------------------------------------


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
def row_zero(lengths, seq, head, heads, C: tl.constexpr):
    """Place of a head's query 0 in tensors laid out like lse."""
    if C.packed:
        return head.to(tl.int64) * lengths.total_q + seq.q_row
    else:
        return (seq.index.to(tl.int64) * heads + head) * lengths.seqlen_q


@triton.jit
def figures_zero(lengths, seq, head, heads, lines, C: tl.constexpr):
    """Place of a head's query 0 among what the backward prepares; lines: of a head of a sequence, gaps included."""
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


# --- moving tiles -----------------------------------------------------------------------------------------------------


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
def load_mapped(map, seq, head, row, ROWS: tl.constexpr, WIDTH: tl.constexpr):
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
            tile = load_mapped(call.v_map, seq, head, seq.k_row + j0, C.block_n, C.v_first)
        else:
            tile = load_mapped(call.k_map, seq, head, seq.k_row + j0, C.block_n, C.k_first)
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
        return (load_mapped(map, seq, head, seq.q_row + i0, C.block_m, WIDTH),), (ptr, offsets, ok)
    else:
        return load(ptr, offsets, ok, VALUES, EDGE, C), (ptr, offsets, ok)


# --- products ---------------------------------------------------------------------------------------------------------


@triton.jit
def dot(a, b, C: tl.constexpr):
    """a @ b in float32. The interpreter multiplies bfloat16 as if it were integers, and float16 slowly."""
    if C.interpret:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision=C.precision)


@triton.jit
def add_dot(a, b, acc, C: tl.constexpr):
    """acc + a @ b."""
    if C.interpret:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision=C.precision)


@triton.jit
def rows_dot(a, b, C: tl.constexpr):
    """a @ b^T, both in chunks."""
    s = dot(a[0], tl.trans(b[0]), C)
    if len(a) == 2:
        s = add_dot(a[1], tl.trans(b[1]), s, C)
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
        return rows_dot(a, b, C)


@triton.jit
def values_dot(a, a_rows, b, b_rows, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    """dO.v, arguments as in scores_dot; in slices where it is made of plain float32 products anyway."""
    if C.exact and C.precision == "ieee":
        return _sliced_dot(a_rows, b_rows, A, B, C.head_dim_v)
    else:
        return rows_dot(a, b, C)


@triton.jit
def _sliced_dot(a_rows, b_rows, A: tl.constexpr, B: tl.constexpr, DIM: tl.constexpr):
    x = tl.zeros((A, B), tl.float32)
    for first in tl.range(0, DIM, 32):
        column = first + tl.arange(0, 32)
        x = tl.dot(_slice(a_rows, column, DIM), tl.trans(_slice(b_rows, column, DIM)), x, input_precision="ieee")
    return x


@triton.jit
def add_product(weights, x, acc, C: tl.constexpr):
    """acc + weights @ x, x and acc in chunks; the weights are rounded to x's dtype."""
    weights = narrow(weights, x[0].dtype, C)
    first = add_dot(weights, x[0], acc[0], C)
    if len(x) == 1:
        return (first,)
    else:
        return (first, add_dot(weights, x[1], acc[1], C))


# --- scores -----------------------------------------------------------------------------------------------------------


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


# --- dropout ----------------------------------------------------------------------------------------------------------


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
