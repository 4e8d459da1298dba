// Every product of the SIMT kernels is of one of two kinds, and both read their operands as 16-byte vectors:
//
//   dot:      s[row][column] += a[row][k] * b[column][k]     (q . k, dO . v)         b streams in slices of k
//   product:  o[row][c]      += p[row][k] * v[k][c]          (P V, dS K, P^T dO, ..) v streams in slices of k
//
// While a slice is used, the next one is on its way (stream_simt.cuh).
#pragma once

#include "stream_simt.cuh"

namespace attnlib {

// s += a . b over `slices` slices of b, whose rows begin at `row`; the first slice is in buffers.now() already.
template <class Config, int slices, int ld, class T, class From, class Then>
__device__ __forceinline__ void dots(
    T (&s)[Tile<Config>::rows][Tile<Config>::columns], const Tile<Config>& tile, const T* a, Buffers<Config>& buffers,
    DotSlice<Config>& slice, const From& b, int row, const Then& then) {
    using G = Tile<Config>;
    constexpr int unroll = G::unroll;
    stream<slices, 0, G::depth>(buffers, slice, b, row, then, [&](int part, const T* now) {
        const T* left = a + tile.row * ld + part * G::depth;
        const T* right = now + tile.x * G::ld_slice;
#pragma unroll unroll
        for (int k = 0; k < G::depth; k += G::width) {
            Vector<T> x[G::rows];
#pragma unroll
            for (int i = 0; i < G::rows; ++i) x[i] = *reinterpret_cast<const Vector<T>*>(left + i * G::steps * ld + k);
#pragma unroll
            for (int j = 0; j < G::columns; ++j) {
                const Vector<T> y = *reinterpret_cast<const Vector<T>*>(right + j * G::lanes * G::ld_slice + k);
#pragma unroll
                for (int e = 0; e < G::width; ++e)
#pragma unroll
                    for (int i = 0; i < G::rows; ++i) s[i][j] = multiply_add(x[i].x[e], y.x[e], s[i][j]);
            }
        }
    });
}

// o += p v over the tile's columns, `count` rows of v a slice; the first slice is in buffers.now() already. Element
// o[i][group * width + w] is column (group * lanes + x) * width + w.
template <class Config, int count, int wide, class T, class From, class Then>
__device__ __forceinline__ void products(
    T (&o)[Tile<Config>::rows][wide / Tile<Config>::lanes], const Tile<Config>& tile, const T* p, Buffers<Config>& buffers,
    ProductSlice<Config, count, wide>& slice, const From& v, int row, const Then& then) {
    using G = Tile<Config>;
    constexpr int unroll = G::unroll, groups = wide / G::lanes / G::width;
    stream<G::tile_columns / count, count, 0>(buffers, slice, v, row, then, [&](int part, const T* now) {
        const T* left = p + tile.row * G::ld_p + part * count;
        const T* right = now + tile.x * G::width;
#pragma unroll unroll
        for (int k = 0; k < count; k += G::width) {
            Vector<T> x[G::rows];
#pragma unroll
            for (int i = 0; i < G::rows; ++i) x[i] = *reinterpret_cast<const Vector<T>*>(left + i * G::steps * G::ld_p + k);
#pragma unroll
            for (int e = 0; e < G::width; ++e)
#pragma unroll
                for (int group = 0; group < groups; ++group) {
                    const Vector<T> y = *reinterpret_cast<const Vector<T>*>(right + (k + e) * wide + group * G::lanes * G::width);
#pragma unroll
                    for (int w = 0; w < G::width; ++w)
#pragma unroll
                        for (int i = 0; i < G::rows; ++i)
                            o[i][group * G::width + w] = multiply_add(x[i].x[e], y.x[w], o[i][group * G::width + w]);
                }
        }
    });
}

}  // namespace attnlib
