"""Gradients of keys in pages, as the cuda backend lays them out: against the reference, on CPU tensors."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from toys import Opaque

import attnlib
from attnlib.conformance.cases import CASES, Case
from attnlib.conformance.recipes import make
from attnlib.conformance.subject import opened
from attnlib.inspection import problem_of
from attnlib.problem import AttentionProblem, Tensors, Window
from attnlib.reference import ReferencePlan
from attnlib_cuda.pages import PackedPages


class PagesPlan(ReferencePlan):
    """The reference, given its keys as a backward without pages takes them; rows that nobody sees are left as NaN."""

    def backward(self, problem: AttentionProblem, tensors: Tensors) -> None:
        laid_out = PackedPages(problem, tensors)
        assert laid_out.problem.page_size is None and laid_out.tensors.page_table is None
        super().backward(laid_out.problem, laid_out.tensors)
        starts, q_starts = laid_out.tensors.cu_seqlens_k.tolist(), tensors.cu_seqlens_q.tolist()
        for grad in (laid_out.tensors.dk, laid_out.tensors.dv):
            grad[starts[-1] :] = math.nan
            for (a, b), (c, d) in zip(pairwise(starts), pairwise(q_starts), strict=True):
                first = 0 if problem.top_left else b - a - (d - c)
                if problem.window.left is not None and d > c:
                    grad[a : a + max(0, first - problem.window.left)] = math.nan
        laid_out.store(tensors)


class Pages(Opaque):
    def plan(self, problem, family, target, config=None):
        return PagesPlan()


@pytest.fixture
def backend(register: Any) -> str:
    register(Pages("pages"))
    return "pages"


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def gradients(backend: str, q: Any, k: Any, v: Any, table: torch.Tensor, q_ends: Any, k_ends: Any, **more: Any) -> Any:
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attnlib.attention_varlen(*leaves, q_ends, k_ends, page_table=table, backend=backend, **more)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=out.dtype)
    return torch.autograd.grad(out, leaves, dout)


def assert_near(got: Any, want: Any) -> None:
    for name, a, b in zip(("dq", "dk", "dv"), got, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and a.isfinite().all(), name
        assert (a - b).abs().max() <= 2e-6 * max(1.0, b.abs().max()), name


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (5, 3)}], ids=["full", "causal", "window"])
@pytest.mark.parametrize("size", [1, 3, 16, 256])
def test_shared_and_unused_pages(backend: str, size: int, options: dict[str, Any]) -> None:
    """Sequences of 40, 0, 17 and 33 keys: the first and the last share pages, the third has one page twice."""
    lens, columns = (40, 0, 17, 33), -(-45 // size)
    used = [-(-length // size) for length in lens]
    table = torch.full((4, columns), -1, dtype=torch.int32)
    order = iter(torch.randperm(sum(used), generator=torch.Generator().manual_seed(0)).tolist())
    for b, count in enumerate(used):
        table[b, :count] = ints(*(next(order) for _ in range(count)))
    table[3, : used[3] // 2 + 1] = table[0, : used[3] // 2 + 1]
    if used[2] > 1:
        table[2, 1] = table[2, 0]
    pages = sum(used) + 3
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(shape, generator=generator)
        for shape in ((64, 4, 20), (pages, size, 2, 20), (pages, size, 2, 24))
    )  # fmt: skip
    q_ends, k_ends = ints(0, 30, 35, 36, 62), ints(0, 40, 40, 57, 90)
    read = torch.zeros(pages, size, dtype=torch.bool)
    for b, length in enumerate(lens):
        token = torch.arange(length)
        read[table[b, token // size].long(), token % size] = True
    k[~read], v[~read] = math.nan, math.nan
    options = {**options, "softcap": 20.0, "dropout_p": 0.25, "dropout_seed": 3}
    got = gradients(backend, q, k, v, table, q_ends, k_ends, **options)
    assert_near(got, gradients("reference", q, k, v, table, q_ends, k_ends, **options))
    assert not got[1][~read].any() and not got[2][~read].any()
    again = gradients(backend, q, k, v, table, q_ends, k_ends, **options)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


PACKED_PAGES = [case for case in CASES if case.page_size is not None and case.layout == "packed"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", PACKED_PAGES, ids=lambda case: case.name)
def test_cases_of_the_suite(case: Case, dtype: torch.dtype) -> None:
    """Strided operands, table entries that nobody may read, every other gradient: judged as a backend's results are."""
    with opened(Pages("pages"), device="cpu") as subject:
        subject.check(make(case, dtype, subject.device, direction="backward"))


def test_waits_for_no_device_value() -> None:
    """On the meta device whatever needs a value raises, as it would in a graph's capture."""
    case = next(case for case in PACKED_PAGES if case.name == "varlen-paged")
    inputs = make(case, torch.bfloat16, torch.device("cpu"), direction="backward")
    problem = dataclasses.replace(inputs.problem(), window=Window(9, 0))
    given = inputs.tensors(problem)
    given.dk, given.dv = torch.empty_like(given.k), torch.empty_like(given.v)
    tensors = {name: x.to("meta") for name, x in vars(given).items() if x is not None}
    laid_out = PackedPages(problem, Tensors(**tensors))
    laid_out.store(Tensors(**tensors))
    assert laid_out.tensors.k.is_meta and laid_out.tensors.k.shape == (problem.total_k, *given.k.shape[2:])


@pytest.mark.parametrize("dim", [8, 20, 36, 64])
def test_rows_are_aligned(dim: int) -> None:
    k = torch.randn(5, 4, 3, dim).half()
    q, ends = torch.randn(6, 3, dim).half(), ints(0, 6)
    problem = problem_of(q, k, k, cu_seqlens_q=ends, cu_seqlens_k=ends, page_table=ints(4, 0)[None])
    tensors = Tensors(q, k, k, q, q, cu_seqlens_q=ends, cu_seqlens_k=ends, page_table=ints(4, 0)[None])
    laid_out = PackedPages(problem, tensors).tensors.k
    assert laid_out.shape == (8, 3, dim) and all(stride % 8 == 0 for stride in laid_out.stride()[:2])
    assert torch.equal(laid_out[:6], torch.cat((k[4], k[0, :2])))
    assert laid_out.data_ptr() % 16 == 0


def test_more_keys_than_the_hint_allows_are_seen() -> None:
    """max_seqlen_k is a bound that a device's lengths may break unseen: the gradients are NaN then, not wrong."""
    k, q, ends = torch.randn(5, 4, 3, 8), torch.randn(6, 3, 8), ints(0, 6)
    arguments = dict(cu_seqlens_q=ends, cu_seqlens_k=ends, page_table=ints(4, 0)[None])
    problem = dataclasses.replace(problem_of(q, k, k, **arguments), seqlen_k=5, total_k=5)
    laid_out = PackedPages(problem, Tensors(q, k, k, q, q, **arguments)).tensors
    assert laid_out.k.shape[0] == 5 and laid_out.k.isnan().all() and laid_out.cu_seqlens_k.tolist() == [0, 5]
