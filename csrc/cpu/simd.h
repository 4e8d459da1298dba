// Vectors of one instruction set: loads, conversions, exp and tanh, written once in GCC/Clang vector extensions.
//
//   exp(x) = 2^n e^r,  n = round(x / ln 2),  r = x - n ln 2 in two parts,  e^r - 1 = r + r^2 P(r)
//   tanh(y) = E / (E + 2),  E = exp(2 y) - 1 = 2^n (e^r - 1) + (2^n - 1)
//
// float: P minimax of degree 4, exp within 1.2 ulp for x <= 0 (tested); below -87.3 it gives 0. double: Taylor series.
// NaN goes through exp and tanh as NaN.
#pragma once

#include <cmath>
#include <cstring>
#include <type_traits>

#include "params.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace attnlib {
namespace ATTNLIB_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kBytes = 64, kRows = 6, kCols = 4;  // vector bytes; rows and vectors of a micro-kernel's tile
#elif defined(__AVX2__)
constexpr int kBytes = 32, kRows = 6, kCols = 2;
#else
constexpr int kBytes = 16, kRows = 6, kCols = 2;
#endif

#define ATTNLIB_INLINE inline __attribute__((always_inline))
#define ATTNLIB_NOINLINE __attribute__((noinline))  // inner loops: their registers are then theirs alone
#define ATTNLIB_VECTOR(type, name)                                              \
    typedef type name __attribute__((vector_size(kBytes), may_alias));          \
    typedef type name##U __attribute__((vector_size(kBytes), aligned(sizeof(type)), may_alias))

ATTNLIB_VECTOR(float, F32V);
ATTNLIB_VECTOR(int32_t, I32V);
ATTNLIB_VECTOR(double, F64V);
ATTNLIB_VECTOR(int64_t, I64V);

template <class R> struct Simd;
template <> struct Simd<float> {
    using V = F32V;
    using U = F32VU;
    using I = I32V;
    using Int = int32_t;
    static constexpr Int exponent_shift = 23, exponent_bias = 127;
    static constexpr float magic = 12582912.0f, log2e = 1.44269504088896341f;
    static constexpr float ln2_hi = 0.693359375f, ln2_lo = -2.12194440054690583e-4f;
    static constexpr float exp_min = -87.33f, tanh_max = 10.0f;
    static ATTNLIB_INLINE V series(V r) {
        V p = r * 0x1.6a23dp-10f + 0x1.123a2p-7f;
        p = p * r + 0x1.5558f2p-5f;
        p = p * r + 0x1.555492p-3f;
        return p * r + 0x1.fffffcp-2f;
    }
};
template <> struct Simd<double> {
    using V = F64V;
    using U = F64VU;
    using I = I64V;
    using Int = int64_t;
    static constexpr Int exponent_shift = 52, exponent_bias = 1023;
    static constexpr double magic = 6755399441055744.0, log2e = 1.44269504088896340736;
    static constexpr double ln2_hi = 6.93147180369123816490e-01, ln2_lo = 1.90821492927058770002e-10;
    static constexpr double exp_min = -708.0, tanh_max = 22.0;
    static ATTNLIB_INLINE V series(V r) {
        V p = r * (1.0 / 87178291200.0) + 1.0 / 6227020800.0;
        p = p * r + 1.0 / 479001600.0;
        p = p * r + 1.0 / 39916800.0;
        p = p * r + 1.0 / 3628800.0;
        p = p * r + 1.0 / 362880.0;
        p = p * r + 1.0 / 40320.0;
        p = p * r + 1.0 / 5040.0;
        p = p * r + 1.0 / 720.0;
        p = p * r + 1.0 / 120.0;
        p = p * r + 1.0 / 24.0;
        p = p * r + 1.0 / 6.0;
        return p * r + 0.5;
    }
};

template <class R> using Vec = typename Simd<R>::V;
template <class R> constexpr int64_t lanes = kBytes / static_cast<int64_t>(sizeof(R));
template <class R> constexpr R infinity = static_cast<R>(__builtin_inf());

