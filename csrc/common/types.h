// Fixed-width integers and function qualifiers for code that g++, NVRTC and CuPy compile alike.
#pragma once

#if defined(__CUDACC_RTC__) || defined(__HIPCC_RTC__)
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
#else
#include <cstdint>
#endif

#if defined(__CUDACC__) || defined(__HIPCC__) || defined(__CUDACC_RTC__)
#define ATTNLIB_FN __host__ __device__ __forceinline__
#else
#define ATTNLIB_FN inline
#endif
