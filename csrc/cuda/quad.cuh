// Rows of an accumulator as vectors: what the four lanes of a row exchange.
#pragma once

namespace attnlib {

// Word t of a lane: two columns of one row in the t-th of four m16n8 tiles. Afterwards a lane has the row's eight columns of tile
// lane % 4, in order.
__device__ __forceinline__ void exchange_quad(uint32_t (&word)[4], int lane) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2)
#pragma unroll
        for (int t = 0; t < 4; ++t)
            if ((t & step) == 0) {
                const bool upper = lane & step;
                const uint32_t got = __shfl_xor_sync(0xFFFFFFFFu, upper ? word[t] : word[t + step], step);
                if (upper) word[t] = got;
                else word[t + step] = got;
            }
}

}  // namespace attnlib
