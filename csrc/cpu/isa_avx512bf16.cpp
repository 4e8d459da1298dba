// Kernels for x86-64 with AVX512-BF16: bfloat16 operands by dot products of pairs into float32.
#define ATTNLIB_ISA avx512bf16
#include "table.h"

namespace attnlib {

extern const Kernels avx512_bf16;
const Kernels avx512_bf16 = avx512bf16::kernels_of<avx512bf16::Bf16Pair>("avx512 bfloat16");

}  // namespace attnlib
