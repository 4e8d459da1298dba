// Scheduling. Forward units are (sequence, head, query block), longest first, or where there are few queries (sequence,
// key/value heads, chunk of keys) and then (sequence, head); a row's result does not depend on them.
//
// Backward units are (key block, sequence, key/value head); dq is summed in ascending key blocks (backward.h). A bias
// gradient that is broadcast over sequences, heads or keys folds those into one unit, so that every element has one
// writer and one order. Page gradients fold sequences and key blocks, since pages may be shared.
#include "run.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "amx.h"
#include "pool.h"

namespace attnlib {

extern const Kernels portable_f32, portable_f64;
#if defined(ATTNLIB_X86)
extern const Kernels avx2_f32, avx2_f64, avx512_f32, avx512_f64, avx512_bf16, amx_bf16;
#endif

namespace {

const Kernels& kernels_for(int family, DType dtype, bool pairs) {
    const bool wide = dtype == DType::f64;
#if defined(ATTNLIB_X86)
#if defined(ATTNLIB_AMX)
    if (family == kAmx && dtype == DType::bf16 && pairs) return amx_bf16;
#endif
    if (family == kAmx) family = kAvx512;
    if (family == kAvx512 && dtype == DType::bf16 && pairs && (supported_families() & 8)) return avx512_bf16;
    if (family == kAvx512) return wide ? avx512_f64 : avx512_f32;
    if (family == kAvx2) return wide ? avx2_f64 : avx2_f32;
#endif
    (void)family, (void)pairs;
    return wide ? portable_f64 : portable_f32;
}

int64_t value_or(const int32_t* x, int64_t stride, int64_t at, int64_t fallback) { return x ? x[at * stride] : fallback; }

bool pages_fit(const Params& p, int64_t b, int64_t first, int64_t end) {
    const int32_t* table = p.page_table + b * p.page_table_stride[0];
    for (int64_t n = first / p.page_size; n * p.page_size < end; ++n) {
        const int64_t page = table[n * p.page_table_stride[1]];
        if (page < 0 || page >= p.num_pages) return false;
    }
    return true;
}

// Sequence b with its window; `fresh` tokens are appended behind `old`.
Sequence place(const Params& p, int64_t b, int64_t q_row, int64_t q_rows, int64_t q_len, int64_t k_row, int64_t k_rows,
               int64_t old, int64_t fresh) {
    Sequence s;
    s.index = b, s.q_row = q_row, s.q_rows = q_rows, s.k_row = k_row, s.k_rows = k_rows;
    s.q_len = q_len, s.kv_len = old + fresh;
    const int64_t capacity = p.paged ? p.max_pages * p.page_size : k_rows;
    s.valid = q_len >= 0 && q_len <= q_rows && old >= 0 && fresh >= 0 && fresh <= p.new_tokens && s.kv_len <= capacity;
    if (p.bias.present() || p.mask.present() || p.block_mask.present()) {
        s.valid = s.valid && q_len <= p.seqlen_q && s.kv_len <= p.seqlen_k;
    }
    s.window = {p.left, p.right, p.top_left ? 0 : s.kv_len - q_len, q_len, s.kv_len};
    if (p.has(Fault::ignore_window_left)) s.window.left = -1;
    s.extent_begin = q_len > 0 ? std::min(s.window.key_begin(0), s.kv_len) : s.kv_len;
    if (s.valid && p.paged) {
        const int64_t first = fresh > 0 ? std::min(s.extent_begin, old) : s.extent_begin;
        if (first < s.kv_len) s.valid = pages_fit(p, b, first, s.kv_len);
    }
    if (p.has(Fault::leak_past_kv_len) && s.valid && !p.paged && s.kv_len < k_rows) s.kv_len = s.window.kv_len = s.kv_len + 1;
    if (!s.valid) {
        s.q_len = q_len >= 0 && q_len <= q_rows ? q_len : q_rows;
        s.kv_len = s.extent_begin = 0;
        s.window = {-1, -1, 0, s.q_len, 0};
    }
    return s;
}

// Rows of a packed operand that belong to no sequence.
Sequence gap(const Params& p, int64_t q_row, int64_t q_rows, int64_t k_row, int64_t k_rows) {
    Sequence s;
    s.index = p.batch, s.q_row = q_row, s.q_rows = q_rows, s.k_row = k_row, s.k_rows = k_rows;
    s.window = {-1, -1, 0, 0, 0};
    return s;
}

std::vector<Sequence> sequences(const Params& p) {
    std::vector<Sequence> found;
    if (!p.packed) {
        for (int64_t b = 0; b < p.batch; ++b) {
            const int64_t fresh = value_or(p.new_lens, p.lens_stride[2], b, p.new_tokens);
            found.push_back(place(p, b, 0, p.seqlen_q, value_or(p.q_lens, p.lens_stride[0], b, p.seqlen_q), 0, p.seqlen_k,
                                  value_or(p.kv_lens, p.lens_stride[1], b, p.seqlen_k), fresh));
        }
        return found;
    }
    const int64_t limit_k = p.paged ? INT64_MAX : p.total_k;
    auto bound = [](const int32_t* cu, int64_t stride, int64_t b, int64_t before, int64_t limit) {
        return std::max<int64_t>(std::min<int64_t>(cu[b * stride], limit), before);
    };
    int64_t q_row = bound(p.cu_q, p.lens_stride[3], 0, 0, p.total_q), k_row = bound(p.cu_k, p.lens_stride[4], 0, 0, limit_k);
    if (q_row > 0 || (k_row > 0 && !p.paged)) found.push_back(gap(p, 0, q_row, 0, p.paged ? 0 : k_row));
    for (int64_t b = 0; b < p.batch; ++b) {
        const int64_t q_end = bound(p.cu_q, p.lens_stride[3], b + 1, q_row, p.total_q);
        const int64_t k_end = bound(p.cu_k, p.lens_stride[4], b + 1, k_row, limit_k);
        found.push_back(place(p, b, q_row, q_end - q_row, q_end - q_row, k_row, k_end - k_row, k_end - k_row, 0));
        q_row = q_end, k_row = k_end;
    }
    const int64_t tail_k = p.paged ? 0 : p.total_k - k_row;
    if (q_row < p.total_q || tail_k > 0) found.push_back(gap(p, q_row, p.total_q - q_row, k_row, tail_k));
    return found;
}

char* key_address(const View& x, const Params& p, const Sequence& s, int64_t j, int64_t head) {
    int64_t at = j * x.stride[1];
    if (p.paged) {
        const int64_t page = p.page_table[s.index * p.page_table_stride[0] + j / p.page_size * p.page_table_stride[1]];
        at = page * x.stride[0] + j % p.page_size * x.stride[1];
    } else {
        at += p.packed ? s.k_row * x.stride[1] : s.index * x.stride[0];
    }
    return x.data + (at + head * x.stride[2]) * x.bytes();
}

void append(const Params& p, const Sequence& s) {
    if (!p.k_new.present() && !p.v_new.present()) return;
    if (!s.valid) return;
    const int64_t fresh = value_or(p.new_lens, p.lens_stride[2], s.index, p.new_tokens);
    const int64_t old = value_or(p.kv_lens, p.lens_stride[1], s.index, p.seqlen_k);
    for (int64_t t = 0; t < fresh; ++t)
        for (int64_t h = 0; h < p.heads_kv; ++h)
            for (int side = 0; side < 2; ++side) {
                const View &to = side ? p.v : p.k, &from = side ? p.v_new : p.k_new;
                if (!from.present()) continue;
                const int64_t at = s.index * from.stride[0] + t * from.stride[1] + h * from.stride[2];
                std::memcpy(key_address(to, p, s, old + t, h), from.data + at * from.bytes(),
                            static_cast<size_t>((side ? p.dim_v : p.dim) * from.bytes()));
            }
}

// ---------------------------------------------------------------- units on threads

template <class Body> struct Loop {
    Body& body;
    int64_t count;
    char* workspace;
    size_t stride;
    std::atomic<int64_t> next{0};

    static void work(void* self, int worker) {
        Loop& loop = *static_cast<Loop*>(self);
        char* space = loop.workspace + static_cast<size_t>(worker) * loop.stride;
        for (int64_t n; (n = loop.next.fetch_add(1, std::memory_order_relaxed)) < loop.count;) loop.body(n, space);
    }
};

// Workspaces of `bytes` for all threads, and tiles that they share; throws std::bad_alloc, so it comes before anything
// is written.
struct Workspaces {
    size_t stride = 0;
    char *base = nullptr, *tiles = nullptr;
    Workspaces() = default;
    Workspaces(int threads, size_t bytes, size_t tile_bytes)
        : stride((bytes + 4095) / 4096 * 4096 + 192),  // no two workers at the same page offset
          base(shared_workspace(stride * static_cast<size_t>(threads) + tile_bytes)),
          tiles(tile_bytes ? base + stride * static_cast<size_t>(threads) : nullptr) {}
};

// body(unit, workspace) for every unit; units are claimed in ascending order.
template <class Body> void each(int threads, int64_t count, const Workspaces& spaces, Body body) {
    const int team = threads;
    threads = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(threads, count)));
    Loop<Body> loop{body, count, spaces.base, spaces.stride};
    run_parallel(threads, team, Loop<Body>::work, &loop);
}

