// Where the rows of a sequence lie: batches, packed sequences, lengths and pages.
#pragma once

#include "params_simt.cuh"
#include "tile_simt.cuh"

namespace attnlib {

struct Range { int begin, end; };

// Rows in global memory; those outside `rows` read as zeros, and so do columns past `columns`.
template <class element, bool vectors, bool paged>
struct Source {
    static constexpr bool has_pages = paged;
    const element* base;
    int64_t stride;
    Range rows;
    int columns;
    const int* pages = nullptr;   // paged: row r is in pages[r / page_size]
    int64_t page_stride = 0;
    int page_size = 1;

    __device__ __forceinline__ const element* at(int row) const {
        if constexpr (paged) return base + pages[row / page_size] * page_stride + row % page_size * stride;
        else return base + row * stride;
    }
    __device__ __forceinline__ bool has(int row) const {
        return static_cast<uint32_t>(row - rows.begin) < static_cast<uint32_t>(rows.end > rows.begin ? rows.end - rows.begin : 0);
    }
    // Four elements that begin at `from`, the column'th of a row; column < columns.
    __device__ __forceinline__ Quad<element> read(const element* from, int column) const {
        Quad<element> quad{};
        if constexpr (vectors) {
            quad = *reinterpret_cast<const Quad<element>*>(in_global(from));
        } else {
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (column + e < columns) quad.x[e] = in_global(from)[e];
        }
        return quad;
    }
};
template <class Config>
using Queries = Source<typename Config::element, Config::vectors, false>;
template <class Config>
using Keys = Source<typename Config::element, Config::vectors, Config::paged>;

struct Sequence {
    int index;              // its number in the call; packed rows behind the last sequence are sequence `batch`
    int q_len, kv_len;
    int q_rows, k_rows;     // rows of the operands it owns, padding included
    int64_t q_row, k_row;   // packed: its first row, else 0
    int64_t out_row;        // its first row in out and dq
    bool fits;              // a length that the device holds does not fit: its results are NaN
};

__device__ __forceinline__ Sequence sequence_of(const SimtParams& p, int b) {
    Sequence s{b, p.seqlen_q, p.seqlen_k, p.seqlen_q, p.seqlen_k, 0, 0, static_cast<int64_t>(b) * p.seqlen_q, true};
    if (p.cu_q) {
        const int* cu_q = address<const int>(p.cu_q);
        const int* cu_k = address<const int>(p.cu_k);
        const bool real = b < p.batch;
        const int q_begin = clip(cu_q[b], 0, p.total_q);
        s.q_row = s.out_row = q_begin;
        s.q_rows = (real ? clip(cu_q[b + 1], q_begin, p.total_q) : p.total_q) - q_begin;
        s.q_len = real ? s.q_rows : 0;
        if (p.page_table) {
            s.k_rows = real ? clip(static_cast<int64_t>(cu_k[b + 1]) - cu_k[b], 0, 0x7FFFFFFF) : 0;
            s.fits = s.k_rows <= p.capacity;
        } else {
            const int k_begin = clip(cu_k[b], 0, p.total_k);
            s.k_row = k_begin;
            s.k_rows = (real ? clip(cu_k[b + 1], k_begin, p.total_k) : p.total_k) - k_begin;
        }
        s.kv_len = real ? s.k_rows : 0;
    } else {
        int64_t q_len = p.q_lens ? address<const int>(p.q_lens)[b] : p.seqlen_q;
        int64_t kv_len = p.kv_lens ? address<const int>(p.kv_lens)[b] : p.seqlen_k;
        if (p.new_tokens > 0) {
            const int added = p.new_lens ? address<const int>(p.new_lens)[b] : p.new_tokens;
            s.fits = kv_len >= 0 && added >= 0 && added <= p.new_tokens;
            kv_len += added;
        }
        s.fits = s.fits && q_len >= 0 && q_len <= p.seqlen_q && kv_len >= 0 && kv_len <= p.capacity;
        s.q_len = static_cast<int>(q_len);
        s.kv_len = static_cast<int>(kv_len);
    }
    if (!s.fits) s.q_len = s.kv_len = 0;
    return s;
}

// The sequence and the tile in it that tile number `tile` serves. Packed: sequence b starts at tile cu[b] / rows + b, so
// that no two overlap and none needs a scan. False: nothing there.
__device__ __forceinline__ bool find_tile(const SimtParams& p, uint64_t cu, int total, int rows, int tile, int& b, int& within) {
    const int* starts = address<const int>(cu);
    int low = 0, high = p.batch;   // the last sequence that starts at or before `tile`
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (clip(starts[middle], 0, total) / rows + middle <= tile) low = middle;
        else high = middle - 1;
    }
    const int begin = clip(starts[low], 0, total);
    const int end = low == p.batch ? total : clip(starts[low + 1], begin, total);
    b = low;
    within = tile - (begin / rows + low);
    return static_cast<int64_t>(within) * rows < end - begin;
}

// Numbers in an operand of the shape of lse.
__device__ __forceinline__ int64_t lse_size(const SimtParams& p) {
    return static_cast<int64_t>(p.cu_q ? p.total_q : p.batch * static_cast<int64_t>(p.seqlen_q)) * p.heads_q;
}
__device__ __forceinline__ int64_t lse_row(const SimtParams& p, const Sequence& s, int head) {
    if (p.cu_q) return static_cast<int64_t>(head) * p.total_q + s.q_row;
    return (static_cast<int64_t>(s.index) * p.heads_q + head) * p.seqlen_q;
}

template <class Config>
__device__ __forceinline__ Queries<Config> row_source(
    uint64_t from, const Sequence& s, int64_t row, int head, int64_t stride_b, int64_t stride_row, int64_t stride_h,
    Range rows, int columns) {
    using element = typename Config::element;
    return {address<element>(from) + s.index * stride_b + row * stride_row + head * stride_h, stride_row, rows, columns};
}
template <class Config>
__device__ __forceinline__ Queries<Config> query_source(const SimtParams& p, const Sequence& s, int head, Range rows) {
    return row_source<Config>(p.q, s, s.q_row, head, p.q_b, p.q_i, p.q_h, rows, p.head_dim);
}
template <class Config>
__device__ __forceinline__ Queries<Config> dout_source(const SimtParams& p, const Sequence& s, int head, Range rows) {
    return row_source<Config>(p.dout, s, s.q_row, head, p.do_b, p.do_i, p.do_h, rows, p.head_dim_v);
}
template <class Config>
__device__ __forceinline__ Keys<Config> cache_source(
    const SimtParams& p, uint64_t from, const Sequence& s, int head, int64_t stride_b, int64_t stride_j,
    int64_t stride_h, Range rows, int columns) {
    if constexpr (Config::paged) {
        const auto* base = address<typename Config::element>(from) + head * stride_h;
        return {base, stride_j, rows, columns, address<const int>(p.page_table) + s.index * p.page_row, stride_b, p.page_size};
    } else {
        return row_source<Config>(from, s, s.k_row, head, stride_b, stride_j, stride_h, rows, columns);
    }
}
template <class Config>
__device__ __forceinline__ Keys<Config> key_source(const SimtParams& p, const Sequence& s, int head_kv, Range rows) {
    return cache_source<Config>(p, p.k, s, head_kv, p.k_b, p.k_j, p.k_h, rows, p.head_dim);
}
template <class Config>
__device__ __forceinline__ Keys<Config> value_source(const SimtParams& p, const Sequence& s, int head_kv, Range rows) {
    return cache_source<Config>(p, p.v, s, head_kv, p.v_b, p.v_j, p.v_h, rows, p.head_dim_v);
}

}  // namespace attnlib
