#include "kernel.h"

#include <cstring>

namespace attnlib {
namespace {

constexpr unsigned kDefaultShared = 48 * 1024;  // a block's shared memory, static included, that needs no asking
constexpr unsigned kPortableCluster = 8;        // blocks

// Loading a module is allowed while a stream of this thread is being captured into a graph.
class RelaxedCapture {
public:
    explicit RelaxedCapture(const Driver& cuda) : cuda_(cuda) { swap(); }
    ~RelaxedCapture() { swap(); }
    RelaxedCapture(const RelaxedCapture&) = delete;
    RelaxedCapture& operator=(const RelaxedCapture&) = delete;

private:
    void swap() {
        if (cuda_.capture_mode != nullptr) cuda_.capture_mode(&mode_);
    }
    const Driver& cuda_;
    int mode_ = kCaptureModeRelaxed;
};

}  // namespace

Kernel::Kernel(const void* cubin, const std::string& entry, int device,
               std::vector<std::pair<std::string, size_t>> pointers)
    : cuda_(driver()), context_(primary_context(device)), pointers_(std::move(pointers)) {
    const ContextScope scope(cuda_, context_);
    const RelaxedCapture relaxed(cuda_);
    cuda_.check(cuda_.module_load(&module_, cubin, 0, nullptr, nullptr), "cuModuleLoadDataEx");
    try {
        cuda_.check(cuda_.module_function(&function_, module_, entry.c_str()), "cuModuleGetFunction");
        const int fixed = attribute(kFuncSharedSizeBytes);  // also makes a lazily loaded function resident
        shared_limit_ = fixed < static_cast<int>(kDefaultShared) ? kDefaultShared - fixed : 0;
        size_t offset = 0;
        if (cuda_.parameter_info != nullptr && cuda_.parameter_info(function_, 0, &offset, &parameter_bytes_) != 0) {
            parameter_bytes_ = 0;
        }
    } catch (...) {
        cuda_.module_unload(module_);
        throw;
    }
}

void Kernel::launch(const Launch& launch, const void* parameters, size_t bytes) {
    if (launch.grid.x == 0 || launch.grid.y == 0 || launch.grid.z == 0) return;
    if (parameter_bytes_ != 0 && bytes != parameter_bytes_) {
        throw std::invalid_argument("the kernel takes " + std::to_string(parameter_bytes_) +
                                    " bytes of parameters, got " + std::to_string(bytes));
    }
    for (const auto& pointer : pointers_) {
        uint64_t address = 0;
        if (pointer.second + sizeof(address) > bytes) {
            throw std::invalid_argument("pointer " + pointer.first + " lies outside the parameters");
        }
        std::memcpy(&address, static_cast<const char*>(parameters) + pointer.second, sizeof(address));
        if (address == 0) {
            throw std::invalid_argument(pointer.first + ": a null pointer for a tensor that is not empty (a FakeTensor?)");
        }
    }
    const ContextScope scope(cuda_, context_);
    if (launch.shared_bytes > shared_limit_.load(std::memory_order_acquire)) allow_shared(launch.shared_bytes);
    LaunchAttribute attributes[2] = {};
    unsigned count = 0;
    if (launch.cluster.x != 0) {
        allow_cluster(launch.cluster);
        attributes[count].id = kLaunchClusterDimension;
        attributes[count++].value.cluster = {launch.cluster.x, launch.cluster.y, launch.cluster.z};
    }
    if (launch.programmatic) {
        attributes[count].id = kLaunchProgrammaticStreamSerialization;
        attributes[count++].value.programmatic_serialization = 1;
    }
    const LaunchConfig config = {launch.grid.x, launch.grid.y,       launch.grid.z, launch.threads, 1,
                                 1,             launch.shared_bytes, launch.stream, attributes,     count};
    void* arguments[] = {const_cast<void*>(parameters)};
    cuda_.check(cuda_.launch(&config, function_, arguments, nullptr), "cuLaunchKernelEx");
}

int Kernel::blocks_per_sm(int threads, size_t shared_bytes) {
    const ContextScope scope(cuda_, context_);
    if (shared_bytes > shared_limit_.load(std::memory_order_acquire)) allow_shared(static_cast<unsigned>(shared_bytes));
    int blocks = 0;
    cuda_.check(cuda_.occupancy(&blocks, function_, threads, shared_bytes), "cuOccupancyMaxActiveBlocksPerMultiprocessor");
    return blocks;
}

int Kernel::attribute(int id) const {
    int value = 0;
    cuda_.check(cuda_.function_attribute(&value, id, function_), "cuFuncGetAttribute");
    return value;
}

void Kernel::set_attribute(int id, int value) {
    const ContextScope scope(cuda_, context_);
    cuda_.check(cuda_.function_set(function_, id, value), "cuFuncSetAttribute");
}

void Kernel::allow_shared(unsigned bytes) {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (bytes <= shared_limit_.load(std::memory_order_relaxed)) return;
    cuda_.check(cuda_.function_set(function_, kFuncMaxDynamicSharedBytes, static_cast<int>(bytes)),
                "cuFuncSetAttribute(MAX_DYNAMIC_SHARED_SIZE_BYTES)");
    shared_limit_.store(bytes, std::memory_order_release);
}

void Kernel::allow_cluster(const Dim3& cluster) {
    if (cluster.x * cluster.y * cluster.z <= kPortableCluster || big_cluster_.load(std::memory_order_acquire)) return;
    const std::lock_guard<std::mutex> guard(mutex_);
    cuda_.check(cuda_.function_set(function_, kFuncNonPortableClusterAllowed, 1),
                "cuFuncSetAttribute(NON_PORTABLE_CLUSTER_SIZE_ALLOWED)");
    big_cluster_.store(true, std::memory_order_release);
}

}  // namespace attnlib
