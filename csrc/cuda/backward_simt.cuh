// Backward without tensor cores or atomics: every sum has one owner and one order. See tile_simt.cuh for the tiles.
//
//   delta:   per row what P needs (base, 1 / l) and delta = dO . out - dlse
//   query:   one block a tile of queries:  dS = P (keep(dO V^T) - delta), dQ = scale dS K
//   key:     one block a tile of keys, transposed:  dV = keep(P)^T dO, dK = scale dS^T Q, over all heads that read it
//   bias:    one block a tile of the bias's own shape, over everything it is broadcast along
//   sink:    one block a head
//
// P = exp(S - base) / l with base = m where the forward kept (m, l), else base = lse and l = 1.
#pragma once

#include "product_simt.cuh"
#include "score_simt.cuh"

namespace attnlib {

// The workspace: three numbers a row, in planes the shape of lse.
template <class T>
struct Rows {
    T* base;
    T* inverse;
    T* delta;

    __device__ __forceinline__ explicit Rows(const SimtParams& p) {
        const int64_t plane = lse_size(p);
        base = address<T>(p.rows);
        inverse = base + plane;
        delta = inverse + plane;
    }
};

// The same of `count` queries of one head.
template <class T, int count>
struct RowNumbers {
    T base[count], inverse[count], delta[count];

    // Queries first, first + step, ...; zeros past the last.
    __device__ __forceinline__ void load(const SimtParams& p, const Sequence& seq, int head, int first, int step) {
        const Rows<T> rows(p);
        const int64_t place = lse_row(p, seq, head);
#pragma unroll
        for (int n = 0; n < count; ++n) {
            const int i = first + n * step;
            const bool query = i < seq.q_len;
            base[n] = query ? rows.base[place + i] : T(0);
            inverse[n] = query ? rows.inverse[place + i] : T(0);
            delta[n] = query ? rows.delta[place + i] : T(0);
        }
    }
};

template <class Config>
__device__ __forceinline__ void delta_simt_kernel(const SimtParams& p, unsigned char*) {
    using element = typename Config::element;
    using T = typename Accumulator<element>::type;
    const Rows<T> rows(p);
    const int lane = threadIdx.x & 31;
    const int64_t row = static_cast<int64_t>(blockIdx.x) * (Config::threads / 32) + (threadIdx.x >> 5);
    const int64_t plane = lse_size(p);
    if (row >= plane) return;
    const int per_head = p.cu_q ? p.total_q : p.seqlen_q;
    const int i = static_cast<int>(row % per_head), unit = static_cast<int>(row / per_head);
    const int head = unit % p.heads_q, b = unit / p.heads_q;
    const int count = p.cu_q ? clip(address<const int>(p.cu_q)[p.batch], 0, p.total_q) : sequence_of(p, b).q_len;
    const T lse = address<const T>(p.lse)[row];
    const bool any = i < count && lse != minus_infinity<T>();
    T delta = 0;
    if (any) {
        const int64_t token = p.cu_q ? i : static_cast<int64_t>(b) * p.seqlen_q + i;
        const element* out = address<const element>(p.out) + (token * p.heads_q + head) * p.head_dim_v;
        const element* dout = address<const element>(p.dout) + b * p.do_b + i * p.do_i + head * p.do_h;
        for (int c = lane; c < p.head_dim_v; c += 32) delta = multiply_add(widen<T>(out[c]), widen<T>(dout[c]), delta);
        delta = team_sum(delta);
        if (p.dlse) delta -= address<const T>(p.dlse)[b * p.dlse_b + head * p.dlse_h + i * p.dlse_i];
        if constexpr (Config::fault == skip_delta) delta = 0;
    }
    if (lane == 0) {
        const T m = any && p.stats ? address<const T>(p.stats)[row] : lse;
        rows.base[row] = any ? m : T(0);
        rows.inverse[row] = !any ? T(0) : p.stats ? 1 / address<const T>(p.stats)[plane + row] : T(1);
        rows.delta[row] = delta;
    }
}

// Dots of a tile become probabilities (kept ones, without 1 / (1 - p)) in s, and dS in ds; bias_share: dS before softcap.
template <class Config, bool transposed, bool bias_share, class T>
__device__ __forceinline__ void differentiate(
    const SimtParams& p, const Scoring<Config>& scoring, T (&s)[Tile<Config>::rows][Tile<Config>::columns],
    T (&ds)[Tile<Config>::rows][Tile<Config>::columns], int row, int column,
    const RowNumbers<T, Axes<Tile<Config>, transposed>::queries>& numbers) {
    using G = Tile<Config>;
    constexpr bool derive = Config::full && !bias_share;
    T derivative[derive ? G::rows : 1][derive ? G::columns : 1];
    scoring.template apply<transposed, derive>(p, s, derivative, row, column);
    uint64_t kept = ~uint64_t(0);
    T keep_scale = 1;
    if constexpr (Config::full) {
        if (p.dropout_threshold > 0) {
            kept = scoring.template kept<transposed>(p, row, column);
            keep_scale = static_cast<T>(p.keep_scale);
        }
    }
#pragma unroll
    for (int i = 0; i < G::rows; ++i)
#pragma unroll
        for (int j = 0; j < G::columns; ++j) {
            const int n = transposed ? j : i;
            const bool hidden = s[i][j] == minus_infinity<T>();
            const bool keep = kept >> (i * G::columns + j) & 1;
            const T probability = hidden ? T(0) : power(s[i][j] - numbers.base[n]) * numbers.inverse[n];
            const T dp = keep ? ds[i][j] * keep_scale : T(0);
            ds[i][j] = hidden ? T(0) : probability * (dp - numbers.delta[n]);
            if constexpr (derive) ds[i][j] = hidden ? T(0) : ds[i][j] * derivative[i][j];
            s[i][j] = keep ? probability : T(0);
        }
}

// Shared memory of a block: the rows of its tile of two operands (q and dO, or k and v), probabilities, and the buffers.
template <class Config>
struct Operands {
    using G = Tile<Config>;
    using T = typename G::number;
    T* const a;
    T* const b;
    T* const probabilities;
    Buffers<Config> buffers;

