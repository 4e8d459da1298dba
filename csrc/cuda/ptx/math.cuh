// Arithmetic that C++ has no name for: exp2, conversions, and atomic adds without a result.
#pragma once

#include "types.h"

namespace attnlib::ptx {

__device__ __forceinline__ float ex2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float lg2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float rcp_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// low in bits 0-15, high in bits 16-31
__device__ __forceinline__ uint32_t cvt_bf16x2(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

__device__ __forceinline__ uint16_t cvt_f16(float x) {
    uint16_t y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float cvt_f32_f16(uint16_t x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}

template <int arch>
__device__ __forceinline__ uint32_t cvt_f16x2(float low, float high) {
    if constexpr (arch >= 80) {
        uint32_t packed;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
        return packed;
    } else {
        return static_cast<uint32_t>(cvt_f16(low)) | static_cast<uint32_t>(cvt_f16(high)) << 16;
    }
}

__device__ __forceinline__ uint32_t cvt_tf32(float x) {
    uint32_t y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ void red_add_f32(float* address, float value) {
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(address), "f"(value) : "memory");
}

__device__ __forceinline__ void red_add_f32x4(float* address, float a, float b, float c, float d) {
    asm volatile("red.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(address), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

// threadIdx.x and blockIdx.x that the compiler must read again: what is derived from them does not stay in registers.
__device__ __forceinline__ int opaque_thread() {
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

__device__ __forceinline__ int opaque_block() {
    int x;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
    return x;
}

// The same value, of which the compiler knows nothing: nothing computed from it is kept from one loop step to the next.
__device__ __forceinline__ int64_t opaque(int64_t x) {
    asm volatile("" : "+l"(x));
    return x;
}

// Both halves of a product, without the copy that a shift of a 64-bit register leaves behind.
__device__ __forceinline__ void mul_wide(uint32_t& low, uint32_t& high, uint32_t a, uint32_t b) {
    asm("{ .reg .b64 t; mul.wide.u32 t, %2, %3; mov.b64 {%0, %1}, t; }" : "=r"(low), "=r"(high) : "r"(a), "r"(b));
}

__device__ __forceinline__ int ld_acquire(const int* address) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ int ld_relaxed(const int* address) {
    int value;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ void red_release_add(int* address, int value) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// Zeroes x unless the low half of word, shifted up, is more than above, and y unless word is. x and y are finite or
// don't matter: a product under a predicate costs the pipe that has room, where a choice costs the busy one.
__device__ __forceinline__ void zero_halves(float& x, float& y, uint32_t word, uint32_t above) {
    asm("{ .reg .pred px, py; .reg .b32 low;\n"
        "shl.b32 low, %2, 16; setp.le.u32 px, low, %3; setp.le.u32 py, %2, %3;\n"
        "@px mul.f32 %0, %0, 0f00000000; @py mul.f32 %1, %1, 0f00000000; }"
        : "+f"(x), "+f"(y) : "r"(word), "r"(above));
}

}  // namespace attnlib::ptx
