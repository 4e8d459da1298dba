// Attention backward with wgmma, for sm_90a: float16 and bfloat16, everything that masks by position.
//
//   P = exp(s - lse);  dP = dO V^T;  dS = P (dP - delta);  dV = P^T dO;  dK = scale dS^T Q;  dQ = scale dS K
//
// A block takes one tile after the other, of block_k keys of one key/value head, and walks the query tiles that see them, for every
// query head of the group. Of the loading warpgroup one thread draws the tiles and loads their keys and values, another loads the
// queries, also those of the next tile while the last is being finished; two warpgroups compute. In a fixed order of additions a
// block has one tile, but for backward_sm90_apart.cuh. S and dP are kept transposed (keys along the rows). dQ is added to a float32
// workspace in fragment order (gradient.cuh undoes it). Two ways to share the work; backward_sm90_apart.cuh and
// backward_sm90_wide.cuh have two more:
//
//   head dims to 128: 128 keys, 64 for each warpgroup. P and dS are the A operands of dV and dK as they are in registers; dS also
//   goes through shared memory, as [query][key], where dQ wants it from both. The tensor cores' queue in a step j, and
//   what runs beside it:
//     S_j, dP_j | P = exp(S - lse), dS = P (dP - delta), stored      dV_j, dQ_{j-1}, dK_j | dQ_{j-1} is added to memory
//   (dq_first: dQ_{j-1} before dV_j; late: dK_j ends when S_{j+1} is under way; held: P is there before dP is awaited)
//
//   split, larger head dims: 64 keys, whose dK and dV take all registers: each warpgroup owns half of their columns, and half of
//   the queries of S and dP. P and dS pass through shared memory, as [key][query].
//     S_j, dP_j | P = exp(S - lse), dS = P (dP - delta), stored      dQ_j, dV_j, dK_j | dQ_j is added to memory
//
//   shared memory: K | V | 2 x Q | 2 x dO | 3 x dS, or 2 x (P, dS) | 2 x row statistics | records | barriers
//   all tiles as panels of 64 columns: [panel][row][64], 128-byte rows, 128-byte swizzle; dK and dV leave through the place of dS
#pragma once

#include "backward_sm90_load.cuh"
#include "ptx/sums.cuh"
#include "ptx/wgmma.cuh"
#include "product.cuh"
#include "quad.cuh"

namespace attnlib {

template <class Config>
struct WarpgroupBackward {
    using T = WarpgroupBackwardTile<Config>;
    using atom = typename T::atom;
    using Descriptor = ptx::PanelDescriptor<!T::split>;   // split is slower with those made once
    static constexpr int N = T::N, key_steps = T::block_k / 16, query_steps = T::block_q / 16, fragments = T::queries / 16, CQ = T::dq_columns / 8;

    const BackwardParams& p;
    const uint32_t base;
    const int group, lane;   // warpgroup: keys 64 group.. of the tile
    const float scale;
    float dk[1][T::columns / 8][4], dv[1][T::columns_v / 8][4];
    float s[1][N][4], dp[N][4], dq[CQ][4];
    uint32_t a[fragments][4], d[fragments][4];   // P and dS, rounded
    uint32_t kept[(N + 7) / 8];   // dropout: bit 4 n + e of these is that of s[n][e]

    __device__ __forceinline__ WarpgroupBackward(const BackwardParams& p, uint32_t base, int group, int lane)
        : p(p), base(base), group(group), lane(lane), scale(p.scale * log2e * (Config::fault == scaled_scores ? 1.001f : 1.f)) {}
    __device__ __forceinline__ static int warp() { return ptx::opaque_thread() / 32 % 4; }

    __device__ __forceinline__ uint32_t record(int visit) const { return base + T::record_at + T::record_bytes * (visit % T::records); }
    __device__ __forceinline__ void release(uint32_t barrier) const {
        if (lane == 0) ptx::mbarrier_arrive(base + barrier);
    }

