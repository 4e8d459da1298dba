// What stands between q . k and a probability, for forward and backward alike:
//
//   s = scale * x;  s = softcap * tanh(s / softcap);  s += alibi + bias;  s = -inf where not visible.
//
// Forward tiles have queries along their rows ("slow") and keys along their columns; backward tiles are transposed. A
// thread holds s[m][n][e] at slow = slow0 + 16 m + l/4 + 8 (e/2), fast = fast0 + 8 n + 2 (l%4) + e%2.
#pragma once

#include "element.cuh"
#include "params.cuh"
#include "philox.h"
#include "window.h"

namespace attnlib {

constexpr float log2e = 1.4426950408889634f, ln2 = 0.6931471805599453f;

// Faults that tests compile in to see them caught; 0 is none.
enum Fault { no_fault, no_rescale, ignore_window_left, drop_last_partial_key_block, head_mod, skip_delta,
             dropout_ignores_head, leak_past_kv_len, scaled_dv, scaled_scores, no_recompute };

template <class T>
__device__ __forceinline__ T* address(uint64_t value) { return reinterpret_cast<T*>(value); }

__device__ __forceinline__ int clamp(int64_t x, int low, int high) {
    return x < low ? low : x > high ? high : static_cast<int>(x);
}

// Where one sequence lies: its lengths, and its first rows in the operands (rows of the whole packed tensor).
struct Sequence {
    int index;                 // its number in the call
    int q_len, kv_len;
    int64_t q_row, k_row;      // packed: first row; else 0 (the batch stride places it)
    bool valid;                // false: a device-side length does not fit; results are NaN
    int padded_q, padded_k;    // rows of the operands it owns, padding included
};

// Finds the sequence and the tile within it that tile number `tile` of `rows` rows serves. Packed: sequence b starts at
// tile cu[b] / rows + b, which never overlaps and needs no scan; what follows the last sequence is sequence `batch`.
template <class Config>
__device__ __forceinline__ bool find_packed_tile(const int* cu, int batch, int total, int rows, int tile, int& sequence, int& within) {
    int low = 0, high = batch;   // the last sequence whose first tile is <= tile
    while (low < high) {
        const int middle = (low + high + 1) >> 1;
        if (clamp(cu[middle], 0, total) / rows + middle <= tile) low = middle;
        else high = middle - 1;
    }
    sequence = low;
    within = tile - (clamp(cu[low], 0, total) / rows + low);
    const int begin = clamp(cu[low], 0, total), end = low == batch ? total : clamp(cu[low + 1], begin, total);
    return static_cast<int64_t>(within) * rows < end - begin;
}

// First row tile of a sequence in the workspaces that keep one entry a tile.
template <class Config, class Params>
__device__ __forceinline__ int64_t first_tile(const Params& p, int sequence, int rows) {
    if constexpr (Config::packed) return clamp(address<const int>(p.cu_q)[sequence], 0, p.total_q) / rows + sequence;
    else return static_cast<int64_t>(sequence) * p.tiles;
}

template <class Config, class Params>
__device__ __forceinline__ Sequence sequence_of(const Params& p, int b) {
    Sequence s{b, p.seqlen_q, p.seqlen_k, 0, 0, true, p.seqlen_q, p.seqlen_k};
    if constexpr (Config::packed) {
        const int* cu_q = address<const int>(p.cu_q);
        const int* cu_k = address<const int>(p.cu_k);
        s.q_row = clamp(cu_q[b], 0, p.total_q);
        const int q_end = b == p.batch ? p.total_q : clamp(cu_q[b + 1], s.q_row, p.total_q);
        s.padded_q = q_end - static_cast<int>(s.q_row);
        s.q_len = b == p.batch ? 0 : s.padded_q;
        if constexpr (!Config::paged) s.k_row = clamp(cu_k[b], 0, p.total_k);
        else s.k_row = 0;
        const int capacity = Config::paged ? p.seqlen_k : p.total_k;
        const int k_begin = cu_k[b];
        const int k_end = b == p.batch ? p.total_k : cu_k[b + 1];
        if constexpr (Config::paged) {
            s.padded_k = b == p.batch ? 0 : clamp(static_cast<int64_t>(k_end) - k_begin, 0, 0x7FFFFFFF);
            if (s.padded_k > capacity) s.valid = false;
        } else {
            s.padded_k = clamp(k_end, static_cast<int>(s.k_row), capacity) - static_cast<int>(s.k_row);
        }
        s.kv_len = b == p.batch ? 0 : s.padded_k;
    } else if constexpr (Config::lengths) {
        int64_t q_len = p.q_lens ? address<const int>(p.q_lens)[b] : p.seqlen_q;
        int64_t kv_len = p.kv_lens ? address<const int>(p.kv_lens)[b] : p.seqlen_k;
        if (p.new_tokens > 0) {
            const int64_t added = p.new_lens ? address<const int>(p.new_lens)[b] : p.new_tokens;
            if (kv_len < 0 || added < 0 || added > p.new_tokens) s.valid = false;
            kv_len += added;
        }
        if (q_len < 0 || q_len > p.seqlen_q || kv_len < 0 || kv_len > p.seqlen_k) s.valid = false;
        s.q_len = clamp(q_len, 0, p.seqlen_q);
        s.kv_len = clamp(kv_len, 0, p.seqlen_k);
    }
    if (!s.valid) s.kv_len = 0;
    if constexpr (Config::fault == leak_past_kv_len) s.kv_len = s.kv_len < s.padded_k ? s.kv_len + 1 : s.kv_len;
    if constexpr (Config::fault == drop_last_partial_key_block) s.kv_len -= s.kv_len > 1 ? (s.kv_len % 64 != 0) : 0;
    return s;
}

template <class Config, class Params>
__device__ __forceinline__ Window window_of(const Params& p, const Sequence& s) {
    Window w;
    w.left = Config::left && Config::fault != ignore_window_left ? p.window_left : -1;
    w.right = Config::right ? p.window_right : -1;
    w.offset = Config::top_left ? 0 : s.kv_len - s.q_len;
    w.q_len = s.q_len;
    w.kv_len = s.kv_len;
    return w;
}

// tanh to 2^-21 relative: an odd polynomial near zero, 1 - 2 / (1 + exp(2x)) elsewhere.
__device__ __forceinline__ float tanh_exact(float x) {
    const float a = fabsf(x), y = x * x;
    const float near = x * (1.f + y * (-0.333333333f + y * (0.133333333f + y * (-0.053968254f + y * (0.021869489f - y * 0.008863235f)))));
    const float far = 1.f - 2.f * ptx::rcp_approx(1.f + ptx::ex2_approx(2.f * log2e * a));
    return a < 0.4f ? near : copysignf(far, x);
}

// Scores are kept in units of log 2 (plain and softcap) or natural (bias, ALiBi, split float32: m is subtracted before the
// units change). exact: backward finds the forward's s bit for bit, so where and what is rounded is not left to the compiler.
template <class Config>
struct Scorer {
    static constexpr bool exact = Atom<Config>::split;
    static constexpr bool natural = Config::alibi || Config::has_bias || exact;
    static constexpr bool lookups = Config::alibi || Config::has_bias || Config::mask;
    static constexpr bool raw = !lookups && !Config::softcap && !exact;   // scores stay q . k; the exponent's FMA scales them
    static constexpr float unit = natural ? log2e : 1.f;

