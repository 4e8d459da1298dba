// Four neighbouring float32 sums in global memory that stay in L2: begun, added to and read by one thread.
#pragma once

namespace attnlib {
namespace ptx {

constexpr uint64_t evict_last_policy = 0x14F0000000000000ull;   // what createpolicy.fractional.L2::evict_last makes for all of an access

__device__ __forceinline__ void st_kept_f32x4(float* address, float a, float b, float c, float d) {
    asm volatile("st.global.L2::cache_hint.v4.f32 [%0], {%1,%2,%3,%4}, %5;" ::"l"(address), "f"(a), "f"(b), "f"(c), "f"(d), "l"(evict_last_policy) : "memory");
}
__device__ __forceinline__ void red_add_kept_f32x4(float* address, float a, float b, float c, float d) {
    asm volatile("red.global.add.L2::cache_hint.v4.f32 [%0], {%1,%2,%3,%4}, %5;" ::"l"(address), "f"(a), "f"(b), "f"(c), "f"(d), "l"(evict_last_policy) : "memory");
}
// From L2, where the additions are made.
__device__ __forceinline__ void ld_f32x4(const float* address, float (&to)[4]) {
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3]) : "l"(address) : "memory");
}

}  // namespace ptx
}  // namespace attnlib
