"""Calls that leave a kernel nothing to do: no sequence, no head, no query or no key. Answered without a host sync."""

from __future__ import annotations

import torch

from .problem import AttentionProblem, Tensors


def forward(problem: AttentionProblem, tensors: Tensors) -> None:
    """Every row is empty: out 0, lse its sink or -inf; padding rows have no sink."""
    if tensors.k_new is not None and tensors.k_new.numel():
        from ._extents import append, extents

        append(problem, tensors, extents(problem, tensors))
    tensors.out.zero_()
    tensors.lse.fill_(-torch.inf)
    if tensors.sinks is not None:
        sinks = tensors.sinks.to(tensors.lse.dtype)[:, None].expand_as(tensors.lse)
        tensors.lse.copy_(torch.where(_real_rows(problem, tensors), sinks, tensors.lse))
    if tensors.stats is not None:
        tensors.stats[0] = tensors.lse
        tensors.stats[1] = (tensors.lse != -torch.inf).to(tensors.stats.dtype)


def backward(problem: AttentionProblem, tensors: Tensors) -> None:
    """Nothing flows to q, k, v or bias; a sink takes the dlse of its rows."""
    for grad in (tensors.dq, tensors.dk, tensors.dv):
        if grad is not None:
            grad.zero_()
    if tensors.dsinks is not None and tensors.dlse is not None:
        real = torch.where(_real_rows(problem, tensors), tensors.dlse, 0.0).to(tensors.dsinks.dtype)
        tensors.dsinks += real.sum(-1) if problem.packed else real.sum((0, 2))


def _real_rows(problem: AttentionProblem, tensors: Tensors) -> torch.Tensor:
    """bool, broadcastable to lse: rows that are queries, not padding."""
    device = tensors.q.device
    if tensors.cu_seqlens_q is not None:
        return torch.arange(problem.total_q, device=device) < tensors.cu_seqlens_q[-1]
    rows = torch.arange(problem.seqlen_q, device=device)
    return (
        rows < rows.new_full((), problem.seqlen_q) if tensors.q_lens is None else rows < tensors.q_lens[:, None, None]
    )
