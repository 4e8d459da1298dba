// Parameter structs, one a kernel: the mirror of backends/attnlib_cuda/params.py (which can print this file's structs).
// Addresses are uint64_t; strides are in elements. *_b, *_i, *_j, *_h: sequence, query, key, head.
#pragma once

#include "ptx/hopper.cuh"
#include "types.h"

namespace attnlib {

struct ForwardParams {
    uint64_t q, k, v, out, lse, stats, sinks, partial_out, partial_lse;
    int64_t q_b, q_i, q_h, k_b, k_j, k_h, v_b, v_j, v_h, stats_l;
    int64_t sinks_h;
    uint64_t q_lens, kv_lens, new_lens, cu_q, cu_k, page_table, bias, mask, alibi, block_mask;
    uint64_t seed;
    int64_t bias_b, bias_h, bias_i, bias_j, mask_b, mask_h, mask_i, mask_j, block_b, block_h;
    int64_t block_i, block_j, alibi_b, alibi_h, page_row;
    int32_t batch, seqlen_q, seqlen_k, total_q, total_k, heads_q, heads_kv, window_left, window_right, new_tokens;
    int32_t block_rows, block_columns, page_size, dropout_threshold;
    float scale, softcap, keep_scale;
    int32_t tiles, section, splits;
};
static_assert(sizeof(ForwardParams) == 448, "params.py and params.cuh differ");

struct ForwardMapsParams {   // forward_sm90.cuh: maps of [batch, head, row, column]
    ptx::TensorMap q, k, v, out;
    ForwardParams problem;
    uint64_t ticket;   // int32 in global memory, 0 before and after a launch; 0: tiles go round robin
};
static_assert(sizeof(ForwardMapsParams) == 1024, "params.py and params.cuh differ");

struct CombineParams {
    uint64_t out, lse, stats, sinks, partial_out, partial_lse, q_lens, cu_q;
    int64_t stats_l, sinks_h;
    int32_t batch, seqlen_q, total_q, heads_q, splits;
};
static_assert(sizeof(CombineParams) == 104, "params.py and params.cuh differ");

struct AppendParams {
    uint64_t k, v, k_new, v_new, kv_lens, new_lens, page_table;
    int64_t k_b, k_j, k_h, v_b, v_j, v_h, kn_b, kn_t, kn_h, vn_b;
    int64_t vn_t, vn_h, page_row;
    int32_t batch, capacity, heads_kv, new_tokens, page_size;
};
static_assert(sizeof(AppendParams) == 184, "params.py and params.cuh differ");

struct BackwardParams {
    uint64_t q, k, v, dout, dk, dv, dq_sum, rows, dbias, order;
    uint64_t ticket;
    int64_t q_b, q_i, q_h, k_b, k_j, k_h, v_b, v_j, v_h, do_b;
    int64_t do_i, do_h, dk_b, dk_j, dk_h, dv_b, dv_j, dv_h, dbias_b, dbias_h;
    int64_t dbias_i, dbias_j, row_tiles;
    uint64_t q_lens, kv_lens, new_lens, cu_q, cu_k, page_table, bias, mask, alibi, block_mask;
    uint64_t seed;
    int64_t bias_b, bias_h, bias_i, bias_j, mask_b, mask_h, mask_i, mask_j, block_b, block_h;
    int64_t block_i, block_j, alibi_b, alibi_h, page_row;
    int32_t batch, seqlen_q, seqlen_k, total_q, total_k, heads_q, heads_kv, window_left, window_right, new_tokens;
    int32_t block_rows, block_columns, page_size, dropout_threshold;
    float scale, softcap, keep_scale;
    int32_t tiles, key_tiles, section, rotate;
};
static_assert(sizeof(BackwardParams) == 568, "params.py and params.cuh differ");

struct BackwardMapsParams {   // backward_sm90.cuh
    ptx::TensorMap q, k, v, dout;
    BackwardParams problem;
};
static_assert(sizeof(BackwardMapsParams) == 1088, "params.py and params.cuh differ");

struct DeltaParams {
    uint64_t out, dout, lse, stats, dlse, rows, dq_sum, q_lens, cu_q;
    int64_t out_b, out_i, out_h, do_b, do_i, do_h, dlse_b, dlse_h, dlse_i, stats_l;
    int64_t row_tiles;
    int32_t batch, seqlen_q, total_q, heads_q, tiles;
};
static_assert(sizeof(DeltaParams) == 184, "params.py and params.cuh differ");

struct QueryGradientParams {
    uint64_t dq, dq_sum, q_lens, cu_q;
    int64_t dq_b, dq_i, dq_h, row_tiles;
    int32_t batch, seqlen_q, total_q, heads_q, tiles;
    float scale;
};
static_assert(sizeof(QueryGradientParams) == 88, "params.py and params.cuh differ");

struct SinkGradientParams {
    uint64_t dsinks, sinks, rows, lse, q_lens, cu_q;
    int64_t sinks_h, dsinks_h, row_tiles;
    int32_t batch, seqlen_q, total_q, heads_q, tiles;
};
static_assert(sizeof(SinkGradientParams) == 96, "params.py and params.cuh differ");

struct BiasGradientParams {
    uint64_t q, k, v, dout, rows, dbias;
    int64_t q_b, q_i, q_h, k_b, k_j, k_h, v_b, v_j, v_h, do_b;
    int64_t do_i, do_h, dbias_b, dbias_h, dbias_i, dbias_j, row_tiles;
    uint64_t q_lens, kv_lens, new_lens, cu_q, cu_k, page_table, bias, mask, alibi, block_mask;
    uint64_t seed;
    int64_t bias_b, bias_h, bias_i, bias_j, mask_b, mask_h, mask_i, mask_j, block_b, block_h;
    int64_t block_i, block_j, alibi_b, alibi_h, page_row;
    int32_t batch, seqlen_q, seqlen_k, total_q, total_k, heads_q, heads_kv, window_left, window_right, new_tokens;
    int32_t block_rows, block_columns, page_size, dropout_threshold;
    float scale, softcap, keep_scale;
    int32_t tiles, size_b, size_h, size_i, size_j;
};
static_assert(sizeof(BiasGradientParams) == 480, "params.py and params.cuh differ");

}  // namespace attnlib