template <class R> ATTNLIB_INLINE Vec<R> load(const R* p) { return *reinterpret_cast<const typename Simd<R>::U*>(p); }
template <class R> ATTNLIB_INLINE void store(R* p, Vec<R> x) { *reinterpret_cast<typename Simd<R>::U*>(p) = x; }
template <class R> ATTNLIB_INLINE Vec<R> splat(R x) { return x - Vec<R>{}; }
template <class R> ATTNLIB_INLINE Vec<R> iota() {
    Vec<R> x;
    for (int i = 0; i < lanes<R>; ++i) x[i] = static_cast<R>(i);
    return x;
}
// x as rounded: keeps a product out of a fused multiply-add, where two places must see the same number.
template <class V> ATTNLIB_INLINE V rounded(V x) {
#if defined(__AVX512F__)
    __asm__("" : "+v"(x));
#elif defined(__SSE2__)
    __asm__("" : "+x"(x));
#elif defined(__aarch64__)
    __asm__("" : "+w"(x));
#else
    __asm__("" : "+m"(x));
#endif
    return x;
}
// A NaN in x is passed over.
template <class R> ATTNLIB_INLINE Vec<R> max_of(Vec<R> x, Vec<R> best) { return x > best ? x : best; }

// Folds a vector by halves: the order does not depend on anything but its width.
template <class R> ATTNLIB_INLINE R reduce_max(Vec<R> x) {
#if defined(__AVX512F__)
    if constexpr (sizeof(R) == 4) return _mm512_reduce_max_ps((__m512)x);
    else return _mm512_reduce_max_pd((__m512d)x);
#else
    R t[lanes<R>];
    std::memcpy(t, &x, kBytes);
    for (int64_t half = lanes<R> / 2; half; half /= 2)
        for (int64_t i = 0; i < half; ++i) t[i] = t[i] > t[i + half] ? t[i] : t[i + half];
    return t[0];
#endif
}
template <class R> ATTNLIB_INLINE R reduce_add(Vec<R> x) {
#if defined(__AVX512F__)
    if constexpr (sizeof(R) == 4) return _mm512_reduce_add_ps((__m512)x);
    else return _mm512_reduce_add_pd((__m512d)x);
#else
    R t[lanes<R>];
    std::memcpy(t, &x, kBytes);
    for (int64_t half = lanes<R> / 2; half; half /= 2)
        for (int64_t i = 0; i < half; ++i) t[i] += t[i + half];
    return t[0];
#endif
}
template <class R> ATTNLIB_INLINE bool any_nan(Vec<R> x) {
    const auto unequal = x != x;
    int64_t words[kBytes / 8], bad = 0;
    std::memcpy(words, &unequal, kBytes);
    for (const int64_t word : words) bad |= word;
    return bad != 0;
}

// n in the exponent's place, and r, of x = n ln 2 + r.
template <class R> struct Reduced {
    typename Simd<R>::I exponent;
    Vec<R> r;
};
template <class R> ATTNLIB_INLINE Reduced<R> reduce_argument(Vec<R> x) {
    using S = Simd<R>;
    const Vec<R> shifted = x * S::log2e + S::magic;
    const Vec<R> n = shifted - S::magic;
    Reduced<R> reduced;
    reduced.r = (x - n * S::ln2_hi) - n * S::ln2_lo;
    std::memcpy(&reduced.exponent, &shifted, kBytes);
    reduced.exponent <<= S::exponent_shift;
    return reduced;
}
// exp for x <= a few: below exp_min (and at -inf) 0, NaN for NaN.
template <class R> ATTNLIB_INLINE Vec<R> exp_of(Vec<R> x) {
    const Reduced<R> a = reduce_argument<R>(x);
    Vec<R> y = (Simd<R>::series(a.r) * a.r + R(1)) * a.r + R(1);
    typename Simd<R>::I bits;
    std::memcpy(&bits, &y, kBytes);
    bits += a.exponent;
    std::memcpy(&y, &bits, kBytes);
    y = x == x ? y : x;  // NaN whose lowest bits are set would become a number
    return x < Simd<R>::exp_min ? Vec<R>{} : y;
}
template <class R> ATTNLIB_INLINE Vec<R> tanh_of(Vec<R> y) {
    const R limit = Simd<R>::tanh_max;
    y = y > limit ? splat<R>(limit) : y;
    y = y < -limit ? splat<R>(-limit) : y;
    const Reduced<R> a = reduce_argument<R>(y + y);
    const typename Simd<R>::I bits = a.exponent + (Simd<R>::exponent_bias << Simd<R>::exponent_shift);
    Vec<R> power;
    std::memcpy(&power, &bits, kBytes);
    const Vec<R> em1 = power * ((Simd<R>::series(a.r) * a.r) * a.r + a.r) + (power - R(1));
    return em1 / (em1 + R(2));
}

