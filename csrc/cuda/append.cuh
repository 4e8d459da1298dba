// Writes new tokens into a key/value cache: token t of sequence b goes to kv_lens[b] + t. One block a token, a thread a
// chunk of elements of one head. Nothing is written for a sequence whose length does not fit.
#pragma once

#include "score.cuh"

namespace attnlib {

template <class Config>
__device__ __forceinline__ void append_kernel(const AppendParams& p) {
    using element = typename Config::element;
    const int t = blockIdx.x, b = blockIdx.y;
    const int length = p.kv_lens ? address<const int>(p.kv_lens)[b] : 0;
    const int added = p.new_lens ? address<const int>(p.new_lens)[b] : p.new_tokens;
    if (t >= added || length < 0 || added > p.new_tokens || static_cast<int64_t>(length) + added > p.capacity) return;
    const int at = length + t;
    const auto place = [&](int64_t sb, int64_t sj) -> int64_t {
        if constexpr (Config::paged) return address<const int>(p.page_table)[b * p.page_row + at / p.page_size] * sb + at % p.page_size * sj;
        else return b * sb + at * sj;
    };
    element* k = address<element>(p.k) + place(p.k_b, p.k_j);
    element* v = address<element>(p.v) + place(p.v_b, p.v_j);
    const element* k_new = address<const element>(p.k_new) + b * p.kn_b + t * p.kn_t;
    const element* v_new = address<const element>(p.v_new) + b * p.vn_b + t * p.vn_t;
    for (int index = threadIdx.x; index < p.heads_kv * Config::head_dim; index += Config::threads) {
        const int h = index / Config::head_dim, c = index % Config::head_dim;
        k[h * p.k_h + c] = k_new[h * p.kn_h + c];
    }
    for (int index = threadIdx.x; index < p.heads_kv * Config::head_dim_v; index += Config::threads) {
        const int h = index / Config::head_dim_v, c = index % Config::head_dim_v;
        v[h * p.v_h + c] = v_new[h * p.vn_h + c];
    }
}

}  // namespace attnlib