    __device__ __forceinline__ explicit Operands(unsigned char* shared)
        : a(reinterpret_cast<T*>(in_register(shared))), b(a + G::tile_rows * G::dim),
          probabilities(b + G::tile_rows * G::dim_v), buffers{probabilities + G::tile_rows * G::tile_columns} {}

    template <class From>
    __device__ __forceinline__ void load(const From& from_a, const From& from_b, int row) {
        load_tile<Config, G::dim>(a, from_a, row);
        load_tile<Config, G::dim_v>(b, from_b, row);
    }

    // s = a . c and ds = b . d, whose rows begin at `row`.
    template <class From, class Then>
    __device__ __forceinline__ void dots_of_both(
        T (&s)[G::rows][G::columns], T (&ds)[G::rows][G::columns], const G& tile, DotSlice<Config>& slice_c,
        DotSlice<Config>& slice_d, const From& c, const From& d, int row, const Then& then) {
        fill(s, T(0));
        dots<Config, G::dim / G::depth>(s, tile, a, buffers, slice_c, c, row, ahead(slice_d, d, row));
        fill(ds, T(0));
        dots<Config, G::dim_v / G::depth>(ds, tile, b, buffers, slice_d, d, row, then);
    }
};

template <class Config>
__device__ __forceinline__ void query_simt_kernel(const SimtParams& p, unsigned char* shared) {
    using G = Tile<Config>;
    using T = typename G::number;
    using element = typename G::element;
    const G tile;
    Operands<Config> queries(shared);
    RowNumbers<T, G::rows> numbers;
    const int unit = blockIdx.x % p.units, part = p.tiles - 1 - blockIdx.x / p.units;
    const int head = unit % p.heads_q;
    int b = unit / p.heads_q, within = part;
    if (p.cu_q && !find_tile(p, p.cu_q, p.total_q, G::tile_rows, part, b, within)) return;
    const Sequence seq = sequence_of(p, b);
    const int i0 = within * G::tile_rows, i1 = clip(i0 + G::tile_rows, 0, seq.q_len);
    const int head_kv = head / (p.heads_q / p.heads_kv);
    const Scoring<Config> scoring(p, seq, head);
    const Range seen = scoring.keys_seen(i0, i1);
    const auto next_tile = [&](int j) { return scoring.next_keys(p, i0, i1, j, seen.end); };
    const Keys<Config> k = key_source<Config>(p, seq, head_kv, seen), v = value_source<Config>(p, seq, head_kv, seen);

    T dq[G::rows][G::wide / G::lanes];
    fill(dq, T(0));
    DotSlice<Config> slice, value_slice;
    ProductSlice<Config, Config::step_k, G::wide> key_rows;
    int j0 = next_tile(seen.begin / G::tile_columns * G::tile_columns);
    if (j0 < seen.end) {
        const Range rows{0, seq.q_len};
        queries.load(query_source<Config>(p, seq, head, rows), dout_source<Config>(p, seq, head, rows), i0);
        numbers.load(p, seq, head, i0 + tile.row, G::steps);
        slice.load(k, j0, 0, queries.buffers.now());
        slice.store(queries.buffers.now());
    }
    __syncthreads();
    while (j0 < seen.end) {
        const int following = next_tile(j0 + G::tile_columns);
        T s[G::rows][G::columns], ds[G::rows][G::columns];
        queries.dots_of_both(s, ds, tile, slice, value_slice, k, v, j0, ahead(key_rows, k, j0));
        differentiate<Config, false, false>(p, scoring, s, ds, i0 + tile.row, j0 + tile.x, numbers);
        put_probabilities(queries.probabilities, tile, ds);
        products<Config, Config::step_k, G::wide>(dq, tile, queries.probabilities, queries.buffers, key_rows, k, j0,
                                                  ahead(slice, k, following, following < seen.end));
        j0 = following;
    }
    const T scale = static_cast<T>(p.scale);
    element* to = address<element>(p.dq) + ((seq.out_row + i0) * p.heads_q + head) * p.head_dim;
    write_rows<Config, G::wide>(to, static_cast<int64_t>(p.heads_q) * p.head_dim, p.head_dim, tile, seq.q_rows - i0, dq,
                                [&](int, T x) { return x * scale; });
}

// Keys and values of one head in shared memory, with the sums of their gradients.
template <class Config>
struct KeyTile : Operands<Config> {
    using G = Tile<Config>;
    using T = typename G::number;
    using element = typename G::element;
    using Operands<Config>::buffers;
    T dk[G::rows][G::wide / G::lanes], dv[G::rows][G::wide_v / G::lanes];

