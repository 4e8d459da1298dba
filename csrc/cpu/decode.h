// Forward for few queries over many keys: K and V are read where they lie, once and in the order of memory.
//
// A unit is one chunk of keys of one sequence with all rows of some key/value heads; it leaves (O, m, l) of its chunk, as
// forward.h has them before the division. merge() puts the chunks of a row together in ascending order:
//
//   m = max m_c;  l = sum exp(m_c - m) l_c;  O = sum exp(m_c - m) O_c
//
// Scores are dot products along head_dim: a register tile holds as many (row, key) sums as a vector has lanes and folds
// them into one vector. The result of a row depends on the chunk only, not on how heads are divided or on threads.
#pragma once

#include "forward.h"

#if defined(__AMX_BF16__)
#include "decode_amx.h"
#endif

namespace attnlib {
namespace ATTNLIB_ISA {
namespace {

// Without AMX; see decode_amx.h.
template <class T> struct NoTiles {
    static constexpr bool used = false;
    static constexpr int64_t kKeys = 8;
    struct Scores {
        explicit Scores(int64_t) {}
        ~Scores() {}  // as one that does something
    };
    using Values = Scores;
    static int64_t columns(int64_t) { return 0; }
    static int64_t keys(const Params&) { return kKeys; }
    static ATTNLIB_INLINE int64_t placed_at(int64_t d) { return T::stacked_at(d); }
};

template <class T> struct Decode {
    using Word = typename T::Word;
    using R = typename T::Real;
#if defined(__AMX_BF16__)
    using Tiles = typename std::conditional<T::storage == DType::bf16, DecodeTiles<T>, NoTiles<T>>::type;
#else
    using Tiles = NoTiles<T>;
#endif

    static constexpr int64_t kKeys = 64;  // of a block: their scores are in L1
    static constexpr int64_t kSome = Tiles::kKeys;  // keys, at most, that all heads take before the next ones
    static constexpr int64_t kAhead = 16;  // keys between asking for a row and reading it, by vectors
    static constexpr int kMostRows = lanes<R> < 4 ? lanes<R> : 4;

    static int64_t padded_dim_v(const Params& p) {
        return larger(round_up(p.dim_v, lanes<R> * T::per_word), lanes<R> * T::per_word);
    }
    static int64_t part_row(const Params& p) { return padded_dim_v(p) + lanes<R>; }  // O, then m and l
    static size_t part_bytes(const Params& p) {
        return static_cast<size_t>(p.heads_q * p.block_q * part_row(p)) * sizeof(R);
    }

    struct Space {
        Arena arena;
        Word *q, *q_tiles, *k, *v, *zeros, *prob, *prob_tiles;
        R *out, *product, *max, *sum, *score, *correction, *ones, *line, *value, *part;
        int64_t rows, some, depth, depth_v, width_v;  // depth: words of a row, padded to vectors

        Space(const Params& p, char* base) : arena{base} {
            Arena& a = arena;
            rows = p.heads_q * p.block_q;
            some = Tiles::keys(p);
            depth = round_up(words<T>(p.dim), lanes<R>);
            width_v = padded_dim_v(p);
            depth_v = width_v / T::per_word;
            q = a.take<Word>(rows * depth);
            q_tiles = a.take<Word>(p.heads_kv * Tiles::columns(p.group() * p.block_q) * depth);
            k = a.take<Word>((Tiles::used ? 2 : 1) * kSome * depth);
            v = a.take<Word>((Tiles::used ? 2 : 1) * kSome * depth_v);
            zeros = a.take<Word>(larger(depth, depth_v));
            prob = a.take<Word>(T::per_word > 1 ? rows * kKeys / T::per_word : 1);
            prob_tiles = a.take<Word>(Tiles::used ? 2 * rows * kKeys : 0);
            out = a.take<R>(rows * width_v);
            product = a.take<R>(Tiles::used ? p.group() * p.block_q * width_v : 0);
            max = a.take<R>(rows);
            sum = a.take<R>(rows);
            score = a.take<R>(rows * kKeys);
            correction = a.take<R>(rows + lanes<R>);
            ones = a.take<R>(Tiles::used ? 16 : 0);
            line = a.take<R>(kKeys);
            value = a.take<R>(width_v);
            part = a.take<R>(rows * part_row(p));
        }
    };
    static size_t workspace(const Params& p) {
        const size_t merging = Forward<T>::workspace(p), own = Space(p, nullptr).arena.used;
        return merging > own ? merging : own;
    }

    // Keys of one chunk and rows of heads [kv_begin, kv_end); row (h - first head) * q_len + i is query i of head h.
    struct Unit {
        const Params& p;
        const Sequence& seq;
        const Space& w;
        int64_t kv_begin, kv_end, first_head, rows_of_kv, rows;

        Unit(const Params& params, const Sequence& s, const Space& space, int64_t begin, int64_t end)
            : p(params), seq(s), w(space), kv_begin(begin), kv_end(end), first_head(begin * params.group()),
              rows_of_kv(params.group() * s.q_len), rows((end - begin) * rows_of_kv) {}

        // Of the head of row `first`.
        Word* q_tile(int64_t first) const { return w.q_tiles + first / rows_of_kv * Tiles::columns(rows_of_kv) * w.depth; }
        Word* prob_tile(int64_t first) const { return w.prob_tiles + 2 * first * kKeys; }
    };

    static void block(const Params& p, const Sequence& seq, int64_t kv_begin, int64_t kv_end, int64_t chunk, char* workspace) {
        const Space w(p, workspace);
        const Unit u(p, seq, w, kv_begin, kv_end);
        const int64_t first_row = u.first_head * seq.q_len;
        if (seq.tiles > 0) attend(u, chunk);
        if (seq.first_copy >= 0) {
            store_part(u, reinterpret_cast<R*>(p.tiles + static_cast<size_t>(seq.first_copy + chunk) * part_bytes(p)) +
                              first_row * part_row(p));
            return;
        }
        if (seq.tiles > 0) store_part(u, w.part);
        R* part = seq.tiles > 0 ? w.part - first_row * part_row(p) : nullptr;
        for (int64_t h = u.first_head; h < kv_end * p.group(); ++h) finish(p, seq, h, part, w.value);
    }

    static void attend(const Unit& u, int64_t chunk) {
        const Params& p = u.p;
        const Space& w = u.w;
        for (int64_t n = 0; n < u.rows * w.depth; ++n) w.q[n] = 0;
        for (int64_t n = 0; n * u.seq.q_len < u.rows; ++n) {
            pack_rows<T>(query_rows(p.q, p, u.seq, u.first_head + n), p.q.dtype, 0, u.seq.q_len, p.dim,
                         w.q + n * u.seq.q_len * w.depth, w.depth);
        }
        if constexpr (Tiles::used) {
            for (int64_t r = 0; r < 16; ++r) w.ones[r] = 1;
            for (int64_t first = 0; first < u.rows; first += u.rows_of_kv)
                Tiles::transpose_q(w.q + first * w.depth, u.rows_of_kv, w.depth, u.q_tile(first));
        }
        std::memset(w.zeros, 0, static_cast<size_t>(larger(w.depth, w.depth_v)) * sizeof(Word));
        std::memset(w.out, 0, static_cast<size_t>(u.rows * w.width_v) * sizeof(R));
        for (int64_t r = 0; r < u.rows; ++r) w.max[r] = -infinity<R>, w.sum[r] = 0;
        const int64_t from = (u.seq.key_tile + chunk) * p.chunk;
        const int64_t last = smaller(from + p.chunk, u.seq.window.key_end(u.seq.q_len - 1));
        const Rows keys = key_rows(p.k, p, u.seq, 0), values = key_rows(p.v, p, u.seq, 0);
        int64_t j0 = larger(from, u.seq.extent_begin);
        for (Tokens k(p.k, p.dim, keys, j0, last); j0 < last; j0 += kKeys) {
            const Tokens v(p.v, p.dim_v, values, j0, last), next(p.k, p.dim, keys, j0 + kKeys, last);
            if (!p.has(Fault::drop_last_partial_key_block) || k.count == kKeys) key_block(u, j0, k, v, next);
            k = next;
        }
    }

    // Where the rows of some keys lie, those of head 0.
    struct Tokens {
        const View* view;
        int64_t dim, count;
        const char* at[kKeys];

        Tokens(const View& x, int64_t dims, const Rows& rows, int64_t begin, int64_t last)
            : view(&x), dim(dims), count(larger(smaller(kKeys, last - begin), 0)) {
            int64_t slot = rows.pages ? begin % rows.page_size : 0;
            const char* row = count > 0 ? rows.row(begin) : nullptr;
            for (int64_t c = 0; c < kKeys; ++c) {
                at[c] = row;
                if (c + 1 >= count) continue;
                row = rows.pages && ++slot == rows.page_size ? rows.row(begin + c + 1) : row + rows.stride;
                if (slot == rows.page_size) slot = 0;
            }
        }
        ATTNLIB_INLINE int64_t offset(int64_t kv) const { return kv * view->stride[2] * view->bytes(); }
    };

    // What is asked for, a line beside each that is read, kAhead keys before its turn: whole tokens where their heads lie
    // together, in the order of memory, so that the core's own prefetcher joins in. A burst of requests would fill the
    // core's buffers for misses.
    struct Ahead {
        const char* row[kKeys + 1];
        int64_t start, width, at_head;
        bool together;
        const char *line, *end;
        int64_t now, count;

        Ahead(const Unit& u, const Tokens& x, const Tokens& next) : count(x.count) {
            for (int64_t c = 0; c < x.count; ++c) {
                const int64_t later = c + kAhead, behind = later - x.count;
                row[c] = later < x.count ? x.at[later] : behind < next.count ? next.at[behind] : x.at[c];
            }
            row[x.count] = x.count > 0 ? x.at[x.count - 1] : nullptr;
            const int64_t row_bytes = x.dim * x.view->bytes();
            at_head = x.offset(1);
            together = at_head == row_bytes;
            start = x.offset(u.kv_begin);
            width = together ? row_bytes * (u.kv_end - u.kv_begin) : row_bytes;
            if (width < 64) width = 64;
        }
        // Before `kSome` keys from c on are read of the head'th head.
        ATTNLIB_INLINE void turn_to(int64_t c, int64_t head) {
            if (together && head > 0) return;
            now = c;
            line = row[now] + start + (together ? 0 : head * at_head);
            end = line + width;
        }
        ATTNLIB_INLINE void ask() {
            __builtin_prefetch(line, 0, 2);
            line += 64;
            if (line < end) return;
            const char* const before = row[now];
            if (now < count) ++now;  // more may be asked than there is: rows that are copied, or end within a line
            line = row[now] + (end - width - before);
            end = line + width;
        }
    };

    static void key_block(const Unit& u, int64_t j0, const Tokens& k, const Tokens& v, const Tokens& next) {
        const int64_t n = k.count, j1 = j0 + n, padded = round_up(n, lanes<R>);
        if constexpr (Tiles::used) {
            score_block(u, k, nullptr);
            value_block(u, j0, v, nullptr, softmax(u, j0, j1, padded));
        } else {
            Ahead ahead(u, k, v);
            score_block(u, k, &ahead);
            const bool all_seen = softmax(u, j0, j1, padded);
            ahead = Ahead(u, v, next);
            value_block(u, j0, v, &ahead, all_seen);
        }
    }
    static ATTNLIB_INLINE int64_t most_keys(const Space& w) { return Tiles::used ? w.some : kSome; }
    // f(c, some, kv, first) for `some` keys from c on of each head, whose first row is `first`, in the order of memory.
    template <class F> static ATTNLIB_INLINE void each_lines(const Unit& u, int64_t count, Ahead* ahead, F f) {
        const int64_t most = most_keys(u.w);
        for (int64_t c = 0; c < count; c += most)
            for (int64_t kv = u.kv_begin; kv < u.kv_end; ++kv) {
                if (ahead) ahead->turn_to(c, kv - u.kv_begin);
                f(c, smaller(most, count - c), kv, (kv - u.kv_begin) * u.rows_of_kv);
            }
    }
    static void score_block(const Unit& u, const Tokens& k, Ahead* ahead) {
        const Space& w = u.w;
        const typename Tiles::Scores scope(u.rows_of_kv);
        each_lines(u, k.count, ahead, [&](int64_t c, int64_t some, int64_t kv, int64_t first) {
            const char* row[kSome];
            const Lines lines = lines_of(k, c, most_keys(w), kv, w.depth, w.k, w.zeros, false, row);
            R* score = w.score + first * kKeys + c;
            if constexpr (Tiles::used) {
                Tiles::scores(u.rows_of_kv, u.q_tile(first), lines.at, lines.offset, some, w.depth, w.k + kSome * w.depth,
                              score, kKeys);
            } else {
                scores(u.rows_of_kv, w.q + first * w.depth, lines, *ahead, some, w.depth, score);
            }
        });
    }
    static void value_block(const Unit& u, int64_t j0, const Tokens& v, Ahead* ahead, bool all_seen) {
        const Space& w = u.w;
        const Word* prob = T::per_word == 1 ? reinterpret_cast<const Word*>(w.score) : w.prob;
        const typename Tiles::Values scope(u.rows_of_kv);
        each_lines(u, v.count, ahead, [&](int64_t c, int64_t some, int64_t kv, int64_t first) {
            const char* row[kSome];
            Lines lines = lines_of(v, c, most_keys(w), kv, w.depth_v, w.v, w.zeros, !all_seen, row);
            // 0 * NaN: a value that some row may not see is added by itself where it is seen
            uint64_t bad = all_seen ? 0 : leave_out(some, lines, w, row);
            if constexpr (Tiles::used) {
                const auto multiply = [&] {
                    Tiles::values(u.rows_of_kv, u.prob_tile(first) + 2 * u.rows_of_kv * c, lines.at, lines.offset, some,
                                  w.depth_v, w.v + kSome * w.depth_v, w.product);
                };
                multiply();
                if (all_seen && !finite_row<R>(w.product, u.rows_of_kv * w.width_v)) {  // so may what was to be multiplied
                    lines = lines_of(v, c, most_keys(w), kv, w.depth_v, w.v, w.zeros, true, row);
                    bad = leave_out(some, lines, w, row);
                    if (bad != 0) multiply();
                }
                const R* factor = c == 0 ? w.correction + first : w.ones;
                Tiles::add(u.rows_of_kv, w.product, w.depth_v, factor, w.out + first * w.width_v);
            } else {
                add_values(u.rows_of_kv, some, prob + (first * kKeys + c) / T::per_word, lines, *ahead, w, first, c == 0);
            }
            for (int64_t x = 0; bad >> x; ++x)
                if (bad >> x & 1) add_bad(u, kv, j0, c + x, v.at[c + x] + v.offset(kv));
        });
    }
    // Rows of one key/value head as whole vectors of words, where they lie or their copies.
    struct Lines {
        const char* const* at;
        int64_t offset;

        ATTNLIB_INLINE const Word* words(int64_t c) const { return reinterpret_cast<const Word*>(at[c] + offset); }
    };
    // `most` rows first, first + 1, ... of x; zeros behind the last one. With `own` their addresses may be changed there.
    static Lines lines_of(const Tokens& x, int64_t first, int64_t most, int64_t kv, int64_t depth, Word* copy,
                          const Word* zeros, bool own, const char** row) {
        const int64_t some = smaller(most, x.count - first);
        Lines lines{x.at + first, x.offset(kv)};
        const bool direct = x.view->dtype == T::storage && x.dim == depth * T::per_word;
        if (direct && !own && some == most) return lines;
        for (int64_t c = 0; c < most; ++c) {
            const char* from = lines.at[c] + lines.offset;
            row[c] = reinterpret_cast<const char*>(c >= some ? zeros : copy + c * depth);
            if (direct && c < some) row[c] = from;
            if (direct || c >= some) continue;
            for (int64_t d = x.dim / T::per_word; d < depth; ++d) copy[c * depth + d] = 0;
            load_words<T>(x.view->dtype, from, copy + c * depth, x.dim);
        }
        lines.at = row, lines.offset = 0;
        return lines;
    }
    static bool finite_words(const Word* x, int64_t depth) {
        if constexpr (T::per_word == 1) return finite_row<R>(x, depth);
        else return finite_bf16(reinterpret_cast<const uint16_t*>(x), depth * 2);
    }

    // Rows that hold Inf or NaN, a bit for each; they become zeros.
    static uint64_t leave_out(int64_t some, const Lines& lines, const Space& w, const char** row) {
        uint64_t bad = 0;
        for (int64_t x = 0; x < some; ++x) {
            if (finite_words(lines.words(x), w.depth_v)) continue;
            row[x] = reinterpret_cast<const char*>(w.zeros);
            bad |= uint64_t{1} << x;
        }
        return bad;
    }

    // score[r][c] = q_r . k_c for `some` keys, and a few more behind them.
    static void scores(int64_t rows, const Word* q, const Lines& row, Ahead& ahead, int64_t some, int64_t depth, R* score) {
        for (int64_t r = 0; r < rows;) {
            const int64_t count = rows - r >= kMostRows ? kMostRows : rows - r >= 2 ? 2 : 1;
            const Word* from = q + r * depth;
            R* to = score + r * kKeys;
            if (count == kMostRows) r == 0 ? dots<kMostRows, true>(from, row, ahead, some, depth, to) : dots<kMostRows, false>(from, row, ahead, some, depth, to);
            else if (count == 2) r == 0 ? dots<2, true>(from, row, ahead, some, depth, to) : dots<2, false>(from, row, ahead, some, depth, to);
            else r == 0 ? dots<1, true>(from, row, ahead, some, depth, to) : dots<1, false>(from, row, ahead, some, depth, to);
            r += count;
        }
    }
    // asks: for the first rows alone, since the others read the same lines.
    template <int rows, bool asks>
    static ATTNLIB_NOINLINE void dots(const Word* __restrict q, const Lines& row, Ahead& ahead, int64_t some, int64_t depth,
                                      R* __restrict score) {
        constexpr int n = static_cast<int>(lanes<R>), keys = n / rows < kSome ? n / rows : static_cast<int>(kSome);
        for (int64_t c = 0; c < some; c += keys) {
            Vec<R> sum[n];
#pragma GCC unroll 16
            for (int x = 0; x < n; ++x) sum[x] = Vec<R>{};
            for (int64_t d = 0; d < depth; d += n) {
                decltype(T::load_b(q)) line[keys];
#pragma GCC unroll 16
                for (int x = 0; x < keys; ++x) {
                    line[x] = T::load_b(row.words(c + x) + d);
                    if constexpr (asks) ahead.ask();
                }
#pragma GCC unroll 4
                for (int r = 0; r < rows; ++r) {
                    const auto a = T::load_b(q + r * depth + d);
#pragma GCC unroll 16
                    for (int x = 0; x < keys; ++x) sum[r * keys + x] = T::multiply_add(sum[r * keys + x], a, line[x]);
                }
            }
            R folded[n];
            store<R>(folded, fold<R>(sum));
            for (int r = 0; r < rows; ++r) std::memcpy(score + r * kKeys + c, folded + r * keys, keys * sizeof(R));
        }
    }

    // Scores become P; maxima and sums move on. Whether every row sees every key.
    static bool softmax(const Unit& u, int64_t j0, int64_t j1, int64_t padded) {
        const Space& w = u.w;
        const Run all{0, static_cast<int32_t>(padded)};
        bool all_seen = true;
        R factor = 1;
        for (int64_t r = 0; r < u.rows; ++r) {
            const Scorer<R> scorer(u.p, u.seq, u.first_head + r / u.seq.q_len, w.line);
            const int64_t i = r % u.seq.q_len;
            R* s = w.score + r * kKeys;
            if (scorer.open(i, i + 1, j0, j1) && scorer.untouched(0, lanes<R>)) {
                for (int64_t c = j1 - j0; c < padded; ++c) s[c] = -infinity<R>;
            } else {
                all_seen = false;
                scorer.row(i, j0, padded, j1, s, nullptr);
            }
            factor = scorer.factor;
            const R before = w.max[r], now = Forward<T>::row_max(1, &all, s) * factor, m = now > before ? now : before;
            w.max[r] = m;
            w.correction[r] = before - (m == -infinity<R> ? R(0) : m);
        }
        for (int64_t r = u.rows; r < round_up(u.rows, lanes<R>); ++r) w.correction[r] = 0;
        for (int64_t r = 0; r < u.rows; r += lanes<R>) store<R>(w.correction + r, exp_of<R>(load<R>(w.correction + r)));
        Word* prob = T::per_word == 1 ? reinterpret_cast<Word*>(w.score) : w.prob;
        for (int64_t r = 0; r < u.rows; ++r) {
            if (u.p.has(Fault::no_rescale)) w.correction[r] = 1;
            const R top = w.max[r] == -infinity<R> ? R(0) : w.max[r];
            const R total = Forward<T>::template exponentials<false>(1, &all, w.score + r * kKeys, factor, top,
                                                                     prob + r * kKeys / T::per_word, nullptr);
            w.sum[r] = w.sum[r] * w.correction[r] + total;
            if constexpr (Tiles::used) {
                const int64_t of_head = r % u.rows_of_kv;
                Tiles::spread(prob + r * kKeys / 2, padded, u.rows_of_kv, of_head, u.prob_tile(r - of_head));
            }
        }
        return all_seen;
    }

    // O += P V for rows first, first + 1, ... of the unit; O is rescaled first if `rescale`.
    static void add_values(int64_t rows, int64_t some, const Word* prob, const Lines& row, Ahead& ahead, const Space& w,
                           int64_t first, bool rescale) {
        constexpr int64_t ld = kKeys / T::per_word;
        alignas(64) R factor[kMostRows];
        for (int64_t r = 0; r < rows;) {
            const int64_t count = rows - r >= kMostRows ? kMostRows : rows - r >= 2 ? 2 : 1;
            for (int64_t x = 0; x < count; ++x) factor[x] = rescale ? w.correction[first + r + x] : R(1);
            R* out = w.out + (first + r) * w.width_v;
            const Word* a = prob + r * ld;
            Ahead* asked = r == 0 ? &ahead : nullptr;
            if (count == kMostRows) products<kMostRows>(some, a, row, asked, out, w.width_v, factor);
            else if (count == 2) products<2>(some, a, row, asked, out, w.width_v, factor);
            else products<1>(some, a, row, asked, out, w.width_v, factor);
            r += count;
        }
    }
    template <int rows>
    static ATTNLIB_NOINLINE void products(int64_t some, const Word* prob, const Lines& row, Ahead* ahead, R* out, int64_t width,
                                          const R* factor) {
        int64_t d = 0;
        for (; d + kCols * lanes<R> <= width; d += kCols * lanes<R>) {
            if (ahead) product<rows, kCols, true>(some, prob, row, ahead, out, width, d, factor);
            else product<rows, kCols, false>(some, prob, row, ahead, out, width, d, factor);
        }
        for (; d < width; d += T::per_word * lanes<R>) {
            product<rows, T::per_word, false>(some, prob, row, ahead, out, width, d, factor);
        }
    }
    template <int rows, int cols, bool asks>
    static ATTNLIB_INLINE void product(int64_t some, const Word* __restrict prob, const Lines& row, Ahead* ahead, R* __restrict out,
                                       int64_t width, int64_t d, const R* factor) {
        Vec<R> sum[rows][cols];
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
            for (int x = 0; x < cols; ++x) sum[r][x] = load<R>(out + r * width + d + x * lanes<R>) * factor[r];
        for (int64_t c = 0; c < some; c += T::per_word) {
            decltype(T::load_b(prob)) line[cols];
            const Word* words[T::per_word];
#pragma GCC unroll 4
            for (int x = 0; x < T::per_word; ++x) {
                words[x] = row.words(c + x);
#pragma GCC unroll 4
                for (int y = 0; y < cols / T::per_word; ++y) {
                    if constexpr (asks) ahead->ask();
                }
            }
            T::template stack<cols>(words, d / T::per_word, line);
#pragma GCC unroll 4
            for (int r = 0; r < rows; ++r) {
                const auto a = T::spread(prob[(r * kKeys + c) / T::per_word]);
#pragma GCC unroll 4
                for (int x = 0; x < cols; ++x) sum[r][x] = T::multiply_add(sum[r][x], a, line[x]);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
            for (int x = 0; x < cols; ++x) store<R>(out + r * width + d + x * lanes<R>, sum[r][x]);
    }

    static void add_bad(const Unit& u, int64_t kv, int64_t j0, int64_t c, const char* from) {
        const Params& p = u.p;
        const Space& w = u.w;
        load_row<R>(p.v.dtype, from, w.value, p.dim_v);
        const int64_t first = (kv - u.kv_begin) * u.rows_of_kv;
        for (int64_t r = first; r < first + u.rows_of_kv; ++r) {
            const Scorer<R> scorer(p, u.seq, u.first_head + r / u.seq.q_len, w.line);
            if (!scorer.sees(r % u.seq.q_len, j0 + c)) continue;
            const R weight = T::per_word == 1 ? w.score[r * kKeys + c] : T::word_part(w.prob, r * kKeys + c);
            R* out = w.out + r * w.width_v;
            for (int64_t d = 0; d < p.dim_v; ++d) out[Tiles::placed_at(d)] += weight * w.value[d];
        }
    }

    static void store_part(const Unit& u, R* part) {
        const Space& w = u.w;
        for (int64_t r = 0; r < u.rows; ++r, part += part_row(u.p)) {
            const R* out = w.out + r * w.width_v;
            if constexpr (Tiles::used) {
                for (int64_t d = 0; d < w.width_v; d += 2 * lanes<R>) Tiles::restore(out + d, part + d);
            } else {
                for (int64_t d = 0; d < w.width_v; d += 2) std::memcpy(part + d, out + T::stacked_at(d), 2 * sizeof(R));
            }
            part[w.width_v] = w.max[r];
            part[w.width_v + 1] = w.sum[r];
        }
    }

    static void merge(const Params& p, const Sequence& seq, int64_t head, char* workspace) {
        const char* parts = p.tiles + static_cast<size_t>(seq.first_copy) * part_bytes(p);
        finish(p, seq, head, reinterpret_cast<const R*>(parts), Space(p, workspace).value);
    }
    // Results of a head's rows; `parts` holds those of the first chunk.
    static void finish(const Params& p, const Sequence& seq, int64_t head, const R* parts, R* sum) {
        const int64_t step = static_cast<int64_t>(part_bytes(p) / sizeof(R)), width = padded_dim_v(p);
        const int64_t queries = seq.valid ? seq.q_len : 0;
        const Finish<R> finish(p, seq, head);
        for (int64_t i = 0; i < queries; ++i) {
            const R* row = parts + (head * seq.q_len + i) * part_row(p);
            R m = -infinity<R>, l = 0;
            for (int64_t c = 0; c < seq.tiles; ++c) m = row[c * step + width] > m ? row[c * step + width] : m;
            for (int64_t d = 0; d < width; ++d) sum[d] = 0;
            for (int64_t c = 0; c < seq.tiles; ++c) {
                const R* part = row + c * step;
                const R weight = p.has(Fault::parts_unscaled) ? R(1) : std::exp(part[width] - (m == -infinity<R> ? R(0) : m));
                for (int64_t d = 0; d < width; ++d) sum[d] += weight * part[d];
                l += weight * part[width + 1];
            }
            finish.row(i, m, l, sum);
        }
        finish.pad(queries, seq.q_rows, sum);
    }
};

}  // namespace
}  // namespace ATTNLIB_ISA
}  // namespace attnlib
