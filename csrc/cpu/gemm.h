// The one matrix product: C = [0 | C diag(f) | C] + A B on register tiles of kRows x kCols vectors.
//
// Columns of C (where it starts at 0) or the reduction (else) go over a list of runs, so that what a block mask hides is
// left out and yet neighbours in a register tile need not be neighbours in B.
//
// Arithmetic<Word>: float and double words hold one element; a bf16 pair holds two neighbours along the reduction and
// multiplies by AVX512-BF16 dot products into float. A is broadcast word by word from any two strides; B is read in
// whole vectors from rows of ldb words; so the same kernel serves Q.K^T, P.V, P^T.dO, dS^T.Q and dS.K.
// The order of additions for an element depends on the reduction length only: not on the tile, not on threads.
//
// Bf16Tiles is the same pairs by AMX. C is cut into blocks of 2 x 2 tiles, A has rows of words, a reduction runs in steps of
// 16 words, and a tile of B lies in one piece (Layout).
//
// stack(): B vectors of P.V straight from per_word rows of memory; dim d is then element stacked_at(d) of a row of C.
#pragma once

#include "amx.h"
#include "simd.h"

namespace attnlib {
namespace ATTNLIB_ISA {
namespace {

struct NoScope {
    ~NoScope() {}  // as one that does something
};

// How vectors multiply: rows of a strip, elements that runs are cut to, words that a reduction is padded to.
template <class R> struct ByVectors {
    using Scope = NoScope;  // what a unit of work holds
    static constexpr bool tiled = false;
    static constexpr int64_t strip = kRows, grain = lanes<R>, depth_grain = 1;
    static ATTNLIB_INLINE Vec<R> exp(Vec<R> x) { return exp_of<R>(x); }  // of scores less their maximum
};

struct F32 : ByVectors<float> {
    using Word = float;
    using Real = float;
    static constexpr int64_t per_word = 1;
    static constexpr DType storage = DType::f32;  // whose rows are words as they lie
    static ATTNLIB_INLINE F32V load_b(const float* p) { return load<float>(p); }
    static ATTNLIB_INLINE F32V spread(float a) { return splat<float>(a); }
    static ATTNLIB_INLINE F32V multiply_add(F32V c, F32V a, F32V b) { return a * b + c; }
    static ATTNLIB_INLINE void store_words(float* to, const F32V (&x)[1]) { store<float>(to, x[0]); }
    static ATTNLIB_INLINE void store_pair(float*, F32V, F32V) {}
    static ATTNLIB_INLINE float word_part(const float* x, int64_t at) { return x[at]; }
    template <int n> static ATTNLIB_INLINE void stack(const float* const* row, int64_t at, F32V (&to)[n]) {
        for (int x = 0; x < n; ++x) to[x] = load<float>(row[0] + at + x * lanes<float>);
    }
    static ATTNLIB_INLINE int64_t stacked_at(int64_t d) { return d; }
};
struct F64 : ByVectors<double> {
    using Word = double;
    using Real = double;
    static constexpr int64_t per_word = 1;
    static constexpr DType storage = DType::f64;  // whose rows are words as they lie
    static ATTNLIB_INLINE F64V load_b(const double* p) { return load<double>(p); }
    static ATTNLIB_INLINE F64V spread(double a) { return splat<double>(a); }
    static ATTNLIB_INLINE F64V multiply_add(F64V c, F64V a, F64V b) { return a * b + c; }
    static ATTNLIB_INLINE void store_words(double* to, const F64V (&x)[1]) { store<double>(to, x[0]); }
    static ATTNLIB_INLINE void store_pair(double*, F64V, F64V) {}
    static ATTNLIB_INLINE double word_part(const double* x, int64_t at) { return x[at]; }
    template <int n> static ATTNLIB_INLINE void stack(const double* const* row, int64_t at, F64V (&to)[n]) {
        for (int x = 0; x < n; ++x) to[x] = load<double>(row[0] + at + x * lanes<double>);
    }
    static ATTNLIB_INLINE int64_t stacked_at(int64_t d) { return d; }
};
#if defined(__AVX512BF16__)
struct Bf16Pair : ByVectors<float> {
    using Word = int32_t;
    using Real = float;
    static constexpr int64_t per_word = 2;
    static constexpr DType storage = DType::bf16;
    static ATTNLIB_INLINE I32V load_b(const int32_t* p) { return *reinterpret_cast<const I32VU*>(p); }
    static ATTNLIB_INLINE I32V spread(int32_t a) { return a - I32V{}; }
    static ATTNLIB_INLINE F32V multiply_add(F32V c, I32V a, I32V b) {
        return (F32V)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
    }
    // 16 neighbours of a row as 8 words, and 16 words of two rows.
    static ATTNLIB_INLINE void store_words(int32_t* to, const F32V (&x)[1]) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh((__m512)x[0]));
    }
    static ATTNLIB_INLINE void store_words(int32_t* to, const F32V (&x)[2]) {
        _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)x[1], (__m512)x[0]));
    }
    static ATTNLIB_INLINE void store_pair(int32_t* to, F32V even, F32V odd) {
        const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)even));
        const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)odd));
        _mm512_storeu_si512(to, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
    static ATTNLIB_INLINE float word_part(const int32_t* x, int64_t at) {
        return bits_to_float(static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(x)[at]) << 16);
    }
    template <int n> static ATTNLIB_INLINE void stack(const int32_t* const* row, int64_t at, I32V (&to)[n]) {
        for (int x = 0; x < n; x += 2) {
            const __m512i low = (__m512i)load_b(row[0] + at + x * 8), high = (__m512i)load_b(row[1] + at + x * 8);
            to[x] = (I32V)_mm512_unpacklo_epi16(low, high);
            to[x + 1] = (I32V)_mm512_unpackhi_epi16(low, high);
        }
    }
    static ATTNLIB_INLINE int64_t stacked_at(int64_t d) { return d / 32 * 32 + d % 8 / 4 * 16 + d % 32 / 8 * 4 + d % 4; }
};
#endif

