// What the ways to compute that keep P rounded until dS is made of it share (backward_sm90_apart.cuh, backward_sm90_wide.cuh): S and
// dP take turns in the same registers.
#pragma once

#include "backward_sm90.cuh"

namespace attnlib {

template <class Config>
struct RoundedBackward : WarpgroupBackward<Config> {
    using Base = WarpgroupBackward<Config>;
    using T = WarpgroupBackwardTile<Config>;
    using Base::base, Base::s;

    __device__ __forceinline__ RoundedBackward(const BackwardParams& p, uint32_t base, int group, int lane) : Base(p, base, group, lane) {}

    // One of two elements of a word, as float32
    __device__ __forceinline__ static float part(uint32_t word, int half) {
        typename Config::element x;
        x.bits = static_cast<uint16_t>(half ? word >> 16 : word);
        return to_float(x);
    }
    // dS = P (dP - delta) in place of dP, of `count` tiles. probabilities(n, kept): P of tiles n and n + 1, rounded; asked for even n
    template <int first, int count, class Probabilities>
    __device__ __forceinline__ void differences_of(int visit, const Probabilities& probabilities) {
        const uint32_t deltas = this->statistics(visit, 1);
        float delta[4];
        uint32_t kept[4];
#pragma unroll
        for (int n = first; n < first + count; ++n) {
            this->take_statistics(deltas, n, delta);
            if (n % 2 == 0) probabilities(n, kept);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float minus = Config::fault == skip_delta ? 0.f : delta[n % 2 * 2 + (e & 1)];
                s[0][n][e] = part(kept[2 * (n & 1) + e / 2], e & 1) * (s[0][n][e] - minus);
            }
        }
    }
    // S of a step whose queries are there, or soon; else of anything. ptxas gives a product that starts at zero registers of its own:
    // whether S and dP do is not for it to know, so it keeps them in the same (visit < 0 is never so).
    __device__ __forceinline__ void issue_scores(int visit, bool there) {
        const int stage = visit % T::stages;
        const uint32_t q = base + T::q_at + stage * T::q_bytes;
        if (there) {
            ptx::mbarrier_wait(base + T::q_full + 8 * stage, visit / T::stages & 1);
            if constexpr (T::tails) this->clear_queries(q, T::panels, ptx::ld_shared_b32(this->record(visit) + 16));
        }
        this->template issue_transposed<T::steps>(s[0], base + T::k_at, q, visit < 0);
        ptx::wgmma_commit();
    }
    __device__ __forceinline__ void first_scores(int keys, int visit, int phase) {
        this->await_keys(keys, phase);
        issue_scores(visit, true);
        ptx::wgmma_wait<0>();
        ptx::pin(s[0]);
    }
};

}  // namespace attnlib
