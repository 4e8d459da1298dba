// Every product of the SIMT kernels is of one of two kinds, and both read their operands as 16-byte vectors:
//
//   dot:      s[row][column] += a[row][k] * b[column][k]     (q . k, dO . v)         b streams in slices of k
//   product:  o[row][c]      += p[row][k] * v[k][c]          (P V, dS K, P^T dO, ..) v streams in slices of k
//
// While a slice is used, the next one is on its way (stream_simt.cuh). A team that is not busy only helps to fetch.
#pragma once

#include "stream_simt.cuh"

namespace attnlib {

// What a thread has in one column of a tile that stands on the left.
template <class G>
struct Column {
    using T = typename G::number;
    Run<T, G::run> runs[G::runs];

    __device__ __forceinline__ void load(const G& tile, const T* own, int k) {   // own: the team's part of the tile
#pragma unroll
        for (int n = 0; n < G::runs; ++n) runs[n] = *reinterpret_cast<const Run<T, G::run>*>(own + G::place(tile.y, n, k));
    }
    __device__ __forceinline__ T row(int i) const { return runs[i / G::run].x[i % G::run]; }
};

// s += a . b over `slices` slices of b, whose rows begin at `row`; the first slice is in buffers.now() already.
template <class Config, int slices, class T, class From, class Then>
__device__ __forceinline__ void dots(
    T (&s)[Tile<Config>::rows][Tile<Config>::columns], const Tile<Config>& tile, const T* a, Buffers<Config>& buffers,
    DotSlice<Config>& slice, const From& b, int row, const Then& then, bool busy = true) {
    using G = Tile<Config>;
    constexpr int unroll = G::unroll;
    stream<slices, 0, G::depth>(buffers, slice, b, row, then, [&](int part, const T* now) {
        if (!busy) return;
        const T* left = a + (threadIdx.x >> 5) * G::team_rows * slices * G::depth;
        const T* right = now + tile.x * G::ld_slice;
#pragma unroll unroll
        for (int k = 0; k < G::depth; k += G::width) {
            Column<G> x[G::width];
#pragma unroll
            for (int e = 0; e < G::width; ++e) x[e].load(tile, left, part * G::depth + k + e);
#pragma unroll
            for (int j = 0; j < G::columns; ++j) {
                const Vector<T> y = *reinterpret_cast<const Vector<T>*>(right + j * G::lanes * G::ld_slice + k);
#pragma unroll
                for (int e = 0; e < G::width; ++e)
#pragma unroll
                    for (int i = 0; i < G::rows; ++i) s[i][j] = multiply_add(x[e].row(i), y.x[e], s[i][j]);
            }
        }
    });
}

// o += p v over the tile's columns, `count` rows of v a slice; the first slice is in buffers.now() already. Element
// o[i][group * width + w] is column (group * lanes + x) * width + w.
template <class Config, int count, int wide, class T, class From, class Then>
__device__ __forceinline__ void products(
    T (&o)[Tile<Config>::rows][wide / Tile<Config>::lanes], const Tile<Config>& tile, const T* p, Buffers<Config>& buffers,
    ProductSlice<Config, count, wide>& slice, const From& v, int row, const Then& then, bool busy = true) {
    using G = Tile<Config>;
    constexpr int unroll = G::unroll, groups = wide / G::lanes / G::width;
    stream<G::tile_columns / count, count, 0>(buffers, slice, v, row, then, [&](int part, const T* now) {
        if (!busy) return;
        const T* left = p + (threadIdx.x >> 5) * G::team_rows * G::tile_columns;
        const T* right = now + tile.x * G::width;
#pragma unroll unroll
        for (int k = 0; k < count; k += G::width) {
#pragma unroll
            for (int e = 0; e < G::width; ++e) {
                Column<G> x;
                x.load(tile, left, part * count + k + e);
#pragma unroll
                for (int group = 0; group < groups; ++group) {
                    const Vector<T> y = *reinterpret_cast<const Vector<T>*>(right + (k + e) * wide + group * G::lanes * G::width);
#pragma unroll
                    for (int w = 0; w < G::width; ++w)
#pragma unroll
                        for (int i = 0; i < G::rows; ++i)
                            o[i][group * G::width + w] = multiply_add(x.row(i), y.x[w], o[i][group * G::width + w]);
                }
            }
        }
    });
}

}  // namespace attnlib
