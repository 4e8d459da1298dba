#include "amx.h"

#if defined(ATTNLIB_AMX) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace attnlib {
namespace {

Amx ask() {
#if defined(ATTNLIB_AMX) && defined(__linux__)
    unsigned a = 0, b = 0, c = 0, d = 0;
    constexpr unsigned kBf16 = 1u << 22, kTiles = 1u << 24;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (kBf16 | kTiles)) != (kBf16 | kTiles)) return Amx::no_processor;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 ? Amx::usable : Amx::refused;
#elif defined(ATTNLIB_X86)
    return Amx::not_built;
#else
    return Amx::no_processor;
#endif
}

}  // namespace

Amx amx_state() {
    static const Amx state = ask();
    return state;
}

}  // namespace attnlib
