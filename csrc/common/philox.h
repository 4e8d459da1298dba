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

// The same in three parts, for kernels that draw many words. Of the first three rounds most depends on the row or on the
// column alone; finishing takes 15 products of 20. Product: (low, high, a, b), both halves of a * b.
struct PhiloxRow {
    uint32_t high, low;   // of the second round's product
};
struct PhiloxColumn {
    uint32_t word[4];     // what the third round adds to c2, then to c0 and c2 of the next, and c3 of the next
};

template <class Product>
ATTNLIB_FN PhiloxRow philox_row(uint64_t seed, uint32_t c1, uint32_t c2, const Product& product) {
    uint32_t low, high;
    PhiloxRow row;
    product(low, high, 0xCD9E8D57u, c2);
    product(row.low, row.high, 0xD2511F53u, high ^ c1 ^ static_cast<uint32_t>(seed));
    return row;
}

template <class Product>
ATTNLIB_FN PhiloxColumn philox_column(uint64_t seed, uint32_t c0, uint32_t c2, uint32_t c3, const Product& product) {
    const uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
    uint32_t head, column, low, high;
    product(head, high, 0xCD9E8D57u, c2);
    product(column, high, 0xD2511F53u, c0);
    product(low, high, 0xCD9E8D57u, high ^ c3 ^ key1);
    const uint32_t second = high ^ head ^ (key0 + 0x9E3779B9u);
    PhiloxColumn x;
    x.word[0] = column ^ (key1 + 0xBB67AE85u);
    x.word[1] = low ^ (key0 + 2 * 0x9E3779B9u);
    product(x.word[3], high, 0xD2511F53u, second);
    x.word[2] = high ^ (key1 + 2 * 0xBB67AE85u);
    return x;
}

template <class Product>
ATTNLIB_FN PhiloxWords philox_finish(uint64_t seed, const PhiloxRow& row, const PhiloxColumn& column, const Product& product) {
    uint32_t key0 = static_cast<uint32_t>(seed) + 3 * 0x9E3779B9u, key1 = static_cast<uint32_t>(seed >> 32) + 3 * 0xBB67AE85u;
    uint32_t c0, c1, c2 = column.word[2] ^ row.low, c3 = column.word[3], high;
    product(c1, high, 0xCD9E8D57u, row.high ^ column.word[0]);
    c0 = high ^ column.word[1];
    for (int round = 3; round < 10; ++round) {
        uint32_t low0, high0, low1, high1;
        product(low0, high0, 0xD2511F53u, c0);
        product(low1, high1, 0xCD9E8D57u, c2);
        c0 = high1 ^ c1 ^ key0;
        c2 = high0 ^ c3 ^ key1;
        c1 = low1;
        c3 = low0;
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
