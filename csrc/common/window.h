// Which keys a query may see by position: j < kv_len and -left <= j - pos(i) <= right, both ends inclusive.
// pos(i) = i + offset, offset = kv_len - q_len (bottom-right) or 0 (top-left). A negative end is unbounded.
#pragma once

#include "types.h"

namespace attnlib {

struct Window {
    int64_t left;    // >= 0, or -1: unbounded
    int64_t right;   // >= 0, or -1: unbounded
    int64_t offset;  // position of query 0
    int64_t q_len;
    int64_t kv_len;

    // First key that query i may see (may be >= key_end(i): the row is empty).
    ATTNLIB_FN int64_t key_begin(int64_t i) const {
        const int64_t first = i + offset - left;
        return left < 0 || first < 0 ? 0 : first;
    }
    // One past the last key that query i may see; never negative.
    ATTNLIB_FN int64_t key_end(int64_t i) const {
        const int64_t end = i + offset + right + 1;
        if (right < 0 || end > kv_len) return kv_len;
        return end < 0 ? 0 : end;
    }
    ATTNLIB_FN bool sees(int64_t i, int64_t j) const { return j >= key_begin(i) && j < key_end(i); }

    // First query that may see key j, and one past the last; empty if begin >= end.
    ATTNLIB_FN int64_t query_begin(int64_t j) const {
        const int64_t first = j - offset - right;
        return right < 0 || first < 0 ? 0 : first;
    }
    ATTNLIB_FN int64_t query_end(int64_t j) const {
        const int64_t end = j - offset + left + 1;
        if (left < 0 || end > q_len) return q_len;
        return end < 0 ? 0 : end;
    }
};

}  // namespace attnlib
