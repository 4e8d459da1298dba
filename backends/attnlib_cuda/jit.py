"""From a kernel's configuration to a function on a device: render, compile, cache, load, launch.

    spec     = KernelSpec("forward_sm80.cuh", "forward_sm80", ForwardConfig(...), threads=128, min_blocks=1)
    source   = render(spec, "sm_90a")            # prelude + #include + extern "C" entry: the text is the compile key
    compiled = compile(spec, "sm_90a")           # cubin from the cache or from NVRTC; needs no GPU
    kernel   = load(spec, device_index)          # compiled for that device, loaded into its primary context, memoised
    kernel.launch((blocks, heads, batch), stream, params, smem_bytes, problem=problem)

What render writes, for `KernelSpec("forward_sm80.cuh", "forward_sm80", config, threads=128, params_size=352)`:

    namespace attnlib { struct half; struct bfloat16; }
    struct Config {
        using element = attnlib::half;                 // config.element = torch.float16 (or the string "float16")
        static constexpr int head_dim = 128;           // int, and any enum with int values
        static constexpr bool causal = true;           // bool
        static constexpr float cut = 0x1.8p+0f;        // float
        static constexpr int threads = 128;            // added: threads, min_blocks and arch (90 for sm_90a)
        static constexpr int min_blocks = 1;
        static constexpr int arch = 90;
    };
    #include "forward_sm80.cuh"
    static_assert(sizeof(attnlib::Params) == 352, "params_size and struct attnlib::Params differ");
    extern "C" __global__ void __launch_bounds__(Config::threads, Config::min_blocks)
    forward_sm80(const __grid_constant__ attnlib::Params params) { attnlib::kernel<Config>(params); }

So a kernel file defines, in namespace attnlib, `struct half` and `struct bfloat16` (structs, not aliases: they are
declared ahead), a parameter struct and `template <class Config> __device__ void kernel(const Params& params)`;
KernelSpec.function and KernelSpec.params name others. Dtypes render as attnlib::half, attnlib::bfloat16, float,
double. `#include "x"` is looked up beside the including file, then in csrc/cuda, then in csrc/common; system headers
do not exist. The digest covers the rendered text, the headers it reaches, the options and the architecture.

What config.py offers to `attnlib compile` (compile.py) and to ci/compile_matrix (shipped.py):

    kernels(problem: AttentionProblem, arch: str) -> Sequence[KernelSpec]   every kernel a plan for it may launch
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnlib import settings
from attnlib.errors import KernelError, KernelNotCached

from . import cache, device, nvrtc, sources
from .spec import KernelSpec as KernelSpec
from .spec import render as render

_FORMAT = 1  # of a cache entry; part of the digest
_OPTIONS = ("-std=c++17", "--device-as-default-execution-space", "--ptxas-options=-v")
_log = logging.getLogger("attnlib.jit")


@dataclass(frozen=True)
class Compiled:
    """A cubin and what ptxas said of it. Sizes in bytes; path is None for one that exists in memory only.

    spills is spill stores plus loads; warnings are ptxas's (C75xx and the like); seconds is 0 for one from a cache.
    """

    cubin: bytes = field(repr=False)
    log: str
    registers: int
    stack: int
    spills: int
    warnings: tuple[str, ...]
    path: Path | None
    seconds: float = 0.0


@dataclass(frozen=True)
class _Unit:
    """What goes into the compiler; digest is over all of it."""

    source: str
    headers: dict[str, str]
    options: tuple[str, ...]
    digest: str


def digest(spec: KernelSpec, arch: str) -> str:
    """What the cache entry is named after: hexadecimal SHA-256 of all that decides the machine code but NVRTC."""
    return _unit(spec, arch).digest


def compile(spec: KernelSpec, arch: str, problem: Any = None, *, force: bool = False) -> Compiled:
    """The cubin of spec for arch ("sm_90a"), from the cache or by NVRTC. Needs no GPU and no driver.

    force compiles anew and replaces the cache's entry. Raises KernelNotCached (with problem) when it is in no cache
    and ATTNLIB_JIT=never; KernelError when the code does not compile or NVRTC is missing.
    """
    try:
        unit = _unit(spec, arch)
    except sources.MissingSource as error:
        raise KernelError(f"{spec.entry}: {error}", problem=problem, kernel=spec.entry) from error
    if not force and (known := _known(spec, arch, unit)) is not None:
        return known
    if settings.current().jit == "never":
        raise KernelNotCached(
            f"{spec.entry} for {arch} is not in the cache and ATTNLIB_JIT=never forbids compiling it; "
            f"looked in {', '.join(map(str, cache.store().read)) or 'no folder'} for {_prefix(spec, arch, unit)}*; "
            f"`attnlib compile --arch {arch}` fills a cache\nproblem: {problem}",
            problem,
        )
    try:
        compiler = nvrtc.find()
    except nvrtc.NvrtcMissing as error:
        raise KernelError(f"{spec.entry}: {error}", problem=problem, kernel=spec.entry) from error
    name = _prefix(spec, arch, unit) + f"{compiler.version[0]}.{compiler.version[1]}"
    with cache.lock(name, lambda: not force and cache.find(name) is not None):
        if not force and (known := _known(spec, arch, unit)) is not None:
            return known
        return _build(compiler, name, spec, arch, unit, problem, force)


def load(spec: KernelSpec, device_index: int, problem: Any = None) -> LoadedKernel:
    """spec compiled and loaded on a CUDA device, once per process. Raises as compile, and KernelError."""
    key = (spec, device_index)
    kernel = _loaded.get(key)
    if kernel is None:
        with _locks.setdefault(key, threading.Lock()):
            kernel = _loaded.get(key)
            if kernel is None:
                kernel = _loaded[key] = _load(spec, device_index, problem)
    return kernel


class LoadedKernel:
    """A function in the primary context of one device."""

    __slots__ = ("_error", "_kernel", "_launch", "compiled", "device_index", "spec")

    def __init__(
        self, spec: KernelSpec, device_index: int, compiled: Compiled, kernel: Any, error: type[Exception]
    ) -> None:
        self.spec = spec
        self.device_index = device_index
        self.compiled = compiled
        self._kernel = kernel
        self._launch = kernel.launch
        self._error = error

    @property
    def registers(self) -> int:
        return self.compiled.registers

    @property
    def spills(self) -> int:
        return self.compiled.spills

    def launch(
        self, grid: tuple[int, int, int], stream: int, params: Any, smem_bytes: int,
        cluster: tuple[int, int, int] | None = None, pdl: bool = False, problem: Any = None,
    ) -> None:  # fmt: skip
        """Enqueue on stream (an address: torch.cuda.current_stream().cuda_stream; 0 is the default stream).

        params is the parameter struct (bytes, or anything contiguous with the buffer protocol). An empty grid
        launches nothing. More than 48 KB of dynamic shared memory is requested on its own. Any context may be
        current, and none. pdl: may start before the kernel ahead of it in the stream has ended
        (programmatic dependent launch), so it must execute griddepcontrol.wait before it reads that one's results.
        Raises KernelError with the driver's error name, the kernel and the problem; ValueError for a null pointer
        that spec.pointers names or a struct of the wrong size.
        """
        x, y, z = grid
        cx, cy, cz = cluster or (0, 0, 0)
        try:
            self._launch(x, y, z, self.spec.threads, stream, params, smem_bytes, cx, cy, cz, pdl)
        except self._error as error:
            what = f"launching grid {grid}, {self.spec.threads} threads, {smem_bytes} bytes of shared memory"
            raise device.driver_failure(error, self.spec.entry, problem, what) from error
        except ValueError as error:
            raise ValueError(f"{self.spec.entry}: {error}") from None

    def direct(self, grid: tuple[int, int, int], params: bytes, smem_bytes: int, offsets: Sequence[int]) -> Any:
        """A launch that lacks five addresses, at these offsets of the struct, as a capsule of csrc/common/direct.h."""
        host = device.host()
        return host.direct(self._kernel, list(grid), self.spec.threads, smem_bytes, params, list(offsets))

    def blocks_per_sm(self, smem_bytes: int) -> int:
        """How many blocks fit on a multiprocessor at once."""
        try:
            return int(self._kernel.blocks_per_sm(self.spec.threads, smem_bytes))
        except self._error as error:
            raise device.driver_failure(error, self.spec.entry) from error

    def prefer_shared(self, percent: int) -> None:
        """Ask that percent of the L1/shared memory array be shared memory (-1: the driver's choice)."""
        try:
            self._kernel.set_attribute(9, percent)  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        except self._error as error:
            raise device.driver_failure(error, self.spec.entry) from error


_loaded: dict[tuple[KernelSpec, int], LoadedKernel] = {}
_locks: dict[tuple[KernelSpec, int], threading.Lock] = {}
_in_memory: dict[str, Compiled] = {}  # those that no folder took


def reset() -> None:
    """Forget everything that was found, compiled or loaded, as a new process would."""
    _loaded.clear()
    _locks.clear()
    _in_memory.clear()
    cache.reset()
    sources.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_locks.clear)  # another thread of the parent may have held one


