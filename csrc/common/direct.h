// How a backend lets core run one form of call without Python: a capsule that holds a Direct.
#pragma once

namespace attnlib {

constexpr const char* kDirectName = "attnlib.direct.2";

struct Direct {
    // q, k, v, out and lse lie at `address`; a null lse is not wanted. Strides and all else are the form's. A GPU's work
    // goes on `stream`. Needs no GIL, keeps nothing. Returns null, or what went wrong; an empty text says that memory
    // ran out.
    const char* (*run)(const Direct* self, void* const address[5], int threads, void* stream);
    bool always_lse;  // lse is written, wanted or not
};

}  // namespace attnlib
