// Joins the partials of a split forward: one warp a row of one head.
//
//   w_s = exp(lse_s - m);  l = sum w_s + exp(sink - m);  out = sum w_s out_s / l;  lse = m + log l
#pragma once

#include "score.cuh"

namespace attnlib {

template <class Config>
__device__ __forceinline__ void combine_kernel(const CombineParams& p) {
    using element = typename Config::element;
    constexpr int dim = Config::head_dim_v, per_lane = (dim + 31) / 32;
    const int lane = threadIdx.x & 31;
    const int64_t per_head = Config::packed ? p.total_q : p.seqlen_q;
    const int64_t plane = (Config::packed ? 1 : p.batch) * static_cast<int64_t>(p.heads_q) * per_head;
    const int64_t row = static_cast<int64_t>(blockIdx.x) * (Config::threads / 32) + (threadIdx.x >> 5);
    if (row >= plane) return;
    const int64_t i = row % per_head, unit = row / per_head;
    const int head = static_cast<int>(unit % p.heads_q);
    const int64_t b = unit / p.heads_q;
    bool query = true;
    if constexpr (Config::packed) query = i < clamp(address<const int>(p.cu_q)[p.batch], 0, p.total_q);
    else if constexpr (Config::lengths) query = !p.q_lens || i < address<const int>(p.q_lens)[b];

    const float* lses = address<const float>(p.partial_lse) + row;
    float sink = -infinity;
    if constexpr (Config::has_sinks)
        if (query) sink = to_float(address<const typename Config::sink_element>(p.sinks)[head * p.sinks_h]);
    float top = sink;
    for (int s = lane; s < p.splits; s += 32) top = fmaxf(top, lses[s * plane]);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, step));
    const float base = top == -infinity ? 0.f : top;
    float l = 0.f, acc[per_lane] = {};
    const float* parts = address<const float>(p.partial_out) + row * dim;
    for (int first = 0; first < p.splits; first += 32) {   // a lane finds one weight; the loads of several splits overlap
        const int count = min(32, p.splits - first);
        const float mine = lane < count ? exp2f((lses[(first + lane) * plane] - base) * log2e) : 0.f;
        for (int next = 0; next < count; next += 8)
#pragma unroll
            for (int s = next; s < next + 8; ++s) {
                const float weight = __shfl_sync(0xFFFFFFFFu, mine, s);
                l += weight;
#pragma unroll
                for (int c = 0; c < per_lane; ++c) {
                    const bool used = weight != 0.f && 32 * c + lane < dim;   // what has no weight may not have been written
                    acc[c] = fmaf(weight, used ? parts[(first + s) * plane * dim + 32 * c + lane] : 0.f, acc[c]);
                }
            }
    }
    if (sink != -infinity) l += exp2f((sink - base) * log2e);
    const float inverse = l == 0.f ? 0.f : 1.f / l;
    const int64_t token = Config::packed ? i : b * p.seqlen_q + i;
    element* to = address<element>(p.out) + (token * p.heads_q + head) * dim;
#pragma unroll
    for (int c = 0; c < per_lane; ++c)
        if (32 * c + lane < dim) to[32 * c + lane] = from_float<Config>(acc[c] * inverse);
    if (lane == 0) address<float>(p.lse)[row] = l == 0.f ? -infinity : base + logf(l);
}

}  // namespace attnlib
