// What stands between q . k and a probability in the SIMT kernels, for one sequence and query head:
//
//   s = scale * x;  s = softcap * tanh(s / softcap);  s += alibi + bias;  s = -inf where not visible.
#pragma once

#include "philox.h"
#include "sequence_simt.cuh"
#include "window.h"

namespace attnlib {

// Queries and keys of a thread's piece of a tile, whose first row and column are given; transposed: rows are keys.
template <class G, bool transposed>
struct Axes {
    static constexpr int queries = transposed ? G::columns : G::rows, keys = transposed ? G::rows : G::columns;
    static constexpr int query_step = transposed ? G::lanes : G::steps, key_step = transposed ? G::steps : G::lanes;
    int query0, key0;

    __device__ __forceinline__ Axes(int row, int column) : query0(transposed ? column : row), key0(transposed ? row : column) {}
    __device__ __forceinline__ int query(int i, int j) const { return query0 + (transposed ? j : i) * query_step; }
    __device__ __forceinline__ int key(int i, int j) const { return key0 + (transposed ? i : j) * key_step; }
};

template <class Config>
struct Scoring {
    using G = Tile<Config>;
    using T = typename G::number;

    Window window;
    T scale, cap, slope;
    int sequence, head;
    const typename Config::bias_element* bias;
    const uint8_t* mask;
    const uint8_t* blocks;

    __device__ __forceinline__ Scoring(const SimtParams& p, const Sequence& s, int head) : sequence(s.index), head(head) {
        window.left = Config::fault == ignore_window_left ? -1 : p.window_left;
        window.right = p.window_right;
        window.q_len = s.q_len;
        window.kv_len = s.kv_len;
        if constexpr (Config::fault == leak_past_kv_len) window.kv_len += s.kv_len < s.k_rows;
        if constexpr (Config::fault == drop_last_partial_key_block) window.kv_len -= s.kv_len > 1 && s.kv_len % 64 != 0;
        window.offset = p.top_left ? 0 : window.kv_len - window.q_len;
        scale = static_cast<T>(p.scale) * (Config::fault == scaled_scores ? T(1.001) : T(1));
        if constexpr (Config::full) {
            cap = static_cast<T>(p.softcap);
            if (cap > 0) scale = static_cast<T>(p.scale / p.softcap);
            slope = 0;
            const bool real = s.index < p.batch;
            if (p.alibi && real) slope = address<const float>(p.alibi)[s.index * p.alibi_b + head * p.alibi_h];
            const int64_t b = real ? s.index : 0;
            bias = address<const typename Config::bias_element>(p.bias) + b * p.bias_b + head * p.bias_h;
            mask = address<const uint8_t>(p.mask) + b * p.mask_b + head * p.mask_h;
            blocks = address<const uint8_t>(p.block_mask) + b * p.block_b + head * p.block_h;
        }
    }

    // Whether no query of [i0, i1) sees a key of [j0, j1) for the block mask.
    __device__ __forceinline__ bool skips(const SimtParams& p, int i0, int i1, int j0, int j1) const {
        if constexpr (Config::full) {
            if (p.block_mask) {
                const int i_end = clip(window.q_len, 0, i1 < p.seqlen_q ? i1 : p.seqlen_q);
                const int j_end = clip(window.kv_len, 0, j1 < p.seqlen_k ? j1 : p.seqlen_k);
                for (int r = i0 / p.block_rows; r * p.block_rows < i_end; ++r)
                    for (int c = j0 / p.block_columns; c * p.block_columns < j_end; ++c)
                        if (blocks[r * p.block_i + c * p.block_j]) return false;
                return true;
            }
        }
        return false;
    }

    __device__ __forceinline__ Range keys_seen(int i0, int i1) const {   // by the queries [i0, i1)
        if (i0 >= i1) return {0, 0};
        return {static_cast<int>(window.key_begin(i0)), static_cast<int>(window.key_end(i1 - 1))};
    }

    // The first tile of keys at or after j that the block mask does not hide from all of [i0, i1), or what is past `end`.
    __device__ __forceinline__ int next_keys(const SimtParams& p, int i0, int i1, int j, int end) const {
        while (j < end && skips(p, i0, i1, j, j + G::tile_columns)) j += G::tile_columns;
        return j;
    }

    template <class Change>
    __device__ __forceinline__ static void each(T (&s)[G::rows][G::columns], const Change& change) {
#pragma unroll
        for (int i = 0; i < G::rows; ++i)
#pragma unroll
            for (int j = 0; j < G::columns; ++j) change(s[i][j], i, j);
    }