    // ---- products
    // [64 keys, queries] of this warpgroup's rows of K or V and of Q or dO; kept: added to what `to` holds
    template <int count>
    __device__ __forceinline__ void issue_transposed(float (&to)[N][4], uint32_t keys, uint32_t queries, bool kept = false) {
        (T::split ? queries : keys) += 128 * group * (T::split ? T::queries : T::keys);
        const Descriptor a(keys, 16), b(queries, 16);
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < count; ++step)
            ptx::Wgmma<T::queries>::template ss<T::half, false, false>(to, a.at(step / 4 * T::KPanel::bytes + step % 4 * 32), b.at(step / 4 * T::QPanel::bytes + step % 4 * 32), step > 0 || kept);
    }
    // [64 keys, columns] += P or dS (registers, or what lies at `stored`) times dO or Q
    template <int columns, int first = 0, int count = query_steps>
    __device__ __forceinline__ void issue_keys(float (&to)[columns / 8][4], const uint32_t (&x)[fragments][4], uint32_t stored, uint32_t queries) {
        if constexpr (T::split) queries += group * (columns / 64) * T::QPanel::bytes;
        const Descriptor a(stored, 16), b(queries, T::QPanel::bytes);
        ptx::wgmma_fence();
#pragma unroll
        for (int step = first; step < first + count; ++step) {
            if constexpr (T::split) ptx::Wgmma<columns>::template ss<T::half, false, true>(to, a.at(step * 32), b.at(step * 2048), true);
            else ptx::Wgmma<columns>::template rs<T::half, true>(to, x[step], b.at(step * 2048), true);
        }
    }
    __device__ __forceinline__ void issue_queries(uint32_t ds) {   // dQ
        const int row_part = T::dq_rows == 2 ? group : 0, column_part = T::dq_rows == 2 ? 0 : group;
        const int column0 = column_part * T::dq_columns;   // 32, too: half of a panel, whose swizzle goes by the address
        const uint32_t k = base + T::k_at + column0 / 64 * T::KPanel::bytes + column0 % 64 * 2;
        const Descriptor a(ds + 64 * row_part * 128, 16), b(k, T::KPanel::bytes);
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < key_steps; ++step) {
            const uint32_t from = T::split ? step * 2048 : step / 4 * T::QPanel::bytes + step % 4 * 32;
            ptx::Wgmma<T::dq_columns>::template ss<T::half, T::split, true>(dq, a.at(from), b.at(step * 2048), step > 0);
        }
    }
    __device__ __forceinline__ float left(float x, int n, int e) const { return !Config::dropout || (kept[n / 8] >> (4 * (n & 7) + e) & 1) ? x : 0.f; }
    // A call of Philox serves 32 keys, of which a warp has 16: each draws half of the queries for itself and its neighbour.
    __device__ __forceinline__ void draw(int visit) {
        if constexpr (Config::dropout) {
            constexpr int mine = fragments / 2;
            const uint64_t seed = __shfl_sync(0xFFFFFFFFu, ptx::ld_shared_b64(base + T::drawn_at), 0);   // the same in all lanes, to the compiler, too
            const int sequence = ptx::ld_shared_b32(record(visit) + 40), head = Config::fault == dropout_ignores_head ? 0 : ptx::ld_shared_b32(record(visit) + 32);
            const bool odd = warp() & 1;
            const uint32_t i = ptx::ld_shared_b32(record(visit) + 36) + (T::split ? T::queries * group : 0) + (odd ? 16 * mine : 0), j = ptx::ld_shared_b32(record(visit) + 48) + (T::split ? 0 : 64 * group) + 16 * (warp() & 2) + (lane >> 2);
            const PhiloxColumn column = philox_column(seed, DropoutWords<Config, false, 1, 4>::key_group(j), head, sequence, WideProduct{});
            const uint32_t above = dropout_above(p.dropout_threshold);
            uint32_t bits[2] = {0, 0};   // of the even and of the odd warp
#pragma unroll
            for (int m = 0; m < mine; ++m)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const PhiloxRow row = philox_row(seed, i / 2 + 8 * m + 2 * (lane & 3) + e, head, WideProduct{});
                    const PhiloxWords words = philox_finish(seed, row, column, WideProduct{});
#pragma unroll
                    for (int k = 0; k < 4; ++k)
                        bits[k / 2] |= (static_cast<uint32_t>(words.word[k] << 16 > above) | static_cast<uint32_t>(words.word[k] > above) << 4) << (8 * m + 2 * (k & 1) + e);
                }
            const uint32_t at = base + T::exchange_at + visit % T::exchanges * T::exchange_bytes + 128 * (4 * group) + 4 * lane;
            ptx::st_shared_b32(at + 128 * warp(), odd ? bits[0] : bits[1]);
            ptx::bar_sync(6 + 2 * group + warp() / 2, 64);
            const uint32_t own = odd ? bits[1] : bits[0], other = ptx::ld_shared_b32(at + 128 * (warp() ^ 1)), first = odd ? other : own, second = odd ? own : other;
            if constexpr (mine == 4) {
                kept[0] = first;
                kept[1] = second;
            } else kept[0] = first | second << (8 * mine);
            if constexpr (T::keeps) ptx::st_shared_v2(kept_place(), kept[0], kept[(N + 7) / 8 - 1]);
            else
#pragma unroll
                for (uint32_t& word : kept) ptx::pin(word);
        }
    }
    // Bits drawn a step ahead wait in shared memory: there are no registers for them.
    __device__ __forceinline__ uint32_t kept_place() const { return base + T::kept_at + 8 * (ptx::opaque_thread() - 128); }
    __device__ __forceinline__ void take_kept() {
        if constexpr (T::keeps) {
            const uint64_t both = ptx::ld_shared_b64(kept_place());
            kept[0] = static_cast<uint32_t>(both);
            kept[(N + 7) / 8 - 1] = static_cast<uint32_t>(both >> 32);
        }
    }
    __device__ __forceinline__ void draw_ahead(int visit) {   // of the step to come, beside products that need few registers
        if constexpr (Config::dropout) {
            ptx::mbarrier_wait(base + T::q_full + 8 * (visit % T::stages), visit / T::stages & 1);
            draw(visit);
        }
    }
    __device__ __forceinline__ static void round_step(const float (&x)[N][4], int step, uint32_t (&to)[4]) {
        const typename atom::A fragment = atom::from_accumulators(x, step);
#pragma unroll
        for (int i = 0; i < 4; ++i) to[i] = fragment.hi[i];
    }
    __device__ __forceinline__ void round_kept(const float (&x)[N][4], int step, uint32_t (&to)[4]) const {
        float y[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) y[i][e] = left(x[2 * step + i][e], 2 * step + i, e);
        const typename atom::A fragment = atom::from_accumulators(y, 0);
#pragma unroll
        for (int i = 0; i < 4; ++i) to[i] = fragment.hi[i];
    }
    // P as the operand of dV; with a softcap that was done when P was there.
    __device__ __forceinline__ void round_probabilities() {
        take_kept();   // anew, so that P without what is dropped does not lie beside P
        if constexpr (!Config::softcap)
#pragma unroll
            for (int step = 0; step < fragments; ++step) round_kept(s[0], step, a[step]);
        pin_fragments(a);
    }
    __device__ __forceinline__ void round(const float (&x)[N][4], uint32_t (&to)[fragments][4]) {
#pragma unroll
        for (int step = 0; step < fragments; ++step) round_step(x, step, to[step]);
        pin_fragments(to);
    }
    __device__ __forceinline__ static void pin_fragments(uint32_t (&to)[fragments][4]) {
#pragma unroll
        for (int step = 0; step < fragments; ++step)
#pragma unroll
            for (int i = 0; i < 4; ++i) ptx::pin(to[step][i]);
    }
    __device__ __forceinline__ uint32_t buffer(int index) const { return base + T::ds_at + index * T::ds_bytes; }
    // P or dS for everyone: [key][query] (split), or dS as [query][key]
    __device__ __forceinline__ void store(const uint32_t (&x)[fragments][4], uint32_t to) const {
        if constexpr (T::split) {
            const int row = 16 * warp() + (lane & 15), chunk = T::queries / 8 * group + (lane >> 4);
#pragma unroll
            for (int step = 0; step < fragments; ++step) ptx::stmatrix_x4(to + row * 128 + ((chunk + 2 * step ^ (lane & 7)) << 4), x[step][0], x[step][1], x[step][2], x[step][3]);
        } else {
            const int row = (lane & 7) + 8 * (lane >> 4), chunk = 2 * warp() + (lane >> 3 & 1);
            to += group * T::QPanel::bytes + row * 128 + ((chunk ^ (lane & 7)) << 4);
#pragma unroll
            for (int step = 0; step < fragments; ++step) ptx::stmatrix_x4_trans(to + step * 2048, x[step][0], x[step][1], x[step][2], x[step][3]);
        }
    }

    // Deterministic: a warp adds its part of a query tile's dQ when the tile's counter stands at the record's rank, and lets the
    // next key tile add a step later, when the additions have long arrived. One lane looks and releases for the warp.
    __device__ __forceinline__ int* turn(int visit) const { return address<int>(ptx::ld_shared_b64(record(visit) + 8)) + ptx::opaque_thread() / 32 - 4; }
    __device__ __forceinline__ void end_turn(int visit) const {
        if constexpr (Config::deterministic)
            if (visit >= 0 && lane == 0) ptx::red_release_add(turn(visit), 1);   // ordered after the other lanes' by __syncwarp in add_queries
    }
    __device__ __forceinline__ void add_queries(int visit, uint64_t to) {
        float* sum = address<float>(to) + (ptx::opaque_thread() / 32 - 4) * (T::dq_floats / 8) + 4 * lane;
        // The rest is padding. Unless split, the number is known at run time only, for the sake of the branches: additions with some between
        // them leave the other warpgroup's products more room than additions in a row.
        constexpr int all = (Config::head_dim + 7) / 8;
        const int valid = T::split && all == 2 * CQ ? CQ : T::dq_rows == 2 ? all + (group >> 31) : all - group * CQ;
        if constexpr (Config::deterministic) {
            if (lane == 0) {
                const int rank = ptx::ld_shared_b32(record(visit) + 28);
                while (ptx::ld_relaxed(turn(visit)) != rank) {}
                ptx::ld_acquire(turn(visit));
            }
            __syncwarp();
        }
        const int alone = T::whole_heads ? ptx::ld_shared_b32(record(visit) + 28) : 0;
        if (alone == 1) {
#pragma unroll
            for (int c = 0; c < CQ; ++c) ptx::st_kept_f32x4(sum + 128 * c, dq[c][0], dq[c][1], dq[c][2], dq[c][3]);
        } else if (alone) {
#pragma unroll
            for (int c = 0; c < CQ; ++c)
                if (c < valid) ptx::red_add_kept_f32x4(sum + 128 * c, dq[c][0], dq[c][1], dq[c][2], dq[c][3]);
        } else {
#pragma unroll
            for (int c = 0; c < CQ; ++c)
                if (c < valid) ptx::red_add_f32x4(sum + 128 * c, dq[c][0], dq[c][1], dq[c][2], dq[c][3]);
        }
        if constexpr (Config::deterministic) __syncwarp();
    }
    __device__ __forceinline__ uint64_t sum_of(int visit) const { return ptx::ld_shared_b64(record(visit)); }

    // Rows from `valid` on may be another sequence's or anything: 0 times NaN is not 0.
    template <class Panel>
    __device__ __forceinline__ void clear_rows(uint32_t at, int panels, int valid) const {
        const int count = 8 * (Panel::rows - valid), thread = ptx::opaque_thread() & 127;
        for (int index = thread; index < panels * count; index += 128) {
            const int panel = index / count, rest = index - panel * count;
            ptx::st_shared_v4(at + panel * Panel::bytes + valid * 128 + rest * 16, make_uint4(0, 0, 0, 0));
        }
        ptx::fence_proxy_async();
        ptx::bar_sync(1 + group, 128);
    }
    __device__ __forceinline__ void clear_queries(uint32_t at, int panels, int count) const {
        if constexpr (T::tails)
            if (count < T::block_q) clear_rows<typename T::QPanel>(at, panels, count);
    }

    // The warpgroups take turns with dV, dQ, dK and the next S and dP, so that one has products while the other has none.
    __device__ __forceinline__ void end_products() const {
        if constexpr (Config::order) ptx::bar_arrive(5 - group, 256);
    }

    __device__ __forceinline__ void await_keys(int keys, int phase) const {
        ptx::mbarrier_wait(base + T::keys_full, phase);
        if (T::tails && keys < T::block_k) {
            clear_rows<typename T::KPanel>(base + T::k_at, T::panels, keys);
            clear_rows<typename T::KPanel>(base + T::v_at, T::panels_v, keys);
        }
    }

    // P = exp(S - lse). With a softcap also rounded P, and P then becomes P times the derivative of the cap.
    __device__ __forceinline__ uint32_t statistics(int visit, int member) const {
        return base + T::rows_at + visit % T::stages * T::rows_bytes + 4 * T::block_q * member + (T::split ? 4 * T::queries * group : 0) + 16 * (lane & 3);
    }
    __device__ __forceinline__ void take_statistics(uint32_t at, int n, float (&x)[4]) const {   // of tiles n and n + 1
        if (n % 2) return;
        const uint4 four = ptx::ld_shared_v4(at + 32 * n);
        x[0] = __uint_as_float(four.x);
        x[1] = __uint_as_float(four.y);
        x[2] = __uint_as_float(four.z);
        x[3] = __uint_as_float(four.w);
    }
    __device__ __forceinline__ void exponentials(int visit, bool edge) {
        const int column0 = T::split ? T::queries * group : 0;
        if constexpr (Config::softcap) {
            const float within = p.scale / p.softcap * (Config::fault == scaled_scores ? 1.001f : 1.f);
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) s[0][n][e] = tanh_exact(s[0][n][e] * within);
        }
        if (edge)
            Edges<Config>(p, ptx::ld_shared_b32(record(visit) + 20), ptx::ld_shared_b32(record(visit) + 16), ptx::ld_shared_b32(record(visit) + 52)).hide_transposed(s, static_cast<int>(ptx::ld_shared_b32(record(visit) + 48)) + (T::split ? 0 : 64 * group) + 16 * warp(), column0, lane);
        const float factor = Config::softcap ? p.softcap * log2e : scale;
        const uint32_t shifts = statistics(visit, 0);
        float shift[4];
