// The wgmma backward for 128 keys where dK and dV take most registers: head dims of 129 to 192, head_dim_v to 128.
//
// Both warpgroups own all 128 keys of dK and dV, and half of their columns each; of S and dP each computes 64 keys. P and dS pass
// through shared memory as [key][query]. P is kept rounded until dS is made of it. The tensor cores' queue in a step j, and what
// runs beside it:
//     dK_{j-1} | P = exp(S - lse), stored     dP_j | -     | dS = P (dP - delta), stored     dQ_j, dV_j | dQ_j is added to memory     S_{j+1}
//
// A warpgroup's 96 columns of 192 are a panel (0 or 2) and half of panel 1.
#pragma once

#include "backward_sm90_rounded.cuh"

namespace attnlib {

template <class Config>
struct WideBackward : RoundedBackward<Config> {
    using Base = RoundedBackward<Config>;
    using T = WarpgroupBackwardTile<Config>;
    using Base::base, Base::group, Base::lane, Base::p, Base::s;
    using Base::warp, Base::record, Base::release, Base::buffer, Base::sum_of;
    static constexpr int N = Base::N, fragments = Base::fragments;

    float dk_wide[2][8][4], dk_half[2][4][4], dv_wide[2][8][4];

    __device__ __forceinline__ WideBackward(const BackwardParams& p, uint32_t base, int group, int lane) : Base(p, base, group, lane) {}

    // [keys 64 m.., columns] += what lies at `stored` times the columns of queries at `columns`
    template <int width>
    __device__ __forceinline__ void issue_block(float (&to)[width / 8][4], uint32_t stored, uint32_t columns) {
        const ptx::PanelDescriptor<true> x(stored, 16), b(columns, 16);
#pragma unroll
        for (int step = 0; step < T::block_q / 16; ++step) ptx::Wgmma<width>::template ss<T::half, false, true>(to, x.at(step * 32), b.at(step * 2048), true);
    }
    template <int width>
    __device__ __forceinline__ void issue_dq(float (&to)[width / 8][4], uint32_t ds, uint32_t keys) {
        const ptx::PanelDescriptor<true> x(ds, 16), b(keys, 16);
#pragma unroll
        for (int step = 0; step < T::block_k / 16; ++step) ptx::Wgmma<width>::template ss<T::half, true, true>(to, x.at(step * 2048), b.at(step * 2048), step > 0);
    }
    __device__ __forceinline__ void issue_dk(int m, uint32_t ds, uint32_t q) {
        issue_block<64>(dk_wide[m], ds + 8192 * m, whole_panel(q, T::QPanel::bytes));
        issue_block<32>(dk_half[m], ds + 8192 * m, half_panel(q, T::QPanel::bytes));
        ptx::wgmma_commit();
    }
    __device__ __forceinline__ uint32_t whole_panel(uint32_t at, int bytes) const { return at + 2 * group * bytes; }
    __device__ __forceinline__ uint32_t half_panel(uint32_t at, int bytes) const { return at + bytes + 64 * group; }

