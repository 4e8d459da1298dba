"""The backward, by recomputation, in kernels whose results do not depend on the order in which programs run.

    p  = exp(s - m) / l
    dv = (keep p)^T dO;  dp = keep (dO v^T);  ds = p (dp - delta),  delta = dO.out - dlse
    dbias = ds;  dq = (ds * slope of the softcap) k;  dk = (ds * slope)^T q

`rows` prepares per query [3, lse's size]: delta, what is subtracted from s (m with a bias or ALiBi, else lse in
the unit of s; +inf where there is nothing to subtract from), 1/l where that is m. One program of `query_gradient` owns
a tile of queries, one of `key_gradient` a tile of keys and all heads of its group, one of `bias_gradient` a tile of the
bias's own elements.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from .call import Lengths, Map, Place, Rows, Scalars, call_of
from .chunks import added, load, load_keys, load_queries, only, scaled, store, zeros
from .dropout import keeps, kept_of
from .products import add_product, scores_dot, values_dot
from .scores import LOG2E, any_block, at_keys, inside, scores, visible
from .tokens import bounded, head_of, key_range, own_tile, row_zero, sequence


class Queries(NamedTuple):
    """What is read of each query: q, dO, their maps, and `stride` apart what `rows` prepared."""

    q: Rows
    dout: Rows
    q_map: tl.tensor
    dout_map: tl.tensor
    rows: tl.tensor
    stride: tl.tensor


@triton.jit
def rows(
    OUT, DOUT, LSE, STATS, DLSE, ROWS, Q_LENS, KV_LENS, NEW_LENS, CU_Q, CU_K,
    do_b, do_i, do_h, given, batch, seqlen_q, seqlen_k, total_q, total_k, heads_q, left, units, tiles, rows_all,
    lines, figures_all,
    C: tl.constexpr,
):  # fmt: skip
    """What the other kernels need of each query."""
    M: tl.constexpr = C.rows
    lengths = Lengths(Q_LENS, KV_LENS, NEW_LENS, CU_Q, CU_K, given, batch, seqlen_q, seqlen_k, total_q, total_k, 0)
    index, head, tile = own_tile(units, tiles, 1, heads_q, CU_Q, batch, total_q, M, C.packed, False)
    seq = sequence(lengths, Scalars(1.0, 0.0, left, 0, 0, 0.0), index, C)
    i = tile * M + tl.arange(0, M)
    if tile * M >= seq.rows:
        return
    ok = i < seq.q_len
    at = row_zero(lengths, seq, head, heads_q, seqlen_q, C) + i
    lse = tl.load(LSE + at, mask=ok, other=float("-inf"))
    seen = lse != float("-inf")
    do = Rows(DOUT, do_b, do_i, do_h)
    first = head_of(do, seq, head) + (seq.q_row + tl.cast(tile * M, tl.int64)) * do_i
    dout = load(first, (i - tile * M) * do_i, seen, True, True, C)
    where = (seq.q_row + i).to(tl.int64)
    if not C.packed:
        where += index.to(tl.int64) * seqlen_q
    out = load(OUT, (where * heads_q + head) * C.head_dim_v, seen, True, True, C)
    delta = tl.sum(dout[0].to(tl.float32) * out[0].to(tl.float32), 1)
    if len(out) == 2:
        delta += tl.sum(dout[1].to(tl.float32) * out[1].to(tl.float32), 1)
    if C.dlse:
        delta -= tl.load(DLSE + at, mask=seen, other=0.0)
    owned = i < seq.rows
    figures = ROWS + row_zero(lengths, seq, head, heads_q, lines, C) + i
    tl.store(figures, delta, mask=owned)
    if C.statistics:
        m = tl.load(STATS + at, mask=seen, other=float("inf"))
        tl.store(figures + figures_all, m, mask=owned)
        total = tl.load(STATS + rows_all + at, mask=seen, other=1.0)
        tl.store(figures + 2 * figures_all.to(tl.int64), 1.0 / total, mask=owned)
    else:
        if not C.natural:
            lse *= LOG2E
        tl.store(figures + figures_all, tl.where(seen, lse, float("inf")), mask=owned)


@triton.jit
def _load(queries, at, seq, head, i0, EDGE: tl.constexpr, TRANSPOSED: tl.constexpr, C: tl.constexpr):
    """A tile of queries: q and where it comes from, dO, (delta, what is subtracted from s, 1/l), rows or columns.

    at: place of the head's query 0 in queries.rows. EDGE: whether some of the queries may not be there.
    """
    q, q_rows = load_queries(queries.q, queries.q_map, seq, head, i0, False, EDGE, C)
    dout, dout_rows = load_queries(queries.dout, queries.dout_map, seq, head, i0, True, EDGE, C)
    at = queries.rows + (at + i0) + tl.arange(0, C.block_m)
    delta = _figure(at, q_rows[2], 0.0, EDGE)
    m = _figure(at + queries.stride, q_rows[2], float("inf"), EDGE)
    inverse = m
    if C.statistics:
        inverse = _figure(at + 2 * queries.stride.to(tl.int64), q_rows[2], 0.0, EDGE)
    if TRANSPOSED:
        return q, q_rows, dout, dout_rows, (delta[None, :], m[None, :], inverse[None, :])
    else:
        return q, q_rows, dout, dout_rows, (delta[:, None], m[:, None], inverse[:, None])


@triton.jit
def _figure(ptr, ok, other, EDGE: tl.constexpr):
    if EDGE:
        return tl.load(ptr, mask=ok, other=other)
    else:
        return tl.load(ptr)


@triton.jit
def _gradients(x, dp, figures, place, seq, call, EDGE: tl.constexpr, TRANSPOSED: tl.constexpr, C: tl.constexpr):
    """keep p, ds before the softcap, ds behind it, of one tile; x = q.k, dp = dO.v, figures as from _load."""
    delta, m, inverse = figures
    if C.raw:
        t = x * call.scalars.factor - m
        if EDGE:
            t = tl.where(visible(place, seq, call.scalars, C), t, float("-inf"))
        p = tl.exp2(t)
    else:
        s, t = scores(x, place, seq, call.extras, call.scalars, EDGE, C)
        if C.natural:
            p = tl.exp2((s - m) * LOG2E)
            if C.statistics:
                p *= inverse
        else:
            p = tl.exp2(s - m)
    kept = p
    if C.dropout:
        keep = keeps(call.seed, place, call.scalars.threshold, C.block_m, C.block_n, TRANSPOSED, C.ptx)
        kept = kept_of(p, keep, C.ptx)
        dp = tl.where(keep, dp * call.scalars.keep_scale, 0.0)
    ds = p * (dp - delta)
    bent = ds
    if C.softcap:
        bent = tl.where(p == 0.0, 0.0, ds * (1.0 - t * t))
    return kept, ds, bent


@triton.jit
def _of_keys(q, q_rows, dout, dout_rows, figures, kv_head, place, seq, call, EDGE: tl.constexpr, C: tl.constexpr):
    """The keys of a tile, and ds before and behind the softcap."""
    k, k_rows = load_keys(call, seq, kv_head, place.j0, False, EDGE, C)
    v, v_rows = load_keys(call, seq, kv_head, place.j0, True, EDGE, C)
    x = scores_dot(q, q_rows, k, k_rows, C.block_m, C.block_n, C)
    dp = values_dot(dout, dout_rows, v, v_rows, C.block_m, C.block_n, C)
    _, ds, bent = _gradients(x, dp, figures, place, seq, call, EDGE, False, C)
    return k, ds, bent


# --- queries ----------------------------------------------------------------------------------------------------------


@triton.jit
def _over_keys(
    dq, q, q_rows, dout, dout_rows, figures, kv_head, dbias, start, stop, place, seq, call, EDGE: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    for j0 in tl.range(start, stop, C.block_n):
        here = at_keys(place, j0, C)
        if not C.blocks or any_block(call.extras, here, seq, C):
            k, ds, bent = _of_keys(q, q_rows, dout, dout_rows, figures, kv_head, here, seq, call, EDGE, C)
            if C.bias_store:
                first = dbias.ptr + place.b.to(tl.int64) * dbias.b + place.head0.to(tl.int64) * dbias.h
                first += tl.cast(place.i0, tl.int64) * dbias.i + tl.cast(j0, tl.int64) * dbias.j
                offsets = (place.i - place.i0) * dbias.i + (here.j - j0) * dbias.j
                tl.store(first + offsets, ds, mask=inside(here, seq, call.extras))
            dq = add_product(bent, k, dq, C)
    return dq


@triton.jit
def query_gradient(
    Q, K, V, K_MAP, V_MAP, Q_MAP, DOUT_MAP, DOUT, DQ, DBIAS, ROWS, BIAS, MASK, BLOCKS, ALIBI, Q_LENS, KV_LENS,
    NEW_LENS, CU_Q, CU_K, TABLE, SEED, q_b, q_i, q_h, k_b, k_i, k_h, v_b, v_i, v_h, do_b, do_i, do_h, dq_b, dq_i,
    dq_h, dbias_b, dbias_h, dbias_i, dbias_j, bias_b, bias_h, bias_i, bias_j, mask_b, mask_h, mask_i, mask_j,
    blocks_b, blocks_h, blocks_i, blocks_j, alibi_b, alibi_h, table_row, given, batch, seqlen_q, seqlen_k, total_q,
    total_k, heads_q, group, columns, left, right, page_size, block_q, block_k, threshold, units, tiles, section,
    lines, figures_all, factor, cap, keep_scale, scale,
    C: tl.constexpr,
):  # fmt: skip
    """dq, and dbias where no two pairs share an element of it."""
    M: tl.constexpr = C.block_m
    N: tl.constexpr = C.block_n
    index, head, tile = own_tile(units, tiles, section, heads_q, CU_Q, batch, total_q, M, C.packed, C.right)
    call = call_of(
        K, V, K_MAP, V_MAP, BIAS, MASK, BLOCKS, ALIBI, Q_LENS, KV_LENS, NEW_LENS, CU_Q, CU_K, TABLE, SEED, k_b, k_i,
        k_h, v_b, v_i, v_h, bias_b, bias_h, bias_i, bias_j, mask_b, mask_h, mask_i, mask_j, blocks_b, blocks_h,
        blocks_i, blocks_j, alibi_b, alibi_h, table_row, given, batch, seqlen_q, seqlen_k, total_q, total_k, 0,
        columns, left, right, page_size, block_q, block_k, threshold, factor, cap, keep_scale, C,
    )  # fmt: skip
    seq = sequence(call.lengths, call.scalars, index, C)
    i0 = tile * M
    if i0 >= seq.rows:
        return
    row = tl.arange(0, M)
    i = i0 + row
    start, stop, whole = key_range(i0, M, seq, call.scalars, C)
    queries = Queries(Rows(Q, q_b, q_i, q_h), Rows(DOUT, do_b, do_i, do_h), Q_MAP, DOUT_MAP, ROWS, figures_all)
    at = row_zero(call.lengths, seq, head, heads_q, lines, C)
    q, q_rows, dout, dout_rows, figures = _load(queries, at, seq, head, i0, True, False, C)
    place = Place(index, head, head, i[:, None], row[None, :], i0, 0)
    dbias = Map(DBIAS, dbias_b, dbias_h, dbias_i, dbias_j)
    dq = zeros(M, False, C)
    middle = start
    if C.phases:
        middle = tl.maximum(start, tl.minimum(whole // N * N, stop))
        dq = _over_keys(
            dq, q, q_rows, dout, dout_rows, figures, head // group, dbias, start, middle, place, seq, call, False, C
        )
    dq = _over_keys(
        dq, q, q_rows, dout, dout_rows, figures, head // group, dbias, middle, stop, place, seq, call, True, C
    )
    if C.query:
        ptr = head_of(Rows(DQ, dq_b, dq_i, dq_h), seq, head) + (seq.q_row + tl.cast(i0, tl.int64)) * dq_i
        store(ptr, row * dq_i, i < seq.rows, scaled(dq, scale), False, C)


# --- keys -------------------------------------------------------------------------------------------------------------


@triton.jit
def _over_queries(
    dk, dv, k, k_rows, v, v_rows, queries, at, start, stop, full, last, place, seq, call, EDGE: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Tiles of queries from start on; EDGE: from `full` on they are those from `last` on."""
    M: tl.constexpr = C.block_m
    for first in tl.range(start, stop, M):
        i0 = first
        if EDGE:
            i0 = tl.where(first < full, first, last)
        i0 = tl.multiple_of(i0, M)
        i = i0 + tl.arange(0, M)
        here = Place(place.b, place.head, place.head0, i[None, :], place.j, i0, place.j0)
        if not C.blocks or any_block(call.extras, here, seq, C):
            q, q_rows, dout, dout_rows, figures = _load(queries, at, seq, place.head, i0, EDGE, True, C)
            x = scores_dot(k, k_rows, q, q_rows, C.block_n, M, C)
            dp = values_dot(v, v_rows, dout, dout_rows, C.block_n, M, C)
            kept, _, bent = _gradients(x, dp, figures, here, seq, call, EDGE, True, C)
            dv = add_product(kept, dout, dv, C)
            dk = add_product(bent, q, dk, C)
    return dk, dv


