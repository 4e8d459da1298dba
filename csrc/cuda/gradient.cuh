// The small kernels around the backward.
//
//   delta:  one warp a row: delta = dO . out - dlse, and the row statistics that the backward reads, padded to whole
//           tiles; zeroes the float32 workspace of dQ.
//   query gradient: that workspace, in fragment order, to dq in the element type.
//   sink gradient: dsink_h = -sum exp(sink_h - lse) delta, one block a head, in a fixed order.
#pragma once

#include "score.cuh"
#include "quad.cuh"

namespace attnlib {

// A tile of the padded rows of a head: whose rows they are.
template <class Config>
struct RowTile {
    int b = 0, i0 = 0;          // sequence and first query
    int count = 0, queries = 0;   // rows of the tile that the operands have; that are queries
    int64_t first = 0;          // row of the sequence's query 0 in packed operands

    template <class Params>
    __device__ __forceinline__ RowTile(const Params& p, int tile) {
        if constexpr (Config::packed) {
            const int* cu = address<const int>(p.cu_q);
            int within;
            if (!find_packed_tile<Config>(cu, p.batch, p.total_q, Config::block_q, tile, b, within)) return;
            first = clamp(cu[b], 0, p.total_q);
            const int end = b == p.batch ? p.total_q : clamp(cu[b + 1], static_cast<int>(first), p.total_q);
            i0 = within * Config::block_q;
            count = min(Config::block_q, end - static_cast<int>(first) - i0);
            queries = b == p.batch ? 0 : count;
        } else {
            b = tile / p.tiles;
            i0 = (tile - b * p.tiles) * Config::block_q;
            count = min(Config::block_q, p.seqlen_q - i0);
            queries = Config::lengths && p.q_lens ? min(count, clamp(address<const int>(p.q_lens)[b], 0, p.seqlen_q) - i0) : count;
        }
    }
    // Row of head `head` in lse.
    template <class Params>
    __device__ __forceinline__ int64_t lse_row(const Params& p, int head, int row) const {
        return (Config::packed ? head * static_cast<int64_t>(p.total_q) + first : (static_cast<int64_t>(b) * p.heads_q + head) * p.seqlen_q) + i0 + row;
    }
};

// Where a row's shift and delta lie: beside each other, or (wgmma) all shifts of a tile before all deltas, and of 16 rows the four that
// are columns 2 l, 2 l + 1 of two m16n8 tiles beside each other.
template <class Config>
__device__ __forceinline__ int64_t row_place(int64_t slot, int row, int member) {
    if constexpr (Config::planes) return (slot * 2 + member) * Config::block_q + (row & ~15) + (row & 6) * 2 + (row >> 2 & 2) + (row & 1);
    else return (slot * Config::block_q + row) * (Config::natural ? 4 : 2) + member;
}

template <class Config>
__device__ __forceinline__ void delta_kernel(const DeltaParams& p) {
    using element = typename Config::element;
    constexpr int block_q = Config::block_q, dim = Config::head_dim_v;
    constexpr int width = Config::aligned && dim % (16 / sizeof(element)) == 0 ? 16 / sizeof(element) : 1;
    constexpr int chunks = (dim + width - 1) / width, lanes = chunks > 16 ? 32 : chunks > 8 ? 16 : chunks > 4 ? 8 : 4;   // that share a row
    constexpr int together = Config::threads / lanes, ahead = chunks > lanes ? 1 : 4;   // rows at once; of a thread whose loads are under way
    ptx::launch_dependents<Config>();
    const int lane = threadIdx.x % lanes, head = blockIdx.y, tile = blockIdx.x;
    const int64_t slot = head * p.row_tiles + tile;
    const RowTile<Config> mine(p, tile);
    const element* out = address<const element>(p.out) + (Config::packed ? 0 : mine.b * p.out_b) + (mine.first + mine.i0) * p.out_i + head * p.out_h;
    const element* dout = address<const element>(p.dout) + (Config::packed ? 0 : mine.b * p.do_b) + (mine.first + mine.i0) * p.do_i + head * p.do_h;
    float* rows = address<float>(p.rows);
    if (p.dq_sum) {
        uint4* sum = address<uint4>(p.dq_sum) + slot * (Config::dq_floats / 4);
        for (int index = threadIdx.x; index < Config::dq_floats / 4; index += Config::threads) sum[index] = {0, 0, 0, 0};
    }
    for (int row0 = threadIdx.x / lanes; row0 < block_q; row0 += ahead * together) {
        struct alignas(width * sizeof(element)) Run { element x[width]; };
        float sum[ahead];
        for (int part = 0; part < chunks; part += lanes) {
            Run a[ahead], c[ahead];
#pragma unroll
            for (int u = 0; u < ahead; ++u) {
                const int row = row0 + u * together, column = (part + lane) * width;
                a[u] = c[u] = Run{};
                if (row < mine.queries && column < dim) {
                    a[u] = *reinterpret_cast<const Run*>(out + row * p.out_i + column);
                    c[u] = *reinterpret_cast<const Run*>(dout + row * p.do_i + column);
                }
            }
#pragma unroll
            for (int u = 0; u < ahead; ++u) {
                if (part == 0) sum[u] = 0.f;
#pragma unroll
                for (int e = 0; e < width; ++e) sum[u] = fmaf(to_float(a[u].x[e]), to_float(c[u].x[e]), sum[u]);
            }
        }
#pragma unroll
        for (int u = 0; u < ahead; ++u) {
#pragma unroll
            for (int step = lanes / 2; step > 0; step /= 2) sum[u] += __shfl_xor_sync(0xFFFFFFFFu, sum[u], step);
            const int row = row0 + u * together;
            if (lane != 0 || row >= block_q) continue;
            float shift = infinity, factor = 0.f, delta = 0.f;
            const int64_t at = mine.lse_row(p, head, row);
            const float lse = row < mine.queries ? address<const float>(p.lse)[at] : -infinity;
            if (lse != -infinity) {
                delta = sum[u];
                if (p.dlse) delta -= address<const float>(p.dlse)[mine.b * p.dlse_b * !Config::packed + head * p.dlse_h + (mine.first + mine.i0 + row) * p.dlse_i];
                shift = Config::natural ? lse : lse * log2e;
                if (Config::natural && p.stats) {
                    shift = address<const float>(p.stats)[at];
                    const float l = address<const float>(p.stats)[p.stats_l + at];
                    factor = log2f(l);
                    if (shift == -infinity || l == 0.f) { shift = infinity; factor = 0.f; }
                }
            }
            rows[row_place<Config>(slot, row, 0)] = shift;
            if constexpr (Config::natural) {
                rows[row_place<Config>(slot, row, 1)] = factor;
                rows[row_place<Config>(slot, row, 2)] = delta;
                rows[row_place<Config>(slot, row, 3)] = 0.f;
            } else rows[row_place<Config>(slot, row, 1)] = delta;
        }
    }
}

// A warp takes 16 rows and 32 columns: four m16n8 tiles of the workspace, of which a lane has two columns of two rows.
template <class Config>
__device__ __forceinline__ void query_gradient_kernel(const QueryGradientParams& p) {
    using element = typename Config::element;
    constexpr int block_q = Config::block_q, head_dim = Config::dq_columns, warps = Config::main_warps;
    constexpr int MQ = block_q / 16 / Config::dq_warps, CQ = head_dim / 8 / (warps / Config::dq_warps), per_warp = block_q * head_dim / warps;
    constexpr int parts = head_dim / 32, width = 16 / sizeof(element);
    constexpr bool whole = Config::aligned && Config::head_dim % width == 0;
    ptx::wait_dependency<Config>();
    const int lane = threadIdx.x & 31, head = blockIdx.y, tile = blockIdx.x;
    const RowTile<Config> mine(p, tile);
    const float* sum = address<const float>(p.dq_sum) + (head * p.row_tiles + tile) * (block_q * head_dim);
    element* dq = address<element>(p.dq) + (Config::packed ? 0 : mine.b * p.dq_b) + (mine.first + mine.i0) * p.dq_i + head * p.dq_h;
#pragma unroll 2
    for (int unit = threadIdx.x / 32; unit < block_q / 16 * parts; unit += Config::threads / 32) {
        const int m_tile = unit / parts, column0 = unit % parts * 32;
        if (column0 >= Config::head_dim || 16 * m_tile >= mine.count) continue;
        float x[4][4];
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const int n_tile = column0 / 8 + t, warp = m_tile / MQ + n_tile / CQ * Config::dq_warps;
            const float* run = sum + warp * per_warp + (m_tile % MQ * CQ + n_tile % CQ) * 128;
            if constexpr (Config::arch >= 90) {
                const float4 four = *reinterpret_cast<const float4*>(run + 4 * lane);
                x[t][0] = four.x; x[t][1] = four.y; x[t][2] = four.z; x[t][3] = four.w;
            } else {
#pragma unroll
                for (int e = 0; e < 4; ++e) x[t][e] = run[32 * e + lane];
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) x[t][e] *= p.scale;
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = 16 * m_tile + 8 * r + lane / 4;
            element* to = dq + row * p.dq_i;
            if constexpr (whole && sizeof(element) == 2) {   // four lanes exchange, so that each has the row's columns of one tile
                uint32_t word[4];
#pragma unroll
                for (int t = 0; t < 4; ++t) word[t] = pack<Config>(x[t][2 * r], x[t][2 * r + 1]);
                exchange_quad(word, lane);
                const int column = column0 + 8 * (lane & 3);
                if (row < mine.count && column < Config::head_dim) *reinterpret_cast<uint4*>(to + column) = {word[0], word[1], word[2], word[3]};
            } else {
#pragma unroll
                for (int t = 0; t < 4; ++t)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int column = column0 + 8 * t + 2 * (lane & 3) + e;
                        if (row < mine.count && column < Config::head_dim) to[column] = from_float<Config>(x[t][2 * r + e]);
                    }
            }
        }
    }
}

template <class Config>
__device__ __forceinline__ void sink_gradient_kernel(const SinkGradientParams& p) {
    const int head = blockIdx.x;
    const float sink = to_float(address<const typename Config::sink_element>(p.sinks)[head * p.sinks_h]);
    float sum = 0.f;
    for (int64_t index = threadIdx.x; index < p.row_tiles * Config::block_q; index += Config::threads) {
        const int tile = static_cast<int>(index / Config::block_q), row = static_cast<int>(index % Config::block_q);
        const RowTile<Config> mine(p, tile);
        if (row >= mine.queries) continue;
        const float lse = address<const float>(p.lse)[mine.lse_row(p, head, row)];
        if (lse == -infinity) continue;
        sum -= exp2f((sink - lse) * log2e) * address<const float>(p.rows)[row_place<Config>(head * p.row_tiles + tile, row, Config::natural ? 2 : 1)];
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
