"""What NaN, Inf, hidden keys and lengths that do not fit do in the float64 definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from reference_problems import INF, NAN, Case, build, normals, run, simple

from attnlib.problem import Window
from attnlib.reference import attention, selected_product


def test_selected_product_is_the_plain_sum() -> None:
    g = torch.Generator().manual_seed(0)
    weight, x = torch.rand(2, 3, 4, 6, generator=g), torch.randn(2, 3, 6, 5, generator=g)
    seen = torch.rand(2, 3, 4, 6, generator=g) < 0.6
    x[0, 1, 2, 3], x[0, 1, 4], x[1, 0, 0, 0], x[1, 2, 5, 1] = NAN, INF, -INF, INF
    weight[0, 0, 1, 3] = NAN
    due = torch.zeros(2, 3, 4, 5)
    for b, h, i, j in torch.nonzero(seen).tolist():
        due[b, h, i] += weight[b, h, i, j] * x[b, h, j]
    torch.testing.assert_close(selected_product(weight, x, seen), due, equal_nan=True)


@pytest.mark.parametrize("operand", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("value", [NAN, INF])
def test_AB_008_hidden_nan_reaches_only_the_rows_that_see_it(operand: str, value: float) -> None:
    """One poisoned row or key: the rows that do not see it keep their values and gradients bit for bit."""
    q, k, v, dout = normals(5, (1, 8, 2, 4), (1, 8, 2, 4), (1, 8, 2, 3), (1, 8, 2, 3))
    teams = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])
    mask = teams[:, None] == torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])
    problem, tensors = simple(q, k, v, mask=mask, softcap=3.0, dout=dout, dlse=torch.zeros(1, 2, 8).double())
    clean = run(problem, tensors)
    spoiled = getattr(tensors, operand).clone()
    index = 2 if operand in ("q", "dout") else 3
    spoiled[:, index] = value
    dirty = run(problem, replace(tensors, **{operand: spoiled}))
    if operand in ("q", "dout"):
        rows = torch.arange(8) != index
        columns = ~mask[index]
    else:
        rows = ~mask[:, index]
        columns = ~mask[~rows].any(0)
    for name, part in (("out", rows), ("dq", rows), ("dk", columns), ("dv", columns)):
        got, due = getattr(dirty, name)[:, part], getattr(clean, name)[:, part]
        assert torch.isfinite(got).all(), name
        torch.testing.assert_close(got, due, rtol=1e-14, atol=1e-15)
    if operand != "dout" and value != value:
        assert torch.isnan(dirty.out[:, ~rows]).all()


def test_hidden_nan_does_not_reach_second_derivatives() -> None:
    q, k, v = normals(6, (1, 3, 1, 2), (1, 4, 1, 2), (1, 4, 1, 2))
    k[:, 3] = v[:, 3] = NAN
    mask = torch.tensor([[True, True, True, False]] * 3)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = attention(*simple(*leaves, mask=mask))
    first = torch.autograd.grad((out**2).sum() + lse.sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum((x**2).sum() for x in first), leaves)
    assert all(torch.isfinite(x).all() for x in (out, lse, *first, *second))
    tangents = [torch.where(torch.isnan(x), NAN, torch.ones_like(x)).detach() for x in leaves]
    _, (moved, _) = torch.func.jvp(
        lambda *x: attention(*simple(*x, mask=mask)), tuple(x.detach() for x in leaves), tuple(tangents)
    )
    assert torch.isfinite(moved).all()


def test_visible_nan_is_not_laundered() -> None:
    q, k, v = normals(7, (1, 3, 1, 2), (1, 3, 1, 2), (1, 3, 1, 2))
    k[0, 1, 0, 0] = NAN
    out, lse = attention(*simple(q, k, v, window=Window(None, 0)))
    assert torch.isfinite(out[0, 0]).all() and torch.isnan(out[0, 1:]).all()
    assert torch.isnan(lse[0, 0, 1:]).all()
    # a dropped key is visible
    v = torch.full_like(v, NAN)
    seed = torch.tensor([1])
    out, _ = attention(*simple(q, torch.zeros_like(k), v, dropout_p=0.9, dropout_seed=seed))
    assert torch.isnan(out).all()


def test_bias_plus_inf_gives_nan() -> None:
    q, k, v = normals(8, (1, 2, 1, 2), (1, 3, 1, 2), (1, 3, 1, 2))
    bias = torch.zeros(1, 1, 2, 3).double()
    bias[..., 0, 1] = INF
    out, lse = attention(*simple(q, k, v, bias=bias))
    assert torch.isnan(out[0, 0]).all() and torch.isnan(lse[0, 0, 0]) and torch.isfinite(out[0, 1]).all()


@pytest.mark.parametrize(
    "what", ["kv too long", "kv negative", "q too long", "append too long", "page", "new too long"]
)
def test_a_length_that_does_not_fit_gives_nan_rows_and_touches_nothing(what: str) -> None:
    layout = {"append too long": "append", "new too long": "append", "page": "paged"}.get(what, "lengths")
    problem, t = build(Case(layout, batch=3, seed=11))
    t.q_lens, t.kv_lens = torch.tensor([2, 3, 5]), torch.tensor([3, 5, 2])
    t.q, t.k, t.v = (x.nan_to_num(0.5) for x in (t.q, t.k, t.v))
    if t.page_table is not None:
        t.page_table = torch.tensor([[0, 1, 2], [3, 4, 5], [6, -1, -1]], dtype=torch.int32)
    if layout == "append":
        t.new_lens = torch.tensor([1, 1, 3])
        t.k_new, t.v_new = t.k_new.nan_to_num(0.1), t.v_new.nan_to_num(0.1)
    bad = 1
    if what == "kv too long":
        t.kv_lens[bad] = 8
    elif what == "kv negative":
        t.kv_lens[bad] = -1
    elif what == "q too long":
        t.q_lens[bad] = 6
    elif what == "append too long":
        t.kv_lens[bad] = 7
    elif what == "new too long":
        t.new_lens[bad] = 4
    else:
        t.page_table[bad, 1] = t.k.shape[0]
    cache = t.k[bad].clone()
    out, lse = attention(problem, t)
    rows = 5 if what == "q too long" else 3
    assert torch.isnan(out[bad, :rows]).all() and torch.isnan(lse[bad, :, :rows]).all()
    assert (out[bad, rows:] == 0).all() and (lse[bad, :, rows:] == -INF).all()
    assert torch.isfinite(out[[0, 2]]).all() and torch.isfinite(lse[0, :, :2]).all()
    assert torch.equal(cache, t.k[bad])


def test_cumulative_lengths_are_clamped() -> None:
    problem, t = build(Case("packed", batch=3, seed=3))
    t.q, t.k, t.v = (x.nan_to_num(0.5) for x in (t.q, t.k, t.v))
    t.cu_seqlens_q, t.cu_seqlens_k = torch.tensor([0, 3, 2, 99]), torch.tensor([-1, 2, 3, 99])
    good = replace(t, cu_seqlens_q=torch.tensor([0, 3, 3, t.q.shape[0]]))
    good.cu_seqlens_k = torch.tensor([0, 2, 3, t.k.shape[0]])
    for a, b in zip(attention(problem, t), attention(problem, good), strict=True):
        assert torch.equal(a, b)


def test_results_depend_on_every_operand_even_without_queries() -> None:
    for sizes in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
        b, sq, sk = sizes
        leaves = [torch.randn(b, n, 2, 3, requires_grad=True) for n in (sq, sk, sk)]
        out, lse = attention(*simple(*leaves))
        grads = torch.autograd.grad((out.sum(), lse[lse > -INF].sum()), leaves)
        assert all((g == 0).all() and g.shape == x.shape for g, x in zip(grads, leaves, strict=True))
