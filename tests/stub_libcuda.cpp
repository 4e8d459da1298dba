// A libcuda without a GPU: answers what attnlib's host module calls, writes down how it was called, fails on request.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

std::mutex mutex;
std::string text;
bool quiet = false;
std::map<std::string, int> failures;
std::map<int, int> retained;
size_t parameter_bytes = 16;
int static_shared = 1024;
int capture_mode = 0;
char contexts[8];
thread_local void* stack[16];
thread_local int depth = 0;

int enter(const char* name, const std::string& detail = "") {
    const std::lock_guard<std::mutex> guard(mutex);
    const auto found = failures.find(name);
    if (!quiet) text += std::string(name) + (detail.empty() ? "" : " " + detail) + "\n";
    if (found == failures.end()) return 0;
    const int code = found->second;
    failures.erase(found);
    return code;
}

std::string hex(const void* data, size_t bytes) {
    std::string out;
    char two[3];
    for (size_t i = 0; i < bytes; ++i) {
        std::snprintf(two, sizeof two, "%02x", static_cast<const unsigned char*>(data)[i]);
        out += two;
    }
    return out;
}

template <class T>
std::string list(const T* values, unsigned count) {
    std::string out;
    for (unsigned i = 0; i < count; ++i) out += (i ? "," : "") + std::to_string(values[i]);
    return out;
}

struct Config {
    unsigned grid[3], block[3], shared;
    void* stream;
    const char* attributes;
    unsigned count;
};

}  // namespace

EXPORT const char* stub_log() { return text.c_str(); }
EXPORT void stub_clear() { text.clear(); }
EXPORT void stub_quiet(int on) { quiet = on != 0; }
EXPORT void stub_fail(const char* name, int code) { failures[name] = code; }
EXPORT void stub_parameter_bytes(size_t bytes) { parameter_bytes = bytes; }
EXPORT void stub_current(int device) { stack[0] = &contexts[device], depth = 1; }
EXPORT int stub_depth() { return depth; }
EXPORT int stub_capture_mode() { return capture_mode; }

EXPORT int cuInit(unsigned) { return enter("cuInit"); }
EXPORT int cuDriverGetVersion(int* version) {
    *version = 13000;
    return 0;
}
EXPORT int cuGetErrorName(int error, const char** out) {
    *out = error == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : error == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : nullptr;
    return *out ? 0 : 1;
}
EXPORT int cuGetErrorString(int error, const char** out) {
    *out = error == 700 ? "an illegal memory access was encountered" : error == 2 ? "out of memory" : nullptr;
    return *out ? 0 : 1;
}
EXPORT int cuDeviceGetCount(int* count) {
    *count = 2;
    return 0;
}
EXPORT int cuDeviceGet(int* device, int ordinal) {
    *device = ordinal;
    return ordinal < 2 ? 0 : 101;
}
EXPORT int cuDeviceGetName(char* name, int length, int) {
    std::snprintf(name, length, "Stub");
    return 0;
}
EXPORT int cuDeviceGetAttribute(int* value, int attribute, int) {
    switch (attribute) {
        case 75: *value = 9; break;
        case 76: *value = 0; break;
        case 16: *value = 132; break;
        case 97: *value = 232448; break;
        case 81: *value = 233472; break;
        case 82: *value = 65536; break;
        case 38: *value = 50 << 20; break;
        default: return 1;
    }
    return 0;
}
EXPORT int cuDevicePrimaryCtxRetain(void** context, int device) {
    *context = &contexts[device];
    return enter("cuDevicePrimaryCtxRetain", std::to_string(device));
}
EXPORT int cuCtxGetCurrent(void** context) {
    *context = depth ? stack[depth - 1] : nullptr;
    return 0;
}
EXPORT int cuCtxPushCurrent_v2(void* context) {
    stack[depth++] = context;
    return enter("cuCtxPushCurrent", std::to_string(static_cast<char*>(context) - contexts));
}
EXPORT int cuCtxPopCurrent_v2(void** context) {
    *context = stack[--depth];
    return enter("cuCtxPopCurrent");
}
EXPORT int cuModuleLoadDataEx(void** module, const void* image, unsigned, int*, void**) {
    *module = contexts;
    return enter("cuModuleLoadDataEx", "mode=" + std::to_string(capture_mode) + " image=" + hex(image, 4));
}
EXPORT int cuModuleUnload(void*) { return enter("cuModuleUnload"); }
EXPORT int cuModuleGetFunction(void** function, void*, const char* name) {
    *function = contexts;
    return enter("cuModuleGetFunction", name);
}
EXPORT int cuFuncGetAttribute(int* value, int attribute, void*) {
    *value = attribute == 1 ? static_shared : 40;
    return 0;
}
EXPORT int cuFuncSetAttribute(void*, int attribute, int value) {
    return enter("cuFuncSetAttribute", std::to_string(attribute) + "=" + std::to_string(value));
}
EXPORT int cuFuncGetParamInfo(void*, size_t index, size_t* offset, size_t* bytes) {
    *offset = 0, *bytes = parameter_bytes;
    return index == 0 && parameter_bytes != 0 ? 0 : 1;
}
EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void*, int threads, size_t shared) {
    *blocks = 2;
    return enter("cuOccupancy", std::to_string(threads) + " " + std::to_string(shared));
}
EXPORT int cuThreadExchangeStreamCaptureMode(int* mode) {
    const int before = capture_mode;
    capture_mode = *mode, *mode = before;
    return 0;
}
EXPORT int cuLaunchKernelEx(const Config* config, void*, void** parameters, void**) {
    if (quiet && failures.empty()) return 0;
    std::string attributes;
    for (unsigned i = 0; i < config->count; ++i) {
        const char* attribute = config->attributes + 72 * i;
        int id;
        unsigned value[3];
        std::memcpy(&id, attribute, 4);
        std::memcpy(value, attribute + 8, 12);
        attributes += std::to_string(id) + ":" + list(value, id == 4 ? 3 : 1) + ";";
    }
    const void* context = depth ? stack[depth - 1] : nullptr;
    return enter("cuLaunchKernelEx",
                 "grid=" + list(config->grid, 3) + " block=" + list(config->block, 3) +
                     " smem=" + std::to_string(config->shared) +
                     " stream=" + std::to_string(reinterpret_cast<uintptr_t>(config->stream)) +
                     " attributes=" + attributes + " params=" + hex(parameters[0], parameter_bytes) +
                     " device=" + (context ? std::to_string(static_cast<const char*>(context) - contexts) : "none"));
}
EXPORT int cuTensorMapEncodeTiled(void* map, int dtype, uint32_t rank, void* address, const uint64_t* dims,
                                  const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides,
                                  int interleave, int swizzle, int l2, int oob) {
    if (depth == 0) return 201;
    std::memset(map, 0xAB, 128);
    return enter("cuTensorMapEncodeTiled",
                 std::to_string(dtype) + " " + std::to_string(reinterpret_cast<uintptr_t>(address)) + " " +
                     list(dims, rank) + " " + list(strides, rank - 1) + " " + list(box, rank) + " " +
                     list(element_strides, rank) + " " + std::to_string(interleave) + " " + std::to_string(swizzle) +
                     " " + std::to_string(l2) + " " + std::to_string(oob) +
                     (reinterpret_cast<uintptr_t>(map) % 64 ? " misaligned" : ""));
}
