// The two products of decode.h by AMX tiles, for some keys and the rows of one key/value head. K and V are the operand of
// the tiles that is read where it lies:
//
//   S^T = K Q^T                16 keys x 32 dims of K; Q^T comes once a unit, pairs of dims interleaved
//   O_even, O_odd = P V        16 keys x 32 dims of V, whose pairs are neighbouring dims where the product wants keys: a row
//                              of P has zeros in every second place, and once more with the places changed
//
// Those zeros meet values of the other dims, so rows of V with Inf or NaN must not be among them. Nothing is asked for ahead:
// requests by software stand in the way of the loads of tiles, and the processor finds the next lines by itself.
#pragma once

#include "amx.h"
#include "pack.h"

namespace attnlib {
namespace ATTNLIB_ISA {
namespace {

template <class Pair> struct DecodeTiles {
    static constexpr bool used = true;
    static constexpr int64_t kKeys = 4 * kTile;           // at most, of a head at a time
    static constexpr int64_t kTokens = int64_t{256} << 10;  // bytes of K or V that these take

    static int64_t columns(int64_t rows) { return round_up(rows, 4); }
    static int64_t keys(const Params& p) {
        int64_t n = kKeys;
        while (n > kTile && n * p.heads_kv * larger(p.dim, p.dim_v) * 2 > kTokens) n /= 2;
        return n;
    }

    // Tiles that hold rows or columns of queries are no larger than those, which takes fewer cycles.
    // 0 to 3: S^T of 16 keys each; 4: Q^T.
    struct Scores : TileScope {
        explicit Scores(int64_t rows) : Scores(static_cast<uint8_t>(4 * columns(rows)), 0) {}
        Scores(uint8_t n, int) : TileScope({16, 16, 16, 16, 16, 16, 16, 16}, {n, n, n, n, n, 64, 64, 64}) {}
    };
    // 0 to 3: O of 32 dims each; 4: P.
    struct Values : TileScope {
        explicit Values(int64_t rows) : Values(static_cast<uint8_t>(both(rows) ? 2 * rows : rows), 0) {}
        Values(uint8_t n, int) : TileScope({n, n, n, n, n, 16, 16, 16}, {64, 64, 64, 64, 64, 64, 64, 64}) {}
    };
    static bool both(int64_t rows) { return 2 * rows <= kTile; }  // even and odd dims in one product

    // to[word][column] of `rows` rows of q.
    static void transpose_q(const int32_t* q, int64_t rows, int64_t depth, int32_t* to) {
        const int64_t n = columns(rows);
        for (int64_t r = 0; r < n; ++r)
            for (int64_t d = 0; d < depth; ++d) to[d * n + r] = r < rows ? q[r * depth + d] : 0;
    }

    // Tiles of P [16 keys][even, odd][row][key] from row r.
    static void spread(const int32_t* prob, int64_t keys, int64_t rows, int64_t r, int32_t* to) {
        for (int64_t c = 0; c < keys; c += kTile, to += 2 * rows * kTile) {
            const __m256i p = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(prob + c / 2));
            const __m512i low = _mm512_cvtepu16_epi32(p);
            _mm512_storeu_si512(to + r * kTile, low);
            _mm512_storeu_si512(to + (rows + r) * kTile, _mm512_slli_epi32(low, 16));
        }
    }

    // 16 rows of keys as a tile loads them: where they lie if their distances are the same, else copies.
    struct Block {
        const char* at;
        int64_t step;

        Block(const char* const* row, int64_t offset, int64_t some, int64_t depth, int32_t* copy)
            : at(row[0] + offset), step(row[1] - row[0]) {
            int64_t uneven = some < kTile;
            for (int64_t x = 1; x + 1 < kTile; ++x) uneven |= (row[x + 1] - row[x]) ^ step;
            if (uneven == 0) return;
            for (int64_t x = 0; x < kTile; ++x) {
                if (x < some) std::memcpy(copy + x * depth, row[x] + offset, static_cast<size_t>(depth) * 4);
                else std::memset(copy + x * depth, 0, static_cast<size_t>(depth) * 4);
            }
            at = reinterpret_cast<const char*>(copy);
            step = depth * 4;
        }
    };
    struct Blocks {
        int64_t count;
        Block of[4];

        static Block make(int64_t n, const char* const* row, int64_t offset, int64_t some, int64_t depth, int32_t* copy) {
            if (n > 0 && n * kTile >= some) n = 0;  // not read
            return Block(row + n * kTile, offset, some - n * kTile, depth, copy + n * kTile * depth);
        }
        Blocks(const char* const* row, int64_t offset, int64_t some, int64_t depth, int32_t* copy)
            : count((some + kTile - 1) / kTile),
              of{make(0, row, offset, some, depth, copy), make(1, row, offset, some, depth, copy),
                 make(2, row, offset, some, depth, copy), make(3, row, offset, some, depth, copy)} {}
    };

