// Which tile of which head a block works on: rows of queries in the forward, of keys in the backward.
#pragma once

#include "score.cuh"

namespace attnlib {

// Which rows a block owns. Heads within a section stay together; causal tiles go longest first. Located twice, before the
// main loop and after it, so that nothing of it stays in registers in between.
template <class Config, int block_q>
struct Work {
    Sequence seq;
    int group, head, head_kv;     // rows a query has in the tile; first query head; key/value head
    int i0, i1, rows;             // queries [i0, i1); rows of the tile in use
    bool idle;

    __device__ __forceinline__ Work(const ForwardParams& p, int block) {
        group = Config::pack ? p.heads_q / p.heads_kv : 1;
        const int heads = Config::pack ? p.heads_kv : p.heads_q;
        const int per_tile = Config::pack ? block_q / group : block_q;
        const int units = heads * (Config::packed ? 1 : p.batch);
        const int section = block / (p.tiles * p.section), rest = block - section * p.tiles * p.section;
        const int width = min(p.section, units - section * p.section);
        int tile = rest / width, unit = section * p.section + rest - tile * width, b = 0;
        if (Config::right) tile = p.tiles - 1 - tile;
        idle = false;
        if constexpr (Config::packed) {
            int within;
            idle = !find_packed_tile<Config>(address<const int>(p.cu_q), p.batch, p.total_q, per_tile, tile, b, within);
            tile = within;
        } else {
            b = unit / heads;
            unit -= b * heads;
        }
        seq = sequence_of<Config>(p, b);
        head = Config::pack ? unit * group : unit;
        head_kv = Config::pack ? unit : Config::fault == head_mod ? unit % p.heads_kv : unit / (p.heads_q / p.heads_kv);
        i0 = tile * per_tile;
        i1 = min(i0 + per_tile, seq.q_len);
        rows = Config::pack ? per_tile * group : block_q;
    }
};

// KeyWork's round
template <class Config>
__device__ __forceinline__ int round_of(const BackwardParams& p, int key_tiles, int per_head) {
    return Config::deterministic && !Config::left && !Config::right && p.rotate && key_tiles > 0 ? per_head : 0;
}

// The keys that a block of the backward owns, and the query tiles that see them: [first, last) of every head of the group,
// visited from `start` on. Causal tiles have the most queries first, deterministic ones the reverse.
template <class Config, int block_q, int block_k>
struct KeyWork {
    Sequence seq;
    Window window;
    int b, head_kv, group, tile, j0, j1, first, last, per_head, key_tiles;
    int round;   // deterministic: > 0 if all blocks of a head are sure to run together, evenly spread over these query tiles
    int start;
    bool idle;

    __device__ __forceinline__ KeyWork(const BackwardParams& p, int block) {
        const int units = p.heads_kv * (Config::packed ? 1 : p.batch);
        const int section = block / (p.key_tiles * p.section), rest = block - section * p.key_tiles * p.section;
        const int width = min(p.section, units - section * p.section);
        tile = rest / width;
        int unit = section * p.section + rest - tile * width;
        b = 0;
        idle = false;
        if (Config::deterministic && Config::right) tile = p.key_tiles - 1 - tile;
        if constexpr (Config::packed) {
            int within;
            idle = !find_packed_tile<Config>(address<const int>(p.cu_k), p.batch, p.total_k, block_k, tile, b, within);
            if (idle) return;
            tile = within;
        } else {
            b = unit / p.heads_kv;
            unit -= b * p.heads_kv;
        }
        seq = sequence_of<Config>(p, b);
        window = window_of<Config>(p, seq);
        head_kv = unit;
        group = p.heads_q / p.heads_kv;
        j0 = tile * block_k;
        j1 = min(j0 + block_k, seq.kv_len);
        first = last = 0;
        if (j1 > j0 && seq.q_len > 0) {
            const int begin = clamp(window.query_begin(j0), 0, seq.q_len), end = static_cast<int>(window.query_end(j1 - 1));
            if (end > begin) {
                first = begin / block_q;
                last = (end + block_q - 1) / block_q;
            }
        }
        per_head = last - first;
        // Blocks start at different tiles, so that they don't add to the same dQ at once.
        key_tiles = (seq.kv_len + block_k - 1) / block_k;
        round = round_of<Config>(p, key_tiles, per_head);
        start = Config::deterministic ? first + (round > 0 ? tile * round / key_tiles : 0) : !Config::right && per_head > 0 ? first + tile % per_head : first;
    }
};

// Deterministic: how many key tiles add to query tile i before key tile `tile` does. Ascending; descending where the later keys get
// here first; or as they come by.
template <class Config, int block_q, int block_k>
__device__ __forceinline__ int turn_of(const Window& window, const Sequence& seq, int i, int tile, int round, int key_tiles) {
    const int i0 = i * block_q, i1 = min(i0 + block_q, seq.q_len);
    const int lowest = clamp(window.key_begin(i0), 0, seq.kv_len) / block_k, highest = (static_cast<int>(window.key_end(i1 - 1)) - 1) / block_k;
    const int nearest = round > 0 ? ((i + 1) * key_tiles - 1) / round : highest;   // the last to have started by there
    return round > 0 ? nearest - tile + (tile > nearest ? key_tiles : 0) : Config::right ? highest - tile : tile - lowest;
}

}  // namespace attnlib
