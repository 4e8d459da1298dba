// Numbers of the SIMT kernels: everything is computed in float, or in double for double operands.
#pragma once

#include "types.h"

namespace attnlib {

struct half { uint16_t bits; };
struct bfloat16 { uint16_t bits; };

template <class T> struct Accumulator { using type = float; };
template <> struct Accumulator<double> { using type = double; };

template <class T>
__device__ __forceinline__ T minus_infinity() { return -static_cast<T>(__builtin_bit_cast(float, 0x7F800000)); }
template <class T>
__device__ __forceinline__ T not_a_number() { return static_cast<T>(__builtin_bit_cast(float, 0x7FC00000)); }

__device__ __forceinline__ float maximum(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double maximum(double a, double b) { return fmax(a, b); }
__device__ __forceinline__ float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double multiply_add(double a, double b, double c) { return fma(a, b, c); }
// exp(x); float results below 2^-126 are 0
__device__ __forceinline__ float power(float x) {
    const float exponent = x * 1.4426950408889634f;
#if defined(__CUDACC__)
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(exponent));
    return y;
#else
    return exp2f(exponent);
#endif
}
__device__ __forceinline__ double power(double x) { return exp(x); }
// A product that is rounded by itself: scores are the same to the bit in forward and backward, with and without dropout.
#if defined(__CUDACC__)
__device__ __forceinline__ float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double rounded_product(double a, double b) { return __dmul_rn(a, b); }
#else
template <class T>
__device__ __forceinline__ T rounded_product(T a, T b) {
#if defined(__clang__)
#pragma clang fp contract(off)
#endif
    return a * b;
}
#endif
__device__ __forceinline__ float logarithm(float x) { return logf(x); }
__device__ __forceinline__ double logarithm(double x) { return log(x); }
__device__ __forceinline__ float tangent(float x) { return tanhf(x); }
__device__ __forceinline__ double tangent(double x) { return tanh(x); }
__device__ __forceinline__ float magnitude(float x) { return fabsf(x); }
__device__ __forceinline__ double magnitude(double x) { return fabs(x); }

template <class T> __device__ __forceinline__ T widen(float x) { return static_cast<T>(x); }
template <class T> __device__ __forceinline__ T widen(double x) { return static_cast<T>(x); }
template <class T>
__device__ __forceinline__ T widen(bfloat16 x) {
    return static_cast<T>(__builtin_bit_cast(float, static_cast<uint32_t>(x.bits) << 16));
}
template <class T>
__device__ __forceinline__ T widen(half x) {
#if defined(__CUDACC__)
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return static_cast<T>(y);
#else
    return static_cast<T>(__builtin_bit_cast(_Float16, x.bits));
#endif
}

__device__ __forceinline__ void narrow(float x, float& y) { y = x; }
__device__ __forceinline__ void narrow(double x, double& y) { y = x; }
__device__ __forceinline__ void narrow(float x, bfloat16& y) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, x);
    const bool nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
    y.bits = static_cast<uint16_t>(nan ? (bits >> 16) | 0x40u : (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}
__device__ __forceinline__ void narrow(float x, half& y) {
#if defined(__CUDACC__)
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
    y.bits = __builtin_bit_cast(uint16_t, static_cast<_Float16>(x));
#endif
}

template <class T>
__device__ __forceinline__ T* address(uint64_t value) { return reinterpret_cast<T*>(value); }

// The same pointer, of which the compiler knows that it is no shared memory: cheaper loads, and freer to move.
template <class T>
__device__ __forceinline__ T* in_global(T* pointer) {
#if defined(__CUDACC__)
    __builtin_assume(__isGlobal(pointer));
#endif
    return pointer;
}

// Makes the compiler forget what x is, so that nothing which follows from it is kept for long.
template <class T>
__device__ __forceinline__ void recompute(T& x) {
#if defined(__CUDACC__)
    if constexpr (sizeof(T) == 8) asm volatile("" : "+l"(x));
    else asm volatile("" : "+r"(x));
#endif
}

// The same place in shared memory, from where it is in a register: sm_90 would look up its block's window for every read.
template <class T>
__device__ __forceinline__ T* in_register(T* pointer) {
#if defined(__CUDACC__)
    recompute(pointer);
    __builtin_assume(__isShared(pointer));
#endif
    return pointer;
}

// One number of an operand whose dtype is only known at run time: 0 float32, 1 float16, 2 bfloat16, 3 float64.
template <class T>
__device__ __forceinline__ T read_number(uint64_t base, int type, int64_t index) {
    if (type == 1) return widen<T>(address<const half>(base)[index]);
    if (type == 2) return widen<T>(address<const bfloat16>(base)[index]);
    if (type == 3) return widen<T>(address<const double>(base)[index]);
    return widen<T>(address<const float>(base)[index]);
}

__device__ __forceinline__ int clip(int64_t x, int low, int high) {
    return x < low ? low : x > high ? high : static_cast<int>(x);
}
ATTNLIB_FN constexpr int round_up(int x, int step) { return (x + step - 1) / step * step; }

}  // namespace attnlib