// Where units of several sequences are numbered through: the first one of each.
struct Span {
    int64_t first;
    const Sequence* sequence;
};
const Span& span_of(const std::vector<Span>& spans, int64_t unit) {
    return *(std::upper_bound(spans.begin(), spans.end(), unit, [](int64_t u, const Span& s) { return u < s.first; }) - 1);
}

// The `count` tiles of p.tiles.
template <class Fill>
void fill_tiles(const Params& p, const std::vector<Sequence>& list, int64_t count, int threads, const Workspaces& spaces,
                Fill fill) {
    std::vector<Span> spans;
    for (const Sequence& s : list) {
        if (s.first_copy >= 0) spans.push_back({s.first_copy, &s});
    }
    each(threads, count, spaces, [&](int64_t unit, char* workspace) {
        const Span& span = span_of(spans, unit);
        const int64_t local = unit - span.first, tiles = span.sequence->tiles;
        fill(p, *span.sequence, local / tiles, local % tiles, workspace);
    });
}

double work_of(const Params& p) {
    const double queries = p.packed ? static_cast<double>(p.total_q) : static_cast<double>(p.batch * p.seqlen_q);
    return 2.0 * queries * static_cast<double>(p.heads_q) * static_cast<double>(p.seqlen_k) *
           static_cast<double>(p.dim + p.dim_v);
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows or keys of a tile. 192 keys of 128 fill a part of the second-level cache and are a multiple of every register
// tile; under a block mask a wider tile leaves a row enough to see. Tuned on Zen 4; for AMX, where O is read and written
// once a tile beside faster products, on Sapphire Rapids.
int64_t default_block(const Params& p, int64_t length, int64_t plain, int64_t masked) {
    const int64_t dim = std::max(p.dim, p.dim_v), most = p.mask_block_k > 0 ? masked : plain;
    const int64_t block = dim <= 128 ? most : dim <= 256 ? most / 2 : most / 4;
    return std::max<int64_t>(1, std::min(block, length));
}

bool by_tiles(int family, const Params& p) { return family == kAmx && p.q.dtype == DType::bf16; }

int64_t longest(const std::vector<Sequence>& list, int64_t Sequence::*member) {
    int64_t most = 0;
    for (const Sequence& s : list) most = std::max(most, s.*member);
    return most;
}

// Queries, and rows of a key/value head: more of them pay for a transposed copy of the keys.
constexpr int64_t kFewQueries = 4, kFewRows = 16;
constexpr int64_t kChunk = 512;   // keys of a unit of few rows: what it leaves is 1 % of what it reads

// Fills in block sizes of 0 and the heads a unit takes; small calls get one thread. A sequence has at most `queries` in
// most_q rows.
const Kernels& cut_forward(Params& p, int family, int& threads, int64_t queries, int64_t most_q, int64_t most_k) {
    if (work_of(p) < 2e6) threads = 1;
    // backward repeats the scores of the other kernel: the same order of additions, else exp(s - lse) is off where |s| is large
    const bool plain = !p.grads && p.block_q == 0 && p.block_k == 0 && !p.dropout_threshold && p.mask_block_k == 0;
    if (plain && queries <= kFewQueries && queries * p.group() <= kFewRows) {
        p.chunk = kChunk, p.block_q = std::max<int64_t>(1, queries), p.block_k = 64, p.share = p.group();
        return kernels_for(family, p.q.dtype, true);
    }
    if (p.block_k == 0) p.block_k = default_block(p, most_k, by_tiles(family, p) ? 512 : 192, 384);
    if (p.block_q == 0) {
        p.block_q = default_block(p, most_q, 384, 384);
        const int64_t rows = p.packed ? p.total_q : p.batch * p.seqlen_q;
        while (p.block_q > 48 && rows * p.heads_q < p.block_q * threads * 4) p.block_q /= 2;
    }
    const int64_t row_units = std::max<int64_t>(1, ceil_div(p.packed ? p.total_q : p.batch * p.seqlen_q, p.block_q));
    for (int64_t share = p.group(); share > 1 && !p.has(Fault::head_mod); --share) {
        const bool small = p.block_q * share <= default_block(p, 384, 384, 384);
        if (p.group() % share == 0 && small && row_units * (p.heads_q / share) >= 2 * threads) {
            p.share = share;
            break;
        }
    }
    return kernels_for(family, p.q.dtype, true);
}

const Kernels& cut_backward(Params& p, int family, int& threads, int64_t most_q, int64_t most_k) {
    if (work_of(p) < 2e6) threads = 1;
    if (p.block_k == 0) p.block_k = default_block(p, most_k, 192, 256);
    if (p.block_q == 0) p.block_q = default_block(p, most_q, 192, 192);
    return kernels_for(family, p.q.dtype, p.block_q % 2 == 0 || most_q <= p.block_q);
}

}  // namespace

