// Attention forward with wgmma, for sm_90a: float16 and bfloat16, everything that masks by position.
//
// A block stays on its multiprocessor and works through tiles of 64 * warpgroups query rows. One thread of the first
// warpgroup loads Q, K and V through tensor maps; each of the others owns 64 rows. Keys are walked from the last visible tile to
// the first. In the loop, of key tile j (K) and j + 1 (V):
//
//   issue S = Q K_j^T;  issue O += P_{j+1} V_{j+1};  wait for S;  P_j = exp(S - r) while the second product runs
//
// and the warpgroups take turns at issuing, so that one's softmax runs under the others' products. Tiles that no edge
// crosses take no row maximum (softmax.cuh); a warp whose sums leave the range computes its scores again with mma.sync.
//
//   shared memory: q_buffers x Q (out is staged over it, or has panels of its own) | stages x K | stages x V | out |
//   barriers | records of tiles | dropout: what the words of a tile's keys share, for each warp
//   all as panels of 64 columns: [panel][row][64], 128-byte rows, 128-byte swizzle
//
// What ptxas needs here: one wgmma_fence before each product and after any spin; no branch that touches an accumulator
// between the two issues; the spin for the next K between softmax and the wait, or the softmax sinks below it.
#pragma once

#include "forward_tile.cuh"
#include "ptx/hopper.cuh"
#include "ptx/wgmma.cuh"

namespace attnlib {

template <class Config>
struct WarpgroupTile {
    using element = typename Config::element;
    using atom = Atom<Config>;
    static constexpr bool half = is_half<element>::value;
    static constexpr int warpgroups = Config::warpgroups, stages = Config::stages, q_buffers = Config::q_buffers;
    static constexpr int block_q = 64 * warpgroups, block_k = Config::block_k, N = block_k / 8;
    static constexpr int panels = (Config::head_dim + 63) / 64, panels_v = (Config::head_dim_v + 63) / 64, steps = (Config::head_dim + 15) / 16;
    static constexpr int columns = Config::columns_v, C = columns / 8;   // of O: head_dim_v and what Wgmma rounds it up to
    using QPanel = Tile<Config, block_q, 64>;
    using KPanel = Tile<Config, block_k, 64>;
    static constexpr int q_bytes = panels * QPanel::bytes, k_bytes = panels * KPanel::bytes, v_bytes = panels_v * KPanel::bytes;
    static constexpr int q_at = 0, k_at = q_buffers * q_bytes, v_at = k_at + stages * k_bytes;
    static constexpr int out_at = v_at + stages * v_bytes, out_bytes = 2048 * Config::out_panels, end = out_at + 4 * warpgroups * out_bytes;   // of a warp
    static constexpr int q_full = end, q_empty = q_full + 8 * q_buffers, k_full = q_empty + 8 * q_buffers, k_empty = k_full + 8 * stages;
    static constexpr int v_full = k_empty + 8 * stages, v_empty = v_full + 8 * stages, record_at = (v_empty + 8 * stages + 15) / 16 * 16;
    static constexpr bool staged = Config::out_panels > 0;   // out has rows of its own, so Q's are free before it is written
    static constexpr int records = q_buffers + staged, random_at = record_at + 48 * records, random_bytes = Config::dropout ? 4 * block_k + 80 : 0;   // of a warp
    static constexpr int shared_bytes = random_at + 4 * warpgroups * random_bytes;
    static constexpr bool tails = Config::lengths || Config::packed;   // other rows than zeros may follow a sequence's keys
    static_assert(!Config::dropout || (block_k % 32 == 0 && block_k <= 128), "a lane draws for one group of keys");
    static_assert(block_k % 16 == 0 && columns <= 64 * panels_v && panels_v <= panels, "whole k16 steps; O fits over Q");
    // Registers of the loading warpgroup and of the others: what the launch gave a block, divided anew.
    static constexpr int loading = warpgroups >= 3 ? 32 : 40, computing = warpgroups == 4 ? 112 : warpgroups == 3 ? 160 : 232;
};

// What the loading thread tells the others of a tile. first..last: key tiles; position: of query i0.
struct TileRecord {
    int i0, head, batch, first, last, position, kv_len, q_len, padded_q, q_row, valid;

