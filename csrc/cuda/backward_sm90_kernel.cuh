// The wgmma backward as a kernel: who does what.
#pragma once

#include "backward_sm90_apart.cuh"
#include "backward_sm90_wide.cuh"

namespace attnlib {

template <class Config, int kind = Config::apart ? 2 : Config::wide> struct BackwardChoice { using type = WarpgroupBackward<Config>; };
template <class Config> struct BackwardChoice<Config, 1> { using type = WideBackward<Config>; };
template <class Config> struct BackwardChoice<Config, 2> { using type = ApartBackward<Config>; };
template <class Config> using Backward = typename BackwardChoice<Config>::type;

template <class Config>
__device__ __forceinline__ void kernel(const BackwardTilesParams& params) {
    using T = WarpgroupBackwardTile<Config>;
    using element = typename Config::element;
    const BackwardParams& p = params.maps.problem;
    extern __shared__ __align__(1024) uint8_t shared[];
    ptx::launch_dependents<Config>();
    if constexpr (Config::deterministic) ptx::wait_dependency<Config>();   // the ticket
    const uint32_t base = ptx::shared_address(shared);
    const int warpgroup = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0), lane = threadIdx.x & 31;
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(base + T::keys_full, 1);
        ptx::mbarrier_init(base + T::keys_empty, T::apart ? 12 : 8);
        for (int i = 0; i < 2; ++i) {
            ptx::mbarrier_init(base + T::tile_full + 8 * i, 1);
            ptx::mbarrier_init(base + T::tile_empty + 8 * i, T::apart ? 13 : 9);
        }
        for (int i = 0; i < T::stages; ++i) {
            ptx::mbarrier_init(base + T::q_full + 8 * i, 1);
            ptx::mbarrier_init(base + T::q_empty + 8 * i, 8);
        }
        for (int i = 0; i < T::stages; ++i) {
            ptx::mbarrier_init(base + T::o_full + 8 * i, 1);
            ptx::mbarrier_init(base + T::o_empty + 8 * i, 8);
        }
        for (int i = 0; i < 3; ++i) {
            ptx::mbarrier_init(base + T::ds_full + 8 * i, 8);
            ptx::mbarrier_init(base + T::ds_empty + 8 * i, 4);
        }
        ptx::mbarrier_init_fence();
        if constexpr (Config::deterministic) ptx::st_shared_b32(base + T::tile_at, atomicAdd(address<int>(p.ticket), 1));
    }
    __syncthreads();
    const int block = Config::deterministic ? ptx::ld_shared_b32(base + T::tile_at) : blockIdx.x;
    if constexpr (Config::deterministic) __syncthreads();   // before a record lies there
    if (warpgroup == 0) {
        ptx::give_registers<T::apart ? 32 : 40>();
        if (threadIdx.x == 0) load_queries<Config>(params, base);
        if (threadIdx.x == 32) plan_tiles<Config>(params, base, block);
    } else if (T::apart && warpgroup == 3) {
        if constexpr (T::apart) {
            ptx::give_registers<64>();
            ptx::wait_dependency<Config>();
            QueryWarpgroup<Config>(base, lane).work();
        }
    } else {
        ptx::take_registers<T::apart ? 208 : 232>();
        ptx::wait_dependency<Config>();   // every thread: this kernel never ends before that one
        Backward<Config> mine(p, base, warpgroup - 1, lane);
        int visit = 0, state = 0;   // bit 0: place of the record, bits 1 and 2: phases of its barrier and of keys_full
#pragma unroll 1
        for (;;) {
            const int slot = state & 1;
            const uint32_t at = base + T::tile_at + KeyRecord::bytes * slot;
            ptx::mbarrier_wait(base + T::tile_full + 8 * slot, state >> 1 & 1);
            const int visits = ptx::ld_shared_b32(at), j0 = ptx::ld_shared_b32(at + 44);
            if (visits < 0) break;
            mine.run(min(static_cast<int>(ptx::ld_shared_b32(at + 24)) - j0, T::block_k), visit, visits, state >> 2);
            if constexpr (!T::apart) ptx::bar_sync(3, 256);   // nobody reads dS any more
            const KeyRecord tile = KeyRecord::read(at);
            __syncwarp();
            mine.release(T::tile_empty + 8 * slot);
            const int64_t token = static_cast<int64_t>(tile.k_row) + tile.j0, batch = tile.batch;
            if (p.dv) mine.write_values((Config::dropout ? p.keep_scale : 1.f) * (Config::fault == scaled_dv ? 1.004f : 1.f), address<element>(p.dv) + batch * p.dv_b + token * p.dv_j + tile.head_kv * p.dv_h, p.dv_j, tile.count);
            if (p.dk) mine.write_keys(p.scale, address<element>(p.dk) + batch * p.dk_b + token * p.dk_j + tile.head_kv * p.dk_h, p.dk_j, tile.count);
            if constexpr (T::whole_heads)
                if (params.dq && tile.j0 + T::block_k >= tile.kv_len)
                    for (int head = 0; head < p.heads_q / p.heads_kv; ++head) mine.write_queries(tile.head_kv * (p.heads_q / p.heads_kv) + head, address<element>(params.dq) + batch * params.dq_b, params.dq_i, params.dq_h);
            if constexpr (!T::persistent) break;
            state = (state + 1 & 3) | (state & 4 ^ (tile.visits > 0 ? 4 : 0));
            if constexpr (T::divided) ptx::bar_sync(3, 256);   // all of the other's rows have left dS
            else ptx::bar_sync(1 + mine.group, 128);
        }
    }
}

}  // namespace attnlib