struct Bf16Tiles;

struct Run {
    int32_t begin, end;  // in elements
};

// Where B has its words: row r of the vector of columns that begins at c is at(r, c). By vectors its rows lie behind one
// another; by tiles those of one vector do, and a line more keeps neighbours off the same cache sets.
template <class T> struct Layout {
    int64_t row, panel, size;

    Layout(int64_t columns, int64_t rows)
        : row(T::tiled ? lanes<typename T::Real> : columns),
          panel(T::tiled ? (rows + 1) * lanes<typename T::Real> : lanes<typename T::Real>),
          size(T::tiled ? columns / lanes<typename T::Real> * panel : rows * columns) {}
    ATTNLIB_INLINE int64_t at(int64_t r, int64_t c) const { return r * row + c / lanes<typename T::Real> * panel; }
};

enum class Start { zero, scaled, add };

template <class T, Start start, int rows, int cols>
ATTNLIB_INLINE void register_tile(int64_t count, const Run* __restrict depth, const typename T::Word* __restrict a,
                                  int64_t a_row, int64_t a_depth, const typename T::Word* __restrict b, int64_t ldb,
                                  const int64_t* __restrict at, typename T::Real* __restrict c, int64_t ldc,
                                  const typename T::Real* __restrict factor) {
    using R = typename T::Real;
    int64_t column[cols];
#pragma GCC unroll 8
    for (int j = 0; j < cols; ++j) column[j] = start == Start::zero ? at[j] : j * lanes<R>;
    Vec<R> sum[rows][cols];
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < cols; ++j) {
            if constexpr (start == Start::scaled) sum[i][j] = load<R>(c + i * ldc + column[j]) * factor[i];
            else if constexpr (start == Start::add) sum[i][j] = load<R>(c + i * ldc + column[j]);
            else sum[i][j] = Vec<R>{};
        }
    for (int64_t n = 0; n < count; ++n) {
        const int64_t end = depth[n].end / T::per_word;
        for (int64_t d = depth[n].begin / T::per_word; d < end; ++d) {
            decltype(T::load_b(b)) line[cols];
#pragma GCC unroll 8
            for (int j = 0; j < cols; ++j) line[j] = T::load_b(b + d * ldb + column[j]);
#pragma GCC unroll 8
            for (int i = 0; i < rows; ++i) {
                const auto x = T::spread(a[i * a_row + d * a_depth]);
#pragma GCC unroll 8
                for (int j = 0; j < cols; ++j) sum[i][j] = T::multiply_add(sum[i][j], x, line[j]);
            }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < cols; ++j) store<R>(c + i * ldc + column[j], sum[i][j]);
}