@triton.jit
def key_gradient(
    Q, K, V, K_MAP, V_MAP, Q_MAP, DOUT_MAP, DOUT, DK, DV, ROWS, BIAS, MASK, BLOCKS, ALIBI, Q_LENS, KV_LENS, NEW_LENS,
    CU_Q, CU_K, TABLE, SEED, q_b, q_i, q_h, k_b, k_i, k_h, v_b, v_i, v_h, do_b, do_i, do_h, dk_b, dk_i, dk_h, dv_b,
    dv_i, dv_h, bias_b, bias_h, bias_i, bias_j, mask_b, mask_h, mask_i, mask_j, blocks_b, blocks_h, blocks_i,
    blocks_j, alibi_b, alibi_h, table_row, given, batch, seqlen_q, seqlen_k, total_q, total_k, heads_q, group,
    columns, left, right, page_size, block_q, block_k, threshold, units, tiles, section, lines, figures_all, factor,
    cap, keep_scale, scale,
    C: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of keys. Of pages: into one row a token of each sequence, which `page_gradient` sums."""
    M: tl.constexpr = C.block_m
    N: tl.constexpr = C.block_n
    index, kv_head, tile = own_tile(
        units, tiles, section, heads_q // group, CU_K, batch, total_k, N, C.packed and not C.paged, False
    )
    call = call_of(
        K, V, K_MAP, V_MAP, BIAS, MASK, BLOCKS, ALIBI, Q_LENS, KV_LENS, NEW_LENS, CU_Q, CU_K, TABLE, SEED, k_b, k_i,
        k_h, v_b, v_i, v_h, bias_b, bias_h, bias_i, bias_j, mask_b, mask_h, mask_i, mask_j, blocks_b, blocks_h,
        blocks_i, blocks_j, alibi_b, alibi_h, table_row, given, batch, seqlen_q, seqlen_k, total_q, total_k, 0,
        columns, left, right, page_size, block_q, block_k, threshold, factor, cap, keep_scale, C,
    )  # fmt: skip
    seq = sequence(call.lengths, call.scalars, index, C)
    j0 = tile * N
    if j0 >= seq.keys:
        return
    key = tl.arange(0, N)
    j = j0 + key
    end = tl.minimum(j0 + N, seq.kv_len)  # one past the last key that is there
    stop = seq.q_len
    start = 0
    if C.right:
        start = bounded(j0 - seq.shift - right, 0, stop) // M * M
    full = start  # from here on every query sees all of these keys
    if C.left:
        stop = bounded(end - seq.shift + left, start, stop)
    if j0 >= seq.kv_len:
        stop = start
    if C.right:
        full = tl.minimum(tl.cdiv(bounded(end - 1 - seq.shift - right, start, stop), M) * M, stop)
    whole = full + (stop - full) // M * M  # from here on some of a tile's queries are not there
    edges = full + tl.where(whole < stop, M, 0)
    if not C.phases:
        full = stop
        edges = stop

    k, k_rows = load_keys(call, seq, kv_head, j0, False, True, C)
    v, v_rows = load_keys(call, seq, kv_head, j0, True, True, C)
    queries = Queries(Rows(Q, q_b, q_i, q_h), Rows(DOUT, do_b, do_i, do_h), Q_MAP, DOUT_MAP, ROWS, figures_all)
    dk = zeros(N, False, C)
    dv = zeros(N, True, C)
    for g in tl.range(0, group):
        head = kv_head * group + g
        at = row_zero(call.lengths, seq, head, heads_q, lines, C)
        place = Place(index, head, head, key[None, :], j[:, None], 0, j0)
        dk, dv = _over_queries(
            dk, dv, k, k_rows, v, v_rows, queries, at, start, edges, full, whole, place, seq, call, True, C
        )  # fmt: skip
        if C.phases:
            dk, dv = _over_queries(
                dk, dv, k, k_rows, v, v_rows, queries, at, full, whole, full, whole, place, seq, call, False, C
            )  # fmt: skip
    dk = only(dk, j < seq.kv_len)  # a tile that every query sees is not tested for the end of the keys
    dv = only(dv, j < seq.kv_len)
    owned = j < seq.keys
    first = seq.k_row + tl.cast(j0, tl.int64)  # k_row is 0 where there are pages
    if C.keys:
        ptr = head_of(Rows(DK, dk_b, dk_i, dk_h), seq, kv_head) + first * dk_i
        store(ptr, key * dk_i, owned, scaled(dk, scale), False, C)
    if C.values:
        if C.dropout:
            dv = scaled(dv, keep_scale)
        ptr = head_of(Rows(DV, dv_b, dv_i, dv_h), seq, kv_head) + first * dv_i
        store(ptr, key * dv_i, owned, dv, True, C)


@triton.jit
def page_gradient(
    SOURCE, TARGET, TABLE, CU_K, s_b, s_i, s_h, t_b, t_i, t_h, table_row, batch, capacity, pages, page_size, heads_kv,
    C: tl.constexpr,
):  # fmt: skip
    """A page's gradient: the sum over the sequences that use it, in their order; 0 for a page of nobody."""
    R: tl.constexpr = C.rows
    S: tl.constexpr = C.scan
    blocks = tl.cdiv(page_size, R)
    page = tl.program_id(0) // (blocks * heads_kv)
    head = tl.program_id(0) // blocks % heads_kv
    token = tl.program_id(0) % blocks * R + tl.arange(0, R)
    acc = zeros(R, True, C)
    entry = tl.arange(0, S)
    for b in tl.range(0, batch):
        length = tl.load(CU_K + b + 1).to(tl.int64) - tl.load(CU_K + b).to(tl.int64)
        length = tl.where((length < 0) | (length > capacity), 0, length).to(tl.int32)
        used = tl.cdiv(length, page_size)
        for first in tl.range(0, used, S):
            column = first + entry
            found = tl.load(TABLE + tl.cast(b, tl.int64) * table_row + column, mask=column < used, other=-1) == page
            count = tl.sum(found.to(tl.int32), 0)
            here = -1
            for _ in tl.range(0, count):  # nearly always none or one
                here = tl.min(tl.where(found & (column > here), column, 0x7FFFFFFF), 0)
                j = here * page_size + token
                ok = (token < page_size) & (j < length)
                ptr = SOURCE + tl.cast(b, tl.int64) * s_b + head * s_h
                acc = added(acc, load(ptr, j.to(tl.int64) * s_i, ok, True, True, C))
    ptr = TARGET + page.to(tl.int64) * t_b + head * t_h
    store(ptr, token * t_i, token < page_size, acc, True, C)


# --- bias and sinks ---------------------------------------------------------------------------------------------------


@triton.jit
def bias_gradient(
    Q, K, V, K_MAP, V_MAP, DOUT, PARTIAL, ROWS, BIAS, MASK, BLOCKS, ALIBI, Q_LENS, KV_LENS, NEW_LENS, CU_Q, CU_K,
    TABLE, SEED, q_b, q_i, q_h, k_b, k_i, k_h, v_b, v_i, v_h, do_b, do_i, do_h, bias_b, bias_h, bias_i, bias_j,
    mask_b, mask_h, mask_i, mask_j, blocks_b, blocks_h, blocks_i, blocks_j, alibi_b, alibi_h, table_row, given, batch,
    seqlen_q, seqlen_k, total_q, total_k, heads_q, group, columns, left, right, page_size, block_q, block_k,
    threshold, lines, figures_all, size_b, size_h, size_i, size_j, tiles_i, tiles_j, elements, factor, cap, keep_scale,
    C: tl.constexpr,
):  # fmt: skip
    """dbias of a bias that several pairs share: a program sums over the pairs of a tile of its elements.

    size_*: the bias's own sizes. tiles_i, tiles_j: tiles of the scores. Along a dimension of size 1 the program goes
    through all tiles, along a batch or heads of size 1 through all of them; where programs would be few, those pairs
    are dealt out to num_programs(1) parts, each with a sum of its own.
    """
    M: tl.constexpr = C.block_m
    N: tl.constexpr = C.block_n
    row = tl.arange(0, M)
    key = tl.arange(0, N)
    call = call_of(
        K, V, K_MAP, V_MAP, BIAS, MASK, BLOCKS, ALIBI, Q_LENS, KV_LENS, NEW_LENS, CU_Q, CU_K, TABLE, SEED, k_b, k_i,
        k_h, v_b, v_i, v_h, bias_b, bias_h, bias_i, bias_j, mask_b, mask_h, mask_i, mask_j, blocks_b, blocks_h,
        blocks_i, blocks_j, alibi_b, alibi_h, table_row, given, batch, seqlen_q, seqlen_k, total_q, total_k, 0,
        columns, left, right, page_size, block_q, block_k, threshold, factor, cap, keep_scale, C,
    )  # fmt: skip
    queries = Queries(Rows(Q, q_b, q_i, q_h), Rows(DOUT, do_b, do_i, do_h), 0, 0, ROWS, figures_all)
    own_i = tl.where(size_i == 1, 1, tiles_i)
    own_j = tl.where(size_j == 1, 1, tiles_j)
    pid = tl.program_id(0)
    my_j = pid % own_j
    my_i = pid // own_j % own_i
    my_h = pid // (own_j * own_i) % size_h
    my_b = pid // (own_j * own_i * size_h)
    # pairs of (sequence, head, tile) that share these elements
    other_j = tiles_j // own_j
    other_i = tiles_i // own_i
    other_h = heads_q // size_h
    other_b = batch // size_b
    pairs = other_b * other_h * other_i * other_j
    acc = tl.zeros((M, N), tl.float32)
    for pair in tl.range(tl.program_id(1), pairs, tl.num_programs(1)):
        j0 = tl.where(size_j == 1, pair % other_j, my_j) * N
        i0 = tl.where(size_i == 1, pair // other_j % other_i, my_i) * M
        head = tl.where(size_h == 1, pair // (other_j * other_i) % other_h, my_h)
        index = tl.where(size_b == 1, pair // (other_j * other_i * other_h), my_b)
        seq = sequence(call.lengths, call.scalars, index, C)
        i = i0 + row
        j = j0 + key
        here = Place(index, head, head, i[:, None], j[None, :], i0, j0)
        wanted = (i0 < seq.q_len) & (j0 < seq.kv_len)
        if C.right:
            wanted = wanted & (j0 <= tl.minimum(i0 + M, seq.q_len) - 1 + seq.shift + right)
        if C.left:
            wanted = wanted & (j0 + N > i0 + seq.shift - left)
        if C.blocks:
            if wanted:
                wanted = any_block(call.extras, here, seq, C)
        if wanted:
            at = row_zero(call.lengths, seq, head, heads_q, lines, C)
            q, q_rows, dout, dout_rows, figures = _load(queries, at, seq, head, i0, True, False, C)
            _, ds, _ = _of_keys(q, q_rows, dout, dout_rows, figures, head // group, here, seq, call, True, C)
            acc += ds
    i = my_i * M + row
    j = my_j * N + key
    target = PARTIAL + tl.program_id(1).to(tl.int64) * elements
    target += (my_b * size_h + my_h).to(tl.int64) * (size_i * size_j)
    if C.sum_rows:
        if C.sum_columns:
            tl.store(target, tl.sum(tl.sum(acc, 0), 0))
        else:
            tl.store(target + j, tl.sum(acc, 0), mask=j < size_j)
    elif C.sum_columns:
        tl.store(target + i, tl.sum(acc, 1), mask=i < size_i)
    else:
        where = i[:, None].to(tl.int64) * size_j + j[None, :]
        tl.store(target + where, acc, mask=(i[:, None] < size_i) & (j[None, :] < size_j))


@triton.jit
def sink_gradient(DSINKS, SINKS, ROWS, LSE, seqlen_q, rows_all, heads_q, lines, C: tl.constexpr):
    """dsink_h = -sum_i exp(sink_h - lse_i) delta_i, one program a head."""
    S: tl.constexpr = C.scan
    head = tl.program_id(0)
    sink = tl.load(SINKS + head).to(tl.float32)
    each = rows_all // heads_q  # rows of a head
    acc = tl.zeros((S,), tl.float32)
    for first in tl.range(0, each, S):
        row = first + tl.arange(0, S)
        ok = row < each
        if C.packed:
            at = head.to(tl.int64) * each + row
            line = at
        else:
            first_row = (row // seqlen_q * heads_q + head).to(tl.int64)
            at = first_row * seqlen_q + row % seqlen_q
            line = first_row * lines + row % seqlen_q
        lse = tl.load(LSE + at, mask=ok, other=float("inf"))
        delta = tl.load(ROWS + line, mask=ok, other=0.0)
        share = tl.exp2((sink - lse) * LOG2E)
        acc += tl.where(lse == float("-inf"), 0.0, share * delta)
    tl.store(DSINKS + head, tl.load(DSINKS + head) - tl.sum(acc, 0))
