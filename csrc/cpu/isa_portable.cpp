// Kernels for any machine, 16-byte vectors as the compiler lowers them.
#define ATTNLIB_ISA portable
#include "table.h"

namespace attnlib {

extern const Kernels portable_f32, portable_f64;
const Kernels portable_f32 = portable::kernels_of<portable::F32>("portable float32");
const Kernels portable_f64 = portable::kernels_of<portable::F64>("portable float64");

}  // namespace attnlib
