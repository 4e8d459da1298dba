// The one matrix product: C = [0 | C diag(f) | C] + A B on register tiles of kRows x kCols vectors.
//
// Arithmetic<Word>: float and double words hold one element; a bf16 pair holds two neighbours along the reduction and
// multiplies by AVX512-BF16 dot products into float. A is broadcast word by word from any two strides; B is read in
// whole vectors from rows of ldb words; so the same kernel serves Q.K^T, P.V, P^T.dO, dS^T.Q and dS.K.
// The order of additions for an element depends on the reduction length only: not on the tile, not on threads.
#pragma once

#include "simd.h"

namespace attnlib {
namespace ATTNLIB_ISA {
namespace {

struct F32 {
    using Word = float;
    using Real = float;
    static constexpr int64_t per_word = 1;
    static constexpr DType storage = DType::f32;  // whose rows are words as they lie
    static ATTNLIB_INLINE F32V load_b(const float* p) { return load<float>(p); }
    static ATTNLIB_INLINE F32V spread(float a) { return splat<float>(a); }
    static ATTNLIB_INLINE F32V multiply_add(F32V c, F32V a, F32V b) { return a * b + c; }
    static ATTNLIB_INLINE void store_words(float* to, F32V x) { store<float>(to, x); }
    static ATTNLIB_INLINE void store_pair(float*, F32V, F32V) {}
    static ATTNLIB_INLINE float word_part(const float* x, int64_t at) { return x[at]; }
};
struct F64 {
    using Word = double;
    using Real = double;
    static constexpr int64_t per_word = 1;
    static constexpr DType storage = DType::f64;  // whose rows are words as they lie
    static ATTNLIB_INLINE F64V load_b(const double* p) { return load<double>(p); }
    static ATTNLIB_INLINE F64V spread(double a) { return splat<double>(a); }
    static ATTNLIB_INLINE F64V multiply_add(F64V c, F64V a, F64V b) { return a * b + c; }
    static ATTNLIB_INLINE void store_words(double* to, F64V x) { store<double>(to, x); }
    static ATTNLIB_INLINE void store_pair(double*, F64V, F64V) {}
    static ATTNLIB_INLINE double word_part(const double* x, int64_t at) { return x[at]; }
};
#if defined(__AVX512BF16__)
struct Bf16Pair {
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
    static ATTNLIB_INLINE void store_words(int32_t* to, F32V x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh((__m512)x));
    }
    static ATTNLIB_INLINE void store_pair(int32_t* to, F32V even, F32V odd) {
        const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)even));
        const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)odd));
        _mm512_storeu_si512(to, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
    static ATTNLIB_INLINE float word_part(const int32_t* x, int64_t at) {
        return bits_to_float(static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(x)[at]) << 16);
    }
};
#endif

enum class Start { zero, scaled, add };

template <class T, Start start, int rows, int cols>
ATTNLIB_INLINE void register_tile(int64_t depth, const typename T::Word* __restrict a, int64_t a_row, int64_t a_depth,
                                  const typename T::Word* __restrict b, int64_t ldb, typename T::Real* __restrict c,
                                  int64_t ldc, const typename T::Real* __restrict factor) {
    using R = typename T::Real;
    constexpr int64_t step = lanes<R>;
    Vec<R> sum[rows][cols];
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < cols; ++j) {
            if constexpr (start == Start::scaled) sum[i][j] = load<R>(c + i * ldc + j * step) * factor[i];
            else if constexpr (start == Start::add) sum[i][j] = load<R>(c + i * ldc + j * step);
            else sum[i][j] = Vec<R>{};
        }
    for (int64_t d = 0; d < depth; ++d) {
        decltype(T::load_b(b)) line[cols];
#pragma GCC unroll 8
        for (int j = 0; j < cols; ++j) line[j] = T::load_b(b + d * ldb + j * step);
#pragma GCC unroll 8
        for (int i = 0; i < rows; ++i) {
            const auto x = T::spread(a[i * a_row + d * a_depth]);
#pragma GCC unroll 8
            for (int j = 0; j < cols; ++j) sum[i][j] = T::multiply_add(sum[i][j], x, line[j]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < cols; ++j) store<R>(c + i * ldc + j * step, sum[i][j]);
}

template <class T, Start start, int rows>
__attribute__((noinline)) void gemm_rows(int64_t vectors, int64_t depth, const typename T::Word* a, int64_t a_row,
                                         int64_t a_depth, const typename T::Word* b, int64_t ldb, typename T::Real* c,
                                         int64_t ldc, const typename T::Real* factor) {
    constexpr int64_t step = lanes<typename T::Real>;
    while (vectors > 0) {
        // 5 vectors go as 3 + 2, not 4 + 1: a narrow tile cannot hide the latency of its additions
        int64_t cols = vectors >= 2 * kCols || vectors <= kCols ? smaller(vectors, kCols) : (vectors + 1) / 2;
        if constexpr (kCols == 4) {
            if (cols == 4) register_tile<T, start, rows, 4>(depth, a, a_row, a_depth, b, ldb, c, ldc, factor);
            if (cols == 3) register_tile<T, start, rows, 3>(depth, a, a_row, a_depth, b, ldb, c, ldc, factor);
        }
        if (cols == 2) register_tile<T, start, rows, 2>(depth, a, a_row, a_depth, b, ldb, c, ldc, factor);
        if (cols == 1) register_tile<T, start, rows, 1>(depth, a, a_row, a_depth, b, ldb, c, ldc, factor);
        b += cols * step;
        c += cols * step;
        vectors -= cols;
    }
}

// rows <= kRows. vectors of columns, depth words of reduction.
template <class T, Start start>
ATTNLIB_INLINE void gemm(int64_t rows, int64_t vectors, int64_t depth, const typename T::Word* a, int64_t a_row,
                         int64_t a_depth, const typename T::Word* b, int64_t ldb, typename T::Real* c, int64_t ldc,
                         const typename T::Real* factor = nullptr) {
    switch (rows) {
        case 6: return gemm_rows<T, start, 6>(vectors, depth, a, a_row, a_depth, b, ldb, c, ldc, factor);
        case 5: return gemm_rows<T, start, 5>(vectors, depth, a, a_row, a_depth, b, ldb, c, ldc, factor);
        case 4: return gemm_rows<T, start, 4>(vectors, depth, a, a_row, a_depth, b, ldb, c, ldc, factor);
        case 3: return gemm_rows<T, start, 3>(vectors, depth, a, a_row, a_depth, b, ldb, c, ldc, factor);
        case 2: return gemm_rows<T, start, 2>(vectors, depth, a, a_row, a_depth, b, ldb, c, ldc, factor);
        case 1: return gemm_rows<T, start, 1>(vectors, depth, a, a_row, a_depth, b, ldb, c, ldc, factor);
        default: return;
    }
}

}  // namespace
}  // namespace ATTNLIB_ISA
}  // namespace attnlib
