"""A plan of the cpu backend: operands to addresses and strides, and one call into the compiled module."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import get_num_threads

from attnlib.problem import AttentionProblem, Tensors

_DTYPES = {torch.float64: 0, torch.float32: 1, torch.float16: 2, torch.bfloat16: 3, None: 1}
# the order of enum Operand in csrc/cpu/bind.cpp
_OPERANDS = (
    "q", "k", "v", "out", "lse", "stats", "bias", "mask", "alibi_slopes", "sinks", "block_mask", "q_lens", "kv_lens",
    "cu_seqlens_q", "cu_seqlens_k", "page_table", "k_new", "v_new", "new_lens", "dropout_seed",
    "dout", "dlse", "dq", "dk", "dv", "dbias", "dsinks",
)  # fmt: skip
_INDEX = {name: index for index, name in enumerate(_OPERANDS)}
_FORMS = 64  # of calls that a plan keeps


class _Form(NamedTuple):
    """What a problem decides of its calls: the scalars, in the compiled module, and which operands to pass."""

    problem: AttentionProblem
    call: Any
    forward: tuple[str, ...]
    backward: tuple[str, ...]  # starts with those of forward


def _operands(problem: AttentionProblem) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The operands that there may be, of forward and of backward."""
    given = {
        "stats": problem.needs_stats, "bias": problem.bias, "mask": problem.mask, "alibi_slopes": problem.alibi,
        "sinks": problem.sinks, "block_mask": problem.block_mask, "q_lens": problem.lengths or problem.append,
        "kv_lens": problem.lengths or problem.append, "cu_seqlens_q": problem.packed, "cu_seqlens_k": problem.packed,
        "page_table": problem.page_size, "k_new": problem.append, "v_new": problem.append, "new_lens": problem.append,
        "dropout_seed": problem.dropout_threshold, "dbias": "bias" in problem.grads, "dsinks": "sinks" in problem.grads,
    }  # fmt: skip
    names = tuple(name for name in _OPERANDS if given.get(name, True))
    return names[: names.index("dout")], names


def _sizes(tensors: Tensors) -> tuple[int, ...]:
    """What the scalars hold that is not in the problem: pages, pages of a sequence, new tokens; () for none of them."""
    table, fresh = tensors.page_table, tensors.k_new
    if table is None and fresh is None:
        return ()
    pages = (0, 0) if table is None else (tensors.k.shape[0], table.shape[1])
    return (*pages, 0 if fresh is None else fresh.shape[1])


def _addresses(tensors: Tensors, names: tuple[str, ...]) -> tuple[Any, ...]:
    fields = tensors.__dict__
    return tuple([None if (x := fields[name]) is None else (x.data_ptr(), x.stride()) for name in names])


def describe(module: ModuleType, family: int, problem: AttentionProblem) -> dict[str, Any]:
    """What the kernels say of themselves, for sequences of full length: of forward, and under "backward" of that.

    kernel: the instruction set and the arithmetic; panels: what the copies of the tiles of q, k and v hold; block_q,
    block_k: rows and keys of a tile; heads_together: query heads of one group that share a copy of k and v; threads:
    how many at most; split: what they divide among them; workspace_bytes: of each thread. Where queries are few, k
    and v are read where they lie, and keys_of_a_unit says how many a thread takes at a time.
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
        self._forms: dict[tuple[int, ...], _Form] = {}  # by id of the problem, which each keeps alive, and _sizes

    def forward(self, problem: AttentionProblem, tensors: Tensors) -> None:
        """Fill out, lse and stats; append k_new and v_new first."""
        form = self._form(problem, tensors)
        form.call.forward(get_num_threads(), _addresses(tensors, form.forward))

    def direct(self, problem: AttentionProblem, strides: tuple[tuple[int, ...], ...]) -> Any:
        """forward() of q, k, v, out and lse with these strides, as a capsule that core runs without Python."""
        return self._module.Call(self._family, _scalars(problem, self._config), ()).direct(strides)

    def backward(self, problem: AttentionProblem, tensors: Tensors) -> None:
        """Fill the gradients that are not None."""
        form = self._form(problem, tensors)
        form.call.backward(get_num_threads(), _addresses(tensors, form.backward))

    def _form(self, problem: AttentionProblem, tensors: Tensors) -> _Form:
        sizes = _sizes(tensors)
        key = (id(problem), *sizes)
        form = self._forms.get(key)
        if form is None:
            forward, backward = _operands(problem)
            scalars = _scalars(problem, self._config, *sizes)
            call = self._module.Call(self._family, scalars, tuple([_INDEX[name] for name in backward]))
            form = _Form(problem, call, forward, backward)
            if len(self._forms) >= _FORMS:
                self._forms.clear()
            self._forms[key] = form
        return form
