// The dropout contract: one 16-bit number for each (sequence, head, query, key), the same on every backend.
//
// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) with key = seed and counter
//   c0 = (j >> 5) * 8 + (j & 7),  c1 = (i >> 4) * 8 + (i & 7),  c2 = head,  c3 = sequence.
// One call covers rows {i, i+8} x columns {j, j+8, j+16, j+24}: word (j >> 3) & 3, low half for row i, high for i+8.
#pragma once

#include "types.h"

namespace attnlib {

struct PhiloxWords {
    uint32_t word[4];
};

ATTNLIB_FN PhiloxWords philox4x32_10(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint64_t seed) {
    uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const uint64_t product0 = static_cast<uint64_t>(0xD2511F53u) * c0;
        const uint64_t product1 = static_cast<uint64_t>(0xCD9E8D57u) * c2;
        const uint32_t next0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ key0;
        const uint32_t next2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ key1;
        c1 = static_cast<uint32_t>(product1);
        c3 = static_cast<uint32_t>(product0);
        c0 = next0;
        c2 = next2;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

// The words that serve rows {i, i+8} (i & 8 == 0) and columns {j, j+8, j+16, j+24} (j & 24 == 0), and all their aliases.
ATTNLIB_FN PhiloxWords dropout_words(uint64_t seed, uint32_t sequence, uint32_t head, uint32_t i, uint32_t j) {
    return philox4x32_10((j >> 5) * 8 + (j & 7), (i >> 4) * 8 + (i & 7), head, sequence, seed);
}

// The number of (i, j) within its words.
ATTNLIB_FN uint32_t dropout_number(const PhiloxWords& words, uint32_t i, uint32_t j) {
    const uint32_t word = words.word[(j >> 3) & 3];
    return (i & 8) ? word >> 16 : word & 0xFFFFu;
}

// kept iff number >= threshold; threshold 0 keeps all, 65536 keeps none; kept values are divided by 1 - threshold/65536.
ATTNLIB_FN bool dropout_keeps(const PhiloxWords& words, uint32_t i, uint32_t j, uint32_t threshold) {
    return dropout_number(words, i, j) >= threshold;
}

}  // namespace attnlib
