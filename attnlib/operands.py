"""The arguments of an operator, in its order: tensors before any check, and plain numbers."""

from __future__ import annotations

import operator
from typing import NamedTuple

import torch


class Operands(NamedTuple):
    """The tensors of a call as the operators take them, before any check."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    block_mask: torch.Tensor | None = None
    q_lens: torch.Tensor | None = None
    kv_lens: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    dropout_seed: torch.Tensor | None = None
    k_new: torch.Tensor | None = None
    v_new: torch.Tensor | None = None
    new_lens: torch.Tensor | None = None


NUM_COMMON = Operands._fields.index("k_new")  # what every operator takes; the rest belongs to a growing cache
INTEGERS = ("q_lens", "kv_lens", "new_lens", "cu_seqlens_q", "cu_seqlens_k", "page_table")
DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks")
differentiable = operator.attrgetter(*DIFFERENTIABLE)
TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
PLAIN = TENSORS | {type(None)}  # types of operands that no subclass watches


def grads_of(operands: Operands) -> int:
    """Which of DIFFERENTIABLE need a gradient now, as Scalars.grads."""
    if not torch.is_grad_enabled():
        return 0
    bias, sinks = operands.bias, operands.sinks
    return (
        operands.q.requires_grad
        | operands.k.requires_grad << 1
        | operands.v.requires_grad << 2
        | (bias is not None and bias.requires_grad) << 3
        | (sinks is not None and sinks.requires_grad) << 4
    )


class Scalars(NamedTuple):
    """The plain numbers of a call as the operators take them. max_seqlen_* are -1 where not given."""

    max_seqlen_q: int
    max_seqlen_k: int
    left: int
    right: int
    top_left: bool
    scale: float
    softcap: float
    dropout_p: float
    block_q: int
    block_k: int
    grads: int  # bit i: the i-th of DIFFERENTIABLE needs a gradient
    deterministic: bool
    tf32: bool
