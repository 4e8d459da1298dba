// Forward for one block of query rows of one head, by online softmax over blocks of keys:
//
//   s = score(Q K_b^T);  m' = max(m, rowmax s);  c = exp(m - m');  p = exp(s - m');  l = c l + sum p
//   O = c O + (keep * p) V_b;      at the end  out = O / l / (1 - p_drop),  lse = m + log l,  the sink joins m and l
//
// A block may hold the same rows of several query heads of one group (params.share): they read one copy of K and V. The
// copy of a key block that several units read is made before (params.tiles).
// A strip of kRows rows runs through scores, softmax and P.V while its scores are in L1. Rows without a key keep
// m = -inf, l = 0, O = 0. The result of a row depends on block_k only, not on block_q, share or threads.
#pragma once

#include "score.h"

namespace attnlib {
namespace ATTNLIB_ISA {
namespace {

// Results of rows of one head from their maximum, sum and O.
template <class R> struct Finish {
    const Params& p;
    const Sequence& seq;
    int64_t head;
    Rows out;
    R inverse_kept, sink;

    Finish(const Params& params, const Sequence& sequence, int64_t h)
        : p(params), seq(sequence), head(h), out(query_rows(p.out, p, seq, h)), sink(-infinity<R>) {
        const double kept = 1.0 - static_cast<double>(p.dropout_threshold) / 65536.0;
        inverse_kept = static_cast<R>(kept > 0 ? 1.0 / kept : 0.0);
        if (p.sinks.present() && !p.has(Fault::sink_forgotten)) {
            sink = load_one<R>(p.sinks.dtype, p.sinks.data + head * p.sinks.stride[0] * p.sinks.bytes());
        }
    }

    void row(int64_t i, R m, R l, const R* sum) const {
        R rescale = 1;
        if (sink != -infinity<R>) {
            const R top = sink > m ? sink : m;
            rescale = std::exp(m - top);
            l = l * rescale + std::exp(sink - top);
            m = top;
        }
        const R factor = l == 0 ? R(0) : rescale * inverse_kept / l;
        store_row<R>(p.out.dtype, const_cast<char*>(out.row(i)), sum, p.dim_v, factor);
        store_statistics(i, l == 0 ? -infinity<R> : m + std::log(l), m, l);
    }

    // Rows that are no query get 0 and -inf; all rows of a sequence that does not fit get NaN.
    void pad(int64_t begin, int64_t end, R* value) const {
        for (int64_t i = begin; i < end; ++i) {
            const bool invalid = !seq.valid && i < seq.q_len;
            const R nan = static_cast<R>(__builtin_nan(""));
            for (int64_t d = 0; d < p.dim_v; ++d) value[d] = invalid ? nan : R(0);
            store_row<R>(p.out.dtype, const_cast<char*>(out.row(i)), value, p.dim_v, R(1));
            store_statistics(i, invalid ? nan : -infinity<R>, invalid ? nan : -infinity<R>, invalid ? nan : R(0));
        }
    }

    void store_statistics(int64_t i, R lse, R m, R l) const {
        const int64_t at = row_index(p, seq, head, i);
        if (p.lse.present()) reinterpret_cast<R*>(p.lse.data)[at] = lse;
        if (!p.stats.present()) return;
        reinterpret_cast<R*>(p.stats.data)[at] = m;
        reinterpret_cast<R*>(p.stats.data)[at + p.stats_sum] = l;
    }
};

template <class T> struct Forward {
    using Word = typename T::Word;
    using R = typename T::Real;
    using Score = Scorer<R, T::strip, T::grain>;

    static int64_t padded_keys(const Params& p) { return round_up(p.block_k, T::grain); }
    static int64_t padded_dim_v(const Params& p) { return larger(round_up(p.dim_v, lanes<R>), lanes<R>); }

    // K and V of one key block: K transposed, V stacked, and which of its rows hold Inf or NaN.
    struct Keys {
        Layout<T> k_at, v_at;
        Word *k, *v;
        int32_t* bad;
        int64_t* bad_count;

        Keys(const Params& p, Arena& a)
            : k_at(padded_keys(p), words<T>(p.dim)), v_at(padded_dim_v(p), padded_keys(p) / T::per_word) {
            k = a.take<Word>(k_at.size);
            v = a.take<Word>(v_at.size);
            bad = a.take<int32_t>(padded_keys(p));
            bad_count = a.take<int64_t>(1);
        }

        void fill(const Params& p, const Sequence& seq, int64_t kv_head, int64_t j0, int64_t j1, Word* scratch) const {
            const int64_t padded = round_up(j1 - j0, T::grain), begin = larger(j0, seq.extent_begin);
            pack_transposed<T>(key_rows(p.k, p, seq, kv_head), p.k.dtype, j0, begin, j1, padded, p.dim, k, k_at, scratch);
            *bad_count = pack_stacked<T>(key_rows(p.v, p, seq, kv_head), p.v.dtype, j0, begin, j1, padded, p.dim_v, v,
                                         padded_dim_v(p), v_at, bad, scratch);
        }
    };
    static size_t tile_bytes(const Params& p) {
        Arena a{nullptr};
        Keys(p, a);
        return a.used;
    }
    static Keys tile_at(const Params& p, const Sequence& seq, int64_t kv_head, int64_t tile) {
        Arena a{p.tiles + static_cast<size_t>(seq.first_copy + kv_head * seq.tiles + tile) * tile_bytes(p)};
        return Keys(p, a);
    }
    static void fill_tile(const Params& p, const Sequence& seq, int64_t kv_head, int64_t tile, char* workspace) {
        const int64_t j0 = (seq.key_tile + tile) * p.block_k;
        const Space w(p, workspace);
        tile_at(p, seq, kv_head, tile).fill(p, seq, kv_head, j0, smaller(j0 + p.block_k, seq.kv_len), w.scratch);
    }

    struct Space {
        Arena arena;
        Keys own;
        Word *q, *scratch, *prob;  // prob: P of a row in the place of its scores
        R *out, *max, *sum, *score, *line, *value;
        uint8_t* keep;
        Run* runs;
        int64_t keys, ld, width_v, depth;  // padded block_k, of rows of scores, padded dim_v, words of dim

        Space(const Params& p, char* base) : arena{base}, own(p, arena) {
            Arena& a = arena;
            keys = padded_keys(p);
            ld = keys + (T::tiled ? lanes<R> : 0);  // rows of a tile must not share cache sets
            width_v = padded_dim_v(p);
            depth = words<T>(p.dim);
            const int64_t rows = p.block_q * p.share;
            q = a.take<Word>((rows + (T::tiled ? T::strip : 0)) * depth);
            scratch = a.take<Word>(lanes<R> * round_up(larger(depth, words<T>(p.dim_v)), lanes<R>));
            out = a.take<R>(rows * width_v);
            max = a.take<R>(rows);
            sum = a.take<R>(rows);
            score = a.take<R>(T::strip * ld);
            prob = reinterpret_cast<Word*>(score);
            static_assert(sizeof(Word) == sizeof(R), "rows of both are ld apart");
            line = a.take<R>(keys);
            value = a.take<R>(width_v);
            keep = a.take<uint8_t>(p.dropout_threshold ? rows * keys + 64 : 1);
            runs = a.take<Run>(keys / 16 + 2);
        }

        // The same with the rows of the n-th head in front.
        Space of_head(int64_t n, int64_t rows) const {
            Space w = *this;
            w.q += n * rows * depth;
            w.out += n * rows * width_v;
            w.max += n * rows;
            w.sum += n * rows;
            w.keep += n * rows * keys;
            return w;
        }
    };

    static size_t workspace(const Params& p) { return Space(p, nullptr).arena.used; }

    // Rows [row_begin, row_end) of heads first_head, ..., first_head + share - 1, all of one group.
    static void block(const Params& p, const Sequence& seq, int64_t first_head, int64_t row_begin, int64_t row_end,
                      char* workspace) {
        const Space w(p, workspace);
        const typename T::Scope scope;
        const int64_t end = seq.valid ? smaller(row_end, seq.q_len) : row_begin, rows = end - row_begin;
        if (rows > 0) attend(p, seq, first_head, row_begin, rows, w);
        for (int64_t n = 0; n < p.share; ++n) {
            const Finish<R> finish(p, seq, first_head + n);
            const Space of_head = w.of_head(n, rows);
            for (int64_t r = 0; r < rows; ++r) {
                finish.row(row_begin + r, of_head.max[r], of_head.sum[r], of_head.out + r * w.width_v);
            }
            finish.pad(larger(end, row_begin), row_end, w.value);
        }
    }

    static void attend(const Params& p, const Sequence& seq, int64_t first_head, int64_t i0, int64_t rows, const Space& w) {
        const int64_t kv_head = p.kv_head(first_head), all = rows * p.share;
        for (int64_t n = 0; n < p.share; ++n) {
            pack_rows<T>(query_rows(p.q, p, seq, first_head + n), p.q.dtype, i0, rows, p.dim, w.q + n * rows * w.depth, w.depth);
        }
        for (int64_t r = 0; r < all; ++r) w.max[r] = -infinity<R>, w.sum[r] = 0;
        std::memset(w.out, 0, static_cast<size_t>(all * w.width_v) * sizeof(R));
        const int64_t first = seq.window.key_begin(i0), last = seq.window.key_end(i0 + rows - 1);
        for (int64_t j0 = first / p.block_k * p.block_k; j0 < last; j0 += p.block_k) {
            const int64_t j1 = smaller(j0 + p.block_k, seq.kv_len);
            if (p.has(Fault::drop_last_partial_key_block) && j1 - j0 < p.block_k) continue;
            const bool shared = seq.first_copy >= 0;
            const Keys tile = shared ? tile_at(p, seq, kv_head, j0 / p.block_k - seq.key_tile) : w.own;
            bool filled = shared;  // else for the first head that sees any of it
            for (int64_t n = 0; n < p.share; ++n) {
                const Score scorer(p, seq, first_head + n, w.line);
                if (!scorer.tile_seen(i0, i0 + rows, j0, j1)) continue;
                if (!filled) tile.fill(p, seq, kv_head, j0, j1, w.scratch);
                filled = true;
                head_tile(p, seq, scorer, tile, i0, rows, j0, j1, w.of_head(n, rows));
            }
        }
    }

    static void head_tile(const Params& p, const Sequence& seq, const Score& scorer, const Keys& tile, int64_t i0,
                          int64_t rows, int64_t j0, int64_t j1, const Space& w) {
        const bool untouched = scorer.open(i0, i0 + rows, j0, j1) && scorer.untouched(j0, j1);
        const Rows values = key_rows(p.v, p, seq, p.kv_head(scorer.head));
        if (p.dropout_threshold) fill_keep(p, seq, scorer.head, i0, rows, j0, round_up(j1 - j0, T::grain), w.keep, w.keys);
        scorer.strips(i0, i0 + rows, j0, j1, w.runs, [&](int64_t begin, int64_t end, int64_t count) {
            const int64_t r = begin - i0;
            strip(p, scorer, tile, i0, r, end - begin, j0, j1, count, untouched, w);
            for (int64_t n = 0; n < *tile.bad_count; ++n) add_bad(p, scorer, values, i0, r, end - begin, j0, tile.bad[n], w);
        });
    }

    static void strip(const Params& p, const Score& scorer, const Keys& tile, int64_t i0, int64_t r0, int64_t rows,
                      int64_t j0, int64_t j1, int64_t count, bool untouched, const Space& w) {
        constexpr int64_t most = (T::strip + 15) / 16 * 16;
        alignas(64) R correction[most], top[most];
        static_assert(lanes<R> <= 16, "vectors hold a strip's rows");
        gemm_columns<T>(rows, count, w.runs, w.depth, w.q + r0 * w.depth, w.depth, tile.k, tile.k_at, w.score, w.ld);
        for (int64_t r = 0; r < most; ++r) correction[r] = top[r] = 0;
        for (int64_t r = 0; r < rows; ++r) {
            R* s = w.score + r * w.ld;
            for (int64_t n = 0; n < count && !untouched; ++n) {
                const int64_t c = w.runs[n].begin;
                scorer.row(i0 + r0 + r, j0 + c, w.runs[n].end - c, j1, s + c, nullptr);
            }
            const R before = w.max[r0 + r], now = row_max(count, w.runs, s) * scorer.factor;
            const R m = now > before ? now : before;
            w.max[r0 + r] = m;
            top[r] = m == -infinity<R> ? R(0) : m;
            correction[r] = before - top[r];
        }
        for (int64_t r = 0; r < rows; r += lanes<R>) store<R>(correction + r, exp_of<R>(load<R>(correction + r)));
        if (p.has(Fault::no_rescale)) for (R& c : correction) c = 1;
        bool fresh = true;  // O is still 0
        for (int64_t r = 0; r < rows; ++r) fresh &= w.sum[r0 + r] == 0;
        if (p.dropout_threshold) strip_exponentials<true>(r0, rows, count, scorer.factor, top, correction, w);
        else strip_exponentials<false>(r0, rows, count, scorer.factor, top, correction, w);
        R* const out = w.out + r0 * w.width_v;
        if (T::tiled && fresh) {
            gemm_depth<T, T::tiled ? Start::zero : Start::add>(rows, w.width_v, count, w.runs, w.prob, w.ld, 1, tile.v, tile.v_at,
                                                               out, w.width_v);
        } else {
            gemm_depth<T, Start::scaled>(rows, w.width_v, count, w.runs, w.prob, w.ld, 1, tile.v, tile.v_at, out, w.width_v,
                                         correction);
        }
    }

    // Maximum of a row over its runs; NaN is passed over here and stays in the sum.
    static ATTNLIB_NOINLINE R row_max(int64_t count, const Run* runs, const R* s) {
        Vec<R> best = splat<R>(-infinity<R>), other = best;
        for (int64_t n = 0; n < count; ++n) {
            const int64_t end = runs[n].end;
            int64_t x = runs[n].begin;
            for (; x + 2 * lanes<R> <= end; x += 2 * lanes<R>) {
                best = max_of<R>(load<R>(s + x), best);
                other = max_of<R>(load<R>(s + x + lanes<R>), other);
            }
            if (x < end) best = max_of<R>(load<R>(s + x), best);
        }
        return reduce_max<R>(max_of<R>(best, other));
    }

    template <bool dropout>
    static ATTNLIB_NOINLINE void strip_exponentials(int64_t r0, int64_t rows, int64_t count, R factor, const R* top,
                                                    const R* correction, const Space& w) {
        for (int64_t r = 0; r < rows; ++r) {
            const R total = row_exponentials<dropout>(count, w.runs, w.score + r * w.ld, factor, top[r], w.prob + r * w.ld,
                                                      w.keep + (r0 + r) * w.keys);
            w.sum[r0 + r] = w.sum[r0 + r] * correction[r] + total;
        }
    }
    template <bool dropout, class... Rest> static ATTNLIB_NOINLINE R exponentials(Rest... rest) {
        return row_exponentials<dropout>(rest...);
    }
    // p = exp(factor s - top), dropped where keep says so; returns the sum of all.
    template <bool dropout>
    static ATTNLIB_INLINE R row_exponentials(int64_t count, const Run* runs, const R* s, R factor, R top, Word* prob,
                                             const uint8_t* keep) {
        constexpr int vectors = T::grain / lanes<R>;
        Vec<R> total[vectors] = {};
        for (int64_t n = 0; n < count; ++n) {
            const int64_t end = runs[n].end;
            for (int64_t x = runs[n].begin; x < end; x += T::grain) {
                Vec<R> e[vectors];
                for (int v = 0; v < vectors; ++v) {
                    const int64_t at = x + v * lanes<R>;
                    e[v] = T::exp(rounded(load<R>(s + at) * factor) - top);
                    total[v] += e[v];
                    if constexpr (dropout) e[v] *= keep_vector<R>(keep + at);
                }
                T::store_words(prob + x / T::per_word, e);
            }
        }
        for (int v = 1; v < vectors; ++v) total[0] += total[v];
        return reduce_add<R>(total[0]);
    }

    // Adds the value of key j0 + c, which holds Inf or NaN, to those rows of a strip that see it.
    static void add_bad(const Params& p, const Score& scorer, const Rows& values, int64_t i0, int64_t r0, int64_t rows,
                        int64_t j0, int64_t c, const Space& w) {
        load_row<R>(p.v.dtype, values.row(j0 + c), w.value, p.dim_v);
        for (int64_t r = 0; r < rows; ++r) {
            if (w.max[r0 + r] == -infinity<R> || !scorer.sees(i0 + r0 + r, j0 + c)) continue;  // the former: arithmetic hides all so far
            const R weight = T::word_part(w.prob, r * w.ld * T::per_word + c);
            R* out = w.out + (r0 + r) * w.width_v;
            for (int64_t d = 0; d < p.dim_v; ++d) out[d] += weight * w.value[d];
        }
    }
};

}  // namespace
}  // namespace ATTNLIB_ISA
}  // namespace attnlib