#pragma unroll
        for (int n = 0; n < N; ++n) {
            float slope[4];
            take_statistics(shifts, n, shift);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                slope[e] = fmaxf(fmaf(-s[0][n][e], s[0][n][e], 1.f), 0.f);   // hidden: 0
                s[0][n][e] = ptx::ex2_approx(fmaf(s[0][n][e], factor, -shift[n % 2 * 2 + (e & 1)]));
            }
            if constexpr (Config::softcap) {
                float y[4];
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    y[e] = left(s[0][n][e], n, e);
                    s[0][n][e] *= slope[e];
                }
                a[n / 2][2 * (n & 1)] = pack<Config>(y[0], y[1]);
                a[n / 2][2 * (n & 1) + 1] = pack<Config>(y[2], y[3]);
                ptx::pin(a[n / 2][2 * (n & 1)]);
                ptx::pin(a[n / 2][2 * (n & 1) + 1]);
            }
        }
    }
    __device__ __forceinline__ void differences(int visit) {   // dS = P (dP - delta), in place of dP
        const uint32_t deltas = statistics(visit, 1);
        float delta[4];
#pragma unroll
        for (int n = 0; n < N; ++n) {
            take_statistics(deltas, n, delta);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float minus = Config::fault == skip_delta ? 0.f : delta[n % 2 * 2 + (e & 1)];
                dp[n][e] = s[0][n][e] * (Config::dropout ? fmaf(left(dp[n][e], n, e), p.keep_scale, -minus) : dp[n][e] - minus);
            }
        }
    }

    // P is there before dP is waited for. ptxas puts exponentials behind a wait that does not need them: a branch that does holds them.
    __device__ __forceinline__ void hold_exponentials(uint32_t barrier, int phase) {
        ptx::pin(s[0]);
        uint32_t any = 0;
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) any |= __float_as_uint(s[0][n][e]);
        if (any == 0x80000000u) ptx::mbarrier_wait(barrier, phase);   // passed long ago
    }
    __device__ __forceinline__ void await_differences(int visit) const {   // dS of a step, from both
        ptx::mbarrier_wait(base + T::ds_full + 8 * (visit % 3), visit / 3 & 1);
    }

    __device__ __forceinline__ void clear_sums() {
        clear(dk);
        clear(dv);
        ptx::pin(dk[0]);
        ptx::pin(dv[0]);
    }
    // keys: of the tile, that there are; visits: query tiles to come, from number `visit` on; phase: of the barrier that K and V are there.
    __device__ __forceinline__ void run(int keys, int& visit, int visits, int phase) {
        clear_sums();
        if (visits == 0) return;
        const int end = visit + visits;
        bool later = false;   // than the first
        await_keys(keys, phase);
        if constexpr (!T::split) draw_ahead(visit);
#pragma unroll 1
        for (; visit < end; ++visit, later = true) {
            const int stage = visit % T::stages, turned = visit / T::stages & 1;
            const uint32_t q = base + T::q_at + stage * T::q_bytes, o = base + T::o_at + stage * T::o_bytes;
            ptx::mbarrier_wait(base + T::q_full + 8 * stage, turned);
            const int count = T::tails ? ptx::ld_shared_b32(record(visit) + 16) : T::block_q;
            clear_queries(q, T::panels, count);
            issue_transposed<T::steps>(s[0], base + T::k_at, q);
            ptx::wgmma_commit();
            if constexpr (T::late) {
                ptx::wgmma_wait<1>();   // dK of the step before
                if (later) release(T::q_empty + 8 * ((visit - 1) % T::stages));
            }
            ptx::mbarrier_wait(base + T::o_full + 8 * stage, turned);
            clear_queries(o, T::panels_v, count);
            issue_transposed<T::steps_v>(dp, base + T::v_at, o);
            ptx::wgmma_commit();
            if (group == 1 || later) end_products();
            if constexpr (T::split) draw(visit);
            const bool edge = ptx::ld_shared_b32(record(visit) + 24);
            ptx::wgmma_wait<1>();   // S; split: and dK of the step before
            ptx::pin(s[0]);
            if constexpr (T::split)
                if (later) {
                    release(T::q_empty + 8 * ((visit - 1) % T::stages));
                    release(T::o_empty + 8 * ((visit - 1) % T::stages));
                }

            if constexpr (Config::softcap) take_kept();
            exponentials(visit, edge);
            end_turn(visit - (T::split ? 1 : 2));
            if constexpr (T::split) {
                round_probabilities();
                store(a, buffer(visit & 1));
            } else {
                if constexpr (Config::held) hold_exponentials(base + T::o_full + 8 * stage, turned);
                else ptx::pin(s[0]);
                if (!Config::dropout && later) await_differences(visit - 1);   // here, and some of the exponentials stay before it
            }
            ptx::wgmma_wait<0>();   // dP
            ptx::pin(dp);
            take_kept();
            differences(visit);
            round(dp, d);
            if constexpr (T::split) {
                store(d, buffer(2 + (visit & 1)));
                ptx::fence_proxy_async();
                ptx::bar_sync(3, 256);   // all of P and dS is there, and nobody reads what the step before stored
                issue_queries(buffer(2 + (visit & 1)));
                ptx::wgmma_commit();
                issue_keys<T::columns_v>(dv[0], a, buffer(visit & 1), o);
                issue_keys<T::columns>(dk[0], d, buffer(2 + (visit & 1)), q);
                ptx::wgmma_commit();
                const uint64_t sum = sum_of(visit);
                ptx::wgmma_wait<1>();   // dQ
                ptx::pin(dq);
                add_queries(visit, sum);
            } else {
                // The other's dS of the step before: it is there, so buffer visit % 3 has no reader left.
                if (Config::dropout && later) await_differences(visit - 1);
                if constexpr (Config::dq_first) {
                    if constexpr (Config::order) ptx::bar_sync(4 + group, 256);
                    issue_queries(buffer((visit + 2) % 3));   // in the first step of what was never stored, and not added
                    ptx::wgmma_commit();
                }
                store(d, buffer(visit % 3));
                round_probabilities();
                if constexpr (Config::order && !Config::dq_first) ptx::bar_sync(4 + group, 256);
                issue_keys<T::columns_v>(dv[0], a, 0, o);
                ptx::wgmma_commit();
                ptx::fence_proxy_async();   // of dS, beside dV
                __syncwarp();
                release(T::ds_full + 8 * (visit % 3));
                if constexpr (!Config::dq_first) {
                    issue_queries(buffer((visit + 2) % 3));
                    ptx::wgmma_commit();
                }
                issue_keys<T::columns>(dk[0], d, 0, q);
                ptx::wgmma_commit();
                if (visit + 1 < end) draw_ahead(visit + 1);
                const uint64_t sum = sum_of(visit - 1 & 0x7FFFFFFF);
                ptx::wgmma_wait<Config::dq_first ? 2 : 1>();   // dQ, and dV unless that comes later
                ptx::pin(dq);
                if constexpr (!Config::dq_first) release(T::o_empty + 8 * stage);
                if (later) add_queries(visit - 1, sum);
                if constexpr (Config::dq_first) {
                    ptx::wgmma_wait<1>();   // dV
                    release(T::o_empty + 8 * stage);
                }
                if constexpr (!T::late) {
                    ptx::wgmma_wait<0>();   // dK: its operand's registers are wanted, and the next queries its place
                    release(T::q_empty + 8 * stage);
                }
            }
        }
        if (group == 0) end_products();
        ptx::wgmma_wait<0>();
        ptx::pin(dk[0]);
        ptx::pin(dv[0]);
        if constexpr (T::split || T::late) release(T::q_empty + 8 * ((visit - 1) % T::stages));
        if constexpr (T::split) {
            release(T::o_empty + 8 * ((visit - 1) % T::stages));
            end_turn(visit - 1);
        } else {
            await_differences(visit - 1);
            issue_queries(buffer((visit - 1) % 3));
            ptx::wgmma_commit();
            end_turn(visit - 2);
            const uint64_t sum = sum_of(visit - 1);
            ptx::wgmma_wait<0>();
            ptx::pin(dq);
            add_queries(visit - 1, sum);
            end_turn(visit - 1);
        }
        release(T::keys_empty);
    }

    // This warp's 16 rows of dK or dV to global memory, through the place of dS in shared memory, of which a warpgroup has its part.
    // key: of the warpgroup's first row; first: column of x's first.
    template <int columns, int dim>
    __device__ __forceinline__ void write_part(const float (&x)[columns / 8][4], float factor, typename Config::element* to, int64_t stride, int count, int key, int first) const {
        const int row0 = key + 16 * warp();
        const uint32_t rows = base + T::ds_at + group * (T::divided ? 2 * T::ds_bytes : T::QPanel::bytes) + 16 * warp() * 128, mine = rows + (lane & 15) * 128;
        __syncwarp();
#pragma unroll
        for (int c = 0; c < columns / 8; c += 2) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) words[i] = pack<Config>(x[c + i / 2][2 * (i & 1)] * factor, x[c + i / 2][2 * (i & 1) + 1] * factor);
            ptx::stmatrix_x4(mine + c / 8 * T::ds_bytes + (((c & 7) + (lane >> 4) ^ (lane & 7)) << 4), words[0], words[1], words[2], words[3]);
        }
        __syncwarp();
        constexpr int chunks = (T::divided ? columns : dim) / 8;
