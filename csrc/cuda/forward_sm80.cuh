// Attention forward with mma.sync, for sm_75, sm_80 and every later architecture.
//
//   S = Q K^T;  s = score(S);  P = exp(s - r);  O += P V;  out = O / l;  lse = r + log l     (r, l: softmax.cuh)
//
// A block of `warps` warps owns block_q query rows of one head and walks the keys from the last visible tile to the first,
// so tiles with a causal or length edge come first and the rest need no mask. warps_n = 1: each warp owns 16 * m_tiles
// rows. warps_n = 2 (large heads): two warps own them together; each computes S for half of the keys and O for half of
// head_dim_v, and they exchange P, so that a fragment of K or V serves twice the rows.
//
//   shared memory: Q [block_q][head_dim] (out is staged over it) | stages x K [block_k][head_dim] | stages x V [block_k][head_dim_v]
//                  | block-mask bits | P [block_q][block_k], row values, flags (warps_n = 2) | what only the loads need
//
// pack: the rows of a tile are the queries of all heads of a group (row = query * group + head), for decode.
// split: blockIdx.y takes a share of the key tiles and leaves float32 partials for combine.cuh.
// On entry: strides in elements, innermost 1; Config::aligned promises 16-byte rows.
#pragma once

#include "forward_tile.cuh"

