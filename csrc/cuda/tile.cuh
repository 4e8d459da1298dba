// Tiles in shared memory: rows of `columns` elements, 16-byte chunks permuted so that ldmatrix meets no bank twice.
//
// Chunk c of row r lies at chunk c ^ (r & 7) within its group of eight (rows of a multiple of 128 bytes) or at
// c ^ ((r >> 1) & 3) within its group of four (the other multiples of 64 bytes). A lane's row is fixed modulo 8, so its
// permuted address is computed once; a step along the row is one xor with a constant, a step along the rows an
// immediate offset.
#pragma once

#include "element.cuh"

namespace attnlib {

template <class Config, int rows_, int columns_>
struct Tile {
    using atom = Atom<Config>;
    static constexpr int rows = rows_, columns = columns_;
    static constexpr int pitch = columns * atom::bytes;   // bytes of a row
    static constexpr int bytes = rows * pitch;
    static constexpr int chunks = pitch / 16;
    static constexpr int group = pitch % 128 == 0 ? 128 : 64;
    static_assert(pitch % 64 == 0, "rows are multiples of 64 bytes");

    __device__ __forceinline__ static uint32_t permute(int row) { return group == 128 ? row & 7 : (row >> 1) & 3; }

    // Where element (row, column) starts, for any row and any column.
    __device__ __forceinline__ static uint32_t offset(int row, int column) {
        const uint32_t byte = column * atom::bytes;
        return row * pitch + ((byte & ~15u) ^ (permute(row) << 4)) + (byte & 15u);
    }

    // Fragment addresses of a lane. "by_row": matrices run down the rows first (A from [m][k], B from [k][n] transposed);
    // "by_chunk": along the row first (B from [n][k], A from [k][m] transposed).
    __device__ __forceinline__ static uint32_t by_row(uint32_t base, int lane) {
        const int row = lane & 15;
        return base + row * pitch + (((lane >> 4) ^ permute(row)) << 4);
    }
    __device__ __forceinline__ static uint32_t by_chunk(uint32_t base, int lane) {
        const int row = (lane & 7) + ((lane >> 4) << 3);
        return base + row * pitch + ((((lane >> 3) & 1) ^ permute(row)) << 4);
    }
    // row a multiple of 8, chunk even, both known at compile time after unrolling.
    __device__ __forceinline__ static uint32_t at(uint32_t lane_address, int row, int chunk) {
        return (lane_address ^ ((chunk * 16) % group)) + row * pitch + chunk * 16 / group * group;
    }

    // A [16, k] from [m][k]: rows row.., k-step `step`.
    __device__ __forceinline__ static typename atom::A load_a(uint32_t lane_address, int row, int step) {
        typename atom::A a;
        ptx::ldmatrix_x4(a.hi, at(lane_address, row, 2 * step));
        atom::prepare(a);
        return a;
    }
    // The same at a run-time chunk (even), in the order of k that from_accumulators gives (float32: 0, 2, 4, 6, 1, 3, 5, 7).
    __device__ __forceinline__ static typename atom::A load_a_permuted(uint32_t lane_address, int row, int chunk) {
        typename atom::A a;
        if constexpr (atom::wide) {
            // lane_address is by_row: undo its chunk, take elements 2t and 2t+1 of rows l/4 and l/4 + 8 instead
            const int lane = threadIdx.x & 31, r = lane >> 2, column = 4 * chunk + 2 * (lane & 3);
            const uint32_t base = lane_address - by_row(0, lane);
            ptx::ld_shared_b32x2(a.hi[0], a.hi[2], base + row * pitch + offset(r, column));
            ptx::ld_shared_b32x2(a.hi[1], a.hi[3], base + row * pitch + offset(r + 8, column));
        } else ptx::ldmatrix_x4(a.hi, (lane_address ^ ((chunk * 16) % group)) + row * pitch + chunk * 16 / group * group);
        atom::prepare(a);
        return a;
    }
    // Two B [k, 8] from [n][k]: columns n row.. and row + 8.., k-step `step`. Lane address: by_chunk.
    __device__ __forceinline__ static void load_b(typename atom::B& b0, typename atom::B& b1, uint32_t lane_address, int row, int step) {
        uint32_t r[4];
        ptx::ldmatrix_x4(r, at(lane_address, row, 2 * step));
        b0.hi[0] = r[0]; b0.hi[1] = r[1]; b1.hi[0] = r[2]; b1.hi[1] = r[3];
        atom::prepare(b0);
        atom::prepare(b1);
    }
    // float32 has no transposing ldmatrix: element (row + k, 8 * column + lane / 4), where k is lane % 4, plus 4 if `second`;
    // permuted: 2 * (lane % 4), plus 1. Few xors of one lane address serve all; row is a multiple of 8.
    template <bool permuted>
    __device__ __forceinline__ static uint32_t at_k(uint32_t lane_address, int row, int column, bool second) {
        const int beside = permuted ? 1 : 4;
        return (lane_address ^ ((column & 3) * 32 ^ (second ? beside * 16 : 0))) + (row + (second ? beside : 0)) * pitch + column / 4 * 128;
    }
    // Two B [k, 8] from [k][n]: k rows row.., columns 16 * pair.. and + 8. Lane address: by_k.
    template <bool permuted>
    __device__ __forceinline__ static void load_b_by_k(typename atom::B& b0, typename atom::B& b1, uint32_t lane_address, int row, int pair, int lane) {
        if constexpr (atom::wide) {
            b0.hi[0] = ptx::ld_shared_b32(at_k<permuted>(lane_address, row, 2 * pair, false));
            b0.hi[1] = ptx::ld_shared_b32(at_k<permuted>(lane_address, row, 2 * pair, true));
            b1.hi[0] = ptx::ld_shared_b32(at_k<permuted>(lane_address, row, 2 * pair + 1, false));
            b1.hi[1] = ptx::ld_shared_b32(at_k<permuted>(lane_address, row, 2 * pair + 1, true));
            atom::prepare(b0);
            atom::prepare(b1);
        } else {
            uint32_t r[4];
            ptx::ldmatrix_x4_trans(r, at(lane_address, row, 2 * pair));
            b0.hi[0] = r[0]; b0.hi[1] = r[1]; b1.hi[0] = r[2]; b1.hi[1] = r[3];
        }
    }
    // A [16, k] from [k][m]: k rows row.., m columns 16 * column... Lane address: by_k.
    __device__ __forceinline__ static typename atom::A load_a_by_k(uint32_t lane_address, int row, int column, int lane) {
        typename atom::A a;
        if constexpr (atom::wide) {
            a.hi[0] = ptx::ld_shared_b32(at_k<false>(lane_address, row, 2 * column, false));
            a.hi[1] = ptx::ld_shared_b32(at_k<false>(lane_address, row, 2 * column + 1, false));
            a.hi[2] = ptx::ld_shared_b32(at_k<false>(lane_address, row, 2 * column, true));
            a.hi[3] = ptx::ld_shared_b32(at_k<false>(lane_address, row, 2 * column + 1, true));
            atom::prepare(a);
        } else {
            ptx::ldmatrix_x4_trans(a.hi, at(lane_address, row, 2 * column));
        }
        return a;
    }
    // Lane address for the two loads above. base: float32 needs a multiple of 128.
    __device__ __forceinline__ static uint32_t by_k(uint32_t base, int lane, bool for_a, bool permuted) {
        if constexpr (atom::wide) {
            static_assert(group == 128, "rows are whole groups of eight chunks");
            return base + offset(permuted ? 2 * (lane & 3) : lane & 3, lane >> 2);
        }
        return for_a ? by_chunk(base, lane) : by_row(base, lane);
    }
};

// Rows of a [tokens][heads][dim] operand, contiguous in memory or behind a page table.
template <class Config>
struct Rows {
    const typename Config::element* base;   // row 0 of the sequence and head (pages: of page 0)
    int64_t stride;                         // elements between rows (pages: between rows of one page)

