"""Why CuPy can't be used here; makes no device context."""

from __future__ import annotations

import functools
import importlib.util

from attnlib.backend import Refusal, RefusalCode, Target


def refusals(target: Target, remedy: str) -> tuple[Refusal, ...]:
    """What is missing to compile for target and, where it is present, to run there."""
    if importlib.util.find_spec("cupy") is None:
        return (Refusal(RefusalCode.PACKAGE, "CuPy", "the package cupy", "none", remedy),)
    if not target.present:
        return ()
    return _installed(target.kind, remedy)


@functools.cache
def _installed(kind: str, remedy: str) -> tuple[Refusal, ...]:
    """What the CuPy that is installed lacks for a device that is present."""
    try:
        import cupy
    except Exception as error:  # a CuPy that does not fit its CUDA fails to import in many ways
        return (Refusal(RefusalCode.PACKAGE, "CuPy", "a CuPy that can be imported", f"{error}", remedy),)
    found: list[Refusal] = []
    built = "rocm" if cupy.cuda.runtime.is_hip else "cuda"
    if built != kind:
        found.append(Refusal(RefusalCode.PACKAGE, "CuPy", f"a CuPy for {kind}", f"one for {built}", remedy))
    try:
        cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        found.append(Refusal(RefusalCode.DRIVER, "driver", "a driver that CuPy accepts", f"{error}"))
    try:
        cupy.cuda.nvrtc.getVersion()
    except Exception as error:
        found.append(Refusal(RefusalCode.PACKAGE, "NVRTC", "a compiler that CuPy finds", f"{error}", remedy))
    return tuple(found)
