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

import triton
import triton.language as tl

from .tile import (
    LOG2E,
    Extras,
    Lengths,
    Map,
    Place,
    Rows,
    Scalars,
    add_product,
    any_block,
    bounded,
    head_of,
    keeps,
    key_rows,
    load,
    only,
    packed_tile,
    row_zero,
    rows_dot,
    scaled,
    scores,
    scores_dot,
    sequence,
    store,
    unit_and_tile,
    zeros,
)


@triton.jit
def rows(
    OUT, DOUT, LSE, STATS, DLSE, ROWS, Q_LENS, KV_LENS, NEW_LENS, CU_Q, CU_K,
    do_b, do_i, do_h, given, batch, seqlen_q, seqlen_k, total_q, total_k, heads_q, left, units, tiles, rows_all,
    C: tl.constexpr,
):  # fmt: skip
    """What the other kernels need of each query."""
    M: tl.constexpr = C.rows
    lengths = Lengths(Q_LENS, KV_LENS, NEW_LENS, CU_Q, CU_K, given, batch, seqlen_q, seqlen_k, total_q, total_k, 0)
    head, tile = unit_and_tile(tl.program_id(0), units, tiles, 1, False)
    if C.packed:
        index, tile = packed_tile(CU_Q, batch, total_q, tile, M)
    else:
        index = head // heads_q
        head = head % heads_q
    seq = sequence(lengths, Scalars(1.0, 0.0, left, 0, 0, 0.0), index, C)
    i = tile * M + tl.arange(0, M)
    if tile * M >= seq.rows:
        return
    ok = i < seq.q_len
    at = row_zero(lengths, seq, head, heads_q, C) + i
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
    tl.store(ROWS + at, delta, mask=owned)
    if C.statistics:
        m = tl.load(STATS + at, mask=seen, other=float("inf"))
        tl.store(ROWS + rows_all + at, m, mask=owned)
        total = tl.load(STATS + rows_all + at, mask=seen, other=1.0)
        tl.store(ROWS + 2 * rows_all.to(tl.int64) + at, 1.0 / total, mask=owned)
    else:
        if not C.natural:
            lse *= LOG2E
        tl.store(ROWS + rows_all + at, tl.where(seen, lse, float("inf")), mask=owned)


@triton.jit
def load_rows(ROWS, rows_all, at, ok, C: tl.constexpr):
    """delta, what is subtracted from s, 1/l."""
    delta = tl.load(ROWS + at, mask=ok, other=0.0)
    m = tl.load(ROWS + rows_all + at, mask=ok, other=float("inf"))
    inverse = m
    if C.statistics:
        inverse = tl.load(ROWS + 2 * rows_all.to(tl.int64) + at, mask=ok, other=0.0)
    return delta, m, inverse


@triton.jit
def gradients(
    x, dp, row, place, seq, extras, scalars, seed, EDGE: tl.constexpr, TRANSPOSED: tl.constexpr, C: tl.constexpr
):
    """keep p, ds before the softcap, ds behind it, of one tile; x = q.k, dp = dO.v, row as from load_rows."""
    delta, m, inverse = row
    s, t = scores(x, place, seq, extras, scalars, EDGE, C)
    if C.natural:
        p = tl.exp2((s - m) * LOG2E)
        if C.statistics:
            p *= inverse
    else:
        p = tl.exp2(s - m)
    kept = p
    if C.dropout:
        keep = keeps(
            seed, place.b, place.head0, place.i0, place.j0, scalars.threshold, C.block_m, C.block_n, TRANSPOSED
        )
        kept = tl.where(keep, p, 0.0)
        dp = tl.where(keep, dp * scalars.keep_scale, 0.0)
    ds = p * (dp - delta)
    bent = ds
    if C.softcap:
        bent = tl.where(p == 0.0, 0.0, ds * (1.0 - t * t))
    return kept, ds, bent


# --- queries ----------------------------------------------------------------------------------------------------------


