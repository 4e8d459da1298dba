// Attention backward with mma.sync by recomputation, for sm_75, sm_80 and every later architecture.
//
//   P = exp(s - m) / l;  dP = dO V^T;  dS = P (keep dP - delta);  dV = P^T dO;  dK = scale dS^T Q;  dQ = scale dS K
//
// A block owns block_k keys of one key/value head and walks the query tiles that see them, for every query head of the
// group. All is kept transposed (keys along the rows), so P and dS leave the tensor cores in the layout in which dV and
// dK want them. warps_k x warps_q warps: a warp computes [16 m_tiles keys, block_q / warps_q queries] of S and dP and
// accumulates [16 m_tiles keys, head_dim / warps_q] of dK and dV. With warps_q = 1 P and dS stay in registers on that
// way; dS always goes through shared memory for dQ. dQ is added to a float32 workspace laid out in fragment order, so
// that a warp's additions are contiguous; gradient.cuh undoes it.
//
//   shared memory: K [block_k][head_dim] | V [block_k][head_dim_v] | stages x (Q [block_q][head_dim], row statistics)
//                  | o_stages x dO [block_q][head_dim_v]
//                  | 2 x dS [block_k][block_q] | P the same (warps_q > 1) | dQ on its way | what only the loads need
//
// One block-wide barrier a step: dQ of a step is computed in the next one, when everyone's dS is there, and hides that
// step's exponentials; P and dS for dV and dK pass between the warps_q warps of the same keys alone.
//
// Row statistics come from gradient.cuh, padded to whole tiles: (lse * log2 e, delta), (m, log2 l, delta, 0) with a bias, or
// (lse, 0, delta, 0) in split float32; rows that are no queries or see nothing have +inf in front, which makes P zero.
// deterministic: blocks take a ticket and add to a query tile in a fixed order.
#pragma once

#include "backward_tile.cuh"
#include "work.cuh"

