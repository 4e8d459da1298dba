// wgmma.mma_async m64nNk16: float32 accumulators, float16 or bfloat16 operands; B and, in `ss`, A in shared memory.
//
// An accumulator is float[N / 8][4], laid out as the m16n8 tiles of mma.sync: warp w of the warpgroup holds rows 16 w + l/4 and
// + 8. `keep` false: the accumulator starts at 0. `by_k` false: B lies as [n][k] (K); true: as [k][n] (V);
// `a_by_k` the same for A in shared memory, [m][k] or [k][m].
#pragma once

#include "types.h"

namespace attnlib::ptx {

// Descriptors of an operand in rows of 128 bytes with the 128-byte swizzle, 1024 bytes from one group of eight rows to the next.
// address: in shared memory, 16-byte granular; `pitch`: bytes from one panel of 64 columns to the next, where n runs across panels.
// once: shifted and packed once for a product, with one addition for each instruction; else anew for each.
template <bool once>
struct PanelDescriptor {
    uint32_t address, high, low;

    __device__ __forceinline__ PanelDescriptor(uint32_t address, uint32_t pitch)
        : address(address), high(pitch >> 4 << 16), low(high | address >> 4) {
        if constexpr (once) asm volatile("" : "+r"(low));   // or the compiler makes each anew
    }
    __device__ __forceinline__ uint64_t at(uint32_t bytes) const {
        constexpr uint32_t layout = (1024u >> 4) | (1u << 30);
        return static_cast<uint64_t>(layout) << 32 | (once ? low + (bytes >> 4) : high | (address + bytes) >> 4);
    }
};

template <int N> struct Wgmma;

// Lists of accumulator registers, 16 columns (8 registers) at a time: R in the instruction, D as operands.
#define ATTNLIB_T(t) "+f"(d[t][0]), "+f"(d[t][1]), "+f"(d[t][2]), "+f"(d[t][3])
#define ATTNLIB_R1 "%0,%1,%2,%3,%4,%5,%6,%7"
#define ATTNLIB_D1 ATTNLIB_T(0), ATTNLIB_T(1)
#define ATTNLIB_R2 ATTNLIB_R1 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define ATTNLIB_D2 ATTNLIB_D1, ATTNLIB_T(2), ATTNLIB_T(3)
#define ATTNLIB_R3 ATTNLIB_R2 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define ATTNLIB_D3 ATTNLIB_D2, ATTNLIB_T(4), ATTNLIB_T(5)
#define ATTNLIB_R4 ATTNLIB_R3 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define ATTNLIB_D4 ATTNLIB_D3, ATTNLIB_T(6), ATTNLIB_T(7)
#define ATTNLIB_R5 ATTNLIB_R4 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define ATTNLIB_D5 ATTNLIB_D4, ATTNLIB_T(8), ATTNLIB_T(9)
#define ATTNLIB_R6 ATTNLIB_R5 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define ATTNLIB_D6 ATTNLIB_D5, ATTNLIB_T(10), ATTNLIB_T(11)
#define ATTNLIB_R7 ATTNLIB_R6 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define ATTNLIB_D7 ATTNLIB_D6, ATTNLIB_T(12), ATTNLIB_T(13)
#define ATTNLIB_R8 ATTNLIB_R7 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define ATTNLIB_D8 ATTNLIB_D7, ATTNLIB_T(14), ATTNLIB_T(15)
#define ATTNLIB_R9 ATTNLIB_R8 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define ATTNLIB_D9 ATTNLIB_D8, ATTNLIB_T(16), ATTNLIB_T(17)
#define ATTNLIB_R10 ATTNLIB_R9 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define ATTNLIB_D10 ATTNLIB_D9, ATTNLIB_T(18), ATTNLIB_T(19)
#define ATTNLIB_R11 ATTNLIB_R10 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define ATTNLIB_D11 ATTNLIB_D10, ATTNLIB_T(20), ATTNLIB_T(21)
#define ATTNLIB_R12 ATTNLIB_R11 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define ATTNLIB_D12 ATTNLIB_D11, ATTNLIB_T(22), ATTNLIB_T(23)
#define ATTNLIB_R13 ATTNLIB_R12 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define ATTNLIB_D13 ATTNLIB_D12, ATTNLIB_T(24), ATTNLIB_T(25)
#define ATTNLIB_R14 ATTNLIB_R13 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define ATTNLIB_D14 ATTNLIB_D13, ATTNLIB_T(26), ATTNLIB_T(27)
#define ATTNLIB_R15 ATTNLIB_R14 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define ATTNLIB_D15 ATTNLIB_D14, ATTNLIB_T(28), ATTNLIB_T(29)
#define ATTNLIB_R16 ATTNLIB_R15 ",%120,%121,%122,%123,%124,%125,%126,%127"
#define ATTNLIB_D16 ATTNLIB_D15, ATTNLIB_T(30), ATTNLIB_T(31)

// blocks: N / 16. o0..o6: the numbers of the operands after the accumulator's.
#define ATTNLIB_SS(N, blocks, types, o0, o1, o2, o3, o4) \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #o2 ", 0;\n" \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." types " {" ATTNLIB_R##blocks "}, %" #o0 ", %" #o1 ", p, 1, 1, %" #o3 ", %" #o4 "; }" \
                 : ATTNLIB_D##blocks : "l"(a), "l"(b), "r"(static_cast<int>(keep)), "n"(static_cast<int>(a_by_k)), "n"(static_cast<int>(by_k)))
#define ATTNLIB_RS(N, blocks, types, o0, o1, o2, o3, o4, o5, o6) \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #o5 ", 0;\n" \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." types " {" ATTNLIB_R##blocks "}, {%" #o0 ", %" #o1 ", %" #o2 ", %" #o3 "}, %" #o4 ", p, 1, 1, %" #o6 "; }" \
                 : ATTNLIB_D##blocks : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(keep)), "n"(static_cast<int>(by_k)))
#define ATTNLIB_WGMMA(N, blocks, o0, o1, o2, o3, o4, o5, o6) \
    template <> struct Wgmma<N> { \
        template <bool half, bool a_by_k, bool by_k> __device__ __forceinline__ static void ss(float (&d)[N / 8][4], uint64_t a, uint64_t b, bool keep) { \
            if constexpr (half) { ATTNLIB_SS(N, blocks, "f16.f16", o0, o1, o2, o3, o4); } \
            else { ATTNLIB_SS(N, blocks, "bf16.bf16", o0, o1, o2, o3, o4); } \
        } \
        template <bool half, bool by_k> __device__ __forceinline__ static void rs(float (&d)[N / 8][4], const uint32_t (&a)[4], uint64_t b, bool keep) { \
            if constexpr (half) { ATTNLIB_RS(N, blocks, "f16.f16", o0, o1, o2, o3, o4, o5, o6); } \
            else { ATTNLIB_RS(N, blocks, "bf16.bf16", o0, o1, o2, o3, o4, o5, o6); } \
        } \
    };

ATTNLIB_WGMMA(32, 2, 16, 17, 18, 19, 20, 21, 22)
ATTNLIB_WGMMA(64, 4, 32, 33, 34, 35, 36, 37, 38)
ATTNLIB_WGMMA(80, 5, 40, 41, 42, 43, 44, 45, 46)
ATTNLIB_WGMMA(96, 6, 48, 49, 50, 51, 52, 53, 54)
ATTNLIB_WGMMA(112, 7, 56, 57, 58, 59, 60, 61, 62)
ATTNLIB_WGMMA(128, 8, 64, 65, 66, 67, 68, 69, 70)
ATTNLIB_WGMMA(160, 10, 80, 81, 82, 83, 84, 85, 86)
ATTNLIB_WGMMA(176, 11, 88, 89, 90, 91, 92, 93, 94)
ATTNLIB_WGMMA(192, 12, 96, 97, 98, 99, 100, 101, 102)
ATTNLIB_WGMMA(256, 16, 128, 129, 130, 131, 132, 133, 134)

#undef ATTNLIB_WGMMA
#undef ATTNLIB_RS
#undef ATTNLIB_SS

}  // namespace attnlib::ptx
