// The bias gradient in a fixed order, for deterministic backward: one warp an element of the bias's own (broadcast) shape.
//
//   dbias[e] = sum over the (b, h, i, j) that read element e of P (keep dP - delta)
//
// The warp walks them in order; its lanes share the dot products q . k and dO . v. Slow, and exact in order.
// grid.x: elements; sizes of the bias (1 where it broadcasts) come as size_*.
#pragma once

#include "score.cuh"

namespace attnlib {

template <class Config>
__device__ __forceinline__ void bias_gradient_kernel(const BiasGradientParams& p) {
    using element = typename Config::element;
    constexpr int row_floats = 4, warps = Config::threads / 32;
    const int lane = threadIdx.x & 31;
    int64_t index = static_cast<int64_t>(blockIdx.x) * warps + (threadIdx.x >> 5);
    if (index >= static_cast<int64_t>(p.size_b) * p.size_h * p.size_i * p.size_j) return;
    const int ej = static_cast<int>(index % p.size_j);
    index /= p.size_j;
    const int ei = static_cast<int>(index % p.size_i);
    index /= p.size_i;
    const int eh = static_cast<int>(index % p.size_h), eb = static_cast<int>(index / p.size_h);
    const uint64_t seed = Config::dropout ? static_cast<uint64_t>(*address<const int64_t>(p.seed)) : 0;
    float sum = 0.f;   // of sums over one query each: terms of about one size are added
    for (int b = p.size_b == 1 ? 0 : eb; b < (p.size_b == 1 ? p.batch : eb + 1); ++b) {
        const Sequence seq = sequence_of<Config>(p, b);
        const Window window = window_of<Config>(p, seq);
        const int64_t tile0 = first_tile<Config>(p, b, Config::block_q);
        for (int h = p.size_h == 1 ? 0 : eh; h < (p.size_h == 1 ? p.heads_q : eh + 1); ++h) {
            const Scorer<Config> scorer(p, seq, h);
            const int head_kv = h / (p.heads_q / p.heads_kv);
            const element* q = address<const element>(p.q) + (Config::packed ? 0 : b * p.q_b) + seq.q_row * p.q_i + h * p.q_h;
            const element* k = address<const element>(p.k) + (Config::packed ? 0 : b * p.k_b) + seq.k_row * p.k_j + head_kv * p.k_h;
            const element* v = address<const element>(p.v) + (Config::packed ? 0 : b * p.v_b) + seq.k_row * p.v_j + head_kv * p.v_h;
            const element* dout = address<const element>(p.dout) + (Config::packed ? 0 : b * p.do_b) + seq.q_row * p.do_i + h * p.do_h;
            const int i_begin = p.size_i == 1 ? 0 : ei, i_end = min(p.size_i == 1 ? seq.q_len : ei + 1, scorer.i_end);
            for (int i = i_begin; i < i_end; ++i) {
                const float* row = address<const float>(p.rows) + ((h * p.row_tiles + tile0) * Config::block_q + i) * row_floats;
                const int j_begin = p.size_j == 1 ? static_cast<int>(window.key_begin(i)) : ej;
                const int j_end = min(p.size_j == 1 ? static_cast<int>(window.key_end(i)) : ej + 1, scorer.j_end);
                float part = 0.f;
                for (int j = j_begin; j < j_end; ++j) {
                    if (!window.sees(i, j)) continue;
                    float x = 0.f, dp = 0.f;
                    for (int c = lane; c < Config::head_dim; c += 32) x = fmaf(to_float(q[i * p.q_i + c]), to_float(k[j * p.k_j + c]), x);
                    for (int c = lane; c < Config::head_dim_v; c += 32) dp = fmaf(to_float(dout[i * p.do_i + c]), to_float(v[j * p.v_j + c]), dp);
#pragma unroll
                    for (int step = 16; step > 0; step /= 2) {
                        x += __shfl_xor_sync(0xFFFFFFFFu, x, step);
                        dp += __shfl_xor_sync(0xFFFFFFFFu, dp, step);
                    }
                    if constexpr (Config::block_mask)
                        if (BlockMask<Config>(p, seq, h).hides(i, j)) continue;
                    const float s = scorer.template one<false>(x, i, j);
                    const float probability = ptx::ex2_approx(fmaf(s - row[0], log2e, -row[1]));
                    if constexpr (Config::dropout)
                        dp = dropout_keeps(dropout_words(seed, b, h, i & ~8, j & ~24), i, j, p.dropout_threshold) ? dp * p.keep_scale : 0.f;
                    if (s != -infinity) part += probability * (dp - row[2]);
                }
                sum += part;
            }
        }
    }
    if (lane == 0) address<float>(p.dbias)[eb * p.dbias_b + eh * p.dbias_h + ei * p.dbias_i + ej * p.dbias_j] += sum;
}

}  // namespace attnlib
