// The wgmma backward with a fixed order of additions, head dims to 128: a third warpgroup computes dQ from the others' dS, waits
// until the tiles of keys before have added theirs, and adds it to memory. The others wait only if it is three steps behind.
//
// A block draws its next tile when it can begin with it. Tiles are drawn in the order in which they add, so a tile waits only for
// tiles that some block works on, and the first of those for none.
#pragma once

#include "backward_sm90_rounded.cuh"

namespace attnlib {

template <class Config>
struct QueryWarpgroup {
    using T = WarpgroupBackwardTile<Config>;
    static constexpr int C = T::piece_columns / 8;

    const uint32_t base;
    const int lane;
    float dq[C][4];

    __device__ __forceinline__ QueryWarpgroup(uint32_t base, int lane) : base(base), lane(lane) {}

    __device__ __forceinline__ static int warp() { return ptx::opaque_thread() / 32 % 4; }
    __device__ __forceinline__ void release(uint32_t barrier) const {
        if (lane == 0) ptx::mbarrier_arrive(base + barrier);
    }
    __device__ __forceinline__ uint32_t record(int visit) const { return base + T::record_at + T::record_bytes * (visit % T::records); }
    // One counter for each warp and tile of queries. The warp adds when that stands at the record's rank, and lets the next key tile add a
    // step later, when the additions have long arrived.
    __device__ __forceinline__ int* turn(int visit) const { return address<int>(ptx::ld_shared_b64(record(visit) + 8)) + warp(); }
    __device__ __forceinline__ void await_turn(int visit) const {
        if (lane == 0) {
            const int rank = ptx::ld_shared_b32(record(visit) + 28);
            while (ptx::ld_relaxed(turn(visit)) != rank) {}
            ptx::ld_acquire(turn(visit));
        }
        __syncwarp();
    }
    __device__ __forceinline__ void end_turn(int visit) const {
        if (lane == 0) ptx::red_release_add(turn(visit), 1);
    }

    // dQ = dS K of 64 queries, or of a panel's columns
    __device__ __forceinline__ void issue(uint32_t ds, int piece) {
        const ptx::PanelDescriptor<true> a(ds + (T::dq_rows == 2 ? 64 * piece * 128 : 0), 16), b(base + T::k_at + (T::dq_rows == 2 ? 0 : piece * T::KPanel::bytes), T::KPanel::bytes);
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < T::block_k / 16; ++step)
            ptx::Wgmma<T::piece_columns>::template ss<T::half, false, true>(dq, a.at(step / 4 * T::QPanel::bytes + step % 4 * 32), b.at(step * 2048), step > 0);
        ptx::wgmma_commit();
    }
    __device__ __forceinline__ void add(float* sum, int piece) {
        constexpr int all = (Config::head_dim + 7) / 8;   // columns in eights; what lies behind is padding
        float* to = sum + piece * (T::dq_floats / 2);
#pragma unroll
        for (int c = 0; c < C; ++c)
            if (T::dq_rows == 2 ? c < all : c < all - piece * C) ptx::red_add_f32x4(to + 128 * c, dq[c][0], dq[c][1], dq[c][2], dq[c][3]);
    }

    __device__ __forceinline__ void work() {
        int visit = 0;
#pragma unroll 1
        for (int passed = 0;; ++passed) {
            const int slot = passed % 2;
            ptx::mbarrier_wait(base + T::tile_full + 8 * slot, passed / 2 & 1);
            const int visits = ptx::ld_shared_b32(base + T::tile_at + KeyRecord::bytes * slot);
            if (visits < 0) break;
            __syncwarp();
            release(T::tile_empty + 8 * slot);
            const int end = visit + visits;
#pragma unroll 1
            for (; visit < end; ++visit) {
                const int place = visit % T::ds_buffers;
                ptx::mbarrier_wait(base + T::ds_full + 8 * place, visit / T::ds_buffers & 1);
                float* sum = address<float>(ptx::ld_shared_b64(record(visit))) + warp() * (T::dq_floats / 8) + 4 * lane;
#pragma unroll
                for (int piece = 0; piece < T::pieces; ++piece) {
                    issue(base + T::ds_at + place * T::ds_bytes, piece);
                    if (piece == 0) {
                        if (visit > end - visits) end_turn(visit - 1);
                        await_turn(visit);
                    }
                    ptx::wgmma_wait<0>();
                    ptx::pin(dq);
                    if (piece == T::pieces - 1) release(T::ds_empty + 8 * place);
                    add(sum, piece);
                }
                __syncwarp();   // all lanes' additions are before the release
            }
            if (visits > 0) {
                end_turn(visit - 1);
                release(T::keys_empty);
            }
        }
    }
};

