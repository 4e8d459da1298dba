// The loading side of the wgmma backward (backward_sm90.cuh): how shared memory is divided, what the loading threads note there for
// everyone, and those two threads.
#pragma once

#include "ptx/hopper.cuh"
#include "tile.cuh"
#include "work.cuh"

namespace attnlib {

// dq: not 0 where a block takes all key tiles of a head ("whole heads", below), for dQ in the element type.
struct BackwardTilesParams {
    BackwardMapsParams maps;
    uint64_t dq;
    int64_t dq_b, dq_i, dq_h;
};
static_assert(sizeof(BackwardTilesParams) == 1152, "params.py and this differ");

template <class Config>
struct WarpgroupBackwardTile {
    using element = typename Config::element;
    static constexpr int panels_of(int dim) { return Config::split ? (dim + 127) / 128 * 2 : (dim + 63) / 64; }
    using atom = Atom<Config>;
    static constexpr bool half = is_half<element>::value;
    static constexpr bool split = Config::split, wide = Config::wide, divided = split || wide;   // divided: columns of dK and dV
    static constexpr int block_q = Config::block_q, block_k = Config::block_k, stages = 2;
    static constexpr int queries = split ? block_q / 2 : block_q, keys = 64, N = queries / 8;   // of a warpgroup's S
    static constexpr int panels = panels_of(Config::head_dim), panels_v = wide ? 2 : panels_of(Config::head_dim_v);
    static constexpr int steps = (Config::head_dim + 15) / 16, steps_v = (Config::head_dim_v + 15) / 16;
    static constexpr int columns = Config::columns, columns_v = Config::columns_v;   // of a warpgroup's dK and dV, rounded up to what Wgmma has
    static constexpr int dq_rows = block_q / 64, dq_columns = 64 * panels / (2 / dq_rows);   // how the warpgroups share dQ
    using QPanel = Tile<Config, block_q, 64>;
    using KPanel = Tile<Config, block_k, 64>;
    static constexpr int q_bytes = panels * QPanel::bytes, o_bytes = panels_v * QPanel::bytes, ds_bytes = block_q * block_k * 2, ds_buffers = divided ? 4 : 3;
    static constexpr int k_at = 0, v_at = panels * KPanel::bytes, q_at = v_at + panels_v * KPanel::bytes, o_at = q_at + stages * q_bytes;
    static constexpr int dq_floats = block_q * 64 * panels;
    static constexpr int ds_at = o_at + stages * o_bytes, rows_at = ds_at + ds_buffers * ds_bytes, rows_bytes = 8 * block_q;
    static constexpr int record_at = rows_at + stages * rows_bytes, record_bytes = 64, records = 8;
    static constexpr int keys_full = record_at + records * record_bytes, keys_empty = keys_full + 8, q_full = keys_empty + 8, q_empty = q_full + 8 * stages;
    static constexpr int o_full = q_empty + 8 * stages, o_empty = o_full + 8 * stages, ds_full = o_empty + 8 * stages;
    static constexpr bool apart = Config::apart;   // dQ has a warpgroup of its own
    static constexpr bool persistent = apart || !Config::deterministic;   // a block takes one tile after the other
    static constexpr bool whole_heads = Config::whole;   // a block can take all tiles of a head, and does if there is a dq
    static constexpr int pieces = dq_rows == 2 ? 2 : panels, piece_columns = 64;   // of dQ: 64 queries each, or a panel's columns
    static constexpr bool late = !divided && !apart && !Config::dropout && columns + columns_v <= 192;   // there are registers for dK's operand until the next S is under way
    static constexpr int ds_empty = ds_full + 24, tile_full = ds_empty + 24, tile_empty = tile_full + 16, tile_at = tile_empty + 16;
    static constexpr int drawn_at = tile_at + 128, exchange_at = drawn_at + 16, exchange_bytes = 8 * 128, exchanges = split ? 1 : 2;   // dropout: seed; bits for the neighbour (split warpgroups meet before the next)
    static constexpr int kept_at = exchange_at + exchanges * exchange_bytes;
    static constexpr bool keeps = Config::dropout && !split && block_q == 128;   // bits wait there
    static constexpr int shared_bytes = Config::dropout ? kept_at + (keeps ? 2048 : 0) : drawn_at;
    static constexpr bool tails = Config::lengths || Config::packed;
    static_assert(dq_rows == 1 || dq_rows == 2, "64 or 128 queries");
    static_assert(wide || dq_columns % 64 == 0 || dq_columns == 32, "whole panels, or half of the only one");
    static_assert(block_k == (split ? 64 : 128) && (!split || block_q == 64), "the two ways to share the work");
    static_assert(!Scorer<Config>::natural && !Scorer<Config>::lookups, "scores that nothing but position touches");
    static_assert(!wide || (block_q == 64 && panels == 3 && Config::head_dim_v <= 128 && persistent && !split && !Config::dropout && !Config::softcap), "what backward_sm90_wide.cuh is for");
    static_assert(!apart || (Config::deterministic && !divided && !Config::dropout && !Config::softcap && panels <= 2 && (dq_rows == 2) == (panels == 1)), "what backward_sm90_apart.cuh is for");
    static_assert(!(divided || apart) || !(Config::order || Config::dq_first || Config::held), "these have one schedule");
    static_assert(!whole_heads || (persistent && !apart && !wide && !tails && !Config::left), "what whole heads are for");
    static_assert(stages + 3 <= records, "a record outlives its stage by a step");
    static_assert(!apart || stages + ds_buffers + 2 <= records, "and dS that waits for its warpgroup by another");
    static_assert(tile_at % 16 == 0 && drawn_at % 16 == 0, "vectors");
};

// What the loading thread tells the others of a query tile. count: queries in it; position: of the first; rank: with
// whole heads 1 if dQ starts with this tile of keys, else 2. Behind it lie, for
// dropout, query head, first query and sequence (32), and first key and kv_len of the tile of keys (48).
struct QueryRecord {
    uint64_t dq, turn;     // where dQ is added; deterministic: the counter that must stand at rank
    int count, position, edge, rank;