namespace attnlib {

template <class Config>
__device__ __forceinline__ void kernel(const BackwardParams& p) {
    using T = BackwardTile<Config>;
    using atom = typename T::atom;
    using element = typename Config::element;
    constexpr int M = T::M, N = T::N, block_q = T::block_q, block_k = T::block_k, threads = T::threads;
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t base = ptx::shared_address(shared);
    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    const int warp_k = warp / T::warps_q, warp_q = warp % T::warps_q;
    const int row0 = warp_k * 16 * M, column0 = warp_q * 8 * N;   // this warp's part of S

    // ---- which keys, and which queries
    int block = blockIdx.x;
    if constexpr (Config::deterministic) {
        if (thread == 0) ptx::st_shared_b32(base + T::parked, atomicAdd(address<int>(p.ticket), 1));
        __syncthreads();
        block = ptx::ld_shared_b32(base + T::parked);
        __syncthreads();
    }
    const KeyWork<Config, block_q, block_k> work(p, block);
    if (work.idle) return;
    const Sequence& seq = work.seq;
    const Window& window = work.window;
    const int b = work.b, head_kv = work.head_kv, group = work.group, tile = work.tile, j0 = work.j0, j1 = work.j1;
    const int first = work.first, last = work.last, per_head = work.per_head, total = per_head * group, start = work.start;
    const int64_t tile0 = first_tile<Config>(p, b, block_q);

    // Heads and query tiles in order. A block mask leaves some of them out; where additions take turns
    // their keys are hidden instead.
    constexpr bool sparse = Config::block_mask && !Config::deterministic, blank = Config::block_mask && !sparse && !Config::partial_blocks;
    struct Place { int head, tile, left; bool partial; };
    const auto advance = [&](Place& at) {
        if (++at.tile == last) at.tile = first;
        if (--at.left == 0) {
            at.left = per_head;
            at.tile = start;
            at.head += Config::fault == head_mod ? p.heads_kv : 1;
        }
    };
    uint32_t live = 0, whole = 0;   // of the 32 query tiles around a place: those that the mask leaves, and leaves whole
    // The first place from `at` on that the mask leaves; `count` counts all of them, and is `total` at the end. Called for every place.
    const auto find_live = [&](Place& at, int& count) {
        if constexpr (Config::block_mask) {
            for (; count < total; ++count, advance(at)) {
                if ((at.tile & 31) == 0 || at.tile == first || at.left == per_head) {
                    const int i = ((at.tile & ~31) + lane) * block_q;
                    const int state = BlockMask<Config>(p, seq, at.head).state(i, min(i + block_q, seq.q_len), j0, j1);
                    live = __ballot_sync(0xFFFFFFFFu, state >= 0);
                    if (!sparse || Config::partial_blocks) whole = __ballot_sync(0xFFFFFFFFu, state == 1);
                }
                if (!sparse || Config::partial_blocks) at.partial = !(whole >> (at.tile & 31) & 1);
                if (!sparse || live >> (at.tile & 31) & 1) break;
            }
        }
    };

    // What only the loads and dQ need waits in shared memory, not in registers.
    if (lane == 0) ptx::st_shared_b64(base + T::held_at + 8 * warp, 0);
    if (thread == 0) {
        ptx::st_shared_b64(base + T::parked, p.q + sizeof(element) * ((Config::packed ? 0 : b * p.q_b) + seq.q_row * p.q_i));
        ptx::st_shared_b64(base + T::parked + 8, p.dout + sizeof(element) * ((Config::packed ? 0 : b * p.do_b) + seq.q_row * p.do_i));
        ptx::st_shared_b64(base + T::parked + 16, p.rows + 4 * tile0 * (block_q * T::row_floats));
        ptx::st_shared_b64(base + T::parked + 24, p.dq_sum + 4 * tile0 * T::dq_floats);
        ptx::st_shared_v2(base + T::parked + 32, seq.q_len, static_cast<int>(window.offset));
        ptx::st_shared_v2(base + T::parked + 40, seq.kv_len, dropout_above(p.dropout_threshold));
        if (Config::dropout) ptx::st_shared_b64(base + T::parked + 48, static_cast<uint64_t>(*address<const int64_t>(p.seed)));
        ptx::st_shared_v2(base + T::parked + 56, work.round, work.key_tiles);
    }
    __syncthreads();
    const auto load_queries = [&](const Place& at, int stage) {   // Q and the row statistics
        const int thread = ptx::opaque_thread(), q_len = ptx::ld_shared_b32(base + T::parked + 32);
        const uint32_t to = base + T::q_at + stage * T::stage_bytes;
        const auto* q = address<const element>(ptx::ld_shared_b64(base + T::parked)) + at.head * p.q_h;
        load_tile<Config, typename T::QTile, threads, Config::head_dim>(to, Rows<Config>{q, p.q_i}, at.tile * block_q, 0, q_len, thread);
        const auto* rows = address<const float>(ptx::ld_shared_b64(base + T::parked + 16)) + (at.head * p.row_tiles + at.tile) * (block_q * T::row_floats);
        static_assert(T::row_bytes / 16 <= threads, "one chunk a thread");
        if (thread < T::row_bytes / 16) {
            if constexpr (Config::arch >= 80) ptx::cp_async_16(to + T::rows_at + 16 * thread, rows + 4 * thread);
            else ptx::st_shared_v4(to + T::rows_at + 16 * thread, reinterpret_cast<const uint4*>(rows)[thread]);
        }
    };
    const auto load_gradients = [&](const Place& at, int stage) {   // dO
        const int thread = ptx::opaque_thread(), q_len = ptx::ld_shared_b32(base + T::parked + 32);
        const auto* dout = address<const element>(ptx::ld_shared_b64(base + T::parked + 8)) + at.head * p.do_h;
        load_tile<Config, typename T::OTile, threads, Config::head_dim_v>(base + T::o_at + stage * T::OTile::bytes, Rows<Config>{dout, p.do_i}, at.tile * block_q, 0, q_len, thread);
    };
    const auto load_ahead = [&](const Place& at, int stage) {
        load_queries(at, stage);
        if constexpr (!T::late) load_gradients(at, stage);
    };

    // ---- prologue
    float dk[M][T::CK][4], dv[M][T::CV][4];   // [keys, head_dim / warps_q]
    clear(dk);
    clear(dv);
    Place current{Config::fault == head_mod ? head_kv : head_kv * group, start, per_head, Config::block_mask};
    int passed = 0;
    find_live(current, passed);
    const bool any = passed < total;
    if (any) {
        const element* k = address<const element>(p.k) + (Config::packed ? 0 : b * p.k_b) + seq.k_row * p.k_j + head_kv * p.k_h;
        const element* v = address<const element>(p.v) + (Config::packed ? 0 : b * p.v_b) + seq.k_row * p.v_j + head_kv * p.v_h;
        const int low = Config::left ? clamp(window.key_begin(0), 0, seq.kv_len) : 0;
        load_tile<Config, typename T::KTile, threads, Config::head_dim>(base, Rows<Config>{k, p.k_j}, j0, low, seq.kv_len, thread);
        load_tile<Config, typename T::VTile, threads, Config::head_dim_v>(base + T::v_at, Rows<Config>{v, p.v_j}, j0, low, seq.kv_len, thread);
        if (T::stages > 1) load_ahead(current, 0);
        commit<Config>();
    }
    const uint32_t k_lane = T::KTile::by_row(base + row0 * T::KTile::pitch, lane);
    const uint32_t v_lane = T::VTile::by_row(base + T::v_at + row0 * T::VTile::pitch, lane);

    // Deterministic: lane 0 waits for a warp's turn and ends it. Only what PTX promises puts the additions in order: those
    // before a turn's end are released (by way of __syncwarp, or of the bulk wait), those after its begin follow an acquire.
    const uint32_t held_at = base + T::held_at + 8 * warp;   // the turn that this warp has yet to end (0: none)
    const auto await_turn = [&](const int* turn, int now, int rank) {
        while (now != rank) now = ptx::ld_relaxed(turn);
        ptx::ld_acquire(turn);   // only now: an acquire throws L1 away
        if constexpr (T::staged > 0) ptx::fence_proxy_async_global();
    };
    const auto end_turn = [&] {
        if (Config::deterministic && lane == 0) {
            if constexpr (T::staged > 0) ptx::bulk_wait();
            if (int* held = address<int>(ptx::ld_shared_b64(held_at))) {
                ptx::red_release_add(held, 1);
                ptx::st_shared_b64(held_at, 0);
            }
        }
    };

    // dQ = dS K   [queries, head_dim / dq_parts], of the query tile `at`, whose dS lies in buffer `buffer`. dq_tiles = 2:
    // each half of the warps takes every second tile, both at once.
    const int team = T::dq_tiles > 1 ? warp / T::team : 0, member = T::dq_tiles > 1 ? warp % T::team : warp;
    const auto add_queries = [&](const Place& at, int buffer, int part_of_columns) {
        int* turn = nullptr;
        int rank = 0, now = 0;
        if constexpr (Config::deterministic) {
            rank = turn_of<Config, block_q, block_k>(window, seq, at.tile, tile, ptx::ld_shared_b32(base + T::parked + 56), ptx::ld_shared_b32(base + T::parked + 60));
            turn = address<int>(p.order) + (at.head * p.row_tiles + tile0 + at.tile) * T::team + member;   // a warp adds its own part
            if (part_of_columns == 0 && lane == 0) now = ptx::ld_relaxed(turn);
        }
        float dq[T::MQ][T::C][4];
        clear(dq);
        const int dq_row = member % T::dq_rows, dq_column = member / T::dq_rows;
        const uint32_t ds_by_k = T::STile::by_k(base + T::ds_at + buffer * T::STile::bytes, lane, true, false), k_by_k = T::KTile::by_k(base, lane, false, false);
        accumulate<atom, T::MQ, T::C, block_k / atom::k, !T::tight>(dq, [&](int m, int k) { return T::STile::load_a_by_k(ds_by_k, k * atom::k, dq_row * T::MQ + m, lane); },
            [&](typename atom::B& b0, typename atom::B& b1, int k, int c) { T::KTile::template load_b_by_k<false>(b0, b1, k_by_k, k * atom::k, (dq_column * T::CQ + part_of_columns * T::C + c) / 2, lane); });
        float* sum = address<float>(ptx::ld_shared_b64(base + T::parked + 24)) + (at.head * p.row_tiles + at.tile) * T::dq_floats + member * (T::dq_floats / T::team);
        if constexpr (T::staged > 0) {
            const uint32_t area = base + T::dq_at + warp * (512 * T::staged);
#pragma unroll
            for (int part = 0; part < T::MQ * T::CQ; part += T::staged) {
                if (lane == 0 && !(Config::deterministic && part == 0)) ptx::bulk_wait_read();
                __syncwarp();
#pragma unroll
                for (int i = 0; i < T::staged; ++i) {
                    const float (&x)[4] = dq[(part + i) / T::CQ][(part + i) % T::CQ];
                    ptx::st_shared_v4(area + 512 * i + 16 * lane, {__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])});
                }
                ptx::fence_proxy_async();
                __syncwarp();
                if (lane == 0) {
                    if (Config::deterministic && part == 0) await_turn(turn, now, rank);
                    ptx::bulk_add_f32(sum + 128 * part, area, 512 * T::staged);
                    ptx::bulk_commit();
                }
            }
        } else {
            if constexpr (Config::deterministic) {
                if (part_of_columns == 0 && lane == 0) await_turn(turn, now, rank);
                __syncwarp();
            }
#pragma unroll
            for (int m = 0; m < T::MQ; ++m)
#pragma unroll
                for (int c = 0; c < T::C; ++c) {
                    float* run = sum + (m * T::CQ + part_of_columns * T::C + c) * 128;
                    if constexpr (Config::arch >= 90) ptx::red_add_f32x4(run + 4 * lane, dq[m][c][0], dq[m][c][1], dq[m][c][2], dq[m][c][3]);
                    else {
#pragma unroll
                        for (int e = 0; e < 4; ++e) ptx::red_add_f32(run + 32 * e + lane, dq[m][c][e]);
                    }
                }
        }
        if (Config::deterministic && part_of_columns == Config::dq_parts - 1) {
            if (lane == 0) ptx::st_shared_b64(held_at, reinterpret_cast<uint64_t>(turn));
            __syncwarp();
        }
    };

    const auto add_all = [&](const Place& at, int buffer) {
#pragma unroll
        for (int part = 0; part < Config::dq_parts; ++part) add_queries(at, buffer, part);
    };

    // ---- main loop
    Place next = current, previous = current;
    bool pending = false;   // the dQ of `previous` waits to be computed by this warp
    int buffer = T::ds_buffers - 1, previous_buffer = 0;
