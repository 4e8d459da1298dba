// The Python module: a Call holds the scalars, from one tuple in the order of parse_problem, and which operands there may
// be, as numbers of Operand below; they come as (address, strides) or None. Nothing of torch is known here.
#include <pybind11/pybind11.h>

#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "../common/direct.h"
#include "amx.h"
#include "pool.h"
#include "run.h"

namespace py = pybind11;

namespace attnlib {
namespace {

enum Operand {
    kQ, kK, kV, kOut, kLse, kStats, kBias, kMask, kAlibi, kSinks, kBlockMask, kQLens, kKvLens, kCuQ, kCuK, kPageTable,
    kKNew, kVNew, kNewLens, kSeed, kDout, kDlse, kDq, kDk, kDv, kDbias, kDsinks, kOperands
};

[[noreturn]] void fail(const char* what) { throw py::value_error(std::string("attnlib_cpu: ") + what); }

int64_t as_int(PyObject* x) {
    const long long value = PyLong_AsLongLong(x);
    if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
    return value;
}

struct Address {
    char* data = nullptr;
    int64_t stride[4] = {0, 0, 0, 0};
    int rank = 0;
};

Address parse(PyObject* x) {
    Address a;
    if (x == Py_None) return a;
    if (!PyTuple_Check(x) || PyTuple_GET_SIZE(x) != 2) fail("an operand is (address, strides)");
    a.data = reinterpret_cast<char*>(PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(x, 0)));
    if (PyErr_Occurred()) throw py::error_already_set();
    PyObject* strides = PyTuple_GET_ITEM(x, 1);
    if (!PyTuple_Check(strides) || PyTuple_GET_SIZE(strides) > 4) fail("strides are a tuple of at most 4");
    a.rank = static_cast<int>(PyTuple_GET_SIZE(strides));
    for (int i = 0; i < a.rank; ++i) a.stride[i] = as_int(PyTuple_GET_ITEM(strides, i));
    return a;
}

// Token rows: packed operands have no batch dimension. An empty tensor has address 0; it is never read.
View tokens(const Address& a, DType dtype) {
    View v;
    v.data = a.data;
    v.dtype = dtype;
    for (int i = 0; i < a.rank; ++i) v.stride[4 - a.rank + i] = a.stride[i];
    return v;
}
View plain(const Address& a, DType dtype) {
    View v;
    v.data = a.data;
    v.dtype = dtype;
    std::memcpy(v.stride, a.stride, sizeof(v.stride));
    return v;
}
const int32_t* ints(const Address& a, int64_t& stride) {
    stride = a.stride[0];
    return reinterpret_cast<const int32_t*>(a.data);
}

constexpr const char* kFaults[] = {"", "no_rescale", "ignore_window_left", "drop_last_partial_key_block", "head_mod",
                                   "skip_delta", "dropout_ignores_head", "leak_past_kv_len", "dv_scale",
                                   "softcap_after_bias", "sink_forgotten", "parts_unscaled"};

void parse_problem(PyObject* t, Params& p, DType& dtype, DType& bias, DType& sinks) {
    if (!PyTuple_Check(t) || PyTuple_GET_SIZE(t) != 30) fail("the problem is a tuple of 30");
    Py_ssize_t at = 0;
    auto next = [&] { return PyTuple_GET_ITEM(t, at++); };
    auto integer = [&] { return as_int(next()); };
    auto real = [&] {
        const double x = PyFloat_AsDouble(next());
        if (x == -1.0 && PyErr_Occurred()) throw py::error_already_set();
        return x;
    };
    dtype = static_cast<DType>(integer()), bias = static_cast<DType>(integer()), sinks = static_cast<DType>(integer());
    p.batch = integer(), p.seqlen_q = integer(), p.seqlen_k = integer();
    p.heads_q = integer(), p.heads_kv = integer(), p.dim = integer(), p.dim_v = integer();
    p.total_q = integer(), p.total_k = integer();
    p.scale = real(), p.softcap = real();
    p.packed = integer() != 0, p.paged = integer() != 0, p.top_left = integer() != 0;
    p.left = integer(), p.right = integer();
    p.mask_block_q = integer(), p.mask_block_k = integer();
    p.dropout_threshold = integer();
    p.num_pages = integer(), p.page_size = integer(), p.max_pages = integer(), p.new_tokens = integer();
    p.grads = integer() != 0;
    p.block_q = integer(), p.block_k = integer();
    p.fault = static_cast<Fault>(integer());
    if (p.dim < 1 || p.dim_v < 0 || p.batch < 0 || p.block_q < 0 || p.block_k < 0) fail("a size is out of range");
    if (p.heads_q > 0 && (p.heads_kv < 1 || p.heads_q % p.heads_kv != 0)) fail("num_heads_q must be a multiple of num_heads_kv");
#ifndef ATTNLIB_TEST_FAULTS
    if (p.fault != Fault::none) fail("this build carries no faults");
#endif
}

// One form of call: all but the operands, which come in the order of `which`.
struct Call {
    Params params;
    DType dtype, bias, sinks;
    int family;
    std::vector<int> which;