// `columns` and `depth` are lists of runs; at Start::zero depth is one run, else columns is.
template <class T, Start start, int rows>
ATTNLIB_NOINLINE void gemm_rows(int64_t columns, const Run* column, int64_t depths, const Run* depth,
                                const typename T::Word* a, int64_t a_row, int64_t a_depth, const typename T::Word* b,
                                int64_t ldb, typename T::Real* c, int64_t ldc, const typename T::Real* factor) {
    constexpr int64_t step = lanes<typename T::Real>;
    int64_t vectors = 0, at[kCols] = {};
    for (int64_t n = 0; n < columns; ++n) vectors += (column[n].end - column[n].begin) / step;
    int64_t next = column->begin;
    while (vectors > 0) {
        // 5 vectors go as 3 + 2, not 4 + 1: a narrow tile cannot hide the latency of its additions
        const int64_t cols = vectors >= 2 * kCols || vectors <= kCols ? smaller(vectors, kCols) : (vectors + 1) / 2;
        if constexpr (start == Start::zero) {
            for (int64_t j = 0; j < cols; ++j) {
                if (next == column->end) next = (++column)->begin;
                at[j] = next;
                next += step;
            }
        }
        if constexpr (kCols == 4) {
            if (cols == 4) register_tile<T, start, rows, 4>(depths, depth, a, a_row, a_depth, b, ldb, at, c, ldc, factor);
            if (cols == 3) register_tile<T, start, rows, 3>(depths, depth, a, a_row, a_depth, b, ldb, at, c, ldc, factor);
        }
        if (cols == 2) register_tile<T, start, rows, 2>(depths, depth, a, a_row, a_depth, b, ldb, at, c, ldc, factor);
        if (cols == 1) register_tile<T, start, rows, 1>(depths, depth, a, a_row, a_depth, b, ldb, at, c, ldc, factor);
        if constexpr (start != Start::zero) {
            b += cols * step;
            c += cols * step;
        }
        vectors -= cols;
    }
}

template <class T, Start start, class... Rest> ATTNLIB_INLINE void gemm_any(int64_t rows, Rest... rest) {
    switch (rows) {
        case 6: return gemm_rows<T, start, 6>(rest...);
        case 5: return gemm_rows<T, start, 5>(rest...);
        case 4: return gemm_rows<T, start, 4>(rest...);
        case 3: return gemm_rows<T, start, 3>(rest...);
        case 2: return gemm_rows<T, start, 2>(rest...);
        case 1: return gemm_rows<T, start, 1>(rest...);
        default: return;
    }
}