Cut cut(Params& p, bool backward, int family, int threads) {
    const Kernels& kernels = backward ? cut_backward(p, family, threads, p.seqlen_q, p.seqlen_k)
                                      : cut_forward(p, family, threads, p.seqlen_q, p.seqlen_q, p.seqlen_k);
    const auto workspace = backward ? kernels.backward_workspace : p.chunk ? kernels.decode_workspace : kernels.forward_workspace;
    return {kernels.name, threads, workspace(p)};
}

int supported_families() {
#if defined(ATTNLIB_X86)
    static const int mask = [] {
        __builtin_cpu_init();
        const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
        const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
        const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
        return 1 | (avx2 ? 2 : 0) | (avx512 ? 4 : 0) | (bf16 ? 8 : 0) | (bf16 && amx_state() == Amx::usable ? 16 : 0);
    }();
    return mask;
#else
    return 1;
#endif
}

namespace {

void run_few_rows(Params& p, const Kernels& kernels, std::vector<Sequence>& list, int threads) {
    std::vector<Span> spans, merged;
    int64_t chunks = 0, parts = 0, heads = 0;
    for (Sequence& s : list) {
        s.key_tile = s.extent_begin / p.chunk;
        if (s.valid && s.q_len > 0 && s.window.key_end(s.q_len - 1) > s.extent_begin) {
            s.tiles = ceil_div(s.window.key_end(s.q_len - 1), p.chunk) - s.key_tile;
        }
        spans.push_back({chunks, &s});
        chunks += std::max<int64_t>(1, s.tiles);
        if (s.tiles < 2) continue;
        s.first_copy = parts;
        parts += s.tiles;
        merged.push_back({heads, &s});
        heads += p.heads_q;
    }
    int64_t split = 1;  // of the key/value heads: all in one unit read memory in its order
    while (split < p.heads_kv && (chunks * split < 2 * threads || p.heads_kv % split != 0)) ++split;
    PoolLock lock;
    const Workspaces spaces(threads, kernels.decode_workspace(p), static_cast<size_t>(parts) * kernels.decode_part(p));
    p.tiles = spaces.tiles;
    for (const Sequence& s : list) append(p, s);
    each(threads, chunks * split, spaces, [&](int64_t unit, char* workspace) {
        const Span& span = span_of(spans, unit / split);
        const int64_t of_unit = p.heads_kv / split, begin = unit % split * of_unit;
        kernels.decode(p, *span.sequence, begin, begin + of_unit, unit / split - span.first, workspace);
    });
    each(threads, heads, spaces, [&](int64_t unit, char* workspace) {
        const Span& span = span_of(merged, unit);
        kernels.merge(p, *span.sequence, unit - span.first, workspace);
    });
    trim_workspace();
}

}  // namespace

