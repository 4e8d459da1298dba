// Kernels for x86-64 with AVX2, FMA and F16C.
#define ATTNLIB_ISA avx2
#include "table.h"

namespace attnlib {

extern const Kernels avx2_f32, avx2_f64;
const Kernels avx2_f32 = avx2::kernels_of<avx2::F32>("avx2 float32");
const Kernels avx2_f64 = avx2::kernels_of<avx2::F64>("avx2 float64");

}  // namespace attnlib
