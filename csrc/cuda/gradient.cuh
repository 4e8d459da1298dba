// The small kernels around the backward.
//
//   delta:  one warp a row: delta = dO . out - dlse, and the row statistics that the backward reads, padded to whole
//           tiles; zeroes the float32 workspace of dQ.
//   query gradient: that workspace, in fragment order, to dq in the element type.
//   sink gradient: dsink_h = -sum exp(sink_h - lse) delta, one block a head, in a fixed order.
#pragma once

#include "score.cuh"

namespace attnlib {

// Where row `row` of the padded rows of head `head` lies: its sequence and query. False: no such row of the operands.
template <class Config, class Params>
__device__ __forceinline__ bool locate_row(const Params& p, int tile, int row, int& b, int& i, int& q_len, int64_t& first) {
    if constexpr (Config::packed) {
        const int* cu = address<const int>(p.cu_q);
        int within;
        if (!find_packed_tile<Config>(cu, p.batch, p.total_q, Config::block_q, tile, b, within)) return false;
        first = clamp(cu[b], 0, p.total_q);
        const int end = b == p.batch ? p.total_q : clamp(cu[b + 1], static_cast<int>(first), p.total_q);
        i = within * Config::block_q + row;
        q_len = b == p.batch ? 0 : end - static_cast<int>(first);
        return i < end - first;
    } else {
        b = tile / p.tiles;
        i = (tile - b * p.tiles) * Config::block_q + row;
        first = 0;
        q_len = Config::lengths && p.q_lens ? clamp(address<const int>(p.q_lens)[b], 0, p.seqlen_q) : p.seqlen_q;
        return i < p.seqlen_q;
    }
}

template <class Config>
__device__ __forceinline__ void delta_kernel(const DeltaParams& p) {
    using element = typename Config::element;
    constexpr int block_q = Config::block_q, row_floats = Config::natural ? 4 : 2, warps = Config::threads / 32;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, head = blockIdx.y, tile = blockIdx.x;
    const int64_t slot = head * p.row_tiles + tile;
    for (int row = warp; row < block_q; row += warps) {
        int b, i, q_len;
        int64_t first;
        float shift = infinity, factor = 0.f, delta = 0.f;
        if (locate_row<Config>(p, tile, row, b, i, q_len, first) && i < q_len) {
            const element* out = address<const element>(p.out) + (Config::packed ? 0 : b * p.out_b) + (first + i) * p.out_i + head * p.out_h;
            const element* dout = address<const element>(p.dout) + (Config::packed ? 0 : b * p.do_b) + (first + i) * p.do_i + head * p.do_h;
            constexpr int width = Config::aligned && Config::head_dim_v % (16 / sizeof(element)) == 0 ? 16 / sizeof(element) : 1;
            float sum = 0.f;
            for (int column = lane * width; column < Config::head_dim_v; column += 32 * width) {
                struct alignas(width * sizeof(element)) Run { element x[width]; };
                const Run a = *reinterpret_cast<const Run*>(out + column), c = *reinterpret_cast<const Run*>(dout + column);
#pragma unroll
                for (int e = 0; e < width; ++e) sum = fmaf(to_float(a.x[e]), to_float(c.x[e]), sum);
            }
#pragma unroll
            for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
            const int64_t at = Config::packed ? head * static_cast<int64_t>(p.total_q) + first + i : (static_cast<int64_t>(b) * p.heads_q + head) * p.seqlen_q + i;
            const float lse = address<const float>(p.lse)[at];
            if (lse != -infinity) {
                if (p.dlse) sum -= address<const float>(p.dlse)[b * p.dlse_b * !Config::packed + head * p.dlse_h + (first + i) * p.dlse_i];
                delta = sum;
                shift = Config::natural ? lse : lse * log2e;
                if (Config::natural && p.stats) {
                    shift = address<const float>(p.stats)[at];
                    const float l = address<const float>(p.stats)[p.stats_l + at];
                    factor = log2f(l);
                    if (shift == -infinity || l == 0.f) { shift = infinity; factor = 0.f; }
                }
            }
        }
        if (lane == 0) {
            float* rows = address<float>(p.rows) + (slot * block_q + row) * row_floats;
            if constexpr (Config::natural) { rows[0] = shift; rows[1] = factor; rows[2] = delta; rows[3] = 0.f; }
            else { rows[0] = shift; rows[1] = delta; }
        }
    }
    if (p.dq_sum) {
        uint4* sum = address<uint4>(p.dq_sum) + slot * (Config::dq_floats / 4);
        for (int index = threadIdx.x; index < Config::dq_floats / 4; index += Config::threads) sum[index] = {0, 0, 0, 0};
    }
}

template <class Config>
__device__ __forceinline__ void query_gradient_kernel(const QueryGradientParams& p) {
    using element = typename Config::element;
    constexpr int block_q = Config::block_q, head_dim = Config::dq_columns, warps = Config::main_warps;
    constexpr int MQ = block_q / 16 / Config::dq_warps, CQ = head_dim / 8 / (warps / Config::dq_warps), per_warp = block_q * head_dim / warps;
    const int head = blockIdx.y, tile = blockIdx.x;
    const float* sum = address<const float>(p.dq_sum) + (head * p.row_tiles + tile) * (block_q * head_dim);
    // A thread gathers four columns of one row: of one m16n8 tile, two lanes' pairs.
    for (int index = threadIdx.x; index < block_q * head_dim / 4; index += Config::threads) {
        const int row = index / (head_dim / 4), column = index % (head_dim / 4) * 4;
        int b, i, q_len;
        int64_t first;
        if (column >= Config::head_dim || !locate_row<Config>(p, tile, row, b, i, q_len, first)) continue;
        const int m_tile = row / 16, n_tile = column / 8;
        const int warp = m_tile / MQ + n_tile / CQ * Config::dq_warps;
        const float* run = sum + warp * per_warp + (m_tile % MQ * CQ + n_tile % CQ) * 128;
        float x[4];
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            const int lane = (row & 7) * 4 + (column & 7) / 2 + pair, e = (row & 8) ? 2 : 0;
            if constexpr (Config::arch >= 90) {
                const float2 two = *reinterpret_cast<const float2*>(run + 4 * lane + e);
                x[2 * pair] = two.x;
                x[2 * pair + 1] = two.y;
            } else {
                x[2 * pair] = run[32 * e + lane];
                x[2 * pair + 1] = run[32 * (e + 1) + lane];
            }
        }
        element* to = address<element>(p.dq) + (Config::packed ? 0 : b * p.dq_b) + (first + i) * p.dq_i + head * p.dq_h + column;
        if constexpr (Config::aligned && Config::head_dim % 4 == 0) {
            struct alignas(4 * sizeof(element)) Run { element x[4]; } run4;
#pragma unroll
            for (int e = 0; e < 4; ++e) run4.x[e] = from_float<Config>(x[e] * p.scale);
            *reinterpret_cast<Run*>(to) = run4;
        } else {
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (column + e < Config::head_dim) to[e] = from_float<Config>(x[e] * p.scale);
        }
    }
}

