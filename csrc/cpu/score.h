// What a row sees and what its scores are: the one place where forward and backward mask.
//
//   s = scale * (q . k);  s = softcap * tanh(s / softcap);  s = s + bias - slope |pos_i - j|;  s = -inf where hidden
//
// Hidden is selected, never multiplied: the raw score of a hidden key may be NaN. Bias and mask are read only inside
// the row's window, so never behind their last column. Runs are the column ranges of a strip of rows that need work:
// the window and the block mask cut to whole grains.
#pragma once

#include "pack.h"

namespace attnlib {
namespace ATTNLIB_ISA {
namespace {

// kStrip: rows of a strip; kGrain: elements that its runs are cut to.
template <class R, int64_t kStrip = kRows, int64_t kGrain = lanes<R>> struct Scorer {
    const Params& p;
    const Sequence& seq;
    int64_t head;
    R scale, slope, cap;
    bool plain;  // nothing but the scale: row() leaves it to whoever reads the scores
    bool exact;  // runs end where blocks of the block mask do
    R factor;    // what the scores must still be multiplied by
    R* line;     // [padded block_k], scratch

    Scorer(const Params& params, const Sequence& sequence, int64_t h, R* scratch)
        : p(params), seq(sequence), head(h), scale(static_cast<R>(params.scale)), slope(0),
          cap(static_cast<R>(params.softcap)), line(scratch) {
        plain = scale > 0 && !(cap > 0) && !p.bias.present() && !p.alibi.present();
        exact = !p.block_mask.present() || (p.block_k % kGrain == 0 && p.mask_block_k % kGrain == 0);
        factor = plain ? scale : R(1);
        if (p.alibi.present()) {
            slope = load_one<R>(p.alibi.dtype, p.alibi.data + (seq.index * p.alibi.stride[0] + h * p.alibi.stride[1]) *
                                                                  p.alibi.bytes());
        }
    }

    ATTNLIB_INLINE bool block_seen(int64_t block_i, int64_t block_j) const {
        const View& m = p.block_mask;
        return m.data[seq.index * m.stride[0] + head * m.stride[1] + block_i * m.stride[2] + block_j * m.stride[3]];
    }

    // Whether the window hides nothing of rows [i0, i1) and keys [j0, j1).
    ATTNLIB_INLINE bool open(int64_t i0, int64_t i1, int64_t j0, int64_t j1) const {
        return seq.window.key_begin(i1 - 1) <= j0 && seq.window.key_end(i0) >= j1;
    }
    // Whether row() would change nothing in the runs of an open tile.
    ATTNLIB_INLINE bool untouched(int64_t j0, int64_t j1) const {
        return plain && exact && !p.mask.present() && (j1 - j0) % kGrain == 0;
    }

    // Turns n raw products of a run (n a multiple of the vector) of query i with keys j, j + 1, ... into scores; keys from
    // `stop` on belong to the next tile. derivative: of the softcap, or null.
    void row(int64_t i, int64_t j, int64_t n, int64_t stop, R* s, R* derivative) const {
        const int64_t begin = smaller(larger(seq.window.key_begin(i) - j, 0), n);
        const int64_t end = larger(smaller(smaller(seq.window.key_end(i), stop) - j, n), begin);
        if (plain) {
            hide(i, j, begin, end, n, s);
            return;
        }
        if (cap > 0) {
            const R inverse = R(1) / cap;
            for (int64_t c = 0; c < n; c += lanes<R>) {
                Vec<R> x = load<R>(s + c) * scale;
                if (p.has(Fault::softcap_after_bias)) {
                    store<R>(s + c, x);
                    if (derivative) store<R>(derivative + c, splat<R>(1));
                    continue;
                }
                const Vec<R> t = tanh_of<R>(x * inverse);
                store<R>(s + c, t * cap);
                if (derivative) store<R>(derivative + c, R(1) - t * t);
            }
        } else {
            for (int64_t c = 0; c < n; c += lanes<R>) store<R>(s + c, load<R>(s + c) * scale);
        }
        if (p.bias.present()) add_bias(i, j, begin, end, n, s);
        if (p.alibi.present()) {
            const Vec<R> distance = static_cast<R>(i + seq.window.offset - j) - iota<R>();
            for (int64_t c = 0; c < n; c += lanes<R>) {
                const Vec<R> x = distance - static_cast<R>(c);
                store<R>(s + c, load<R>(s + c) - slope * (x < R(0) ? -x : x));
            }
        }
        hide(i, j, begin, end, n, s);
    }

    ATTNLIB_INLINE void hide(int64_t i, int64_t j, int64_t begin, int64_t end, int64_t n, R* s) const {
        if (p.mask.present()) hide_masked(i, j, begin, end, s);
        if (!exact) hide_blocks(i, j, begin, end, s);
        for (int64_t c = 0; c < begin; ++c) s[c] = -infinity<R>;
        for (int64_t c = end; c < n; ++c) s[c] = -infinity<R>;
    }

    // Whether query i sees key j: a score of 0 stays above -inf.
    bool sees(int64_t i, int64_t j) const {
        if (p.block_mask.present() && !block_seen(i / p.mask_block_q, j / p.mask_block_k)) return false;
        alignas(64) R s[lanes<R>] = {};
        row(i, j, lanes<R>, j + 1, s, nullptr);
        return s[0] != -infinity<R>;
    }

    void add_bias(int64_t i, int64_t j, int64_t begin, int64_t end, int64_t n, R* s) const {
        const View& b = p.bias;
        const char* at = b.data + (seq.index * b.stride[0] + head * b.stride[1] + i * b.stride[2] +
                                   (j + begin) * b.stride[3]) * b.bytes();
        if (b.stride[3] == 1) {
            load_row<R>(b.dtype, at, line + begin, end - begin);
        } else if (b.stride[3] == 0) {
            const R x = end > begin ? load_one<R>(b.dtype, at) : R(0);
            for (int64_t c = begin; c < end; ++c) line[c] = x;
        } else {
            for (int64_t c = begin; c < end; ++c, at += b.stride[3] * b.bytes()) line[c] = load_one<R>(b.dtype, at);
        }
        for (int64_t c = 0; c < begin; ++c) line[c] = 0;
        for (int64_t c = end; c < n; ++c) line[c] = 0;
        for (int64_t c = 0; c < n; c += lanes<R>) {
            const Vec<R> y = load<R>(line + c);
            Vec<R> x = load<R>(s + c) + y;
            if (p.has(Fault::softcap_after_bias) && cap > 0) x = tanh_of<R>(x / cap) * cap;
            store<R>(s + c, y == -infinity<R> ? splat<R>(-infinity<R>) : x);  // NaN + -inf is hidden all the same
        }
    }
    void hide_masked(int64_t i, int64_t j, int64_t begin, int64_t end, R* s) const {
        const View& m = p.mask;
        const char* at = m.data + seq.index * m.stride[0] + head * m.stride[1] + i * m.stride[2] + j * m.stride[3];
        if (m.stride[3] == 1) {
            for (int64_t c = begin; c < end; ++c) s[c] = at[c] ? s[c] : -infinity<R>;
        } else {
            for (int64_t c = begin; c < end; ++c) s[c] = at[c * m.stride[3]] ? s[c] : -infinity<R>;
        }
    }
    void hide_blocks(int64_t i, int64_t j, int64_t begin, int64_t end, R* s) const {
        const int64_t width = p.mask_block_k;
        for (int64_t c = begin; c < end;) {
            const int64_t block = (j + c) / width, stop = smaller((block + 1) * width - j, end);
            if (!block_seen(i / p.mask_block_q, block))
                for (; c < stop; ++c) s[c] = -infinity<R>;
            c = stop;
        }
    }

    // One past the last row (key) that shares its row (column) of the block mask with i (j).
    ATTNLIB_INLINE int64_t mask_row_end(int64_t i, int64_t end) const {
        return p.block_mask.present() ? smaller(end, (i / p.mask_block_q + 1) * p.mask_block_q) : end;
    }
    ATTNLIB_INLINE int64_t mask_column_end(int64_t j, int64_t end) const {
        return p.block_mask.present() ? smaller(end, (j / p.mask_block_k + 1) * p.mask_block_k) : end;
    }
    // f(begin, end, count) for the strips of rows [i0, i1), which do not cross rows of the block mask; their columns that
    // need work are then the first `count` runs.
    template <class F> ATTNLIB_INLINE void strips(int64_t i0, int64_t i1, int64_t j0, int64_t j1, Run* runs, F f) const {
        const bool same = open(i0, i1, j0, j1);
        for (int64_t i = i0; i < i1;) {
            const int64_t last = mask_row_end(i, i1);
            int64_t count = same ? column_runs(i, last, j0, j1, runs) : 0;
            for (; i < last; i = smaller(last, i + kStrip)) {
                const int64_t end = smaller(last, i + kStrip);
                if (!same) count = column_runs(i, end, j0, j1, runs);
                if (count > 0) f(i, end, count);
            }
        }
    }
    // The same for strips of keys [j0, j1) and their runs of rows, in multiples of grain.
    template <class F>
    ATTNLIB_INLINE void key_strips(int64_t j0, int64_t j1, int64_t i0, int64_t i1, int64_t grain, Run* runs, F f) const {
        const bool same = open(i0, i1, j0, j1);
        for (int64_t j = j0; j < j1;) {
            const int64_t last = whole_strips() ? j1 : mask_column_end(j, j1);
            int64_t count = same ? row_runs(j, last, i0, i1, grain, runs) : 0;
            for (; j < last; j = smaller(last, j + kStrip)) {
                const int64_t end = smaller(last, j + kStrip);
                if (!same) count = row_runs(j, end, i0, i1, grain, runs);
                if (count > 0) f(j, end, count);
            }
        }
    }

    // Whether strips of keys begin at multiples of kStrip, and hold what the block mask hides: where grains are more than
    // one vector, what reads them reads whole ones.
    ATTNLIB_INLINE bool whole_strips() const { return kGrain > lanes<R> && !exact; }

    // Columns of keys [j0, j1) that rows [i0, i1) of one strip may see, relative to j0, in whole vectors.
    int64_t column_runs(int64_t i0, int64_t i1, int64_t j0, int64_t j1, Run* runs) const {
        const int64_t a = larger(j0, seq.window.key_begin(i0)), b = smaller(j1, seq.window.key_end(i1 - 1));
        if (!p.block_mask.present()) return a < b ? append(runs, 0, a - j0, b - j0, kGrain) : 0;
        const int64_t row = i0 / p.mask_block_q;
        int64_t count = 0;
        for (int64_t j = a, block = a / p.mask_block_k; j < b; ++block) {
            const int64_t stop = smaller((block + 1) * p.mask_block_k, b);
            if (block_seen(row, block)) count = append(runs, count, j - j0, stop - j0, kGrain);
            j = stop;
        }
        return count;
    }
    // Rows of queries [i0, i1) that may see keys [j0, j1) of one strip, relative to i0, in multiples of grain.
    int64_t row_runs(int64_t j0, int64_t j1, int64_t i0, int64_t i1, int64_t grain, Run* runs) const {
        const int64_t a = larger(i0, seq.window.query_begin(j0)), b = smaller(i1, seq.window.query_end(j1 - 1));
        if (!p.block_mask.present() || whole_strips()) return a < b ? append(runs, 0, a - i0, b - i0, grain) : 0;
        const int64_t column = j0 / p.mask_block_k;
        int64_t count = 0;
        for (int64_t i = a, block = a / p.mask_block_q; i < b; ++block) {
            const int64_t stop = smaller((block + 1) * p.mask_block_q, b);
            if (block_seen(block, column)) count = append(runs, count, i - i0, stop - i0, grain);
            i = stop;
        }
        return count;
    }
    // Whether any of rows [i0, i1) may see any of keys [j0, j1).
    bool tile_seen(int64_t i0, int64_t i1, int64_t j0, int64_t j1) const {
        const int64_t a = larger(j0, seq.window.key_begin(i0)), b = smaller(j1, seq.window.key_end(i1 - 1));
        if (a >= b) return false;
        if (!p.block_mask.present()) return true;
        for (int64_t i = i0 / p.mask_block_q; i * p.mask_block_q < i1; ++i)
            for (int64_t j = a / p.mask_block_k; j * p.mask_block_k < b; ++j)
                if (block_seen(i, j)) return true;
        return false;
    }

private:
    static ATTNLIB_INLINE int64_t append(Run* runs, int64_t count, int64_t begin, int64_t end, int64_t grain) {
        begin = begin / grain * grain;
        end = round_up(end, grain);
        if (count > 0 && begin <= runs[count - 1].end) {
            runs[count - 1].end = static_cast<int32_t>(end);
            return count;
        }
        runs[count] = {static_cast<int32_t>(begin), static_cast<int32_t>(end)};
        return count + 1;
    }
};

typedef uint32_t U32V __attribute__((vector_size(kBytes)));

// Both halves of a * b.
ATTNLIB_INLINE void multiply(uint32_t a, U32V b, U32V& low, U32V& high) {
#if defined(__AVX512F__)
    const __m512i x = (__m512i)b, y = _mm512_set1_epi32(static_cast<int>(a));
    const __m512i even = _mm512_mul_epu32(x, y), odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), y);
    low = (U32V)_mm512_mask_mov_epi32(even, 0xAAAA, _mm512_slli_epi64(odd, 32));
    high = (U32V)_mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), 0xAAAA, odd);