    Call(int family_, const py::tuple& problem, const py::tuple& which_) : family(family_) {
        if (family < 0 || family == 3 || family > kAmx || !(supported_families() >> family & 1)) fail("this machine lacks the instruction set");
        parse_problem(problem.ptr(), params, dtype, bias, sinks);
        for (const py::handle index : which_) {
            const int64_t at = as_int(index.ptr());
            if (at < 0 || at >= kOperands) fail("no such operand");
            which.push_back(static_cast<int>(at));
        }
    }

    void run(bool backward, int threads, const py::tuple& operands) const {
        const size_t count = static_cast<size_t>(PyTuple_GET_SIZE(operands.ptr()));
        if (count > which.size()) fail("too many operands");
        Params p = params;
        Address a[kOperands];
        for (size_t i = 0; i < count; ++i) a[which[i]] = parse(PyTuple_GET_ITEM(operands.ptr(), static_cast<Py_ssize_t>(i)));
        const DType real = dtype == DType::f64 ? DType::f64 : DType::f32;

        p.q = tokens(a[kQ], dtype), p.k = tokens(a[kK], dtype), p.v = tokens(a[kV], dtype), p.out = tokens(a[kOut], dtype);
        p.k_new = tokens(a[kKNew], dtype), p.v_new = tokens(a[kVNew], dtype), p.dout = tokens(a[kDout], dtype);
        p.dq = tokens(a[kDq], dtype), p.dk = tokens(a[kDk], dtype), p.dv = tokens(a[kDv], dtype);
        p.lse = plain(a[kLse], real), p.stats = plain(a[kStats], real);
        p.dlse = plain(a[kDlse], real);
        if (p.packed) p.dlse.stride[2] = a[kDlse].stride[1], p.dlse.stride[1] = a[kDlse].stride[0], p.dlse.stride[0] = 0;
        p.bias = plain(a[kBias], bias), p.dbias = plain(a[kDbias], real);
        p.mask = plain(a[kMask], DType::f32), p.block_mask = plain(a[kBlockMask], DType::f32);
        p.alibi = plain(a[kAlibi], DType::f32), p.sinks = plain(a[kSinks], sinks), p.dsinks = plain(a[kDsinks], real);
        p.stats_sum = p.heads_q * (p.packed ? p.total_q : p.batch * p.seqlen_q);
        p.q_lens = ints(a[kQLens], p.lens_stride[0]), p.kv_lens = ints(a[kKvLens], p.lens_stride[1]);
        p.new_lens = ints(a[kNewLens], p.lens_stride[2]);
        p.cu_q = ints(a[kCuQ], p.lens_stride[3]), p.cu_k = ints(a[kCuK], p.lens_stride[4]);
        p.page_table = ints(a[kPageTable], p.page_table_stride[0]), p.page_table_stride[1] = a[kPageTable].stride[1];

        const int64_t queries = p.packed ? p.total_q : p.batch * p.seqlen_q;
        if (queries * p.heads_q > 0 && (!p.q.data || !p.lse.data || (p.dim_v > 0 && !p.out.data))) fail("a null address");
        if (p.packed && (!p.cu_q || !p.cu_k)) fail("cu_seqlens are missing");
        if (p.paged && p.batch > 0 && p.max_pages > 0 && !p.page_table) fail("page_table is missing");
        if (p.dropout_threshold > 0) {
            if (!a[kSeed].data) fail("dropout_seed is missing");
            std::memcpy(&p.seed, a[kSeed].data, sizeof(p.seed));
        }
        const py::gil_scoped_release released;
        if (backward) run_backward(p, family, threads);
        else run_forward(p, family, threads);
    }

