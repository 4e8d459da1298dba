"""The text of one kernel: the files under csrc that it reaches, joined, with its configuration in front.

One file without #include, so that CuPy's cache, which hashes the text, sees every change.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from attnlib_cuda import sources

from . import config, params

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"[^\n]*\n', re.MULTILINE)
_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once[^\n]*\n", re.MULTILINE)
_TYPES = {
    torch.float16: "attnlib::half",
    torch.bfloat16: "attnlib::bfloat16",
    torch.float32: "float",
    torch.float64: "double",
}
KERNELS = {
    "forward": "forward_simt.cuh", "combine": "forward_simt.cuh", "append": "forward_simt.cuh",
    "delta": "backward_simt.cuh", "query": "backward_simt.cuh", "key": "backward_simt.cuh",
    "bias": "backward_simt.cuh", "sink": "backward_simt.cuh",
}  # fmt: skip


@dataclass(frozen=True)
class Kernel:
    """One kernel: a name in KERNELS and what it is compiled for."""

    name: str
    config: config.Rows

    @property
    def entry(self) -> str:
        return f"{self.name}_simt"


@functools.cache
def _joined(root: str) -> str:
    """A file and what it includes, each once, in the order of first use."""
    files = sources.closure((f"cuda/{root}",))
    done: set[str] = set()

    def put(path: str) -> str:
        if path in done:
            return ""
        done.add(path)
        return _INCLUDE.sub(lambda found: put(found[1]), _ONCE.sub("", files[path]))

    return put(f"cuda/{root}")


def _members(kernel: Kernel) -> Iterator[str]:
    yield f"static constexpr int threads = {config.THREADS};"
    for item in dataclasses.fields(kernel.config):
        value = getattr(kernel.config, item.name)
        if isinstance(value, torch.dtype):
            yield f"using {item.name} = {_TYPES[value]};"
        elif isinstance(value, bool):
            yield f"static constexpr bool {item.name} = {str(value).lower()};"
        else:
            yield f"static constexpr int {item.name} = {value};"


@functools.cache
def text(kernel: Kernel, hip: bool = False) -> str:
    """The translation unit of a kernel."""
    bounds = f"{config.THREADS}" if hip else f"{config.THREADS}, {kernel.config.blocks}"
    attributes = f'extern "C" __global__ void __launch_bounds__({bounds})'
    return "\n".join(
        [
            "namespace attnlib { struct half; struct bfloat16; }",
            "struct Config {",
            *(f"    {line}" for line in _members(kernel)),
            "};",
            _joined(KERNELS[kernel.name]),
            f'static_assert(sizeof(attnlib::SimtParams) == {params.PARAMS.size}, "params.py differs");',
            f"{attributes} {kernel.entry}(const attnlib::SimtParams params) {{",
            "    alignas(16) extern __shared__ unsigned char shared[];",
            f"    attnlib::{kernel.entry}_kernel<Config>(params, shared);",
            "}",
            "",
        ]
    )
