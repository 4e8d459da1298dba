// attnlib_cuda._host: what Python needs of the CUDA driver. Importing it opens nothing and makes no context.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <memory>

#include "../common/direct.h"
#include "kernel.h"

namespace py = pybind11;
using namespace attnlib;

namespace {

// A contiguous view of bytes, bytearray, memoryview, array, numpy array or ctypes struct.
class View {
public:
    explicit View(PyObject* object) {
        if (PyObject_GetBuffer(object, &view_, PyBUF_SIMPLE) != 0) throw py::error_already_set();
    }
    ~View() { PyBuffer_Release(&view_); }
    View(const View&) = delete;
    View& operator=(const View&) = delete;
    const void* data() const { return view_.buf; }
    size_t size() const { return static_cast<size_t>(view_.len); }

private:
    Py_buffer view_;
};

unsigned extent(long long value, const char* what) {
    if (value < 0 || value > 0xFFFFFFFFLL) {
        throw std::invalid_argument(std::string(what) + ": needs 0 to 2^32 - 1, got " + std::to_string(value));
    }
    return static_cast<unsigned>(value);
}

std::shared_ptr<Kernel> load(const py::bytes& cubin, const std::string& entry, int device,
                             std::vector<std::pair<std::string, size_t>> pointers) {
    const void* image = PyBytes_AS_STRING(cubin.ptr());
    const py::gil_scoped_release release;
    return std::make_shared<Kernel>(image, entry, device, std::move(pointers));
}

void launch(Kernel& kernel, long long x, long long y, long long z, unsigned threads, uint64_t stream,
            const py::object& params, long long shared_bytes, unsigned cluster_x, unsigned cluster_y,
            unsigned cluster_z, bool programmatic) {
    const Launch what = {{extent(x, "grid.x"), extent(y, "grid.y"), extent(z, "grid.z")},
                         threads,
                         reinterpret_cast<CUstream>(stream),
                         extent(shared_bytes, "shared memory"),
                         {cluster_x, cluster_y, cluster_z},
                         programmatic};
    const View view(params.ptr());
    const py::gil_scoped_release release;  // a full launch queue blocks, and a host callback may want the GIL
    kernel.launch(what, view.data(), view.size());
}

// One launch, all but the addresses of q, k, v, out and lse.
struct DirectLaunch : Direct {
    std::shared_ptr<Kernel> kernel;
    Launch launch;
    std::string parameters;
    size_t offsets[5];

