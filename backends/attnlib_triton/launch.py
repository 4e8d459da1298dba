"""From a kernel and its configuration to a launch: compiled by Triton for a target, or run by its interpreter.

Kernels are compiled from an explicit description (`Spec`), the same with and without the device: what is specialised is
said here and nowhere else, so that a cache filled by `attnlib compile` is found again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attnlib import settings
from attnlib.errors import KernelError, KernelNotCached

from .archs import AMD, capability_of, interpreted
from .config import Features, Launch

_MODULES = {
    "forward": "forward", "combine": "forward", "append": "forward", "rows": "backward", "query_gradient": "backward",
    "key_gradient": "backward", "page_gradient": "backward", "bias_gradient": "backward", "sink_gradient": "backward",
}  # fmt: skip
_OPERANDS = {"Q", "K", "V", "OUT", "DOUT", "DQ", "DK", "DV", "K_NEW", "V_NEW"}
_INTS = {"Q_LENS", "KV_LENS", "NEW_LENS", "CU_Q", "CU_K", "TABLE"}
_BYTES = {"MASK", "BLOCKS"}
_FLOATS = {"factor", "cap", "keep_scale", "scale"}
_ALIGNED = _OPERANDS | {"PARTIAL", "SOURCE", "TARGET", "ROWS"}
_ROW_STRIDES = {"q", "k", "v", "do", "dq", "dk", "dv", "kn", "vn"}


@dataclass(frozen=True)
class Spec:
    """One kernel. types: element types of pointers that differ from call to call, by name.

    aligned: operands have 16-byte bases and strides. wide: strides need 64 bits. small: no operand exceeds 2 GiB.
    """

    kernel: str
    config: Features
    launch: Launch
    types: tuple[tuple[str, str], ...] = ()
    element: str = "fp16"
    aligned: bool = True
    wide: bool = False
    small: bool = True


@functools.cache
def function(kernel: str) -> Any:
    """The Triton function of a kernel."""
    module = importlib.import_module(f".kernels.{_MODULES[kernel]}", __package__)
    return getattr(module, kernel)


@functools.cache
def arguments(kernel: str) -> tuple[str, ...]:
    return tuple(function(kernel).arg_names)


def _is_pointer(name: str) -> bool:
    return name.isupper() and name != "C" and not name.endswith("_MAP")


def _box(name: str, c: Features) -> list[int]:
    """What a map [batch, heads, rows, dim] fetches at a time."""
    rows = c.block_n if name in ("K_MAP", "V_MAP") else c.block_m
    return [1, 1, rows, c.k_first if name in ("K_MAP", "Q_MAP") else c.v_first]


def _type(name: str, spec: Spec) -> str:
    if name == "C":
        return "constexpr"
    if name.endswith("_MAP"):
        return f"tensordesc<{spec.element}{_box(name, spec.config)}>" if spec.config.maps else "constexpr"
    if _is_pointer(name):
        special = dict(spec.types)
        if name in special:
            return "*" + special[name]
        if name in _OPERANDS:
            return "*" + spec.element
        return "*" + ("i32" if name in _INTS else "u8" if name in _BYTES else "i64" if name == "SEED" else "fp32")
    if name in _FLOATS:
        return "fp32"
    if name in ("rows_all", "figures_all", "elements"):
        return "i64"
    stride = name[-2:] in ("_b", "_i", "_h", "_j") and not name.startswith(("size_", "tiles_"))
    return "i64" if (stride or name == "table_row") and spec.wide else "i32"


def _attributes(spec: Spec) -> dict[tuple[int], list[list[Any]]]:
    """What the compiler may rely on, by argument."""
    size = {"fp16": 2, "bf16": 2}.get(spec.element, 4)
    found: dict[tuple[int], list[list[Any]]] = {}
    for place, name in enumerate(arguments(spec.kernel)):
        about: list[list[Any]] = []
        if spec.aligned and name in _ALIGNED:
            about.append(["tt.divisibility", 16])
        if spec.aligned and name[:-2] in _ROW_STRIDES and name[-2:] in ("_b", "_i", "_h"):
            about.append(["tt.divisibility", 16 // size])
        if name == "figures_all" or (name == "lines" and not spec.config.packed):
            about.append(["tt.divisibility", 16])
        if spec.small and _is_pointer(name):
            about.append(["tt.pointer_range", 32])
        if about:
            found[(place,)] = about
    return found


def compile(spec: Spec, arch: str) -> Any:
    """Triton's compiled kernel for an architecture, from its cache where that has it; needs no device."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = arguments(spec.kernel)
    signature = {name: _type(name, spec) for name in names}
    amd = arch in AMD
    target = GPUTarget("hip", arch, AMD[arch].warp_size) if amd else GPUTarget("cuda", capability_of(arch), 32)
    attributes = _attributes(spec if amd else dataclasses.replace(spec, small=False))
    constants = {name: 0 for name in names if signature[name] == "constexpr"} | {"C": spec.config}
    source = ASTSource(function(spec.kernel), signature, constants, attributes)
    options = {"num_warps": spec.launch.warps, "num_stages": spec.launch.stages}
    if spec.launch.registers and not amd:
        options["maxnreg"] = spec.launch.registers
    # in float32 s is rounded before m is subtracted from it, or the largest would not give exactly 1
    options["enable_fp_fusion"] = not spec.config.single
    with _cache():
        return triton.compile(source, target=target, options=options)


