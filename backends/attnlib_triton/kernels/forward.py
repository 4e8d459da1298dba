"""The forward, and what joins its parts when the keys are shared out.

    for each tile of keys that a tile of queries may see:
        s = scores; m' = max(m, s); p = exp(s - m')
        l = l exp(m - m') + sum p;  acc = acc exp(m - m') + (keep p) v
    out = acc / l;  lse = m + log l

Tiles that every row sees whole come without a test; those that an edge of the window or of the keys crosses follow.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .call import Place, Rows, call_of
from .chunks import added, flipped, load, load_keys, only, scaled, store, zeros
from .dropout import keeps, kept_of
from .products import add_product, scores_dot
from .scores import LN2, LOG2E, any_block, at_keys, scores, visible
from .tokens import head_of, key_range, own_tile, row_zero, sequence


@triton.jit
def _weights(x, m, total, place, seq, call, EDGE: tl.constexpr, C: tl.constexpr):
    """From q.k of a tile: p, the new maximum, by what to multiply what was summed before, the new sum."""
    if C.raw:
        if EDGE:
            x = tl.where(visible(place, seq, call.scalars, C), x, float("-inf"))
        highest = tl.maximum(m, tl.max(x, 1) * call.scalars.factor)
        finite = tl.where(highest == float("-inf"), 0.0, highest)
        p = tl.exp2(x * call.scalars.factor - finite[:, None])
        correction = tl.exp2(m - finite)
    else:
        s, _ = scores(x, place, seq, call.extras, call.scalars, EDGE, C)
        highest = tl.maximum(m, tl.max(s, 1))
        finite = tl.where(highest == float("-inf"), 0.0, highest)
        if C.natural:
            p = tl.exp2((s - finite[:, None]) * LOG2E)
            correction = tl.exp2((m - finite) * LOG2E)
        else:
            p = tl.exp2(s - finite[:, None])
            correction = tl.exp2(m - finite)
    return p, highest, correction, total * correction + tl.sum(p, 1)


@triton.jit
def _take(state, q, q_rows, kv_head, place, seq, call, EDGE: tl.constexpr, C: tl.constexpr):
    """One tile of keys into (acc, m, l)."""
    M: tl.constexpr = C.block_m
    N: tl.constexpr = C.block_n
    acc, m, total = state
    k, k_rows = load_keys(call, seq, kv_head, place.j0, False, EDGE, C)
    v, _ = load_keys(call, seq, kv_head, place.j0, True, EDGE, C)
    x = scores_dot(q, q_rows, k, k_rows, M, N, C)
    p, highest, correction, total = _weights(x, m, total, place, seq, call, EDGE, C)
    if C.dropout:
        kept = keeps(call.seed, place, call.scalars.threshold, M, N, False, C.ptx)
        p = kept_of(p, kept, C.ptx)
    return add_product(p, v, scaled(acc, correction[:, None]), C), highest, total


@triton.jit
def _attend(state, q, q_rows, kv_head, start, stop, place, seq, call, EDGE: tl.constexpr, C: tl.constexpr):
    """Every tile of keys from start (a multiple of block_n) on."""
    for j0 in tl.range(start, stop, C.block_n):
        here = at_keys(place, j0, C)
        if not C.blocks or any_block(call.extras, here, seq, C):
            state = _take(state, q, q_rows, kv_head, here, seq, call, EDGE, C)
    return state


@triton.jit
def forward(
    Q, K, V, K_MAP, V_MAP, OUT, LSE, STATS, SINKS, PARTIAL, PARTIAL_ROWS, BIAS, MASK, BLOCKS, ALIBI, Q_LENS, KV_LENS,
    NEW_LENS, CU_Q, CU_K, TABLE, SEED, q_b, q_i, q_h, k_b, k_i, k_h, v_b, v_i, v_h, bias_b, bias_h, bias_i, bias_j,
    mask_b, mask_h, mask_i, mask_j, blocks_b, blocks_h, blocks_i, blocks_j, alibi_b, alibi_h, table_row, given, batch,
    seqlen_q, seqlen_k, total_q, total_k, new_tokens, heads_q, group, columns, left, right, page_size, block_q, block_k,
    threshold, units, tiles, section, rows_all, factor, cap, keep_scale,
    C: tl.constexpr,
):  # fmt: skip
    M: tl.constexpr = C.block_m
    N: tl.constexpr = C.block_n
    per_tile = M
    unit_heads = heads_q
    if C.pack:  # a tile holds all heads of a group
        per_tile = M // group
        unit_heads = heads_q // group
    call = call_of(
        K, V, K_MAP, V_MAP, BIAS, MASK, BLOCKS, ALIBI, Q_LENS, KV_LENS, NEW_LENS, CU_Q, CU_K, TABLE, SEED, k_b, k_i,
        k_h, v_b, v_i, v_h, bias_b, bias_h, bias_i, bias_j, mask_b, mask_h, mask_i, mask_j, blocks_b, blocks_h,
        blocks_i, blocks_j, alibi_b, alibi_h, table_row, given, batch, seqlen_q, seqlen_k, total_q, total_k,
        new_tokens, columns, left, right, page_size, block_q, block_k, threshold, factor, cap, keep_scale, C,
    )  # fmt: skip
    index, unit, tile = own_tile(
        units, tiles, section, unit_heads, CU_Q, batch, total_q, per_tile if C.pack else M, C.packed, C.right
    )
    seq = sequence(call.lengths, call.scalars, index, C)
    i0 = tile * per_tile
    if i0 >= seq.rows:
        return
    row = tl.arange(0, M)
    if C.pack:
        kv_head = unit
        head0 = unit * group
        i = i0 + row // group
        head = head0 + row % group
        ok = (row < per_tile * group) & (i < seq.q_len)
        owned = (row < per_tile * group) & (i < seq.rows)
    else:
        kv_head = unit // group
        head0 = unit
        i = i0 + row
        head = head0
        ok = i < seq.q_len
        owned = i < seq.rows

    start, stop, whole = key_range(i0, per_tile, seq, call.scalars, C)
    if C.split:
        parts = tl.num_programs(1)
        part = tl.program_id(1)
        each = tl.cdiv(tl.cdiv(stop - start, N), parts) * N
        stop = tl.minimum(stop, start + (part + 1) * each)
        start += part * each

    first = head_of(Rows(Q, q_b, q_i, q_h), seq, head0) + (seq.q_row + tl.cast(i0, tl.int64)) * q_i
    offsets = (i - i0) * q_i + (head - head0) * q_h
    q = load(first, offsets, ok, False, True, C)
    q_rows = (first, offsets, ok)
    if C.flip:  # a negative scale must not turn the maximum into a minimum
        q = flipped(q, C)
    m = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    if C.sinks:
        sink = tl.load(SINKS + head).to(tl.float32)
        if not C.natural:
            sink *= LOG2E
        m = tl.where(ok, sink, float("-inf"))
        total = tl.where(m == float("-inf"), 0.0, 1.0)
    state = (zeros(M, True, C), m, total)
    place = Place(index, head, head0, i[:, None], row[None, :], i0, 0)
    if C.pack:
        place = Place(index, head[:, None], head0, i[:, None], row[None, :], i0, 0)
    middle = start
    if C.phases:
        middle = tl.maximum(start, tl.minimum(whole // N * N, stop))
        state = _attend(state, q, q_rows, kv_head, start, middle, place, seq, call, False, C)
    state = _attend(state, q, q_rows, kv_head, middle, stop, place, seq, call, True, C)
    acc, m, total = state
    m = tl.where(ok, m, float("-inf"))
    total = tl.where(ok, total, 0.0)
    acc = only(acc, ok)
    if C.dropout:
        acc = scaled(acc, keep_scale)
    at = row_zero(call.lengths, seq, head, heads_q, seqlen_q, C) + i
    if C.split:
        total = tl.where(seq.valid, tl.where(ok, total, -1.0), float("nan"))
        at += part.to(tl.int64) * rows_all
        tl.store(PARTIAL_ROWS + at, m, mask=owned)
        tl.store(PARTIAL_ROWS + tl.cast(parts, tl.int64) * rows_all + at, total, mask=owned)
        store(PARTIAL, at * C.head_dim_v, owned, acc, True, C)
    else:
        empty = total == 0.0
        out = scaled(acc, (1.0 / tl.where(empty, 1.0, total))[:, None])
        unit_log = 1.0 if C.natural else LN2
        lse = tl.where(empty, float("-inf"), m * unit_log + tl.log(tl.where(empty, 1.0, total)))
        if C.lengths or C.paged:
            fits = seq.valid
            out = scaled(out, tl.where(fits, 1.0, float("nan")))
            lse = tl.where(fits, lse, float("nan"))
        tl.store(LSE + at, lse, mask=owned)
        if C.stats:
            tl.store(STATS + at, m, mask=owned)
            tl.store(STATS + rows_all + at, total, mask=owned)
        where = (seq.q_row + i).to(tl.int64)
        if not C.packed:
            where += index.to(tl.int64) * seqlen_q
        store(OUT, (where * heads_q + head) * C.head_dim_v, owned, out, True, C)


@triton.jit
def combine(
    OUT, LSE, SINKS, PARTIAL, PARTIAL_ROWS, rows_all, seqlen_q, total_q, heads_q, parts, C: tl.constexpr
):  # fmt: skip
    """Rows of out and lse from their parts (m, l, acc), the sink joined once. A part's l of -1 marks a padding row."""
    R: tl.constexpr = C.rows
    at = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    ok = at < rows_all
    if C.packed:
        head = at // total_q
        where = at % total_q
    else:
        head = at // seqlen_q % heads_q
        where = at // seqlen_q // heads_q * seqlen_q + at % seqlen_q
    padding = tl.load(PARTIAL_ROWS + parts.to(tl.int64) * rows_all + at, mask=ok, other=-1.0) == -1.0
    m = tl.full((R,), float("-inf"), tl.float32)
    total = tl.zeros((R,), tl.float32)
    unit = LOG2E
    if C.natural:
        unit = 1.0
    if C.sinks:
        m = tl.load(SINKS + head, mask=ok & (padding == 0), other=float("-inf")).to(tl.float32) * unit
        total = tl.where(m == float("-inf"), 0.0, 1.0)
    acc = zeros(R, True, C)
    for part in tl.range(0, parts):
        place = tl.cast(part, tl.int64) * rows_all + at
        m_part = tl.load(PARTIAL_ROWS + place, mask=ok, other=float("-inf"))
        l_part = tl.load(PARTIAL_ROWS + parts.to(tl.int64) * rows_all + place, mask=ok, other=0.0)
        highest = tl.maximum(m, m_part)
        finite = tl.where(highest == float("-inf"), 0.0, highest)
        before = tl.exp2((m - finite) * (LOG2E / unit))
        weight = tl.exp2((m_part - finite) * (LOG2E / unit))
        total = total * before + tl.where(padding, 0.0, l_part) * weight
        x = load(PARTIAL, place * C.head_dim_v, ok & (weight != 0.0), True, True, C)
        acc = added(scaled(acc, before[:, None]), scaled(x, weight[:, None]))
        m = highest
    empty = total == 0.0
    lse = tl.where(empty, float("-inf"), m * (LOG2E / unit * LN2) + tl.log(tl.where(empty, 1.0, total)))
    tl.store(LSE + at, lse, mask=ok)
    out = scaled(acc, (1.0 / tl.where(empty, 1.0, total))[:, None])
    store(OUT, (where * heads_q + head) * C.head_dim_v, ok, out, True, C)


