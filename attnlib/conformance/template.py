"""A port in its smallest useful form: copy this file, then grow it one feature at a time.

It computes dense attention, forward only, with causal and window masks and grouped heads; everything else it does not
declare, so core refuses it in words that every port shares. backends/README.md says what each part is for and how to
package it; `python -m attnlib check --backend mine` says what works.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from attnlib.backend import BackendBase, Capabilities, Family, Plan, Refusal, RefusalCode, Target
from attnlib.errors import UnsupportedError
from attnlib.problem import AttentionProblem, Feature, Tensors

BLOCK_Q = 64
CAPABILITIES = Capabilities(
    device_kinds=frozenset({"cpu"}),
    dtypes=frozenset({torch.float32, torch.bfloat16}),
    max_head_dim=256,
    features=frozenset({Feature.CAUSAL, Feature.WINDOW, Feature.TOP_LEFT, Feature.GQA, Feature.HEAD_DIM_V}),
)


class Template(BackendBase):
    """A distribution's entry point is an instance of this class; importing it is quick and touches no device."""

    def __init__(self) -> None:
        super().__init__(name="template", families=(Family("", CAPABILITIES),))

    def plan(
        self, problem: AttentionProblem, family: str, target: Target, config: Mapping[str, Any] | None = None
    ) -> Plan:
        config = dict(config or {})
        block = config.pop("block_q", BLOCK_Q)
        if config or not isinstance(block, int) or block < 1:
            refusal = Refusal(
                RefusalCode.CONFIG, "config", "block_q of at least 1 alone", repr({**config, "block_q": block})
            )
            raise UnsupportedError(f"template: {refusal}", {"template": (refusal,)})
        return TemplatePlan(block)

    def describe(self, problem: AttentionProblem, family: str, target: Target) -> Mapping[str, Any]:
        return {"kernel": "one block of queries at a time, torch", "block_q": BLOCK_Q}


class TemplatePlan:
    """What runs. It may rely on all that attnlib.problem.Tensors promises, and writes all of its outputs."""

    def __init__(self, block_q: int) -> None:
        self.block_q = block_q

    def forward(self, problem: AttentionProblem, tensors: Tensors) -> None:
        left, right = problem.window
        offset = 0 if problem.top_left else problem.seqlen_k - problem.seqlen_q
        key = torch.arange(problem.seqlen_k)
        k, v = (x.float().transpose(1, 2).repeat_interleave(problem.group, 1) for x in (tensors.k, tensors.v))
        for first in range(0, problem.seqlen_q, self.block_q):
            rows = slice(first, min(first + self.block_q, problem.seqlen_q))
            apart = key - (torch.arange(rows.start, rows.stop)[:, None] + offset)
            seen = torch.ones_like(apart, dtype=torch.bool)
            if left is not None:
                seen &= apart >= -left
            if right is not None:
                seen &= apart <= right
            q = tensors.q[:, rows].float().transpose(1, 2)
            scores = (q @ k.mT * problem.scale).masked_fill(~seen, -torch.inf)
            lse = torch.logsumexp(scores, -1)
            empty = lse == -torch.inf  # a query that sees no key: out 0, lse -inf
            weights = torch.exp(scores - lse.masked_fill(empty, 0)[..., None])
            tensors.out[:, rows] = (weights @ v).transpose(1, 2).to(problem.dtype)
            tensors.lse[:, :, rows] = lse

    def backward(self, problem: AttentionProblem, tensors: Tensors) -> None:
        raise AssertionError("core never asks for what is not declared")


backend = Template()
