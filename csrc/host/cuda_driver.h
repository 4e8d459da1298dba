// The part of the CUDA driver API that attnlib calls, declared here so that no CUDA header or toolkit is needed to
// build. Values and layouts are the driver's stable ABI (NVIDIA, "CUDA Driver API").
#pragma once

#include <cstddef>
#include <cstdint>

namespace attnlib {

using CUresult = int;  // 0 is success
using CUdevice = int;
using CUcontext = struct CUctx_st*;
using CUmodule = struct CUmod_st*;
using CUfunction = struct CUfunc_st*;
using CUstream = struct CUstream_st*;

constexpr CUresult kErrorInvalidValue = 1;
constexpr CUresult kErrorNotInitialized = 3;

enum FunctionAttribute : int {
    kFuncMaxThreadsPerBlock = 0,
    kFuncSharedSizeBytes = 1,
    kFuncLocalSizeBytes = 3,
    kFuncNumRegs = 4,
    kFuncMaxDynamicSharedBytes = 8,
    kFuncPreferredCarveout = 9,
    kFuncNonPortableClusterAllowed = 14,
};

enum LaunchAttributeId : int {
    kLaunchClusterDimension = 4,
    kLaunchProgrammaticStreamSerialization = 6,
};

struct LaunchAttribute {
    int id;
    char pad[4];
    union {
        char size[64];
        struct {
            unsigned x, y, z;
        } cluster;
        int programmatic_serialization;
    } value;
};
static_assert(sizeof(LaunchAttribute) == 72 && offsetof(LaunchAttribute, value) == 8, "CUlaunchAttribute");

struct LaunchConfig {
    unsigned grid_x, grid_y, grid_z;
    unsigned block_x, block_y, block_z;
    unsigned shared_bytes;
    CUstream stream;
    LaunchAttribute* attributes;
    unsigned num_attributes;
};
static_assert(sizeof(LaunchConfig) == 56 && offsetof(LaunchConfig, stream) == 32, "CUlaunchConfig");

struct alignas(64) TensorMap {
    uint64_t opaque[16];
};

constexpr int kCaptureModeRelaxed = 2;

// X(result, name of the C++ member, exported symbol, parameters); X_OPTIONAL: absent from older drivers.
#define ATTNLIB_DRIVER_FUNCTIONS(X, X_OPTIONAL)                                                                      \
    X(init, "cuInit", (unsigned flags))                                                                              \
    X(driver_version, "cuDriverGetVersion", (int* version))                                                          \
    X(error_name, "cuGetErrorName", (CUresult error, const char** text))                                             \
    X(error_string, "cuGetErrorString", (CUresult error, const char** text))                                         \
    X(device_count, "cuDeviceGetCount", (int* count))                                                                \
    X(device_get, "cuDeviceGet", (CUdevice* device, int ordinal))                                                    \
    X(device_name, "cuDeviceGetName", (char* name, int length, CUdevice device))                                     \
    X(device_attribute, "cuDeviceGetAttribute", (int* value, int attribute, CUdevice device))                        \
    X(primary_retain, "cuDevicePrimaryCtxRetain", (CUcontext * context, CUdevice device))                            \
    X(context_current, "cuCtxGetCurrent", (CUcontext * context))                                                     \
    X(context_push, "cuCtxPushCurrent_v2", (CUcontext context))                                                      \
    X(context_pop, "cuCtxPopCurrent_v2", (CUcontext * context))                                                      \
    X(module_load, "cuModuleLoadDataEx",                                                                             \
      (CUmodule * module, const void* image, unsigned options, int* keys, void** values))                            \
    X(module_unload, "cuModuleUnload", (CUmodule module))                                                            \
    X(module_function, "cuModuleGetFunction", (CUfunction * function, CUmodule module, const char* name))            \
    X(function_attribute, "cuFuncGetAttribute", (int* value, int attribute, CUfunction function))                    \
    X(function_set, "cuFuncSetAttribute", (CUfunction function, int attribute, int value))                           \
    X(occupancy, "cuOccupancyMaxActiveBlocksPerMultiprocessor",                                                      \
      (int* blocks, CUfunction function, int threads, size_t shared_bytes))                                          \
    X(launch, "cuLaunchKernelEx",                                                                                    \
      (const LaunchConfig* config, CUfunction function, void** parameters, void** extra))                            \
    X_OPTIONAL(capture_mode, "cuThreadExchangeStreamCaptureMode", (int* mode))                                       \
    X_OPTIONAL(parameter_info, "cuFuncGetParamInfo",                                                                 \
               (CUfunction function, size_t index, size_t* offset, size_t* bytes))                                   \
    X_OPTIONAL(encode_tiled, "cuTensorMapEncodeTiled",                                                               \
               (TensorMap * map, int dtype, uint32_t rank, void* address, const uint64_t* dims,                      \
                const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides, int interleave,       \
                int swizzle, int l2_promotion, int oob_fill))

}  // namespace attnlib
