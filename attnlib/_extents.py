"""Where each sequence of a call lies in its operands: lengths read once, keys gathered to the extent [lo, kv_len).

Shared by reference.py and the oracle, so that neither ever reads a padding row, an unused slot or another's page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from .problem import AttentionProblem, Tensors

GROUP_ELEMENTS = 1 << 24  # score elements of the sequences that are computed together


@dataclass(frozen=True)
class Extent:
    """One sequence of a call: its queries, its keys [lo, kv_len), and where they are stored."""

    sequence: int
    q_len: int
    lo: int
    kv_len: int
    shift: int  # pos_i = i + shift
    row: int = 0  # packed: row of query 0
    key: int = 0  # packed: row of key 0
    old_len: int = 0  # tokens in the cache before an append
    fits: bool = True

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.q_len, self.lo, self.kv_len, self.shift


def _ints(x: torch.Tensor | None, default: int, batch: int) -> list[int]:
    return [default] * batch if x is None else [int(n) for n in x.tolist()]


def _bounds(cu_seqlens: torch.Tensor | None, total: int) -> list[int]:
    """Cumulative lengths, clamped to [0, total] and made monotone."""
    clean: list[int] = []
    for n in [0] if cu_seqlens is None else cu_seqlens.tolist():
        clean.append(max(min(int(n), total), clean[-1] if clean else 0))
    return clean


def extents(problem: AttentionProblem, tensors: Tensors) -> list[Extent]:
    """Every sequence's extent, in order; lengths are read on the host. fits is False where a length has no room."""
    batch, pages = problem.batch, tensors.page_table
    capacity = problem.seqlen_k
    if pages is not None and problem.page_size is not None:
        capacity = pages.shape[1] * problem.page_size
    rows, keys = [0] * batch, [0] * batch
    if problem.packed:
        starts_q = _bounds(tensors.cu_seqlens_q, tensors.q.shape[0])
        starts_k = _bounds(tensors.cu_seqlens_k, tensors.k.shape[0] if pages is None else 1 << 62)
        rows, q_lens = starts_q[:-1], [b - a for a, b in pairwise(starts_q)]
        keys, kv_lens = starts_k[:-1], [b - a for a, b in pairwise(starts_k)]
        limit_q, capacity = tensors.q.shape[0], capacity if pages is not None else tensors.k.shape[0]
    else:
        q_lens, limit_q = _ints(tensors.q_lens, problem.seqlen_q, batch), problem.seqlen_q
        kv_lens = _ints(tensors.kv_lens, problem.seqlen_k, batch)
    room_new = 0 if tensors.k_new is None else tensors.k_new.shape[1]
    new_lens = _ints(tensors.new_lens, room_new, batch) if tensors.k_new is not None else [0] * batch
    found = []
    for b in range(batch):
        q_len, old, new = q_lens[b], kv_lens[b], new_lens[b]
        kv_len = old + new
        fits = 0 <= q_len <= limit_q and 0 <= new <= room_new and old >= 0 and kv_len <= capacity
        shift = 0 if problem.top_left else kv_len - q_len
        lo = 0 if problem.window.left is None else max(0, shift - problem.window.left)
        lo = kv_len if q_len == 0 else min(lo, kv_len)
        if fits and pages is not None and problem.page_size is not None:
            # tokens that are read or written
            first = min(lo, old) if new else lo
            stop = -(-kv_len // problem.page_size) if kv_len > first else 0
            used = pages[b, first // problem.page_size : stop].tolist()
            fits = all(0 <= page < tensors.k.shape[0] for page in used)
        if not fits:
            q_len, lo, kv_len = (q_len if 0 <= q_len <= limit_q else limit_q), 0, 0
        found.append(Extent(b, q_len, lo, kv_len, shift, rows[b], keys[b], old, fits))
    return found


def grouped(problem: AttentionProblem, found: Sequence[Extent], elements: int = GROUP_ELEMENTS) -> list[list[Extent]]:
    """Neighbouring sequences of one shape together, as long as their scores stay below `elements`."""
    groups: list[list[Extent]] = []
    for extent in found:
        size = problem.num_heads_q * extent.q_len * (extent.kv_len - extent.lo)
        last = groups[-1][-1] if groups else None
        alike = last is not None and last.fits and extent.fits and last.shape == extent.shape
        if alike and not problem.packed and size * (len(groups[-1]) + 1) <= elements:
            groups[-1].append(extent)
        else:
            groups.append([extent])
    return groups


def gather_rows(problem: AttentionProblem, x: torch.Tensor, group: Sequence[Extent]) -> torch.Tensor:
    """Queries (or outputs) of a group, [n, q_len, heads, dim]."""
    first = group[0]
    if problem.packed:
        return torch.stack([x[e.row : e.row + e.q_len] for e in group])
    if first.sequence + len(group) - 1 == group[-1].sequence:
        return x[first.sequence : first.sequence + len(group), : first.q_len]
    return torch.stack([x[e.sequence, : e.q_len] for e in group])


def gather_keys(problem: AttentionProblem, tensors: Tensors, x: torch.Tensor, group: Sequence[Extent]) -> torch.Tensor:
    """Keys or values of a group inside its extent, [n, kv_len - lo, heads, dim]; an append comes first."""
    first = group[0]
    if problem.page_size is not None and tensors.page_table is not None:
        j = torch.arange(first.lo, first.kv_len, device=x.device)
        pages = [tensors.page_table[e.sequence].long()[j // problem.page_size] for e in group]
        return torch.stack([x[page, j % problem.page_size] for page in pages])
    if problem.packed:
        return torch.stack([x[e.key + e.lo : e.key + e.kv_len] for e in group])
    if first.sequence + len(group) - 1 == group[-1].sequence:
        return x[first.sequence : first.sequence + len(group), first.lo : first.kv_len]
    return torch.stack([x[e.sequence, e.lo : e.kv_len] for e in group])


@torch.no_grad()
def append(problem: AttentionProblem, tensors: Tensors, found: Sequence[Extent]) -> None:
    """Write k_new and v_new behind each sequence's tokens, in place; a sequence that does not fit is left alone."""
    if tensors.k_new is None or tensors.v_new is None:
        return
    for e in found:
        count = e.kv_len - e.old_len
        if not e.fits or count <= 0:
            continue
        j = torch.arange(e.old_len, e.kv_len, device=tensors.k.device)
        for cache, new in ((tensors.k, tensors.k_new), (tensors.v, tensors.v_new)):
            if problem.page_size is not None and tensors.page_table is not None:
                page = tensors.page_table[e.sequence].long()[j // problem.page_size]
                cache[page, j % problem.page_size] = new[e.sequence, :count]
            else:
                cache[e.sequence, e.old_len : e.kv_len] = new[e.sequence, :count]


def collapsed(x: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """x cut to size 1 in the dimensions where `like` (default: x) has stride 0, so that it is read and summed once."""
    like = x if like is None else like
    for dim, (size, stride) in enumerate(zip(like.shape, like.stride(), strict=True)):
        if size > 1 and stride == 0:
            x = x.narrow(dim, 0, 1)
    return x