template <class Config>
__device__ __forceinline__ void sink_gradient_kernel(const SinkGradientParams& p) {
    constexpr int row_floats = Config::natural ? 4 : 2, place = Config::natural ? 2 : 1;
    const int head = blockIdx.x;
    const float sink = to_float(address<const typename Config::sink_element>(p.sinks)[head * p.sinks_h]);
    float sum = 0.f;
    for (int64_t slot = threadIdx.x; slot < p.row_tiles * Config::block_q; slot += Config::threads) {
        const int tile = static_cast<int>(slot / Config::block_q), row = static_cast<int>(slot % Config::block_q);
        int b, i, q_len;
        int64_t first;
        if (!locate_row<Config>(p, tile, row, b, i, q_len, first) || i >= q_len) continue;
        const int64_t at = Config::packed ? head * static_cast<int64_t>(p.total_q) + first + i : (static_cast<int64_t>(b) * p.heads_q + head) * p.seqlen_q + i;
        const float lse = address<const float>(p.lse)[at];
        if (lse == -infinity) continue;
        sum -= exp2f((sink - lse) * log2e) * address<const float>(p.rows)[((head * p.row_tiles + tile) * Config::block_q + row) * row_floats + place];
    }
    __shared__ float parts[Config::threads];
    parts[threadIdx.x] = sum;
    __syncthreads();
    for (int step = Config::threads / 2; step > 0; step /= 2) {
        if (threadIdx.x < step) parts[threadIdx.x] += parts[threadIdx.x + step];
        __syncthreads();
    }
    if (threadIdx.x == 0) address<float>(p.dsinks)[head * p.dsinks_h] += parts[0];
}

}  // namespace attnlib