#pragma unroll 4
        for (int index = lane; index < 16 * chunks; index += 32) {
            const int local = index / chunks, chunk = index % chunks, row = row0 + local;
            if (row >= count || first + 8 * chunk >= dim) continue;
            ptx::st_global_v4(to + row * stride + first + 8 * chunk, ptx::ld_shared_v4(rows + local * 128 + chunk / 8 * T::ds_bytes + (((chunk & 7) ^ (local & 7)) << 4)));
        }
    }
    __device__ __forceinline__ void write_values(float factor, typename Config::element* to, int64_t stride, int count) const {
        write_part<T::columns_v, Config::head_dim_v>(dv[0], factor, to, stride, count, T::split ? 0 : 64 * group, T::split ? T::columns_v * group : 0);
    }
    __device__ __forceinline__ void write_keys(float factor, typename Config::element* to, int64_t stride, int count) const {
        write_part<T::columns, Config::head_dim>(dk[0], factor, to, stride, count, T::split ? 0 : 64 * group, T::split ? T::columns * group : 0);
    }
    // Whole heads: dQ of a query head from the sums, of which every thread takes those to which it added.
    __device__ __forceinline__ void write_queries(int head, typename Config::element* to, int64_t stride, int64_t head_stride) const {
        constexpr int warps = 4 * T::dq_rows;   // over the rows of a tile
        const int thread = ptx::opaque_thread() - 128;
        const float* sum = address<const float>(p.dq_sum) + whole_head_place(p, head) * T::dq_floats + thread / 32 * (T::dq_floats / 8) + 4 * lane;
        const int row0 = 16 * (thread / 32 % warps) + lane / 4, column0 = thread / 32 / warps * 8 * CQ + 8 * (lane & 3);
        to += head * head_stride;
        constexpr int together = 32 / CQ;   // tiles whose loads are under way
#pragma unroll 1
        for (int tile0 = 0; tile0 < p.tiles; tile0 += together) {
            float x[together][CQ][4];
#pragma unroll
            for (int u = 0; u < together; ++u)
#pragma unroll
                for (int c = 0; c < CQ; ++c) ptx::ld_f32x4(sum + min(tile0 + u, p.tiles - 1) * T::dq_floats + 128 * c, x[u][c]);
#pragma unroll
            for (int u = 0; u < together; ++u)
#pragma unroll
                for (int c = 0; c < CQ; c += 4)
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        uint32_t word[4];
#pragma unroll
                        for (int t = 0; t < 4; ++t) word[t] = pack<Config>(x[u][c + t][2 * r] * p.scale, x[u][c + t][2 * r + 1] * p.scale);
                        exchange_quad(word, lane);
                        const int row = T::block_q * (tile0 + u) + row0 + 8 * r, column = column0 + 8 * c;
                        if (row < p.seqlen_q && column < Config::head_dim) ptx::st_global_v4(to + row * stride + column, make_uint4(word[0], word[1], word[2], word[3]));
                    }
        }
    }
};

}  // namespace attnlib
