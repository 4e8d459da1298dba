// Sizes and shared-memory layout of one block of the backward (backward_sm80.cuh), and how a warp's tiles leave registers.
#pragma once

#include "product.cuh"
#include "score.cuh"
#include "tile.cuh"

namespace attnlib {

template <class Config>
struct BackwardTile {
    using element = typename Config::element;
    using atom = Atom<Config>;
    static constexpr int M = Config::m_tiles, warps_k = Config::warps_k, warps_q = Config::warps_q;
    static constexpr int warps = warps_k * warps_q, threads = 32 * warps;
    static constexpr int block_k = 16 * M * warps_k, block_q = Config::block_q, stages = Config::stages, o_stages = Config::o_stages;
    static constexpr int N = block_q / warps_q / 8;
    static constexpr int head_dim = (Config::head_dim + 31) / 32 * 32, head_dim_v = (Config::head_dim_v + 31) / 32 * 32;
    static constexpr int CK = head_dim / warps_q / 8, CV = head_dim_v / warps_q / 8;   // n8 tiles of dK and dV
    static constexpr int dq_tiles = Config::dq_tiles, team = warps / dq_tiles;   // query tiles whose dQ is computed at once; warps for each
    static constexpr int dq_rows = Config::dq_warps, dq_columns = team / dq_rows;      // how they share it
    static constexpr int MQ = block_q / 16 / dq_rows, CQ = head_dim / 8 / dq_columns, C = CQ / Config::dq_parts;
    static constexpr bool tight = Config::dq_parts == 4;   // tiles that leave hardly a register
    static constexpr int row_floats = Scorer<Config>::natural ? 4 : 2;
    static_assert((warps_q & (warps_q - 1)) == 0, "warps of the same keys take turns by xor");
    static_assert(N % 2 == 0 && CK % 2 == 0 && CV % 2 == 0 && CQ % 2 == 0, "fragments are loaded in pairs");
    static_assert(MQ * 16 * dq_rows == block_q && CQ * 8 * dq_columns == head_dim, "the warps tile dQ");
    using KTile = Tile<Config, block_k, head_dim>;
    using VTile = Tile<Config, block_k, head_dim_v>;
    using QTile = Tile<Config, block_q, head_dim>;
    using OTile = Tile<Config, block_q, head_dim_v>;
    using STile = Tile<Config, block_k, block_q>;
    static constexpr int row_bytes = block_q * row_floats * 4, stage_bytes = QTile::bytes + row_bytes, rows_at = QTile::bytes;   // rows: within a stage
    static constexpr int v_at = KTile::bytes, q_at = v_at + VTile::bytes, o_at = q_at + stages * stage_bytes;
    static constexpr bool late = o_stages < stages;   // dO of a step is loaded in that step
    static constexpr int ds_buffers = stages == 1 ? 1 : 1 + dq_tiles;   // with one stage dQ of a step is done before the next dS
    static_assert(dq_tiles == 1 || stages > 1, "tiles wait for each other");
    static_assert(!Config::stagger || (stages > 1 && dq_tiles == 1 && !Config::deterministic), "half of the warps keep dS until the end of the next step");
    static constexpr int ds_at = o_at + o_stages * OTile::bytes, p_at = ds_at + ds_buffers * STile::bytes;
    static constexpr int staged = Config::dq_stage;   // m16n8 tiles of dQ that a warp has on their way through shared memory
    static constexpr int dq_at = p_at + (warps_q > 1 ? STile::bytes : 0), parked = dq_at + 512 * staged * warps, held_at = parked + 64, shared_bytes = held_at + 8 * warps;
    static_assert(Config::dq_parts == 1 || (staged == 0 && C % 2 == 0), "parts of dQ are added at different times");
    static_assert(staged == 0 || (Config::arch >= 90 && MQ * CQ % staged == 0), "bulk additions are of sm_90");
    static constexpr int dq_floats = block_q * head_dim;   // of one tile in the workspace
};

// A transposed tile of P or dS to shared memory: [block_k][block_q], this warp's part at (row, column).
template <class Config, int M, int N>
__device__ __forceinline__ void store_transposed(const float (&x)[M][N][4], uint32_t tile, int row, int column, int lane) {
    using STile = typename BackwardTile<Config>::STile;
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const uint32_t where = tile + STile::offset(row + 16 * m + 8 * r + (lane >> 2), column + 8 * n + 2 * (lane & 3));
                if constexpr (Atom<Config>::wide) ptx::st_shared_v2(where, __float_as_uint(x[m][n][2 * r]), __float_as_uint(x[m][n][2 * r + 1]));
                else ptx::st_shared_b32(where, pack<Config>(x[m][n][2 * r], x[m][n][2 * r + 1]));
            }
}

