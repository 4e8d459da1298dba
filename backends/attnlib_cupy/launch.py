"""Kernels through CuPy: compiled by its NVRTC (or hipRTC) for the device, launched on torch's current stream.

Tensors go in as raw addresses: bfloat16 has no CuPy dtype, and nothing has to be wrapped.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import numpy as np
import torch

from attnlib.errors import KernelError

from .config import THREADS
from .params import PARAMS
from .source import Kernel, text

_DTYPES = {"Q": "<u8", "q": "<i8", "d": "<f8", "i": "<i4", "f": "<f4"}
_loaded: dict[tuple[Kernel, int, int], Any] = {}
_loading = threading.RLock()


@functools.cache
def _params_dtype() -> np.dtype[Any]:
    """SimtParams as a NumPy record, which CuPy passes to a kernel by value."""
    codes = [code for code in PARAMS.format.format if code in _DTYPES]
    formats = [_DTYPES[code] for code in codes]
    offsets = np.cumsum([0, *(np.dtype(kind).itemsize for kind in formats[:-1])]).tolist()
    return np.dtype({"names": PARAMS.names, "formats": formats, "offsets": offsets, "itemsize": PARAMS.size})


def launch(kernel: Kernel, device: torch.device, blocks: int, params: bytes, shared_bytes: int) -> None:
    """Start a kernel. Raises KernelError if it cannot be compiled, loaded or started."""
    import cupy

    index = device.index if device.index is not None else torch.cuda.current_device()
    stream = cupy.cuda.ExternalStream(torch.cuda.current_stream(index).cuda_stream, index)
    try:
        with cupy.cuda.Device(index):
            function = _loaded.get((kernel, index, shared_bytes)) or _load(cupy, kernel, index, shared_bytes)
            arguments = np.frombuffer(params, _params_dtype())
            function((blocks,), (THREADS,), (arguments,), shared_mem=shared_bytes, stream=stream)
    except Exception as error:  # CuPy's own classes, which need CuPy to be named
        raise KernelError(f"{kernel.entry}: CuPy: {type(error).__name__}: {error}", kernel=kernel.entry) from error


def _load(cupy: Any, kernel: Kernel, index: int, shared_bytes: int) -> Any:
    key = (kernel, index, shared_bytes)
    with _loading:
        if key not in _loaded:
            hip = bool(cupy.cuda.runtime.is_hip)
            module = cupy.RawModule(code=text(kernel, hip), options=("--std=c++17",), backend="nvrtc")
            function = module.get_function(kernel.entry)
            if shared_bytes > 48 << 10 and not hip:
                function.max_dynamic_shared_size_bytes = shared_bytes
            _loaded[key] = function
    return _loaded[key]
