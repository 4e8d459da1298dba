// Kernels for x86-64 with AVX-512 F, BW, DQ and VL.
#define ATTNLIB_ISA avx512
#include "table.h"

namespace attnlib {

extern const Kernels avx512_f32, avx512_f64;
const Kernels avx512_f32 = avx512::kernels_of<avx512::F32>("avx512 float32");
const Kernels avx512_f64 = avx512::kernels_of<avx512::F64>("avx512 float64");

}  // namespace attnlib
