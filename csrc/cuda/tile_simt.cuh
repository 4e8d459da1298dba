// How a block of a SIMT kernel shares a tile, and what a thread does with its share.
//
// Plain C++ for CUDA (sm_60 and later), HIP (wavefronts of 32 or 64) and, in tests, a CPU. A tile of rows x columns
// belongs to a block; 32 threads (a team) own `rows * 32 / lanes` whole rows of it, so that a row's maximum and its
// probabilities never leave the team. Thread (x, y) of a team has rows y, y + steps, ... and columns x, x + lanes, ...
#pragma once

#include "element_simt.cuh"

namespace attnlib {

__device__ __forceinline__ void sync_team() {
#if defined(__HIP_DEVICE_COMPILE__) || defined(__HIPCC__)
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
#else
    __syncwarp();
#endif
}

template <class T>
__device__ __forceinline__ T from_lane_xor(T x, int mask) {
#if defined(__HIP_DEVICE_COMPILE__) || defined(__HIPCC__)
    return __shfl_xor(x, mask);
#else
    return __shfl_xor_sync(0xFFFFFFFFu, x, mask);
#endif
}

template <class T>
__device__ __forceinline__ T team_sum(T x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += from_lane_xor(x, step);
    return x;
}

template <class T>
struct alignas(16) Vector { T x[16 / sizeof(T)]; };
template <class T>
struct alignas(4 * sizeof(T)) Quad { T x[4]; };
template <class T, int count>
struct alignas(count * sizeof(T)) Run { T x[count]; };

// How a block shares a tile, and the sizes that follow from a Config.
template <class Config>
struct Tile {
    using element = typename Config::element;
    using number = typename Accumulator<element>::type;
    static constexpr int width = 16 / sizeof(number);             // numbers in a vector
    static constexpr int lanes = Config::lanes, steps = 32 / lanes;
    static constexpr int rows = Config::rows, columns = Config::tile_columns / lanes;   // of a thread
    static constexpr int team_rows = rows * steps;
    static constexpr int tile_rows = Config::threads / 32 * team_rows, tile_columns = Config::tile_columns;
    static constexpr int depth = Config::depth;                   // of a slice of a dot
    static constexpr int dim = Config::head_dim, dim_v = Config::head_dim_v;            // multiples of depth
    static constexpr int wide = round_up(dim, 4 * lanes), wide_v = round_up(dim_v, 4 * lanes);   // as columns
    static constexpr int ld_slice = depth + width;                // odd in vectors: no bank conflicts
    static constexpr int run = rows < width ? rows : width, runs = rows / run, chunks = runs * steps;   // of a column
    static constexpr int unroll = Config::unroll;

    int x, y, row;   // row: the thread's first in the tile

    __device__ __forceinline__ Tile() {
        const int lane = threadIdx.x & 31;   // neighbours share rows or columns in pairs: half the reads of shared memory
        if constexpr (lanes == 8) y = (lane & 1) | ((lane >> 4) << 1), x = (lane >> 1) & 7;
        else if constexpr (lanes == 16) y = lane & 1, x = lane >> 1;
        else y = 0, x = lane;
        row = (threadIdx.x >> 5) * team_rows + y;
    }

    // A tile that stands on the left of a product is kept column by column, team by team: where in a team's columns the
    // thread with this y has its rows run, run + 1, ... of column k. With a column in consecutive registers, multiply-adds
    // can take the row and the sum from the two different register banks, k after k. The turns, whose number depends on
    // k, keep neighbours that write different columns at once off each other's memory banks.
    __device__ __forceinline__ static int place(int y, int group, int k) {
        constexpr int per_turn = chunks >= 8 ? 1 : 8 / chunks, first = steps > 1 ? 2 : 1;
        const int turn = k / per_turn % 4 * first % chunks;
        return (k * chunks + ((group ^ turn / steps) * steps + (y ^ turn % steps))) * run;
    }

    static constexpr int first_x = lanes == 32 ? 1 : 2;   // lane bits that x is made of: first_x, 2 first_x, ...

    template <class Combine>
    __device__ __forceinline__ static number across_row(number v, Combine combine) {
#pragma unroll
        for (int step = first_x; step < first_x * lanes; step *= 2) v = combine(v, from_lane_xor(v, step));
        return v;
    }
    __device__ __forceinline__ static number across_rows_of_team(number v) {   // sum over y
        if constexpr (steps >= 2) v += from_lane_xor(v, 1);
        if constexpr (steps >= 4) v += from_lane_xor(v, 16);
        return v;
    }
};

template <int rows, int columns, class T>
__device__ __forceinline__ void fill(T (&s)[rows][columns], T value) {
#pragma unroll
    for (int i = 0; i < rows; ++i)
#pragma unroll
        for (int j = 0; j < columns; ++j) s[i][j] = value;
}

// A tile of probabilities for the products: every team reads its own rows only.
template <class Config, class T>
__device__ __forceinline__ void put_probabilities(T* p, const Tile<Config>& tile, const T (&s)[Tile<Config>::rows][Tile<Config>::columns]) {
    using G = Tile<Config>;
    T* const own = p + (threadIdx.x >> 5) * G::team_rows * G::tile_columns;
#pragma unroll
    for (int j = 0; j < G::columns; ++j)
#pragma unroll
        for (int group = 0; group < G::runs; ++group) {
            Run<T, G::run> run;
#pragma unroll
            for (int n = 0; n < G::run; ++n) run.x[n] = s[group * G::run + n][j];
            *reinterpret_cast<Run<T, G::run>*>(own + G::place(tile.y, group, tile.x + j * G::lanes)) = run;
        }
    sync_team();
}

// Rows of a result: change(i, o) at row i * steps of `to` and the columns of `products`, for the first `count` rows.
template <class Config, int wide, class element, class T, class Change>
__device__ __forceinline__ void write_rows(
    element* to, int64_t stride, int columns, const Tile<Config>& tile, int count,
    const T (&o)[Tile<Config>::rows][wide / Tile<Config>::lanes], const Change& change) {
    using G = Tile<Config>;
#pragma unroll
    for (int i = 0; i < G::rows; ++i) {
        const int row = tile.row + i * G::steps;
        if (row >= count) continue;
#pragma unroll
        for (int group = 0; group < wide / G::lanes / G::width; ++group) {
            const int column = (group * G::lanes + tile.x) * G::width;
            element* at = to + row * stride + column;
            Run<element, G::width> run;
#pragma unroll
            for (int w = 0; w < G::width; ++w) narrow(change(i, o[i][group * G::width + w]), run.x[w]);
            if (columns % G::width == 0) {
                if (column < columns) *reinterpret_cast<Run<element, G::width>*>(at) = run;
            } else {
#pragma unroll
                for (int w = 0; w < G::width; ++w)
                    if (column + w < columns) at[w] = run.x[w];
            }
        }
    }
}

}  // namespace attnlib
