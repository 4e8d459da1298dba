"""A plan of the cpu backend: operands to addresses and strides, and one call into the compiled module."""

from __future__ import annotations

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


def describe(module: ModuleType, family: int, problem: AttentionProblem) -> dict[str, Any]:
    """What the kernels say of themselves, for sequences of full length: of forward, and under "backward" of that.

    kernel: the instruction set and the arithmetic; panels: what the copies of the tiles of q, k and v hold; block_q,
    block_k: rows and keys of a tile; heads_together: query heads of one group that share a copy of k and v; threads:
    how many at most; split: what they divide among them; workspace_bytes: of each thread. Where queries are few, k and v
    are read where they lie, and keys_of_a_unit says how many a thread takes at a time.
    """

    def direction(backward: bool, split: str) -> dict[str, Any]:
        found = module.describe(backward, family, torch.get_num_threads(), _scalars(problem, (0, 0, 0)))
        return found | {"panels": found["kernel"].split()[-1], "split": split}

    found = direction(False, "sequences, heads, blocks of queries; never the keys of a row")
    if "keys_of_a_unit" in found:
        found["split"] = "sequences, key/value heads, chunks of keys; the parts of a row are merged in their order"
    if problem.grads:
        found["backward"] = direction(True, "sequences, key/value heads, blocks of keys; dq is summed in their order")
    return found


def _scalars(
    problem: AttentionProblem, config: tuple[int, int, int], num_pages: int = 0, max_pages: int = 0, new_tokens: int = 0
) -> tuple[Any, ...]:
    """The order of parse_problem in csrc/cpu/bind.cpp."""
    left, right = problem.window
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
        problem.total_q,
        problem.total_k,
        problem.scale,
        problem.softcap or 0.0,
        problem.packed,
        problem.page_size is not None,
        problem.top_left,
        -1 if left is None else left,
        -1 if right is None else right,
        *(problem.block_mask or (0, 0)),
        problem.dropout_threshold,
        num_pages,
        problem.page_size or 0,
        max_pages,
        new_tokens,
        bool(problem.grads),
        *config,
    )


class CpuPlan:
    """Runs one family with fixed block sizes (0: chosen by shape)."""

    def __init__(self, module: ModuleType, family: int, block_q: int, block_k: int, fault: int) -> None:
        self._module = module
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
        table, fresh = tensors.page_table, tensors.k_new
        if table is None and fresh is None:
            return _scalars(problem, self._config)
        pages = (0, 0) if table is None else (tensors.k.shape[0], table.shape[1])
        return _scalars(problem, self._config, *pages, 0 if fresh is None else fresh.shape[1])
