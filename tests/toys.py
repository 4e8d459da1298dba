"""Small backends for tests of core: they run the reference, or nothing at all."""

from __future__ import annotations

from typing import Any

import torch

from attnlib.backend import BackendBase, Capabilities, Family
from attnlib.problem import ALL_FEATURES, AttentionProblem, Tensors
from attnlib.reference import ReferenceBackend

HALF_AND_SINGLE = frozenset({torch.float32, torch.bfloat16})


class Nothing:
    """A plan that leaves its outputs as they are and remembers its last run."""

    def __init__(self) -> None:
        self.problem: AttentionProblem | None = None
        self.tensors: Tensors | None = None

    def forward(self, problem: AttentionProblem, tensors: Tensors) -> None:
        self.problem, self.tensors = problem, tensors

    def backward(self, problem: AttentionProblem, tensors: Tensors) -> None:
        self.problem, self.tensors = problem, tensors


class Toy(BackendBase):
    """Takes what it is told to, and does nothing. `plans` counts the plans made."""

    def __init__(self, name: str, families=None, **capabilities: Any) -> None:
        declared = dict(device_kinds=frozenset({"cpu"}), dtypes=HALF_AND_SINGLE) | capabilities
        super().__init__(name, families or (Family("", Capabilities(**declared)),))
        self.plans: list[Nothing] = []
        self.configs: list[Any] = []

    def plan(self, problem, family, target, config=None):
        self.configs.append(config)
        self.plans.append(Nothing())
        return self.plans[-1]


class Opaque(ReferenceBackend):
    """The reference's arithmetic behind the operators, as a compiled backend would be: not differentiable itself."""

    def __init__(self, name: str = "opaque") -> None:
        super().__init__()
        self.name = name


def without(*features):
    return frozenset(ALL_FEATURES) - set(features)