    __device__ __forceinline__ void write(uint32_t at) const {
        ptx::st_shared_v4(at, make_uint4(i0, head, batch, first));
        ptx::st_shared_v4(at + 16, make_uint4(last, position, kv_len, q_len));
        ptx::st_shared_v4(at + 32, make_uint4(padded_q, q_row, valid, 0));
    }
    __device__ __forceinline__ static TileRecord read(uint32_t at) {
        const uint4 a = ptx::ld_shared_v4(at), b = ptx::ld_shared_v4(at + 16), c = ptx::ld_shared_v4(at + 32);
        return {int(a.x), int(a.y), int(a.z), int(a.w), int(b.x), int(b.y), int(b.z), int(b.w), int(c.x), int(c.y), int(c.z)};
    }
};

template <class Config>
__device__ __forceinline__ void load_tiles(const ForwardMapsParams& params, uint32_t base) {
    using T = WarpgroupTile<Config>;
    const ForwardParams& p = params.problem;
    const uint64_t keep = ptx::evict_last(), once = ptx::evict_first();
    const int tiles = p.tiles * (Config::packed ? p.heads_q : p.heads_q * p.batch);
    int loaded_k = 0, loaded_v = 0, count = 0, tile = blockIdx.x, head_kv, row, batch;
    const auto load = [&](const ptx::TensorMap& map, int panels, int bytes, uint32_t at, uint32_t full, uint32_t empty, int& loaded, int j) {
        const int stage = loaded % T::stages;
        ptx::mbarrier_wait(base + empty + 8 * stage, (loaded / T::stages & 1) ^ 1);
        ptx::mbarrier_expect(base + full + 8 * stage, bytes);
        for (int panel = 0; panel < panels; ++panel)
            ptx::tensor_load(base + at + stage * bytes + panel * T::KPanel::bytes, &map, 64 * panel, row + j * T::block_k, head_kv, batch, base + full + 8 * stage, keep);
        ++loaded;
    };
    const auto load_k = [&](int j) { load(params.k, T::panels, T::k_bytes, T::k_at, T::k_full, T::k_empty, loaded_k, j); };
    const auto load_v = [&](int j) { load(params.v, T::panels_v, T::v_bytes, T::v_at, T::v_full, T::v_empty, loaded_v, j); };
    int drawn = 0;   // looked at when the tile's loads are issued, not before
    const auto draw = [&] {
        if constexpr (Config::dynamic) drawn = atomicAdd(address<int>(params.ticket), 1);
    };
    const auto advance = [&] {
        if (Config::dynamic && drawn == tiles - 1) *address<int>(params.ticket) = 0;   // the last ticket: one for each tile
        tile = (Config::dynamic ? drawn : tile) + static_cast<int>(gridDim.x);
    };
    while (tile < tiles) {
        const Work<Config, T::block_q> work(p, tile);
        if (work.idle) {
            draw();
            advance();
            continue;
        }
        const Sequence& seq = work.seq;
        const Window window = window_of<Config>(p, seq);
        const bool queries = work.i1 > work.i0;
        const int begin = Config::left && queries ? clamp(window.key_begin(work.i0), 0, seq.kv_len) : 0;
        const int end = queries ? static_cast<int>(window.key_end(work.i1 - 1)) : 0;
        const int first = begin / T::block_k, last = max((end + T::block_k - 1) / T::block_k, first + 1);
        head_kv = work.head_kv;
        batch = Config::packed ? 0 : seq.index;
        row = static_cast<int>(seq.k_row);
        load_k(last - 1);
        const int buffer = count % T::q_buffers;
        const uint32_t full = base + T::q_full + 8 * buffer;
        ptx::mbarrier_wait(base + T::q_empty + 8 * buffer, (count / T::q_buffers & 1) ^ 1);
        TileRecord{work.i0, work.head, seq.index, first, last, work.i0 + static_cast<int>(window.offset), seq.kv_len, seq.q_len,
                   seq.padded_q, static_cast<int>(seq.q_row), seq.valid}.write(base + T::record_at + 48 * (count % T::records));
        ptx::mbarrier_expect(full, T::q_bytes);
        for (int panel = 0; panel < T::panels; ++panel)
            ptx::tensor_load(base + T::q_at + buffer * T::q_bytes + panel * T::QPanel::bytes, &params.q, 64 * panel, static_cast<int>(seq.q_row) + work.i0, work.head, batch, full, once);
        ++count;
        for (int j = last - 1; j >= first; --j) {
            if (j == min(first + 1, last - 1)) draw();   // late, so that the next tile goes to whoever is nearly done
            if (j > first) load_k(j - 1);
            load_v(j);
        }
        advance();
    }
    const int buffer = count % T::q_buffers;
    ptx::mbarrier_wait(base + T::q_empty + 8 * buffer, (count / T::q_buffers & 1) ^ 1);
    ptx::st_shared_b32(base + T::record_at + 48 * (count % T::records), 0xFFFFFFFFu);
    ptx::mbarrier_arrive(base + T::q_full + 8 * buffer);
}

template <class Config>
struct Warpgroup {
    using T = WarpgroupTile<Config>;
    using atom = typename T::atom;
    static constexpr int N = T::N, C = T::C, key_steps = T::block_k / 16;