#pragma unroll 1
    for (int step = 0; sparse ? passed < total : step < total; ++step) {
        const int stage = T::stages > 1 ? step & 1 : 0;
        buffer = buffer == T::ds_buffers - 1 ? 0 : buffer + 1;
        const bool later = Config::stagger && warp >= T::warps / 2;   // these warps compute dQ after all else, not before it
        const bool due = T::dq_tiles == 1 || step % T::dq_tiles == 0;
        advance(next);
        ++passed;
        find_live(next, passed);
        const bool more = sparse ? passed < total : step + 1 < total;
        if constexpr (T::stages == 1) {
            __syncthreads();
            load_queries(current, 0);
            commit<Config>();
            load_gradients(current, 0);
            commit<Config>();
            if (pending) add_all(previous, previous_buffer);   // hides the load
            pending = false;
        }
        wait<Config, T::stages == 1>();
        __syncthreads();   // this step's queries and the last step's dS are here
        if constexpr (T::late) {
            load_gradients(current, 0);
            commit<Config>();
        }
        const int head = current.head, query_tile = current.tile;
        const int i0 = query_tile * block_q, i1 = min(i0 + block_q, seq.q_len);
        const uint32_t q_at = base + T::q_at + stage * T::stage_bytes, o_at = base + T::o_at + (T::late ? 0 : stage) * T::OTile::bytes;
        const Scorer<Config> scorer(p, seq, head);
        if (Config::dq_first && pending && due && !later) {
            if (Config::dq_parts == 1) add_all(previous, previous_buffer);
            else add_queries(previous, previous_buffer, 0);
        }
        if (Config::dq_first && due && !later && Config::dq_parts == 1) pending = false;

        // S^T = K Q^T and dP^T = V dO^T   [keys, queries]
        float s[M][N][4], dp[M][N][4];
        float slope[Config::softcap ? M : 1][Config::softcap ? N : 1][4];   // of the softcap
        float delta[N][2];
        const uint32_t rows = q_at + T::rows_at + (column0 + 2 * (lane & 3)) * T::row_floats * 4;
        clear(s);
        clear(dp);
        DropoutWords<Config, true, M, N> random;
        if (Config::draw_first) random.draw_transposed(ptx::ld_shared_b64(base + T::parked + 48), b, head, j0 + row0, i0 + column0, lane);
        {
            const uint32_t q_lane = T::QTile::by_chunk(q_at + column0 * T::QTile::pitch, lane);
            const uint32_t o_lane = T::OTile::by_chunk(o_at + column0 * T::OTile::pitch, lane);
            accumulate<atom, M, N, T::head_dim / atom::k, true, true>(s, [&](int m, int k) { return T::KTile::load_a(k_lane, 16 * m, k); },
                [&](typename atom::B& b0, typename atom::B& b1, int k, int n) { T::QTile::load_b(b0, b1, q_lane, 8 * n, k); });
            if constexpr (Config::softcap) scorer.cap_scores(s, slope);
            scorer.template apply<true>(s, j0 + row0, i0 + column0, lane);

            // s -> log2 P
#pragma unroll
            for (int n = 0; n < N; ++n) {
                float shift[2], less[2];   // natural: log2 l is taken off apart, it would be lost beside m
                if constexpr (Scorer<Config>::natural) {
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const uint4 row = ptx::ld_shared_v4(rows + (8 * n + e) * 16);
                        shift[e] = __uint_as_float(row.x); less[e] = __uint_as_float(row.y); delta[n][e] = __uint_as_float(row.z);
                    }
                } else {
                    const uint4 pair = ptx::ld_shared_v4(rows + 8 * n * 8);
                    shift[0] = __uint_as_float(pair.x); delta[n][0] = __uint_as_float(pair.y);
                    shift[1] = __uint_as_float(pair.z); delta[n][1] = __uint_as_float(pair.w);
                }
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        float& x = s[m][n][e];
                        if constexpr (Scorer<Config>::raw) x = fmaf(x, scorer.scale, -shift[e & 1]);
                        else if constexpr (Scorer<Config>::natural) x = fmaf(x - shift[e & 1], log2e, -less[e & 1]);
                        else x -= shift[e & 1];
                    }
            }
            end_turn();
            if constexpr (T::stages > 1) {   // here: without a branch after dP, ptxas puts exponentials among its products
                if (more) load_ahead(next, stage ^ 1);
                commit<Config>();
            }
            constexpr bool parked = Config::deterministic;   // whichever spills less
            const Edges<Config> edges(p, i0 + (parked ? static_cast<int>(ptx::ld_shared_b32(base + T::parked + 36)) : static_cast<int>(window.offset)), i1 - i0,
                blank && current.partial ? 0 : parked ? static_cast<int>(ptx::ld_shared_b32(base + T::parked + 40)) : seq.kv_len);
            if (edges.cross(j0, j0 + block_k)) edges.hide_transposed(s, j0 + row0, column0, lane);
            if constexpr (Config::partial_blocks)
                if (current.partial) BlockMask<Config>(p, seq, head).template hide<true>(s, j0 + row0, i0 + column0, lane);
            if constexpr (Config::dq_parts == 2)
                if (pending && due) add_queries(previous, previous_buffer, later ? 0 : 1);
            if constexpr (T::late || T::stages == 1) {
                wait<Config, T::late>();
                __syncthreads();
            }
            accumulate<atom, M, N, T::head_dim_v / atom::k, true>(dp, [&](int m, int k) { return T::VTile::load_a(v_lane, 16 * m, k); },
                [&](typename atom::B& b0, typename atom::B& b1, int k, int n) { T::OTile::load_b(b0, b1, o_lane, 8 * n, k); });
        }

        if (!Config::dq_first && pending && due) add_all(previous, previous_buffer);

        // P = exp(s - m) / l (negative where dropped) and dS = P (keep dP - delta)
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) s[m][n][e] = ptx::ex2_approx(s[m][n][e]);
        if (!Config::draw_first) random.draw_transposed(ptx::ld_shared_b64(base + T::parked + 48), b, head, j0 + row0, i0 + column0, lane);
        if constexpr (Config::dropout) {
#pragma unroll
            for (int m = 0; m < M; m += random.pairs) random.apply_transposed(s, m, base + T::parked + 44, j0 + row0);
        }
        if constexpr ((Config::dropout || T::tight) && !Scorer<Config>::natural) {   // read again: kept until here it would cost registers
#pragma unroll
            for (int n = 0; n < N; ++n) {
                const uint4 pair = ptx::ld_shared_v4(rows + 8 * n * 8);
                delta[n][0] = __uint_as_float(pair.y);
                delta[n][1] = __uint_as_float(pair.w);
            }
        }
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const float d = Config::fault == skip_delta ? 0.f : delta[n][e & 1];
                    float& x = dp[m][n][e];
                    float& probability = s[m][n][e];
                    if constexpr (Config::dropout) {
                        const bool dropped = __float_as_int(probability) < 0;
                        x = fabsf(probability) * ((dropped ? 0.f : x * p.keep_scale) - d);
                        probability = dropped ? 0.f : probability;
                    } else x = probability * (x - d);
                }
        if constexpr (Config::bias_gradient) {
            add_bias_gradient<Config>(dp, address<float>(p.dbias) + b * p.dbias_b + head * p.dbias_h, p.dbias_i, p.dbias_j,
                                      i0 + column0, j0 + row0, scorer.i_end, scorer.j_end, lane);
        }
        if constexpr (Config::softcap) {
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int n = 0; n < N; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e) dp[m][n][e] *= slope[m][n][e];
        }

        // dV += P^T dO, dK += dS^T Q   [keys, head_dim]
        const uint32_t ds_at = base + T::ds_at + buffer * T::STile::bytes, p_at = base + T::p_at;
        // This warp's columns of dV and dK: in the address where they are whole groups of chunks, else in the index.
        constexpr bool whole_v = T::CV * 8 * atom::bytes % T::OTile::group == 0, whole_k = T::CK * 8 * atom::bytes % T::QTile::group == 0;
        const int first_v = whole_v ? 0 : warp_q * T::CV, first_k = whole_k ? 0 : warp_q * T::CK;
        const uint32_t o_by_k = T::OTile::by_k(o_at, lane, false, true) + (whole_v ? warp_q * T::CV * 8 * atom::bytes : 0);
        const uint32_t q_by_k = T::QTile::by_k(q_at, lane, false, true) + (whole_k ? warp_q * T::CK * 8 * atom::bytes : 0);
        const auto add_values = [&](int column, const auto& load_a) {   // of the queries from `column` on
            accumulate<atom, M, T::CV, 8 * N / atom::k>(dv, load_a, [&](typename atom::B& b0, typename atom::B& b1, int k, int c) {
                T::OTile::template load_b_by_k<true>(b0, b1, o_by_k + column * T::OTile::pitch, k * atom::k, (first_v + c) / 2, lane); });
        };
        const auto add_keys = [&](int column, const auto& load_a) {
            accumulate<atom, M, T::CK, 8 * N / atom::k>(dk, load_a, [&](typename atom::B& b0, typename atom::B& b1, int k, int c) {
                T::QTile::template load_b_by_k<true>(b0, b1, q_by_k + column * T::QTile::pitch, k * atom::k, (first_k + c) / 2, lane); });
        };
        store_transposed<Config>(dp, ds_at, row0, column0, lane);
        if constexpr (T::warps_q > 1) store_transposed<Config>(s, p_at, row0, column0, lane);
        add_values(column0, [&](int m, int k) { return atom::take_accumulators(s[m], k); });
        add_keys(column0, [&](int m, int k) { return atom::take_accumulators(dp[m], k); });
        if constexpr (T::warps_q > 1) {
            ptx::bar_sync(1 + warp_k, 32 * T::warps_q);   // P and dS of these keys are complete
            const uint32_t p_lane = T::STile::by_row(p_at + row0 * T::STile::pitch, lane), ds_lane = T::STile::by_row(ds_at + row0 * T::STile::pitch, lane);
#pragma unroll
            for (int other = 1; other < T::warps_q; ++other) {
                const int column = (warp_q ^ other) * 8 * N, chunk = column * atom::bytes / 16;
                add_values(column, [&](int m, int k) { return T::STile::load_a_permuted(p_lane, 16 * m, chunk + 2 * k); });
                add_keys(column, [&](int m, int k) { return T::STile::load_a_permuted(ds_lane, 16 * m, chunk + 2 * k); });
            }
        }
        if (later && pending) add_queries(previous, previous_buffer, Config::dq_parts - 1);
        if (step % T::dq_tiles == team) {
            previous = current;
            previous_buffer = buffer;
            pending = true;
        } else if (due) pending = false;
        current = next;
    }
    if (any) {
        __syncthreads();
        if (pending) add_all(previous, previous_buffer);
    }
    if constexpr (Config::deterministic) end_turn();
    else if (T::staged > 0 && lane == 0) ptx::bulk_wait();

    // ---- epilogue
    wait<Config, 0>();
    __syncthreads();
    const int64_t token = Config::packed ? seq.k_row + j0 : j0;
    const int count = seq.padded_k - j0;
    element* dk_to = address<element>(p.dk) + (Config::packed ? 0 : b * p.dk_b) + token * p.dk_j + head_kv * p.dk_h;
    element* dv_to = address<element>(p.dv) + (Config::packed ? 0 : b * p.dv_b) + token * p.dv_j + head_kv * p.dv_h;
    const float dv_scale = (Config::dropout ? p.keep_scale : 1.f) * (Config::fault == scaled_dv ? 1.004f : 1.f);
    if (p.dk) write_keys<Config, typename T::KTile, Config::head_dim>(dk, p.scale, base, row0, warp_q * T::CK * 8, dk_to, p.dk_j, count, thread);
    if (p.dv) write_keys<Config, typename T::VTile, Config::head_dim_v>(dv, dv_scale, base + T::v_at, row0, warp_q * T::CV * 8, dv_to, p.dv_j, count, thread);
}

}  // namespace attnlib