    // Forward of q, k, v, out and lse with these strides, for core to run without Python.
    py::capsule direct(const py::tuple& strides) const;
};

struct DirectCall : Direct {
    Params params;
    int family;

    static const char* forward(const Direct* self, void* const address[5], int threads, void*) {
        const auto& call = *static_cast<const DirectCall*>(self);
        try {
            Params p = call.params;
            View* const views[] = {&p.q, &p.k, &p.v, &p.out, &p.lse};
            for (int i = 0; i < 5; ++i) views[i]->data = static_cast<char*>(address[i]);
            run_forward(p, call.family, threads);
            return nullptr;
        } catch (const std::bad_alloc&) {
            return "";
        } catch (...) {
            return "attnlib_cpu: the kernel failed";
        }
    }
};

py::capsule Call::direct(const py::tuple& strides) const {
    if (strides.size() != 5) fail("strides are those of q, k, v, out and lse");
    if (params.packed || params.paged || params.dropout_threshold > 0 || params.grads) fail("a form that needs other operands");
    Address a[5];
    for (int i = 0; i < 5; ++i) a[i] = parse(py::make_tuple(0, strides[i]).ptr());
    auto made = std::make_unique<DirectCall>();
    made->run = &DirectCall::forward, made->always_lse = false;
    made->params = params, made->family = family;
    Params& p = made->params;
    p.q = tokens(a[0], dtype), p.k = tokens(a[1], dtype), p.v = tokens(a[2], dtype), p.out = tokens(a[3], dtype);
    p.lse = plain(a[4], dtype == DType::f64 ? DType::f64 : DType::f32);
    p.stats_sum = p.heads_q * p.batch * p.seqlen_q;
    py::capsule capsule(static_cast<Direct*>(made.get()), kDirectName, [](PyObject* object) {
        delete static_cast<DirectCall*>(static_cast<Direct*>(PyCapsule_GetPointer(object, kDirectName)));
    });
    made.release();
    return capsule;
}

py::dict describe(bool backward, int family, int threads, const py::tuple& problem) {
    Params p;
    DType dtype, bias, sinks;
    parse_problem(problem.ptr(), p, dtype, bias, sinks);
    p.q.dtype = dtype;
    const Cut found = cut(p, backward, family, threads);
    py::dict result;
    result["kernel"] = found.kernel;
    result["block_q"] = p.block_q;
    result["block_k"] = p.block_k;
    if (!backward) result["heads_together"] = p.share;
    if (p.chunk > 0) result["keys_of_a_unit"] = p.chunk;
    result["threads"] = found.threads;
    result["workspace_bytes"] = found.workspace;
    return result;
}

}  // namespace

#ifndef ATTNLIB_MODULE
#define ATTNLIB_MODULE _cpu
#endif

PYBIND11_MODULE(ATTNLIB_MODULE, m) {
    watch_forks();
    m.doc() = "Compiled kernels of the cpu backend; see csrc/cpu.";
    py::class_<Call>(m, "Call")
        .def(py::init<int, const py::tuple&, const py::tuple&>())
        .def("direct", &Call::direct, "direct(strides of q, k, v, out and lse): forward of plain operands, as a capsule.")
        .def("forward", [](const Call& call, int threads, const py::tuple& operands) { call.run(false, threads, operands); })
        .def("backward", [](const Call& call, int threads, const py::tuple& operands) { call.run(true, threads, operands); });
    m.def("describe", &describe, "(backward, family, threads, problem): how one direction is cut, as a dict.");
    m.def("supported_families", &supported_families, "Bits: portable, avx2, avx512, avx512bf16, amx.");
    m.def("amx", [] {
        switch (amx_state()) {
            case Amx::usable: return "usable";
            case Amx::not_built: return "not built";
            case Amx::no_processor: return "no processor";
            default: return "refused";
        }
    }, "Whether this process may use AMX, and if not, why.");
    py::tuple faults(sizeof(kFaults) / sizeof(kFaults[0]));
    for (size_t i = 0; i < faults.size(); ++i) faults[i] = py::str(kFaults[i]);
#ifdef ATTNLIB_TEST_FAULTS
    m.attr("faults") = faults;
#else
    m.attr("faults") = py::tuple();
#endif
}

}  // namespace attnlib