    const ForwardMapsParams& params;
    const ForwardParams& p;
    const uint32_t base;
    const int group, lane;           // warpgroup among the computing ones
    Scorer<Config> scorer;
    SoftmaxState<Config, 1> state;
    float s[1][N][4], acc[C][4];
    uint32_t packed[key_steps][4];
    uint32_t q_kept[Config::q_in_registers ? T::steps : 1][4];
    int visits = 0;                  // key tiles so far: places in the rings
    bool started;                    // acc holds something

    __device__ __forceinline__ Warpgroup(const ForwardMapsParams& params, uint32_t base, int group, int lane)
        : params(params), p(params.problem), base(base), group(group), lane(lane), scorer(params.problem, Sequence{}, 0) {}

    __device__ __forceinline__ static int warp() { return ptx::opaque_thread() / 32 % 4; }   // seldom needed: not kept

    // ---- rings and turns
    __device__ __forceinline__ static int parity(int visit) { return visit / T::stages & 1; }
    __device__ __forceinline__ void await(int barriers, int stage, int visit) const { ptx::mbarrier_wait(base + barriers + 8 * stage, parity(visit)); }
    __device__ __forceinline__ void release(int barriers, int stage) const {
        if (lane == 0) ptx::mbarrier_arrive(base + barriers + 8 * stage);
    }
    __device__ __forceinline__ void await_turn() const { ptx::bar_sync(1 + group, 256); }
    __device__ __forceinline__ void pass_turn() const { ptx::bar_arrive(group == T::warpgroups - 1 ? 1 : 2 + group, 256); }