// Lanes x0 y0 x1 y1 ... of the lower (upper) halves.
template <class V> ATTNLIB_INLINE V interleave(V x, V y, int from) {
    constexpr int n = static_cast<int>(kBytes / sizeof(x[0]));
    using Int = typename Simd<typename std::conditional<sizeof(x[0]) == 8, double, float>::type>::I;
    Int order;
    for (int i = 0; i < n; ++i) order[i] = (i & 1) * n + i / 2 + from;
#if defined(__clang__)
    V z;
    for (int i = 0; i < n; ++i) z[i] = order[i] < n ? x[order[i]] : y[order[i] - n];
    return z;
#else
    return __builtin_shuffle(x, y, order);
#endif
}
template <class V> ATTNLIB_INLINE V interleave_low(V x, V y) { return interleave(x, y, 0); }
template <class V> ATTNLIB_INLINE V interleave_high(V x, V y) {
    return interleave(x, y, static_cast<int>(kBytes / sizeof(x[0])) / 2);
}

// Lane i: the sum of the lanes of x[i].
template <class R> ATTNLIB_INLINE Vec<R> fold(Vec<R> (&x)[lanes<R>]) {
#if defined(__AVX512F__)
    if constexpr (sizeof(R) == 4) {  // shuffles inside 128 bits first: twice as fast as general ones
        __m512 y[8], z[4], w[2];
        for (int i = 0; i < 8; ++i) {  // x[i] enters where reversing the bits of i puts it
            const int at = (i & 1) << 3 | (i & 2) << 1 | (i & 4) >> 1;
            const __m512 a = (__m512)x[at], b = (__m512)x[at + 1];
            y[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        }
        for (int i = 0; i < 4; ++i) {
            const __m512d a = _mm512_castps_pd(y[i]), b = _mm512_castps_pd(y[i + 4]);
            z[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
        }
        for (int i = 0; i < 2; ++i) {
            const __m512 a = z[i], b = z[i + 2];
            w[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
        }
        return (Vec<R>)_mm512_add_ps(_mm512_shuffle_f32x4(w[0], w[1], 0x88), _mm512_shuffle_f32x4(w[0], w[1], 0xDD));
    }
#endif
#pragma GCC unroll 4
    for (int half = static_cast<int>(lanes<R>) / 2; half > 0; half /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < half; ++i) x[i] = interleave_low(x[i], x[i + half]) + interleave_high(x[i], x[i + half]);
    return x[0];
}

ATTNLIB_INLINE float bits_to_float(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
ATTNLIB_INLINE uint32_t float_to_bits(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
ATTNLIB_INLINE uint16_t float_to_bf16(float x) {
    const uint32_t bits = float_to_bits(x);
    const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? (bits >> 16) | 0x40u : rounded);
}
ATTNLIB_INLINE float half_to_float(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16, rest = half & 0x7FFFu;
    if (rest >= 0x7C00u) return bits_to_float(sign | 0x7F800000u | (rest & 0x3FFu) << 13);
    // Scaling by 2^112 rebiases the exponent and is exact for subnormal halves too.
    return bits_to_float(sign | float_to_bits(bits_to_float(rest << 13) * 0x1p112f));
}
ATTNLIB_INLINE uint16_t float_to_half(float x) {
    const uint32_t bits = float_to_bits(x), sign = (bits >> 16) & 0x8000u, rest = bits & 0x7FFFFFFFu;
    if (rest > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u | ((rest >> 13) & 0x1FFu));
    if (rest >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);
    if (rest < 0x38800000u) {  // subnormal: adding 0.5 rounds to a multiple of 2^-24
        return static_cast<uint16_t>(sign | (float_to_bits(bits_to_float(rest) + 0.5f) - 0x3F000000u));
    }
    return static_cast<uint16_t>(sign | ((rest - 0x38000000u + 0xFFFu + ((rest >> 13) & 1u)) >> 13));
}

// n elements of any storage type as R.
template <class R> void load_row(DType type, const char* from, R* to, int64_t n) {
    switch (type) {
        case DType::f64: {
            const double* p = reinterpret_cast<const double*>(from);
            for (int64_t i = 0; i < n; ++i) to[i] = static_cast<R>(p[i]);
            break;
        }
        case DType::f32: {
            const float* p = reinterpret_cast<const float*>(from);
            for (int64_t i = 0; i < n; ++i) to[i] = static_cast<R>(p[i]);
            break;
        }
        case DType::bf16: {
            const uint16_t* p = reinterpret_cast<const uint16_t*>(from);
            for (int64_t i = 0; i < n; ++i) to[i] = static_cast<R>(bits_to_float(static_cast<uint32_t>(p[i]) << 16));
            break;
        }
        case DType::f16: {
            const uint16_t* p = reinterpret_cast<const uint16_t*>(from);
            int64_t i = 0;
#if defined(__F16C__)
            if constexpr (sizeof(R) == 4) {
                for (; i + 8 <= n; i += 8) {
                    const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i));
                    _mm256_storeu_ps(reinterpret_cast<float*>(to + i), _mm256_cvtph_ps(h));
                }
            }
#endif
            for (; i < n; ++i) to[i] = static_cast<R>(half_to_float(p[i]));
            break;
        }
    }
}
template <class R> ATTNLIB_INLINE R load_one(DType type, const char* from) {
    R x;
    load_row<R>(type, from, &x, 1);
    return x;
}

// factor * from as any storage type, rounded once to nearest even.
template <class R> void store_row(DType type, char* to, const R* from, int64_t n, R factor) {
    switch (type) {
        case DType::f64: {
            double* p = reinterpret_cast<double*>(to);
            for (int64_t i = 0; i < n; ++i) p[i] = static_cast<double>(from[i] * factor);
            break;
        }
        case DType::f32: {
            float* p = reinterpret_cast<float*>(to);
            for (int64_t i = 0; i < n; ++i) p[i] = static_cast<float>(from[i] * factor);
            break;
        }
        case DType::bf16: {
            uint16_t* p = reinterpret_cast<uint16_t*>(to);
            for (int64_t i = 0; i < n; ++i) p[i] = float_to_bf16(static_cast<float>(from[i] * factor));
            break;
        }
        case DType::f16: {
            uint16_t* p = reinterpret_cast<uint16_t*>(to);
            int64_t i = 0;
#if defined(__F16C__)
            if constexpr (sizeof(R) == 4) {
                for (; i + 8 <= n; i += 8) {
                    const __m256 x = _mm256_loadu_ps(reinterpret_cast<const float*>(from + i));
                    const __m128i h = _mm256_cvtps_ph(_mm256_mul_ps(x, _mm256_set1_ps(float(factor))), 0);
                    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + i), h);
                }
            }
#endif
            for (; i < n; ++i) p[i] = float_to_half(static_cast<float>(from[i] * factor));
            break;
        }
    }
}

// Carves aligned arrays out of one workspace; with a null base it only measures.
struct Arena {
    char* base;
    size_t used = 0;
    template <class X> X* take(int64_t count) {
        X* p = reinterpret_cast<X*>(base + used);
        used += (static_cast<size_t>(count) * sizeof(X) + 127) / 64 * 64;
        return p;
    }
};

ATTNLIB_INLINE int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
ATTNLIB_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
ATTNLIB_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

}  // namespace
}  // namespace ATTNLIB_ISA
}  // namespace attnlib