    // x -> s for a tile whose first row and column of the thread are given. derivative, where asked for: ds/dx without the scale.
    template <bool transposed, bool derive>
    __device__ __forceinline__ void apply(
        const SimtParams& p, T (&s)[G::rows][G::columns], T (&derivative)[derive ? G::rows : 1][derive ? G::columns : 1],
        int row, int column) const {
        const Axes<G, transposed> at(row, column);
        each(s, [&](T& x, int, int) { x = rounded_product(x, scale); });
        if constexpr (derive) fill(derivative, T(1));
        if constexpr (Config::full) {
            if (cap > 0)
                each(s, [&](T& x, int i, int j) {
                    const T t = tangent(x);
                    x = cap * t;
                    if constexpr (derive) derivative[i][j] = 1 - t * t;
                });
        }
        hide<transposed>(s, row, column);
        if constexpr (Config::full) {
            const T hidden = minus_infinity<T>();
            const auto open = [&](T x, int i, int j) { return x != hidden && at.query(i, j) < p.seqlen_q && at.key(i, j) < p.seqlen_k; };
            if (p.alibi)
                each(s, [&](T& x, int i, int j) {
                    x -= slope * magnitude(static_cast<T>(at.query(i, j) + static_cast<int>(window.offset) - at.key(i, j)));
                });
            if constexpr (Config::has_bias)
                each(s, [&](T& x, int i, int j) {
                    if (open(x, i, j)) x += widen<T>(bias[at.query(i, j) * p.bias_i + at.key(i, j) * p.bias_j]);
                });
            if (p.mask)
                each(s, [&](T& x, int i, int j) {
                    if (open(x, i, j) && !mask[at.query(i, j) * p.mask_i + at.key(i, j) * p.mask_j]) x = hidden;
                });
            if (p.block_mask)
                each(s, [&](T& x, int i, int j) {
                    if (open(x, i, j) && !blocks[at.query(i, j) / p.block_rows * p.block_i + at.key(i, j) / p.block_columns * p.block_j])
                        x = hidden;
                });
        }
    }

    // -infinity where position or lengths hide a pair; most tiles have none of those.
    template <bool transposed>
    __device__ __forceinline__ void hide(T (&s)[G::rows][G::columns], int row, int column) const {
        using Axes = Axes<G, transposed>;
        const int i0 = transposed ? column : row, i1 = i0 + (Axes::queries - 1) * Axes::query_step;
        const int j0 = transposed ? row : column, j1 = j0 + (Axes::keys - 1) * Axes::key_step;
        if (i1 < window.q_len && j1 < window.key_end(i0) && j0 >= window.key_begin(i1)) return;
        recompute(row);   // what follows is rare: no register is to hold any of it from tile to tile
        recompute(column);
        const Axes at(row, column);
#pragma unroll
        for (int n = 0; n < Axes::queries; ++n) {
            const int i = at.query0 + n * Axes::query_step;
            const int begin = static_cast<int>(window.key_begin(i)), end = i < window.q_len ? static_cast<int>(window.key_end(i)) : 0;
#pragma unroll
            for (int m = 0; m < Axes::keys; ++m) {
                const int j = at.key0 + m * Axes::key_step;
                if (j < begin || j >= end) s[transposed ? m : n][transposed ? n : m] = minus_infinity<T>();
            }
        }
    }

    // Bit i * columns + j: whether dropout keeps that element.
    template <bool transposed>
    __device__ __forceinline__ uint64_t kept(const SimtParams& p, int row, int column) const {
        // Philox gives eight numbers at once, for queries 8 and keys 8, 16 and 24 apart; a thread's own among them share a call.
        constexpr int key_side = transposed ? G::team_rows : 32, query_side = transposed ? 32 : G::team_rows;
        using Axes = Axes<G, transposed>;
        constexpr int key_step = Axes::key_step, query_step = Axes::query_step;
        const Axes at(row, column);
        constexpr bool scattered = transposed && Config::paged;   // a page may begin at any key
        constexpr int keys = scattered ? 1 : key_side % 32 == 0 ? (key_step > 8 ? 32 / key_step : 4)
                             : key_side % 16 == 0 && key_step <= 8 ? 2 : 1;
        constexpr int queries = query_side % 16 == 0 && query_step <= 8 ? 2 : 1;
        constexpr int key_apart = key_step > 8 ? 1 : 8 / key_step, query_apart = query_step > 8 ? 1 : 8 / query_step;
        constexpr int row_count = transposed ? keys : queries, column_count = transposed ? queries : keys;
        constexpr int row_apart = transposed ? key_apart : query_apart, column_apart = transposed ? query_apart : key_apart;
        const uint64_t seed = static_cast<uint64_t>(*address<const int64_t>(p.seed));
        const uint32_t h = Config::fault == dropout_ignores_head ? 0 : head;
        uint64_t bits = 0;
#pragma unroll
        for (int i = 0; i < G::rows; ++i) {
            if (i / row_apart % row_count) continue;
#pragma unroll
            for (int j = 0; j < G::columns; ++j) {
                if (j / column_apart % column_count) continue;
                const PhiloxWords words = dropout_words(seed, sequence, h, at.query(i, j), at.key(i, j));
#pragma unroll
                for (int a = 0; a < row_count; ++a)
#pragma unroll
                    for (int c = 0; c < column_count; ++c) {
                        const int m = i + a * row_apart, n = j + c * column_apart;
                        if (dropout_keeps(words, at.query(m, n), at.key(m, n), p.dropout_threshold))
                            bits |= uint64_t(1) << (m * G::columns + n);
                    }
            }
        }
        return bits;
    }
};

}  // namespace attnlib
