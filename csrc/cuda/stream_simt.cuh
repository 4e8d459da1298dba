// What passes through shared memory: tiles that stay, and slices that stream through two buffers.
#pragma once

#include "sequence_simt.cuh"

namespace attnlib {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define ATTNLIB_HAS_COPIES
// 16 bytes from global to shared memory, or zeros and nothing read; there after wait_for_copies and a barrier.
__device__ __forceinline__ void start_copy(void* to, const void* from, bool any) {
    const uint32_t target = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(from), "r"(any ? 16 : 0) : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
#endif
#if defined(ATTNLIB_HAS_COPIES)
constexpr bool has_copies = true;
#else
constexpr bool has_copies = false;
__device__ __forceinline__ void start_copy(void*, const void*, bool) {}
__device__ __forceinline__ void wait_for_copies() {}
#endif

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

// Whether operands are copied to shared memory as they are, past the registers.
template <class Config>
constexpr bool copied = has_copies && Config::vectors && sizeof(typename Config::element) == sizeof(typename Tile<Config>::number);

template <class number>
__device__ __forceinline__ void copy_quad(number* to, const number* from, bool any) {
    constexpr int width = 16 / sizeof(number);
#pragma unroll
    for (int e = 0; e < 4; e += width) start_copy(to + e, from + e, any);
}

// A slice of `count` x `size` elements on its way from global to shared memory: a copy under way to where the slice is
// to be, or in registers until it is stored there.
template <class Config, int count, int size, int ld>
struct Slice {
    using element = typename Config::element;
    using number = typename Tile<Config>::number;
    static constexpr int threads = Config::threads;
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

    // Where the thread's n'th quad goes: a constant away from the first, where that is known.
    __device__ __forceinline__ static number* target(number* to, int n) {
        const Place place(threads % per_row == 0 ? 0 : n);
        return to + place.row * ld + place.column + (threads % per_row == 0 ? n * (threads / per_row) * ld : 0);
    }

    template <class From>
    __device__ __forceinline__ void load(From source, int row, int column, number* to) {
        recompute(source.stride);   // addresses of every quad, kept from tile to tile, would cost more registers than time
        recompute(row);
        const Place first(0);
        const element* next = From::has_pages ? source.base : source.at(row + first.row) + column + first.column;
        const int64_t step = threads / per_row * source.stride;
#pragma unroll
        for (int n = 0; n < each; ++n) {
            const Place place(n);
            if (!place.exists) continue;
            const bool any = source.has(row + place.row) && (Config::exact || column + place.column < source.columns);
            const element* from = next;
            if constexpr (!From::has_pages && threads % per_row == 0) next += step;
            else if (any) from = source.at(row + place.row) + column + place.column;
            if constexpr (copied<Config>) copy_quad(target(to, n), from, any);
            else held[n] = any ? source.read(from, column + place.column) : Quad<element>{};
        }
    }
    __device__ __forceinline__ void store(number* to) const {
        if constexpr (copied<Config>) return wait_for_copies();
#pragma unroll
        for (int n = 0; n < each; ++n) {
            const Place place(n);
            if (place.exists) write_quad(target(to, n), held[n]);
        }
    }
};

// A whole tile that stays in shared memory, for the left of products (Tile::place). Neighbours read 32 bytes of a row; all
// quads of a flight are on their way before the first is stored.
template <class Config, int size, class From, class number>
__device__ __forceinline__ void load_tile(number* to, const From& source, int row) {
    using G = Tile<Config>;
    using Held = Quad<typename Config::element>;
    constexpr int rows = G::tile_rows, pairs = Config::threads / 2, total = rows * size / 4;
    constexpr int most = Config::vectors ? (sizeof(Held) > 16 ? 8 : 16) : 4, whole = (total - 1) / Config::threads + 1;
    constexpr int flight = whole < most ? whole : most;
    const int pair = threadIdx.x / 2, within = pair % rows, column = (pair / rows * 2 + threadIdx.x % 2) * 4;
    const int team = within / G::team_rows, y = within % G::steps, i = within % G::team_rows / G::steps;
    number* const own = to + team * G::team_rows * size + i % G::run;
#pragma unroll 1
    for (int first = 0; first < total; first += flight * Config::threads) {
        Held held[flight];
        const auto each = [&](const auto& use) {   // a quad's rows and columns behind the thread's first
#pragma unroll
            for (int n = 0; n < flight; ++n) {
                const int passed = first / 2 + n * pairs, right = passed / rows * 8;
                if (total % (flight * Config::threads) == 0 || column + right < size) use(held[n], rows > pairs ? passed % rows : 0, right);
            }
        };
        each([&](Held& quad, int down, int right) {
            const bool any = source.has(row + within + down) && (Config::exact || column + right < source.columns);
            quad = any ? source.read(source.at(row + within + down) + column + right, column + right) : Held{};
        });
        each([&](const Held& quad, int down, int right) {   // places repeat every eight columns
#pragma unroll
            for (int e = 0; e < 4; ++e)
                own[G::place(y, i / G::run, column + e) + down * size + right * G::team_rows] = widen<number>(quad.x[e]);
        });
    }
}

// The two buffers that slices stream through.
template <class Config>
struct Buffers {
    using number = typename Tile<Config>::number;
    number* memory;
    int turn = 0;

    __device__ __forceinline__ number* now() const { return memory + turn * Config::slice; }
    __device__ __forceinline__ number* next() const { return memory + (turn ^ 1) * Config::slice; }
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

    template <class number>
    __device__ __forceinline__ void load(number* to) const { if (any) slice.load(source, row, 0, to); }
    template <class number>
    __device__ __forceinline__ void store(number* to) const { if (any) slice.store(to); }
};

template <class Config>
using DotSlice = Slice<Config, Config::tile_columns, Config::depth, Tile<Config>::ld_slice>;
template <class Config, int count, int wide>
using ProductSlice = Slice<Config, count, wide, wide>;

template <class SliceType, class From>
__device__ __forceinline__ Ahead<SliceType, From> ahead(SliceType& slice, const From& source, int row, bool any = true) {
    return {slice, source, row, any};
}

// Slices 0 ... slices - 1 of a stream, each handed to `use` while the next one, or what `then` says, is on its way. Slice
// `part` begins at row + part * rows_apart and column part * columns_apart; the first is in buffers.now() already.
template <int slices, int rows_apart, int columns_apart, class Config, class SliceType, class From, class Then, class Use>
__device__ __forceinline__ void stream(
    Buffers<Config>& buffers, SliceType& slice, const From& from, int row, const Then& then, const Use& use) {
#pragma unroll 1
    for (int part = 0; part < slices; ++part) {
        if (part + 1 < slices) slice.load(from, row + (part + 1) * rows_apart, (part + 1) * columns_apart, buffers.next());
        else then.load(buffers.next());
        use(part, buffers.now());
        if (part + 1 < slices) slice.store(buffers.next());
        else then.store(buffers.next());
        buffers.flip();
    }
}

}  // namespace attnlib
