// One call: where every sequence lies, what is appended, how the work is cut and in which order sums are taken.
#pragma once

#include "params.h"

namespace attnlib {

enum Family { kPortable = 0, kAvx2 = 1, kAvx512 = 2, kAmx = 4 };

// Bit f is set where this machine can run family f; bit 3: AVX512-BF16; bit 4: AMX for bfloat16 beside it.
int supported_families();

// What would run one direction: kernels, threads, bytes of workspace a thread. Also fills in params as the run would,
// for sequences of full length.
struct Cut {
    const char* kernel;
    int threads;
    size_t workspace;
};
Cut cut(Params& params, bool backward, int family, int threads);

// Block sizes of 0 are chosen by shape. Both may throw std::bad_alloc, before anything is written.
void run_forward(Params& params, int family, int threads);
void run_backward(Params& params, int family, int threads);

}  // namespace attnlib
