"""The architectures that the kernels are compiled and checked for, as data, and why one can't be used."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from dataclasses import dataclass, replace

from attnlib.backend import Refusal, RefusalCode, Target

CHOICES = "gfx90a, gfx942, gfx950, gfx1100, gfx1201, sm_80 or later"


@dataclass(frozen=True)
class Arch:
    """What a configuration depends on. kind: cdna, rdna, nvidia or interpreter; shared_bytes is a program's limit.

    vgprs: registers a lane of one SIMD has, granule: in steps of how many they are given out, waves: at most on a SIMD.
    pool_bytes: shared memory of the `simds` SIMDs that a program may be spread over.
    """

    name: str
    kind: str
    shared_bytes: int
    multiprocessors: int
    l2_bytes: int
    warp_size: int = 32
    vgprs: int = 0
    granule: int = 0
    waves: int = 0
    pool_bytes: int = 0
    simds: int = 4

    @property
    def amd(self) -> bool:
        return self.kind in ("cdna", "rdna")


_KIB, _MIB = 1 << 10, 1 << 20
AMD = {
    "gfx90a": Arch("gfx90a", "cdna", 64 * _KIB, 104, 8 * _MIB, 64, 512, 8, 8, 64 * _KIB),
    "gfx942": Arch("gfx942", "cdna", 64 * _KIB, 304, 4 * _MIB, 64, 512, 8, 8, 64 * _KIB),
    "gfx950": Arch("gfx950", "cdna", 160 * _KIB, 256, 4 * _MIB, 64, 512, 8, 8, 160 * _KIB),
    "gfx1100": Arch("gfx1100", "rdna", 64 * _KIB, 96, 6 * _MIB, 32, 1536, 24, 16, 128 * _KIB),
    "gfx1201": Arch("gfx1201", "rdna", 64 * _KIB, 64, 8 * _MIB, 32, 1536, 24, 16, 128 * _KIB),
}
_SHARED = {80: 163, 86: 99, 87: 163, 88: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
_MULTIPROCESSORS = {80: 108, 86: 84, 89: 142, 90: 132, 100: 148, 103: 148, 120: 188}
_L2_MIB = {80: 40, 86: 6, 89: 72, 90: 50, 100: 126, 103: 126, 120: 128}
_COUSINS = {"gfx11": "gfx1100", "gfx12": "gfx1201", "gfx94": "gfx942"}


def capability_of(arch: str) -> int:
    """90 for "sm_90"; -1 for what is no NVIDIA architecture."""
    digits = arch.removeprefix("sm_").rstrip("af")
    return int(digits) if arch.startswith("sm_") and digits.isdigit() else -1


def known(name: str) -> Arch | None:
    """The architecture of that name, a typical device of it; None if the kernels are not for it."""
    if name in AMD:
        return AMD[name]
    number = capability_of(name)
    if number < 80:
        return None
    nearest = max(n for n in _SHARED if n <= number)
    return Arch(
        f"sm_{number}", "nvidia", _SHARED[nearest] * _KIB, _MULTIPROCESSORS.get(number, 64),
        _L2_MIB.get(number, 32) * _MIB,
    )  # fmt: skip


def arch_of(target: Target) -> Arch:
    """The architecture of a target that was not refused."""
    found = known(target.arch)
    if found is None:
        return Arch(target.arch, "interpreter", 1 << 30, 1, 1 << 30)
    if target.resources is None:
        return found
    own = target.resources
    return replace(found, multiprocessors=own.multiprocessors, l2_bytes=own.l2_bytes, warp_size=own.warp_size)


def interpreted() -> bool:
    """Whether Triton's interpreter is asked for, which runs the kernels on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def refusals(target: Target) -> tuple[Refusal, ...]:
    """What is missing to compile for target and, where it is present, to run there. Makes no device context."""
    found: list[Refusal] = []
    if not interpreted() and known(target.arch) is None:
        found.append(Refusal(RefusalCode.ARCH, "Triton kernels", CHOICES, target.arch, _other_arch(target.arch)))
    version = triton_version()
    if version is None:
        remedy = 'pip install "triton>=3.6,<3.10" (with a ROCm build of torch: the triton that comes with it)'
        found.append(Refusal(RefusalCode.PACKAGE, "triton", "Triton 3.6 or later", "none", remedy))
    elif version < (3, 6):
        got = ".".join(map(str, version))
        found.append(Refusal(RefusalCode.PACKAGE, "triton", "Triton 3.6 or later", got, "pip install -U triton"))
    elif target.present and not interpreted() and compiler() is None:
        remedy = "install gcc or clang, or name one in the variable CC"
        found.append(Refusal(RefusalCode.PACKAGE, "C compiler", "one for Triton's launchers", "none", remedy))
    return tuple(found)


def _other_arch(arch: str) -> str:
    for prefix, cousin in _COUSINS.items():
        if arch.startswith(prefix):
            number = ".".join((cousin[3:-2], cousin[-2], cousin[-1]))
            return f"HSA_OVERRIDE_GFX_VERSION={number} makes ROCm treat it as {cousin}; or name another backend"
    return "name another backend, cupy or reference for instance"


@functools.cache
def triton_version() -> tuple[int, ...] | None:
    """(3, 9, 0), or None without Triton; does not import it."""
    if importlib.util.find_spec("triton") is None:
        return None
    from importlib import metadata

    for name in ("triton", "pytorch-triton-rocm", "triton-rocm", "pytorch-triton"):
        try:
            text = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return tuple(int(part) for part in text.split("+")[0].split(".")[:3] if part.isdigit())
    return (3, 6)  # one without a distribution: taken at its word


def compiler() -> str | None:
    """The C compiler that Triton would call."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