    float scale;               // x -> s, or x -> argument of tanh
    float cap;                 // softcap in the unit of s
    int i_end, j_end;          // rows and columns that bias and mask have
    int position;              // of query 0
    float slope;
    const typename Config::bias_element* bias;
    const uint8_t* mask;
    int64_t bias_i, bias_j, mask_i, mask_j;

    template <class Params>
    __device__ __forceinline__ Scorer(const Params& p, const Sequence& s, int head) {
        scale = p.scale * (Config::fault == scaled_scores ? 1.001f : 1.f);
        if constexpr (Config::softcap) {
            scale /= p.softcap;
            cap = p.softcap * (natural ? 1.f : log2e);
        } else {
            scale *= natural ? 1.f : log2e;
        }
        i_end = s.q_len < p.seqlen_q ? s.q_len : p.seqlen_q;
        j_end = s.kv_len < p.seqlen_k ? s.kv_len : p.seqlen_k;
        position = Config::top_left ? 0 : s.kv_len - s.q_len;
        if constexpr (Config::alibi) slope = s.index >= p.batch ? 0.f : address<const float>(p.alibi)[s.index * p.alibi_b + head * p.alibi_h];
        if constexpr (Config::has_bias) {
            bias = address<const typename Config::bias_element>(p.bias) + s.index * p.bias_b + head * p.bias_h;
            bias_i = p.bias_i;
            bias_j = p.bias_j;
        }
        if constexpr (Config::mask) {
            mask = address<const uint8_t>(p.mask) + s.index * p.mask_b + head * p.mask_h;
            mask_i = p.mask_i;
            mask_j = p.mask_j;
        }
    }