def _load(spec: KernelSpec, device_index: int, problem: Any) -> LoadedKernel:
    info = device.info(device_index)
    host = device.host()
    compiled = compile(spec, info.arch, problem)
    for last in (False, True):
        try:
            kernel = host.load(compiled.cubin, spec.entry, device_index, list(spec.pointers))
            return LoadedKernel(spec, device_index, compiled, kernel, host.DriverError)
        except host.DriverError as error:
            # CUDA_ERROR_INVALID_IMAGE, NO_BINARY_FOR_GPU, NOT_FOUND: a cache entry may be wrong in spite of its sums.
            if last or error.args[0] not in (200, 209, 500) or settings.current().jit == "never":
                doing = f"loading on {info.name or info.arch}"
                raise device.driver_failure(error, spec.entry, problem, doing) from error
        compiled = compile(spec, info.arch, problem, force=True)
    raise AssertionError("unreachable")


def _unit(spec: KernelSpec, arch: str) -> _Unit:
    source, roots = sources.canonical(render(spec, arch), "cuda")
    headers = sources.closure(roots)
    options = (f"--gpu-architecture={arch}", *_OPTIONS, *spec.options)
    key = json.dumps([_FORMAT, options, source, sources.digest(roots)])
    return _Unit(source, headers, options, hashlib.sha256(key.encode()).hexdigest())


