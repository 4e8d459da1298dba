// The parameters of every SIMT kernel, and the faults that can be compiled in.
#pragma once

#include "types.h"

namespace attnlib {

// The mirror of backends/attnlib_cupy/params.py. Addresses are uint64_t, strides in
// elements. *_b, *_i, *_j, *_h: sequence (or page), query, key, head. A packed operand has no batch stride.
struct SimtParams {
    uint64_t q, k, v, out, lse, stats, dout, dlse, dq, dk;
    uint64_t dv, dbias, dsinks, rows, sinks, k_new, v_new, part_out, part_stats;
    uint64_t q_lens, kv_lens, new_lens, cu_q, cu_k, page_table, bias, mask, alibi, block_mask;
    uint64_t seed;
    int64_t q_b, q_i, q_h, k_b, k_j, k_h, v_b, v_j, v_h, do_b;
    int64_t do_i, do_h, kn_b, kn_t, kn_h, vn_b, vn_t, vn_h, dbias_b, dbias_h;
    int64_t dbias_i, dbias_j, dlse_b, dlse_h, dlse_i;
    int64_t bias_b, bias_h, bias_i, bias_j, mask_b, mask_h, mask_i, mask_j, block_b, block_h;
    int64_t block_i, block_j, alibi_b, alibi_h, page_row;
    double scale, softcap, keep_scale;
    int32_t batch, seqlen_q, seqlen_k, total_q, total_k, heads_q, heads_kv, window_left, window_right, new_tokens;
    int32_t block_rows, block_columns, page_size, dropout_threshold;
    int32_t head_dim, head_dim_v, capacity, tiles, units, splits, top_left, sinks_type, size_b, size_h, size_i, size_j;
};

// Faults that tests compile in to see them caught; 0 is none.
enum Fault { no_fault, no_rescale, ignore_window_left, drop_last_partial_key_block, head_mod, skip_delta,
             dropout_ignores_head, leak_past_kv_len, scaled_dv, scaled_scores };

}  // namespace attnlib