#elif defined(__AVX2__)
    const __m256i x = (__m256i)b, y = _mm256_set1_epi32(static_cast<int>(a));
    const __m256i even = _mm256_mul_epu32(x, y), odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), y);
    low = (U32V)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
    high = (U32V)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
#else
    for (size_t lane = 0; lane < kBytes / 4; ++lane) {
        const uint64_t product = static_cast<uint64_t>(a) * b[lane];
        low[lane] = static_cast<uint32_t>(product), high[lane] = static_cast<uint32_t>(product >> 32);
    }
#endif
}

// keep[r][c] = 1 where dropout keeps (i0 + r, j0 + c), r < rows, c < cols: philox4x32_10 (common/philox.h) with a counter
// in each lane; one serves rows r and r + 8 of four columns.
inline __attribute__((noinline)) void fill_keep(const Params& p, const Sequence& seq, int64_t head, int64_t i0,
                                                int64_t rows, int64_t j0, int64_t cols, uint8_t* keep, int64_t ld) {
    constexpr int64_t n = kBytes / 4, piece = n < 8 ? n : 8;  // counters; those of neighbouring columns
    typedef uint8_t Bytes __attribute__((vector_size(n)));
    const uint32_t threshold = static_cast<uint32_t>(p.dropout_threshold);
    const U32V ones = U32V{} + 1u;
    U32V lane{};
    for (int64_t x = 0; x < n; ++x) lane[x] = static_cast<uint32_t>(x);
    for (int64_t cell = i0 / 16 * 8; cell < (i0 + rows + 15) / 16 * 8; ++cell) {
        const int64_t row[2] = {cell / 8 * 16 + cell % 8 - i0, cell / 8 * 16 + cell % 8 + 8 - i0};  // of low and high halves
        if ((row[0] < 0 || row[0] >= rows) && (row[1] < 0 || row[1] >= rows)) continue;
        for (int64_t first = j0 / 32 * 8; first / 8 * 32 < j0 + cols; first += n) {
            U32V word[4] = {lane + static_cast<uint32_t>(first), U32V{} + static_cast<uint32_t>(cell),
                            U32V{} + (p.has(Fault::dropout_ignores_head) ? 0u : static_cast<uint32_t>(head)),
                            U32V{} + static_cast<uint32_t>(seq.index)};
            uint32_t key0 = static_cast<uint32_t>(p.seed), key1 = static_cast<uint32_t>(p.seed >> 32);
            for (int round = 0; round < 10; ++round, key0 += 0x9E3779B9u, key1 += 0xBB67AE85u) {
                U32V low0, high0, low1, high1;
                multiply(0xD2511F53u, word[0], low0, high0);
                multiply(0xCD9E8D57u, word[2], low1, high1);
                word[0] = high1 ^ word[1] ^ key0;
                word[2] = high0 ^ word[3] ^ key1;
                word[1] = low1, word[3] = low0;
            }
            for (int half = 0; half < 2; ++half) {
                if (row[half] < 0 || row[half] >= rows) continue;
                uint8_t* to = keep + row[half] * ld;
                for (int64_t t = 0; t < 4; ++t) {
                    const U32V number = half ? word[t] >> 16 : word[t] & 0xFFFFu;
                    const Bytes kept = __builtin_convertvector((U32V)(number >= threshold) & ones, Bytes);
                    uint8_t bytes[n];
                    std::memcpy(bytes, &kept, n);
                    for (int64_t x = 0; x < n; x += piece) {
                        const int64_t c = (first + x) / 8 * 32 + t * 8 + (first + x) % 8 - j0;
                        if (c >= 0 && c + piece <= cols) {
                            std::memcpy(to + c, bytes + x, piece);
                            continue;
                        }
                        for (int64_t y = larger(-c, 0); y < smaller(piece, cols - c); ++y) to[c + y] = bytes[x + y];
                    }
                }
            }
        }
    }
}
template <class R> ATTNLIB_INLINE Vec<R> keep_vector(const uint8_t* keep) {
    typedef uint8_t Bytes __attribute__((vector_size(lanes<R>), aligned(1), may_alias));
    return __builtin_convertvector(*reinterpret_cast<const Bytes*>(keep), Vec<R>);
}

}  // namespace
}  // namespace ATTNLIB_ISA
}  // namespace attnlib
