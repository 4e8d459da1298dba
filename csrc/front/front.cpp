// attnlib._front: calls of attention() whose form was seen before, found again and started without Python.
//
// A form is all of a call but what its tensors hold: shapes, strides, dtypes, devices, alignment, the plain arguments and
// what is set. Forms come in by keep(), after Python has checked such a call; find() runs a call whose form is there.
// Tensors are read through DLPack's C exchange interface, which torch publishes with a stable layout, so that this
// module is compiled against Python alone. Whatever is out of the ordinary is left to Python: find() answers None.
//
// Source: DLPack 1.3, "C exchange API", https://dmlc.github.io/dlpack/latest/.
#include <Python.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <unordered_map>
#include <vector>

#include "../common/direct.h"

namespace {

using attnlib::Direct;

// --- DLPack, as its header lays it out ---------------------------------------------------------------------------------

struct DLTensor {
    void* data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t* shape;
    int64_t* strides;
    uint64_t byte_offset;
};

struct ExchangeApi {
    uint32_t major, minor;
    ExchangeApi* older;
    void* allocate;
    void* managed_from_object;
    void* managed_to_object;
    int (*tensor_from_object)(void* object, DLTensor* out);
    int (*current_stream)(int32_t device_type, int32_t device_id, void** out);
};

constexpr int kCpu = 1, kCuda = 2;
constexpr uint8_t kFloat = 2;

// --- small things of Python --------------------------------------------------------------------------------------------

class Ref {
public:
    Ref() = default;
    explicit Ref(PyObject* owned) : object_(owned) {}
    Ref(Ref&& other) noexcept : object_(other.object_) { other.object_ = nullptr; }
    Ref& operator=(Ref&& other) noexcept {
        PyObject* old = object_;
        object_ = other.object_, other.object_ = nullptr;
        Py_XDECREF(old);
        return *this;
    }
    Ref(const Ref&) = delete;
    ~Ref() { Py_XDECREF(object_); }
    static Ref to(PyObject* borrowed) { return Ref(Py_XNewRef(borrowed)); }
    PyObject* get() const { return object_; }
    PyObject* release() {
        PyObject* object = object_;
        object_ = nullptr;
        return object;
    }
    explicit operator bool() const { return object_ != nullptr; }

private:
    PyObject* object_ = nullptr;
};

// What configure() was given. Dictionaries are those of modules, read anew at every call.
struct Surroundings {
    const ExchangeApi* api = nullptr;
    Ref tensor_type, parameter_type;
    std::vector<Ref> watchers;  // functions: true where something watches calls
    Ref grad_enabled, deterministic, num_threads;
    Ref forward_ad, settings, registry;  // dictionaries
    Ref stack;                           // what use_backend() and use_config() set for this thread
    Ref is_neg, requires_grad, new_empty_strided, run_kept;
    Ref is_meta, level_name, settings_name, names_name, token_name, generation_name, dtype_names;
};
Surroundings* around = nullptr;

// 1, 0, or -1 with an exception.
int truth_of(PyObject* function, PyObject* argument = nullptr) {
    PyObject* stack[2] = {nullptr, argument};
    const Ref answer(PyObject_Vectorcall(function, stack + 1, (argument ? 1 : 0) | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
    if (!answer) return -1;
    if (answer.get() == Py_False || answer.get() == Py_None) return 0;
    return answer.get() == Py_True ? 1 : PyObject_IsTrue(answer.get());
}

// The integer under `name`, or `missing`.
long long integer_in(const Ref& dict, const Ref& name, long long missing) {
    PyObject* value = PyDict_GetItemWithError(dict.get(), name.get());
    if (!value) return missing;
    return PyLong_AsLongLong(value);
}

// --- forms -------------------------------------------------------------------------------------------------------------

constexpr int kSpecLength = 48;
constexpr int64_t kNone = INT64_MIN;
constexpr size_t kForms = 1024;

struct Layout {
    int64_t shape[4], stride[4];
    int32_t device_type, device_id;
    uint8_t code, bits, misaligned, unused[5];
};

// No padding: compared and hashed as bytes.
struct Key {
    Layout q, k, v;
    double scale, softcap;
    int64_t left, right;
    const void* settings;
    uint8_t causal, top_left, has_scale, has_softcap, deterministic, grads, unused[2];
    char backend[kSpecLength];
};
static_assert(sizeof(Layout) == 80 && sizeof(Key) == 240 + 16 + 16 + 8 + 8 + kSpecLength, "a Key has no padding");

struct Hash {
    size_t operator()(const Key& key) const {
        uint64_t words[sizeof(Key) / 8], h = 0x9E3779B97F4A7C15u;
        std::memcpy(words, &key, sizeof(key));
        for (const uint64_t word : words) {
            h = (h ^ word) * 0xFF51AFD7ED558CCDu;
            h ^= h >> 32;
        }
        return static_cast<size_t>(h);
    }
};
struct Equal {
    bool operator()(const Key& a, const Key& b) const { return std::memcmp(&a, &b, sizeof(Key)) == 0; }
};

// What a form needs to run. Without `direct`, or where a gradient is asked for, run_kept() of Python runs it. Without a
// token the form is not for here, and is kept so that the next such call need not be looked at again.
struct Kept {
    Ref token, settings, capsule;
    const Direct* direct = nullptr;
    Ref out_shape, out_strides, lse_shape, lse_strides, lse_dtype;  // lse_dtype is null where it is q's
};

using Forms = std::unordered_map<Key, std::shared_ptr<const Kept>, Hash, Equal>;
Forms& forms = *new Forms;  // never destroyed: by then there is no interpreter
long long generation = -1;

// What this thread's last find() did not have. Only that is kept: who runs a call and changes what is set meanwhile must
// not leave the result of one state under the key of another.
struct Missed {
    Key key;
    long long generation = -2;
};
thread_local Missed missed;

void forget() {
    Forms dropped;
    dropped.swap(forms);  // what they refer to may call back while it goes
}

// --- from arguments to a key -------------------------------------------------------------------------------------------

enum Argument {
    kQ, kK, kV, kCausal, kAlignment, kWindow, kScale, kSoftcap, kBias, kMask, kAlibi, kSinks, kBlockMask, kQLens, kKvLens,
    kDropout, kSeed, kReturnLse, kDeterministic, kBackend, kArguments
};

enum Verdict { kError = -1, kOrdinary = 0, kLeave = 1 };

bool is_plain_tensor(PyObject* object) {
    const PyTypeObject* type = Py_TYPE(object);
    return type == reinterpret_cast<PyTypeObject*>(around->tensor_type.get()) ||
           type == reinterpret_cast<PyTypeObject*>(around->parameter_type.get());
}

Verdict read_tensor(PyObject* object, Layout& layout, void*& data) {
    DLTensor tensor;
    if (around->api->tensor_from_object(object, &tensor) != 0) {  // sparse, on the meta device, without memory
        PyErr_Clear();
        return kLeave;
    }
    if (tensor.ndim != 4 || !tensor.data || tensor.lanes != 1) return kLeave;
    data = static_cast<char*>(tensor.data) + tensor.byte_offset;
    std::memcpy(layout.shape, tensor.shape, sizeof(layout.shape));
    std::memcpy(layout.stride, tensor.strides, sizeof(layout.stride));
    layout.device_type = tensor.device_type, layout.device_id = tensor.device_id;
    layout.code = tensor.code, layout.bits = tensor.bits;
    layout.misaligned = static_cast<uint8_t>(reinterpret_cast<uintptr_t>(data) & 15);
    if (layout.device_type != kCpu && layout.code == kFloat && layout.bits == 32) return kLeave;  // torch may allow TF32
    const int negative = truth_of(around->is_neg.get(), object);
    return negative < 0 ? kError : negative ? kLeave : kOrdinary;
}

Verdict read_bound(PyObject* object, int64_t& bound) {
    if (object == Py_None) return bound = kNone, kOrdinary;
    if (!PyLong_CheckExact(object)) return kLeave;
    bound = PyLong_AsLongLong(object);
    if (bound == -1 && PyErr_Occurred()) PyErr_Clear();
    return bound < 0 ? kLeave : kOrdinary;
}

Verdict read_flag(PyObject* object, uint8_t& flag) {
    if (object != Py_True && object != Py_False) return kLeave;
    flag = object == Py_True;
    return kOrdinary;
}

Verdict read_number(PyObject* object, double& number, uint8_t& given) {
    if (object == Py_None) return kOrdinary;
    if (!PyFloat_CheckExact(object)) return kLeave;
    number = PyFloat_AS_DOUBLE(object), given = 1;
    return kOrdinary;
}

Verdict read_plain(PyObject* const* args, Key& key) {
    for (const int none : {kBias, kMask, kAlibi, kSinks, kBlockMask, kQLens, kKvLens, kSeed})
        if (args[none] != Py_None) return kLeave;
    if (!PyFloat_CheckExact(args[kDropout]) || PyFloat_AS_DOUBLE(args[kDropout]) != 0.0) return kLeave;
    if (args[kReturnLse] != Py_True && args[kReturnLse] != Py_False) return kLeave;
    if (read_flag(args[kCausal], key.causal) != kOrdinary) return kLeave;
    if (!PyUnicode_CheckExact(args[kAlignment])) return kLeave;
    if (PyUnicode_CompareWithASCIIString(args[kAlignment], "bottom_right") != 0) {
        if (PyUnicode_CompareWithASCIIString(args[kAlignment], "top_left") != 0) return kLeave;
        key.top_left = 1;
    }
    key.left = key.right = kNone;
    if (args[kWindow] != Py_None) {
        if (!PyTuple_CheckExact(args[kWindow]) || PyTuple_GET_SIZE(args[kWindow]) != 2) return kLeave;
        if (read_bound(PyTuple_GET_ITEM(args[kWindow], 0), key.left) != kOrdinary) return kLeave;
        if (read_bound(PyTuple_GET_ITEM(args[kWindow], 1), key.right) != kOrdinary) return kLeave;
    }
    if (read_number(args[kScale], key.scale, key.has_scale) != kOrdinary) return kLeave;
    if (read_number(args[kSoftcap], key.softcap, key.has_softcap) != kOrdinary) return kLeave;
    if (args[kBackend] != Py_None) {
        if (!PyUnicode_CheckExact(args[kBackend])) return kLeave;
        Py_ssize_t length = 0;
        const char* text = PyUnicode_AsUTF8AndSize(args[kBackend], &length);
        if (!text) return PyErr_Clear(), kLeave;
        if (length == 0 || length >= kSpecLength || std::memchr(text, 0, static_cast<size_t>(length))) return kLeave;
        std::memcpy(key.backend, text, static_cast<size_t>(length));
    }
    return kOrdinary;
}

// Whether nothing but the arguments has a say in the call; fills in what is set.
Verdict read_surroundings(PyObject* const* args, Key& key) {
    if (integer_in(around->forward_ad, around->level_name, 0) >= 0) return kLeave;  // -1 outside forward mode
    if (PyErr_Occurred()) return kError;
    const Ref names(PyObject_GetAttr(around->stack.get(), around->names_name.get()));
    const Ref token(PyObject_GetAttr(around->stack.get(), around->token_name.get()));
    if (!names || !token) return kError;
    if (!PyList_Check(names.get()) || PyList_GET_SIZE(names.get()) != 0) return kLeave;
    if (!PyUnicode_Check(token.get()) || PyUnicode_GET_LENGTH(token.get()) != 0) return kLeave;
    key.settings = PyDict_GetItemWithError(around->settings.get(), around->settings_name.get());
    if (!key.settings || key.settings == Py_None) return PyErr_Occurred() ? kError : kLeave;
    for (const Ref& watcher : around->watchers) {
        const int watched = truth_of(watcher.get());
        if (watched != 0) return watched < 0 ? kError : kLeave;
    }
    if (args[kDeterministic] == Py_None) {
        const int asked = truth_of(around->deterministic.get());
        if (asked < 0) return kError;
        key.deterministic = static_cast<uint8_t>(asked);
    } else if (read_flag(args[kDeterministic], key.deterministic) != kOrdinary) {
        return kLeave;
    }
    const int recording = truth_of(around->grad_enabled.get());
    if (recording < 0) return kError;
    for (int i = 0; recording && i < 3; ++i) {
        const Ref needed(PyObject_GetAttr(args[i], around->requires_grad.get()));
        if (!needed) return kError;
        if (needed.get() == Py_True) key.grads |= static_cast<uint8_t>(1 << i);
    }
    return kOrdinary;
}

// Tensors last: what is wrapped by a transform, or has no memory, makes DLPack throw, which takes a millisecond.
Verdict read_call(PyObject* const* args, Key& key, void* (&address)[5]) {
    std::memset(&key, 0, sizeof(key));
    for (int i = 0; i < 3; ++i)
        if (!is_plain_tensor(args[i])) return kLeave;
    Verdict verdict = read_plain(args, key);
    if (verdict == kOrdinary) verdict = read_surroundings(args, key);
    if (verdict != kOrdinary) return verdict;
    const Ref meta(PyObject_GetAttr(args[kQ], around->is_meta.get()));
    if (!meta) return kError;
    if (meta.get() != Py_False) return kLeave;
    Layout* const layouts[] = {&key.q, &key.k, &key.v};
    for (int i = 0; verdict == kOrdinary && i < 3; ++i) verdict = read_tensor(args[i], *layouts[i], address[i]);
    return verdict;
}

bool forget_if_stale() {
    const long long now = integer_in(around->registry, around->generation_name, -1);
    if (now == -1 && PyErr_Occurred()) return false;
    if (now != generation) forget(), generation = now;
    return true;
}

// --- running -----------------------------------------------------------------------------------------------------------

// A new contiguous tensor on q's device, with its address.
Ref allocate(PyObject* q, const Ref& shape, const Ref& strides, const Ref& dtype, void*& data) {
    PyObject* stack[] = {q, shape.get(), strides.get(), dtype.get()};
    Ref made(PyObject_Vectorcall(around->new_empty_strided.get(), stack, 3, dtype ? around->dtype_names.get() : nullptr));
    DLTensor tensor;
    if (!made || around->api->tensor_from_object(made.get(), &tensor) != 0) return Ref();
    data = static_cast<char*>(tensor.data) + tensor.byte_offset;
    return made;
}

PyObject* run_in_python(const Kept& kept, PyObject* const* args) {
    PyObject* stack[] = {nullptr, kept.token.get(), args[kQ], args[kK], args[kV], args[kReturnLse]};
    return PyObject_Vectorcall(around->run_kept.get(), stack + 1, 5 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
}

PyObject* run_direct(const Kept& kept, const Layout& q, PyObject* const* args, void* (&address)[5]) {
    const bool with_lse = args[kReturnLse] == Py_True;
    Ref out = allocate(args[kQ], kept.out_shape, kept.out_strides, Ref(), address[3]);
    Ref lse;
    const bool make_lse = with_lse || kept.direct->always_lse;
    if (out && make_lse) lse = allocate(args[kQ], kept.lse_shape, kept.lse_strides, kept.lse_dtype, address[4]);
    if (!out || (make_lse && !lse)) return nullptr;
    long count = 1;
    void* stream = nullptr;
    if (q.device_type == kCuda) {
        if (around->api->current_stream(q.device_type, q.device_id, &stream) != 0) return nullptr;
    } else {
        const Ref threads(PyObject_CallNoArgs(around->num_threads.get()));
        count = threads ? PyLong_AsLong(threads.get()) : -1;
        if (count < 0) return nullptr;
    }
    const char* wrong = nullptr;
    Py_BEGIN_ALLOW_THREADS
    wrong = kept.direct->run(kept.direct, address, static_cast<int>(count), stream);
    Py_END_ALLOW_THREADS
    if (wrong && q.device_type != kCpu) return run_in_python(kept, args);  // whose error says more
    if (wrong && !*wrong) return PyErr_SetString(PyExc_MemoryError, "std::bad_alloc"), nullptr;
    if (wrong) return PyErr_Format(PyExc_RuntimeError, "%s", wrong);
    return with_lse ? PyTuple_Pack(2, out.get(), lse.get()) : out.release();
}

bool right_count(Py_ssize_t given, Py_ssize_t needed, const char* name) {
    if (!around) return PyErr_SetString(PyExc_RuntimeError, "attnlib._front: needs configure() first"), false;
    if (given != needed) return PyErr_Format(PyExc_TypeError, "%s: needs %zd arguments, got %zd", name, needed, given), false;
    return true;
}

PyObject* find(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!right_count(count, kArguments, "find")) return nullptr;
    Key key;
    void* address[5] = {nullptr, nullptr, nullptr, nullptr, nullptr};
    switch (read_call(args, key, address)) {
        case kError: return nullptr;
        case kLeave: Py_RETURN_NONE;
        case kOrdinary: break;
    }
    if (!forget_if_stale()) return nullptr;
    const auto at = forms.find(key);
    if (at == forms.end()) {
        missed.key = key, missed.generation = generation;
        Py_RETURN_FALSE;
    }
    const std::shared_ptr<const Kept> kept = at->second;  // another thread may clear the forms meanwhile
    if (!kept->token) Py_RETURN_NONE;
    if (kept->direct && !key.grads) return run_direct(*kept, key.q, args, address);
    return run_in_python(*kept, args);
}

// keep(*arguments of find, grads, deterministic, token, direct, out_shape, out_strides, lse_shape, lse_strides, lse_dtype):
// whether it was. grads and deterministic are those that the call ran with; a token of None keeps a form as not for here.
constexpr int kRest = 9;

PyObject* keep_checked(PyObject* const* args) {
    Key key;
    void* address[5];
    switch (read_call(args, key, address)) {
        case kError: return nullptr;
        case kLeave: Py_RETURN_FALSE;
        case kOrdinary: break;
    }
    auto kept = std::make_shared<Kept>();
    kept->settings = Ref::to(static_cast<PyObject*>(const_cast<void*>(key.settings)));
    if (!forget_if_stale()) return nullptr;
    PyObject* const* rest = args + kArguments;
    const long long grads = PyLong_AsLongLong(rest[0]);
    const int deterministic = PyObject_IsTrue(rest[1]);
    if ((grads == -1 && PyErr_Occurred()) || deterministic < 0) return nullptr;
    const bool same = missed.generation == generation && Equal()(missed.key, key);
    if (!same || grads != key.grads || deterministic != key.deterministic) Py_RETURN_FALSE;
    if (rest[2] != Py_None) kept->token = Ref::to(rest[2]);
    const bool runs = key.q.device_type == kCpu || (key.q.device_type == kCuda && around->api->current_stream);
    if (runs && PyCapsule_IsValid(rest[3], attnlib::kDirectName)) {
        kept->capsule = Ref::to(rest[3]);
        kept->direct = static_cast<const Direct*>(PyCapsule_GetPointer(rest[3], attnlib::kDirectName));
    }
    kept->out_shape = Ref::to(rest[4]), kept->out_strides = Ref::to(rest[5]);
    kept->lse_shape = Ref::to(rest[6]), kept->lse_strides = Ref::to(rest[7]);
    if (rest[8] != Py_None) kept->lse_dtype = Ref::to(rest[8]);
    if (forms.size() >= kForms) forget();
    std::shared_ptr<const Kept> added = std::move(kept);
    forms[key].swap(added);
    Py_RETURN_TRUE;
}

PyObject* keep(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!right_count(count, kArguments + kRest, "keep")) return nullptr;
    try {
        return keep_checked(args);
    } catch (const std::bad_alloc&) {
        return PyErr_NoMemory();
    }
}

PyObject* clear(PyObject*, PyObject*) {
    forget();
    Py_RETURN_NONE;
}

PyObject* size(PyObject*, PyObject*) { return PyLong_FromSize_t(forms.size()); }

// configure(exchange capsule, Tensor, Parameter, watchers, is_grad_enabled, deterministic, get_num_threads, dictionaries
// of forward_ad, settings and registry, dispatch's stack, is_neg, new_empty_strided, run_kept): whether it can read
// this torch.
PyObject* configure(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != 14) return PyErr_Format(PyExc_TypeError, "configure: needs 14 arguments, got %zd", count);
    if (!PyCapsule_IsValid(args[0], "dlpack_exchange_api")) Py_RETURN_FALSE;
    auto* api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(args[0], "dlpack_exchange_api"));
    if (!api || api->major != 1 || !api->tensor_from_object) Py_RETURN_FALSE;
    auto made = std::make_unique<Surroundings>();
    made->api = api;
    made->tensor_type = Ref::to(args[1]), made->parameter_type = Ref::to(args[2]);
    if (!PyTuple_Check(args[3])) return PyErr_Format(PyExc_TypeError, "configure: watchers need to be a tuple");
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[3]); ++i) made->watchers.push_back(Ref::to(PyTuple_GET_ITEM(args[3], i)));
    made->grad_enabled = Ref::to(args[4]), made->deterministic = Ref::to(args[5]), made->num_threads = Ref::to(args[6]);
    Ref* const dictionaries[] = {&made->forward_ad, &made->settings, &made->registry};
    for (int i = 0; i < 3; ++i) {
        if (!PyDict_Check(args[7 + i])) return PyErr_Format(PyExc_TypeError, "configure: argument %d needs to be a dict", 7 + i);
        *dictionaries[i] = Ref::to(args[7 + i]);
    }
    made->stack = Ref::to(args[10]);
    made->is_neg = Ref::to(args[11]), made->new_empty_strided = Ref::to(args[12]), made->run_kept = Ref::to(args[13]);
    made->requires_grad = Ref(PyUnicode_InternFromString("requires_grad"));
    made->is_meta = Ref(PyUnicode_InternFromString("is_meta"));
    made->level_name = Ref(PyUnicode_InternFromString("_current_level"));
    made->settings_name = Ref(PyUnicode_InternFromString("_current"));
    made->names_name = Ref(PyUnicode_InternFromString("names"));
    made->token_name = Ref(PyUnicode_InternFromString("token"));
    made->generation_name = Ref(PyUnicode_InternFromString("generation"));
    made->dtype_names = Ref(Py_BuildValue("(s)", "dtype"));
    if (PyErr_Occurred()) return nullptr;
    std::unique_ptr<Surroundings> old(around);
    around = made.release();
    Py_RETURN_TRUE;
}

PyMethodDef methods[] = {
    {"configure", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(configure)), METH_FASTCALL, nullptr},
    {"find", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(find)), METH_FASTCALL,
     "find(*arguments of attention): its result; False if no such form is kept; None if the call is not for here."},
    {"keep", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(keep)), METH_FASTCALL, nullptr},
    {"clear", clear, METH_NOARGS, "Forget every form."},
    {"size", size, METH_NOARGS, "How many forms are kept."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_front", "Calls of attention() of a known form, without Python.", -1,
                      methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__front() { return PyModule_Create(&module); }
