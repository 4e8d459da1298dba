"""The seam between core and a backend: what a port declares, what it may refuse, what it runs.

A port is one class with a name, a tuple of families and `plan`. Core computes every refusal that follows from
declared capabilities, so that all ports word them alike; see backends/README.md.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from .problem import ALL_FEATURES, AttentionProblem, Feature, Tensors

API_VERSION = 1


class RefusalCode(enum.Enum):
    """Why a backend does not take a problem, for programs."""

    DEVICE = "device"
    ARCH = "arch"
    DTYPE = "dtype"
    HEAD_DIM = "head_dim"
    FEATURE = "feature"
    CONFIG = "config"
    PACKAGE = "package"
    BUILD = "build"
    DRIVER = "driver"
    LOAD = "load"
    OTHER = "other"


@dataclass(frozen=True)
class Refusal:
    """One reason: what it is about, what was needed, what came, and what would help."""

    code: RefusalCode
    what: str
    needs: str
    got: str
    remedy: str = ""

    def __str__(self) -> str:
        text = f"{self.what}: needs {self.needs}, got {self.got}"
        return f"{text} ({self.remedy})" if self.remedy else text


@dataclass(frozen=True)
class Resources:
    """What a present GPU says of itself, for configurations that are pure functions of problem and target."""

    multiprocessors: int
    shared_memory_per_block: int  # bytes, after opting in
    l2_bytes: int
    warp_size: int


@dataclass(frozen=True)
class Target:
    """A device to run on, present or not. kind is "cpu", "cuda" or "rocm"; arch is "x86_64", "sm_90", "gfx942"..."""

    kind: str
    arch: str
    index: int | None = None
    present: bool = True
    resources: Resources | None = None

    def __str__(self) -> str:
        where = self.kind if self.index is None else f"{self.kind}:{self.index}"
        return f"{where} ({self.arch})" + ("" if self.present else ", not present")


@dataclass(frozen=True)
class Capabilities:
    """What one kernel family takes, as data. head_dim limits hold for head_dim and head_dim_v alike.

    archs lists architecture names; "sm_80+" means that NVIDIA architecture and every later one; () means any.
    masked_nan_safe_*: a NaN in a key inside the extent but hidden from a row never reaches that row.
    """

    device_kinds: frozenset[str]
    dtypes: frozenset[torch.dtype]
    archs: tuple[str, ...] = ()
    max_head_dim: int | None = None
    features: frozenset[Feature] = ALL_FEATURES
    masked_nan_safe_forward: bool = False
    masked_nan_safe_backward: bool = False


@dataclass(frozen=True)
class Family:
    """One set of kernels inside a backend; name "" for a backend that has only one."""

    name: str
    capabilities: Capabilities
    note: str = ""


@runtime_checkable
class Plan(Protocol):
    """A configured kernel, ready to run for every problem of one signature and size class.

    One for the CPU or a CUDA device may also have `direct(problem, strides)`: given the strides of q, k, v, out and
    lse, a capsule with the entry of csrc/common/direct.h, which runs forward of those five without Python, or None. It
    is asked for right after a call of that problem.
    """

    def forward(self, problem: AttentionProblem, tensors: Tensors) -> None:
        """Fill out, lse and stats on the current stream of the tensors' device; append k_new/v_new first."""

    def backward(self, problem: AttentionProblem, tensors: Tensors) -> None:
        """Fill the gradients that are not None from dout, dlse, out, lse and stats."""


@runtime_checkable
class Backend(Protocol):
    """A port. Derive from BackendBase to have every method but `plan` by default."""

    name: str
    api_version: int

    @property
    def families(self) -> Sequence[Family]:
        """Best first."""

    def available(self, family: str, target: Target) -> tuple[Refusal, ...]:
        """What is missing to run on target (package, compiler, driver). Cheap; makes no device context.

        Where target.present is False, answer for a machine that has the device and its driver.
        """

    def check(self, problem: AttentionProblem, family: str, target: Target) -> tuple[Refusal, ...]:
        """Refusals that Capabilities can't express. May depend on problem.signature only."""

    def size_class(self, problem: AttentionProblem, family: str, target: Target) -> Hashable:
        """Which plan serves this problem among those of one signature, by pure arithmetic on any of its fields.

        Few values: at most 16 over all sequence lengths. problem.aligned is part of the key already.
        """

    def plan(
        self, problem: AttentionProblem, family: str, target: Target, config: Mapping[str, Any] | None = None
    ) -> Plan:
        """Build the plan. A config that does not fit raises UnsupportedError; it is never adjusted."""

    def describe(self, problem: AttentionProblem, family: str, target: Target) -> Mapping[str, Any]:
        """What explain prints of the chosen kernel: name, block sizes, resources. Also for a target not present."""


@dataclass
class BackendBase:
    """Defaults for a port with one family that is always available."""

    name: str
    families: Sequence[Family] = field(default_factory=tuple)
    api_version: int = API_VERSION

    def available(self, family: str, target: Target) -> tuple[Refusal, ...]:
        return ()

    def check(self, problem: AttentionProblem, family: str, target: Target) -> tuple[Refusal, ...]:
        return ()

    def size_class(self, problem: AttentionProblem, family: str, target: Target) -> Hashable:
        return None

    def describe(self, problem: AttentionProblem, family: str, target: Target) -> Mapping[str, Any]:
        return {}


def arch_matches(arch: str, patterns: Sequence[str]) -> bool:
    """Whether arch is one of patterns: a name, or "sm_80+" for sm_80 and every later NVIDIA architecture."""
    if not patterns:
        return True
    number = _sm_number(arch)
    for pattern in patterns:
        if pattern == arch:
            return True
        if pattern.endswith("+") and number is not None:
            floor = _sm_number(pattern[:-1])
            if floor is not None and number >= floor:
                return True
    return False


def _sm_number(arch: str) -> int | None:
    digits = arch.removeprefix("sm_").rstrip("af")
    return int(digits) if arch.startswith("sm_") and digits.isdigit() else None


def capability_refusals(problem: AttentionProblem, family: Family, target: Target) -> tuple[Refusal, ...]:
    """Every way in which problem exceeds what family declares, worded the same for every backend."""
    caps = family.capabilities
    found: list[Refusal] = []

    def refuse(code: RefusalCode, what: str, needs: str, got: str) -> None:
        found.append(Refusal(code, what, needs, got))

    if target.kind not in caps.device_kinds:
        refuse(RefusalCode.DEVICE, "device", " or ".join(sorted(caps.device_kinds)), target.kind)
    elif not arch_matches(target.arch, caps.archs):
        refuse(RefusalCode.ARCH, "architecture", " or ".join(caps.archs), target.arch)
    if problem.dtype not in caps.dtypes:
        names = sorted(str(d).removeprefix("torch.") for d in caps.dtypes)
        refuse(RefusalCode.DTYPE, "dtype", " or ".join(names), str(problem.dtype).removeprefix("torch."))
    if caps.max_head_dim is not None:
        for what, got in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
            if got > caps.max_head_dim:
                refuse(RefusalCode.HEAD_DIM, what, f"at most {caps.max_head_dim}", str(got))
    for feature in sorted(problem.features - caps.features, key=lambda f: f.value):
        refuse(RefusalCode.FEATURE, feature.value, "a backend with it", "a backend without it")
    return tuple(found)