    static const char* run_on(const Direct* self, void* const address[5], int, void* stream) {
        const auto& call = *static_cast<const DirectLaunch*>(self);
        try {
            std::string parameters = call.parameters;
            for (int i = 0; i < 5; ++i) std::memcpy(&parameters[call.offsets[i]], &address[i], sizeof(void*));
            Launch launch = call.launch;
            launch.stream = static_cast<CUstream>(stream);
            call.kernel->launch(launch, parameters.data(), parameters.size());
            return nullptr;
        } catch (...) {
            return "attnlib_cuda: the launch failed";
        }
    }
};

// That launch as a capsule, for core to make it without Python.
py::capsule direct(std::shared_ptr<Kernel> kernel, const std::vector<long long>& grid, unsigned threads,
                   long long shared_bytes, const py::bytes& parameters, const std::vector<size_t>& offsets) {
    auto made = std::make_unique<DirectLaunch>();
    made->run = &DirectLaunch::run_on, made->always_lse = true;
    made->kernel = std::move(kernel);
    made->parameters = parameters;
    if (grid.size() != 3 || offsets.size() != 5) throw std::invalid_argument("direct: needs 3 extents and 5 offsets");
    made->launch = {{extent(grid[0], "grid.x"), extent(grid[1], "grid.y"), extent(grid[2], "grid.z")},
                    threads, nullptr, extent(shared_bytes, "shared memory"), {0, 0, 0}, false};
    for (size_t i = 0; i < 5; ++i) {
        if (offsets[i] + sizeof(void*) > made->parameters.size()) throw std::invalid_argument("direct: an offset lies outside");
        made->offsets[i] = offsets[i];
    }
    py::capsule capsule(static_cast<Direct*>(made.get()), kDirectName, [](PyObject* object) {
        delete static_cast<DirectLaunch*>(static_cast<Direct*>(PyCapsule_GetPointer(object, kDirectName)));
    });
    made.release();
    return capsule;
}

int driver_version() {
    int version = 0;
    const Driver& cuda = open_driver();
    cuda.check(cuda.driver_version(&version), "cuDriverGetVersion");
    return version;
}

int device_count() {
    const py::gil_scoped_release release;
    int count = 0;
    const Driver& cuda = driver();
    cuda.check(cuda.device_count(&count), "cuDeviceGetCount");
    return count;
}

std::vector<int> device_attributes(int ordinal, const std::vector<int>& ids) {
    const py::gil_scoped_release release;
    const Driver& cuda = driver();
    CUdevice device = 0;
    cuda.check(cuda.device_get(&device, ordinal), "cuDeviceGet");
    std::vector<int> values(ids.size());
    for (size_t i = 0; i < ids.size(); ++i) {
        cuda.check(cuda.device_attribute(&values[i], ids[i], device), "cuDeviceGetAttribute");
    }
    return values;
}

std::string device_name(int ordinal) {
    const Driver& cuda = driver();
    CUdevice device = 0;
    char name[256] = {};
    cuda.check(cuda.device_get(&device, ordinal), "cuDeviceGet");
    cuda.check(cuda.device_name(name, sizeof(name) - 1, device), "cuDeviceGetName");
    return name;
}

py::bytes encode_tiled(int dtype, uint64_t address, const std::vector<uint64_t>& dims,
                       const std::vector<uint64_t>& strides, const std::vector<uint32_t>& box,
                       std::vector<uint32_t> element_strides, int interleave, int swizzle, int l2_promotion,
                       int oob_fill, int device) {
    const size_t rank = dims.size();
    if (element_strides.empty()) element_strides.assign(rank, 1);
    if (rank < 1 || rank > 5 || strides.size() != rank - 1 || box.size() != rank || element_strides.size() != rank) {
        throw std::invalid_argument("a tensor map needs 1 to 5 dims, one box edge for each and one stride less");
    }
    if (address == 0) throw std::invalid_argument("a tensor map of a null pointer (a FakeTensor?)");
    const Driver& cuda = driver();
    if (cuda.encode_tiled == nullptr) {
        throw DriverError{-1, "DRIVER_TOO_OLD", "the NVIDIA driver has no cuTensorMapEncodeTiled", "dlsym"};
    }
    const ContextScope scope(cuda, primary_context(device));  // a thread that has not used CUDA has none, and the driver wants one
    TensorMap map = {};
    cuda.check(cuda.encode_tiled(&map, dtype, static_cast<uint32_t>(rank), reinterpret_cast<void*>(address),
                                 dims.data(), strides.data(), box.data(), element_strides.data(), interleave, swizzle,
                                 l2_promotion, oob_fill),
               "cuTensorMapEncodeTiled");
    return py::bytes(reinterpret_cast<const char*>(&map), sizeof(map));
}

}  // namespace

PYBIND11_MODULE(_host, m) {
    m.doc() = "The CUDA driver for attnlib: load a cubin, launch with one parameter struct, encode tensor maps.";
    static py::handle driver_error = PyErr_NewExceptionWithDoc(
        "attnlib_cuda._host.DriverError", "args: (code, name, text, call)", PyExc_RuntimeError, nullptr);
    m.attr("DriverError") = driver_error;
    py::register_exception_translator([](std::exception_ptr pointer) {
        try {
            if (pointer) std::rethrow_exception(pointer);
        } catch (const DriverError& error) {
            const py::tuple arguments = py::make_tuple(error.code, error.name, error.text, error.call);
            PyErr_SetObject(driver_error.ptr(), arguments.ptr());
        }
    });
    m.def("set_driver_library", &set_driver_library, py::arg("path"));
    m.def("driver_version", &driver_version);
    m.def("device_count", &device_count);
    m.def("device_attributes", &device_attributes, py::arg("ordinal"), py::arg("ids"));
    m.def("device_name", &device_name, py::arg("ordinal"));
    m.def("encode_tiled", &encode_tiled, py::arg("dtype"), py::arg("address"), py::arg("dims"), py::arg("strides"),
          py::arg("box"), py::arg("element_strides"), py::arg("interleave"), py::arg("swizzle"),
          py::arg("l2_promotion"), py::arg("oob_fill"), py::arg("device"));
    m.def("load", &load, py::arg("cubin"), py::arg("entry"), py::arg("device"), py::arg("pointers"));
    m.def("direct", &direct, py::arg("kernel"), py::arg("grid"), py::arg("threads"), py::arg("shared_bytes"),
          py::arg("parameters"), py::arg("offsets"));
    py::class_<Kernel, std::shared_ptr<Kernel>>(m, "Kernel")
        .def("launch", &launch)
        .def("blocks_per_sm", &Kernel::blocks_per_sm, py::call_guard<py::gil_scoped_release>())
        .def("attribute", &Kernel::attribute)
        .def("set_attribute", &Kernel::set_attribute)
        .def_property_readonly("parameter_bytes", &Kernel::parameter_bytes);
}
