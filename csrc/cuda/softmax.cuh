// The recurrence of online softmax over one warp's rows.
//
// A row keeps a reference r >= every score that was compared with it, l = sum exp(s - r) per thread, and acc. Where the
// maximum is skipped the reference goes stale, which costs nothing: P, l and acc have the same relative precision
// at any scale. What must be excluded is overflow: a thread's sum of new terms is compared with `limit`, and a warp
// that sees more (or a NaN, or a row without a reference) redoes the tile with a maximum.
#pragma once

#include "score.cuh"

namespace attnlib {

template <class Config, int M>
struct SoftmaxState {
    static constexpr bool half_range = is_half<typename Config::element>::value;
    // P = 2^(s - r - headroom): bfloat16 and float32 have the exponents, float16 has none to spare.
    static constexpr float headroom = Scorer<Config>::natural || half_range ? 0.f : 30.f;
    static constexpr float limit = half_range ? 32768.f : 68719476736.f;   // 2^15, 2^36

    float reference[M][2];
    float sum[M][2];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                reference[m][r] = -infinity;
                sum[m][r] = 0.f;
            }
    }

    // s -> p with the stale reference, the new terms of l in `added`; false if the warp must redo the tile. done(m) is
    // called when rows 16 m.. are finished.
    template <int N, class Done>
    __device__ __forceinline__ bool without_maximum(float (&s)[M][N][4], float (&added)[M][2], float scale, const Done& done) const {
        bool fits = true;
#pragma unroll
        for (int m = 0; m < M; ++m) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float shift = reference[m][r] + headroom;
                float chains[2] = {0.f, 0.f};   // two: the sum must not be what takes longest
#pragma unroll
                for (int n = 0; n < N; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float& x = s[m][n][2 * r + e];
                        x = ptx::ex2_approx(Scorer<Config>::raw ? fmaf(x, scale, -shift) : x - shift);
                        chains[e] += x;
                    }
                added[m][r] = chains[0] + chains[1];
                fits = fits && (added[m][r] < limit || Config::fault == no_recompute);
            }
            done(m);
        }
        return __all_sync(0xFFFFFFFFu, fits);
    }
    __device__ __forceinline__ void add(const float (&added)[M][2]) {
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) sum[m][r] += added[m][r];
    }

    // s -> p with the exact running maximum; acc is rescaled. share(top): the maximum over the warps of a row.
    template <int N, int C, class Share, class Done>
    __device__ __forceinline__ void with_maximum(float (&s)[M][N][4], float (&acc)[M][C][4], const Share& share, const Done& done) {
        float top[M][2];
        if constexpr (Config::warps_n == 1) {
#pragma unroll
            for (int m = 0; m < M; ++m) {
                raise(s[m], top[m], m);
                settle_all(s[m], acc[m], top[m], m);
                done(m);
            }
        } else {
#pragma unroll
            for (int m = 0; m < M; ++m) raise(s[m], top[m], m);
            share(top);
#pragma unroll
            for (int m = 0; m < M; ++m) {
                settle_all(s[m], acc[m], top[m], m);
                done(m);
            }
        }
    }

    // The maximum of rows 16 m.. so far.
    template <int N>
    __device__ __forceinline__ void raise(const float (&s)[N][4], float (&top)[2], int m) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            top[r] = reference[m][r];
#pragma unroll
            for (int n = 0; n < N; ++n) top[r] = fmaxf(top[r], fmaxf(s[n][2 * r], s[n][2 * r + 1]));
            top[r] = fmaxf(top[r], __shfl_xor_sync(0xFFFFFFFFu, top[r], 1));
            top[r] = fmaxf(top[r], __shfl_xor_sync(0xFFFFFFFFu, top[r], 2));
        }
    }
    // s -> p beneath the new maximum; l follows it, and acc must be multiplied by the correction.
    template <int N>
    __device__ __forceinline__ void settle(float (&s)[N][4], float (&correction)[2], const float (&top)[2], int m) {
        constexpr float unit = Scorer<Config>::unit;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float base = top[r] == -infinity ? 0.f : top[r];
            correction[r] = ptx::ex2_approx((reference[m][r] - base) * unit);
            if constexpr (Config::fault == no_rescale) correction[r] = 1.f;
            reference[m][r] = top[r];
            float added = 0.f;
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& x = s[n][2 * r + e];
                    x = ptx::ex2_approx((x - base) * unit - headroom);
                    added += x;
                }
            sum[m][r] = sum[m][r] * correction[r] + added;
        }
    }
    // raise and settle of raw scores: the exponent's FMA scales them, factor > 0.
    template <int N>
    __device__ __forceinline__ void settle_raw(float (&s)[N][4], float (&correction)[2], float factor, int m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float top = -infinity;
#pragma unroll
            for (int n = 0; n < N; ++n) top = fmaxf(top, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
            top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 1));
            top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 2));
            top = fmaxf(reference[m][r], top * factor);
            const float base = top == -infinity ? 0.f : top, shift = base + headroom;
            correction[r] = ptx::ex2_approx(reference[m][r] - base);
            if constexpr (Config::fault == no_rescale) correction[r] = 1.f;
            reference[m][r] = top;
            float chains[2] = {0.f, 0.f};
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& x = s[n][2 * r + e];
                    x = ptx::ex2_approx(fmaf(x, factor, -shift));
                    chains[e] += x;
                }
            sum[m][r] = sum[m][r] * correction[r] + (chains[0] + chains[1]);
        }
    }
    template <int N, int C>
    __device__ __forceinline__ void settle_all(float (&s)[N][4], float (&acc)[C][4], const float (&top)[2], int m) {
        float correction[2];
        settle(s, correction, top, m);
        rescale(acc, correction);
    }
    template <int C>
    __device__ __forceinline__ static void rescale(float (&acc)[C][4], const float (&correction)[2]) {
#pragma unroll
        for (int c = 0; c < C; ++c)
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[c][e] *= correction[e >> 1];
    }

    __device__ __forceinline__ void add_threads() {   // sum over the four threads of a row
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                sum[m][r] += __shfl_xor_sync(0xFFFFFFFFu, sum[m][r], 1);
                sum[m][r] += __shfl_xor_sync(0xFFFFFFFFu, sum[m][r], 2);
            }
    }

    // After add_threads: takes in the sink (natural units) and gives 1 / l, lse, and (m, l).
    __device__ __forceinline__ void finish(int m, int r, float sink, float& inverse, float& lse, float& top, float& total) {
        const float l = sum[m][r];
        const float to_natural = Scorer<Config>::natural ? 1.f : ln2;
        top = reference[m][r] * to_natural;
        if (top == -infinity && l == 0.f) {   // no visible key (l is NaN if one of them was)
            inverse = 0.f;
            top = sink;
            total = sink == -infinity ? 0.f : 1.f;
            lse = sink;
            return;
        }
        // l is in units of exp(top + headroom ln2)
        const float peak = fmaxf(top, sink);
        const float factor = exp2f((top - peak) * log2e);
        const float with_sink = l * factor + exp2f((sink - peak) * log2e - headroom);
        inverse = factor / with_sink;
        total = with_sink * exp2f(headroom);
        top = peak;
        lse = peak + logf(with_sink) + headroom * ln2;
    }
};

}  // namespace attnlib