    __device__ __forceinline__ void write(uint32_t at) const {
        ptx::st_shared_b64(at, dq);
        ptx::st_shared_b64(at + 8, turn);
        ptx::st_shared_v4(at + 16, make_uint4(count, position, edge, rank));
    }
};

template <class Config>
using KeyTile = KeyWork<Config, WarpgroupBackwardTile<Config>::block_q, WarpgroupBackwardTile<Config>::block_k>;

// What everyone is told of a tile of keys. visits: of query tiles, -1: there are no more tiles; start, first, last: query tiles
// of each head; head: the first; offset: from query to position; row_tile: of the first query tile; count: rows of dK to be written.
struct KeyRecord {
    int visits, start, first, last, head, q_len, kv_len, offset, q_row, row_tile, index, j0, k_row, head_kv, batch, count;
    static constexpr int bytes = 64;

    __device__ __forceinline__ void write(uint32_t at) const {
        ptx::st_shared_v4(at, make_uint4(visits, start, first, last));
        ptx::st_shared_v4(at + 16, make_uint4(head, q_len, kv_len, offset));
        ptx::st_shared_v4(at + 32, make_uint4(q_row, row_tile, index, j0));
        ptx::st_shared_v4(at + 48, make_uint4(k_row, head_kv, batch, count));
    }
    __device__ __forceinline__ static KeyRecord read(uint32_t at) {
        const uint4 a = ptx::ld_shared_v4(at), b = ptx::ld_shared_v4(at + 16), c = ptx::ld_shared_v4(at + 32), d = ptx::ld_shared_v4(at + 48);
        return {int(a.x), int(a.y), int(a.z), int(a.w), int(b.x), int(b.y), int(b.z), int(b.w), int(c.x), int(c.y), int(c.z), int(c.w), int(d.x), int(d.y), int(d.z), int(d.w)};
    }
};

// Whole heads: few tiles, of which a block takes all that a key/value head has, the first keys first. So nobody else adds to the head's
// dQ: its sums begin as what the first tile stores, in a place that is the block's for all its heads and so stays in L2, and end in
// the block, too. Every query must see the first key. This is where, in query tiles, the sums of a query head begin.
__device__ __forceinline__ int64_t whole_head_place(const BackwardParams& p, int head) {
    const int group = p.heads_q / p.heads_kv;
    return (static_cast<int64_t>(blockIdx.x) * group + head % group) * p.tiles;
}

// Under a causal mask, whether the last queries come first: all tiles of keys see those, so blocks that begin together find each
// other's queries and dQ in L2 for longer where a group has several heads, or tiles of different lengths drift apart over them. Of eight
// heads and more, each has its turn with eight query tiles before any has the eight before those. Elsewhere blocks start
// where their mask does, and so at different queries: which kernels have it goes by measurements (docs/kernels/sm90_backward.md).
template <class Config>
__device__ __forceinline__ bool last_queries_first(const BackwardParams& p) {
    return Config::right && !Config::deterministic && (Config::wide || ((Config::held || Config::whole) && p.heads_q != p.heads_kv));
}

// One thread hands out tiles, and loads their keys and values when those of the tile before are no longer read.
template <class Config>
__device__ __forceinline__ void plan_tiles(const BackwardTilesParams& all, uint32_t base, int block) {
    using T = WarpgroupBackwardTile<Config>;
    const BackwardMapsParams& params = all.maps;
    const BackwardParams& p = params.problem;
    const int of_head = T::whole_heads && all.dq ? p.key_tiles : 1;   // tiles that one ticket stands for
    const int tiles = p.key_tiles / of_head * p.heads_kv * (Config::packed ? 1 : p.batch);
    int loaded = 0, within = 0;
#pragma unroll 1
    for (int passed = 0;; ++passed) {
        const int slot = passed % 2;
        const uint32_t at = base + T::tile_at + KeyRecord::bytes * slot;
        ptx::mbarrier_wait(base + T::tile_empty + 8 * slot, (passed / 2 & 1) ^ 1);
        if (block >= tiles) {
            ptx::st_shared_b32(at, 0xFFFFFFFFu);
            ptx::mbarrier_arrive(base + T::tile_full + 8 * slot);
            break;
        }
        KeyRecord tile{};
        {
            const KeyTile<Config> work(p, block * of_head + within);
            if (!work.idle) {
                const bool any = work.per_head > 0;
                tile = {any ? work.group * work.per_head : 0, any && last_queries_first<Config>(p) ? work.last - 1 : work.start, work.first, work.last,
                        Config::fault == head_mod ? work.head_kv : work.head_kv * work.group, work.seq.q_len, work.seq.kv_len, static_cast<int>(work.window.offset),
                        static_cast<int>(work.seq.q_row), any ? static_cast<int>(first_tile<Config>(p, work.b, T::block_q)) : 0, work.seq.index, work.j0,
                        static_cast<int>(work.seq.k_row), work.head_kv, Config::packed ? 0 : work.b, work.seq.padded_k - work.j0};
            }
        }
        tile.write(at);
        ptx::mbarrier_arrive(base + T::tile_full + 8 * slot);
        if (tile.visits > 0) {
            const uint64_t once = ptx::evict_first();
            ptx::mbarrier_wait(base + T::keys_empty, (loaded & 1) ^ 1);
            ++loaded;
            ptx::mbarrier_expect(base + T::keys_full, (T::panels + T::panels_v) * T::KPanel::bytes);
            const int row = tile.k_row + tile.j0;
            for (int panel = 0; panel < T::panels; ++panel) ptx::tensor_load(base + T::k_at + panel * T::KPanel::bytes, &params.k, 64 * panel, row, tile.head_kv, tile.batch, base + T::keys_full, once);
            for (int panel = 0; panel < T::panels_v; ++panel) ptx::tensor_load(base + T::v_at + panel * T::KPanel::bytes, &params.v, 64 * panel, row, tile.head_kv, tile.batch, base + T::keys_full, once);
        }
        if constexpr (T::persistent) {
            if (++within < of_head) continue;
            within = 0;
            // Others wait for this tile: none is drawn before it can begin.
            if (Config::deterministic) ptx::mbarrier_wait(base + T::keys_empty, (loaded & 1) ^ 1);
            ptx::wait_dependency<Config>();   // a kernel ahead may draw from the same counter, or set it to zero
            const int drawn = atomicAdd(address<int>(p.ticket), 1);
            if (!Config::deterministic && drawn == tiles - 1) *address<int>(p.ticket) = 0;   // the last ticket: one for each tile
            block = drawn + (Config::deterministic ? 0 : static_cast<int>(gridDim.x));   // deterministic: the first were drawn, too
        } else block = tiles;
    }
}

// Another thread loads the queries that see them.
template <class Config>
__device__ __forceinline__ void load_queries(const BackwardTilesParams& all, uint32_t base) {
    using T = WarpgroupBackwardTile<Config>;
    const BackwardMapsParams& params = all.maps;
    const BackwardParams& p = params.problem;
    if constexpr (Config::dropout) ptx::st_shared_b64(base + T::drawn_at, *address<const uint64_t>(p.seed));
    ptx::wait_dependency<Config>();   // row statistics
    int visit = 0;
#pragma unroll 1
    for (int passed = 0;; ++passed) {
        const int slot = passed % 2;
        ptx::mbarrier_wait(base + T::tile_full + 8 * slot, passed / 2 & 1);
        const uint32_t noted = base + T::tile_at + KeyRecord::bytes * slot;
        int left = ptx::ld_shared_b32(noted), tile = ptx::ld_shared_b32(noted + 4), head = ptx::ld_shared_b32(noted + 16);
        int member = 0;   // of the group: the head
        if (left < 0) break;
#pragma unroll 1
        for (; left > 0; --left) {
            // What is noted is read anew rather than kept in registers, before there is room for the loads.
            const int i0 = tile * T::block_q, stage = visit % T::stages;
            const int64_t place = head * p.row_tiles + static_cast<int>(ptx::ld_shared_b32(noted + 36)) + tile;
            {
                const uint4 of_head = ptx::ld_shared_v4(noted + 16);
                const int count = min(T::block_q, static_cast<int>(of_head.y) - i0), position = i0 + static_cast<int>(of_head.w), j0 = ptx::ld_shared_b32(noted + 44);
                const uint32_t at = base + T::record_at + T::record_bytes * (visit % T::records);
                const int edge = Edges<Config>(p, position, count, of_head.z).cross(j0, j0 + T::block_k);
                QueryRecord record{p.dq_sum + 4 * place * T::dq_floats, 0, count, position, edge, 0};
                if (T::whole_heads && all.dq) {
                    record.dq = p.dq_sum + 4 * T::dq_floats * (whole_head_place(p, head) + tile);
                    record.rank = j0 == 0 ? 1 : 2;
                }
                if constexpr (Config::deterministic) {
                    Sequence seq{};
                    seq.q_len = of_head.y;
                    seq.kv_len = of_head.z;
                    const uint4 span = ptx::ld_shared_v4(noted);
                    const int key_tiles = (seq.kv_len + T::block_k - 1) / T::block_k;
                    record.turn = p.order + 4 * place * 8;
                    record.rank = turn_of<Config, T::block_q, T::block_k>(window_of<Config>(p, seq), seq, tile, j0 / T::block_k, round_of<Config>(p, key_tiles, span.w - span.z), key_tiles);
                }
                record.write(at);
                ptx::st_shared_v2(at + 48, j0, of_head.z);
                if constexpr (Config::dropout) ptx::st_shared_v4(at + 32, make_uint4(head, i0, ptx::ld_shared_b32(noted + 40), 0));
            }
            const int row = static_cast<int>(ptx::ld_shared_b32(noted + 32)) + i0, batch = ptx::ld_shared_b32(noted + 56);
            const uint64_t keep = T::whole_heads && all.dq ? ptx::evict_first() : ptx::evict_last();   // the former: beside sums
            const uint32_t full = base + T::q_full + 8 * stage;
            ptx::mbarrier_wait(base + T::q_empty + 8 * stage, (visit / T::stages & 1) ^ 1);
            ptx::mbarrier_expect(full, T::q_bytes + T::rows_bytes);
            for (int panel = 0; panel < T::panels; ++panel) ptx::tensor_load(base + T::q_at + stage * T::q_bytes + panel * T::QPanel::bytes, &params.q, 64 * panel, row, head, batch, full, keep);
            ptx::bulk_load(base + T::rows_at + stage * T::rows_bytes, address<const float>(p.rows) + place * (2 * T::block_q), T::rows_bytes, full);
            ptx::mbarrier_wait(base + T::o_empty + 8 * stage, (visit / T::stages & 1) ^ 1);
            ptx::mbarrier_expect(base + T::o_full + 8 * stage, T::o_bytes);
            for (int panel = 0; panel < T::panels_v; ++panel) ptx::tensor_load(base + T::o_at + stage * T::o_bytes + panel * T::QPanel::bytes, &params.dout, 64 * panel, row, head, batch, base + T::o_full + 8 * stage, keep);
            ++visit;
            const uint4 span = ptx::ld_shared_v4(noted);
            const int first = span.z, last = span.w, next_head = Config::fault == head_mod ? p.heads_kv : 1;
            if (last_queries_first<Config>(p)) {
                const int group = p.heads_q / p.heads_kv, run = group < 8 ? 1 << 30 : 8, begin = max(first, tile & -run);
                if (tile > begin) --tile;
                else if (++member < group) {
                    tile = min(last, (tile & -run) + run) - 1;
                    head += next_head;
                } else {
                    tile = begin - 1;
                    head -= (group - 1) * next_head;
                    member = 0;
                }
                continue;
            }
            tile = tile + 1 == last ? first : tile + 1;
            if (tile == static_cast<int>(span.y)) head += next_head;
        }
        ptx::mbarrier_arrive(base + T::tile_empty + 8 * slot);
    }
}

}  // namespace attnlib
