// One block of the forward (forward_sm80.cuh): its sizes and shared-memory layout, its products, what two warps that share
// rows tell each other, which keys it visits and which rows it owns.
#pragma once

#include "product.cuh"
#include "softmax.cuh"
#include "tile.cuh"
#include "work.cuh"

namespace attnlib {

template <class Config>
struct ForwardTile {
    using element = typename Config::element;
    using atom = Atom<Config>;
    static constexpr int M = Config::m_tiles, warps = Config::warps, threads = 32 * warps, warps_n = Config::warps_n;
    static constexpr int block_q = 16 * M * (warps / warps_n), block_k = Config::block_k, keys = block_k / warps_n;
    static constexpr int head_dim = (Config::head_dim + 31) / 32 * 32, head_dim_v = (Config::head_dim_v + 31) / 32 * 32;
    static constexpr int columns = head_dim_v / warps_n, N = keys / 8, C = columns / 8;   // of one warp
    using QTile = Tile<Config, block_q, head_dim>;
    using KTile = Tile<Config, block_k, head_dim>;
    using VTile = Tile<Config, block_k, head_dim_v>;
    using OTile = Tile<Config, block_q, head_dim_v>;
    static constexpr int q_bytes = QTile::bytes > OTile::bytes ? QTile::bytes : OTile::bytes;
    static constexpr int k_at = q_bytes, v_at = k_at + Config::stages * KTile::bytes, end = v_at + Config::stages * VTile::bytes;
    using PTile = Tile<Config, block_q, block_k>;
    static constexpr int mask_bytes = Config::block_mask ? 2048 : 0, p_at = end + mask_bytes;
    static constexpr int row_at = p_at + (warps_n > 1 ? PTile::bytes : 0), flag_at = row_at + (warps_n > 1 ? 8 * block_q : 0);
    static constexpr int parked = flag_at + (warps_n > 1 ? 4 * warps : 0);
    static constexpr int random_at = parked + 48, random_bytes = Config::dropout ? 4 * block_k : 0;   // two of these
    static constexpr int rows_at = random_at + 2 * random_bytes, shared_bytes = rows_at + (Config::dropout ? 4 * block_q : 0);
    static constexpr int steps = head_dim / atom::k, key_steps = keys / atom::k;
    static_assert(warps_n == 1 || (!atom::wide && columns * atom::bytes % VTile::group == 0), "a warp's columns are whole groups of chunks");
    static constexpr bool keep_q = Config::q_in_registers;
    static_assert(keys % 32 == 0, "dropout and 32-byte steps");

    typename atom::A q[keep_q ? M : 1][keep_q ? steps : 1];
    float acc[M][C][4];   // [rows, head_dim_v]
    SoftmaxState<Config, M> state;

    __device__ __forceinline__ void load_q(uint32_t q_lane) {
        if constexpr (keep_q) {
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int k = 0; k < steps; ++k) q[m][k] = QTile::load_a(q_lane, 16 * m, k);
        }
    }

    // S = Q K^T   [rows, block_k]; ahead where it spares spills
    __device__ __forceinline__ void scores(float (&s)[M][N][4], uint32_t q_lane, uint32_t k_lane) const {
        clear(s);
        accumulate<atom, M, N, steps, Config::left && !Config::split>(s, [&](int m, int k) { return keep_q ? q[keep_q ? m : 0][keep_q ? k : 0] : QTile::load_a(q_lane, 16 * m, k); },
            [&](typename atom::B& b0, typename atom::B& b1, int k, int n) { KTile::load_b(b0, b1, k_lane, 8 * n, k); });
    }

    // P rounded to the element type as soon as a row of tiles is finished: half the registers (float32 stays as it is).
    struct Packed { typename atom::A a[atom::wide ? 1 : M][atom::wide ? 1 : key_steps]; };
    __device__ __forceinline__ static void round(const float (&p)[M][N][4], Packed& packed, int m) {
        if constexpr (!atom::wide) {
#pragma unroll
            for (int k = 0; k < key_steps; ++k) packed.a[m][k] = atom::from_accumulators(p[m], k);
        }
    }

    // O += P V
    __device__ __forceinline__ void add_values(float (&p)[M][N][4], const Packed& packed, uint32_t v_lane, int lane) {
        accumulate<atom, M, C, key_steps>(acc,
            [&](int m, int k) { return atom::wide ? atom::take_accumulators(p[m], k) : packed.a[atom::wide ? 0 : m][atom::wide ? 0 : k]; },
            [&](typename atom::B& b0, typename atom::B& b1, int k, int c) { VTile::template load_b_by_k<true>(b0, b1, v_lane, k * atom::k, c / 2, lane); });
    }
};