    __device__ __forceinline__ const typename Config::element* row(int index, bool) const { return base + index * stride; }
};

template <class Config>
struct PagedRows {
    const typename Config::element* base;
    int64_t stride, page_stride;
    const int* table;
    int page_size;

    __device__ __forceinline__ const typename Config::element* row(int index, bool inside) const {
        if (!inside) return base;   // the table entry may be anything
        const int page = index / page_size;
        return base + table[page] * page_stride + (index - page * page_size) * stride;
    }
};

// Copies rows [first, first + Tile::rows) of `source` into the tile; rows outside [begin, end) and elements past `dim`
// become zero and are never read. Asynchronous where cp.async exists and addresses are aligned.
template <class Config, class Tile, int threads, int dim, class Source>
__device__ __forceinline__ void load_tile(uint32_t tile, const Source& source, int first, int begin, int end, int thread) {
    using element = typename Config::element;
    constexpr int width = 16 / sizeof(element);
    constexpr int lanes = Tile::chunks % 8 == 0 ? 8 : 4;          // threads along a row
    constexpr int step = threads / lanes;                         // rows between a thread's rows
    static_assert(step % 8 == 0 || step >= Tile::rows || step == 4, "a thread's rows share their permutation");
    const int row0 = thread / lanes, chunk0 = thread % lanes;
#pragma unroll
    for (int i = 0; i < (Tile::rows + step - 1) / step; ++i) {
        const int row = row0 + i * step;
        if (Tile::rows % step != 0 && row >= Tile::rows) break;
        const int index = first + row;
        const bool inside = static_cast<uint32_t>(index - begin) < static_cast<uint32_t>(end - begin);
        const element* pointer = source.row(index, inside);
        const uint32_t target = tile + row * Tile::pitch + ((chunk0 ^ Tile::permute(row)) << 4);
#pragma unroll
        for (int j = 0; j < Tile::chunks / lanes; ++j) {
            const int column = (chunk0 + j * lanes) * width;
            const int left = dim - column;
            const int count = dim == Tile::columns ? (inside ? width : 0) : inside ? (left < 0 ? 0 : left < width ? left : width) : 0;
            const uint32_t where = target + j * lanes * 16;
            if constexpr (Config::aligned && Config::arch >= 80) {
                ptx::cp_async_16(where, dim == Tile::columns || left > 0 ? pointer + column : pointer, count * static_cast<int>(sizeof(element)));
            } else if constexpr (Config::aligned && dim % width == 0) {
                uint4 value = {0, 0, 0, 0};
                if (count > 0) value = *reinterpret_cast<const uint4*>(pointer + column);
                ptx::st_shared_v4(where, value);
            } else {
                uint32_t word[4] = {0, 0, 0, 0};
#pragma unroll
                for (int e = 0; e < width; ++e)
                    if (e < count) {
                        if constexpr (sizeof(element) == 4) word[e] = __float_as_uint(to_float(pointer[column + e]));
                        else word[e / 2] |= static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(pointer)[column + e]) << (16 * (e & 1));
                    }
                ptx::st_shared_v4(where, {word[0], word[1], word[2], word[3]});
            }
        }
    }
}

template <class Config>
__device__ __forceinline__ void commit() {
    if constexpr (Config::arch >= 80) ptx::cp_async_commit();
}
template <class Config, int pending>
__device__ __forceinline__ void wait() {
    if constexpr (Config::arch >= 80) ptx::cp_async_wait<pending>();
}

}  // namespace attnlib
