#include "driver.h"

#include <dlfcn.h>
#include <unistd.h>

#include <map>
#include <mutex>

namespace attnlib {
namespace {

// One lock for the rare paths. It is never held while the GIL is wanted.
std::mutex mutex;
std::string library = "libcuda.so.1";
Driver table;
bool opened = false;
pid_t initialised_by = 0;
std::map<int, CUcontext> contexts;

template <class Function>
void find(void* handle, const char* symbol, Function& member, bool required) {
    member = reinterpret_cast<Function>(dlsym(handle, symbol));
    if (member == nullptr && required) {
        throw DriverError{-1, "DRIVER_TOO_OLD", "the NVIDIA driver has no " + std::string(symbol), "dlsym"};
    }
}

const Driver& open_locked() {
    if (opened) return table;
    void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
        const char* reason = dlerror();
        throw DriverError{-1, "NO_DRIVER", std::string("no NVIDIA driver: ") + (reason ? reason : library), "dlopen"};
    }
#define ATTNLIB_REQUIRED(member, symbol, parameters) find(handle, symbol, table.member, true);
#define ATTNLIB_OPTIONAL(member, symbol, parameters) find(handle, symbol, table.member, false);
    ATTNLIB_DRIVER_FUNCTIONS(ATTNLIB_REQUIRED, ATTNLIB_OPTIONAL)
#undef ATTNLIB_REQUIRED
#undef ATTNLIB_OPTIONAL
    opened = true;
    return table;
}

const Driver& driver_locked() {
    const Driver& found = open_locked();
    const pid_t self = getpid();
    if (initialised_by == 0) {
        found.check(found.init(0), "cuInit");
        initialised_by = self;
    } else if (initialised_by != self) {
        throw DriverError{kErrorNotInitialized, "CUDA_ERROR_NOT_INITIALIZED",
                          "CUDA was used before this process was forked; start it with the spawn method", "fork"};
    }
    return found;
}

}  // namespace

void Driver::fail(CUresult result, const char* call) const {
    const char* name = nullptr;
    const char* text = nullptr;
    error_name(result, &name);
    error_string(result, &text);
    throw DriverError{result, name ? name : "CUDA_ERROR_" + std::to_string(result), text ? text : "unknown error", call};
}

void set_driver_library(const std::string& path) {
    const std::lock_guard<std::mutex> guard(mutex);
    if (opened) throw std::runtime_error("the driver library is already open");
    library = path;
}

const Driver& open_driver() {
    const std::lock_guard<std::mutex> guard(mutex);
    return open_locked();
}

const Driver& driver() {
    const std::lock_guard<std::mutex> guard(mutex);
    return driver_locked();
}

CUcontext primary_context(int device) {
    const std::lock_guard<std::mutex> guard(mutex);
    const Driver& cuda = driver_locked();
    const auto found = contexts.find(device);
    if (found != contexts.end()) return found->second;
    CUdevice handle = 0;
    CUcontext context = nullptr;
    cuda.check(cuda.device_get(&handle, device), "cuDeviceGet");
    cuda.check(cuda.primary_retain(&context, handle), "cuDevicePrimaryCtxRetain");
    contexts.emplace(device, context);
    return context;
}

}  // namespace attnlib
