// Kernels for x86-64 with AMX-BF16 beside AVX512-BF16: the products on tiles, also where queries are few.
#define ATTNLIB_ISA amx
#include "table.h"

namespace attnlib {

extern const Kernels amx_bf16;
const Kernels amx_bf16 = amx::kernels_of<amx::Bf16Tiles, amx::Bf16Pair>("amx bfloat16");

}  // namespace attnlib
