"""Lengths, cumulative lengths and page tables: values, where the host can see them.

Always on CPU; elsewhere under ATTNLIB_DEBUG=bounds, since looking costs a synchronisation.
"""

from __future__ import annotations

from typing import Any

import torch

from . import settings
from .errors import ArgumentError
from .operands import INTEGERS, Operands
from .problem import AttentionProblem


def check_values(operands: Operands, problem: AttentionProblem) -> None:
    """Lengths and tables: on CPU always, elsewhere under ATTNLIB_DEBUG=bounds (it costs a synchronisation)."""
    if all(getattr(operands, name) is None for name in INTEGERS):
        return
    if operands.q.device.type != "cpu" and "bounds" not in settings.current().debug:
        return
    values = {name: getattr(operands, name) for name in INTEGERS}
    table = values.pop("page_table")
    lists: dict[str, Any] = {name: None if tensor is None else tensor.tolist() for name, tensor in values.items()}
    if problem.packed:
        q_lens = _check_cumulative("q", lists["cu_seqlens_q"], problem.total_q, problem.seqlen_q)
        limit = None if table is not None else problem.total_k
        kv_lens = cached = _check_cumulative("k", lists["cu_seqlens_k"], limit, problem.seqlen_k)
    else:
        _check_range("q_lens", lists["q_lens"], 0, problem.seqlen_q)
        _check_range("kv_lens", lists["kv_lens"], 0, problem.seqlen_k)
        q_lens = lists["q_lens"] or [problem.seqlen_q] * problem.batch
        kv_lens = cached = lists["kv_lens"] or [problem.seqlen_k] * problem.batch
        if operands.k_new is not None:
            length = operands.k_new.shape[1]
            _check_range("new_lens", lists["new_lens"], 0, length)
            new_lens = lists["new_lens"] or [length] * problem.batch
            kv_lens = [before + new for before, new in zip(cached, new_lens)]
            for b, total in enumerate(kv_lens):
                if total > problem.seqlen_k:
                    raise ArgumentError(
                        f"kv_lens: needs kv_lens + new_lens of at most {problem.seqlen_k}, the capacity of the cache, "
                        f"got {cached[b]} + {new_lens[b]} for sequence {b}"
                    )
    if table is not None:
        _check_pages(problem, table, operands.k.shape[0], q_lens, cached, kv_lens)


def _check_pages(
    problem: AttentionProblem,
    table: torch.Tensor,
    pages: int,
    q_lens: list[int],
    cached: list[int],
    kv_lens: list[int],
) -> None:
    """Table entries that are read or written; those before a window or past the last key may hold anything."""
    size, left = problem.page_size or 1, problem.window.left
    rows = table[:, : -(-max(kv_lens, default=0) // size)].tolist()
    for b, row in enumerate(rows):
        first = 0 if problem.top_left else kv_lens[b] - q_lens[b]
        lo = 0 if left is None else max(0, first - left)
        written = kv_lens[b] - cached[b]
        if q_lens[b] == 0 or written:
            lo = cached[b] if q_lens[b] == 0 else min(lo, cached[b])
        for slot in range(lo // size, -(-kv_lens[b] // size)):
            if not 0 <= row[slot] < pages:
                raise ArgumentError(f"page_table: needs pages from 0 to {pages - 1}, got {row[slot]} at [{b}, {slot}]")


def _check_range(name: str, values: list[int] | None, low: int, high: int) -> None:
    for b, value in enumerate(values or ()):
        if not low <= value <= high:
            raise ArgumentError(f"{name}: needs values from {low} to {high}, got {value} for sequence {b}")


def _check_cumulative(side: str, values: list[int], total: int | None, longest: int) -> list[int]:
    name = f"cu_seqlens_{side}"
    if values[0] != 0:
        raise ArgumentError(f"{name}: needs to start at 0, got {values[0]}")
    lens = [after - before for before, after in zip(values, values[1:])]
    for b, length in enumerate(lens):
        if length < 0:
            raise ArgumentError(f"{name}: needs to be non-decreasing, got {values[b]} then {values[b + 1]}")
        if length > longest:
            raise ArgumentError(
                f"max_seqlen_{side}: needs at least {length}, the length of sequence {b}, got {longest}"
            )
    if total is not None and values[-1] > total:
        raise ArgumentError(f"{name}: needs to end at most at {total}, the rows of {side}, got {values[-1]}")
    return lens