#if defined(__AMX_BF16__)
// m x n tiles of C: those of one row in tiles 0 and 1, of the next in 2 and 3.
template <Start start, int m, int n>
ATTNLIB_INLINE void tile_block(int64_t count, const Run* depth, const int32_t* a, int64_t lda, const int32_t* b,
                               const Layout<Bf16Tiles>& at, float* c, int64_t ldc) {
    const int64_t a_bytes = lda * 4, b_bytes = at.row * 4, c_bytes = ldc * 4;
    float* const below = c + kTile * ldc;
    if constexpr (start == Start::zero) {
        tile_zero<0>();
        if constexpr (n > 1) tile_zero<1>();
        if constexpr (m > 1) tile_zero<2>();
        if constexpr (m > 1 && n > 1) tile_zero<3>();
    } else {
        tile_load<0>(c, c_bytes);
        if constexpr (n > 1) tile_load<1>(c + kTile, c_bytes);
        if constexpr (m > 1) tile_load<2>(below, c_bytes);
        if constexpr (m > 1 && n > 1) tile_load<3>(below + kTile, c_bytes);
    }
    for (int64_t x = 0; x < count; ++x) {
        const int64_t end = depth[x].end / 2;
        for (int64_t d = depth[x].begin / 2; d < end; d += kTile) {
            const int32_t* line = b + d * at.row;
            tile_load<4>(a + d, a_bytes);
            tile_load<6>(line, b_bytes);
            tile_multiply_add<0, 4, 6>();
            if constexpr (n > 1) {
                tile_load<7>(line + at.panel, b_bytes);
                tile_multiply_add<1, 4, 7>();
            }
            if constexpr (m > 1) {
                tile_load<5>(a + kTile * lda + d, a_bytes);
                tile_multiply_add<2, 5, 6>();
            }
            if constexpr (m > 1 && n > 1) tile_multiply_add<3, 5, 7>();
        }
    }
    tile_store<0>(c, c_bytes);
    if constexpr (n > 1) tile_store<1>(c + kTile, c_bytes);
    if constexpr (m > 1) tile_store<2>(below, c_bytes);
    if constexpr (m > 1 && n > 1) tile_store<3>(below + kTile, c_bytes);
}

// m tiles of rows and all `width` columns of C += A B, or C = A B.
template <Start start, int m>
ATTNLIB_NOINLINE void tile_rows(int64_t width, int64_t count, const Run* depth, const int32_t* a, int64_t lda,
                                const int32_t* b, const Layout<Bf16Tiles>& at, float* c, int64_t ldc) {
    int64_t x = 0;
    for (; x + 2 * kTile <= width; x += 2 * kTile) {
        tile_block<start, m, 2>(count, depth, a, lda, b + at.at(0, x), at, c + x, ldc);
    }
    if (x < width) tile_block<start, m, 1>(count, depth, a, lda, b + at.at(0, x), at, c + x, ldc);
}

// m tiles of rows of C = A B, the columns in runs.
template <int m>
ATTNLIB_NOINLINE void tile_columns(int64_t count, const Run* runs, int64_t depth, const int32_t* a, int64_t lda,
                                   const int32_t* b, const Layout<Bf16Tiles>& at, float* c, int64_t ldc) {
    const Run all{0, static_cast<int32_t>(depth * 2)};
    for (int64_t n = 0; n < count; ++n)
        for (int64_t x = runs[n].begin; x < runs[n].end; x += 2 * kTile) {
            tile_block<Start::zero, m, 2>(1, &all, a, lda, b + at.at(0, x), at, c + x, ldc);
        }
}

struct Bf16Tiles : Bf16Pair {
    using Scope = TileScope;
    static constexpr bool tiled = true;
    static constexpr int64_t strip = 2 * kTile, grain = 2 * kTile, depth_grain = kTile;