    __device__ __forceinline__ uint32_t place(uint32_t tile, int step) const {   // of this lane's row of 16 keys x 16 queries
        return tile + (64 * group + 16 * warp() + (lane & 15)) * 128 + ((2 * step + (lane >> 4) ^ (lane & 7)) << 4);
    }
    // P or dS, rounded, as [key][query]
    __device__ __forceinline__ void store(uint32_t to) {
#pragma unroll
        for (int step = 0; step < fragments; ++step) {
            uint32_t x[4];
            Base::round_step(s[0], step, x);
            ptx::stmatrix_x4(place(to, step), x[0], x[1], x[2], x[3]);
        }
        __syncwarp();
    }
    __device__ __forceinline__ void differences(int visit, uint32_t ps) {   // P comes back from where this warp stored it
        this->template differences_of<0, N>(visit, [&](int n, uint32_t(&kept)[4]) { ptx::ldmatrix_x4(kept, place(ps, n / 2)); });
    }
    // dQ in fragment order: a panel, or half of one
    __device__ __forceinline__ float* sum_place(int visit) const { return address<float>(sum_of(visit)) + (ptx::opaque_thread() / 32 - 4) * (T::dq_floats / 8) + 4 * lane; }
    __device__ __forceinline__ void add_panel(int visit) {
        constexpr int all = (Config::head_dim + 7) / 8;   // columns in eights; what lies behind is padding
        float* to = sum_place(visit) + 512 * group;
#pragma unroll
        for (int c = 0; c < 8; ++c)
            if (all == 24 || c < all - 16 * group) ptx::red_add_f32x4(to + 128 * c, s[0][c][0], s[0][c][1], s[0][c][2], s[0][c][3]);
    }
    __device__ __forceinline__ void add_half(int visit) {
        float* to = sum_place(visit) + 1024 * (1 - group);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            if (group == 0) ptx::red_add_f32x4(to + 128 * c, s[0][c][0], s[0][c][1], s[0][c][2], s[0][c][3]);
            else ptx::red_add_f32x4(to + 128 * c, s[0][4 + c][0], s[0][4 + c][1], s[0][4 + c][2], s[0][4 + c][3]);
        }
    }
    template <int tiles>
    __device__ __forceinline__ static void clear_pinned(float (&x)[2][tiles][4]) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
            for (int c = 0; c < tiles; ++c)
#pragma unroll
                for (int e = 0; e < 4; ++e) x[m][c][e] = 0.f;
            ptx::pin(x[m]);
        }
    }

    __device__ __forceinline__ void run(int keys, int& visit, int visits, int phase) {
        clear_pinned(dk_wide);
        clear_pinned(dk_half);
        clear_pinned(dv_wide);
        if (visits == 0) return;
        const int end = visit + visits;
        bool later = false;
        this->first_scores(keys, visit, phase);
#pragma unroll 1
        for (; visit < end; ++visit, later = true) {
            const int stage = visit % T::stages;
            const uint32_t q = base + T::q_at + stage * T::q_bytes, o = base + T::o_at + stage * T::o_bytes;
            const uint32_t ps = buffer(visit & 1), ds = buffer(2 + (visit & 1));
            this->exponentials(visit, ptx::ld_shared_b32(record(visit) + 24));
            store(ps);
            ptx::wgmma_wait<0>();   // dK of the step before
            if (later) release(T::q_empty + 8 * ((visit - 1) % T::stages));
            ptx::mbarrier_wait(base + T::o_full + 8 * stage, visit / T::stages & 1);
            if constexpr (T::tails) this->clear_queries(o, T::panels_v, ptx::ld_shared_b32(record(visit) + 16));
            this->template issue_transposed<T::steps_v>(s[0], base + T::v_at, o, visit < 0);
            ptx::wgmma_commit();
            ptx::wgmma_wait<0>();
            ptx::pin(s[0]);
            differences(visit, ps);
            store(ds);
            ptx::fence_proxy_async();
            ptx::bar_sync(3, 256);   // all of P and dS is there, and nobody reads what the step before stored
            ptx::wgmma_fence();
            issue_dq<64>(s[0], ds, whole_panel(base + T::k_at, T::KPanel::bytes));
            ptx::wgmma_commit();
#pragma unroll
            for (int m = 0; m < 2; ++m) issue_block<64>(dv_wide[m], ps + 8192 * m, o + group * T::QPanel::bytes);
            ptx::wgmma_commit();
            ptx::wgmma_wait<1>();   // a panel of dQ
            ptx::pin(s[0]);
            add_panel(visit);
            ptx::wgmma_fence();
            issue_dq<64>(s[0], ds, base + T::k_at + T::KPanel::bytes);   // of which half is this warpgroup's
            ptx::wgmma_commit();
            issue_dk(0, ds, q);
            ptx::wgmma_wait<1>();   // the rest of dQ, and dV
            ptx::pin(s[0]);
            add_half(visit);
            this->issue_scores(visit + 1, visit + 1 < end);   // behind the last step: of anything, and not used
            issue_dk(1, ds, q);
            ptx::wgmma_wait<1>();   // the next S
            ptx::pin(s[0]);
            release(T::o_empty + 8 * stage);
        }
        ptx::wgmma_wait<0>();
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            ptx::pin(dk_wide[m]);
            ptx::pin(dk_half[m]);
            ptx::pin(dv_wide[m]);
        }
        release(T::q_empty + 8 * ((visit - 1) % T::stages));
        release(T::keys_empty);
    }

    __device__ __forceinline__ void write_values(float factor, typename Config::element* to, int64_t stride, int count) const {
#pragma unroll
        for (int m = 0; m < 2; ++m) this->template write_part<64, Config::head_dim_v>(dv_wide[m], factor, to, stride, count, 64 * m, 64 * group);
    }
    __device__ __forceinline__ void write_keys(float factor, typename Config::element* to, int64_t stride, int count) const {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            this->template write_part<64, Config::head_dim>(dk_wide[m], factor, to, stride, count, 64 * m, 128 * group);
            this->template write_part<32, Config::head_dim>(dk_half[m], factor, to, stride, count, 64 * m, 64 + 32 * group);
        }
    }
};

}  // namespace attnlib