    __device__ __forceinline__ explicit KeyTile(unsigned char* shared) : Operands<Config>(shared) {
        fill(dk, T(0));
        fill(dv, T(0));
    }

    // What the queries of one head add, where the tile's rows are keys j0, j0 + 1, ... < j1 of seq.
    __device__ __forceinline__ void add(const SimtParams& p, const G& tile, const Sequence& seq, int head, int j0, int j1) {
        const Scoring<Config> scoring(p, seq, head);
        const Range seen{static_cast<int>(scoring.window.query_begin(j0)), static_cast<int>(scoring.window.query_end(j1 - 1))};
        const auto next_tile = [&](int i) {
            while (i < seen.end && scoring.skips(p, i, i + G::tile_columns, j0, j1)) i += G::tile_columns;
            return i;
        };
        int i0 = next_tile(seen.begin / G::tile_columns * G::tile_columns);
        if (i0 >= seen.end) return;
        const Queries<Config> q = query_source<Config>(p, seq, head, seen), dout = dout_source<Config>(p, seq, head, seen);
        DotSlice<Config> slice, dout_slice;
        ProductSlice<Config, Config::step_v, G::wide_v> dout_rows;
        ProductSlice<Config, Config::step_k, G::wide> query_rows;
        slice.load(q, i0, 0, buffers.now());
        slice.store(buffers.now());
        __syncthreads();
        while (i0 < seen.end) {
            const int following = next_tile(i0 + G::tile_columns);
            T s[G::rows][G::columns], ds[G::rows][G::columns];
            this->dots_of_both(s, ds, tile, slice, dout_slice, q, dout, i0, ahead(dout_rows, dout, i0));
            RowNumbers<T, G::columns> numbers;
            numbers.load(p, seq, head, i0 + tile.x, G::lanes);
            differentiate<Config, true, false>(p, scoring, s, ds, j0 + tile.row, i0 + tile.x, numbers);
            put_probabilities(this->probabilities, tile, s);
            products<Config, Config::step_v, G::wide_v>(dv, tile, this->probabilities, buffers, dout_rows, dout, i0, ahead(query_rows, q, i0));
            put_probabilities(this->probabilities, tile, ds);
            products<Config, Config::step_k, G::wide>(dk, tile, this->probabilities, buffers, query_rows, q, i0,
                                                      ahead(slice, q, following, following < seen.end));
            i0 = following;
        }
    }

