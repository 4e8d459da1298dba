"""The kernels of the cupy backend on a CPU: compiled by g++, every thread of a block a fibre. For tests only."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import attnlib_cupy
from attnlib.backend import BackendBase, Capabilities, Family, Plan, Target
from attnlib.errors import UnsupportedError
from attnlib.problem import DTYPES, AttentionProblem
from attnlib_cupy import source
from attnlib_cupy.config import THREADS
from attnlib_cupy.plan import CupyPlan
from attnlib_cupy.source import Kernel

SHIM = Path(__file__).with_name("emulated_block.h")
FLAGS = ("-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-march=native", "-ffp-contract=off")
order = 0  # 1: threads go on after a barrier in the opposite order
_loaded: dict[Kernel, Any] = {}


def _folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"attnlib-emulated-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def build(kernel: Kernel) -> Any:
    """The C function attnlib_run(params, blocks, order) of a kernel."""
    if kernel in _loaded:
        return _loaded[kernel]
    text = source.text(kernel).replace("alignas(16) extern __shared__ unsigned char shared[];", "")
    text = f"""{SHIM.read_text()}
{text}
static attnlib::SimtParams given;
extern "C" void attnlib_run(const void* params, int blocks, int order) {{
    std::memcpy(&given, params, sizeof given);
    emulated::launch(blocks, {THREADS}, order, [] {{ {kernel.entry}(given); }});
}}
"""
    name = hashlib.sha256((text + " ".join(FLAGS)).encode()).hexdigest()[:24]
    library = _folder() / f"{name}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=_folder()) as work:
            code, fresh = Path(work) / "kernel.cpp", Path(work) / "kernel.so"
            code.write_text(text)
            subprocess.run(["g++", *FLAGS, str(code), "-o", str(fresh)], check=True)
            fresh.rename(library)
    function = ctypes.CDLL(str(library)).attnlib_run
    function.argtypes = (ctypes.c_char_p, ctypes.c_int, ctypes.c_int)
    function.restype = None
    _loaded[kernel] = function
    return function


def launch(kernel: Kernel, device: torch.device, blocks: int, params: bytes, shared_bytes: int) -> None:
    assert shared_bytes <= 1 << 18
    build(kernel)(params, blocks, order)


class Emulated(BackendBase):
    """Backend "emulated": what cupy would run, on CPU tensors."""

    test_configs = attnlib_cupy.backend.test_configs
    faults = attnlib_cupy.backend.faults

    def __init__(self) -> None:
        capabilities = Capabilities(frozenset({"cpu"}), frozenset(DTYPES), max_head_dim=attnlib_cupy.MAX_HEAD_DIM)
        super().__init__("emulated", (Family("", capabilities, "the cupy backend's kernels on a CPU"),))

    def plan(
        self, problem: AttentionProblem, family: str, target: Target, config: Mapping[str, Any] | None = None
    ) -> Plan:
        try:
            return CupyPlan(problem, Target("cuda", "sm_90", present=False), launch, config)
        except ValueError as error:
            raise UnsupportedError(f"emulated: {error}") from error


backend = Emulated()
