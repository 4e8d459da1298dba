"""What a kernel configuration depends on, of a device that is present or only named, and why one can't be used."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from attnlib.backend import Refusal, RefusalCode, Target
from attnlib.errors import KernelError

from . import nvrtc

MIN_CAPABILITY = 75

# Architecture: first NVRTC that compiles for it; shared memory per block and per multiprocessor in KB.
_ARCHS: dict[int, tuple[tuple[int, int], int, int]] = {
    75: ((11, 0), 64, 64),
    80: ((11, 0), 163, 164),
    86: ((11, 1), 99, 100),
    87: ((11, 5), 163, 164),
    88: ((13, 0), 163, 164),
    89: ((11, 8), 99, 100),
    90: ((12, 0), 227, 228),
    100: ((12, 8), 227, 228),
    103: ((12, 9), 227, 228),
    110: ((13, 0), 227, 228),
    120: ((12, 8), 99, 100),
    121: ((12, 9), 99, 100),
}
_SPECIFIC = {90: "sm_90a"}  # wgmma and setmaxnreg exist for the exact architecture only
_SM_COUNT = {75: 40, 80: 108, 86: 84, 89: 142, 90: 132, 100: 148, 103: 148, 120: 188}
_L2_MB = {75: 4, 80: 40, 86: 6, 89: 72, 90: 50, 100: 126, 103: 126, 120: 128}
# CU_DEVICE_ATTRIBUTE_*: capability major and minor, multiprocessors, shared memory per block (opt-in) and per
# multiprocessor, registers per multiprocessor, L2 bytes.
_ATTRIBUTES = [75, 76, 16, 97, 81, 82, 38]


@dataclass(frozen=True)
class DeviceInfo:
    """arch is what kernels are compiled for ("sm_90a"); capability is 90 for 9.0; sizes are bytes."""

    arch: str
    capability: int
    sm_count: int
    smem_per_block: int
    smem_per_sm: int
    registers_per_sm: int
    l2_bytes: int
    name: str = ""


def host() -> ModuleType:
    """The compiled module. Raises ImportError when this installation has none."""
    return importlib.import_module("attnlib_cuda._host")


def capability_of(arch: str) -> int:
    """90 for "sm_90" and "sm_90a"; -1 for what is no NVIDIA architecture."""
    digits = arch.removeprefix("sm_").rstrip("af")
    return int(digits) if arch.startswith("sm_") and digits.isdigit() else -1


def compile_arch(arch: str, version: tuple[int, int] | None = None) -> str | None:
    """What to compile for to run on arch: itself, or the nearest older one of its generation that NVRTC knows."""
    wanted = capability_of(arch)
    if wanted < MIN_CAPABILITY:
        return None
    version = version or nvrtc.version()
    for number in sorted(_ARCHS, reverse=True):
        known = version is None or version >= _ARCHS[number][0]
        runs = number == wanted or (number < wanted and number // 10 == wanted // 10 and number not in _SPECIFIC)
        if known and runs:
            return _SPECIFIC.get(number, f"sm_{number}")
    return None


@functools.cache
def info(index: int) -> DeviceInfo:
    """A present device. Initialises the driver, makes no context. Raises KernelError."""
    try:
        module = host()
    except ImportError as error:
        raise KernelError(f"attnlib_cuda._host cannot be imported: {error}") from error
    try:
        values = module.device_attributes(index, _ATTRIBUTES)
        name = module.device_name(index)
    except module.DriverError as error:
        raise driver_failure(error, f"CUDA device {index}") from error
    major, minor, sm_count, per_block, per_sm, registers, l2_bytes = values
    arch = compile_arch(f"sm_{major}{minor}")
    if arch is None:
        raise KernelError(f"CUDA device {index} ({name}): NVRTC {nvrtc.version()} can't compile for sm_{major}{minor}")
    return DeviceInfo(arch, 10 * major + minor, sm_count, per_block, per_sm, registers, l2_bytes, name)


def for_arch(arch: str) -> DeviceInfo:
    """A typical device of arch, which need not be there. Raises ValueError for an architecture below sm_75."""
    chosen = compile_arch(arch, (99, 0))
    if chosen is None:
        raise ValueError(f"architecture: needs sm_{MIN_CAPABILITY} or later, known here, got {arch!r}")
    number = capability_of(chosen)
    _, per_block, per_sm = _ARCHS[number]
    l2_bytes = _L2_MB.get(number, 4) << 20
    return DeviceInfo(
        chosen, capability_of(arch), _SM_COUNT.get(number, 16), per_block << 10, per_sm << 10, 65536, l2_bytes
    )


def refusals(target: Target) -> tuple[Refusal, ...]:
    """What is missing to compile for target and, where it is present, to run there. Makes no context."""
    found: list[Refusal] = []
    version = nvrtc.version()
    number = capability_of(target.arch)
    if number < MIN_CAPABILITY:
        found.append(Refusal(RefusalCode.ARCH, "architecture", f"sm_{MIN_CAPABILITY} or later", target.arch))
    elif compile_arch(target.arch, version) is None:
        got = f"{target.arch} with NVRTC {_dotted(version)}" if version else target.arch
        found.append(Refusal(RefusalCode.ARCH, "architecture", "one that NVRTC compiles for", got, nvrtc.REMEDY))
    if version is None and not _jit_forbidden():
        found.append(Refusal(RefusalCode.PACKAGE, "NVRTC", "libnvrtc 12 or later", "none", nvrtc.REMEDY))
    try:
        module = host()
    except ImportError as error:
        remedy = "reinstall attnlib where a C++17 compiler is present"
        found.append(Refusal(RefusalCode.BUILD, "attnlib_cuda._host", "the compiled module", str(error), remedy))
        return tuple(found)
    if target.present:
        found += _driver_refusals(module, version)
    return tuple(found)


def _driver_refusals(module: ModuleType, version: tuple[int, int] | None) -> list[Refusal]:
    import torch

    found: list[Refusal] = []
    if torch.version.hip is not None:
        got = f"torch for ROCm {torch.version.hip}"
        found.append(Refusal(RefusalCode.PACKAGE, "torch", "a CUDA build of torch", got))
    try:
        driver = module.driver_version()
    except module.DriverError as error:
        found.append(Refusal(RefusalCode.DRIVER, "driver", "an NVIDIA driver", error.args[2]))
        return found
    if version is not None and driver // 1000 < version[0]:
        needs = f"one for CUDA {version[0]}.0 or later, as NVRTC is {_dotted(version)}"
        got = f"CUDA {driver // 1000}.{driver % 1000 // 10}"
        remedy = f"update the driver, or install NVRTC for CUDA {driver // 1000}"
        found.append(Refusal(RefusalCode.DRIVER, "driver", needs, got, remedy))
    return found


def driver_failure(error: Exception, kernel: str, problem: Any = None, doing: str = "") -> KernelError:
    """A DriverError of the host module as the error that users see."""
    code, name, text, call = error.args
    where = f" while {doing}" if doing else ""
    about = f"\nproblem: {problem}" if problem is not None else ""
    return KernelError(f"{kernel}: {call}{where}: {name} ({text}){about}", problem=problem, kernel=kernel, code=code)


def _jit_forbidden() -> bool:
    from attnlib import settings

    return settings.current().jit == "never"


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