void run_forward(Params& p, int family, int threads) {
    std::vector<Sequence> list = sequences(p);
    const Kernels& kernels = cut_forward(p, family, threads, longest(list, &Sequence::q_len), longest(list, &Sequence::q_rows),
                                         longest(list, &Sequence::kv_len));
    if (p.chunk > 0) return run_few_rows(p, kernels, list, threads);
    std::vector<Span> spans;
    int64_t units = 0, tiles = 0;
    for (Sequence& s : list) {
        spans.push_back({units, &s});
        units += ceil_div(s.q_rows, p.block_q) * (p.heads_q / p.share);
        if (ceil_div(s.q_len, p.block_q) * (p.group() / p.share) < 2 || s.kv_len < p.block_k) continue;
        s.key_tile = s.extent_begin / p.block_k;
        s.tiles = std::max<int64_t>(0, ceil_div(s.window.key_end(s.q_len - 1), p.block_k) - s.key_tile);
        if (s.tiles > 0) s.first_copy = tiles;
        tiles += s.tiles * p.heads_kv;
    }
    PoolLock lock;
    const Workspaces spaces(threads, kernels.forward_workspace(p), static_cast<size_t>(tiles) * kernels.forward_tile(p));
    p.tiles = spaces.tiles;
    for (const Sequence& s : list) append(p, s);
    fill_tiles(p, list, tiles, threads, spaces, kernels.fill_forward_tile);
    each(threads, units, spaces, [&](int64_t unit, char* workspace) {
        const Span& span = span_of(spans, unit);
        const Sequence& s = *span.sequence;
        const int64_t local = unit - span.first, blocks = ceil_div(s.q_rows, p.block_q);
        const int64_t begin = (blocks - 1 - local % blocks) * p.block_q;  // causal: the longest rows first
        kernels.forward(p, s, local / blocks * p.share, begin, std::min(begin + p.block_q, s.q_rows), workspace);
    });
    trim_workspace();
}

