// Movement between global and shared memory: cp.async with zero fill, and plain shared stores and loads.
#pragma once

#include "types.h"

namespace attnlib::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies `bytes` (0 to 16) and fills the rest of the 16 bytes with zeros; with 0 nothing is read.
__device__ __forceinline__ void cp_async_16(uint32_t destination, const void* source, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(bytes) : "memory");
}

__device__ __forceinline__ void cp_async_16(uint32_t destination, const void* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(destination), "l"(source) : "memory");
}

__device__ __forceinline__ void cp_async_4(uint32_t destination, const void* source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(destination), "l"(source) : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int pending>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// sm_90 and later: adds `bytes` (a multiple of 16) of float32 in shared memory to global memory, in the background. One
// thread issues it after fence_proxy_async by all that wrote the source.
__device__ __forceinline__ void bulk_add_f32(void* destination, uint32_t source, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(destination), "r"(source), "r"(bytes) : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until this thread's additions, or all but the last `pending` groups, have left shared memory; or have arrived as well.
template <int pending = 0>
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory"); }

__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

__device__ __forceinline__ void bar_sync(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// The compiler makes four stores of one vector where it does not see what the address is a multiple of.
__device__ __forceinline__ void st_global_v4(void* to, uint4 value) {
    asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w) : "memory");
}

__device__ __forceinline__ void st_shared_v4(uint32_t address, uint4 value) {
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w) : "memory");
}

__device__ __forceinline__ void st_shared_b32(uint32_t address, uint32_t value) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void st_shared_v2(uint32_t address, uint32_t x, uint32_t y) {
    asm volatile("st.shared.v2.b32 [%0], {%1,%2};" ::"r"(address), "r"(x), "r"(y) : "memory");
}

__device__ __forceinline__ uint32_t ld_shared_b32(uint32_t address) {
    uint32_t value;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}

// A load that is done anew each time, so that what follows from it is not kept for a later use.
__device__ __forceinline__ uint32_t ld_shared_volatile(uint32_t address) {
    uint32_t value;
    asm volatile("ld.volatile.shared.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}

__device__ __forceinline__ uint64_t ld_shared_volatile_b64(uint32_t address) {
    uint64_t value;
    asm volatile("ld.volatile.shared.b64 %0, [%1];" : "=l"(value) : "r"(address) : "memory");
    return value;
}

__device__ __forceinline__ uint4 ld_shared_v4(uint32_t address) {
    uint4 value;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w) : "r"(address) : "memory");
    return value;
}

__device__ __forceinline__ void ld_shared_b32x2(uint32_t& x, uint32_t& y, uint32_t address) {
    asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(x), "=r"(y) : "r"(address) : "memory");
}

__device__ __forceinline__ uint64_t ld_shared_b64(uint32_t address) {
    uint64_t value;
    asm volatile("ld.shared.b64 %0, [%1];" : "=l"(value) : "r"(address) : "memory");
    return value;
}

__device__ __forceinline__ void st_shared_b64(uint32_t address, uint64_t value) {
    asm volatile("st.shared.b64 [%0], %1;" ::"r"(address), "l"(value) : "memory");
}

__device__ __forceinline__ void ld_shared_f32x2(float& x, float& y, uint32_t address) {
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(x), "=f"(y) : "r"(address) : "memory");
}

}  // namespace attnlib::ptx