    // exp_of with a shorter series, good to 2^-18, since tiles leave the softmax to hold the work: 2^t = 2^n 2^r,
    // 2^r = 1 + r Q(r), Q minimax of degree 3. Below -87.3 0, NaN for NaN.
    static ATTNLIB_INLINE F32V exp(F32V x) {
        using S = Simd<float>;
        const F32V shifted = x * S::log2e + S::magic, n = shifted - S::magic, r = x * S::log2e - n;
        F32V y = r * 0x1.3a02ccp-7f + 0x1.c9fc46p-5f;
        y = y * r + 0x1.ec0378p-3f;
        y = y * r + 0x1.62e12cp-1f;
        y = y * r + 1.0f;
        const __mmask16 positive = _mm512_cmp_ps_mask((__m512)x, (__m512)splat<float>(S::exp_min), _CMP_NLT_UQ);
        const __mmask16 number = _mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_ORD_Q);  // of NaN nothing may be changed
        const __m512i exponent = _mm512_maskz_slli_epi32(number, (__m512i)shifted, S::exponent_shift);
        return (F32V)_mm512_maskz_add_epi32(positive, (__m512i)y, exponent);
    }

    // gemm_columns: columns go in pairs of tiles, as runs do.
    static void columns(int64_t rows, int64_t count, const Run* runs, int64_t depth, const int32_t* a, int64_t lda,
                        const int32_t* b, const Layout<Bf16Tiles>& at, float* c, int64_t ldc) {
        if (rows > kTile) tile_columns<2>(count, runs, depth, a, lda, b, at, c, ldc);
        else tile_columns<1>(count, runs, depth, a, lda, b, at, c, ldc);
    }
    // gemm_depth: any number of rows; what would be rows behind the last one is read of A and not of C.
    template <Start start>
    static void depth(int64_t rows, int64_t width, int64_t count, const Run* depth, const int32_t* a, int64_t lda,
                      const int32_t* b, const Layout<Bf16Tiles>& at, float* c, int64_t ldc) {
        for (; rows >= 2 * kTile; rows -= 2 * kTile, a += 2 * kTile * lda, c += 2 * kTile * ldc) {
            tile_rows<start, 2>(width, count, depth, a, lda, b, at, c, ldc);
        }
        if (rows >= kTile) {
            tile_rows<start, 1>(width, count, depth, a, lda, b, at, c, ldc);
            rows -= kTile, a += kTile * lda, c += kTile * ldc;
        }
        alignas(64) float rest[kTile * kTile] = {};
        for (int64_t x = 0; x < width && rows > 0; x += kTile) {
            for (int64_t r = 0; r < rows; ++r) store<float>(rest + r * kTile, load<float>(c + r * ldc + x));
            tile_rows<start, 1>(kTile, count, depth, a, lda, b + at.at(0, x), at, rest, kTile);
            for (int64_t r = 0; r < rows; ++r) store<float>(c + r * ldc + x, load<float>(rest + r * kTile));
        }
    }
};
#endif

// rows <= T::strip of C = A B, only the columns in runs; `depth` words of reduction. Tiles write whole ones of C.
template <class T>
ATTNLIB_INLINE void gemm_columns(int64_t rows, int64_t count, const Run* runs, int64_t depth, const typename T::Word* a,
                                 int64_t lda, const typename T::Word* b, const Layout<T>& at, typename T::Real* c, int64_t ldc) {
    if constexpr (T::tiled) {
        T::columns(rows, count, runs, depth, a, lda, b, at, c, ldc);
    } else {
        const Run all{0, static_cast<int32_t>(depth * T::per_word)};
        gemm_any<T, Start::zero>(rows, count, runs, int64_t{1}, &all, a, lda, int64_t{1}, b, at.row, c, ldc,
                                 static_cast<const typename T::Real*>(nullptr));
    }
}

// rows <= T::strip (tiles: any number) and all `width` columns of C += A B, or C diag(factor) + A B, or by tiles C = A B; only
// the part of the reduction in runs. Tiles: a_depth is 1.
template <class T, Start start>
ATTNLIB_INLINE void gemm_depth(int64_t rows, int64_t width, int64_t count, const Run* runs, const typename T::Word* a,
                               int64_t a_row, int64_t a_depth, const typename T::Word* b, const Layout<T>& at,
                               typename T::Real* c, int64_t ldc, const typename T::Real* factor = nullptr) {
    using R = typename T::Real;
    if constexpr (T::tiled) {
        for (int64_t r = 0; r < rows && start == Start::scaled; ++r)
            for (int64_t x = 0; x < width && factor[r] != 1; x += lanes<R>) {
                store<R>(c + r * ldc + x, load<R>(c + r * ldc + x) * factor[r]);
            }
        T::template depth<start == Start::zero ? start : Start::add>(rows, width, count, runs, a, a_row, b, at, c, ldc);
    } else {
        const Run all{0, static_cast<int32_t>(width)};
        gemm_any<T, start>(rows, int64_t{1}, &all, count, runs, a, a_row, a_depth, b, at.row, c, ldc, factor);
    }
}

}  // namespace
}  // namespace ATTNLIB_ISA
}  // namespace attnlib