namespace {

void zero_key_rows(const Params& p, const std::vector<Sequence>& list) {
    for (const View* x : {&p.dk, &p.dv}) {
        if (!x->present()) continue;
        const int64_t dim = x == &p.dk ? p.dim : p.dim_v;
        for (const Sequence& s : list)
            for (int64_t j = s.kv_len; j < s.k_rows; ++j)
                for (int64_t h = 0; h < p.heads_kv; ++h)
                    std::memset(key_address(*x, p, s, j, h), 0, static_cast<size_t>(dim * x->bytes()));
    }
}

// dq of rows from `begin` on.
void zero_query_rows(const Params& p, const Sequence& s, int64_t head, int64_t begin) {
    const View& x = p.dq;
    const int64_t first = (p.packed ? s.q_row * x.stride[1] : s.index * x.stride[0]) + head * x.stride[2];
    for (int64_t i = begin; i < s.q_rows; ++i) {
        std::memset(x.data + (first + i * x.stride[1]) * x.bytes(), 0, static_cast<size_t>(p.dim * x.bytes()));
    }
}

void store_pages(const Params& p, const Kernels& kernels) {
    for (const View* x : {&p.dk, &p.dv}) {
        if (!x->present()) continue;
        const int64_t dim = x == &p.dk ? p.dim : p.dim_v;
        const char* from = x == &p.dk ? p.dk_sum : p.dv_sum;
        for (int64_t slot = 0; slot < p.num_pages * p.page_size; ++slot)
            for (int64_t h = 0; h < p.heads_kv; ++h, from += dim * kernels.real_bytes) {
                const int64_t at = slot / p.page_size * x->stride[0] + slot % p.page_size * x->stride[1] + h * x->stride[2];
                kernels.store(x->dtype, x->data + at * x->bytes(), from, dim);
            }
    }
}

template <class R> void add_sinks(const Params& p) {
    const R* parts = reinterpret_cast<const R*>(p.dsink_part);
    for (int64_t h = 0; h < p.heads_q; ++h)
        for (int64_t b = 0; b < p.batch; ++b)
            reinterpret_cast<R*>(p.dsinks.data)[h * p.dsinks.stride[0]] += parts[b * p.heads_q + h];
}

}  // namespace

