"""The compiled launcher against a stub libcuda: what it asks of the driver, and what its errors say. No GPU."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TESTS = Path(__file__).resolve().parent
CXX = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")

pytestmark = pytest.mark.skipif(sys.platform != "linux" or CXX is None, reason="needs Linux and a C++ compiler")


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed module, or one built from csrc/host where attnlib is not installed."""
    found = None
    if importlib.util.find_spec("attnlib_cuda") is not None:
        found = importlib.util.find_spec("attnlib_cuda._host")
    if found is not None and found.origin:
        return Path(found.origin)
    pybind11 = pytest.importorskip("pybind11")
    target = tmp_path_factory.mktemp("host") / f"_host{sysconfig.get_config_var('EXT_SUFFIX')}"
    sources = sorted(map(str, (ROOT / "csrc/host").glob("*.cpp")))
    includes = [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_path('include')}"]
    flags = ["-std=c++17", "-O2", "-shared", "-fPIC", "-fvisibility=hidden"]
    subprocess.run([CXX, *flags, *includes, *sources, "-ldl", "-o", str(target)], check=True)
    return target


@pytest.fixture(scope="session")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("stub") / "libcuda.so.1"
    subprocess.run(
        [CXX, "-std=c++17", "-O2", "-shared", "-fPIC", str(TESTS / "stub_libcuda.cpp"), "-o", str(target)], check=True
    )
    return target


PRELUDE = """
import ctypes, importlib.util, os, sys, threading
def module(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made
h = module("attnlib_cuda._host", sys.argv[1])
if sys.argv[2]:
    h.set_driver_library(sys.argv[2])
    stub = ctypes.CDLL(sys.argv[2])
    stub.stub_log.restype = ctypes.c_char_p
    stub.stub_parameter_bytes.argtypes = [ctypes.c_size_t]
def log():
    lines = stub.stub_log().decode().splitlines()
    stub.stub_clear()
    return lines
def raises(kind, call, *arguments):
    try:
        call(*arguments)
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")
PARAMS = (0x1000).to_bytes(8, "little") + (7).to_bytes(8, "little")
"""


