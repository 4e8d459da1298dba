// Which tile of which head a block works on.
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

}  // namespace attnlib