    template <bool capped>
    __device__ __forceinline__ float one(float x, int i, int j) const {
        constexpr bool fused = exact && Config::has_bias && !Config::alibi && !Config::softcap;   // one rounding beside a large bias
        if constexpr (Config::softcap) x = capped ? x : capped_score(tanh_exact(x * scale));
        else if constexpr (exact && !fused) x = __fmul_rn(x, scale);
        else if constexpr (!raw && !fused) x *= scale;
        if constexpr (lookups) {
            const bool inside = i < i_end && j < j_end;
            if constexpr (Config::alibi) {
                const float distance = fabsf(static_cast<float>(i + position - j));
                if constexpr (exact) x = fmaf(-slope, distance, x);
                else x -= slope * distance;
            }
            if constexpr (Config::has_bias)
                if (inside) {
                    const float added = to_float(bias[i * bias_i + j * bias_j]);
                    if constexpr (fused) x = fmaf(x, scale, added);
                    else if constexpr (exact) x = __fadd_rn(x, added);
                    else x += added;
                }
            if constexpr (Config::mask)
                if (inside && mask[i * mask_i + j * mask_j] == 0) x = -infinity;
        }
        return x;
    }

    __device__ __forceinline__ float capped_score(float t) const { return exact ? __fmul_rn(cap, t) : cap * t; }

    // x -> s for a whole tile. group: rows a query has (grouped heads share a tile in decode).
    template <bool transposed, int M, int N>
    __device__ __forceinline__ void apply(float (&x)[M][N][4], int slow0, int fast0, int lane, int group = 1) const {
        Scorer now = *this;   // offsets of bias and mask are computed anew for each tile: kept, they would fill registers
        if constexpr (Config::has_bias) now.bias_i = ptx::opaque(bias_i), now.bias_j = ptx::opaque(bias_j);
        if constexpr (Config::mask) now.mask_i = ptx::opaque(mask_i), now.mask_j = ptx::opaque(mask_j);
        if constexpr (!raw) {
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int n = 0; n < N; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const int slow = slow0 + 16 * m + (lane >> 2) + 8 * (e >> 1), fast = fast0 + 8 * n + 2 * (lane & 3) + (e & 1);
                        const int query = transposed ? fast : Config::pack ? slow / group : slow;
                        x[m][n][e] = now.template one<transposed>(x[m][n][e], query, transposed ? slow : fast);
                    }
        }
    }

    // raw scores, where the exponent's FMA does not scale them
    template <int M, int N>
    __device__ __forceinline__ void scale_raw(float (&x)[M][N][4]) const {
        if constexpr (raw) {
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int n = 0; n < N; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e) x[m][n][e] *= scale;
        }
    }

    // The softcap alone, and its derivative, for the backward: apply<true> expects it done.
    template <int M, int N>
    __device__ __forceinline__ void cap_scores(float (&x)[M][N][4], float (&derivative)[M][N][4]) const {
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const float t = tanh_exact(x[m][n][e] * scale);
                    x[m][n][e] = capped_score(t);
                    derivative[m][n][e] = 1.f - t * t;
                }
    }
};

// The block mask of one head: which tiles it leaves, and hiding where it leaves a part of one.
template <class Config>
struct BlockMask {
    const uint8_t* on;
    int64_t stride_i, stride_j;
    int rows, columns, i_end, j_end;   // of a block; queries and keys that it covers

    template <class Params>
    __device__ __forceinline__ BlockMask(const Params& p, const Sequence& s, int head)
        : on(address<const uint8_t>(p.block_mask) + s.index * p.block_b + head * p.block_h), stride_i(p.block_i), stride_j(p.block_j),
          rows(p.block_rows), columns(p.block_columns), i_end(min(s.q_len, p.seqlen_q)), j_end(min(s.kv_len, p.seqlen_k)) {}

    __device__ __forceinline__ bool hides(int i, int j) const { return i < i_end && j < j_end && on[i / rows * stride_i + j / columns * stride_j] == 0; }

    // -1 if no pair of queries [i0, i1) and keys [j0, j1) is visible to the block mask, 1 if all are, else 0. As in hides, what the
    // mask does not cover is visible.
    __device__ __forceinline__ int state(int i0, int i1, int j0, int j1) const {
        if (i0 >= i1 || j0 >= j1) return -1;
        bool any = i1 > i_end || j1 > j_end, all = true;
        const int last_i = min(i1, i_end) - 1, last_j = min(j1, j_end) - 1;
        for (int r = i0 / rows; r <= (last_i >= i0 ? last_i / rows : -1); ++r)
            for (int c = j0 / columns; c <= (last_j >= j0 ? last_j / columns : -1); ++c) {
                const bool visible = on[r * stride_i + c * stride_j] != 0;
                any |= visible;
                all &= visible;
            }
        return !any ? -1 : all ? 1 : 0;
    }

