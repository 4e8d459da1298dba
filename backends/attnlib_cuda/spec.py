"""What a kernel is compiled from: a root file, an entry point and a frozen Config, and the text that they become."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from . import device

_TYPES = {"float16": "attnlib::half", "bfloat16": "attnlib::bfloat16", "float32": "float", "float64": "double"}
_NAME = re.compile(r"[A-Za-z_]\w*\Z")


@dataclass(frozen=True)
class KernelSpec:
    """One kernel: where its code is, how it is named, and the configuration it is compiled for.

    file: root file in csrc/cuda. entry: name of the extern "C" function (and the head of its cache entry's name).
    config: a frozen dataclass; each field becomes a member of struct Config.
    threads, min_blocks: launch bounds (threads per block; blocks per multiprocessor to leave registers for).
    function, params: C++ names of the template and of its parameter struct.
    params_size: bytes the launcher will pass; checked against sizeof(params) at compile time (None: unchecked).
    shared: C++ constant of the bytes of shared memory it uses; checked against config.shared_bytes at compile time.
    pointers: (name, byte offset) of addresses in the struct that must not be null in any launch.
    options: further NVRTC options, one word each.
    """

    file: str
    entry: str
    config: Any
    threads: int
    min_blocks: int = 1
    function: str = "attnlib::kernel"
    params: str = "attnlib::Params"
    params_size: int | None = None
    shared: str | None = None
    pointers: tuple[tuple[str, int], ...] = ()
    options: tuple[str, ...] = ()


def render(spec: KernelSpec, arch: str) -> str:
    """The translation unit of spec, which is also its compile key. Raises TypeError for a field it can't write."""
    lines = [
        "namespace attnlib { struct half; struct bfloat16; }",
        "struct Config {",
        *(f"    {line}" for line in _members(spec, arch)),
        "};",
        f'#include "{spec.file}"',
    ]
    if spec.params_size is not None:
        text = f"params_size and struct {spec.params} differ"
        lines.append(f'static_assert(sizeof({spec.params}) == {spec.params_size}, "{text}");')
    if spec.shared is not None:
        text = f"{spec.shared} and config.shared_bytes differ"
        lines.append(f'static_assert({spec.shared} == {spec.config.shared_bytes}, "{text}");')
    lines += [
        'extern "C" __global__ void __launch_bounds__(Config::threads, Config::min_blocks)',
        f"{spec.entry}(const __grid_constant__ {spec.params} params) {{ {spec.function}<Config>(params); }}",
        "",
    ]
    return "\n".join(lines)


def _members(spec: KernelSpec, arch: str) -> Iterator[str]:
    added = {"threads": spec.threads, "min_blocks": spec.min_blocks, "arch": device.capability_of(arch)}
    values = {item.name: getattr(spec.config, item.name) for item in fields(spec.config)}
    for name, value in added.items():
        if values.setdefault(name, value) != value:
            raise ValueError(f"{spec.entry}: config.{name} is {values[name]}, but {value} is compiled for")
    for name, value in values.items():
        if not _NAME.match(name):
            raise TypeError(f"{spec.entry}: config field {name!r} is no C++ name")
        yield _member(name, value.value if isinstance(value, enum.Enum) else value)


def _member(name: str, value: Any) -> str:
    type_name = _TYPES.get(str(value).removeprefix("torch."))
    if type_name is not None:
        return f"using {name} = {type_name};"
    if isinstance(value, bool):
        return f"static constexpr bool {name} = {str(value).lower()};"
    if isinstance(value, int) and -(2**31) < value < 2**31:
        return f"static constexpr int {name} = {value};"
    if isinstance(value, int) and -(2**63) < value < 2**63:
        return f"static constexpr long long {name} = {value}LL;"
    if isinstance(value, float) and abs(value) < 3e38:
        return f"static constexpr float {name} = {value.hex()}f;"
    raise TypeError(f"config field {name}: needs an int, bool, finite float, enum of those or dtype, got {value!r}")
