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
_GPU = Capabilities(
    device_kinds=frozenset({"rocm", "cuda"}), dtypes=_DTYPES, archs=(*archs.AMD, "sm_80+"), max_head_dim=256
)
_INTERPRETER = Capabilities(device_kinds=frozenset({"cpu"}), dtypes=_DTYPES, max_head_dim=256)


class TritonBackend(BackendBase):
    """One family. Under TRITON_INTERPRET=1 it takes CPU tensors instead, which Triton's interpreter works on."""

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
        from . import config

        arch = archs.arch_of(target)
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
        from .plan import TritonPlan

        return TritonPlan(problem, target).describe()


backend = TritonBackend()