// What two warps that share rows tell each other; one barrier each.
template <class Config>
struct Partner {
    using T = ForwardTile<Config>;
    uint32_t base;
    int lane, warp_m, warp_n;

    __device__ __forceinline__ void meet() const { ptx::bar_sync(1 + warp_m, 32 * T::warps_n); }
    __device__ __forceinline__ uint32_t row(int m, int r, int half) const { return base + T::row_at + 4 * (half * T::block_q + warp_m * 16 * T::M + 16 * m + 8 * r + (lane >> 2)); }

    // op over both warps' values of each row
    template <int M, class Op>
    __device__ __forceinline__ void reduce(float (&x)[M][2], const Op& op) const {
        if constexpr (T::warps_n > 1) {
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    if ((lane & 3) == 0) ptx::st_shared_b32(row(m, r, warp_n), __float_as_uint(x[m][r]));
            meet();
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int r = 0; r < 2; ++r) x[m][r] = op(x[m][r], __uint_as_float(ptx::ld_shared_b32(row(m, r, warp_n ^ 1))));
        }
    }
    // P of this warp's keys for the other one; returns whether both fit.
    __device__ __forceinline__ bool exchange(const typename T::Packed& packed, bool fits) const {
        if constexpr (T::warps_n == 1) return fits;
        else {
            const uint32_t tile = base + T::p_at + warp_m * 16 * T::M * T::PTile::pitch;
#pragma unroll
            for (int m = 0; m < T::M; ++m)
#pragma unroll
                for (int k = 0; k < T::key_steps; ++k)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        ptx::st_shared_b32(tile + T::PTile::offset(16 * m + 8 * (i & 1) + (lane >> 2), warp_n * T::keys + 16 * k + 8 * (i >> 1) + 2 * (lane & 3)), packed.a[m][k].hi[i]);
            if (lane == 0) ptx::st_shared_b32(base + T::flag_at + 4 * (warp_m * 2 + warp_n), fits);
            meet();
            return fits && ptx::ld_shared_b32(base + T::flag_at + 4 * (warp_m * 2 + (warp_n ^ 1))) != 0;
        }
    }
    // The other warp's P.
    __device__ __forceinline__ void fetch(typename T::Packed& packed) const {
        const uint32_t address = T::PTile::by_row(base + T::p_at + warp_m * 16 * T::M * T::PTile::pitch, lane);
        const uint32_t half = (warp_n ^ 1) * T::keys * T::atom::bytes;   // 64 bytes: inside a group of chunks, so it is an xor
#pragma unroll
        for (int m = 0; m < T::M; ++m)
#pragma unroll
            for (int k = 0; k < T::key_steps; ++k) packed.a[m][k] = T::PTile::load_a(address ^ half, 16 * m, k);
    }
};

template <class Config>
__device__ __forceinline__ auto key_rows(const ForwardParams& p, uint64_t start, int64_t page, int64_t stride, int sequence) {
    const auto* base = address<const typename Config::element>(start);
    if constexpr (Config::paged) return PagedRows<Config>{base, stride, page, address<const int>(p.page_table) + sequence * p.page_row, p.page_size};
    else return Rows<Config>{base, stride};
}

// Which key tiles a block visits. With a block mask, bits in shared memory say which tiles exist and which are whole.
template <class Config>
struct KeyTiles {
    static constexpr int words = Config::block_mask ? 256 : 1, covered = 32 * words;
    const uint32_t* live;
    const uint32_t* whole;

    // The last live tile <= tile, or first - 1. visible(tile) says so of one that has no bit.
    template <class Visible>
    __device__ __forceinline__ int previous(int tile, int first, const Visible& visible) const {
        if constexpr (Config::block_mask) {
            while (tile >= first && tile >= covered && !visible(tile)) --tile;
            while (tile >= first && tile < covered) {
                const uint32_t word = live[tile >> 5] << (31 - (tile & 31));
                if (word != 0) { tile -= __clz(word); break; }
                tile = (tile & ~31) - 1;
            }
        }
        return tile < first ? first - 1 : tile;
    }
    __device__ __forceinline__ bool is_partial(int tile) const {   // may be
        if constexpr (!Config::partial_blocks) return false;
        return tile >= covered || !(whole[tile >> 5] >> (tile & 31) & 1);
    }
};

}  // namespace attnlib
