// Attention without tensor cores: what the forward and the backward of the SIMT kernels share.
//
// Plain C++ for CUDA (sm_60 and later), HIP (wavefronts of 32 or 64) and, in tests, a CPU. A tile of rows x columns
// belongs to a block; 32 threads (a team) own `rows * 32 / lanes` whole rows of it, so that a row's maximum and its
// probabilities never leave the team. Thread (x, y) of a team has rows y, y + steps, ... and columns x, x + lanes, ...
// Every product is of one of two kinds, and both read their operands as 16-byte vectors:
//
//   dot:      s[row][column] += a[row][k] * b[column][k]     (q . k, dO . v)         b streams in slices of k
//   product:  o[row][c]      += p[row][k] * v[k][c]          (P V, dS K, P^T dO, ..) v streams in slices of k
//
// What streams passes through two buffers in shared memory: while one is used, the next slice is on its way in registers.
// Everything is computed in float, or in double for double operands.
#pragma once

#include "philox.h"
#include "types.h"
#include "window.h"

namespace attnlib {

struct half { uint16_t bits; };
struct bfloat16 { uint16_t bits; };

// The parameters of every SIMT kernel: the mirror of backends/attnlib_cupy/params.py. Addresses are uint64_t, strides in
// elements. *_b, *_i, *_j, *_h: sequence (or page), query, key, head. A packed operand has no batch stride.
struct SimtParams {
    uint64_t q, k, v, out, lse, stats, dout, dlse, dq, dk;
    uint64_t dv, dbias, dsinks, rows, sinks, k_new, v_new;
    uint64_t q_lens, kv_lens, new_lens, cu_q, cu_k, page_table, bias, mask, alibi, block_mask;
    uint64_t seed;
    int64_t q_b, q_i, q_h, k_b, k_j, k_h, v_b, v_j, v_h, do_b;
    int64_t do_i, do_h, kn_b, kn_t, kn_h, vn_b, vn_t, vn_h, dbias_b, dbias_h;
    int64_t dbias_i, dbias_j, dlse_b, dlse_h, dlse_i;
    int64_t bias_b, bias_h, bias_i, bias_j, mask_b, mask_h, mask_i, mask_j, block_b, block_h;
    int64_t block_i, block_j, alibi_b, alibi_h, page_row;
    double scale, softcap, keep_scale;
    int32_t batch, seqlen_q, seqlen_k, total_q, total_k, heads_q, heads_kv, window_left, window_right, new_tokens;
    int32_t block_rows, block_columns, page_size, dropout_threshold;
    int32_t head_dim, head_dim_v, capacity, tiles, top_left, sinks_type, size_b, size_h, size_i, size_j;
};

// Faults that tests compile in to see them caught; 0 is none.
enum Fault { no_fault, no_rescale, ignore_window_left, drop_last_partial_key_block, head_mod, skip_delta,
             dropout_ignores_head, leak_past_kv_len, scaled_dv, scaled_scores };

// ---------------------------------------------------------------- numbers

template <class T> struct Accumulator { using type = float; };
template <> struct Accumulator<double> { using type = double; };

template <class T>
__device__ __forceinline__ T minus_infinity() { return -static_cast<T>(__builtin_bit_cast(float, 0x7F800000)); }
template <class T>
__device__ __forceinline__ T not_a_number() { return static_cast<T>(__builtin_bit_cast(float, 0x7FC00000)); }

__device__ __forceinline__ float maximum(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double maximum(double a, double b) { return fmax(a, b); }
__device__ __forceinline__ float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double multiply_add(double a, double b, double c) { return fma(a, b, c); }
// exp(x)
__device__ __forceinline__ float power(float x) { return exp2f(x * 1.4426950408889634f); }
__device__ __forceinline__ double power(double x) { return exp(x); }
// A product that is rounded by itself: scores are the same to the bit in forward and backward, with and without dropout.
__device__ __forceinline__ float rounded_product(float a, float b) {
#if defined(__CUDACC__)
    return __fmul_rn(a, b);
#else
    return a * b;
#endif
}
__device__ __forceinline__ double rounded_product(double a, double b) {
#if defined(__CUDACC__)
    return __dmul_rn(a, b);
#else
    return a * b;
#endif
}
__device__ __forceinline__ float logarithm(float x) { return logf(x); }
__device__ __forceinline__ double logarithm(double x) { return log(x); }
__device__ __forceinline__ float tangent(float x) { return tanhf(x); }
__device__ __forceinline__ double tangent(double x) { return tanh(x); }
__device__ __forceinline__ float magnitude(float x) { return fabsf(x); }
__device__ __forceinline__ double magnitude(double x) { return fabs(x); }

template <class T> __device__ __forceinline__ T widen(float x) { return static_cast<T>(x); }
template <class T> __device__ __forceinline__ T widen(double x) { return static_cast<T>(x); }
template <class T>
__device__ __forceinline__ T widen(bfloat16 x) {
    return static_cast<T>(__builtin_bit_cast(float, static_cast<uint32_t>(x.bits) << 16));
}
template <class T>
__device__ __forceinline__ T widen(half x) {
#if defined(__CUDACC__)
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return static_cast<T>(y);
#else
    return static_cast<T>(__builtin_bit_cast(_Float16, x.bits));
#endif
}

__device__ __forceinline__ void narrow(float x, float& y) { y = x; }
__device__ __forceinline__ void narrow(double x, double& y) { y = x; }
__device__ __forceinline__ void narrow(float x, bfloat16& y) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, x);
    const bool nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
    y.bits = static_cast<uint16_t>(nan ? (bits >> 16) | 0x40u : (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}
__device__ __forceinline__ void narrow(float x, half& y) {
#if defined(__CUDACC__)
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
    y.bits = __builtin_bit_cast(uint16_t, static_cast<_Float16>(x));
#endif
}

template <class T>
__device__ __forceinline__ T* address(uint64_t value) { return reinterpret_cast<T*>(value); }

// The same pointer, of which the compiler knows that it is no shared memory: cheaper loads, and freer to move.
template <class T>
__device__ __forceinline__ T* in_global(T* pointer) {
#if defined(__CUDACC__)
    __builtin_assume(__isGlobal(pointer));
#endif
    return pointer;
}

// One number of an operand whose dtype is only known at run time: 0 float32, 1 float16, 2 bfloat16, 3 float64.
template <class T>
__device__ __forceinline__ T read_number(uint64_t base, int type, int64_t index) {
    if (type == 1) return widen<T>(address<const half>(base)[index]);
    if (type == 2) return widen<T>(address<const bfloat16>(base)[index]);
    if (type == 3) return widen<T>(address<const double>(base)[index]);
    return widen<T>(address<const float>(base)[index]);
}

__device__ __forceinline__ int clip(int64_t x, int low, int high) {
    return x < low ? low : x > high ? high : static_cast<int>(x);
}
ATTNLIB_FN constexpr int round_up(int x, int step) { return (x + step - 1) / step * step; }

// ---------------------------------------------------------------- teams of 32 threads

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

// ---------------------------------------------------------------- tiles

template <class T>
struct alignas(16) Vector { T x[16 / sizeof(T)]; };
template <class T>
struct alignas(4 * sizeof(T)) Quad { T x[4]; };

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
    static constexpr int ld = dim + width, ld_v = dim_v + width;  // odd in vectors: no bank conflicts
    static constexpr int ld_slice = depth + width, ld_p = tile_columns + 2 * width;
    static constexpr int unroll = Config::unroll;

    int x, y, row;   // row: the thread's first in the tile

    __device__ __forceinline__ Tile() {
        const int lane = threadIdx.x & 31;   // neighbours share rows or columns in pairs: half the reads of shared memory
        if constexpr (lanes == 8) y = (lane & 1) | ((lane >> 4) << 1), x = (lane >> 1) & 7;
        else if constexpr (lanes == 16) y = lane & 1, x = lane >> 1;
        else y = 0, x = lane;
        row = (threadIdx.x >> 5) * team_rows + y;
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

// Rows in global memory; those outside [begin, end) read as zeros, and so do columns past `columns`.
template <class element, bool vectors, bool paged>
struct Source {
    const element* base;
    int64_t stride;
    int begin, end, columns;
    const int* pages;      // paged: row r is in pages[r / page_size]
    int64_t page_stride;
    int page_size;

    __device__ __forceinline__ const element* at(int row) const {
        if constexpr (paged) return base + pages[row / page_size] * page_stride + row % page_size * stride;
        else return base + row * stride;
    }
    __device__ __forceinline__ bool has(int row) const { return row >= begin && row < end; }
    // Four elements that begin at `from`, the column'th of a row.
    __device__ __forceinline__ Quad<element> read(const element* from, int column) const {
        Quad<element> quad{};
        if constexpr (vectors) {
            if (column < columns) quad = *reinterpret_cast<const Quad<element>*>(in_global(from));
        } else {
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (column + e < columns) quad.x[e] = in_global(from)[e];
        }
        return quad;
    }
};
template <class Config>
using Queries = Source<typename Config::element, Config::vectors, false>;
template <class Config>
using Keys = Source<typename Config::element, Config::vectors, Config::paged>;

template <class number, class element>
__device__ __forceinline__ void write_quad(number* to, const Quad<element>& quad) {
    constexpr int width = 16 / sizeof(number);
#pragma unroll
    for (int e = 0; e < 4; e += width) {
        Vector<number> vector;
#pragma unroll
        for (int w = 0; w < width; ++w) vector.x[w] = widen<number>(quad.x[e + w]);
        *reinterpret_cast<Vector<number>*>(to + e) = vector;
    }
}

// A slice of `count` x `size` elements on its way from global to shared memory, in registers in between.
template <class element, class number, int threads, int count, int size, int ld>
struct Slice {
    static constexpr int per_row = size / 4, total = count * per_row, each = (total + threads - 1) / threads;
    Quad<element> held[each];

    struct Place {   // of the thread's n'th quad
        int row, column;
        bool exists;

        __device__ __forceinline__ explicit Place(int n) {
            const int thread = threadIdx.x;
            if constexpr (threads % per_row == 0) row = thread / per_row + n * (threads / per_row), column = thread % per_row * 4;
            else row = (thread + n * threads) / per_row, column = (thread + n * threads) % per_row * 4;
            exists = total % threads == 0 || thread + n * threads < total;
        }
    };

    template <class From>
    __device__ __forceinline__ void load(const From& source, int row, int column) {
#pragma unroll
        for (int n = 0; n < each; ++n) {
            const Place place(n);
            held[n] = {};
            if (place.exists && source.has(row + place.row))
                held[n] = source.read(source.at(row + place.row) + column + place.column, column + place.column);
        }
    }
    __device__ __forceinline__ void store(number* to) const {
#pragma unroll
        for (int n = 0; n < each; ++n) {
            const Place place(n);
            if (place.exists) write_quad(to + place.row * ld + place.column, held[n]);
        }
    }
};

// A whole tile of `count` rows that stays in shared memory.
template <int threads, int count, int size, int ld, class From, class number>
__device__ __forceinline__ void load_tile(number* to, const From& source, int row) {
    constexpr int per_row = size / 4;
#pragma unroll 4
    for (int index = threadIdx.x; index < count * per_row; index += threads) {
        const int within = index / per_row, column = index % per_row * 4;
        write_quad(to + within * ld + column, source.has(row + within) ? source.read(source.at(row + within) + column, column)
                                                                       : decltype(source.read(nullptr, 0)){});
    }
}

// The two buffers that slices stream through.
template <class number>
struct Buffers {
    number* memory;
    int size, turn;

    __device__ __forceinline__ number* now() const { return memory + turn * size; }
    __device__ __forceinline__ number* next() const { return memory + (turn ^ 1) * size; }
    __device__ __forceinline__ void flip() {
        __syncthreads();
        turn ^= 1;
    }
};

// What to load behind the last slice of a stream: the first slice of the next one.
template <class SliceType, class From>
struct Ahead {
    SliceType& slice;
    const From& source;
    int row;
    bool any;

    __device__ __forceinline__ void load() const { if (any) slice.load(source, row, 0); }
    template <class number>
    __device__ __forceinline__ void store(number* to) const { if (any) slice.store(to); }
};

template <class Config>
using DotSlice = Slice<typename Config::element, typename Tile<Config>::number, Config::threads, Config::tile_columns,
                       Config::depth, Tile<Config>::ld_slice>;
template <class Config, int count, int wide>
using ProductSlice = Slice<typename Config::element, typename Tile<Config>::number, Config::threads, count, wide, wide>;

template <class SliceType, class From>
__device__ __forceinline__ Ahead<SliceType, From> ahead(SliceType& slice, const From& source, int row, bool any = true) {
    return {slice, source, row, any};
}

// s += a . b over `slices` slices of b, whose rows begin at `row`; the first slice is in buffers.now() already.
template <class Config, int slices, int ld, class T, class From, class Then>
__device__ __forceinline__ void dots(
    T (&s)[Tile<Config>::rows][Tile<Config>::columns], const Tile<Config>& tile, const T* a, Buffers<T>& buffers,
    DotSlice<Config>& slice, const From& b, int row, const Then& then) {
    using G = Tile<Config>;
    constexpr int unroll = G::unroll;
#pragma unroll 1
    for (int part = 0; part < slices; ++part) {
        if (part + 1 < slices) slice.load(b, row, (part + 1) * G::depth);
        else then.load();
        const T* left = a + tile.row * ld + part * G::depth;
        const T* right = buffers.now() + tile.x * G::ld_slice;
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
        if (part + 1 < slices) slice.store(buffers.next());
        else then.store(buffers.next());
        buffers.flip();
    }
}

// o += p v over the tile's columns, `count` rows of v a slice; the first slice is in buffers.now() already. Element
// o[i][group * width + w] is column (group * lanes + x) * width + w.
template <class Config, int count, int wide, class T, class From, class Then>
__device__ __forceinline__ void products(
    T (&o)[Tile<Config>::rows][wide / Tile<Config>::lanes], const Tile<Config>& tile, const T* p, Buffers<T>& buffers,
    ProductSlice<Config, count, wide>& slice, const From& v, int row, const Then& then) {
    using G = Tile<Config>;
    constexpr int unroll = G::unroll, slices = G::tile_columns / count, groups = wide / G::lanes / G::width;
#pragma unroll 1
    for (int part = 0; part < slices; ++part) {
        if (part + 1 < slices) slice.load(v, row + (part + 1) * count, 0);
        else then.load();
        const T* left = p + tile.row * G::ld_p + part * count;
        const T* right = buffers.now() + tile.x * G::width;
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
        if (part + 1 < slices) slice.store(buffers.next());
        else then.store(buffers.next());
        buffers.flip();
    }
}

template <class Config, class T>
__device__ __forceinline__ void put_probabilities(T* p, const Tile<Config>& tile, const T (&s)[Tile<Config>::rows][Tile<Config>::columns]) {
    using G = Tile<Config>;
#pragma unroll
    for (int i = 0; i < G::rows; ++i)
#pragma unroll
        for (int j = 0; j < G::columns; ++j) p[(tile.row + i * G::steps) * G::ld_p + tile.x + j * G::lanes] = s[i][j];
}

template <int rows, int columns, class T>
__device__ __forceinline__ void fill(T (&s)[rows][columns], T value) {
#pragma unroll
    for (int i = 0; i < rows; ++i)
#pragma unroll
        for (int j = 0; j < columns; ++j) s[i][j] = value;
}

// Rows of a result: o * factor(i) at row i * steps of `to` and the columns of `products`, for the first `count` rows.
template <class Config, int wide, class T, class Factor>
__device__ __forceinline__ void write_rows(
    typename Config::element* to, int64_t stride, int columns, const Tile<Config>& tile, int count,
    const T (&o)[Tile<Config>::rows][wide / Tile<Config>::lanes], const Factor& factor) {
    using G = Tile<Config>;
    using element = typename Config::element;
    struct alignas(G::width * sizeof(element)) Run { element x[G::width]; };
#pragma unroll
    for (int i = 0; i < G::rows; ++i) {
        const int row = tile.row + i * G::steps;
        if (row >= count) continue;
#pragma unroll
        for (int group = 0; group < wide / G::lanes / G::width; ++group) {
            const int column = (group * G::lanes + tile.x) * G::width;
            element* at = to + row * stride + column;
            Run run;
#pragma unroll
            for (int w = 0; w < G::width; ++w) narrow(factor(i, o[i][group * G::width + w]), run.x[w]);
            if (columns % G::width == 0) {
                if (column < columns) *reinterpret_cast<Run*>(at) = run;
            } else {
#pragma unroll
                for (int w = 0; w < G::width; ++w)
                    if (column + w < columns) at[w] = run.x[w];
            }
        }
    }
}

// ---------------------------------------------------------------- sequences

struct Sequence {
    int index;              // its number in the call; packed rows behind the last sequence are sequence `batch`
    int q_len, kv_len;
    int q_rows, k_rows;     // rows of the operands it owns, padding included
    int64_t q_row, k_row;   // packed: its first row, else 0
    int64_t out_row;        // its first row in out and dq
    bool fits;              // a length that the device holds does not fit: its results are NaN
};

__device__ __forceinline__ Sequence sequence_of(const SimtParams& p, int b) {
    Sequence s{b, p.seqlen_q, p.seqlen_k, p.seqlen_q, p.seqlen_k, 0, 0, static_cast<int64_t>(b) * p.seqlen_q, true};
    if (p.cu_q) {
        const int* cu_q = address<const int>(p.cu_q);
        const int* cu_k = address<const int>(p.cu_k);
        const bool real = b < p.batch;
        const int q_begin = clip(cu_q[b], 0, p.total_q);
        s.q_row = s.out_row = q_begin;
        s.q_rows = (real ? clip(cu_q[b + 1], q_begin, p.total_q) : p.total_q) - q_begin;
        s.q_len = real ? s.q_rows : 0;
        if (p.page_table) {
            s.k_rows = real ? clip(static_cast<int64_t>(cu_k[b + 1]) - cu_k[b], 0, 0x7FFFFFFF) : 0;
            s.fits = s.k_rows <= p.capacity;
        } else {
            const int k_begin = clip(cu_k[b], 0, p.total_k);
            s.k_row = k_begin;
            s.k_rows = (real ? clip(cu_k[b + 1], k_begin, p.total_k) : p.total_k) - k_begin;
        }
        s.kv_len = real ? s.k_rows : 0;
    } else {
        int64_t q_len = p.q_lens ? address<const int>(p.q_lens)[b] : p.seqlen_q;
        int64_t kv_len = p.kv_lens ? address<const int>(p.kv_lens)[b] : p.seqlen_k;
        if (p.new_tokens > 0) {
            const int added = p.new_lens ? address<const int>(p.new_lens)[b] : p.new_tokens;
            s.fits = kv_len >= 0 && added >= 0 && added <= p.new_tokens;
            kv_len += added;
        }
        s.fits = s.fits && q_len >= 0 && q_len <= p.seqlen_q && kv_len >= 0 && kv_len <= p.capacity;
        s.q_len = static_cast<int>(q_len);
        s.kv_len = static_cast<int>(kv_len);
    }
    if (!s.fits) s.q_len = s.kv_len = 0;
    return s;
}

// The sequence and the tile in it that tile number `tile` serves. Packed: sequence b starts at tile cu[b] / rows + b, so
// that no two overlap and none needs a scan. False: nothing there.
__device__ __forceinline__ bool find_tile(const SimtParams& p, uint64_t cu, int total, int rows, int tile, int& b, int& within) {
    const int* starts = address<const int>(cu);
    int low = 0, high = p.batch;   // the last sequence that starts at or before `tile`
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (clip(starts[middle], 0, total) / rows + middle <= tile) low = middle;
        else high = middle - 1;
    }
    const int begin = clip(starts[low], 0, total);
    const int end = low == p.batch ? total : clip(starts[low + 1], begin, total);
    b = low;
    within = tile - (begin / rows + low);
    return static_cast<int64_t>(within) * rows < end - begin;
}

__device__ __forceinline__ int64_t lse_row(const SimtParams& p, const Sequence& s, int head) {
    if (p.cu_q) return static_cast<int64_t>(head) * p.total_q + s.q_row;
    return (static_cast<int64_t>(s.index) * p.heads_q + head) * p.seqlen_q;
}

template <class Config>
__device__ __forceinline__ Queries<Config> query_source(const SimtParams& p, const Sequence& s, int head) {
    using element = typename Config::element;
    const element* base = address<const element>(p.q) + s.index * p.q_b + s.q_row * p.q_i + head * p.q_h;
    return {base, p.q_i, 0, s.q_len, p.head_dim, nullptr, 0, 1};
}
template <class Config>
__device__ __forceinline__ Queries<Config> dout_source(const SimtParams& p, const Sequence& s, int head) {
    using element = typename Config::element;
    const element* base = address<const element>(p.dout) + s.index * p.do_b + s.q_row * p.do_i + head * p.do_h;
    return {base, p.do_i, 0, s.q_len, p.head_dim_v, nullptr, 0, 1};
}
template <class Config>
__device__ __forceinline__ Keys<Config> cache_source(
    const SimtParams& p, const Sequence& s, uint64_t from, int64_t b, int64_t j, int64_t h, int head_kv, int columns) {
    using element = typename Config::element;
    const element* base = address<const element>(from) + head_kv * h;
    if constexpr (Config::paged) {
        const int* pages = address<const int>(p.page_table) + s.index * p.page_row;
        return {base, j, 0, s.kv_len, columns, pages, b, p.page_size};
    } else {
        return {base + s.index * b + s.k_row * j, j, 0, s.kv_len, columns, nullptr, 0, 1};
    }
}
template <class Config>
__device__ __forceinline__ Keys<Config> key_source(const SimtParams& p, const Sequence& s, int head_kv) {
    return cache_source<Config>(p, s, p.k, p.k_b, p.k_j, p.k_h, head_kv, p.head_dim);
}
template <class Config>
__device__ __forceinline__ Keys<Config> value_source(const SimtParams& p, const Sequence& s, int head_kv) {
    return cache_source<Config>(p, s, p.v, p.v_b, p.v_j, p.v_h, head_kv, p.head_dim_v);
}

// ---------------------------------------------------------------- scores

// What stands between q . k and a probability, for one sequence and query head:
//   s = scale * x;  s = softcap * tanh(s / softcap);  s += alibi + bias;  s = -inf where not visible.
template <class Config>
struct Scoring {
    using G = Tile<Config>;
    using T = typename G::number;

    Window window;
    T scale, cap, slope;
    int sequence, head;
    const typename Config::bias_element* bias;
    const uint8_t* mask;
    const uint8_t* blocks;

    __device__ __forceinline__ Scoring(const SimtParams& p, const Sequence& s, int head) : sequence(s.index), head(head) {
        window.left = Config::fault == ignore_window_left ? -1 : p.window_left;
        window.right = p.window_right;
        window.q_len = s.q_len;
        window.kv_len = s.kv_len;
        if constexpr (Config::fault == leak_past_kv_len) window.kv_len += s.kv_len < s.k_rows;
        if constexpr (Config::fault == drop_last_partial_key_block) window.kv_len -= s.kv_len > 1 && s.kv_len % 64 != 0;
        window.offset = p.top_left ? 0 : window.kv_len - window.q_len;
        scale = static_cast<T>(p.scale) * (Config::fault == scaled_scores ? T(1.001) : T(1));
        if constexpr (Config::full) {
            cap = static_cast<T>(p.softcap);
            if (cap > 0) scale = static_cast<T>(p.scale / p.softcap);
            slope = 0;
            const bool real = s.index < p.batch;
            if (p.alibi && real) slope = address<const float>(p.alibi)[s.index * p.alibi_b + head * p.alibi_h];
            const int64_t b = real ? s.index : 0;
            bias = address<const typename Config::bias_element>(p.bias) + b * p.bias_b + head * p.bias_h;
            mask = address<const uint8_t>(p.mask) + b * p.mask_b + head * p.mask_h;
            blocks = address<const uint8_t>(p.block_mask) + b * p.block_b + head * p.block_h;
        }
    }

    // Whether no query of [i0, i1) sees a key of [j0, j1) for the block mask.
    __device__ __forceinline__ bool skips(const SimtParams& p, int i0, int i1, int j0, int j1) const {
        if constexpr (Config::full) {
            if (p.block_mask) {
                const int i_end = clip(window.q_len, 0, i1 < p.seqlen_q ? i1 : p.seqlen_q);
                const int j_end = clip(window.kv_len, 0, j1 < p.seqlen_k ? j1 : p.seqlen_k);
                for (int r = i0 / p.block_rows; r * p.block_rows < i_end; ++r)
                    for (int c = j0 / p.block_columns; c * p.block_columns < j_end; ++c)
                        if (blocks[r * p.block_i + c * p.block_j]) return false;
                return true;
            }
        }
        return false;
    }

    template <class Change>
    __device__ __forceinline__ static void each(T (&s)[G::rows][G::columns], const Change& change) {
#pragma unroll
        for (int i = 0; i < G::rows; ++i)
#pragma unroll
            for (int j = 0; j < G::columns; ++j) change(s[i][j], i, j);
    }

    // x -> s for a tile. Thread's first row and column are `row` and `column`; transposed: rows are keys. derivative, where
    // asked for: ds/dx without the scale.
    template <bool transposed, bool derive>
    __device__ __forceinline__ void apply(
        const SimtParams& p, T (&s)[G::rows][G::columns], T (&derivative)[derive ? G::rows : 1][derive ? G::columns : 1],
        int row, int column) const {
        const auto query = [&](int i, int j) { return transposed ? column + j * G::lanes : row + i * G::steps; };
        const auto key = [&](int i, int j) { return transposed ? row + i * G::steps : column + j * G::lanes; };
        each(s, [&](T& x, int, int) { x = rounded_product(x, scale); });
        if constexpr (derive) fill(derivative, T(1));
        if constexpr (Config::full) {
            if (cap > 0)
                each(s, [&](T& x, int i, int j) {
                    const T t = tangent(x);
                    x = cap * t;
                    if constexpr (derive) derivative[i][j] = 1 - t * t;
                });
        }
        hide<transposed>(s, row, column);
        if constexpr (Config::full) {
            const T hidden = minus_infinity<T>();
            const auto open = [&](T x, int i, int j) { return x != hidden && query(i, j) < p.seqlen_q && key(i, j) < p.seqlen_k; };
            if (p.alibi)
                each(s, [&](T& x, int i, int j) {
                    x -= slope * magnitude(static_cast<T>(query(i, j) + static_cast<int>(window.offset) - key(i, j)));
                });
            if constexpr (Config::has_bias)
                each(s, [&](T& x, int i, int j) {
                    if (open(x, i, j)) x += widen<T>(bias[query(i, j) * p.bias_i + key(i, j) * p.bias_j]);
                });
            if (p.mask)
                each(s, [&](T& x, int i, int j) {
                    if (open(x, i, j) && !mask[query(i, j) * p.mask_i + key(i, j) * p.mask_j]) x = hidden;
                });
            if (p.block_mask)
                each(s, [&](T& x, int i, int j) {
                    if (open(x, i, j) && !blocks[query(i, j) / p.block_rows * p.block_i + key(i, j) / p.block_columns * p.block_j])
                        x = hidden;
                });
        }
    }

    // -infinity where position or lengths hide a pair; most tiles have none of those.
    template <bool transposed>
    __device__ __forceinline__ void hide(T (&s)[G::rows][G::columns], int row, int column) const {
        const T hidden = minus_infinity<T>();
        const int last_row = row + (G::rows - 1) * G::steps, last_column = column + (G::columns - 1) * G::lanes;
        const int i0 = transposed ? column : row, i1 = transposed ? last_column : last_row;
        const int j0 = transposed ? row : column, j1 = transposed ? last_row : last_column;
        if (i1 < window.q_len && j1 < window.key_end(i0) && j0 >= window.key_begin(i1)) return;
        if constexpr (transposed) {
#pragma unroll
            for (int j = 0; j < G::columns; ++j) {
                const int i = column + j * G::lanes;
                const int begin = static_cast<int>(window.key_begin(i)), end = i < window.q_len ? static_cast<int>(window.key_end(i)) : 0;
#pragma unroll
                for (int n = 0; n < G::rows; ++n)
                    if (row + n * G::steps < begin || row + n * G::steps >= end) s[n][j] = hidden;
            }
        } else {
#pragma unroll
            for (int n = 0; n < G::rows; ++n) {
                const int i = row + n * G::steps;
                const int begin = static_cast<int>(window.key_begin(i)), end = i < window.q_len ? static_cast<int>(window.key_end(i)) : 0;
#pragma unroll
                for (int j = 0; j < G::columns; ++j)
                    if (column + j * G::lanes < begin || column + j * G::lanes >= end) s[n][j] = hidden;
            }
        }
    }

    // Bit i * columns + j: whether dropout keeps that element.
    template <bool transposed>
    __device__ __forceinline__ uint64_t kept(const SimtParams& p, int row, int column) const {
        // Philox gives eight numbers at once, for queries 8 and keys 8, 16 and 24 apart; a thread's own among them share a call.
        constexpr int key_side = transposed ? G::team_rows : 32, query_side = transposed ? 32 : G::team_rows;
        constexpr int key_step = transposed ? G::steps : G::lanes, query_step = transposed ? G::lanes : G::steps;
        constexpr bool scattered = transposed && Config::paged;   // a page may begin at any key
        constexpr int keys = scattered ? 1 : key_side % 32 == 0 ? (key_step > 8 ? 32 / key_step : 4)
                             : key_side % 16 == 0 && key_step <= 8 ? 2 : 1;
        constexpr int queries = query_side % 16 == 0 && query_step <= 8 ? 2 : 1;
        constexpr int key_apart = key_step > 8 ? 1 : 8 / key_step, query_apart = query_step > 8 ? 1 : 8 / query_step;
        constexpr int row_count = transposed ? keys : queries, column_count = transposed ? queries : keys;
        constexpr int row_apart = transposed ? key_apart : query_apart, column_apart = transposed ? query_apart : key_apart;
        const uint64_t seed = static_cast<uint64_t>(*address<const int64_t>(p.seed));
        const uint32_t h = Config::fault == dropout_ignores_head ? 0 : head;
        uint64_t bits = 0;
#pragma unroll
        for (int i = 0; i < G::rows; ++i) {
            if (i / row_apart % row_count) continue;
#pragma unroll
            for (int j = 0; j < G::columns; ++j) {
                if (j / column_apart % column_count) continue;
                const int query0 = transposed ? column + j * G::lanes : row + i * G::steps;
                const int key0 = transposed ? row + i * G::steps : column + j * G::lanes;
                const PhiloxWords words = dropout_words(seed, sequence, h, query0, key0);
#pragma unroll
                for (int a = 0; a < row_count; ++a)
#pragma unroll
                    for (int c = 0; c < column_count; ++c) {
                        const int m = i + a * row_apart, n = j + c * column_apart;
                        const int query = transposed ? column + n * G::lanes : row + m * G::steps;
                        const int key = transposed ? row + m * G::steps : column + n * G::lanes;
                        if (dropout_keeps(words, query, key, p.dropout_threshold)) bits |= uint64_t(1) << (m * G::columns + n);
                    }
            }
        }
        return bits;
    }
};

}  // namespace attnlib
