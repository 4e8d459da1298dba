// Three kernels for the tests of the JIT: a plain one, one that spills, one that ptxas must serialise.
#pragma once

#include "types.h"
#include "window.h"

namespace attnlib {

struct half {
    uint16_t bits;
};
struct bfloat16 {
    uint16_t bits;
};
struct Params {
    float* out;
    int64_t count;
};

template <class Config>
__device__ void kernel(const Params& params) {
    const int i = blockIdx.x * Config::threads + threadIdx.x;
    if (i < params.count) params.out[i] = Config::head_dim + Config::arch;
}

template <class Config>
__device__ void spilling(const Params& params) {
    float value[Config::head_dim];
#pragma unroll
    for (int i = 0; i < Config::head_dim; ++i) value[i] = params.out[i * 32 + threadIdx.x];
    for (int round = 0; round < params.count; ++round) {
#pragma unroll
        for (int i = 0; i < Config::head_dim; ++i) {
            value[i] = value[i] * value[(i + 1) % Config::head_dim] + params.out[round];
        }
    }
#pragma unroll
    for (int i = 0; i < Config::head_dim; ++i) params.out[i * 32 + threadIdx.x] = value[i];
}

// Reads an accumulator while the wgmma that writes it may be in flight.
template <class Config>
__device__ void serialised(const Params& params) {
    float d[8] = {};
    const uint64_t descriptor = params.count;
    for (int round = 0; round < params.count; ++round) {
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %8, 1, 1, 1, 0, 0;"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
            : "l"(descriptor));
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        d[0] += 1.0f;
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    for (int i = 0; i < 8; ++i) params.out[i] = d[i];
}

}  // namespace attnlib