    // x[m][n][e]: row slow0 + 16 m + l/4 + 8 (e/2) and column fast0 + 8 n + 2 (l%4) + e%2 of queries by keys; transposed: of keys by queries.
    template <bool transposed, int M, int N>
    __device__ __forceinline__ void hide(float (&x)[M][N][4], int slow0, int fast0, int lane) const {
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int slow = slow0 + 16 * m + (lane >> 2) + 8 * (e >> 1), fast = fast0 + 8 * n + 2 * (lane & 3) + (e & 1);
                    if (hides(transposed ? fast : slow, transposed ? slow : fast)) x[m][n][e] = -infinity;
                }
    }
};

// The edges of visibility by position in a tile of queries [i0, i1) by keys: which key tiles they cross, and hiding there.
template <class Config>
struct Edges {
    static constexpr int far = 1 << 30;
    int first, count, kv_len;   // position of query i0; i1 - i0
    int left, right;

    template <class Params>
    __device__ __forceinline__ Edges(const Params& p, int first, int count, int kv_len)
        : first(first), count(count), kv_len(kv_len),
          left(Config::left && Config::fault != ignore_window_left ? p.window_left : -1), right(Config::right ? p.window_right : -1) {}

    __device__ __forceinline__ bool cross(int j0, int j1) const {
        bool edge = j1 > kv_len;
        if constexpr (Config::left) edge = edge || (left >= 0 && j0 < first + count - 1 - left);
        if constexpr (Config::right) edge = edge || (right >= 0 && j1 > first + right + 1);
        return edge;
    }
    // s[m][n][e]: row slow0 + 16 m + l/4 + 8 (e/2) of the tile, key j0 + 8 n + 2 (l%4) + e%2.
    template <int M, int N>
    __device__ __forceinline__ void hide(float (&s)[M][N][4], int slow0, int j0, int lane, int group) const {
        const int fast0 = j0 + 2 * (lane & 3);
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = slow0 + 16 * m + 8 * r + (lane >> 2), position = first + (Config::pack ? row / group : row);
                int low = -far, high = kv_len;
                if constexpr (Config::left) low = left >= 0 ? position - left : -far;
                if constexpr (Config::right) high = right >= 0 ? min(kv_len, position + right + 1) : kv_len;
                outside(s[m], r, low - fast0, high - fast0);
            }
    }
    // The transposed tile: row j0 + 16 m + l/4 + 8 (e/2) is a key, column 8 n + 2 (l%4) + e%2 a query of the tile.
    template <int M, int N>
    __device__ __forceinline__ void hide_transposed(float (&s)[M][N][4], int j0, int fast0, int lane) const {
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int j = j0 + 16 * m + 8 * r + (lane >> 2);
                int low = -far, high = count;
                if constexpr (Config::right) low = right >= 0 ? j - first - right : -far;
                if constexpr (Config::left) high = left >= 0 ? min(count, j - first + left + 1) : count;
                if (j >= kv_len) high = -far;
                outside(s[m], r, low - fast0 - 2 * (lane & 3), high - fast0 - 2 * (lane & 3));
            }
    }

private:
    template <int N>
    __device__ __forceinline__ static void outside(float (&s)[N][4], int r, int low, int high) {
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e)
                if (8 * n + e < low || 8 * n + e >= high) s[n][2 * r + e] = -infinity;
    }
};

// A number is kept iff it is at least the threshold: with threshold * 65536 - 1, one comparison of whole words decides for
// the high half, and one of shifted words for the low half.
__device__ __forceinline__ uint32_t dropout_above(int threshold) { return (static_cast<uint32_t>(threshold) << 16) - 1u; }

struct WideProduct {
    __device__ __forceinline__ void operator()(uint32_t& low, uint32_t& high, uint32_t a, uint32_t b) const { ptx::mul_wide(low, high, b, a); }
};

// The random words of a tile, drawn apart from their use so that the integer work can overlap a product. Forward: what
// depends on the key alone waits in shared memory, a PhiloxColumn for each of keys 0-7, 32-39, ... of the tile, and so does
// what depends on the row alone, a PhiloxRow for each of rows 0-7, 16-23, ...; put_column and put_row leave them there.
// Transposed: slow0 is a multiple of 16 (with M > 1: of 32), fast0 of 16.
template <class Config, bool transposed, int M, int N>
struct DropoutWords {
    static constexpr int pairs = transposed && M >= 2 ? 2 : 1;             // transposed: 16-key tiles that one call serves
    static constexpr int rows = M / pairs, columns = N / (transposed ? 2 : 4);
    static_assert(N % (transposed ? 2 : 4) == 0, "one call serves 16 queries, or 32 keys");
    PhiloxWords words[Config::dropout ? rows : 1][columns][2];

