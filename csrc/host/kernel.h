// One function of one cubin in the primary context of one device.
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "driver.h"

namespace attnlib {

struct Dim3 {
    unsigned x, y, z;
};

// All the launcher may be told; cluster {0, 0, 0} is none.
struct Launch {
    Dim3 grid;
    unsigned threads;
    CUstream stream;
    unsigned shared_bytes;
    Dim3 cluster;
    bool programmatic;
};

class Kernel {
public:
    // pointers: (name, offset in the parameter struct) of addresses that no launch may leave null.
    Kernel(const void* cubin, const std::string& entry, int device, std::vector<std::pair<std::string, size_t>> pointers);
    // The module stays loaded until the process ends: a launch may still be in flight, and at exit the driver is gone.

    void launch(const Launch& launch, const void* parameters, size_t bytes);
    int blocks_per_sm(int threads, size_t shared_bytes);
    int attribute(int id) const;
    void set_attribute(int id, int value);
    size_t parameter_bytes() const { return parameter_bytes_; }  // 0: the driver can't tell

private:
    void allow_shared(unsigned bytes);
    void allow_cluster(const Dim3& cluster);

    const Driver& cuda_;
    CUcontext context_ = nullptr;
    CUmodule module_ = nullptr;
    CUfunction function_ = nullptr;
    size_t parameter_bytes_ = 0;
    std::vector<std::pair<std::string, size_t>> pointers_;
    std::atomic<unsigned> shared_limit_{0};
    std::atomic<bool> big_cluster_{false};
    std::mutex mutex_;
};

}  // namespace attnlib
