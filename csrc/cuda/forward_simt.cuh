// Forward without tensor cores; see tile_simt.cuh for how a block shares its tile.
//
//   for each tile of keys:   S = Q K^T, scores, m' = max(m, S), P = exp(S - m'), l = l c + sum P, O = O c + keep(P) V
//   out = O / l / (1 - p);   lse = m + log l                   with c = exp(m - m')
//
// One block a tile of queries of one head, or of that a part of its keys. Grid: heads x sequences (packed: heads) x tiles
// x parts, last tiles first: a causal mask leaves them the most to do.
#pragma once

#include "product_simt.cuh"
#include "score_simt.cuh"

namespace attnlib {

template <class Config>
__device__ __forceinline__ void forward_simt_kernel(const SimtParams& p, unsigned char* shared) {
    using G = Tile<Config>;
    using T = typename G::number;
    using element = typename G::element;
    const G tile;
    T* const q_tile = reinterpret_cast<T*>(in_register(shared));
    T* const p_tile = q_tile + G::tile_rows * G::dim;
    Buffers<Config> buffers{p_tile + G::tile_rows * G::tile_columns};
    const int unit = blockIdx.x % p.units, rest = blockIdx.x / p.units;
    const int part = p.tiles - 1 - rest % p.tiles, split = rest / p.tiles;
    const int head = unit % p.heads_q;
    int b = unit / p.heads_q, within = part;
    if (p.cu_q && !find_tile(p, p.cu_q, p.total_q, G::tile_rows, part, b, within)) return;
    const Sequence seq = sequence_of(p, b);
    const int i0 = within * G::tile_rows, i1 = clip(i0 + G::tile_rows, 0, seq.q_len);
    const bool busy = i0 + static_cast<int>(threadIdx.x >> 5) * G::team_rows < i1;   // whether the team has a query
    const int head_kv = Config::fault == head_mod ? head % p.heads_kv : head / (p.heads_q / p.heads_kv);
    const Scoring<Config> scoring(p, seq, head);
    const Range seen = scoring.keys_seen(i0, i1);
    const int first_tile = seen.begin / G::tile_columns;   // of keys
    const int64_t tiles = (seen.end + G::tile_columns - 1) / G::tile_columns - first_tile;
    const int stop = clip((first_tile + tiles * (split + 1) / p.splits) * G::tile_columns, 0, seen.end);
    const auto next_tile = [&](int j) { return scoring.next_keys(p, i0, i1, j, stop); };

    const Queries<Config> q = query_source<Config>(p, seq, head, {0, seq.q_len});
    const Keys<Config> k = key_source<Config>(p, seq, head_kv, seen), v = value_source<Config>(p, seq, head_kv, seen);

    const T hidden = minus_infinity<T>();
    T m[G::rows], l[G::rows], o[G::rows][G::wide_v / G::lanes];
    T sink = hidden;
    if (p.sinks && split == 0) sink = read_number<T>(p.sinks, p.sinks_type, head);
#pragma unroll
    for (int i = 0; i < G::rows; ++i) {
        m[i] = sink;
        l[i] = sink != hidden && tile.x == 0 ? T(1) : T(0);   // a row's sum is spread over the threads that share it
    }
    fill(o, T(0));

    DotSlice<Config> key_slice;
    ProductSlice<Config, Config::step_v, G::wide_v> value_slice;
    int j0 = next_tile(static_cast<int>(first_tile + tiles * split / p.splits) * G::tile_columns);
    if (j0 < stop) {
        key_slice.load(k, j0, 0, buffers.now());
        load_tile<Config, G::dim>(q_tile, q, i0);
        key_slice.store(buffers.now());
    }
    __syncthreads();
    while (j0 < stop) {
        const int following = next_tile(j0 + G::tile_columns);
        T s[G::rows][G::columns];
        fill(s, T(0));
        dots<Config, G::dim / G::depth>(s, tile, q_tile, buffers, key_slice, k, j0, ahead(value_slice, v, j0), busy);
        const int row = i0 + tile.row, column = j0 + tile.x;
        T none[1][1];
        scoring.template apply<false, false>(p, s, none, row, column);
#pragma unroll
        for (int i = 0; i < G::rows; ++i) {
            T top = m[i];
#pragma unroll
            for (int j = 0; j < G::columns; ++j) top = maximum(top, s[i][j]);
            top = G::across_row(top, [](T a, T b) { return maximum(a, b); });
            const T base = top == hidden ? T(0) : top;
            const T correction = power(m[i] - base);
            m[i] = top;
            l[i] = rounded_product(l[i], correction);
#pragma unroll
            for (int j = 0; j < G::columns; ++j) {
                s[i][j] = power(s[i][j] - base);
                l[i] += s[i][j];
            }
            if constexpr (Config::fault != no_rescale) {
#pragma unroll
                for (int c = 0; c < G::wide_v / G::lanes; ++c) o[i][c] *= correction;
            }
        }
        if constexpr (Config::full) {
            if (p.dropout_threshold > 0) {
                const uint64_t kept = scoring.template kept<false>(p, row, column);
#pragma unroll
                for (int i = 0; i < G::rows; ++i)
#pragma unroll
                    for (int j = 0; j < G::columns; ++j)
                        if (!(kept >> (i * G::columns + j) & 1)) s[i][j] = 0;
            }
        }
        put_probabilities(p_tile, tile, s);
        products<Config, Config::step_v, G::wide_v>(o, tile, p_tile, buffers, value_slice, v, j0,
                                                    ahead(key_slice, k, following, following < stop), busy);
        j0 = following;
    }

    const int owned = seq.q_rows - i0;
    const bool whole = p.splits == 1;
    const int64_t place = split * lse_size(p) + lse_row(p, seq, head) + i0;   // within all parts
    T* const stats = address<T>(whole ? p.stats : p.part_stats);
    const T keep_scale = Config::full ? static_cast<T>(p.keep_scale) : T(1);
#pragma unroll
    for (int i = 0; i < G::rows; ++i) {
        const int row = tile.row + i * G::steps;
        const bool query = i0 + row < seq.q_len;
        l[i] = G::across_row(l[i], [](T a, T b) { return a + b; });
        if (tile.x == 0 && row < owned) {
            T lse = query && !(l[i] == 0) ? (m[i] == hidden ? T(0) : m[i]) + logarithm(l[i]) : hidden;
            if (!seq.fits) lse = not_a_number<T>();
            if (whole) address<T>(p.lse)[place + row] = lse;
            if (stats) {
                stats[place + row] = !seq.fits ? not_a_number<T>() : query ? m[i] : hidden;
                stats[p.splits * lse_size(p) + place + row] = query ? l[i] : T(0);
            }
        }
        // what each row is multiplied by at last
        m[i] = !seq.fits ? not_a_number<T>() : query && !(l[i] == 0) ? keep_scale / l[i] : T(0);
    }
    const auto normalised = [&](int i, T x) { return m[i] == 0 ? T(0) : x * m[i]; };
    if (whole) {
        element* to = address<element>(p.out) + ((seq.out_row + i0) * p.heads_q + head) * p.head_dim_v;
        write_rows<Config, G::wide_v>(to, static_cast<int64_t>(p.heads_q) * p.head_dim_v, p.head_dim_v, tile, owned, o, normalised);
    } else {
        T* to = address<T>(p.part_out) + place * p.head_dim_v;
        write_rows<Config, G::wide_v>(to, p.head_dim_v, p.head_dim_v, tile, owned, o, normalised);
    }
}

// Joins the parts of a split forward, a team a row:
//
//   m = max m_s;  w_s = l_s exp(m_s - m);  l = sum w_s;  out = sum w_s out_s / l;  lse = m + log l
template <class Config>
__device__ __forceinline__ void combine_simt_kernel(const SimtParams& p, unsigned char*) {
    using element = typename Config::element;
    using T = typename Accumulator<element>::type;
    const int64_t plane = lse_size(p), row = static_cast<int64_t>(blockIdx.x) * (Config::threads / 32) + (threadIdx.x >> 5);
    if (row >= plane) return;
    const int64_t per_head = p.cu_q ? p.total_q : p.seqlen_q, i = row % per_head, unit = row / per_head;
    const int64_t head = unit % p.heads_q, token = unit / p.heads_q * per_head + i;
    const T* const tops = address<const T>(p.part_stats) + row;
    const T* const sums = tops + p.splits * plane;
    const T hidden = minus_infinity<T>();
    T m = hidden, l = 0;
    for (int s = 0; s < p.splits; ++s) m = maximum(m, tops[s * plane]);
    const T base = m == hidden ? T(0) : m;
    const auto weight = [&](int s) { return sums[s * plane] * power(tops[s * plane] - base); };
    for (int s = 0; s < p.splits; ++s) l += weight(s);
    const T factor = l == 0 ? T(0) : 1 / l;
    const int lane = threadIdx.x & 31;
    for (int c = lane; c < p.head_dim_v; c += 32) {
        const T* const parts = address<const T>(p.part_out) + row * p.head_dim_v + c;
        T sum = 0;
        for (int s = 0; s < p.splits; ++s) sum = multiply_add(weight(s), parts[s * plane * p.head_dim_v], sum);
        narrow(sum * factor, address<element>(p.out)[(token * p.heads_q + head) * p.head_dim_v + c]);
    }
    if (lane != 0) return;
    address<T>(p.lse)[row] = l == 0 ? hidden : base + logarithm(l);
    if (p.stats) {
        address<T>(p.stats)[row] = m;
        address<T>(p.stats)[plane + row] = l;
    }
}

// New tokens into a key/value cache: token t of sequence b goes to kv_lens[b] + t. One block a token; nothing is written
// for a sequence whose length does not fit.
template <class Config>
__device__ __forceinline__ void append_simt_kernel(const SimtParams& p, unsigned char*) {
    using element = typename Config::element;
    const int t = blockIdx.x % p.new_tokens, b = blockIdx.x / p.new_tokens;
    const int64_t length = p.kv_lens ? address<const int>(p.kv_lens)[b] : 0;
    const int added = p.new_lens ? address<const int>(p.new_lens)[b] : p.new_tokens;
    if (t >= added || length < 0 || added > p.new_tokens || length + added > p.capacity) return;
    const int at = static_cast<int>(length) + t;
    const auto copy = [&](uint64_t cache, int64_t cb, int64_t cj, int64_t ch, uint64_t fresh, int64_t nb, int64_t nt, int64_t nh, int dim) {
        int64_t place = b * cb + at * cj;
        if (p.page_table) place = address<const int>(p.page_table)[b * p.page_row + at / p.page_size] * cb + at % p.page_size * cj;
        for (int index = threadIdx.x; index < p.heads_kv * dim; index += Config::threads)
            address<element>(cache)[place + index / dim * ch + index % dim] =
                address<const element>(fresh)[b * nb + t * nt + index / dim * nh + index % dim];
    };
    copy(p.k, p.k_b, p.k_j, p.k_h, p.k_new, p.kn_b, p.kn_t, p.kn_h, p.head_dim);
    copy(p.v, p.v_b, p.v_j, p.v_h, p.v_new, p.vn_b, p.vn_t, p.vn_h, p.head_dim_v);
}

}  // namespace attnlib
