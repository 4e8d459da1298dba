// Products of register fragments: the inner loops of every GEMM here.
#pragma once

#include "element.cuh"

namespace attnlib {

template <int M, int N>
__device__ __forceinline__ void clear(float (&x)[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) x[m][n][e] = 0.f;
}

// acc[m][c] += A(m, k) . B(k, c). ahead: the fragments of a step are named before the products of the last; ptxas pipelines
// both forms alike, but allocates registers better for one or the other.
//
// Split float32: the tensor core truncates when it adds, so it adds the products of one step only, smallest first, and
// FADD the rest. The products with a low part are NaN where an operand is infinite (its low part is infinity - infinity)
// and then left out. mirrored: bit for bit what B . A gives without it. The loop is kept, as ptxas would mix all its steps
// and run out of registers.
template <class atom, int M, int C, int K, bool ahead = false, bool mirrored = false, class LoadA, class LoadB>
__device__ __forceinline__ void accumulate(float (&acc)[M][C][4], const LoadA& load_a, const LoadB& load_b) {
    if constexpr (atom::split) {
        constexpr int steps = C < 8 ? 8 / C : 1;
#pragma unroll steps
        for (int k = 0; k < K; ++k) {
            typename atom::A a[M];
#pragma unroll
            for (int m = 0; m < M; ++m) a[m] = load_a(m, k);
#pragma unroll
            for (int c = 0; c < C; c += 2) {
                typename atom::B b[2];
                load_b(b[0], b[1], k, c);
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        float sum[4] = {};
                        atom::template mma_low<mirrored>(sum, a[m], b[i]);
#pragma unroll
                        for (int e = 0; e < 4; ++e) sum[e] = fabsf(sum[e]) < infinity ? sum[e] : 0.f;
                        atom::mma(sum, a[m], b[i]);
#pragma unroll
                        for (int e = 0; e < 4; ++e) acc[m][c + i][e] += sum[e];
                    }
            }
        }
    } else if constexpr (ahead) {
        typename atom::A a[2][M];
        typename atom::B b[2][C];
        const auto fetch = [&](int k) {
#pragma unroll
            for (int m = 0; m < M; ++m) a[k & 1][m] = load_a(m, k);
#pragma unroll
            for (int c = 0; c < C; c += 2) load_b(b[k & 1][c], b[k & 1][c + 1], k, c);
        };
        fetch(0);
#pragma unroll
        for (int k = 0; k < K; ++k) {
            if (k + 1 < K) fetch(k + 1);
#pragma unroll
            for (int c = 0; c < C; ++c)
#pragma unroll
                for (int m = 0; m < M; ++m) atom::mma(acc[m][c], a[k & 1][m], b[k & 1][c]);
        }
    } else {
#pragma unroll
        for (int k = 0; k < K; ++k) {
            typename atom::A a[M];
#pragma unroll
            for (int m = 0; m < M; ++m) a[m] = load_a(m, k);
#pragma unroll
            for (int c = 0; c < C; c += 2) {
                typename atom::B b0, b1;
                load_b(b0, b1, k, c);
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    atom::mma(acc[m][c], a[m], b0);
                    atom::mma(acc[m][c + 1], a[m], b1);
                }
            }
        }
    }
}

}  // namespace attnlib
