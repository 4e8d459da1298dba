// Copies of operands in the three forms that the matrix product reads (W words of T::per_word elements):
//
//   rows        [row][W of dim]           A of Q.K^T and dO.V^T: reduction along dim
//   transposed  [W of dim][row]           B of the same
//   stacked     [W of rows][dim]          B of P.V, dS.K, P^T.dO, dS^T.Q: reduction along rows
//
// The last two lie as Layout says; for tiles a reduction along dim is padded with 0. There A of P^T.dO and dS^T.Q is
//
//   turned      [dim][W of rows]          A of dO^T.P, Q^T.dS, whose results are transposed
//
// Rows outside the given range are not read and become 0. A stacked row that holds Inf or NaN becomes 0 and is listed:
// 0 * NaN would carry it to rows that do not see it, so the kernels add listed rows by themselves where they are seen.
#pragma once

#include "gemm.h"

namespace attnlib {
namespace ATTNLIB_ISA {
namespace {

// Token rows of one head, dense or through a page table.
struct Rows {
    const char* base = nullptr;
    int64_t stride = 0;  // bytes between tokens
    const int32_t* pages = nullptr;
    int64_t pages_stride = 0, page_bytes = 0, page_size = 1;

    ATTNLIB_INLINE const char* row(int64_t j) const {
        if (pages == nullptr) return base + j * stride;
        return base + pages[j / page_size * pages_stride] * page_bytes + j % page_size * stride;
    }
};

ATTNLIB_INLINE Rows query_rows(const View& x, const Params& p, const Sequence& s, int64_t head) {
    Rows r;
    const int64_t row = p.packed ? s.q_row * x.stride[1] : s.index * x.stride[0];
    r.base = x.data + (row + head * x.stride[2]) * x.bytes();
    r.stride = x.stride[1] * x.bytes();
    return r;
}
ATTNLIB_INLINE Rows key_rows(const View& x, const Params& p, const Sequence& s, int64_t kv_head) {
    Rows r;
    r.stride = x.stride[1] * x.bytes();
    if (p.paged) {
        r.base = x.data + kv_head * x.stride[2] * x.bytes();
        r.pages = p.page_table + s.index * p.page_table_stride[0];
        r.pages_stride = p.page_table_stride[1];
        r.page_bytes = x.stride[0] * x.bytes();
        r.page_size = p.page_size;
        return r;
    }
    const int64_t row = p.packed ? s.k_row * x.stride[1] : s.index * x.stride[0];
    r.base = x.data + (row + kv_head * x.stride[2]) * x.bytes();
    return r;
}
// Index of query i in lse, stats and delta.
ATTNLIB_INLINE int64_t row_index(const Params& p, const Sequence& s, int64_t head, int64_t i) {
    return p.packed ? head * p.total_q + s.q_row + i : (s.index * p.heads_q + head) * p.seqlen_q + i;
}

template <class T> ATTNLIB_INLINE int64_t words(int64_t dim) {
    return round_up((dim + T::per_word - 1) / T::per_word, T::depth_grain);
}

template <class T>
ATTNLIB_INLINE void load_words(DType type, const char* from, typename T::Word* to, int64_t dim) {
    if constexpr (T::per_word == 1) {
        load_row<typename T::Real>(type, from, to, dim);
    } else {
        if (dim % (2 * lanes<typename T::Real>) == 0) {
            const auto* row = reinterpret_cast<const typename T::Word*>(from);
            for (int64_t d = 0; d < dim / 2; d += lanes<typename T::Real>) {
                const auto x = T::load_b(row + d);
                std::memcpy(to + d, &x, kBytes);
            }
            return;
        }
        for (int64_t d = dim / 2; d < words<T>(dim); ++d) to[d] = 0;
        std::memcpy(to, from, static_cast<size_t>(dim) * 2);
    }
}

template <class T>
void pack_rows(const Rows& from, DType type, int64_t begin, int64_t count, int64_t dim, typename T::Word* to, int64_t ld) {
    for (int64_t r = 0; r < count; ++r) load_words<T>(type, from.row(begin + r), to + r * ld, dim);
}

// In place: x[i][j] <-> x[j][i], by log2(n) perfect shuffles of the n vectors.
template <class V, int n> ATTNLIB_INLINE void transpose_square(V (&x)[n]) {
    typedef typename std::remove_reference<decltype(x[0])>::type Vector;
    for (int step = 1; step < n; step *= 2) {
        Vector y[n];
#pragma GCC unroll 16
        for (int i = 0; i < n / 2; ++i) {
            y[2 * i] = interleave_low(x[i], x[i + n / 2]);
            y[2 * i + 1] = interleave_high(x[i], x[i + n / 2]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < n; ++i) x[i] = y[i];
    }
}

// Columns [0, padded) of `to` are keys first, first + 1, ...; those in [begin, end) are read. scratch: n * padded dim.
template <class T>
void pack_transposed(const Rows& from, DType type, int64_t first, int64_t begin, int64_t end, int64_t padded,
                     int64_t dim, typename T::Word* to, const Layout<T>& at, typename T::Word* scratch) {
    using Word = typename T::Word;
    constexpr int n = static_cast<int>(lanes<typename T::Real>);
    const int64_t depth = words<T>(dim), width = round_up(depth, n);
    for (int64_t c = 0; c < padded; c += n) {
        const Word* source[n];
        for (int64_t r = 0; r < n; ++r) {
            const int64_t j = first + c + r;
            Word* row = scratch + r * width;
            source[r] = row;
            if (j < begin || j >= end) std::memset(row, 0, static_cast<size_t>(depth) * sizeof(Word));
            else if (type == T::storage && dim % (n * T::per_word) == 0) source[r] = reinterpret_cast<const Word*>(from.row(j));
            else load_words<T>(type, from.row(j), row, dim);
        }
        for (int64_t d = 0; d < depth; d += n) {
            decltype(T::load_b(scratch)) square[n];
#pragma GCC unroll 16
            for (int r = 0; r < n; ++r) square[r] = T::load_b(source[r] + d);
            transpose_square(square);
            const int64_t count = smaller(n, depth - d);
            if (count == n) {
#pragma GCC unroll 16
                for (int r = 0; r < n; ++r) std::memcpy(to + at.at(d + r, c), &square[r], kBytes);
            } else {
                for (int64_t r = 0; r < count; ++r) std::memcpy(to + at.at(d + r, c), &square[r], kBytes);
            }
        }
    }
}

template <class R> ATTNLIB_INLINE bool finite_row(const R* x, int64_t padded) {
    Vec<R> sum{};
    for (int64_t d = 0; d < padded; d += lanes<R>) sum += load<R>(x + d) * R(0);
    return !any_nan<R>(sum);
}
// from, widened to R and padded with 0; whether all of it is finite.
template <class R> ATTNLIB_INLINE bool copy_row(DType type, const char* from, R* to, int64_t dim, int64_t padded) {
    if (type == (sizeof(R) == 8 ? DType::f64 : DType::f32) && dim == padded) {
        const R* x = reinterpret_cast<const R*>(from);
        Vec<R> sum{};
        for (int64_t d = 0; d < padded; d += lanes<R>) {
            const Vec<R> y = load<R>(x + d);
            sum += y * R(0);
            store<R>(to + d, y);
        }
        return !any_nan<R>(sum);
    }
    load_row<R>(type, from, to, dim);
    for (int64_t d = dim; d < padded; ++d) to[d] = 0;
    return finite_row<R>(to, padded);
}
ATTNLIB_INLINE bool finite_bf16(const uint16_t* x, int64_t n) {
    uint16_t largest = 0;
    for (int64_t d = 0; d < n; ++d) {
        const uint16_t exponent = x[d] & 0x7F80;
        largest = exponent > largest ? exponent : largest;
    }
    return largest != 0x7F80;
}

ATTNLIB_INLINE void merge_rows(uint32_t* __restrict to, const uint16_t* __restrict low, const uint16_t* __restrict high,
                               int64_t n) {
    for (int64_t d = 0; d < n; ++d) to[d] = low[d] | static_cast<uint32_t>(high[d]) << 16;
}

// Rows of `to` are keys (or queries) first, ..., first + padded - 1; those in [begin, end) are read. Returns how many
// were listed in `bad`, relative to first. width, the padded dim, is a multiple of the vector.
template <class T>
int64_t pack_stacked(const Rows& from, DType type, int64_t first, int64_t begin, int64_t end, int64_t padded,
                     int64_t dim, typename T::Word* to, int64_t width, const Layout<T>& at, int32_t* bad,
                     typename T::Word* scratch) {
    using Word = typename T::Word;
    int64_t count = 0;
    if constexpr (T::per_word == 1) {
        (void)scratch;
        for (int64_t r = 0; r < padded; ++r) {
            const int64_t j = first + r;
            Word* row = to + at.at(r, 0);
            if (j < begin || j >= end) {
                std::memset(row, 0, static_cast<size_t>(width) * sizeof(Word));
                continue;
            }
            if (!copy_row(type, from.row(j), row, dim, width)) {
                bad[count++] = static_cast<int32_t>(r);
                std::memset(row, 0, static_cast<size_t>(width) * sizeof(Word));
            }
        }
    } else {
        uint16_t* const zero = reinterpret_cast<uint16_t*>(scratch);
        std::memset(zero, 0, static_cast<size_t>(dim) * 2);
        for (int64_t r = 0; r < padded; r += 2) {
            const uint16_t* pair[2];
            for (int64_t t = 0; t < 2; ++t) {
                const int64_t j = first + r + t;
                pair[t] = zero;
                if (j < begin || j >= end) continue;
                const uint16_t* row = reinterpret_cast<const uint16_t*>(from.row(j));
                if (finite_bf16(row, dim)) pair[t] = row;
                else bad[count++] = static_cast<int32_t>(r + t);
            }
            const int64_t piece = T::tiled ? lanes<typename T::Real> : width;
            for (int64_t x = 0; x < width; x += piece) {
                uint32_t* row = reinterpret_cast<uint32_t*>(to + at.at(r / 2, x));
                const int64_t n = larger(smaller(dim - x, piece), 0);
                merge_rows(row, pair[0] + x, pair[1] + x, n);
                for (int64_t d = n; d < piece; ++d) row[d] = 0;
            }
        }
    }
    return count;
}

// The stacked rows transposed: [width, the padded dim][padded / T::per_word words of ld]. scratch: stacked rows of 16 words.
template <class T>
int64_t pack_turned(const Rows& from, DType type, int64_t first, int64_t begin, int64_t end, int64_t padded, int64_t dim,
                    typename T::Word* to, int64_t width, int64_t ld, int32_t* bad, typename T::Word* scratch) {
    constexpr int n = static_cast<int>(lanes<typename T::Real>);
    const Layout<T> at(width, n);
    typename T::Word* const zero = scratch + at.size;
    int64_t count = 0;
    for (int64_t r = 0; r < padded; r += n * T::per_word) {
        const int64_t found = pack_stacked<T>(from, type, first + r, begin, end, n * T::per_word, dim, scratch, width, at, bad + count, zero);
        for (int64_t x = 0; x < found; ++x) bad[count++] += static_cast<int32_t>(r);
        for (int64_t d = 0; d < width; d += n) {
            decltype(T::load_b(scratch)) square[n];
#pragma GCC unroll 16
            for (int x = 0; x < n; ++x) square[x] = T::load_b(scratch + at.at(x, d));
            transpose_square(square);
#pragma GCC unroll 16
            for (int x = 0; x < n; ++x) std::memcpy(to + (d + x) * ld + r / T::per_word, &square[x], kBytes);
        }
    }
    return count;
}

}  // namespace
}  // namespace ATTNLIB_ISA
}  // namespace attnlib