// The others. The tensor cores' queue in a step j, and what runs beside it:
//     dK_{j-1} | P = exp(S - lse)     dP_j | -     dV_j | dS = P (dP - delta)     - | dS is stored     S_{j+1}
// P gives its registers to dS, as the operand of dK. dV is computed in halves of the queries: PTX lets nobody read P while it is an
// operand, so dS is made of the half that is not (ptxas makes most of it later: docs/kernels/sm90_backward.md).
template <class Config>
struct ApartBackward : RoundedBackward<Config> {
    using Base = RoundedBackward<Config>;
    using T = WarpgroupBackwardTile<Config>;
    using Base::a, Base::base, Base::dk, Base::dv, Base::s;
    using Base::record, Base::release, Base::buffer;

    __device__ __forceinline__ ApartBackward(const BackwardParams& p, uint32_t base, int group, int lane) : Base(p, base, group, lane) {}

    template <int half>
    __device__ __forceinline__ void differences(int visit) {
        this->template differences_of<half * Base::N / 2, Base::N / 2>(visit, [&](int n, uint32_t(&kept)[4]) {
#pragma unroll
            for (int i = 0; i < 4; ++i) kept[i] = a[n / 2][i];
        });
    }
    template <int half>
    __device__ __forceinline__ void issue_values(uint32_t o) {
        this->template issue_keys<T::columns_v, half * Base::query_steps / 2, Base::query_steps / 2>(dv[0], a, 0, o);
        ptx::wgmma_commit();
    }

    __device__ __forceinline__ void run(int keys, int& visit, int visits, int phase) {
        this->clear_sums();
        if (visits == 0) return;
        const int end = visit + visits;
        bool later = false;   // than the first
        this->first_scores(keys, visit, phase);
#pragma unroll 1
        for (; visit < end; ++visit, later = true) {
            const int stage = visit % T::stages, place = visit % T::ds_buffers, turned = visit / T::ds_buffers & 1;
            const uint32_t q = base + T::q_at + stage * T::q_bytes, o = base + T::o_at + stage * T::o_bytes;
            this->exponentials(visit, ptx::ld_shared_b32(record(visit) + 24));
            ptx::pin(s[0]);
            ptx::mbarrier_wait(base + T::o_full + 8 * stage, visit / T::stages & 1);   // here, and some of the exponentials stay before the next wait
            ptx::wgmma_wait<0>();   // dK of the step before
            if (later) release(T::q_empty + 8 * ((visit - 1) % T::stages));
            this->round(s[0], a);
            if constexpr (T::tails) this->clear_queries(o, T::panels_v, ptx::ld_shared_b32(record(visit) + 16));
            this->template issue_transposed<T::steps_v>(s[0], base + T::v_at, o, visit < 0);
            ptx::wgmma_commit();
            issue_values<0>(o);
            ptx::wgmma_wait<1>();   // dP
            ptx::pin(s[0]);
            differences<1>(visit);
            ptx::pin(s[0]);
            ptx::mbarrier_wait(base + T::ds_empty + 8 * place, turned ^ 1);   // the place of dS has no reader left
            ptx::wgmma_wait<0>();   // that half of dV
            issue_values<1>(o);
            differences<0>(visit);
            ptx::pin(s[0]);
            ptx::wgmma_wait<0>();   // dV
            release(T::o_empty + 8 * stage);
            this->round(s[0], a);
            this->store(a, buffer(place));
            this->issue_scores(visit + 1, visit + 1 < end);   // behind the last step: of anything, and not used
            ptx::fence_proxy_async();   // of dS
            __syncwarp();
            release(T::ds_full + 8 * place);
            this->template issue_keys<T::columns>(dk[0], a, 0, q);
            ptx::wgmma_commit();
            ptx::wgmma_wait<1>();   // the next S
            ptx::pin(s[0]);
        }
        ptx::wgmma_wait<0>();
        ptx::pin(dk[0]);
        ptx::pin(dv[0]);
        release(T::q_empty + 8 * ((visit - 1) % T::stages));
        release(T::keys_empty);
        // dK and dV leave through the place of dS, which dQ's warpgroup reads.
        ptx::mbarrier_wait(base + T::ds_empty + 8 * ((visit - 1) % T::ds_buffers), (visit - 1) / T::ds_buffers & 1);
    }
};

}  // namespace attnlib
