// Exports the kernels of one instruction set; included last by each isa_*.cpp.
#pragma once

#include "backward.h"
#include "decode.h"

namespace attnlib {
namespace ATTNLIB_ISA {

namespace {
template <class R> void store_plain(DType type, char* to, const void* from, int64_t count) {
    store_row<R>(type, to, static_cast<const R*>(from), count, R(1));
}
}  // namespace

// Few: the arithmetic of decode.h.
template <class T, class Few = T> constexpr Kernels kernels_of(const char* name) {
    return {name,
            static_cast<int64_t>(sizeof(typename T::Real)),
            T::per_word,
            Forward<T>::workspace,
            Forward<T>::tile_bytes,
            Forward<T>::fill_tile,
            Forward<T>::block,
            Decode<Few>::workspace,
            Decode<Few>::part_bytes,
            Decode<Few>::block,
            Decode<Few>::merge,
            Backward<T>::delta,
            Backward<T>::workspace,
            Backward<T>::tile_bytes,
            Backward<T>::fill_tile,
            Backward<T>::dq_width,
            Backward<T>::block,
            Backward<T>::store_dq,
            store_plain<typename T::Real>};
}

}  // namespace ATTNLIB_ISA
}  // namespace attnlib