class _cache:
    """Triton's cache in attnlib's folder, where one is set, and nothing but the cache under ATTNLIB_JIT=never."""

    def __enter__(self) -> None:
        from triton import knobs

        now = settings.current()
        self._scope = knobs.cache.scope()
        self._scope.__enter__()
        if now.cache_dir is not None:
            knobs.cache.dir = f"{now.cache_dir}/triton"
        if now.jit == "never":
            knobs.cache.manager_class = _only_cached()

    def __exit__(self, *error: Any) -> None:
        self._scope.__exit__(*error)


def cache_folder() -> Path:
    """Where Triton keeps what it compiled."""
    from triton import knobs

    with _cache():
        return Path(knobs.cache.dir)


@functools.cache
def _only_cached() -> Any:
    from triton.runtime.cache import FileCacheManager

    class OnlyCached(FileCacheManager):  # type: ignore[misc]
        def get_group(self, filename: str) -> Any:
            found = super().get_group(filename)
            if found is None:
                raise KernelNotCached(f"{filename.removesuffix('.json')}: not in Triton's cache, and ATTNLIB_JIT=never")
            return found

    return OnlyCached


@functools.cache
def _loaded(spec: Spec, arch: str, index: int) -> Any:
    return compile(spec, arch)


def run(spec: Spec, arch: str, index: int, grid: tuple[int, int], values: Mapping[str, Any], problem: Any) -> None:
    """Launch on the current stream. values: every argument by name; tensors for pointers, None for those unused."""
    tensors = {name: x for name in arguments(spec.kernel) if isinstance(x := values.get(name), torch.Tensor)}
    places = {name: place for place, name in enumerate(tensors)}
    Bound(spec, arch, index, grid, values, places, problem)(list(tensors.values()))