    // Of the keys, and of the rows, that one call serves.
    __device__ __forceinline__ static uint32_t key_group(int j) { return (j >> 5) * 8 + (j & 7); }
    __device__ __forceinline__ static uint32_t row_group(int i) { return (i >> 4) * 8 + (i & 7); }
    __device__ __forceinline__ static uint32_t head_of(int head) { return Config::fault == dropout_ignores_head ? 0 : head; }

    __device__ __forceinline__ static void put_column(uint32_t at, uint64_t seed, int sequence, int head, int j) {
        const PhiloxColumn x = philox_column(seed, key_group(j), head_of(head), sequence, WideProduct{});
        ptx::st_shared_v4(at, {x.word[0], x.word[1], x.word[2], x.word[3]});
    }
    __device__ __forceinline__ static void put_row(uint32_t at, uint64_t seed, int head, int i) {
        const PhiloxRow x = philox_row(seed, row_group(i), head_of(head), WideProduct{});
        ptx::st_shared_b64(at, static_cast<uint64_t>(x.high) << 32 | x.low);
    }

    // Forward, tile row m: columns_at and rows_at are where those of the warp's first key and row wait.
    __device__ __forceinline__ void draw_row(int m, uint64_t seed, uint32_t columns_at, uint32_t rows_at, int lane) {
        if constexpr (Config::dropout) {
            const uint64_t parked = ptx::ld_shared_volatile_b64(rows_at + 64 * m + 8 * (lane >> 2));   // else kept for a second use
            const PhiloxRow row{static_cast<uint32_t>(parked >> 32), static_cast<uint32_t>(parked)};
#pragma unroll
            for (int n = 0; n < columns; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const uint4 x = ptx::ld_shared_v4(columns_at + 16 * (8 * n + 2 * (lane & 3) + e));
                    words[m][n][e] = philox_finish(seed, row, PhiloxColumn{{x.x, x.y, x.z, x.w}}, WideProduct{});
                }
        }
    }
    __device__ __forceinline__ void draw_transposed(uint64_t seed, int sequence, int head, int slow0, int fast0, int lane) {
        if constexpr (Config::dropout) {
            const uint32_t h = head_of(head);
#pragma unroll
            for (int m = 0; m < rows; ++m)
#pragma unroll
                for (int n = 0; n < columns; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int j = slow0 + 16 * pairs * m + (lane >> 2), i = fast0 + 16 * n + 2 * (lane & 3) + e;
                        const PhiloxColumn column = philox_column(seed, key_group(j), h, sequence, WideProduct{});
                        words[m][n][e] = philox_finish(seed, philox_row(seed, row_group(i), h, WideProduct{}), column, WideProduct{});
                    }
        }
    }

    // Forward: zeroes what is dropped in tile row m. `above` waits at above_at in shared memory: from a register ptxas keeps
    // all comparisons for a second use of the words.
    __device__ __forceinline__ void apply_row(float (&s)[M][N][4], int m, uint32_t above_at) const {
        if constexpr (Config::dropout) {
            const uint32_t above = ptx::ld_shared_volatile(above_at);
#pragma unroll
            for (int n = 0; n < columns; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e)
#pragma unroll
                    for (int k = 0; k < 4; ++k)
                        ptx::zero_halves(s[m][4 * n + k][e], s[m][4 * n + k][e + 2], words[m][n][e].word[k], above);
        }
    }
    // Transposed: turns the sign of what is dropped in the `pairs` tile rows from m.
    __device__ __forceinline__ void apply_transposed(float (&s)[M][N][4], int m, uint32_t above_at, int slow0) const {
        if constexpr (Config::dropout) {
            const uint32_t above = ptx::ld_shared_volatile(above_at);
#pragma unroll
            for (int n = 0; n < columns; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const PhiloxWords& w = words[m / pairs][n][e];
#pragma unroll
                    for (int k = 0; k < 2 * pairs; ++k) {
                        uint32_t word = w.word[k];
                        if constexpr (pairs == 1) word = ((slow0 + 16 * m) & 16) ? w.word[k + 2] : w.word[k];
                        float& first = s[m + k / 2][2 * n][2 * (k & 1) + e];
                        float& second = s[m + k / 2][2 * n + 1][2 * (k & 1) + e];
                        first = (word << 16) > above ? first : -first;
                        second = word > above ? second : -second;
                    }
                }
        }
    }
};

}  // namespace attnlib