void run_backward(Params& p, int family, int threads) {
    std::vector<Sequence> list = sequences(p);
    for (Sequence& s : list) {  // no gradient flows through a sequence that does not fit
        if (!s.valid) s.q_len = s.window.q_len = 0;
    }
    const int64_t most_q = longest(list, &Sequence::q_len), most_k = longest(list, &Sequence::kv_len);
    const Kernels& kernels = cut_backward(p, family, threads, most_q, most_k);

    const size_t real = static_cast<size_t>(kernels.real_bytes);
    const std::vector<char> zero_row(static_cast<size_t>(p.dim_v * 8), 0);
    if (!p.dout.present()) {
        p.dout.data = const_cast<char*>(zero_row.data());
        p.dout.dtype = p.q.dtype;
    }
    p.rows_q = p.packed ? p.total_q : p.batch * p.seqlen_q;
    p.dq_width = kernels.dq_width(p);
    const bool products = p.dq.present() || p.dk.present() || p.dv.present() || p.dbias.present();
    const bool pages = p.paged && (p.dk.present() || p.dv.present());
    const size_t slots = static_cast<size_t>(pages ? p.num_pages * p.page_size * p.heads_kv : 0);
    Zeroed delta(static_cast<size_t>(p.rows_q * p.heads_q) * real);
    Zeroed sink_part(static_cast<size_t>((p.batch + 1) * p.heads_q) * real);
    Zeroed dk_sum(slots * static_cast<size_t>(p.dim) * real), dv_sum(slots * static_cast<size_t>(p.dim_v) * real);
    p.delta = delta.data(), p.dsink_part = sink_part.data();
    p.dk_sum = dk_sum.data(), p.dv_sum = dv_sum.data();

    const int64_t blocks_k = ceil_div(most_k, p.block_k);
    int64_t tiles = 0, copies = 0;
    for (Sequence& s : list) {
        s.tiles = ceil_div(s.q_len, p.block_q);
        s.first_tile = tiles;
        tiles += s.tiles * p.heads_q;
        if (!products || s.kv_len <= p.block_k || s.q_len < p.block_q) continue;
        s.first_copy = copies;
        copies += s.tiles * p.heads_q;
    }

    PoolLock lock;
    const bool sum_dq = p.dq.present() && blocks_k > 1;
    const size_t dq_row = static_cast<size_t>(sum_dq ? p.dq_width : 0) * real;
    const size_t dq_bytes = (static_cast<size_t>(p.rows_q * p.heads_q) * dq_row + 63) / 64 * 64;
    const Workspaces spaces(threads, kernels.backward_workspace(p),
                            dq_bytes + static_cast<size_t>(copies) * kernels.backward_tile(p));
    p.dq_sum = sum_dq ? spaces.tiles : nullptr;
    p.tiles = spaces.tiles + dq_bytes;
    const int64_t count = static_cast<int64_t>(list.size());
    each(threads, count * p.heads_q, spaces, [&](int64_t unit, char* workspace) {
        const Sequence& s = list[static_cast<size_t>(unit / p.heads_q)];
        const int64_t head = unit % p.heads_q, row = head * p.rows_q + (p.packed ? s.q_row : s.index * p.seqlen_q);
        if (sum_dq) std::memset(p.dq_sum + static_cast<size_t>(row) * dq_row, 0, static_cast<size_t>(s.q_rows) * dq_row);
        else if (p.dq.present()) zero_query_rows(p, s, head, s.kv_len > 0 ? s.q_len : 0);
        kernels.delta(p, s, head, workspace);
    });
    if (p.dsinks.present()) real == 8 ? add_sinks<double>(p) : add_sinks<float>(p);
    if (!products) return;
    if (!p.paged) zero_key_rows(p, list);
    fill_tiles(p, list, copies, threads, spaces, kernels.fill_backward_tile);

    const bool fold_batch = pages || (p.dbias.present() && p.batch > 1 && p.dbias.stride[0] == 0);
    const bool fold_heads = p.dbias.present() && p.heads_q > 1 && p.dbias.stride[1] == 0;
    bool fold_keys = pages || (p.dbias.present() && p.seqlen_k > 1 && p.dbias.stride[3] == 0);
    const int64_t groups_b = fold_batch ? 1 : count, groups_h = fold_heads ? 1 : p.heads_kv;
    const bool ordered = !fold_keys && threads > 1 && blocks_k > 1;
    if (!ordered) fold_keys = true;
    std::vector<int32_t> turns(static_cast<size_t>(ordered ? tiles : 0), 0);
    const int64_t per_block = groups_b * groups_h;
    each(threads, per_block * (fold_keys ? std::min<int64_t>(1, blocks_k) : blocks_k), spaces, [&](int64_t unit, char* workspace) {
        const int64_t group = unit % per_block, b = group / groups_h, h = group % groups_h;
        const int64_t key_begin = fold_keys ? 0 : unit / per_block, key_end = fold_keys ? blocks_k : key_begin + 1;
        for (int64_t key_block = key_begin; key_block < key_end; ++key_block)
            for (int64_t n = fold_batch ? 0 : b; n < (fold_batch ? count : b + 1); ++n) {
                const Sequence& s = list[static_cast<size_t>(n)];
                if (key_block * p.block_k >= s.kv_len) continue;
                for (int64_t kv = fold_heads ? 0 : h; kv < (fold_heads ? p.heads_kv : h + 1); ++kv)
                    kernels.backward(p, s, kv, key_block, workspace, ordered ? turns.data() : nullptr);
            }
    });
    if (sum_dq) {
        each(threads, count * p.heads_q, {}, [&](int64_t unit, char*) {
            const Sequence& s = list[static_cast<size_t>(unit / p.heads_q)];
            kernels.store_dq(p, s, unit % p.heads_q, 0, s.q_rows);
        });
    }
    if (pages) store_pages(p, kernels);
    trim_workspace();
}

}  // namespace attnlib
