// AMX: whether this process may use it, and in units compiled for it (__AMX_BF16__) the eight tiles of a thread.
//
// Tiles are 16 rows of 64 bytes unless a TileScope says less. Their configuration is state of the thread that other code
// sets as well, so what uses tiles holds a TileScope, and nothing survives a unit of work.
#pragma once

namespace attnlib {

enum class Amx {
    usable,
    not_built,     // by a compiler that lacks it
    no_processor,  // has no AMX-TILE or no AMX-BF16
    refused,       // the operating system knows no AMX, or does not let this process use it
};

// The first call asks the operating system, for this process and its children.
Amx amx_state();

}  // namespace attnlib

#if defined(__AMX_BF16__)

#include "simd.h"

namespace attnlib {
namespace ATTNLIB_ISA {
namespace {

constexpr int64_t kTile = 16;  // rows of a tile, and 4-byte words of a row

// In assembler since GCC's intrinsics do not tell that a load reads memory.
template <int tile> ATTNLIB_INLINE void tile_load(const void* from, int64_t row_bytes) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(row_bytes), "i"(tile) : "memory");
}
template <int tile> ATTNLIB_INLINE void tile_store(void* to, int64_t row_bytes) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(row_bytes), "i"(tile) : "memory");
}
template <int tile> ATTNLIB_INLINE void tile_zero() { __asm__ volatile("tilezero %%tmm%c0" : : "i"(tile)); }

// C[i][j] += sum over pairs t of A[i][t] B[t][j], C in float32: rounds to nearest even whatever MXCSR says, takes
// subnormal operands as 0 and gives 0 for subnormal sums.
template <int c, int a, int b> ATTNLIB_INLINE void tile_multiply_add() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
}

class TileScope {
public:
    TileScope() : TileScope({16, 16, 16, 16, 16, 16, 16, 16}, {64, 64, 64, 64, 64, 64, 64, 64}) {}
    // Rows, and bytes of a row, of each tile.
    TileScope(const uint8_t (&rows)[8], const uint8_t (&row_bytes)[8]) {
        struct alignas(64) {
            uint8_t palette, start_row, reserved[14];
            uint16_t row_bytes[16];
            uint8_t rows[16];
        } config = {};
        static_assert(sizeof(config) == 64, "as LDTILECFG reads it");
        config.palette = 1;
        for (int tile = 0; tile < 8; ++tile) config.row_bytes[tile] = row_bytes[tile], config.rows[tile] = rows[tile];
        __asm__ volatile("ldtilecfg %0" : : "m"(config));
    }
    ~TileScope() { __asm__ volatile("tilerelease"); }
    TileScope(const TileScope&) = delete;
    TileScope& operator=(const TileScope&) = delete;
};

}  // namespace
}  // namespace ATTNLIB_ISA
}  // namespace attnlib

#endif
