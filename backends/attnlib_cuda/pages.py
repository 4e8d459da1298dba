"""Backward of keys in pages: they are laid out as one packed operand, and its gradients are summed into the pages."""

from __future__ import annotations

from dataclasses import replace

import torch

from attnlib.memory import allocate
from attnlib.problem import AttentionProblem, Tensors


class PackedPages:
    """A packed problem whose keys lie in pages, as the same problem without pages.

    `problem` and `tensors` are what a backward without pages takes; `store` carries its dk and dv into the pages. The
    rows of k, v, dk and dv are batch * seqlen_k at most, so that nothing here waits for the device: what is past the
    last sequence is padding. Where longer sequences than seqlen_k allows don't fit, every gradient they meet is NaN.
    """

    @torch.no_grad()
    def __init__(self, problem: AttentionProblem, t: Tensors) -> None:
        assert t.page_table is not None and t.cu_seqlens_q is not None and t.cu_seqlens_k is not None
        (pages, size), rows, device = t.k.shape[:2], problem.total_k, t.q.device
        lens = t.cu_seqlens_k.diff().clamp(min=0).long()
        lens = torch.where(lens <= t.page_table.shape[1] * size, lens, 0)  # the forward's rows are NaN there
        ends = lens.cumsum(0)
        row = torch.arange(rows, device=device)
        sequence = torch.searchsorted(ends, row, right=True).clamp(max=problem.batch - 1)
        token = row - (ends - lens)[sequence]
        seen = row < ends[-1]
        if problem.window.left is not None:  # pages before the first key that any query sees may be another's
            position = lens - t.cu_seqlens_q.diff() if not problem.top_left else torch.zeros_like(lens)
            seen &= token >= (position - problem.window.left)[sequence]
        page = t.page_table[sequence, (token // size).clamp(max=t.page_table.shape[1] - 1)].long()
        # A row that nobody sees takes any slot, and no two the same: many additions to one slot run one by one.
        spread = row % max(1, pages * size)
        slot = torch.where(seen, page.clamp(0, max(0, pages - 1)) * size + token % size, spread)
        self._slot, self._unseen = slot, ~seen[:, None, None]
        cu = torch.cat((ends.new_zeros(1), ends.clamp(max=rows))).int()
        k, v = (self._gathered(x, ends[-1] > rows) for x in (t.k, t.v))
        dk, dv = (None if x is None else allocate((rows, *x.shape[2:]), x.dtype, device) for x in (t.dk, t.dv))
        self.problem = replace(problem, page_size=None)
        self.tensors = replace(t, k=k, v=v, dk=dk, dv=dv, cu_seqlens_k=cu, page_table=None)

    def _gathered(self, x: torch.Tensor, poison: torch.Tensor) -> torch.Tensor:
        """[rows, heads, dim] out of pages, each row of a head at a multiple of 16 bytes."""
        pages, size, heads, dim = x.shape
        width = 16 // x.element_size()
        out = allocate((len(self._slot), heads, -(-dim // width) * width), x.dtype, x.device)[..., :dim]
        if pages:
            out.copy_(x[self._slot // size, self._slot % size])
        return out.masked_fill_(poison, float("nan"))

    @torch.no_grad()
    def store(self, t: Tensors) -> None:
        """Sum dk and dv into t's; pages that nobody uses get zeros. In float32 and in a fixed order, always."""
        for source, target in ((self.tensors.dk, t.dk), (self.tensors.dv, t.dv)):
            if source is None or target is None or not target.numel():
                continue
            total = torch.zeros((target.shape[0] * target.shape[1], *target.shape[2:]), device=target.device)
            source = source.masked_fill_(self._unseen, 0.0).float()
            # unsafe: the check of the range would wait for the device
            torch._index_put_impl_(total, [self._slot], source, accumulate=True, unsafe=True)
            target.copy_(total.view(target.shape))
