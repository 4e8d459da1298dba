// Forward without tensor cores; see simt.cuh for how a block shares its tile.
//
//   for each tile of keys:   S = Q K^T, scores, m' = max(m, S), P = exp(S - m'), l = l c + sum P, O = O c + keep(P) V
//   out = O / l / (1 - p);   lse = m + log l                   with c = exp(m - m')
//
// One block a tile of queries of one head. Grid: tiles x heads x sequences (packed: tiles x heads), last tiles first.
#pragma once

#include "simt.cuh"

namespace attnlib {

template <class Config>
struct ForwardMemory {
    using G = Tile<Config>;
    using T = typename G::number;
    T* q;
    T* p;
    Buffers<T> buffers;

    __device__ __forceinline__ ForwardMemory(unsigned char* shared) {
        q = reinterpret_cast<T*>(shared);
        p = q + G::tile_rows * G::ld;
        buffers = {p + G::tile_rows * G::ld_p, Config::slice, 0};
    }
};

template <class Config>
__device__ __forceinline__ void forward_simt_kernel(const SimtParams& p, unsigned char* shared) {
    using G = Tile<Config>;
    using T = typename G::number;
    using element = typename G::element;
    const G tile;
    ForwardMemory<Config> memory(shared);
    const int unit = blockIdx.x / p.tiles, part = p.tiles - 1 - blockIdx.x % p.tiles;
    const int head = unit % p.heads_q;
    int b = unit / p.heads_q, within = part;
    if (p.cu_q && !find_tile(p, p.cu_q, p.total_q, G::tile_rows, part, b, within)) return;
    const Sequence seq = sequence_of(p, b);
    const int i0 = within * G::tile_rows, i1 = clip(i0 + G::tile_rows, 0, seq.q_len);
    const int head_kv = Config::fault == head_mod ? head % p.heads_kv : head / (p.heads_q / p.heads_kv);
    const Scoring<Config> scoring(p, seq, head);
    const int first = i0 < i1 ? static_cast<int>(scoring.window.key_begin(i0)) : 0;
    const int end = i0 < i1 ? static_cast<int>(scoring.window.key_end(i1 - 1)) : 0;
    const auto next_tile = [&](int j) {   // the first tile at or after j that is not masked out
        while (j < end && scoring.skips(p, i0, i1, j, j + G::tile_columns)) j += G::tile_columns;
        return j;
    };

    const Queries<Config> q = query_source<Config>(p, seq, head);
    Keys<Config> k = key_source<Config>(p, seq, head_kv), v = value_source<Config>(p, seq, head_kv);
    k.begin = v.begin = first;
    k.end = v.end = end;

    const T hidden = minus_infinity<T>();
    T m[G::rows], l[G::rows], o[G::rows][G::wide_v / G::lanes];
    T sink = hidden;
    if (p.sinks) sink = read_number<T>(p.sinks, p.sinks_type, head);
#pragma unroll
    for (int i = 0; i < G::rows; ++i) {
        m[i] = sink;
        l[i] = sink != hidden && tile.x == 0 ? T(1) : T(0);   // a row's sum is spread over the threads that share it
    }
    fill(o, T(0));

    DotSlice<Config> key_slice;
    ProductSlice<Config, Config::step_v, G::wide_v> value_slice;
    Buffers<T>& buffers = memory.buffers;
    int j0 = next_tile(first / G::tile_columns * G::tile_columns);
    if (j0 < end) {
        load_tile<Config::threads, G::tile_rows, G::dim, G::ld>(memory.q, q, i0);
        key_slice.load(k, j0, 0);
        key_slice.store(buffers.now());
    }
    __syncthreads();
    while (j0 < end) {
        const int following = next_tile(j0 + G::tile_columns);
        T s[G::rows][G::columns];
        fill(s, T(0));
        dots<Config, G::dim / G::depth, G::ld>(s, tile, memory.q, buffers, key_slice, k, j0,
                                               ahead(value_slice, v, j0, true));
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
        put_probabilities(memory.p, tile, s);
        sync_team();
        products<Config, Config::step_v, G::wide_v>(o, tile, memory.p, buffers, value_slice, v, j0,
                                                    ahead(key_slice, k, following, following < end));
        j0 = following;
    }

    const int owned = seq.q_rows - i0;
    const int64_t place = lse_row(p, seq, head) + i0;
    const T keep_scale = Config::full ? static_cast<T>(p.keep_scale) : T(1);
#pragma unroll
    for (int i = 0; i < G::rows; ++i) {
        const int row = tile.row + i * G::steps;
        const bool query = i0 + row < seq.q_len;
        l[i] = G::across_row(l[i], [](T a, T b) { return a + b; });
        if (tile.x == 0 && row < owned) {
            T lse = query && !(l[i] == 0) ? (m[i] == hidden ? T(0) : m[i]) + logarithm(l[i]) : hidden;
            if (!seq.fits) lse = not_a_number<T>();
            address<T>(p.lse)[place + row] = lse;
            if (p.stats) {
                const int64_t plane = static_cast<int64_t>(p.cu_q ? p.total_q : p.batch * static_cast<int64_t>(p.seqlen_q)) * p.heads_q;
                address<T>(p.stats)[place + row] = query ? m[i] : hidden;
                address<T>(p.stats)[plane + place + row] = query ? l[i] : T(0);
            }
        }
        // what each row is multiplied by at last
        m[i] = !seq.fits ? not_a_number<T>() : query && !(l[i] == 0) ? keep_scale / l[i] : T(0);
    }
    element* to = address<element>(p.out) + ((seq.out_row + i0) * p.heads_q + head) * p.head_dim_v;
    write_rows<Config, G::wide_v>(to, static_cast<int64_t>(p.heads_q) * p.head_dim_v, p.head_dim_v, tile, owned, o,
                                  [&](int i, T x) { return m[i] == 0 ? T(0) : x * m[i]; });
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
