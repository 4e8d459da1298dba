// Backward by recomputation for one block of keys of one key/value head: the tile (key block x query block) gives
//
//   P = exp(S - m) / l;  dP = keep (dO V^T) / (1 - p_drop);  dS = P (dP - delta);  delta = rowsum(dO out) - dlse
//   dV += (keep P / (1 - p_drop))^T dO;  dK += scale dS'^T Q;  dQ += scale dS' K;  dS' = dS (1 - tanh^2), dbias += dS
//
// dK and dV stay with the block; query heads of the group and query blocks follow in order. dQ is stored at once where
// there is one key block (no p.dq_sum); else summed over key blocks in ascending order, which `turns` enforces when several
// threads share a head: every sum has one order, so results do not depend on threads. Copies of Q and dO that several key
// blocks read are made before (params.tiles). Without statistics (no bias, no ALiBi) m is lse and l is 1.
//
// By tiles dV^T += dO^T P and dK^T += Q^T dS' are added up: P and dS' are then B, which lies as strips leave it, while A is
// copied once for all key blocks.
#pragma once

#include <sched.h>

#include "score.h"

namespace attnlib {
namespace ATTNLIB_ISA {
namespace {

template <class T> struct Backward {
    using Word = typename T::Word;
    using R = typename T::Real;
    using Score = Scorer<R, T::strip, T::grain>;

    static constexpr bool pairs = T::per_word > 1;
    static constexpr int64_t row_grain = T::tiled ? T::grain : T::per_word;  // that a reduction over rows is cut to
    static constexpr int64_t delta_rows = T::tiled ? T::strip : lanes<R>;    // of row_products
    static int64_t padded_rows(const Params& p) { return round_up(p.block_q, row_grain); }
    static int64_t padded_dim(const Params& p) { return round_up(p.dim, lanes<R>); }
    static int64_t padded_dim_v(const Params& p) { return larger(round_up(p.dim_v, lanes<R>), lanes<R>); }

    // Rows of one operand: as they are, and stacked (by tiles: turned). Where a word holds one element, both are one, unless
    // a row is bad.
    struct Pack {
        Layout<T> at;
        Word *rows, *stacked;
        int32_t* bad;
        int64_t *bad_count, width, ld, turned_ld;

        Pack(Arena& a, int64_t count, int64_t dim, int64_t padded)
            : at(padded, count / T::per_word), width(padded), ld(pairs ? words<T>(dim) : padded),
              turned_ld(count / T::per_word + lanes<R>) {
            stacked = a.take<Word>(T::tiled ? width * turned_ld : at.size);
            rows = pairs ? a.take<Word>((count + (T::tiled ? T::strip : 0)) * ld) : stacked;
            bad = a.take<int32_t>(count);
            bad_count = a.take<int64_t>(1);
        }
        void fill(const Rows& from, DType type, int64_t i0, int64_t count, int64_t dim, Word* scratch) const {
            if (pairs) pack_rows<T>(from, type, i0, count, dim, rows, ld);
            const int64_t padded = round_up(count, row_grain);
            if constexpr (T::tiled) {
                *bad_count = pack_turned<T>(from, type, i0, i0, i0 + count, padded, dim, stacked, width, turned_ld, bad, scratch);
            } else {
                *bad_count = pack_stacked<T>(from, type, i0, i0, i0 + count, padded, dim, stacked, width, at, bad, scratch);
            }
        }
        // With the rows as they are in `own` if they are not here.
        Pack complete(const Rows& from, DType type, int64_t i0, int64_t count, int64_t dim, Word* own) const {
            Pack x = *this;
            if (pairs || *bad_count == 0) return x;
            x.rows = own;
            pack_rows<T>(from, type, i0, count, dim, own, ld);
            return x;
        }
    };

    // What the tiles of one query block and one head read of Q, dO and the statistics.
    struct Queries {
        Pack q, dout;
        R *max, *inverse;

        Queries(const Params& p, Arena& a)
            : q(a, padded_rows(p), p.dim, padded_dim(p)), dout(a, padded_rows(p), p.dim_v, padded_dim_v(p)),
              max(a.take<R>(p.block_q)), inverse(a.take<R>(p.block_q)) {}

        void fill(const Params& p, const Sequence& seq, int64_t head, int64_t i0, int64_t rows, Word* scratch) const {
            q.fill(query_rows(p.q, p, seq, head), p.q.dtype, i0, rows, p.dim, scratch);
            dout.fill(query_rows(p.dout, p, seq, head), p.dout.dtype, i0, rows, p.dim_v, scratch);
            const int64_t at = row_index(p, seq, head, i0);
            const R* m = reinterpret_cast<const R*>(p.stats.present() ? p.stats.data : p.lse.data) + at;
            for (int64_t r = 0; r < rows; ++r) {
                const R l = p.stats.present() ? m[r + p.stats_sum] : R(1);
                max[r] = m[r] == -infinity<R> ? R(0) : m[r];
                inverse[r] = l == 0 ? R(0) : R(1) / l;
            }
        }
    };
    static size_t tile_bytes(const Params& p) {
        Arena a{nullptr};
        Queries(p, a);
        return a.used;
    }
    static Queries tile_at(const Params& p, const Sequence& seq, int64_t head, int64_t tile) {
        Arena a{p.tiles + static_cast<size_t>(seq.first_copy + head * seq.tiles + tile) * tile_bytes(p)};
        return Queries(p, a);
    }
    static void fill_tile(const Params& p, const Sequence& seq, int64_t head, int64_t tile, char* workspace) {
        const Space w(p, workspace);
        const int64_t i0 = tile * p.block_q;
        tile_at(p, seq, head, tile).fill(p, seq, head, i0, smaller(p.block_q, seq.q_len - i0), w.scratch);
    }

    struct Space {
        Arena arena;
        Queries own;
        Word *k, *v, *k_stacked, *q, *dout, *prob, *dscore, *dscore_rows, *scratch, *row_pairs;
        R *dq, *dk, *dv, *score, *dprob, *derivative, *line, *value, *turned;
        uint8_t* keep;
        int32_t* bad_k;
        Run* runs;
        int64_t keys, rows, width, width_v, depth, depth_v, ld, key_ld;  // ld: of scores; key_ld: of dK and dV by tiles
        Layout<T> k_at, v_at, k_stacked_at, p_at;

        // P and dS: columns are read too, so rows must not share cache sets.
        Space(const Params& p, char* base)
            : arena{base}, own(p, arena), keys(round_up(p.block_k, T::grain)), rows(padded_rows(p)), width(padded_dim(p)),
              width_v(padded_dim_v(p)), depth(words<T>(p.dim)), depth_v(words<T>(p.dim_v)),
              ld(keys + (T::tiled ? lanes<R> : 0)), key_ld(keys + lanes<R>), k_at(keys, depth), v_at(keys, depth_v),
              k_stacked_at(width, keys / T::per_word), p_at(keys + lanes<R>, rows / T::per_word) {
            Arena& a = arena;
            k = a.take<Word>(k_at.size);
            v = a.take<Word>(v_at.size);
            k_stacked = a.take<Word>(k_stacked_at.size);
            q = a.take<Word>(pairs ? 1 : rows * width);
            dout = a.take<Word>(pairs ? 1 : rows * width_v);
            prob = a.take<Word>(p_at.size);
            dscore = a.take<Word>(p_at.size);
            scratch = a.take<Word>((lanes<R> + 2) * round_up(larger(width, width_v), lanes<R>));
            row_pairs = a.take<Word>(Layout<T>(delta_rows, depth_v).size + depth_v * delta_rows);
            dq = a.take<R>(rows * width);
            dk = a.take<R>(T::tiled ? width * key_ld : keys * width);
            dv = a.take<R>(T::tiled ? width_v * key_ld : keys * width_v);
            score = a.take<R>(T::strip * ld);
            dprob = a.take<R>(T::strip * ld);
            dscore_rows = reinterpret_cast<Word*>(dprob);  // dS of a row in the place of dP
            turned = a.take<R>(T::tiled ? lanes<R> * (width + width_v) : 1);
            derivative = a.take<R>(p.softcap > 0 ? keys : 1);
            line = a.take<R>(keys);
            value = a.take<R>(larger(width, width_v));
            keep = a.take<uint8_t>(p.dropout_threshold ? rows * keys + 64 : 1);
            bad_k = a.take<int32_t>(keys);
            runs = a.take<Run>(larger(keys, rows) / 16 + 2);
        }
    };

    // What one tile works on; all in the workspace but dq.
    struct Tile {
        const Params& p;
        const Space& w;
        const Score& scorer;
        int64_t i0, rows, j0, j1, padded;
        Pack q, dout;
        const R *max, *inverse, *delta;
        R* dq;  // [row, width]
        int64_t bad_k;
        bool need_dq, need_dk, need_dv, need_dscore;
        R inverse_kept;
    };

    static size_t workspace(const Params& p) { return Space(p, nullptr).arena.used; }
    static int64_t dq_width(const Params& p) { return padded_dim(p); }

    // delta of every query row of a head, and the sum that is the head's part of dsinks. dO . out is added up in the order
    // of the product dO . V: where a row has one key, dP - delta is 0 and not a rounding error.
    static void delta(const Params& p, const Sequence& seq, int64_t head, char* workspace) {
        const Space w(p, workspace);
        const Rows out = query_rows(p.out, p, seq, head), dout = query_rows(p.dout, p, seq, head);
        const R* lse = reinterpret_cast<const R*>(p.lse.data);
        R* delta = reinterpret_cast<R*>(p.delta);
        R sink = 0, total = 0, sums[delta_rows];
        const typename T::Scope scope;
        if (p.dsinks.present()) {
            sink = load_one<R>(p.sinks.dtype, p.sinks.data + head * p.sinks.stride[0] * p.sinks.bytes());
        }
        for (int64_t i = 0; i < seq.q_len; ++i) {
            if (i % delta_rows == 0) row_products(p, out, dout, i, smaller(i + delta_rows, seq.q_len), w, sums);
            const int64_t at = row_index(p, seq, head, i);
            R sum = 0;
            if (lse[at] != -infinity<R>) {
                sum = sums[i % delta_rows];
                if (p.dlse.present()) {
                    const View& g = p.dlse;
                    const int64_t row = p.packed ? (seq.q_row + i) * g.stride[2] : seq.index * g.stride[0] + i * g.stride[2];
                    sum -= load_one<R>(g.dtype, g.data + (row + head * g.stride[1]) * g.bytes());
                }
                if (p.dsinks.present()) total -= sink_weight(p, at, sink) * sum;
            }
            delta[at] = p.has(Fault::skip_delta) ? R(0) : sum;
        }
        if (p.dsinks.present()) reinterpret_cast<R*>(p.dsink_part)[seq.index * p.heads_q + head] = total;
    }
    static void row_products(const Params& p, const Rows& x, const Rows& y, int64_t begin, int64_t end, const Space& w, R* sums) {
        constexpr int64_t n = delta_rows;
        const Layout<T> at(n, w.depth_v);
        Word *a = w.row_pairs, *b = a + at.size;
        pack_transposed<T>(x, p.out.dtype, begin, begin, end, n, p.dim_v, a, at, w.scratch);
        if constexpr (T::tiled) {
            const Run all{0, n};
            pack_rows<T>(y, p.dout.dtype, begin, end - begin, p.dim_v, b, w.depth_v);
            gemm_columns<T>(n, 1, &all, w.depth_v, b, w.depth_v, a, at, w.score, w.ld);
            for (int64_t r = 0; r < n; ++r) sums[r] = w.score[r * w.ld + r];
        } else {
            pack_transposed<T>(y, p.dout.dtype, begin, begin, end, n, p.dim_v, b, at, w.scratch);
            Vec<R> sum{};
            for (int64_t d = 0; d < w.depth_v; ++d) sum = T::multiply_add(sum, T::load_b(b + d * n), T::load_b(a + d * n));
            std::memcpy(sums, &sum, kBytes);
        }
    }
    static R sink_weight(const Params& p, int64_t at, R sink) {
        if (!p.stats.present()) return std::exp(sink - reinterpret_cast<const R*>(p.lse.data)[at]);
        const R* m = reinterpret_cast<const R*>(p.stats.data) + at;
        return sink == -infinity<R> ? R(0) : std::exp(sink - m[0]) / m[p.stats_sum];
    }

    static void block(const Params& p, const Sequence& seq, int64_t kv_head, int64_t key_block, char* workspace,
                      int32_t* turns) {
        const Space w(p, workspace);
        const typename T::Scope scope;
        const int64_t j0 = key_block * p.block_k, j1 = smaller(j0 + p.block_k, seq.kv_len);
        const int64_t padded = round_up(j1 - j0, T::grain), begin = smaller(larger(j0, seq.extent_begin), j1);
        const Rows keys = key_rows(p.k, p, seq, kv_head), values = key_rows(p.v, p, seq, kv_head);
        pack_transposed<T>(keys, p.k.dtype, j0, begin, j1, padded, p.dim, w.k, w.k_at, w.scratch);
        pack_transposed<T>(values, p.v.dtype, j0, begin, j1, padded, p.dim_v, w.v, w.v_at, w.scratch);
        const int64_t bad_k =
            pack_stacked<T>(keys, p.k.dtype, j0, begin, j1, padded, p.dim, w.k_stacked, w.width, w.k_stacked_at, w.bad_k, w.scratch);
        std::memset(w.dk, 0, static_cast<size_t>((T::tiled ? w.key_ld : padded) * w.width) * sizeof(R));
        std::memset(w.dv, 0, static_cast<size_t>((T::tiled ? w.key_ld : padded) * w.width_v) * sizeof(R));
        const double kept = 1.0 - static_cast<double>(p.dropout_threshold) / 65536.0;
        for (int64_t head = 0; head < p.heads_q; ++head) {
            if (p.kv_head(head) != kv_head) continue;
            const Score scorer(p, seq, head, w.line);
            for (int64_t b = 0; b < seq.tiles; ++b) {
                const int64_t i0 = b * p.block_q, rows = smaller(p.block_q, seq.q_len - i0);
                int32_t* turn = turns ? turns + seq.first_tile + head * seq.tiles + b : nullptr;
                if (turn) await(turn, static_cast<int32_t>(key_block));
                const bool alone = p.dq.present() && !p.dq_sum;
                if (alone) std::memset(w.dq, 0, static_cast<size_t>(rows * w.width) * sizeof(R));
                if (scorer.tile_seen(i0, i0 + rows, j0, j1)) {
                    const int64_t dq_row = (p.packed ? seq.q_row : seq.index * p.seqlen_q) + i0;
                    const Queries x = seq.first_copy >= 0 ? tile_at(p, seq, head, b) : w.own;
                    if (seq.first_copy < 0) x.fill(p, seq, head, i0, rows, w.scratch);
                    const Rows q = query_rows(p.q, p, seq, head), dout = query_rows(p.dout, p, seq, head);
                    const Tile t{p, w, scorer, i0, rows, j0, j1, padded,
                                 x.q.complete(q, p.q.dtype, i0, rows, p.dim, w.q),
                                 x.dout.complete(dout, p.dout.dtype, i0, rows, p.dim_v, w.dout), x.max, x.inverse,
                                 reinterpret_cast<const R*>(p.delta) + row_index(p, seq, head, i0),
                                 p.dq_sum ? reinterpret_cast<R*>(p.dq_sum) + (head * p.rows_q + dq_row) * w.width : w.dq, bad_k,
                                 p.dq.present(), p.dk.present(), p.dv.present(),
                                 p.dq.present() || p.dk.present() || p.dbias.present(),
                                 static_cast<R>(kept > 0 ? 1.0 / kept : 0.0)};
                    if (p.dropout_threshold) fill_keep(p, seq, head, i0, rows, j0, padded, w.keep, w.keys);
                    tile(t, keys);
                }
                if (alone) {
                    const Rows dq = query_rows(p.dq, p, seq, head);
                    for (int64_t r = 0; r < rows; ++r) {
                        store_row<R>(p.dq.dtype, const_cast<char*>(dq.row(i0 + r)), w.dq + r * w.width, p.dim, static_cast<R>(p.scale));
                    }
                }
                if (turn) __atomic_store_n(turn, static_cast<int32_t>(key_block + 1), __ATOMIC_RELEASE);
            }
        }
        store_block(p, seq, kv_head, j0, j1, w);
    }

    static void await(const int32_t* turn, int32_t value) {
        for (int spins = 0; __atomic_load_n(turn, __ATOMIC_ACQUIRE) != value; ++spins) {
            if (spins > 256) sched_yield();
        }
    }

    static void tile(const Tile& t, const Rows& keys) {
        const Space& w = t.w;
        const bool open = t.scorer.open(t.i0, t.i0 + t.rows, t.j0, t.j1);
        const bool untouched = open && t.scorer.untouched(t.j0, t.j1);
        // else the runs of rows hold nothing but the runs of columns
        const bool whole = !T::tiled || (t.rows % row_grain == 0 && !t.p.block_mask.present());
        if (!open || !t.scorer.exact || !whole) {
            const int64_t count = T::tiled ? w.p_at.size : round_up(t.rows, T::per_word) / T::per_word * w.p_at.row;
            const size_t bytes = static_cast<size_t>(count) * sizeof(Word);
            std::memset(w.prob, 0, bytes);
            std::memset(w.dscore, 0, bytes);
        }
        t.scorer.strips(t.i0, t.i0 + t.rows, t.j0, t.j1, w.runs, [&](int64_t begin, int64_t end, int64_t count) {
            strip(t, begin - t.i0, end - begin, count, untouched);
        });
        t.scorer.key_strips(t.j0, t.j1, t.i0, t.i0 + t.rows, row_grain, w.runs, [&](int64_t begin, int64_t end, int64_t count) {
            const int64_t c = begin - t.j0;
            if (t.need_dv) add_keys(w, c, end - begin, count, w.prob, t.dout, w.dv);
            if (t.need_dk) add_keys(w, c, end - begin, count, w.dscore, t.q, w.dk);
        });
        add_bad(t, keys);
    }

    // Keys c, ... of dK or dV += x^T of the rows' operand.
    static void add_keys(const Space& w, int64_t c, int64_t keys, int64_t count, const Word* x, const Pack& rows, R* sum) {
        if constexpr (T::tiled) {
            gemm_depth<T, Start::add>(rows.width, round_up(keys, lanes<R>), count, w.runs, rows.stacked, rows.turned_ld, 1,
                                      x + w.p_at.at(0, c), w.p_at, sum + c, w.key_ld);
        } else {
            gemm_depth<T, Start::add>(keys, rows.width, count, w.runs, x + c, 1, w.p_at.row, rows.stacked, rows.at,
                                      sum + c * rows.width, rows.width);
        }
    }

    static void strip(const Tile& t, int64_t r0, int64_t rows, int64_t count, bool untouched) {
        const Space& w = t.w;
        gemm_columns<T>(rows, count, w.runs, w.depth, t.q.rows + r0 * t.q.ld, t.q.ld, w.k, w.k_at, w.score, w.ld);
        if (t.need_dscore) {
            gemm_columns<T>(rows, count, w.runs, w.depth_v, t.dout.rows + r0 * t.dout.ld, t.dout.ld, w.v, w.v_at, w.dprob, w.ld);
        }
        for (int64_t r = 0; r < rows; ++r) row(t, r0, r, count, untouched);
        for (int64_t n = 0; n < count; ++n) write_tiles(t, r0, rows, w.runs[n]);
        if (!t.need_dq) return;
        const Word* a = pairs ? w.dscore_rows : w.dscore + r0 * w.p_at.row;
        gemm_depth<T, Start::add>(rows, w.width, count, w.runs, a, pairs ? w.ld : w.p_at.row, 1, w.k_stacked, w.k_stacked_at,
                                  t.dq + r0 * w.width, w.width);
    }

    // Scores and dP of a row become the P that multiplies dO, and dS'.
    static void row(const Tile& t, int64_t r0, int64_t r, int64_t count, bool untouched) {
        const Params& p = t.p;
        const Space& w = t.w;
        R *s = w.score + r * w.ld, *dp = w.dprob + r * w.ld;
        const int64_t i = t.i0 + r0 + r;
        for (int64_t n = 0; n < count && !untouched; ++n) {
            const int64_t c = w.runs[n].begin;
            t.scorer.row(i, t.j0 + c, w.runs[n].end - c, t.j1, s + c, p.softcap > 0 ? w.derivative + c : nullptr);
        }
        const R m = t.max[r0 + r], inverse = t.inverse[r0 + r], delta = t.delta[r0 + r];
        const uint8_t* keep = w.keep + (r0 + r) * w.keys;
        if (p.dropout_threshold) gradients<true>(count, w.runs, s, dp, t.scorer.factor, m, inverse, delta, t.inverse_kept, keep);
        else gradients<false>(count, w.runs, s, dp, t.scorer.factor, m, inverse, delta, t.inverse_kept, keep);
        for (int64_t n = 0; n < count && p.dbias.present(); ++n) add_dbias(t, i, w.runs[n], dp);
        for (int64_t n = 0; n < count && p.softcap > 0 && t.need_dscore; ++n)
            for (int64_t c = w.runs[n].begin; c < w.runs[n].end; c += lanes<R>) {
                const Vec<R> grad = load<R>(dp + c), x = grad * load<R>(w.derivative + c);
                store<R>(dp + c, grad == R(0) ? Vec<R>{} : x);
            }
    }
    template <bool dropout>
    static ATTNLIB_NOINLINE void gradients(int64_t count, const Run* runs, R* __restrict s, R* __restrict dp, R factor, R m,
                                         R inverse, R delta, R inverse_kept, const uint8_t* keep) {
        for (int64_t n = 0; n < count; ++n) {
            const int64_t end = runs[n].end;
            for (int64_t c = runs[n].begin; c < end; c += lanes<R>) {
                const Vec<R> x = load<R>(s + c);
                const auto hidden = x == -infinity<R>;
                Vec<R> prob = T::exp(rounded(x * factor) - m) * inverse, grad = load<R>(dp + c);
                prob = hidden ? Vec<R>{} : prob;
                if constexpr (dropout) {
                    const Vec<R> kept = keep_vector<R>(keep + c) * inverse_kept;
                    store<R>(s + c, prob * kept);
                    grad *= kept;
                } else {
                    store<R>(s + c, prob);
                }
                grad = prob * (grad - delta);
                store<R>(dp + c, hidden ? Vec<R>{} : grad);
            }
        }
    }

    static void add_dbias(const Tile& t, int64_t i, Run run, const R* ds) {
        const View& g = t.p.dbias;
        const Window& window = t.scorer.seq.window;
        const int64_t begin = larger(window.key_begin(i) - t.j0, run.begin), end = smaller(smaller(window.key_end(i), t.j1) - t.j0, run.end);
        R* to = reinterpret_cast<R*>(g.data) + t.scorer.seq.index * g.stride[0] + t.scorer.head * g.stride[1] +
                i * g.stride[2] + t.j0 * g.stride[3];
        if (g.stride[3] == 1) {
            for (int64_t c = begin; c < end; ++c) to[c] += ds[c];
        } else {
            for (int64_t c = begin; c < end; ++c) to[c * g.stride[3]] += ds[c];
        }
    }

    // P and dS' of a strip go to the tiles that dV and dK read by columns (pairs of rows in one word).
    static void write_tiles(const Tile& t, int64_t r0, int64_t rows, Run run) {
        const Space& w = t.w;
        if constexpr (T::per_word == 1) {
            for (int64_t r = 0; r < rows; ++r)
                for (int64_t c = run.begin; c < run.end; c += lanes<R>) {
                    store<R>(w.prob + w.p_at.at(r0 + r, c), load<R>(w.score + r * w.ld + c));
                    if (t.need_dscore) store<R>(w.dscore + w.p_at.at(r0 + r, c), load<R>(w.dprob + r * w.ld + c));
                }
        } else {
            if (rows & 1) {
                for (int64_t c = run.begin; c < run.end; ++c) {
                    w.score[rows * w.ld + c] = 0;
                    w.dprob[rows * w.ld + c] = 0;
                }
            }
            for (int64_t r = 0; r < rows; r += 2)
                for (int64_t c = run.begin; c < run.end; c += lanes<R>) {
                    const int64_t at = w.p_at.at((r0 + r) / 2, c);
                    const R *s = w.score + r * w.ld + c, *ds = w.dprob + r * w.ld + c;
                    T::store_pair(w.prob + at, load<R>(s), load<R>(s + w.ld));
                    if (t.need_dscore) T::store_pair(w.dscore + at, load<R>(ds), load<R>(ds + w.ld));
                }
            if (t.need_dq) {
                for (int64_t r = 0; r < rows; ++r)
                    for (int64_t c = run.begin; c < run.end; c += T::grain) {
                        Vec<R> x[T::grain / lanes<R>];
                        for (int64_t v = 0; v < T::grain / lanes<R>; ++v) x[v] = load<R>(w.dprob + r * w.ld + c + v * lanes<R>);
                        T::store_words(w.dscore_rows + r * w.ld + c / T::per_word, x);
                    }
            }
        }
    }
    static R element(const Tile& t, const Word* x, int64_t r, int64_t c) {
        const int64_t at = t.w.p_at.at(r / T::per_word, c) + c % lanes<R>;
        return T::word_part(x, at * T::per_word + r % T::per_word);
    }

    // Rows that hold Inf or NaN were left out of the products; here each reaches those that see it.
    static void add_bad(const Tile& t, const Rows& keys) {
        const Params& p = t.p;
        const Space& w = t.w;
        const Rows q = query_rows(p.q, p, t.scorer.seq, t.scorer.head);
        const Rows dout = query_rows(p.dout, p, t.scorer.seq, t.scorer.head);
        for (int64_t n = 0; t.need_dq && n < t.bad_k; ++n) {
            const int64_t c = w.bad_k[n];
            load_row<R>(p.k.dtype, keys.row(t.j0 + c), w.value, p.dim);
            for (int64_t r = 0; r < t.rows; ++r)
                if (t.scorer.sees(t.i0 + r, t.j0 + c)) add_scaled(t.dq + r * w.width, element(t, w.dscore, r, c), w.value, p.dim);
        }
        for (int64_t n = 0; t.need_dk && n < *t.q.bad_count; ++n) {
            const int64_t r = t.q.bad[n];
            load_row<R>(p.q.dtype, q.row(t.i0 + r), w.value, p.dim);
            for (int64_t c = 0; c < t.j1 - t.j0; ++c)
                if (t.scorer.sees(t.i0 + r, t.j0 + c)) add_to_key(w, w.dk, w.width, c, element(t, w.dscore, r, c), p.dim);
        }
        for (int64_t n = 0; t.need_dv && n < *t.dout.bad_count; ++n) {
            const int64_t r = t.dout.bad[n];
            load_row<R>(p.dout.dtype, dout.row(t.i0 + r), w.value, p.dim_v);
            for (int64_t c = 0; c < t.j1 - t.j0; ++c)
                if (t.scorer.sees(t.i0 + r, t.j0 + c)) add_to_key(w, w.dv, w.width_v, c, element(t, w.prob, r, c), p.dim_v);
        }
    }
    static void add_scaled(R* to, R weight, const R* x, int64_t n) {
        for (int64_t d = 0; d < n; ++d) to[d] += weight * x[d];
    }

    // Row c of dK or dV += weight * value.
    static void add_to_key(const Space& w, R* sum, int64_t width, int64_t c, R weight, int64_t n) {
        for (int64_t d = 0; d < n; ++d) sum[T::tiled ? d * w.key_ld + c : c * width + d] += weight * w.value[d];
    }
    // Row r of dK or dV; asked for in ascending order, from 0 on. turned: [lanes, width], of its own.
    static const R* key_row(const Space& w, const R* sum, int64_t width, int64_t r, R* turned) {
        if constexpr (T::tiled) {
            constexpr int n = static_cast<int>(lanes<R>);
            for (int64_t d = 0; d < width && r % n == 0; d += n) {
                Vec<R> square[n];
                for (int x = 0; x < n; ++x) square[x] = load<R>(sum + (d + x) * w.key_ld + r);
                transpose_square(square);
                for (int x = 0; x < n; ++x) store<R>(turned + x * width + d, square[x]);
            }
            return turned + r % n * width;
        } else {
            return sum + r * width;
        }
    }

    static void store_block(const Params& p, const Sequence& seq, int64_t kv_head, int64_t j0, int64_t j1, const Space& w) {
        const R scale = static_cast<R>(p.scale), one = p.has(Fault::dv_scale) ? R(1.004) : R(1);
        R* const turned_v = w.turned + (T::tiled ? lanes<R> * w.width : 0);
        if (p.paged) {  // pages may be shared: sums in the accumulation type, stored at the end
            const int32_t* pages = p.page_table + seq.index * p.page_table_stride[0];
            for (int64_t j = j0; j < j1; ++j) {
                const R *dk = key_row(w, w.dk, w.width, j - j0, w.turned), *dv = key_row(w, w.dv, w.width_v, j - j0, turned_v);
                if (j < seq.extent_begin) continue;
                const int64_t slot = pages[j / p.page_size * p.page_table_stride[1]] * p.page_size + j % p.page_size;
                const int64_t at = slot * p.heads_kv + kv_head;
                if (p.dk.present()) add_scaled(reinterpret_cast<R*>(p.dk_sum) + at * p.dim, scale, dk, p.dim);
                if (p.dv.present()) add_scaled(reinterpret_cast<R*>(p.dv_sum) + at * p.dim_v, one, dv, p.dim_v);
            }
            return;
        }
        const Rows dk = key_rows(p.dk, p, seq, kv_head), dv = key_rows(p.dv, p, seq, kv_head);
        for (int64_t j = j0; j < j1; ++j) {
            const R *x = key_row(w, w.dk, w.width, j - j0, w.turned), *y = key_row(w, w.dv, w.width_v, j - j0, turned_v);
            if (p.dk.present()) store_row<R>(p.dk.dtype, const_cast<char*>(dk.row(j)), x, p.dim, scale);
            if (p.dv.present()) store_row<R>(p.dv.dtype, const_cast<char*>(dv.row(j)), y, p.dim_v, one);
        }
    }

    static void store_dq(const Params& p, const Sequence& seq, int64_t head, int64_t row_begin, int64_t row_end) {
        const Rows dq = query_rows(p.dq, p, seq, head);
        const int64_t row = p.packed ? seq.q_row : seq.index * p.seqlen_q;
        const R* sum = reinterpret_cast<const R*>(p.dq_sum) + (head * p.rows_q + row) * p.dq_width;
        for (int64_t i = row_begin; i < row_end; ++i)
            store_row<R>(p.dq.dtype, const_cast<char*>(dq.row(i)), sum + i * p.dq_width, p.dim, static_cast<R>(p.scale));
    }
};

}  // namespace
}  // namespace ATTNLIB_ISA
}  // namespace attnlib
