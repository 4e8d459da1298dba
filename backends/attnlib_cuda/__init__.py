"""NVIDIA GPUs: tensor-core kernels compiled at run time by NVRTC, for Turing and every later architecture."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

import torch

from attnlib.backend import BackendBase, Capabilities, Family, Plan, Refusal, RefusalCode, Target
from attnlib.errors import UnsupportedError
from attnlib.problem import AttentionProblem

_SM80 = Capabilities(
    device_kinds=frozenset({"cuda"}),
    dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32}),
    archs=("sm_80+",),
    max_head_dim=256,
)
_SM90 = replace(_SM80, archs=("sm_90",))
_SM75 = Capabilities(
    device_kinds=frozenset({"cuda"}), dtypes=frozenset({torch.float16}), archs=("sm_75",), max_head_dim=256
)


def _room(problem: AttentionProblem, target: Target) -> list[Refusal]:
    """Whether some tile shape fits the device's shared memory."""
    from . import config, device

    try:
        info = device.info(target.index or 0) if target.present else device.for_arch(target.arch)
        config.forward(problem, info)
        if problem.grads:
            config.backward(problem, info)
    except ValueError as error:
        what, _, rest = str(error).partition(": needs ")
        needs, _, got = rest.partition(", got ")
        return [Refusal(RefusalCode.CONFIG, what, needs or "a tile shape that fits", got or str(error))]
    return []


class CudaBackend(BackendBase):
    """Families sm_80 (mma.sync, cp.async) and sm_75 (float16; compiled from the same source, never run so far)."""

    compiler = "attnlib_cuda.compile"

    def __init__(self, fault: str = "") -> None:
        families = (
            Family("sm_90", _SM90, "wgmma kernels for Hopper; what they do not cover runs on those of sm_80"),
            Family("sm_80", _SM80, "mma.sync kernels for Ampere and later"),
            Family("sm_75", _SM75, "mma.sync kernels for Turing, not tested on a device"),
        )
        super().__init__("cuda", families)
        self._fault = fault

    @property
    def faults(self) -> Mapping[str, Any]:
        """Faults of the kernels that config={"fault": name} compiles in, and the checks that are likely to see them."""
        from attnlib.conformance.faults import Fault

        killers = {
            "no_rescale": "forward/ramp_up",
            "ignore_window_left": "visible/window",
            "drop_last_partial_key_block": "visible/plain",
            "head_mod": "forward/gqa",
            "skip_delta": "backward/plain",
            "dropout_ignores_head": "dropout/mask-0.5",
            "leak_past_kv_len": "visible/lengths",
            "dv_scale": "backward/plain",
            "scale": "forward/plain",
            "no_recompute": "forward/ramp_down",
        }
        return {name: Fault(name.replace("_", " "), (check,)) for name, check in killers.items()}

    def available(self, family: str, target: Target) -> tuple[Refusal, ...]:
        from . import device

        return device.refusals(target)

    def check(self, problem: AttentionProblem, family: str, target: Target) -> tuple[Refusal, ...]:
        found: list[Refusal] = []

        def refuse(what: str, needs: str, got: str) -> None:
            found.append(Refusal(RefusalCode.FEATURE, what, needs, got))

        largest = max(problem.head_dim, problem.head_dim_v)
        if family == "sm_75" and problem.grads and largest > 128:
            refuse("backward", "head_dim at most 128 on sm_75", str(largest))
        found += _room(problem, target)
        return tuple(found)

    def size_class(self, problem: AttentionProblem, family: str, target: Target) -> Hashable:
        from . import device, features, hopper

        left, right = problem.window
        rows = None
        if family == "sm_90":
            info = device.info(target.index or 0) if target.present else device.for_arch(target.arch)
            rows = hopper.size_class(problem, info)
        return features.rows(problem), features.pack(problem), left is None, right is None, rows

    def plan(
        self, problem: AttentionProblem, family: str, target: Target, config: Mapping[str, Any] | None = None
    ) -> Plan:
        from .plan import CudaPlan

        try:
            return CudaPlan(problem, target, config, self._fault, family == "sm_90")
        except (TypeError, ValueError) as error:
            raise UnsupportedError(f"cuda:{family}: config: {error}") from error

    def describe(self, problem: AttentionProblem, family: str, target: Target) -> Mapping[str, Any]:
        from .plan import CudaPlan

        return CudaPlan(problem, target, wgmma=family == "sm_90").describe()


backend = CudaBackend()
