"""AMD and NVIDIA GPUs: one set of Triton kernels, with a configuration for each architecture."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any

import torch

from attnlib.backend import BackendBase, Capabilities, Family, Plan, Refusal, RefusalCode, Target
from attnlib.errors import UnsupportedError
from attnlib.problem import AttentionProblem

from . import archs

_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32})
# what explain tells of a kernel's machine code
_TOLD = ("registers", "spills", "shared_bytes", "waves", "matrix")
_UNTOLD = "not recorded; attnlib compile --json tells them"
_GPU = Capabilities(
    device_kinds=frozenset({"rocm", "cuda"}), dtypes=_DTYPES, archs=(*archs.AMD, "sm_80+"), max_head_dim=256
)
_INTERPRETER = Capabilities(device_kinds=frozenset({"cpu"}), dtypes=_DTYPES, max_head_dim=256)


class TritonBackend(BackendBase):
    """One family. Under TRITON_INTERPRET=1 it takes CPU tensors instead, which Triton's interpreter works on."""

    compiler = "attnlib_triton.compile"
    test_configs = ({"block_m": 16, "block_n": 64}, {"block_m": 64, "block_n": 32})

    def __init__(self) -> None:
        if archs.interpreted():
            family = Family("", _INTERPRETER, "Triton's interpreter, to test the kernels without a GPU")
        else:
            family = Family("", _GPU, "Triton kernels; on AMD compiled and inspected, never run")
        super().__init__("triton", (family,))

    def available(self, family: str, target: Target) -> tuple[Refusal, ...]:
        return archs.refusals(target)

    def check(self, problem: AttentionProblem, family: str, target: Target) -> tuple[Refusal, ...]:
        from . import amd, config

        arch = archs.arch_of(target)
        wide = max(config.width(problem.head_dim), config.width(problem.head_dim_v))
        if arch.amd and wide > (most := amd.limit(problem, arch)):
            name = str(problem.dtype).removeprefix("torch.")
            needs = f"at most {most} in {name} on {arch.name}" + (
                ", where there is a backward" if problem.grads else ""
            )
            remedy = f"kernels for more spill {amd.SPILLS} registers or more there; another backend: cupy or reference"
            return (Refusal(RefusalCode.HEAD_DIM, "head_dim", needs, str(wide), remedy),)
        lengths = [dataclasses.replace(problem, seqlen_q=length) for length in (16, 64, 128)]
        try:
            for one in lengths:
                config.forward(one, arch)
            for kernel in config.GRADIENTS if problem.grads else ():
                config.gradient(problem, arch, kernel)
        except ValueError as error:
            needed, _, got = str(error).removeprefix("shared memory: needs ").partition(", got ")
            remedy = "a smaller head_dim, or float16 or bfloat16"
            return (Refusal(RefusalCode.CONFIG, "shared memory", needed, got, remedy),)
        return ()

    def size_class(self, problem: AttentionProblem, family: str, target: Target) -> Hashable:
        from . import config

        left, right = problem.window
        return config.rows(problem), config.pack(problem), left is None, right is None

    def plan(
        self, problem: AttentionProblem, family: str, target: Target, config: Mapping[str, Any] | None = None
    ) -> Plan:
        from .plan import TritonPlan

        try:
            return TritonPlan(problem, target, config)
        except (TypeError, ValueError) as error:
            raise UnsupportedError(f"triton: config: {error}") from error

    def describe(self, problem: AttentionProblem, family: str, target: Target) -> Mapping[str, Any]:
        from . import compile, figures
        from .plan import TritonPlan

        found = dict(TritonPlan(problem, target).describe(problem))
        if target.arch not in archs.AMD:
            return found
        noted = compile.recorded(problem, target.arch)
        for name in ("forward", *(name for name in found if name.endswith("_gradient"))):
            told = {key: getattr(noted[name], key) for key in _TOLD} if name in noted else {"figures": _UNTOLD}
            found |= told if name == "forward" else {name: found[name] | told}
        return found | ({"compiled_by": f"Triton {figures.version()}"} if noted else {})


backend = TritonBackend()
