// libcuda, opened when first needed, and the primary contexts of its devices.
#pragma once

#include <stdexcept>
#include <string>

#include "cuda_driver.h"

namespace attnlib {

// Becomes attnlib_cuda._host.DriverError(code, name, text, call).
struct DriverError {
    int code;
    std::string name, text, call;
};

struct Driver {
#define ATTNLIB_MEMBER(member, symbol, parameters) CUresult(*member) parameters = nullptr;
    ATTNLIB_DRIVER_FUNCTIONS(ATTNLIB_MEMBER, ATTNLIB_MEMBER)
#undef ATTNLIB_MEMBER

    void check(CUresult result, const char* call) const {
        if (result != 0) fail(result, call);
    }
    [[noreturn]] void fail(CUresult result, const char* call) const;
};

// The library to open in place of libcuda.so.1; only before the first use (tests).
void set_driver_library(const std::string& path);

// Opened, not initialised: enough for driver_version. Throws DriverError without a driver.
const Driver& open_driver();

// Opened and cuInit done. Throws DriverError, also in a child forked after the parent's cuInit.
const Driver& driver();

// The device's primary context (torch's, too), retained once and until the process ends.
CUcontext primary_context(int device);

// Makes a context current for a scope, if it is not.
class ContextScope {
public:
    ContextScope(const Driver& driver, CUcontext context) : driver_(driver) {
        CUcontext current = nullptr;
        driver.check(driver.context_current(&current), "cuCtxGetCurrent");
        if (current != context) {
            driver.check(driver.context_push(context), "cuCtxPushCurrent");
            pushed_ = true;
        }
    }
    ~ContextScope() {
        CUcontext popped = nullptr;
        if (pushed_) driver_.context_pop(&popped);
    }
    ContextScope(const ContextScope&) = delete;
    ContextScope& operator=(const ContextScope&) = delete;

private:
    const Driver& driver_;
    bool pushed_ = false;
};

}  // namespace attnlib