def child(host: Path, stub: Path | None, code: str, timeout: int = 120) -> str:
    """Run code in a process of its own (the driver library can be chosen once) and return what it printed."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "backends"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code), str(host), str(stub or "")],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_import_opens_no_driver(host: Path) -> None:
    child(host, None, """
        assert "libcuda" not in open("/proc/self/maps").read()
        h.set_driver_library("/nonexistent/libcuda.so.1")
        for call in (h.driver_version, h.device_count, lambda: h.load(b"", "k", 0, [])):
            error = raises(h.DriverError, call)
            assert error.args[:2] == (-1, "NO_DRIVER") and "/nonexistent" in error.args[2], error.args
    """)  # fmt: skip


def test_driver_without_a_required_function(host: Path, tmp_path: Path) -> None:
    (tmp_path / "old.cpp").write_text('extern "C" int cuInit(unsigned) { return 0; }')
    old = tmp_path / "libcuda.so.1"
    subprocess.run([CXX, "-shared", "-fPIC", str(tmp_path / "old.cpp"), "-o", str(old)], check=True)
    child(host, None, f"""
        h.set_driver_library({str(old)!r})
        error = raises(h.DriverError, h.driver_version)
        assert error.args[1] == "DRIVER_TOO_OLD" and "cuDriverGetVersion" in error.args[2], error.args
    """)  # fmt: skip


def test_version_needs_no_initialisation(host: Path, stub: Path) -> None:
    child(host, stub, """
        assert h.driver_version() == 13000 and log() == []
        assert h.device_count() == 2 and log() == ["cuInit"]
        assert h.device_attributes(0, [75, 76, 16]) == [9, 0, 132] and h.device_name(1) == "Stub"
        assert log() == []   # no context was made, and cuInit ran once
        assert raises(h.DriverError, h.device_name, 5).args[0] == 101
    """)  # fmt: skip


def test_launch_records(host: Path, stub: Path) -> None:
    child(host, stub, """
        kernel = h.load(b"\\x7fELF....", "forward", 1, [])
        assert log() == ["cuInit", "cuDevicePrimaryCtxRetain 1", "cuCtxPushCurrent 1",
                         "cuModuleLoadDataEx mode=2 image=7f454c46", "cuModuleGetFunction forward", "cuCtxPopCurrent"]
        assert stub.stub_capture_mode() == 0 and stub.stub_depth() == 0 and kernel.parameter_bytes == 16
        kernel.launch(5, 6, 7, 128, 0xABC0, PARAMS, 4096, 0, 0, 0, False)
        assert log() == ["cuCtxPushCurrent 1", "cuLaunchKernelEx grid=5,6,7 block=128,1,1 smem=4096 stream=43968 "
                         "attributes= params=" + PARAMS.hex() + " device=1", "cuCtxPopCurrent"]
        stub.stub_current(1)     # as torch leaves it: nothing to push
        for params in (bytearray(PARAMS), memoryview(PARAMS), (ctypes.c_char * 16)(*PARAMS)):
            kernel.launch(1, 1, 1, 32, 0, params, 0, 0, 0, 0, False)
            (line,) = log()
            assert PARAMS.hex() in line and "stream=0 " in line
        stub.stub_current(0)     # another device is current: pushed, and put back
        kernel.launch(1, 1, 1, 32, 0, PARAMS, 0, 0, 0, 0, False)
        assert [line.split()[0] for line in log()] == ["cuCtxPushCurrent", "cuLaunchKernelEx", "cuCtxPopCurrent"]
        assert stub.stub_depth() == 1
        for grid in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
            kernel.launch(*grid, 32, 0, PARAMS, 0, 0, 0, 0, False)
        assert log() == []
        raises(ValueError, kernel.launch, -1, 1, 1, 32, 0, PARAMS, 0, 0, 0, 0, False)
    """)  # fmt: skip


def test_a_direct_launch_has_the_addresses_and_the_stream_of_its_call(host: Path, stub: Path) -> None:
    child(host, stub, """
        stub.stub_parameter_bytes(48)
        kernel = h.load(b"\\x7fELF....", "forward", 1, [("q", 0)])
        parameters = bytes(range(48))
        capsule = h.direct(kernel, [5, 6, 7], 128, 4096, parameters, [0, 8, 16, 24, 40])
        del kernel
        api = ctypes.pythonapi
        api.PyCapsule_GetPointer.restype = ctypes.c_void_p
        api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
        address = api.PyCapsule_GetPointer(capsule, b"attnlib.direct.2")
        kind = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint64), ctypes.c_int,
                                ctypes.c_void_p)
        run = kind(ctypes.c_uint64.from_address(address).value)
        assert ctypes.c_bool.from_address(address + 8).value  # lse is always written
        log()
        where = (ctypes.c_uint64 * 5)(*(0x1000 * n for n in range(1, 6)))
        assert run(address, where, 1, 0xABC0) is None
        told = bytearray(parameters)
        for offset, value in zip((0, 8, 16, 24, 40), where):
            told[offset : offset + 8] = value.to_bytes(8, "little")
        assert log()[1] == ("cuLaunchKernelEx grid=5,6,7 block=128,1,1 smem=4096 stream=43968 attributes= params="
                            + told.hex() + " device=1")
        stub.stub_fail(b"cuLaunchKernelEx", 700)
        assert b"failed" in run(address, where, 1, 0)
        assert b"failed" in run(address, (ctypes.c_uint64 * 5)(), 1, 0)  # a null pointer
        kernel = h.load(b"\\x7fELF....", "forward", 1, [])
        raises(ValueError, h.direct, kernel, [5, 6], 128, 0, parameters, [0, 8, 16, 24, 40])
        raises(ValueError, h.direct, kernel, [5, 6, 7], 128, 0, parameters, [0, 8, 16, 24, 41])
        raises(ValueError, h.direct, kernel, [5, -6, 7], 128, 0, parameters, [0, 8, 16, 24, 40])
    """)  # fmt: skip


def test_shared_memory_is_asked_for_once(host: Path, stub: Path) -> None:
    child(host, stub, """
        kernel = h.load(b"\\x7fELF", "k", 0, [])
        stub.stub_current(0)
        log()
        def asked(smem):
            kernel.launch(1, 1, 1, 32, 0, PARAMS, smem, 0, 0, 0, False)
            return [line for line in log() if line.startswith("cuFuncSetAttribute")]
        assert asked(47 * 1024) == []            # with 1 KB of static shared memory: 48 KB
        assert asked(47 * 1024 + 16) == ["cuFuncSetAttribute 8=48144"]
        assert asked(48144) == [] and asked(100) == []
        assert asked(200000) == ["cuFuncSetAttribute 8=200000"]
        assert asked(150000) == []
        stub.stub_fail(b"cuFuncSetAttribute", 1)
        error = raises(h.DriverError, asked, 240000)
        assert error.args[0] == 1 and "MAX_DYNAMIC_SHARED" in error.args[3]
        log()
        assert asked(240000) == ["cuFuncSetAttribute 8=240000"]   # a refusal is not remembered as granted
        assert kernel.blocks_per_sm(128, 1000) == 2
    """)  # fmt: skip


def test_clusters_and_programmatic_launch(host: Path, stub: Path) -> None:
    child(host, stub, """
        kernel = h.load(b"\\x7fELF", "k", 0, [])
        stub.stub_current(0)
        log()
        kernel.launch(4, 1, 1, 32, 0, PARAMS, 0, 2, 1, 1, True)
        (line,) = log()
        assert " attributes=4:2,1,1;6:1; " in line, line
        kernel.launch(16, 1, 1, 32, 0, PARAMS, 0, 16, 1, 1, False)
        kernel.launch(16, 1, 1, 32, 0, PARAMS, 0, 16, 1, 1, False)
        lines = log()
        assert lines[0] == "cuFuncSetAttribute 14=1" and len(lines) == 3   # more than 8 blocks: asked once
        kernel.launch(1, 1, 1, 32, 0, PARAMS, 0, 0, 0, 0, True)
        assert " attributes=6:1; " in log()[0]
    """)  # fmt: skip


def test_bad_parameters_are_refused_before_the_driver(host: Path, stub: Path) -> None:
    child(host, stub, """
        kernel = h.load(b"\\x7fELF", "k", 0, [("q", 0)])
        log()
        def launch(params):
            kernel.launch(1, 1, 1, 32, 0, params, 0, 0, 0, 0, False)
        assert "q: a null pointer" in str(raises(ValueError, launch, bytes(16)))
        assert "takes 16 bytes of parameters, got 24" in str(raises(ValueError, launch, PARAMS + bytes(8)))
        raises(TypeError, launch, "text")
        assert log() == []
        launch(PARAMS)
        stub.stub_parameter_bytes(0)               # an older driver can't tell the size: unchecked
        kernel = h.load(b"\\x7fELF", "k", 0, [("q", 12)])
        assert "outside" in str(raises(ValueError, launch, PARAMS))
    """)  # fmt: skip


def test_errors_carry_the_drivers_words(host: Path, stub: Path) -> None:
    child(host, stub, """
        kernel = h.load(b"\\x7fELF", "k", 0, [])
        stub.stub_fail(b"cuLaunchKernelEx", 700)
        error = raises(h.DriverError, kernel.launch, 1, 1, 1, 32, 0, PARAMS, 0, 0, 0, 0, False)
        assert error.args == (700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered",
                              "cuLaunchKernelEx"), error.args
        assert stub.stub_depth() == 0              # the context was put back
        kernel.launch(1, 1, 1, 32, 0, PARAMS, 0, 0, 0, 0, False)
        stub.stub_fail(b"cuModuleLoadDataEx", 2)
        assert raises(h.DriverError, h.load, b"\\x7fELF", "k", 0, []).args[1] == "CUDA_ERROR_OUT_OF_MEMORY"
        assert stub.stub_depth() == 0 and stub.stub_capture_mode() == 0
        log()
        stub.stub_fail(b"cuModuleGetFunction", 500)
        assert raises(h.DriverError, h.load, b"\\x7fELF", "k", 0, []).args[:2] == (500, "CUDA_ERROR_500")
        assert "cuModuleUnload" in log()
        h.load(b"\\x7fELF", "k", 0, [])            # the process stays usable
    """)  # fmt: skip


def test_threads_share_one_context(host: Path, stub: Path) -> None:
    child(host, stub, """
        start, errors = threading.Barrier(8), []
        def work(device):
            try:
                start.wait()
                kernel = h.load(b"\\x7fELF", "k", device, [])
                for i in range(200):
                    kernel.launch(1, 1, 1, 32, i, PARAMS, 50000 + 100 * i, 0, 0, 0, False)
                    assert stub.stub_depth() == 0
            except BaseException as error:
                errors.append(error)
        threads = [threading.Thread(target=work, args=(i % 2,)) for i in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert not errors, errors
        lines = log()
        assert sorted(line for line in lines if "Retain" in line) == [f"cuDevicePrimaryCtxRetain {i}" for i in (0, 1)]
        assert sum("device=0" in line for line in lines) == sum("device=1" in line for line in lines) == 800
        assert lines.count("cuInit") == 1
    """)  # fmt: skip


def test_fork_before_use_works_and_after_use_says_so(host: Path, stub: Path) -> None:
    child(host, stub, """
        def in_child(work):
            pid = os.fork()
            if pid == 0:
                try:
                    work()
                    os._exit(0)
                except BaseException as error:
                    print(error, file=sys.stderr, flush=True)
                    os._exit(1)
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert in_child(lambda: h.load(b"\\x7fELF", "k", 0, [])) == 0
        h.load(b"\\x7fELF", "k", 0, [])
        def refused():
            assert "spawn" in raises(h.DriverError, h.load, b"\\x7fELF", "k", 0, []).args[2]
        assert in_child(refused) == 0
    """)  # fmt: skip


def test_tensor_maps(host: Path, stub: Path) -> None:
    child(host, stub, """
        made = h.encode_tiled(9, 0x7000, [64, 4096, 16], [2048, 128], [64, 128, 1], [], 0, 3, 2, 0, 0)
        assert made == b"\\xab" * 128
        *_, encoded, after = log()
        assert after == "cuCtxPopCurrent"  # this thread had no context
        assert encoded == "cuTensorMapEncodeTiled 9 28672 64,4096,16 2048,128 64,128,1 1,1,1 0 3 2 0"
        assert "null pointer" in str(raises(ValueError, h.encode_tiled, 9, 0, [64], [], [64], [], 0, 3, 2, 0, 0))
        raises(ValueError, h.encode_tiled, 9, 16, [64, 64], [], [64, 64], [], 0, 3, 2, 0, 0)
        stub.stub_fail(b"cuTensorMapEncodeTiled", 1)
        raises(h.DriverError, h.encode_tiled, 9, 16, [64], [], [64], [], 0, 3, 2, 0, 0)
    """)  # fmt: skip


KERNEL = """
from dataclasses import dataclass
from pathlib import Path
from attnlib_cuda import device, jit, sources
from attnlib.errors import KernelError
sources.use(Path({csrc!r}))
@dataclass(frozen=True)
class Config:
    head_dim: int = 64
spec = jit.KernelSpec("tiny.cuh", "tiny", Config(), 128, params_size=16, pointers=(("out", 0),))
"""


@pytest.fixture
def kernel_source(tmp_path: Path) -> str:
    shutil.copytree(ROOT / "csrc/common", tmp_path / "csrc/common")
    (tmp_path / "csrc/cuda").mkdir()
    shutil.copy(TESTS / "tiny.cuh", tmp_path / "csrc/cuda/tiny.cuh")
    cache = f"import os\nos.environ['ATTNLIB_CACHE_DIR'] = {str(tmp_path / 'cache')!r}\n"
    return cache + KERNEL.format(csrc=str(tmp_path / "csrc"))


def test_loaded_kernel_from_nvrtc_to_launch(host: Path, stub: Path, kernel_source: str) -> None:
    code = """
        assert device.info(0).arch == "sm_90a" and device.info(0).smem_per_block == 232448
        kernel = jit.load(spec, 0)
        assert jit.load(spec, 0) is kernel and jit.load(spec, 1) is not kernel
        log()
        kernel.launch((2, 3, 4), 0x10, PARAMS, 60000)
        assert "cuFuncSetAttribute 8=60000" in log()
        stub.stub_fail(b"cuLaunchKernelEx", 700)
        error = raises(KernelError, kernel.launch, (2, 3, 4), 0, PARAMS, 0, None, False, "the problem")
        assert error.problem == "the problem" and error.kernel == "tiny" and error.code == 700
        for word in ("tiny", "CUDA_ERROR_ILLEGAL_ADDRESS", "illegal memory access", "the problem", "(2, 3, 4)"):
            assert word in str(error), error
        assert "tiny: out: a null pointer" in str(raises(ValueError, kernel.launch, (1, 1, 1), 0, bytes(16), 0))
        assert kernel.registers > 0 and kernel.spills == 0 and kernel.blocks_per_sm(0) == 2
        kernel.prefer_shared(100)
        assert "cuFuncSetAttribute 9=100" in log()

        jit.reset()
        stub.stub_fail(b"cuModuleLoadDataEx", 209)     # what is in the cache is not for this GPU: built again
        assert jit.load(spec, 0).compiled.seconds > 0
        jit.reset()
        stub.stub_fail(b"cuModuleLoadDataEx", 2)
        error = raises(KernelError, jit.load, spec, 0, "the problem")
        assert error.code == 2 and "loading on Stub" in str(error) and error.problem == "the problem"
        assert jit.load(spec, 0).compiled.seconds == 0
        assert raises(KernelError, device.info, 7).code == 101
    """
    child(host, stub, kernel_source + textwrap.dedent(code))


def test_threads_load_a_kernel_once(host: Path, stub: Path, kernel_source: str) -> None:
    code = """
        kernels = []
        threads = [threading.Thread(target=lambda: kernels.append(jit.load(spec, 0))) for _ in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert len(kernels) == 8 and len(set(map(id, kernels))) == 1
        assert sum("cuModuleLoadDataEx" in line for line in log()) == 1
    """
    child(host, stub, kernel_source + textwrap.dedent(code))


def test_launch_overhead(host: Path, stub: Path, kernel_source: str) -> None:
    code = """
        import time
        kernel = jit.load(spec, 0)
        stub.stub_current(0)
        stub.stub_quiet(1)
        best = 1.0
        for _ in range(60):
            start = time.perf_counter()
            for _ in range(2000):
                kernel.launch((64, 16, 2), 0x10, PARAMS, 60000)
            best = min(best, (time.perf_counter() - start) / 2000)
        print(best * 1e6)
    """
    microseconds = float(child(host, stub, kernel_source + textwrap.dedent(code)))
    print(f"launch overhead against the stub: {microseconds:.2f} us")
    assert microseconds < 1.5


def test_declarations_match_cuda_h(tmp_path: Path) -> None:
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda", *map(str, Path("/usr/local").glob("cuda-*"))]
    found = next((Path(home, "include") for home in homes if home and Path(home, "include/cuda.h").exists()), None)
    if found is None:
        pytest.skip("no cuda.h on this machine to compare with")
    names = {
        "kFuncMaxThreadsPerBlock": "CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK",
        "kFuncSharedSizeBytes": "CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES",
        "kFuncLocalSizeBytes": "CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES",
        "kFuncNumRegs": "CU_FUNC_ATTRIBUTE_NUM_REGS",
        "kFuncMaxDynamicSharedBytes": "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES",
        "kFuncPreferredCarveout": "CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT",
        "kFuncNonPortableClusterAllowed": "CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED",
        "kLaunchClusterDimension": "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION",
        "kLaunchProgrammaticStreamSerialization": "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION",
        "kCaptureModeRelaxed": "CU_STREAM_CAPTURE_MODE_RELAXED",
        "kErrorNotInitialized": "CUDA_ERROR_NOT_INITIALIZED",
    }
    checks = [f"static_assert(int(attnlib::{ours}) == int({theirs}));" for ours, theirs in names.items()]
    attributes = (75, "COMPUTE_CAPABILITY_MAJOR"), (76, "COMPUTE_CAPABILITY_MINOR"), (16, "MULTIPROCESSOR_COUNT"), (
        97, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"), (81, "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"), (
        82, "MAX_REGISTERS_PER_MULTIPROCESSOR"), (38, "L2_CACHE_SIZE")  # fmt: skip
    checks += [f"static_assert({number} == CU_DEVICE_ATTRIBUTE_{name});" for number, name in attributes]
    checks += [
        "static_assert(sizeof(attnlib::LaunchConfig) == sizeof(CUlaunchConfig));",
        "static_assert(offsetof(attnlib::LaunchConfig, stream) == offsetof(CUlaunchConfig, hStream));",
        "static_assert(offsetof(attnlib::LaunchConfig, num_attributes) == offsetof(CUlaunchConfig, numAttrs));",
        "static_assert(sizeof(attnlib::LaunchAttribute) == sizeof(CUlaunchAttribute));",
        "static_assert(offsetof(attnlib::LaunchAttribute, value) == offsetof(CUlaunchAttribute, value));",
        "static_assert(sizeof(attnlib::TensorMap) == sizeof(CUtensorMap));",
    ]
    includes = ["#include <cuda.h>", "#include <cstddef>", f'#include "{ROOT}/csrc/host/cuda_driver.h"']
    text = "\n".join([*includes, *checks])
    (tmp_path / "check.cpp").write_text(text)
    subprocess.run([CXX, "-std=c++17", "-fsyntax-only", f"-I{found}", str(tmp_path / "check.cpp")], check=True)