@contextlib.contextmanager
def _patched() -> Iterator[None]:
    """Triton's interpreter for the length of a launch, with two things of it mended.

    It patches its language anew at every call of a helper; once a launch and module is enough. And it multiplies
    by a BLAS, whose order of summation may depend on which operand is transposed: backward would find other scores
    than forward, which plain float32 products on a GPU do not. Sums in float64, rounded once, have no order to see.
    """
    from triton.runtime import interpreter

    dot = interpreter.InterpreterBuilder.create_dot

    def summed_in_float64(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        if d.data.dtype != np.float32:
            return dot(self, a, b, d, *rest)
        product = np.matmul(a.data, b.data, dtype=np.float64)
        return interpreter.TensorHandle((product + d.data).astype(np.float32), d.dtype.scalar)

    patch, seen = interpreter._patch_lang, set()

    def once(fn: Any) -> Any:
        key = ("tl" in fn.__globals__, "core" in fn.__globals__)
        if key in seen:
            return None
        seen.add(key)
        return patch(fn)

    interpreter._patch_lang = once
    interpreter.InterpreterBuilder.create_dot = summed_in_float64
    try:
        yield
    finally:
        interpreter._patch_lang = patch
        interpreter.InterpreterBuilder.create_dot = dot


class Bound:
    """One launch with all its arguments but addresses, for any number of calls that differ in nothing else.

    values: as run() takes them; sources: for every tensor among them, by name, its place in what a call is given.
    """

    def __init__(
        self, spec: Spec, arch: str, index: int, grid: tuple[int, int], values: Mapping[str, Any],
        sources: Mapping[str, int], problem: Any,
    ) -> None:  # fmt: skip
        self._spec, self._problem = spec, problem
        self._kernel: Any = None
        names = arguments(spec.kernel)
        self._arguments = [
            spec.config if name == "C" and interpreted() else None if name in sources else values.get(name)
            for name in names
        ]
        if not interpreted():  # a null pointer, and nothing for what is compiled in
            self._arguments = [0 if _is_pointer(name) else x for name, x in zip(names, self._arguments, strict=True)]
        places = [(place, name, sources[name]) for place, name in enumerate(names) if name in sources]
        self._pointers = [(place, source) for place, name, source in places if _is_pointer(name)]
        self._maps = [
            (place, source, _Map(name, values[name], spec.config))
            for place, name, source in places
            if name.endswith("_MAP") and spec.config.maps
        ]
        if 0 not in grid:
            loaded = function(spec.kernel) if interpreted() else _loaded(spec, arch, index)
            with _named(spec, problem):
                self._kernel = loaded[grid[0], grid[1], 1]

    def __call__(self, tensors: list[torch.Tensor]) -> None:
        """Launch on the current stream."""
        if self._kernel is None:
            return
        if interpreted():
            self._interpret(tensors)
            return
        ordered = self._arguments.copy()
        for place, source in self._pointers:
            ordered[place] = tensors[source].data_ptr()
        for place, source, descriptor in self._maps:
            ordered[place] = descriptor.of(tensors[source])
        with _named(self._spec, self._problem):
            self._kernel(*ordered)

    def _interpret(self, tensors: list[torch.Tensor]) -> None:
        ordered = self._arguments.copy()
        for place, source in self._pointers:
            ordered[place] = tensors[source]
        with _patched():
            self._kernel(*map(_operand, ordered))


@contextlib.contextmanager
def _named(spec: Spec, problem: Any) -> Iterator[None]:
    """Errors of Triton or the driver as a KernelError, but for memory that ran out. Loading comes with kernel[grid]."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise KernelError(f"{spec.kernel}: {error}", problem=problem, kernel=spec.kernel) from error


class _Address:
    """What Triton asks of the tensor under a descriptor; a tensor would be kept alive by it."""

    __slots__ = ("_address", "dtype")

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self._address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self._address


class _Map:
    """A descriptor for the copy engine of an operand [batch, rows, heads, dim], as [batch, heads, rows, dim]."""

    def __init__(self, name: str, x: torch.Tensor, c: Features) -> None:
        from triton.tools.tensor_descriptor import TensorDescriptor

        heads_first = x.transpose(1, 2)
        unused = 16  # along a dimension of size 1: any stride that the copy engine takes
        strides = [
            stride if size > 1 else unused
            for size, stride in zip(heads_first.shape[:-1], heads_first.stride(), strict=False)
        ]
        self._class = TensorDescriptor
        base = _Address(x.data_ptr(), x.dtype)
        self._checked = vars(TensorDescriptor(base, list(heads_first.shape), [*strides, 1], _box(name, c)))

    def of(self, x: torch.Tensor) -> Any:
        """The descriptor of an operand of this form. Triton checks one when it is made, which takes longer."""
        found = object.__new__(self._class)
        found.__dict__.update(self._checked, base=_Address(x.data_ptr(), x.dtype))
        return found


_DUMMY = torch.zeros(1, dtype=torch.int32)


def _operand(value: Any) -> Any:
    """What the interpreter takes: it has no null pointers."""
    if value is None:
        return _DUMMY
    if isinstance(value, torch.Tensor) and value.dtype == torch.bool:
        return value.view(torch.uint8)
    return value
