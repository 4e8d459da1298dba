// Element types and what a tensor core does with them.
//
// Every kernel steps through a product 32 bytes of k at a time: 16 half-type elements (one m16n8k16) or 8 float32
// (m16n8k8 tf32), so addresses, fragments and loops are the same for all types. Accumulator c of an m16n8 tile:
// c[0], c[1] at (row l/4, columns 2(l%4), +1), c[2], c[3] eight rows below. float32 without tf32 splits each operand
// into two tf32 numbers and adds three products, smallest first (product.cuh).
#pragma once

#include "ptx/ldmatrix.cuh"
#include "ptx/copy.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"
#include "types.h"

namespace attnlib {

constexpr float infinity = __builtin_bit_cast(float, 0x7F800000);

struct half { uint16_t bits; };
struct bfloat16 { uint16_t bits; };

template <class T> struct is_half { static constexpr bool value = false; };
template <> struct is_half<half> { static constexpr bool value = true; };
template <class T> struct is_float { static constexpr bool value = false; };
template <> struct is_float<float> { static constexpr bool value = true; };

__device__ __forceinline__ float to_float(half x) { return ptx::cvt_f32_f16(x.bits); }
__device__ __forceinline__ float to_float(bfloat16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }
__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(double x) { return static_cast<float>(x); }

// Two neighbours packed in 32 bits (half types only).
template <class Config>
__device__ __forceinline__ uint32_t pack(float low, float high) {
    if constexpr (is_half<typename Config::element>::value) return ptx::cvt_f16x2<Config::arch>(low, high);
    else return ptx::cvt_bf16x2(low, high);
}

template <class Config>
__device__ __forceinline__ typename Config::element from_float(float x) {
    if constexpr (is_float<typename Config::element>::value) return x;
    else return {static_cast<uint16_t>(pack<Config>(x, 0.f) & 0xFFFFu)};
}

template <class Config>
struct Atom {
    using element = typename Config::element;
    static constexpr bool wide = is_float<element>::value;      // 4-byte elements
    static constexpr bool split = wide && !Config::tf32;        // two tf32 numbers an operand
    static constexpr int bytes = wide ? 4 : 2;
    static constexpr int k = 32 / bytes;                        // elements of k in one step
    static constexpr int columns = k / 8;                       // n8 accumulator tiles that make one A fragment

    struct A { uint32_t hi[4]; uint32_t lo[split ? 4 : 1]; };
    struct B { uint32_t hi[2]; uint32_t lo[split ? 2 : 1]; };

    __device__ __forceinline__ static void divide(uint32_t raw, uint32_t& hi, uint32_t& lo) {
        hi = ptx::cvt_tf32(__uint_as_float(raw));
        if constexpr (split) lo = __float_as_uint(__uint_as_float(raw) - __uint_as_float(hi));   // 12 bits, of which mma takes 11
    }
    __device__ __forceinline__ static void prepare(A& a) {
        if constexpr (wide)
            for (int i = 0; i < 4; ++i) divide(a.hi[i], a.hi[i], a.lo[split ? i : 0]);
    }
    __device__ __forceinline__ static void prepare(B& b) {
        if constexpr (wide)
            for (int i = 0; i < 2; ++i) divide(b.hi[i], b.hi[i], b.lo[split ? i : 0]);
    }

    __device__ __forceinline__ static void mma(float (&c)[4], const A& a, const B& b) {
        if constexpr (wide) {
            ptx::mma_m16n8k8_tf32(c, a.hi, b.hi[0], b.hi[1]);
        } else if constexpr (Config::arch < 80) {
            ptx::mma_m16n8k8_f16(c, a.hi[0], a.hi[1], b.hi[0]);
            ptx::mma_m16n8k8_f16(c, a.hi[2], a.hi[3], b.hi[1]);
        } else if constexpr (is_half<element>::value) {
            ptx::mma_m16n8k16_f16(c, a.hi, b.hi[0], b.hi[1]);
        } else {
            ptx::mma_m16n8k16_bf16(c, a.hi, b.hi[0], b.hi[1]);
        }
    }

    // The two products with a low part, of A first; mirrored: of B first, which is the same sum with A and B exchanged.
    template <bool mirrored>
    __device__ __forceinline__ static void mma_low(float (&c)[4], const A& a, const B& b) {
        if constexpr (mirrored) ptx::mma_m16n8k8_tf32(c, a.hi, b.lo[0], b.lo[1]);
        ptx::mma_m16n8k8_tf32(c, a.lo, b.hi[0], b.hi[1]);
        if constexpr (!mirrored) ptx::mma_m16n8k8_tf32(c, a.hi, b.lo[0], b.lo[1]);
    }

    // Accumulator tiles as the A operand of a second product; in float32 the order of k becomes (0, 2, 4, 6, 1, 3, 5, 7),
    // which load_b_by_k<permuted> matches.
    template <int tiles>
    __device__ __forceinline__ static A from_accumulators(const float (&c)[tiles][4], int step) {
        A a;
        if constexpr (wide) {
            a.hi[0] = __float_as_uint(c[step][0]);
            a.hi[1] = __float_as_uint(c[step][2]);
            a.hi[2] = __float_as_uint(c[step][1]);
            a.hi[3] = __float_as_uint(c[step][3]);
            prepare(a);
        } else {
            a.hi[0] = pack<Config>(c[2 * step][0], c[2 * step][1]);
            a.hi[1] = pack<Config>(c[2 * step][2], c[2 * step][3]);
            a.hi[2] = pack<Config>(c[2 * step + 1][0], c[2 * step + 1][1]);
            a.hi[3] = pack<Config>(c[2 * step + 1][2], c[2 * step + 1][3]);
        }
        return a;
    }
    // The same for steps in ascending order, each taken once. Split float32 moves the tiles along, as its loop over steps
    // is kept (product.cuh) and registers have no index.
    template <int tiles>
    __device__ __forceinline__ static A take_accumulators(float (&c)[tiles][4], int step) {
        const A a = from_accumulators(c, split ? 0 : step);
        if constexpr (split) {
#pragma unroll
            for (int n = 0; n + 1 < tiles; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) c[n][e] = c[n + 1][e];
        }
        return a;
    }
};

}  // namespace attnlib