namespace attnlib {

template <class Config>
__device__ __forceinline__ void write_rows(const ForwardParams& p, ForwardTile<Config>& t, const Work<Config, ForwardTile<Config>::block_q>& work, uint32_t base);

template <class Config>
__device__ __forceinline__ void kernel(const ForwardParams& p) {
    using T = ForwardTile<Config>;
    using element = typename Config::element;
    constexpr int M = T::M, N = T::N, block_k = T::block_k, threads = T::threads;
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t base = ptx::shared_address(shared);
    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    const int warp_m = warp / T::warps_n, warp_n = warp % T::warps_n;

    using Mine = Work<Config, T::block_q>;
    const Mine work(p, ptx::opaque_block());
    if (work.idle) return;
    const Sequence& seq = work.seq;
    const int b = seq.index, group = work.group, head = work.head, i0 = work.i0, i1 = work.i1;
    const Window window = window_of<Config>(p, seq);

    // ---- which keys: tiles [first, last) hold all that the tile's queries may see
    const int key_begin = Config::left && i1 > i0 ? clamp(window.key_begin(i0), 0, seq.kv_len) : 0;
    const int key_end = i1 > i0 ? static_cast<int>(window.key_end(i1 - 1)) : 0;
    int first = key_begin / block_k, last = key_end > key_begin ? (key_end + block_k - 1) / block_k : first;
    if constexpr (Config::split) {
        const int share = (last - first + p.splits - 1) / p.splits;
        first = min(first + static_cast<int>(blockIdx.y) * share, last);
        last = min(first + share, last);
    }

    const Scorer<Config> scorer(p, seq, head);
    KeyTiles<Config> tiles{};
    if constexpr (Config::block_mask) {
        const BlockMask<Config> blocks(p, seq, head);
        uint32_t* live = reinterpret_cast<uint32_t*>(shared + T::end);
        uint32_t* whole = live + KeyTiles<Config>::words;
        for (int word = (first >> 5) + warp; word < KeyTiles<Config>::words && 32 * word < last; word += T::warps) {
            const int j = (32 * word + lane) * block_k;
            const int state = 32 * word + lane < last && 32 * word + lane >= first
                ? blocks.state(i0, i1, j, min(j + block_k, seq.kv_len)) : -1;
            const uint32_t some = __ballot_sync(0xFFFFFFFFu, state >= 0), all = __ballot_sync(0xFFFFFFFFu, state == 1);
            if (lane == 0) { live[word] = some; whole[word] = all; }
        }
        __syncthreads();
        tiles = {live, whole};
    }

    const auto visible = [&](int tile) {   // of a tile without bits; located again, as in write_rows
        const Mine again(p, ptx::opaque_block());
        return BlockMask<Config>(p, again.seq, again.head).state(again.i0, again.i1, tile * block_k, min(tile * block_k + block_k, again.seq.kv_len)) >= 0;
    };

    // What only the loads need waits in shared memory, not in registers.
    constexpr uint32_t parked = T::parked;
    if (thread == 0) {
        const int64_t sequence = Config::packed || Config::paged ? 0 : 1;
        ptx::st_shared_b64(base + parked, p.k + sizeof(element) * (work.head_kv * p.k_h + sequence * b * p.k_b + seq.k_row * p.k_j));
        ptx::st_shared_b64(base + parked + 8, p.v + sizeof(element) * (work.head_kv * p.v_h + sequence * b * p.v_b + seq.k_row * p.v_j));
        ptx::st_shared_v2(base + parked + 16, key_begin, key_end);
        ptx::st_shared_v2(base + parked + 24, b, static_cast<int>(window.kv_len));
        ptx::st_shared_v2(base + parked + 32, i0 + static_cast<int>(window.offset), i1 - i0);
        if (Config::dropout) ptx::st_shared_b32(base + parked + 40, dropout_above(p.dropout_threshold));
    }
    __syncthreads();
    const auto source = [&](uint64_t start, int64_t page, int64_t stride) {
        return key_rows<Config>(p, start, page, stride, Config::paged ? ptx::ld_shared_b32(base + parked + 24) : 0);
    };
    const auto load_keys = [&](int tile, int stage) {
        const int begin = Config::left ? ptx::ld_shared_b32(base + parked + 16) : 0, end = ptx::ld_shared_b32(base + parked + 20);
        load_tile<Config, typename T::KTile, threads, Config::head_dim>(base + T::k_at + stage * T::KTile::bytes,
            source(ptx::ld_shared_b64(base + parked), p.k_b, p.k_j), tile * block_k, begin, end, ptx::opaque_thread());
    };
    const auto load_values = [&](int tile, int stage) {
        const int begin = Config::left ? ptx::ld_shared_b32(base + parked + 16) : 0, end = ptx::ld_shared_b32(base + parked + 20);
        load_tile<Config, typename T::VTile, threads, Config::head_dim_v>(base + T::v_at + stage * T::VTile::bytes,
            source(ptx::ld_shared_b64(base + parked + 8), p.v_b, p.v_j), tile * block_k, begin, end, ptx::opaque_thread());
    };

    // ---- prologue
    int current = tiles.previous(last - 1, first, visible);
    {
        const element* q = address<const element>(p.q) + (Config::packed ? 0 : b * p.q_b) + (seq.q_row + i0) * p.q_i + head * p.q_h;
        if constexpr (Config::pack) {
            struct { const element* base; int64_t i, h; int group;
                     __device__ __forceinline__ const element* row(int r, bool) const { return base + r / group * i + r % group * h; } } packed{q, p.q_i, p.q_h, group};
            load_tile<Config, typename T::QTile, threads, Config::head_dim>(base, packed, 0, 0, max(i1 - i0, 0) * group, thread);
        } else {
            load_tile<Config, typename T::QTile, threads, Config::head_dim>(base, Rows<Config>{q, p.q_i}, 0, 0, max(i1 - i0, 0), thread);
        }
        if (current >= first) load_keys(current, 0);
        if constexpr (Config::stages == 1) commit<Config>();   // the first product needs no values
        if (current >= first) load_values(current, 0);
        commit<Config>();
    }

    T t;
    t.state.clear();
    clear(t.acc);
    const int row0 = warp_m * 16 * M;   // the warp's first row of the tile
    const uint32_t q_lane = T::QTile::by_row(base + row0 * T::QTile::pitch, lane);
    const uint32_t k_lane = T::KTile::by_chunk(base + T::k_at + warp_n * T::keys * T::KTile::pitch, lane);
    const uint32_t v_lane = T::VTile::by_k(base + T::v_at, lane, false, true) + warp_n * T::columns * static_cast<int>(sizeof(element));
    const Partner<Config> partner{base, lane, warp_m, warp_n};
    const auto share = [&](float (&top)[M][2]) { partner.reduce(top, [](float x, float y) { return fmaxf(x, y); }); };
    const auto seed_again = [&] { return Config::dropout ? static_cast<uint64_t>(*address<const volatile int64_t>(p.seed)) : 0; };
    const uint64_t seed = seed_again();

    // ---- main loop
    using Random = DropoutWords<Config, false, M, N>;
    const auto put_columns = [&](int tile, int at) {   // warps take turns
        if (Config::dropout && warp == (tile & (T::warps - 1)) && lane < block_k / 4)
            Random::put_column(base + T::random_at + at * T::random_bytes + 16 * lane, seed, b, head, tile * block_k + (lane >> 3) * 32 + (lane & 7));
    };
    put_columns(current, 0);
    if (Config::dropout && thread < T::block_q / 2) Random::put_row(base + T::rows_at + 8 * thread, seed, head, i0 + 16 * (thread >> 3) + (thread & 7));
    int words_stage = 0;
    bool fresh = true;      // this warp has seen no key
    const int top = current;
    int stage = 0;
    if constexpr (T::keep_q) {
        wait<Config, 0>();
        __syncthreads();
        t.load_q(q_lane);
    }
#pragma unroll 1
    while (current >= first) {
        const int next = tiles.previous(current - 1, first, visible);
        if (Config::stages == 1 && current == top) wait<Config, 1>();
        else wait<Config, 0>();
        __syncthreads();
        if constexpr (Config::stages == 1) {
            if (current != top) load_values(current, 0);
        } else if (next >= first) {
            load_keys(next, stage ^ 1);
            load_values(next, stage ^ 1);
        }
        commit<Config>();

        float s[M][N][4];
        const int j0 = current * block_k + warp_n * T::keys;   // this warp's first key
        const Edges<Config> edges(p, ptx::ld_shared_b32(base + parked + 32), ptx::ld_shared_b32(base + parked + 36), ptx::ld_shared_b32(base + parked + 28));
        const bool edge = edges.cross(current * block_k, current * block_k + block_k);
        const bool partial = tiles.is_partial(current);
        const auto score = [&](bool scaled) {
            t.scores(s, q_lane, k_lane + stage * T::KTile::bytes);
            scorer.template apply<false>(s, i0 * group + row0, j0, lane, group);
            if (scaled) scorer.scale_raw(s);
            if (edge) edges.hide(s, row0, j0, lane, group);
            if constexpr (Config::partial_blocks)
                if (partial) BlockMask<Config>(p, seq, head).template hide<false>(s, i0 + row0, j0, lane);
        };
        typename T::Packed packed;
        Random random;
        const uint32_t columns_at = base + T::random_at + words_stage * T::random_bytes + 4 * warp_n * T::keys, rows_at = base + T::rows_at + 4 * row0;
        if (Config::dropout && next >= first) put_columns(next, words_stage ^ 1);
        const auto draw_first = [&](uint64_t seed) {
#pragma unroll
            for (int m = 0; m < M; ++m)
                if (m < Config::draw_first) random.draw_row(m, seed, columns_at, rows_at, lane);
        };
        const auto finish_rows = [&](int m) {
            if (m >= Config::draw_first) random.draw_row(m, seed, columns_at, rows_at, lane);
            random.apply_row(s, m, base + parked + 40);
            T::round(s, packed, m);
        };
        const auto with_maximum = [&] {
            t.state.with_maximum(s, t.acc, share, finish_rows);
            partner.exchange(packed, true);
        };
        const bool maximum = Config::maximum || fresh || edge || partial;
        const auto await_values = [&] {
            if constexpr (Config::stages == 1) {
                wait<Config, 0>();
                __syncthreads();
                if (next >= first) load_keys(next, 0);   // no warp needs this tile's keys again
                commit<Config>();
            }
        };
        draw_first(seed);
        score(maximum);
        if (maximum) with_maximum();
        else {
            float added[M][2];
            if (partner.exchange(packed, t.state.without_maximum(s, added, scorer.scale, finish_rows))) t.state.add(added);
            else {
                draw_first(seed_again());   // again: kept until here they would cost registers
                score(true);
                with_maximum();
            }
        }
        await_values();
        const uint32_t v_stage = v_lane + stage * T::VTile::bytes;
        t.add_values(s, packed, v_stage + warp_n * T::keys * T::VTile::pitch, lane);
        if constexpr (T::warps_n > 1) {
            partner.fetch(packed);
            t.add_values(s, packed, v_stage + (warp_n ^ 1) * T::keys * T::VTile::pitch, lane);
        }
        fresh = false;
        current = next;
        words_stage ^= 1;
        if constexpr (Config::stages > 1) stage ^= 1;
    }

    wait<Config, 0>();
    __syncthreads();   // out is staged over q
    write_rows(p, t, Mine(p, ptx::opaque_block()), base);
}

// Epilogue: out = O / l through shared memory, lse, (m, l); split: float32 partials.
template <class Config>
__device__ __forceinline__ void write_rows(const ForwardParams& p, ForwardTile<Config>& t, const Work<Config, ForwardTile<Config>::block_q>& work, uint32_t base) {
    using T = ForwardTile<Config>;
    using atom = typename T::atom;
    using element = typename Config::element;
    constexpr int M = T::M;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warp_m = warp / T::warps_n, warp_n = warp % T::warps_n, row0 = warp_m * 16 * M;
    const Partner<Config> partner{base, lane, warp_m, warp_n};
    t.state.add_threads();
    partner.reduce(t.state.sum, [](float x, float y) { return x + y; });
    const Sequence& seq = work.seq;
    const int b = seq.index, group = work.group, head = work.head, i0 = work.i0, rows = work.rows;
    const float poison = seq.valid ? 0.f : __uint_as_float(0x7FC00000u);
    const float keep = Config::dropout ? p.keep_scale : 1.f;
    const uint32_t staged = base + row0 * T::OTile::pitch;
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int local = 16 * m + 8 * r + (lane >> 2), row = row0 + local;
            const int i = i0 + (Config::pack ? row / group : row), h = head + (Config::pack ? row % group : 0);
            const bool owned = row < rows && i < seq.padded_q, query = i < seq.q_len;
            float sink = -infinity;
            if constexpr (Config::has_sinks)
                if (owned && query && !Config::split) sink = to_float(address<const typename Config::sink_element>(p.sinks)[h * p.sinks_h]);
            float inverse, lse, top, total;
            t.state.finish(m, r, sink, inverse, lse, top, total);
            if (!query) { inverse = 0.f; lse = top = -infinity; total = 0.f; }
            else { lse += poison; top += poison; }
            const int64_t lse_at = Config::packed ? h * static_cast<int64_t>(p.total_q) + seq.q_row + i
                                                  : (static_cast<int64_t>(b) * p.heads_q + h) * p.seqlen_q + i;
            const int64_t plane = static_cast<int64_t>(Config::packed ? 1 : p.batch) * p.heads_q * (Config::packed ? p.total_q : p.seqlen_q);
            if (owned && (lane & 3) == 0 && warp_n == 0) {
                if constexpr (Config::split) address<float>(p.partial_lse)[blockIdx.y * plane + lse_at] = lse;
                else {
                    address<float>(p.lse)[lse_at] = lse;
                    if constexpr (Config::stats) {
                        address<float>(p.stats)[lse_at] = top;
                        address<float>(p.stats)[p.stats_l + lse_at] = total;
                    }
                }
            }
            const bool blank = inverse == 0.f;   // 0 rather than 0 * acc, which may be NaN
            const float factor = inverse * keep;
#pragma unroll
            for (int c = 0; c < T::C; ++c) {
                const float x = (blank ? 0.f : t.acc[m][c][2 * r] * factor) + (query ? poison : 0.f);
                const float y = (blank ? 0.f : t.acc[m][c][2 * r + 1] * factor) + (query ? poison : 0.f);
                const int column = warp_n * T::columns + 8 * c + 2 * (lane & 3);
                if constexpr (Config::split) {
                    if (owned && column < Config::head_dim_v) {
                        float* to = address<float>(p.partial_out) + (blockIdx.y * plane + lse_at) * Config::head_dim_v + column;
                        to[0] = x;
                        if (column + 1 < Config::head_dim_v) to[1] = y;
                    }
                } else if constexpr (atom::wide) ptx::st_shared_v2(staged + T::OTile::offset(local, column), __float_as_uint(x), __float_as_uint(y));
                else ptx::st_shared_b32(staged + T::OTile::offset(local, column), pack<Config>(x, y));
            }
        }
    if constexpr (Config::split) return;
    if constexpr (T::warps_n > 1) partner.meet();
    else __syncwarp();
    constexpr int width = 16 / sizeof(element), chunks = (Config::head_dim_v + width - 1) / width;
#pragma unroll 4
    for (int index = warp_n * 32 + lane; index < 16 * M * chunks; index += 32 * T::warps_n) {
        const int local = index / chunks, column = index % chunks * width, row = row0 + local;
        const int i = i0 + (Config::pack ? row / group : row), h = head + (Config::pack ? row % group : 0);
        if (row >= rows || i >= seq.padded_q) continue;
        const int64_t token = (Config::packed ? seq.q_row : static_cast<int64_t>(b) * p.seqlen_q) + i;
        element* to = address<element>(p.out) + (token * p.heads_q + h) * Config::head_dim_v + column;
        const uint32_t from = staged + T::OTile::offset(local, column);
        if constexpr (Config::head_dim_v % width == 0) ptx::st_global_v4(to, ptx::ld_shared_v4(from));
        else {
            const uint4 value = ptx::ld_shared_v4(from);
            const uint32_t words[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
            for (int e = 0; e < width; ++e)
                if (column + e < Config::head_dim_v) {
                    if constexpr (atom::wide) reinterpret_cast<uint32_t*>(to)[e] = words[e];
                    else reinterpret_cast<uint16_t*>(to)[e] = static_cast<uint16_t>(words[e / 2] >> (16 * (e & 1)));
                }
        }
    }
}

}  // namespace attnlib
