// One run of attention on the CPU as plain data: what bind.cpp fills, run.cpp schedules and the kernels read.
//
// Strides count elements; a pointer is null where the operand is absent. Positions, lengths and offsets are 64 bits.
// No STL here: this header is compiled into the units of every instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

// Forced inlining keeps shared headers from leaving copies compiled for AVX-512 where other code may pick them up.
#include "../common/types.h"
#undef ATTNLIB_FN
#define ATTNLIB_FN inline __attribute__((always_inline))
#include "../common/window.h"

namespace attnlib {

enum class DType : int32_t { f64 = 0, f32 = 1, f16 = 2, bf16 = 3 };

ATTNLIB_FN int64_t size_of(DType type) { return type == DType::f64 ? 8 : type == DType::f32 ? 4 : 2; }

// Faults of the test build, each one line in the kernels; see fault_names in bind.cpp.
enum class Fault : int32_t {
    none = 0,
    no_rescale,
    ignore_window_left,
    drop_last_partial_key_block,
    head_mod,
    skip_delta,
    dropout_ignores_head,
    leak_past_kv_len,
    dv_scale,
    softcap_after_bias,
    sink_forgotten,
    parts_unscaled,
};

// A strided operand: element (a, b, c, d) is at data + (a * stride[0] + ...) * size_of(dtype).
struct View {
    char* data = nullptr;
    int64_t stride[4] = {0, 0, 0, 0};
    DType dtype = DType::f32;

    ATTNLIB_FN bool present() const { return data != nullptr; }
    ATTNLIB_FN int64_t bytes() const { return size_of(dtype); }
};

struct Params {
    // [batch, token, head, dim]; packed: stride[0] is 0; paged k and v: [page, slot, head, dim]
    View q, k, v, out, dout, dq, dk, dv, k_new, v_new;
    View bias, dbias;        // [batch, head, query, key]
    View mask, block_mask;   // the same, bytes; strides in bytes
    View lse, dlse;          // [batch, head, query]; packed: stride[0] is 0 and stride[2] counts tokens
    View stats;              // row maximum, laid out as lse; the row sum lies stats_sum elements further
    View alibi;              // [batch, head]
    View sinks, dsinks;      // [head]
    int64_t stats_sum = 0;

    const int32_t* q_lens = nullptr;
    const int32_t* kv_lens = nullptr;
    const int32_t* new_lens = nullptr;
    const int32_t* cu_q = nullptr;
    const int32_t* cu_k = nullptr;
    const int32_t* page_table = nullptr;
    int64_t page_table_stride[2] = {0, 0};
    int64_t lens_stride[5] = {1, 1, 1, 1, 1};  // q_lens, kv_lens, new_lens, cu_q, cu_k
    uint64_t seed = 0;

    int64_t batch = 0, seqlen_q = 0, seqlen_k = 0, heads_q = 0, heads_kv = 0, dim = 0, dim_v = 0;
    int64_t total_q = 0, total_k = 0;
    int64_t page_size = 0, num_pages = 0, max_pages = 0;
    int64_t new_tokens = 0;  // rows of k_new
    int64_t left = -1, right = -1;
    int64_t mask_block_q = 0, mask_block_k = 0;
    int64_t dropout_threshold = 0;
    double scale = 1.0, softcap = 0.0;  // softcap 0: none
    bool packed = false, paged = false, top_left = false, grads = false;  // grads: a backward will follow

    int64_t block_q = 0, block_k = 0;  // rows and keys of a tile
    int64_t share = 1;                 // forward: query heads of a group that one unit takes together
    int64_t chunk = 0;                 // forward of few queries: keys of a unit (decode.h); else 0
    Fault fault = Fault::none;

    // Set by the scheduler for backward: float (double) workspaces, [batch or 1, head, row] and [.., dim_padded].
    char* delta = nullptr;     // laid out as lse
    char* dq_sum = nullptr;    // [head, query row over all sequences, dq_width]
    char* dsink_part = nullptr;  // [batch, head]
    char* dk_sum = nullptr;    // paged: [page slot, head, dim]; null otherwise
    char* dv_sum = nullptr;
    int64_t dq_width = 0, rows_q = 0;

    // Set by the scheduler: copies of operands that several units read, or parts of results; see Sequence::first_copy.
    char* tiles = nullptr;

    ATTNLIB_FN int64_t group() const { return heads_kv ? heads_q / heads_kv : 1; }
    ATTNLIB_FN int64_t kv_head(int64_t h) const {
        if (has(Fault::head_mod)) return h % heads_kv;
        return h / group();
    }
#ifdef ATTNLIB_TEST_FAULTS
    ATTNLIB_FN bool has(Fault f) const { return fault == f; }
#else
    ATTNLIB_FN bool has(Fault) const { return false; }
#endif
};

// One sequence of the batch. extent_begin is the first key that any of its queries may see.
struct Sequence {
    int64_t index = 0;
    int64_t q_row = 0, k_row = 0;  // first token row when packed
    int64_t q_rows = 0, k_rows = 0;  // rows of the operands that belong to it, padding included
    int64_t q_len = 0, kv_len = 0;
    int64_t extent_begin = 0;
    bool valid = true;
    Window window{};
    // Its tiles, `tiles` a head. Forward: of keys (chunks of them), from key_tile on; backward: of queries. first_tile
    // numbers them through over the sequences.
    int64_t first_tile = 0, key_tile = 0, tiles = 0;
    int64_t first_copy = -1;  // its first one in params.tiles; -1: none, it would not fill one or is read only once
};

// The kernels of one instruction set and one arithmetic, as plain functions.
struct Kernels {
    const char* name;
    int64_t real_bytes;       // of an accumulator
    int64_t rows_per_word;    // block_q of a backward tile is a multiple of this, if there is a block mask
    size_t (*forward_workspace)(const Params&);
    size_t (*forward_tile)(const Params&);  // bytes of one of params.tiles
    void (*fill_forward_tile)(const Params&, const Sequence&, int64_t kv_head, int64_t tile, char* workspace);
    void (*forward)(const Params&, const Sequence&, int64_t first_head, int64_t row_begin, int64_t row_end, char* workspace);
    size_t (*decode_workspace)(const Params&);
    size_t (*decode_part)(const Params&);  // bytes of what a unit leaves in params.tiles
    void (*decode)(const Params&, const Sequence&, int64_t kv_begin, int64_t kv_end, int64_t chunk, char* workspace);
    void (*merge)(const Params&, const Sequence&, int64_t head, char* workspace);
    void (*delta)(const Params&, const Sequence&, int64_t head, char* workspace);
    size_t (*backward_workspace)(const Params&);
    size_t (*backward_tile)(const Params&);
    void (*fill_backward_tile)(const Params&, const Sequence&, int64_t head, int64_t tile, char* workspace);
    int64_t (*dq_width)(const Params&);
    // dk and dv of one key block of one key/value head, and its part of dq. turns [head, query block] counts the key
    // blocks that are done, from first_tile on; null where one thread takes all key blocks in order.
    void (*backward)(const Params&, const Sequence&, int64_t kv_head, int64_t key_block, char* workspace, int32_t* turns);
    void (*store_dq)(const Params&, const Sequence&, int64_t head, int64_t row_begin, int64_t row_end);
    void (*store)(DType, char* to, const void* from, int64_t count);  // accumulators to storage
};

}  // namespace attnlib