def _prefix(spec: KernelSpec, arch: str, unit: _Unit) -> str:
    """An entry's name but for the version of NVRTC."""
    return f"{spec.entry}.{arch}.{unit.digest[:32]}.nvrtc"


def _known(spec: KernelSpec, arch: str, unit: _Unit) -> Compiled | None:
    """From memory or a cache; where nothing can be compiled, what another version of NVRTC made will do."""
    prefix = _prefix(spec, arch, unit)
    version = nvrtc.version()
    entry = None
    if version is not None:
        name = f"{prefix}{version[0]}.{version[1]}"
        if name in _in_memory:
            return _in_memory[name]
        entry = cache.find(name)
    if entry is None and (version is None or settings.current().jit == "never"):
        entry = cache.find_any(prefix)
    if entry is None:
        return None
    path, files, notes = entry
    try:
        if notes["arch"] != arch:
            return None
        return Compiled(files["kernel.cubin"], files["kernel.log"].decode(), **_resources(notes), path=path)
    except (KeyError, TypeError, UnicodeDecodeError):
        return None


def _resources(notes: dict[str, Any]) -> dict[str, Any]:
    return {**{key: notes[key] for key in ("registers", "stack", "spills")}, "warnings": tuple(notes["warnings"])}


def _build(
    compiler: nvrtc.Nvrtc, name: str, spec: KernelSpec, arch: str, unit: _Unit, problem: Any, force: bool
) -> Compiled:
    started = time.perf_counter()
    output = compiler.compile(unit.source, f"{spec.entry}.cu", unit.headers, unit.options)
    seconds = time.perf_counter() - started
    if not output.cubin:
        text = f"{spec.entry} does not compile for {arch} (NVRTC {compiler.version})\n{output.log}\nproblem: {problem}"
        raise KernelError(text, problem=problem, kernel=spec.entry)
    found = read_log(output.log)
    notes = {
        "arch": arch, "entry": spec.entry, "nvrtc": list(compiler.version), "options": list(unit.options),
        "seconds": round(seconds, 3), **found,
    }  # fmt: skip
    parts = [unit.source] + [f"\n#if 0  // {path}\n{text}#endif\n" for path, text in unit.headers.items()]
    files = {"kernel.cubin": output.cubin, "kernel.log": output.log.encode(), "kernel.cu": "".join(parts).encode()}
    path = cache.publish(name, files, notes, replace=force)
    made = Compiled(output.cubin, output.log, **found, path=path, seconds=seconds)
    if path is None:
        _in_memory[name] = made
    if "jit" in settings.current().log:
        _log.info("compiled %s for %s in %.2f s: %d registers, %d bytes of spills", spec.entry, arch, seconds,
                  made.registers, made.spills)  # fmt: skip
    return made


def read_log(log: str) -> dict[str, Any]:
    """Registers (the most of any function), stack and spill bytes (their sum) and ptxas's warnings."""
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    return {
        "registers": max((int(n) for n in re.findall(r"Used (\d+) registers", log)), default=0),
        "stack": sum(int(frame[0]) for frame in frames),
        "spills": sum(int(frame[1]) + int(frame[2]) for frame in frames),
        "warnings": tuple(
            line.strip() for line in log.splitlines() if re.search(r"\bC7\d{3}\b|ptxas\s+(warning|fatal|error)", line)
        ),
    }