    // ---- products
    __device__ __forceinline__ void issue_scores(uint32_t q, int stage) {
        const uint32_t k = base + T::k_at + stage * T::k_bytes;
        const ptx::PanelDescriptor<true> rows(q, 16), keys(k, 16);
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < T::steps; ++step) {
            const uint64_t b = keys.at(step / 4 * T::KPanel::bytes + step % 4 * 32);
            if constexpr (Config::q_in_registers) ptx::Wgmma<T::block_k>::template rs<T::half, false>(s[0], q_kept[step], b, step > 0);
            else ptx::Wgmma<T::block_k>::template ss<T::half, false, false>(s[0], rows.at(step / 4 * T::QPanel::bytes + step % 4 * 32), b, step > 0);
        }
        ptx::wgmma_commit();
    }
    __device__ __forceinline__ void issue_values(int stage) {
        const ptx::PanelDescriptor<true> v(base + T::v_at + stage * T::v_bytes, T::KPanel::bytes);
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < key_steps; ++step)
            ptx::Wgmma<T::columns>::template rs<T::half, true>(acc, packed[step], v.at(step * 2048), step > 0 || started);
        ptx::wgmma_commit();
        started = true;
    }
    __device__ __forceinline__ void keep_q(uint32_t q) {
        if constexpr (Config::q_in_registers)
#pragma unroll
            for (int step = 0; step < T::steps; ++step) {
                const typename atom::A a = T::QPanel::load_a(T::QPanel::by_row(q + 16 * warp() * 128 + step / 4 * T::QPanel::bytes, lane), 0, step % 4);
#pragma unroll
                for (int i = 0; i < 4; ++i) q_kept[step][i] = a.hi[i];
            }
    }
    // This warp's 16 rows of S again, without the other warps.
    __device__ __forceinline__ void recompute(uint32_t q, int stage) {
        const uint32_t k = base + T::k_at + stage * T::k_bytes;
        clear(s);
#pragma unroll 1
        for (int step = 0; step < T::steps; ++step) {
            const uint32_t q_lane = T::QPanel::by_row(q + 16 * warp() * 128 + step / 4 * T::QPanel::bytes, lane);
            const uint32_t k_lane = T::KPanel::by_chunk(k + step / 4 * T::KPanel::bytes, lane);
            const typename atom::A a = T::QPanel::load_a(q_lane, 0, step % 4);
#pragma unroll
            for (int n = 0; n < N; n += 2) {
                typename atom::B b0, b1;
                T::KPanel::load_b(b0, b1, k_lane, 8 * n, step % 4);
                atom::mma(s[0][n], a, b0);
                atom::mma(s[0][n + 1], a, b1);
            }
        }
    }

    // ---- softmax of the tile in s
    __device__ __forceinline__ void exact(uint32_t record, bool edges, int j, float (&correction)[2]) {
        constexpr bool raw = Scorer<Config>::raw;
        const float factor = raw && scorer.scale > 0.f ? scorer.scale : 1.f;
        scorer.template apply<false>(s, 0, 0, lane);
        if (factor == 1.f) scorer.scale_raw(s);   // the sign would turn the maximum, and 0 times -inf is not hidden
        if (edges) Edges<Config>(p, ptx::ld_shared_b32(record + 20), 0, ptx::ld_shared_b32(record + 24)).hide(s, 64 * group + 16 * warp(), j * T::block_k, lane, 1);
        if constexpr (raw) state.settle_raw(s[0], correction, factor, 0);
        else {
            float top[2];
            state.raise(s[0], top, 0);
            state.settle(s[0], correction, top, 0);
        }
        drop();
    }

    // ---- dropout: what depends on the key alone is drawn once for the warp, while the product runs; what depends on the row alone, once for its rows
    __device__ __forceinline__ uint32_t random() const { return base + T::random_at + (4 * group + warp()) * T::random_bytes; }
    // Shuffled, so that the compiler knows it is the same in all lanes: keys take no registers of the lanes.
    __device__ __forceinline__ static uint64_t seed_of(uint32_t random) { return __shfl_sync(0xFFFFFFFFu, ptx::ld_shared_b64(random + 4 * T::block_k), 0); }
    // Columns of a tile of keys | seed | what dropout_above says | rows.
    __device__ __forceinline__ void draw_rows(uint32_t record) const {
        if constexpr (Config::dropout) {
            const uint32_t at = random();
            const uint64_t seed = seed_of(at);   // all lanes shuffle
            __syncwarp();   // the words of the rows before are drawn
            if (lane < 8)
                DropoutWords<Config, false, 1, 4>::put_row(at + 4 * T::block_k + 16 + 8 * lane, seed, ptx::ld_shared_b32(record + 4), ptx::ld_shared_b32(record) + 64 * group + 16 * warp() + lane);
        }
    }
    __device__ __forceinline__ void draw_columns(uint32_t record, int j) const {
        if constexpr (Config::dropout) {
            const uint32_t at = random();
            __syncwarp();   // the words of the tile before are drawn
            const uint64_t seed = seed_of(at);   // all lanes shuffle
            if (lane < T::block_k / 4)
                DropoutWords<Config, false, 1, 4>::put_column(at + 16 * lane, seed, ptx::ld_shared_b32(record + 8), ptx::ld_shared_b32(record + 4), j * T::block_k + (lane >> 3) * 32 + (lane & 7));
            __syncwarp();
        }
    }
    __device__ __forceinline__ void drop() {
        if constexpr (Config::dropout) {
            const uint32_t at = random();
            const uint64_t seed = seed_of(at);
#pragma unroll
            for (int n = 0; n < N / 4; ++n) {
                DropoutWords<Config, false, 1, 4> words;
                words.draw_row(0, seed, at + 128 * n, at + 4 * T::block_k + 16, lane);
                words.apply_row(reinterpret_cast<float (&)[1][4][4]>(s[0][4 * n]), 0, at + 4 * T::block_k + 8);
            }
        }
    }
    __device__ __forceinline__ void round() {
#pragma unroll
        for (int step = 0; step < key_steps; ++step) {
            const typename atom::A a = atom::from_accumulators(s[0], step);
#pragma unroll
            for (int i = 0; i < 4; ++i) packed[step][i] = a.hi[i];
        }
#pragma unroll
        for (int step = 0; step < key_steps; ++step)
#pragma unroll
            for (int i = 0; i < 4; ++i) ptx::pin(packed[step][i]);   // the conversion belongs here, not after the next product
    }

    // ---- one key tile
    template <bool masked, bool with_maximum>
    __device__ __forceinline__ void step(uint32_t q, uint32_t record, int j, bool more) {
        const int stage = visits % T::stages, before = (visits - 1) % T::stages, after = (visits + 1) % T::stages;
        await_turn();
        issue_scores(q, stage);
        await(T::v_full, before, visits - 1);
        issue_values(before);
        pass_turn();
        draw_columns(record, j);
        ptx::wgmma_wait<1>();
        ptx::pin(s[0]);
        float correction[2];
        if constexpr (masked || with_maximum) {
            release(T::k_empty, stage);
            exact(record, masked, j, correction);
            if (more) await(T::k_full, after, visits + 1);
            ptx::wgmma_wait<0>();
            ptx::pin(acc);
            release(T::v_empty, before);
            state.rescale(acc, correction);
        } else {
            scorer.template apply<false>(s, 0, 0, lane);
            float added[1][2];
            const bool fits = state.without_maximum(s, added, scorer.scale, [&](int) { drop(); });
            if (fits) release(T::k_empty, stage);
            if (more) await(T::k_full, after, visits + 1);
            ptx::wgmma_wait<0>();
            ptx::pin(acc);
            release(T::v_empty, before);
            if (fits) state.add(added);
            else {
                recompute(q, stage);
                exact(record, false, j, correction);
                state.rescale(acc, correction);
                release(T::k_empty, stage);
            }
        }
        round();
        ++visits;
    }
    __device__ __forceinline__ void skip(bool turn = true) {   // a key tile that only other warpgroups see
        const int stage = visits % T::stages;
        await(T::k_full, stage, visits);
        release(T::k_empty, stage);
        if (turn) await_turn();
        await(T::v_full, stage, visits);
        release(T::v_empty, stage);
        if (turn) pass_turn();
        ++visits;
    }
    // V beyond the last key may hold another sequence's rows or anything: P is 0 there, and 0 times NaN is not.
    __device__ __forceinline__ void clear_tail(int kv_len, int j) {
        if constexpr (T::tails) {
            const int valid = max(kv_len - j * T::block_k, 0);
            if (valid < T::block_k) {
                const int stage = visits % T::stages;
                await(T::v_full, stage, visits);
                const uint32_t v = base + T::v_at + stage * T::v_bytes;
                for (int index = 32 * warp() + lane; index < T::panels_v * (T::block_k - valid) * 8; index += 128) {
                    const int panel = index / (8 * (T::block_k - valid)), rest = index - panel * 8 * (T::block_k - valid);
                    ptx::st_shared_v4(v + panel * T::KPanel::bytes + valid * 128 + rest * 16, make_uint4(0, 0, 0, 0));
                }
                ptx::fence_proxy_async();
                ptx::bar_sync(8 + group, 128);
            }
        }
    }

    // ---- a tile of rows
    __device__ __forceinline__ void run(uint32_t q, uint32_t record, int buffer, int pending) {
        const TileRecord tile = TileRecord::read(record);
        const int row = tile.position + 64 * group;   // position of the first row
        const int left = Config::left && Config::fault != ignore_window_left ? p.window_left : -1, right = Config::right ? p.window_right : -1;
        const auto key_end = [&](int position) { return right >= 0 ? max(min(tile.kv_len, position + right + 1), 0) : tile.kv_len; };
        const auto key_begin = [&](int position) { return left >= 0 ? max(position - left, 0) : 0; };
        int high = tile.last, low = tile.first;   // this warpgroup's key tiles; whole: those that no edge crosses
        if constexpr (Config::right) high = max(min((key_end(row + 63) + T::block_k - 1) / T::block_k, tile.last), tile.first + 1);
        if constexpr (Config::left) low = max(min(key_begin(row) / T::block_k, high - 1), tile.first);
        const int whole_end = key_end(row) / T::block_k;
        const int whole_begin = Config::left ? max((key_begin(row + 63) + T::block_k - 1) / T::block_k, low) : low;
        started = false;
        state.clear();
        int j = tile.last - 1;
        if (tile.i0 + 64 * group >= tile.q_len) {   // none of these rows is a query
            free_rows(pending);
#pragma unroll 1
            for (; j >= tile.first; --j) skip(j > tile.first);   // a tile's first key tile takes no turn
            if constexpr (T::staged) release(T::q_empty, buffer);
            return;
        }
        keep_q(q);
        if constexpr (Config::right)
#pragma unroll 1
            for (; j >= high; --j) skip();
        {
            const int stage = visits % T::stages;
            await(T::k_full, stage, visits);
            issue_scores(q, stage);
            free_rows(pending);
            draw_rows(record);
            draw_columns(record, j);
            ptx::wgmma_wait<0>();
            ptx::pin(s[0]);
            release(T::k_empty, stage);
            const auto first = [&] {   // a call of its own: without, head_dim 256 with dropout spills
                float correction[2];
                exact(record, true, j, correction);
            };
            first();
            round();
            if (j > low) await(T::k_full, (visits + 1) % T::stages, visits + 1);
            clear_tail(tile.kv_len, j);
            ++visits;
            --j;
        }
        if constexpr (Config::right) {
#pragma unroll 1
            for (; j >= low && j >= whole_end; --j) step<true, true>(q, record, j, j > low);
            if (key_end(row) % T::block_k == 0 && j >= whole_begin) {   // the first row may have seen no key so far
                step<false, true>(q, record, j, j > low);
                --j;
            }
        }
#pragma unroll 1
        for (; j >= whole_begin; --j) step<false, false>(q, record, j, j > low);
        if constexpr (Config::left)
#pragma unroll 1
            for (; j >= low; --j) step<true, true>(q, record, j, j > low);
        if constexpr (T::staged) release(T::q_empty, buffer);
        {
            const int stage = (visits - 1) % T::stages;
            await(T::v_full, stage, visits - 1);
            issue_values(stage);
            ptx::wgmma_wait<0>();
            ptx::pin(acc);
            release(T::v_empty, stage);
        }
        if constexpr (Config::left)
#pragma unroll 1
            for (; j >= tile.first; --j) skip();
    }

    // The query buffer of the tile before: back to the loading thread when out has left it.
    __device__ __forceinline__ void free_rows(int pending) const {
        if (pending >= 0 && lane == 0) {
            ptx::bulk_wait_read();
            ptx::mbarrier_arrive(base + T::q_empty + 8 * pending);
        }
    }

    // out = O / l through shared memory, and lse.
    __device__ __forceinline__ void write(uint32_t q, const TileRecord& tile) {
        using element = typename Config::element;
        const int row0 = 64 * group + 16 * warp();
        const float poison = tile.valid ? 0.f : __uint_as_float(0x7FC00000u);
        float factor[2], extra[2];
        bool blank[2];
        state.add_threads();
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i = tile.i0 + row0 + 8 * r + (lane >> 2);
            const bool owned = i < tile.padded_q, query = i < tile.q_len;
            float sink = -infinity;
            if constexpr (Config::has_sinks)
                if (query) sink = to_float(address<const typename Config::sink_element>(p.sinks)[tile.head * p.sinks_h]);
            float lse, top, total;
            state.finish(0, r, sink, factor[r], lse, top, total);
            if (!query) { factor[r] = 0.f; lse = -infinity; }
            if constexpr (Config::dropout) factor[r] *= p.keep_scale;
            extra[r] = query ? poison : 0.f;
            blank[r] = factor[r] == 0.f;
            if (owned && (lane & 3) == 0) {
                const int64_t at = Config::packed ? tile.head * static_cast<int64_t>(p.total_q) + tile.q_row + i
                                                  : (static_cast<int64_t>(tile.batch) * p.heads_q + tile.head) * p.seqlen_q + i;
                address<float>(p.lse)[at] = lse + extra[r];
            }
        }
        if constexpr (!T::staged) ptx::bar_sync(8 + group, 128);   // no warp of the group reads Q's rows any more
