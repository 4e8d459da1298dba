"""Any GPU that CuPy runs on: plain kernels without tensor cores, compiled at run time, for the whole contract."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from attnlib.backend import BackendBase, Capabilities, Family, Plan, Refusal, RefusalCode, Target
from attnlib.errors import UnsupportedError
from attnlib.problem import DTYPES, AttentionProblem

_REMEDY = 'pip install "attnlib[cupy]" (CUDA 13), or cupy-cuda12x with nvidia-cuda-nvrtc-cu12 for CUDA 12 and old GPUs'
MAX_HEAD_DIM = 576
_CAPABILITIES = Capabilities(
    device_kinds=frozenset({"cuda", "rocm"}), dtypes=frozenset(DTYPES), max_head_dim=MAX_HEAD_DIM
)


class CupyBackend(BackendBase):
    """SIMT kernels through CuPy: every feature, every dtype, sm_60 and later, and HIP."""

    test_configs = (
        {"rows": 2, "tile_columns": 32, "depth": 16}, {"lanes": 32, "rows": 4, "tile_columns": 128}, {"num_splits": 3},
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__("cupy", (Family("", _CAPABILITIES, "SIMT kernels compiled by CuPy"),))

    @property
    def faults(self) -> Mapping[str, Any]:
        """Faults of the kernels that config={"fault": name} compiles in, and the checks that are likely to see them."""
        from attnlib.conformance.faults import Fault

        from . import config

        return {name: Fault(name.replace("_", " "), (check,)) for name, check in config.KILLERS.items()}

    def available(self, family: str, target: Target) -> tuple[Refusal, ...]:
        from . import device

        return device.refusals(target, _REMEDY)

    def check(self, problem: AttentionProblem, family: str, target: Target) -> tuple[Refusal, ...]:
        from . import config

        try:
            config.tile(problem, target, False)
            if problem.grads:
                config.tile(problem, target, True)
        except config.TooLarge as error:
            return (Refusal(RefusalCode.CONFIG, "shared memory", f"at least {error.needs} bytes", f"{error.limit}"),)
        return ()

    def size_class(self, problem: AttentionProblem, family: str, target: Target) -> Hashable:
        from . import config

        return config.rows_needed(problem)

    def plan(
        self, problem: AttentionProblem, family: str, target: Target, config: Mapping[str, Any] | None = None
    ) -> Plan:
        from .launch import launch
        from .plan import CupyPlan

        try:
            return CupyPlan(problem, target, launch, config)
        except ValueError as error:
            raise UnsupportedError(f"cupy: {error}") from error

    def describe(self, problem: AttentionProblem, family: str, target: Target) -> Mapping[str, Any]:
        from .launch import launch
        from .plan import CupyPlan

        return CupyPlan(problem, target, launch).describe()


backend = CupyBackend()
