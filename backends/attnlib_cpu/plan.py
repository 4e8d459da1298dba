"""A plan of the cpu backend: operands to addresses and strides, and one call into the compiled module."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch

from attnlib.problem import AttentionProblem, Tensors

_DTYPES = {torch.float64: 0, torch.float32: 1, torch.float16: 2, torch.bfloat16: 3, None: 1}
# the order of enum Operand in csrc/cpu/bind.cpp; in it, forward stops before dout
_FORWARD = (
    "q", "k", "v", "out", "lse", "stats", "bias", "mask", "alibi_slopes", "sinks", "block_mask", "q_lens", "kv_lens",
    "cu_seqlens_q", "cu_seqlens_k", "page_table", "k_new", "v_new", "new_lens", "dropout_seed",
)  # fmt: skip
_BACKWARD = ("dout", "dlse", "dq", "dk", "dv", "dbias", "dsinks")
_NO_BACKWARD = (None,) * len(_BACKWARD)


def _address(x: torch.Tensor | None) -> tuple[int, ...] | None:
    return None if x is None else (x.data_ptr(), *x.stride())


class CpuPlan:
    """Runs one family with fixed block sizes (0: chosen by shape)."""

    def __init__(self, module: ModuleType, name: str, family: int, block_q: int, block_k: int, fault: int) -> None:
        self._module = module
        self._name = name
        self._family = family
        self._config = (block_q, block_k, fault)

    def forward(self, problem: AttentionProblem, tensors: Tensors) -> None:
        """Fill out, lse and stats; append k_new and v_new first."""
        fields = tensors.__dict__
        operands = tuple([_address(fields[name]) for name in _FORWARD]) + _NO_BACKWARD
        self._module.forward(self._family, torch.get_num_threads(), self._scalars(problem, tensors), operands)

    def backward(self, problem: AttentionProblem, tensors: Tensors) -> None:
        """Fill the gradients that are not None."""
        fields = tensors.__dict__
        operands = tuple([_address(fields[name]) for name in (*_FORWARD, *_BACKWARD)])
        self._module.backward(self._family, torch.get_num_threads(), self._scalars(problem, tensors), operands)

    def _scalars(self, problem: AttentionProblem, tensors: Tensors) -> tuple[Any, ...]:
        """The order of parse_problem in csrc/cpu/bind.cpp."""
        left, right = problem.window
        k, table = tensors.k, tensors.page_table
        return (
            _DTYPES[problem.dtype],
            _DTYPES[problem.bias],
            _DTYPES[problem.sinks],
            problem.batch,
            problem.seqlen_q,
            problem.seqlen_k,
            problem.num_heads_q,
            problem.num_heads_kv,
            problem.head_dim,
            problem.head_dim_v,
            tensors.q.shape[0] if problem.packed else problem.total_q,
            k.shape[0] if problem.packed else problem.total_k,
            problem.scale,
            problem.softcap or 0.0,
            problem.packed,
            table is not None,
            problem.top_left,
            -1 if left is None else left,
            -1 if right is None else right,
            *(problem.block_mask or (0, 0)),
            problem.dropout_threshold,
            k.shape[0] if table is not None else 0,
            k.shape[1] if table is not None else 0,
            table.shape[1] if table is not None else 0,
            tensors.k_new.shape[1] if tensors.k_new is not None else 0,
            *self._config,
        )

    def describe(self) -> Mapping[str, Any]:
        """Kernel family, block sizes (by shape unless configured) and threads."""
        block_q, block_k, _ = self._config
        return {
            "kernel": f"csrc/cpu, {self._name}",
            "block_q": block_q or "by shape",
            "block_k": block_k or "by shape",
            "threads": torch.get_num_threads(),
            "bfloat16 dot products": self._family == 2 and bool(self._module.supported_families() & 8),
        }