@triton.jit
def _over_keys(
    dq, q, q_rows, dout, row, K, V, DBIAS, kv_head, table, table_row, page_size, start, stop, place, seq, extras,
    scalars, seed, EDGE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    N: tl.constexpr = C.block_n
    key = tl.arange(0, N)
    for j0 in tl.range(start, stop, N):
        j = j0 + key
        here = Place(place.b, place.head, place.head0, place.i, j[None, :], place.i0, j0)
        wanted = True
        if C.blocks:
            wanted = any_block(extras, here, seq, C)
        if wanted:
            ok = (j >= seq.lo) & (j < seq.kv_len)
            ptr, offsets = key_rows(K, seq, kv_head, table, table_row, page_size, j0, N, EDGE, C)
            k = load(ptr, offsets, ok, False, EDGE, C)
            k_rows = (ptr, offsets, ok)
            ptr, offsets = key_rows(V, seq, kv_head, table, table_row, page_size, j0, N, EDGE, C)
            v = load(ptr, offsets, ok, True, EDGE, C)
            x = scores_dot(q, q_rows, k, k_rows, C.block_m, N, C)
            dp = rows_dot(dout, v, C)
            _, ds, bent = gradients(x, dp, row, here, seq, extras, scalars, seed, EDGE, False, C)
            if C.bias_store:
                first = DBIAS.ptr + place.b.to(tl.int64) * DBIAS.b + place.head0.to(tl.int64) * DBIAS.h
                first += tl.cast(place.i0, tl.int64) * DBIAS.i + tl.cast(j0, tl.int64) * DBIAS.j
                offsets = (place.i - place.i0) * DBIAS.i + key[None, :] * DBIAS.j
                inside = (place.i < tl.minimum(seq.q_len, extras.rows)) & (
                    here.j < tl.minimum(seq.kv_len, extras.columns)
                )
                tl.store(first + offsets, ds, mask=inside)
            dq = add_product(bent, k, dq, C)
    return dq


@triton.jit
def query_gradient(
    Q, K, V, DOUT, DQ, DBIAS, ROWS,
    BIAS, MASK, BLOCKS, ALIBI, Q_LENS, KV_LENS, NEW_LENS, CU_Q, CU_K, TABLE, SEED,
    q_b, q_i, q_h, k_b, k_i, k_h, v_b, v_i, v_h, do_b, do_i, do_h, dq_b, dq_i, dq_h,
    dbias_b, dbias_h, dbias_i, dbias_j,
    bias_b, bias_h, bias_i, bias_j, mask_b, mask_h, mask_i, mask_j,
    blocks_b, blocks_h, blocks_i, blocks_j, alibi_b, alibi_h, table_row,
    given, batch, seqlen_q, seqlen_k, total_q, total_k, heads_q, group, columns,
    left, right, page_size, block_q, block_k, threshold, units, tiles, section, rows_all,
    factor, cap, keep_scale, scale,
    C: tl.constexpr,
):  # fmt: skip
    """dq, and dbias where no two pairs share an element of it."""
    M: tl.constexpr = C.block_m
    N: tl.constexpr = C.block_n
    lengths = Lengths(Q_LENS, KV_LENS, NEW_LENS, CU_Q, CU_K, given, batch, seqlen_q, seqlen_k, total_q, total_k, 0)
    extras = Extras(
        Map(BIAS, bias_b, bias_h, bias_i, bias_j), Map(MASK, mask_b, mask_h, mask_i, mask_j),
        Map(BLOCKS, blocks_b, blocks_h, blocks_i, blocks_j), Map(ALIBI, alibi_b, alibi_h, 0, 0),
        block_q, block_k, seqlen_q, columns,
    )  # fmt: skip
    scalars = Scalars(factor, cap, left, right, threshold, keep_scale)
    head, tile = unit_and_tile(tl.program_id(0), units, tiles, section, C.right)
    if C.packed:
        index, tile = packed_tile(CU_Q, batch, total_q, tile, M)
    else:
        index = head // heads_q
        head = head % heads_q
    seq = sequence(lengths, scalars, index, C)
    i0 = tile * M
    if i0 >= seq.rows:
        return
    row = tl.arange(0, M)
    i = i0 + row
    ok = i < seq.q_len
    last = tl.minimum(i0 + M, seq.q_len) - 1
    stop = seq.kv_len
    whole = seq.kv_len
    start = 0
    if C.right:
        stop = bounded(last + seq.shift + right + 1, 0, stop)
        whole = bounded(i0 + seq.shift + right + 1, 0, whole)
    if C.left:
        start = bounded(i0 + seq.shift - left, 0, stop) // N * N
    if i0 >= seq.q_len:
        stop = start
    begin = seq.q_row + tl.cast(i0, tl.int64)
    q_rows = (head_of(Rows(Q, q_b, q_i, q_h), seq, head) + begin * q_i, row * q_i, ok)
    q = load(q_rows[0], q_rows[1], ok, False, True, C)
    dout = load(head_of(Rows(DOUT, do_b, do_i, do_h), seq, head) + begin * do_i, row * do_i, ok, True, True, C)
    delta, m, inverse = load_rows(ROWS, rows_all, row_zero(lengths, seq, head, heads_q, C) + i, ok, C)
    figures = (delta[:, None], m[:, None], inverse[:, None])
    seed = 0
    if C.dropout:
        seed = tl.load(SEED)
    place = Place(index, head, head, i[:, None], row[None, :], i0, 0)
    keys = Rows(K, k_b, k_i, k_h)
    values = Rows(V, v_b, v_i, v_h)
    target = Map(DBIAS, dbias_b, dbias_h, dbias_i, dbias_j)
    dq = zeros(M, False, C)
    middle = start
    if C.phases:
        middle = tl.maximum(start, tl.minimum(whole // N * N, stop))
        dq = _over_keys(
            dq, q, q_rows, dout, figures, keys, values, target, head // group, TABLE, table_row, page_size, start,
            middle, place, seq, extras, scalars, seed, False, C,
        )  # fmt: skip
    dq = _over_keys(
        dq, q, q_rows, dout, figures, keys, values, target, head // group, TABLE, table_row, page_size, middle, stop,
        place, seq, extras, scalars, seed, True, C,
    )  # fmt: skip
    if C.query:
        ptr = head_of(Rows(DQ, dq_b, dq_i, dq_h), seq, head) + begin * dq_i
        store(ptr, row * dq_i, i < seq.rows, scaled(dq, scale), False, C)


# --- keys -------------------------------------------------------------------------------------------------------------


@triton.jit
def _over_queries(
    dk, dv, k, k_rows, v, Q, DOUT, ROWS, rows_all, at, start, stop, place, seq, extras, scalars, seed,
    EDGE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    M: tl.constexpr = C.block_m
    row = tl.arange(0, M)
    for i0 in tl.range(start, stop, M):
        i = i0 + row
        here = Place(place.b, place.head, place.head0, i[None, :], place.j, i0, place.j0)
        wanted = True
        if C.blocks:
            wanted = any_block(extras, here, seq, C)
        if wanted:
            ok = i < seq.q_len
            begin = seq.q_row + tl.cast(i0, tl.int64)
            q_rows = (head_of(Q, seq, place.head) + begin * Q.i, row * Q.i, ok)
            q = load(q_rows[0], q_rows[1], ok, False, True, C)
            dout = load(head_of(DOUT, seq, place.head) + begin * DOUT.i, row * DOUT.i, ok, True, True, C)
            delta, m, inverse = load_rows(ROWS, rows_all, at + i, ok, C)
            x = scores_dot(k, k_rows, q, q_rows, C.block_n, M, C)
            dp = rows_dot(v, dout, C)
            figures = (delta[None, :], m[None, :], inverse[None, :])
            kept, _, bent = gradients(x, dp, figures, here, seq, extras, scalars, seed, EDGE, True, C)
            dv = add_product(kept, dout, dv, C)
            dk = add_product(bent, q, dk, C)
    return dk, dv


@triton.jit
def key_gradient(
    Q, K, V, DOUT, DK, DV, ROWS,
    BIAS, MASK, BLOCKS, ALIBI, Q_LENS, KV_LENS, NEW_LENS, CU_Q, CU_K, TABLE, SEED,
    q_b, q_i, q_h, k_b, k_i, k_h, v_b, v_i, v_h, do_b, do_i, do_h, dk_b, dk_i, dk_h, dv_b, dv_i, dv_h,
    bias_b, bias_h, bias_i, bias_j, mask_b, mask_h, mask_i, mask_j,
    blocks_b, blocks_h, blocks_i, blocks_j, alibi_b, alibi_h, table_row,
    given, batch, seqlen_q, seqlen_k, total_q, total_k, heads_q, group, columns,
    left, right, page_size, block_q, block_k, threshold, units, tiles, section, rows_all,
    factor, cap, keep_scale, scale,
    C: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of keys. Of pages: into one row a token of each sequence, which `page_gradient` sums."""
    M: tl.constexpr = C.block_m
    N: tl.constexpr = C.block_n
    lengths = Lengths(Q_LENS, KV_LENS, NEW_LENS, CU_Q, CU_K, given, batch, seqlen_q, seqlen_k, total_q, total_k, 0)
    extras = Extras(
        Map(BIAS, bias_b, bias_h, bias_i, bias_j), Map(MASK, mask_b, mask_h, mask_i, mask_j),
        Map(BLOCKS, blocks_b, blocks_h, blocks_i, blocks_j), Map(ALIBI, alibi_b, alibi_h, 0, 0),
        block_q, block_k, seqlen_q, columns,
    )  # fmt: skip
    scalars = Scalars(factor, cap, left, right, threshold, keep_scale)
    kv_head, tile = unit_and_tile(tl.program_id(0), units, tiles, section, False)
    if C.packed and not C.paged:
        index, tile = packed_tile(CU_K, batch, total_k, tile, N)
    else:
        heads = heads_q // group
        index = kv_head // heads
        kv_head = kv_head % heads
    seq = sequence(lengths, scalars, index, C)
    j0 = tile * N
    if j0 >= seq.keys:
        return
    key = tl.arange(0, N)
    j = j0 + key
    end = tl.minimum(j0 + N, seq.kv_len)  # one past the last key that is there
    stop = seq.q_len
    start = 0
    full = 0  # from here on every query sees all of these keys
    if C.right:
        start = bounded(j0 - seq.shift - right, 0, stop) // M * M
        full = bounded(end - 1 - seq.shift - right, start, stop)
        full = tl.cdiv(full, M) * M
    if C.left:
        stop = bounded(end - seq.shift + left, start, stop)
    if j0 >= seq.kv_len:
        stop = start
    full = tl.minimum(full, stop)

    ok = (j >= seq.lo) & (j < seq.kv_len)
    ptr, offsets = key_rows(Rows(K, k_b, k_i, k_h), seq, kv_head, TABLE, table_row, page_size, j0, N, True, C)
    k = load(ptr, offsets, ok, False, True, C)
    k_rows = (ptr, offsets, ok)
    ptr, offsets = key_rows(Rows(V, v_b, v_i, v_h), seq, kv_head, TABLE, table_row, page_size, j0, N, True, C)
    v = load(ptr, offsets, ok, True, True, C)
    seed = 0
    if C.dropout:
        seed = tl.load(SEED)
    queries = Rows(Q, q_b, q_i, q_h)
    douts = Rows(DOUT, do_b, do_i, do_h)
    dk = zeros(N, False, C)
    dv = zeros(N, True, C)
    for g in tl.range(0, group):
        head = kv_head * group + g
        at = row_zero(lengths, seq, head, heads_q, C)
        place = Place(index, head, head, key[None, :], j[:, None], 0, j0)
        if C.phases:
            if C.right:
                dk, dv = _over_queries(
                    dk, dv, k, k_rows, v, queries, douts, ROWS, rows_all, at, start, full, place, seq, extras, scalars,
                    seed, True, C,
                )  # fmt: skip
                dk, dv = _over_queries(
                    dk, dv, k, k_rows, v, queries, douts, ROWS, rows_all, at, full, stop, place, seq, extras, scalars,
                    seed, False, C,
                )  # fmt: skip
            else:
                dk, dv = _over_queries(
                    dk, dv, k, k_rows, v, queries, douts, ROWS, rows_all, at, start, stop, place, seq, extras, scalars,
                    seed, False, C,
                )  # fmt: skip
        else:
            dk, dv = _over_queries(
                dk, dv, k, k_rows, v, queries, douts, ROWS, rows_all, at, start, stop, place, seq, extras, scalars,
                seed, True, C,
            )  # fmt: skip
    dk = only(dk, j < seq.kv_len)  # a tile that every query sees is not tested for the end of the keys
    dv = only(dv, j < seq.kv_len)
    owned = j < seq.keys
    if C.paged:
        dk_row = tl.cast(j0, tl.int64)
    else:
        dk_row = seq.k_row + tl.cast(j0, tl.int64)
    if C.keys:
        ptr = head_of(Rows(DK, dk_b, dk_i, dk_h), seq, kv_head) + dk_row * dk_i
        store(ptr, key * dk_i, owned, scaled(dk, scale), False, C)
    if C.values:
        if C.dropout:
            dv = scaled(dv, keep_scale)
        ptr = head_of(Rows(DV, dv_b, dv_i, dv_h), seq, kv_head) + dk_row * dv_i
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
                x = load(ptr, j.to(tl.int64) * s_i, ok, True, True, C)
                if len(x) == 1:
                    acc = (acc[0] + x[0],)
                else:
                    acc = (acc[0] + x[0], acc[1] + x[1])
    ptr = TARGET + page.to(tl.int64) * t_b + head * t_h
    store(ptr, token * t_i, token < page_size, acc, True, C)


# --- bias and sinks ---------------------------------------------------------------------------------------------------


@triton.jit
def bias_gradient(
    Q, K, V, DOUT, PARTIAL, ROWS,
    BIAS, MASK, BLOCKS, ALIBI, Q_LENS, KV_LENS, NEW_LENS, CU_Q, CU_K, TABLE, SEED,
    q_b, q_i, q_h, k_b, k_i, k_h, v_b, v_i, v_h, do_b, do_i, do_h,
    bias_b, bias_h, bias_i, bias_j, mask_b, mask_h, mask_i, mask_j,
    blocks_b, blocks_h, blocks_i, blocks_j, alibi_b, alibi_h, table_row,
    given, batch, seqlen_q, seqlen_k, total_q, total_k, heads_q, group, columns,
    left, right, page_size, block_q, block_k, threshold, rows_all,
    size_b, size_h, size_i, size_j, tiles_i, tiles_j, elements,
    factor, cap, keep_scale,
    C: tl.constexpr,
):  # fmt: skip
    """dbias of a bias that several pairs share: a program sums over the pairs of a tile of its elements.

    size_*: the bias's own sizes. tiles_i, tiles_j: tiles of the scores. Along a dimension of size 1 the program goes
    through all tiles, along a batch or heads of size 1 through all of them; where programs would be few, those pairs
    are dealt out to num_programs(1) parts, each with a sum of its own.
    """
    M: tl.constexpr = C.block_m
    N: tl.constexpr = C.block_n
    lengths = Lengths(Q_LENS, KV_LENS, NEW_LENS, CU_Q, CU_K, given, batch, seqlen_q, seqlen_k, total_q, total_k, 0)
    extras = Extras(
        Map(BIAS, bias_b, bias_h, bias_i, bias_j), Map(MASK, mask_b, mask_h, mask_i, mask_j),
        Map(BLOCKS, blocks_b, blocks_h, blocks_i, blocks_j), Map(ALIBI, alibi_b, alibi_h, 0, 0),
        block_q, block_k, seqlen_q, columns,
    )  # fmt: skip
    scalars = Scalars(factor, cap, left, right, threshold, keep_scale)
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
    row = tl.arange(0, M)
    key = tl.arange(0, N)
    seed = 0
    if C.dropout:
        seed = tl.load(SEED)
    acc = tl.zeros((M, N), tl.float32)
    for pair in tl.range(tl.program_id(1), pairs, tl.num_programs(1)):
        j0 = tl.where(size_j == 1, pair % other_j, my_j) * N
        i0 = tl.where(size_i == 1, pair // other_j % other_i, my_i) * M
        head = tl.where(size_h == 1, pair // (other_j * other_i) % other_h, my_h)
        index = tl.where(size_b == 1, pair // (other_j * other_i * other_h), my_b)
        seq = sequence(lengths, scalars, index, C)
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
                wanted = any_block(extras, here, seq, C)
        if wanted:
            ok = i < seq.q_len
            ok_j = (j >= seq.lo) & (j < seq.kv_len)
            begin = seq.q_row + tl.cast(i0, tl.int64)
            ptr = head_of(Rows(Q, q_b, q_i, q_h), seq, head) + begin * q_i
            q = load(ptr, row * q_i, ok, False, True, C)
            q_rows = (ptr, row * q_i, ok)
            ptr = head_of(Rows(DOUT, do_b, do_i, do_h), seq, head) + begin * do_i
            dout = load(ptr, row * do_i, ok, True, True, C)
            kv = head // group
            ptr, offsets = key_rows(Rows(K, k_b, k_i, k_h), seq, kv, TABLE, table_row, page_size, j0, N, True, C)
            k = load(ptr, offsets, ok_j, False, True, C)
            k_rows = (ptr, offsets, ok_j)
            ptr, offsets = key_rows(Rows(V, v_b, v_i, v_h), seq, kv, TABLE, table_row, page_size, j0, N, True, C)
            v = load(ptr, offsets, ok_j, True, True, C)
            delta, m, inverse = load_rows(ROWS, rows_all, row_zero(lengths, seq, head, heads_q, C) + i, ok, C)
            figures = (delta[:, None], m[:, None], inverse[:, None])
            x = scores_dot(q, q_rows, k, k_rows, M, N, C)
            dp = rows_dot(dout, v, C)
            _, ds, _ = gradients(x, dp, figures, here, seq, extras, scalars, seed, True, False, C)
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
def sink_gradient(DSINKS, SINKS, ROWS, LSE, seqlen_q, rows_all, heads_q, C: tl.constexpr):
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
        else:
            at = (row // seqlen_q * heads_q + head).to(tl.int64) * seqlen_q + row % seqlen_q
        lse = tl.load(LSE + at, mask=ok, other=float("inf"))
        delta = tl.load(ROWS + at, mask=ok, other=0.0)
        share = tl.exp2((sink - lse) * LOG2E)
        acc += tl.where(lse == float("-inf"), 0.0, share * delta)
    tl.store(DSINKS + head, tl.load(DSINKS + head) - tl.sum(acc, 0))