#pragma unroll
        for (int panel = 0; panel < T::panels_v; ++panel) {
            const uint32_t rows = T::staged ? base + T::out_at + (4 * group + warp()) * T::out_bytes + panel % max(Config::out_panels, 1) * 2048
                                            : q + 16 * warp() * 128 + panel * T::QPanel::bytes;
            if constexpr (T::staged) {
                if (lane == 0) ptx::bulk_wait_read<Config::out_panels - 1>();
                __syncwarp();
            }
#pragma unroll
            for (int c = 8 * panel; c < min(C, 8 * panel + 8); c += 2) {
                uint32_t words[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int r = i & 1;
                    const float* x = &acc[c + i / 2][2 * r];
                    words[i] = pack<Config>((blank[r] ? 0.f : x[0] * factor[r]) + extra[r], (blank[r] ? 0.f : x[1] * factor[r]) + extra[r]);
                }
                ptx::stmatrix_x4(rows + (lane & 15) * 128 + (((c & 7) + (lane >> 4) ^ (lane & 7)) << 4), words[0], words[1], words[2], words[3]);
            }
            if constexpr (!Config::packed) {
                ptx::fence_proxy_async();
                __syncwarp();
                if (lane == 0 && tile.i0 + row0 < p.seqlen_q) ptx::tensor_store(rows, &params.out, 64 * panel, tile.i0 + row0, tile.head, tile.batch);
                ptx::bulk_commit();
            } else {
                __syncwarp();
                constexpr int all = Config::head_dim_v / 8;
                const int chunks = min(all - 8 * panel, 8);
#pragma unroll 1
                for (int index = lane; index < 128; index += 32) {
                    const int local = index / 8, chunk = index % 8, i = tile.i0 + row0 + local;
                    if (i >= tile.padded_q || chunk >= chunks) continue;
                    const uint4 value = ptx::ld_shared_v4(rows + local * 128 + ((chunk ^ (local & 7)) << 4));
                    ptx::st_global_v4(address<element>(p.out) + ((static_cast<int64_t>(tile.q_row) + i) * p.heads_q + tile.head) * Config::head_dim_v + 64 * panel + 8 * chunk, value);
                }
                __syncwarp();
            }
        }
    }

    __device__ __forceinline__ void work() {
        if constexpr (Config::dropout) {
            if (lane == 0) {
                ptx::st_shared_b64(random() + 4 * T::block_k, *address<const uint64_t>(p.seed));
                ptx::st_shared_b32(random() + 4 * T::block_k + 8, dropout_above(p.dropout_threshold));
            }
            __syncwarp();
        }
        if (group == T::warpgroups - 1) pass_turn();   // the first turn is the first group's
#pragma unroll 1
        for (int count = 0;; ++count) {
            const int buffer = count % T::q_buffers;
            const uint32_t q = base + T::q_at + buffer * T::q_bytes + 64 * group * 128, record = base + T::record_at + 48 * (count % T::records);
            ptx::mbarrier_wait(base + T::q_full + 8 * buffer, count / T::q_buffers & 1);
            if (static_cast<int>(ptx::ld_shared_b32(record)) < 0) break;
            run(q, record, buffer, !T::staged && T::q_buffers > 1 && count > 0 ? (count - 1) % T::q_buffers : -1);
            write(q, TileRecord::read(record));   // read again rather than kept in registers
            if constexpr (!T::staged && T::q_buffers == 1) free_rows(buffer);
        }
        if (lane == 0) ptx::bulk_wait();
    }
};