@triton.jit
def _copy(new, old, index, page, head, token, j, ok, VALUES: tl.constexpr, C: tl.constexpr):
    """Rows `token` of a sequence to rows j of a page."""
    x = load(new.ptr + index.to(tl.int64) * new.b + head * new.h, token * new.i, ok, VALUES, True, C)
    store(old.ptr + head * old.h, page * old.b + j * old.i, ok, x, VALUES, C)


@triton.jit
def append(
    K, V, K_NEW, V_NEW, KV_LENS, NEW_LENS, TABLE,
    k_b, k_i, k_h, v_b, v_i, v_h, kn_b, kn_i, kn_h, vn_b, vn_i, vn_h, table_row,
    given, new_tokens, capacity, page_size, heads_kv, blocks,
    C: tl.constexpr,
):  # fmt: skip
    """New tokens behind each sequence's own; a sequence that they do not fit is left alone."""
    R: tl.constexpr = C.rows
    unit = tl.program_id(0) // blocks
    index = unit // heads_kv
    head = unit % heads_kv
    token = tl.program_id(0) % blocks * R + tl.arange(0, R)
    before = tl.load(KV_LENS + index, mask=(given & 2) != 0, other=0).to(tl.int64)
    count = tl.load(NEW_LENS + index, mask=(given & 4) != 0, other=new_tokens)
    fits = (before >= 0) & (count >= 0) & (count <= new_tokens) & (before + count <= capacity)
    ok = token < tl.where(fits, count, 0)
    j = before + token
    if C.paged:
        page = tl.load(TABLE + index.to(tl.int64) * table_row + j // page_size, mask=ok, other=0).to(tl.int64)
        j = j % page_size
    else:
        page = index.to(tl.int64)
    _copy(Rows(K_NEW, kn_b, kn_i, kn_h), Rows(K, k_b, k_i, k_h), index, page, head, token, j, ok, False, C)
    _copy(Rows(V_NEW, vn_b, vn_i, vn_h), Rows(V, v_b, v_i, v_h), index, page, head, token, j, ok, True, C)