    template <int c, int b> static ATTNLIB_INLINE void score_tile(const Block& keys, int64_t d) {
        tile_load<b>(keys.at + d * 4, keys.step);
        tile_multiply_add<c, b, 4>();
    }
    // score[r * ld + c] = q_r . k_c for `some` keys, and what is behind them to a whole tile. copy: [kKeys][depth]
    static ATTNLIB_NOINLINE void scores(int64_t rows, const int32_t* q, const char* const* row, int64_t offset, int64_t some,
                                        int64_t depth, int32_t* copy, float* score, int64_t ld) {
        const int64_t n = columns(rows);
        const Blocks keys(row, offset, some, depth, copy);
        alignas(64) float products[kKeys * kTile];
        tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
        for (int64_t d = 0; d < depth; d += kTile) {
            tile_load<4>(q + d * n, n * 4);
            score_tile<0, 5>(keys.of[0], d);
            if (keys.count > 1) score_tile<1, 6>(keys.of[1], d);
            if (keys.count > 2) score_tile<2, 7>(keys.of[2], d);
            if (keys.count > 3) score_tile<3, 5>(keys.of[3], d);
        }
        tile_store<0>(products, n * 4);
        tile_store<1>(products + kTile * n, n * 4);
        tile_store<2>(products + 2 * kTile * n, n * 4);
        tile_store<3>(products + 3 * kTile * n, n * 4);
        for (int64_t c = 0; c < keys.count * kTile; c += kTile)
            for (int64_t r = 0; r < rows; r += 4) {
                transpose_keys(products + c * n + r, n, smaller(4, rows - r), score + r * ld + c, ld);
            }
    }

    // to[r * ld + c] = from[c * n + r] for 16 c and `rows` r, at most 4.
    static ATTNLIB_INLINE void transpose_keys(const float* from, int64_t n, int64_t rows, float* to, int64_t ld) {
        __m512 four[4];  // of 4 keys each; by parts no larger than what the tile stored, else they wait for it
        for (int x = 0; x < 4; ++x) {
            const float* at = from + 4 * x * n;
            __m512 y = _mm512_castps128_ps512(_mm_load_ps(at));
            y = _mm512_mask_broadcast_f32x4(y, 0x00F0, _mm_load_ps(at + n));
            y = _mm512_mask_broadcast_f32x4(y, 0x0F00, _mm_load_ps(at + 2 * n));
            four[x] = _mm512_mask_broadcast_f32x4(y, 0xF000, _mm_load_ps(at + 3 * n));
        }
        const __m512i even = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
        const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(2));
        const __m512 low01 = _mm512_permutex2var_ps(four[0], even, four[1]);
        const __m512 high01 = _mm512_permutex2var_ps(four[2], even, four[3]);
        const __m512 low23 = _mm512_permutex2var_ps(four[0], odd, four[1]);
        const __m512 high23 = _mm512_permutex2var_ps(four[2], odd, four[3]);
        const __m512 row[4] = {_mm512_shuffle_f32x4(low01, high01, 0x44), _mm512_shuffle_f32x4(low01, high01, 0xEE),
                               _mm512_shuffle_f32x4(low23, high23, 0x44), _mm512_shuffle_f32x4(low23, high23, 0xEE)};
        for (int r = 0; r < 4; ++r)
            if (r < rows) _mm512_storeu_ps(to + r * ld, row[r]);
    }

    template <int c, int b> static ATTNLIB_INLINE void value_tile(const Block& keys, int64_t d) {
        tile_load<b>(keys.at + d * 4, keys.step);
        tile_multiply_add<c, 4, b>();
    }
    // Rows of P, first all with even dims and then all with odd ones, times V; [2 rows][depth]
    static ATTNLIB_NOINLINE void values(int64_t rows, const int32_t* prob, const char* const* row, int64_t offset, int64_t some,
                                        int64_t depth, int32_t* copy, float* to) {
        const Blocks keys(row, offset, some, depth, copy);
        const int64_t bytes = depth * 4;
        for (int64_t half = 0; half < (both(rows) ? 1 : 2); ++half) {
            float* out = to + half * rows * depth;
            for (int64_t d = 0; d < depth; d += 4 * kTile, out += 4 * kTile) {
                const int64_t slices = (depth - d) / kTile;
                tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
                for (int64_t n = 0; n < keys.count; ++n) {
                    tile_load<4>(prob + (2 * n + half) * rows * kTile, kTile * 4);
                    value_tile<0, 5>(keys.of[n], d);
                    if (slices > 1) value_tile<1, 6>(keys.of[n], d + kTile);
                    if (slices > 2) value_tile<2, 7>(keys.of[n], d + 2 * kTile);
                    if (slices > 3) value_tile<3, 5>(keys.of[n], d + 3 * kTile);
                }
                tile_store<0>(out, bytes);
                if (slices > 1) tile_store<1>(out + kTile, bytes);
                if (slices > 2) tile_store<2>(out + 2 * kTile, bytes);
                if (slices > 3) tile_store<3>(out + 3 * kTile, bytes);
            }
        }
    }
    // out = factor out + what values() left; dim d of a row is element placed_at(d) of out.
    static void add(int64_t rows, const float* from, int64_t depth, const float* factor, float* out) {
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t d = 0; d < depth; d += kTile)
                for (int64_t odd = 0; odd < 2; ++odd) {
                    float* at = out + 2 * (r * depth + d) + odd * kTile;
                    store<float>(at, load<float>(at) * factor[r] + load<float>(from + (odd * rows + r) * depth + d));
                }
    }
    static ATTNLIB_INLINE int64_t placed_at(int64_t d) { return d / 32 * 32 + d % 2 * 16 + d % 32 / 2; }
    // Dims d to d + 31 of a row of out in their order.
    static ATTNLIB_INLINE void restore(const float* from, float* to) {
        const F32V even = load<float>(from), odd = load<float>(from + kTile);
        store<float>(to, interleave_low(even, odd));
        store<float>(to + kTile, interleave_high(even, odd));
    }
};

}  // namespace
}  // namespace ATTNLIB_ISA
}  // namespace attnlib