// A warp's transposed dS to the bias gradient, whose element (i, j) lies at i * stride_i + j * stride_j. Where the bias is
// broadcast (stride 0) the warp sums first in split float32, as one long sum of single terms loses their low bits.
template <class Config, int M, int N>
__device__ __forceinline__ void add_bias_gradient(const float (&ds)[M][N][4], float* dbias, int64_t stride_i, int64_t stride_j,
                                                  int i0, int j0, int i_end, int j_end, int lane) {
    i0 += 2 * (lane & 3);
    j0 += lane >> 2;
    const auto add = [&](int i, int j, float x) {
        if (i < i_end && j < j_end && x != 0.f) ptx::red_add_f32(dbias + i * stride_i + j * stride_j, x);
    };
    const auto across = [](float x, int first, int last) {   // sum over the lanes that differ in bits first .. last
        for (int step = first; step <= last; step *= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, step);
        return x;
    };
    if (!Atom<Config>::split || (stride_i != 0 && stride_j != 0)) {
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) add(i0 + 8 * n + (e & 1), j0 + 16 * m + 8 * (e >> 1), ds[m][n][e]);
    } else if (stride_j != 0) {   // one sum a key
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float sum = 0.f;
#pragma unroll
                for (int n = 0; n < N; ++n) sum += ds[m][n][2 * r] + ds[m][n][2 * r + 1];
                sum = across(sum, 1, 2);
                if ((lane & 3) == 0) add(i0, j0 + 16 * m + 8 * r, sum);
            }
    } else {   // one sum a query, or one in all
        float all = 0.f;
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float sum = 0.f;
#pragma unroll
                for (int m = 0; m < M; ++m) sum += ds[m][n][e] + ds[m][n][e + 2];
                sum = across(sum, 4, 16);
                if (stride_i != 0 && lane < 4) add(i0 + 8 * n + e, j0, sum);
                all += sum;
            }
        all = across(all, 1, 2);
        if (stride_i == 0 && lane == 0) add(i0, j0, all);
    }
}

// Accumulators of dK or dV to global memory through their tile of shared memory: rows of this block's keys.
template <class Config, class KeyTile, int dim, int M, int C>
__device__ __forceinline__ void write_keys(const float (&acc)[M][C][4], float scale, uint32_t tile, int row, int column,
                                           typename Config::element* to, int64_t stride, int count, int thread) {
    using element = typename Config::element;
    const int lane = thread & 31;
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int c = 0; c < C; ++c)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const uint32_t where = tile + KeyTile::offset(row + 16 * m + 8 * r + (lane >> 2), column + 8 * c + 2 * (lane & 3));
                const float x = acc[m][c][2 * r] * scale, y = acc[m][c][2 * r + 1] * scale;
                if constexpr (Atom<Config>::wide) ptx::st_shared_v2(where, __float_as_uint(x), __float_as_uint(y));
                else ptx::st_shared_b32(where, pack<Config>(x, y));
            }
    __syncthreads();
    constexpr int width = 16 / sizeof(element), chunks = (dim + width - 1) / width, threads = BackwardTile<Config>::threads;
    for (int index = thread; index < KeyTile::rows * chunks; index += threads) {
        const int r = index / chunks, first = index % chunks * width;
        if (r >= count) break;
        const uint4 value = ptx::ld_shared_v4(tile + KeyTile::offset(r, first));
        element* target = to + r * stride + first;
        if constexpr (dim % width == 0 && Config::aligned) ptx::st_global_v4(target, value);
        else {
            const uint32_t words[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
            for (int e = 0; e < width; ++e)
                if (first + e < dim) {
                    if constexpr (Atom<Config>::wide) reinterpret_cast<uint32_t*>(target)[e] = words[e];
                    else reinterpret_cast<uint16_t*>(target)[e] = static_cast<uint16_t>(words[e / 2] >> (16 * (e & 1)));
                }
        }
    }
}

}  // namespace attnlib