    // The same for every head that reads them. Their rows are 0 ... of k and v; rows at and past `count` are zeros.
    __device__ __forceinline__ void add_heads(
        const SimtParams& p, const G& tile, const Sequence& seq, int head_kv, const element* keys, const element* values,
        int j0, int count) {
        if (count <= 0) return;
        const Queries<Config> from_k{keys, p.k_j, {0, count}, p.head_dim};
        const Queries<Config> from_v{values, p.v_j, {0, count}, p.head_dim_v};
        this->load(from_k, from_v, 0);
        const int group = p.heads_q / p.heads_kv;
        for (int head = head_kv * group; head < (head_kv + 1) * group; ++head) add(p, tile, seq, head, j0, j0 + count);
        __syncthreads();
    }
};

// Grid: tiles x key/value heads x sequences; packed: tiles x heads; paged: tiles of pages x heads. A page belongs to
// whoever has it in their table: the block that owns it looks for them, in order.
template <class Config>
__device__ __forceinline__ void key_simt_kernel(const SimtParams& p, unsigned char* shared) {
    using G = Tile<Config>;
    using T = typename G::number;
    using element = typename G::element;
    const G tile;
    KeyTile<Config> keys(shared);
    const int unit = blockIdx.x % p.units, part = blockIdx.x / p.units;
    const int head_kv = unit % p.heads_kv;
    int64_t row;   // of the gradients
    int owned;     // rows that the tile writes
    if constexpr (Config::paged) {
        const int pieces = (p.page_size + G::tile_rows - 1) / G::tile_rows;
        const int page = part / pieces, offset = part % pieces * G::tile_rows;
        row = static_cast<int64_t>(page) * p.page_size + offset;
        owned = p.page_size - offset;
        const element* k = address<const element>(p.k) + page * p.k_b + offset * p.k_j + head_kv * p.k_h;
        const element* v = address<const element>(p.v) + page * p.v_b + offset * p.v_j + head_kv * p.v_h;
        int* const found = reinterpret_cast<int*>(keys.buffers.memory + 2 * Config::slice);
        for (int b = 0; b < p.batch; ++b) {
            const Sequence seq = sequence_of(p, b);
            const int used = (seq.kv_len + p.page_size - 1) / p.page_size;
            const int* table = address<const int>(p.page_table) + b * p.page_row;
            for (int slot0 = 0; slot0 < used; slot0 += Config::threads) {
                const int slot = slot0 + threadIdx.x;
                found[threadIdx.x] = slot < used && table[slot] == page;
                if (!__syncthreads_or(found[threadIdx.x])) continue;
                for (int n = 0; n < Config::threads; ++n)
                    if (found[n]) {
                        const int j0 = (slot0 + n) * p.page_size + offset;
                        int count = owned < G::tile_rows ? owned : G::tile_rows;
                        if (count > seq.kv_len - j0) count = seq.kv_len - j0;
                        keys.add_heads(p, tile, seq, head_kv, k, v, j0, count);
                    }
                __syncthreads();
            }
        }
    } else {
        int b = unit / p.heads_kv, within = part;
        if (p.cu_k && !find_tile(p, p.cu_k, p.total_k, G::tile_rows, part, b, within)) return;
        const Sequence seq = sequence_of(p, b);
        const int j0 = within * G::tile_rows;
        row = p.cu_k ? seq.k_row + j0 : static_cast<int64_t>(b) * p.seqlen_k + j0;
        owned = seq.k_rows - j0;
        const element* k = address<const element>(p.k) + b * p.k_b + (seq.k_row + j0) * p.k_j + head_kv * p.k_h;
        const element* v = address<const element>(p.v) + b * p.v_b + (seq.k_row + j0) * p.v_j + head_kv * p.v_h;
        const int left = seq.kv_len - j0;
        keys.add_heads(p, tile, seq, head_kv, k, v, j0, left < G::tile_rows ? left : G::tile_rows);
    }
    const T scale = static_cast<T>(p.scale);
    T keep_scale = Config::full && p.dropout_threshold > 0 ? static_cast<T>(p.keep_scale) : T(1);
    if constexpr (Config::fault == scaled_dv) keep_scale *= T(1.004);
    const int64_t place = row * p.heads_kv + head_kv, heads = p.heads_kv;
    if (p.dk)
        write_rows<Config, G::wide>(address<element>(p.dk) + place * p.head_dim, heads * p.head_dim, p.head_dim, tile, owned, keys.dk,
                                    [&](int, T x) { return x * scale; });
    if (p.dv)
        write_rows<Config, G::wide_v>(address<element>(p.dv) + place * p.head_dim_v, heads * p.head_dim_v, p.head_dim_v, tile, owned, keys.dv,
                                      [&](int, T x) { return x * keep_scale; });
}

// Grid: one block for each tile of the bias's own shape size_b x size_h x size_i x size_j (1 where it is broadcast).
template <class Config>
__device__ __forceinline__ void bias_simt_kernel(const SimtParams& p, unsigned char* shared) {
    using G = Tile<Config>;
    using T = typename G::number;
    const G tile;
    Operands<Config> queries(shared);
    RowNumbers<T, G::rows> numbers;
    T* const sums = queries.probabilities;   // [teams][tile_columns]
    const bool all_i = p.size_i == 1, all_j = p.size_j == 1, all_b = p.size_b == 1, all_h = p.size_h == 1;
    int index = blockIdx.x;
    const int tiles_j = all_j ? 1 : (p.size_j + G::tile_columns - 1) / G::tile_columns;
    const int tiles_i = all_i ? 1 : (p.size_i + G::tile_rows - 1) / G::tile_rows;
    const int own_j = index % tiles_j * G::tile_columns;
    index /= tiles_j;
    const int own_i = index % tiles_i * G::tile_rows;
    index /= tiles_i;
    const int own_h = index % p.size_h, own_b = index / p.size_h;

    T total[G::rows][G::columns];
    fill(total, T(0));
    DotSlice<Config> slice, value_slice;
    for (int b = all_b ? 0 : own_b; b < (all_b ? p.batch : own_b + 1); ++b) {
        const Sequence seq = sequence_of(p, b);
        const int rows_end = seq.q_len < p.seqlen_q ? seq.q_len : p.seqlen_q;
        for (int head = all_h ? 0 : own_h; head < (all_h ? p.heads_q : own_h + 1); ++head) {
            const Scoring<Config> scoring(p, seq, head);
            const int head_kv = head / (p.heads_q / p.heads_kv);
            for (int i0 = own_i; i0 < rows_end && (all_i || i0 == own_i); i0 += G::tile_rows) {
                const int i1 = clip(i0 + G::tile_rows, 0, rows_end);
                Range seen = scoring.keys_seen(i0, i1);
                seen.end = clip(seen.end, 0, p.seqlen_k);
                const int j_begin = all_j ? seen.begin / G::tile_columns * G::tile_columns : own_j;
                const int j_end = all_j ? seen.end : own_j + G::tile_columns;
                if (j_begin >= seen.end || j_begin + G::tile_columns <= seen.begin) continue;
                const Keys<Config> k = key_source<Config>(p, seq, head_kv, seen), v = value_source<Config>(p, seq, head_kv, seen);
                __syncthreads();
                const Range rows{0, seq.q_len};
                queries.load(query_source<Config>(p, seq, head, rows), dout_source<Config>(p, seq, head, rows), i0);
                numbers.load(p, seq, head, i0 + tile.row, G::steps);
                for (int j0 = j_begin; j0 < j_end; j0 += G::tile_columns) {
                    if (scoring.skips(p, i0, i1, j0, j0 + G::tile_columns)) continue;
                    slice.load(k, j0, 0, queries.buffers.now());
                    slice.store(queries.buffers.now());
                    __syncthreads();
                    T s[G::rows][G::columns], ds[G::rows][G::columns];
                    queries.dots_of_both(s, ds, tile, slice, value_slice, k, v, j0, ahead(slice, k, j0, false));
                    differentiate<Config, false, true>(p, scoring, s, ds, i0 + tile.row, j0 + tile.x, numbers);
#pragma unroll
                    for (int i = 0; i < G::rows; ++i)
#pragma unroll
                        for (int j = 0; j < G::columns; ++j) total[i][j] += ds[i][j];
                }
            }
        }
    }

    T* const to = address<T>(p.dbias) + own_b * p.dbias_b + own_h * p.dbias_h;
    if (!all_i) {
#pragma unroll
        for (int i = 0; i < G::rows; ++i) {
            const int row = own_i + tile.row + i * G::steps;
            T* const at = to + row * p.dbias_i;
            if (all_j) {
                T sum = 0;
#pragma unroll
                for (int j = 0; j < G::columns; ++j) sum += total[i][j];
                sum = G::across_row(sum, [](T a, T b) { return a + b; });
                if (tile.x == 0 && row < p.size_i) *at += sum;
            } else if (row < p.size_i) {
#pragma unroll
                for (int j = 0; j < G::columns; ++j) {
                    const int column = own_j + tile.x + j * G::lanes;
                    if (column < p.size_j) at[column * p.dbias_j] += total[i][j];
                }
            }
        }
        return;
    }
    const int team = threadIdx.x >> 5;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < G::columns; ++j) {
        T sum = 0;
#pragma unroll
        for (int i = 0; i < G::rows; ++i) sum += total[i][j];
        sum = G::across_rows_of_team(sum);
        if (tile.y == 0) sums[team * G::tile_columns + tile.x + j * G::lanes] = sum;
    }
    __syncthreads();
    for (int column = threadIdx.x; column < G::tile_columns; column += Config::threads) {
        T sum = 0;
        for (int n = 0; n < Config::threads / 32; ++n) sum += sums[n * G::tile_columns + column];
        if (all_j) sums[column] = sum;   // its own entries only
        else if (own_j + column < p.size_j) to[(own_j + column) * p.dbias_j] += sum;
    }
    if (!all_j) return;
    __syncthreads();
    if (threadIdx.x == 0) {
        T sum = 0;
        for (int column = 0; column < G::tile_columns; ++column) sum += sums[column];
        *to += sum;
    }
}

template <class Config>
__device__ __forceinline__ void sink_simt_kernel(const SimtParams& p, unsigned char* shared) {
    using T = typename Accumulator<typename Config::element>::type;
    const Rows<T> rows(p);
    const int head = blockIdx.x;
    const T sink = read_number<T>(p.sinks, p.sinks_type, head);
    T sum = 0;
    for (int b = 0; b < p.batch; ++b) {
        const Sequence seq = sequence_of(p, b);
        const int64_t place = lse_row(p, seq, head);
        for (int i = threadIdx.x; i < seq.q_len; i += Config::threads) {
            const int64_t row = place + i;
            if (rows.inverse[row] == 0) continue;   // no key and no sink
            sum -= power(sink - rows.base[row]) * rows.inverse[row] * rows.delta[row];
        }
    }
    T* const parts = reinterpret_cast<T*>(shared);
    parts[threadIdx.x] = sum;
    __syncthreads();
    for (int step = Config::threads / 2; step > 0; step /= 2) {
        if (threadIdx.x < step) parts[threadIdx.x] += parts[threadIdx.x + step];
        __syncthreads();
    }
    if (threadIdx.x == 0) address<T>(p.dsinks)[head] += parts[0];
}

}  // namespace attnlib