template <class Config>
__device__ __forceinline__ void kernel(const ForwardMapsParams& params) {
    using T = WarpgroupTile<Config>;
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t base = ptx::shared_address(shared);
    const int warpgroup = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0), warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32 % 4, 0), lane = threadIdx.x & 31;
    if (threadIdx.x == 0) {
        constexpr int warps = 4 * T::warpgroups;
        for (int i = 0; i < T::q_buffers; ++i) {
            ptx::mbarrier_init(base + T::q_full + 8 * i, 1);
            ptx::mbarrier_init(base + T::q_empty + 8 * i, warps);
        }
        for (int i = 0; i < T::stages; ++i) {
            ptx::mbarrier_init(base + T::k_full + 8 * i, 1);
            ptx::mbarrier_init(base + T::k_empty + 8 * i, warps);
            ptx::mbarrier_init(base + T::v_full + 8 * i, 1);
            ptx::mbarrier_init(base + T::v_empty + 8 * i, warps);
        }
        ptx::mbarrier_init_fence();
    }
    __syncthreads();
    if (warpgroup == T::warpgroups) {
        ptx::give_registers<T::loading>();
        if (warp == 0 && lane == 0) load_tiles<Config>(params, base);
    } else {
        ptx::take_registers<T::computing>();
        Warpgroup<Config>(params, base, warpgroup, lane).work();
    }
}

}  // namespace attnlib
