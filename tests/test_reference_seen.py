"""The float64 definition on inputs that broke attention libraries in public."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from reference_problems import INF, NAN, Case, build, normals, run, simple

from attnlib.dropout import dropout_mask
from attnlib.problem import AttentionProblem, Tensors, Window
from attnlib.reference import attention


def test_AB_001_many_queries_one_key_packed() -> None:
    q, k, v = (3 * x for x in normals(1, (256, 1, 32), (3, 1, 32), (3, 1, 32), dtype=torch.float16))
    cu_q, cu_k = torch.tensor([0, 76, 110, 256]), torch.tensor([0, 1, 2, 3])
    problem = AttentionProblem(
        q.dtype, 3, 146, 1, 1, 1, 32, 32, 32**-0.5, total_q=256, total_k=3, packed=True, window=Window(None, 0),
        grads=("q", "k", "v"),
    )  # fmt: skip
    tensors = Tensors(
        q, k, v, torch.empty_like(q), torch.empty(1, 256), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k,
        dout=torch.ones_like(q),
    )  # fmt: skip
    result = run(problem, tensors)
    last = torch.zeros(256, dtype=torch.bool)
    last[cu_q[1:] - 1] = True
    assert (result.dq == 0).all() and (result.dk == 0).all() and (result.dv == 1).all()
    assert (result.out[~last] == 0).all() and (result.lse[0, ~last] == -INF).all()
    assert torch.equal(result.out[last], v)


def test_AB_002_one_query_one_key() -> None:
    for seed in range(200):
        q, k, v = (3 * x for x in normals(seed, *[(1, 1, 1, 16)] * 3, dtype=torch.float16))
        result = run(*simple(q, k, v, dout=torch.ones_like(q)))
        assert (result.dq == 0).all() and (result.dk == 0).all() and (result.dv == 1).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_AB_004_empty_row_by_mask_and_by_bias(dtype: torch.dtype) -> None:
    q, k, v, dout = normals(2, *[(1, 4, 1, 8)] * 4, dtype=dtype)
    dout[:, 1] = NAN
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[1] = False
    bias = torch.zeros(4, 4, dtype=dtype).masked_fill(~mask, -INF)
    first, second = run(*simple(q, k, v, mask=mask, dout=dout)), run(*simple(q, k, v, bias=bias, dout=dout))
    assert (first.out[:, 1] == 0).all() and (first.lse[..., 1] == -INF).all() and (first.dq[:, 1] == 0).all()
    for name in ("out", "lse", "dq", "dk", "dv"):
        a, b = getattr(first, name), getattr(second, name)
        assert torch.isfinite(a[a != -INF]).all()
        torch.testing.assert_close(a, b)


def test_AB_005_empty_row_and_shared_weights() -> None:
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(4, 12).double(), torch.randn(1, 5, 4).double()
    mask = torch.ones(5, 5).tril().bool() & torch.tensor([False, True, True, False, True])

    def weight_grad(rows: list[int]) -> torch.Tensor:
        q, k, v = (y[:, :, None] for y in linear(x).chunk(3, -1))
        out, _ = attention(*simple(q[:, rows], k, v, mask=mask[rows]))
        keep = [n for n, row in enumerate(rows) if mask[row].any()]
        (grad,) = torch.autograd.grad((out[:, keep] ** 2).sum(), linear.weight)
        return grad

    assert not mask[0].any()
    torch.testing.assert_close(weight_grad([0, 1, 2, 3, 4]), weight_grad([1, 2, 3, 4]), rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_AB_007_AB_032_finite_minimum_is_a_bias(dtype: torch.dtype) -> None:
    q, k, v, dout = normals(3, *[(1, 3, 1, 4)] * 4, dtype=dtype)
    bias = torch.ones(3, 3, dtype=dtype)
    bias[0] = torch.finfo(dtype).min
    result = run(*simple(q, k, v, bias=bias, dout=dout))
    torch.testing.assert_close(result.out[:, 0], v.mean(1))
    only = torch.zeros_like(dout)
    only[:, 0] = dout[:, 0]
    result = run(*simple(q, k, v, bias=bias, dout=only))
    torch.testing.assert_close(result.dv, (dout[:, :1] / 3).expand(1, 3, 1, 4))
    # a whole leading block of it
    q, k, v = normals(4, *[(1, 200, 1, 4)] * 3, dtype=dtype)
    bias = torch.zeros(200, 200, dtype=dtype)
    bias[:, :128] = torch.finfo(dtype).min
    out, lse = attention(*simple(q, k, v, bias=bias))
    due, due_lse = attention(*simple(q, k[:, 128:], v[:, 128:], bias=bias[:, 128:]))
    assert torch.equal(out, due) and torch.equal(lse, due_lse)


def test_AB_032_half_minimum_keeps_the_scores_and_a_sum_of_minima_is_a_mask() -> None:
    q, k, v = normals(5, *[(1, 2, 1, 4)] * 3, dtype=torch.float16)
    bias = torch.full((2, 2), -65504.0, dtype=torch.float16)
    out, _ = attention(*simple(q, k, v, bias=bias))
    due, _ = attention(*simple(q, k, v))
    torch.testing.assert_close(out, due, rtol=0, atol=2.0**-7)
    for dtype in (torch.float32, torch.bfloat16):
        twice = torch.full((2, 2), torch.finfo(dtype).min, dtype=dtype) * 2
        out, lse = attention(*simple(q.to(dtype), k.to(dtype), v.to(dtype), bias=twice))
        assert (out == 0).all() and (lse == -INF).all()


@pytest.mark.parametrize("shift", [-200.0, 200.0])
def test_AB_011_a_constant_bias_changes_only_lse(shift: float) -> None:
    q, k, v, dout = normals(6, *[(1, 13, 1, 4)] * 4, dtype=torch.float32)
    plain = run(*simple(q, k, v, bias=torch.zeros(1, 1, 1, 1), dout=dout))
    moved = run(*simple(q, k, v, bias=torch.full((1, 1, 1, 1), shift), dout=dout))
    for name in ("out", "dq", "dk", "dv"):
        torch.testing.assert_close(getattr(moved, name), getattr(plain, name), rtol=3e-5, atol=3e-5)
    torch.testing.assert_close(moved.lse - shift, plain.lse, rtol=0, atol=200 * 2.0**-22)


@pytest.mark.parametrize("poison", [NAN, INF])
def test_AB_016_AB_017_stale_slots_and_pages_before_the_window(poison: float) -> None:
    problem, t = build(Case("paged", batch=1, seqlen_q=1, seqlen_k=13, seed=1))
    pages = torch.arange(16).view(16)[:5]
    t.k, t.v = normals(7, (6, 3, 2, 4), (6, 3, 2, 3))
    t.q_lens, t.kv_lens, t.page_table = torch.tensor([1]), torch.tensor([13]), pages[None].int()
    t.q = t.q.nan_to_num(0.2)
    for window in (Window(), Window(5, 0)):
        problem = replace(problem, window=window)
        due = attention(problem, t)
        k, v = t.k.clone(), t.v.clone()
        k[4, 1:] = v[4, 1:] = k[5] = v[5] = poison
        table = t.page_table.clone()
        if window.left is not None:  # keys 7..12 are seen: pages 0 and 1 may be anything
            k[:2] = v[:2] = poison
            table[0, :2] = -1
        for a, b in zip(due, attention(problem, replace(t, k=k, v=v, page_table=table)), strict=True):
            assert torch.equal(a, b)


def test_AB_019_shared_pages() -> None:
    k, v, q = normals(8, (4, 16, 1, 4), (4, 16, 1, 4), (2, 1, 2, 4))
    table = torch.tensor([[0, 1], [0, 2]], dtype=torch.int32)
    problem = AttentionProblem(torch.float64, 2, 1, 32, 2, 1, 4, 4, 0.5, lengths=True, page_size=16)
    t = Tensors(q, k, v, q, q, kv_lens=torch.tensor([17, 20]), page_table=table)
    out, _ = attention(problem, t)
    for b, (second, length) in enumerate(((1, 17), (2, 20))):
        dense = [torch.cat([x[0], x[second]])[None, :length] for x in (k, v)]
        due, _ = attention(*simple(q[b : b + 1], *dense, scale=0.5))
        torch.testing.assert_close(out[b : b + 1], due, rtol=1e-14, atol=1e-15)


def test_AB_023_append_writes_each_row_at_its_own_place() -> None:
    k, v, q, k_new, v_new = normals(9, *[(3, 8, 1, 4)] * 2, (3, 1, 1, 4), *[(3, 1, 1, 4)] * 2)
    lens = torch.tensor([0, 5, 2])
    problem = AttentionProblem(torch.float64, 3, 1, 8, 1, 1, 4, 4, 0.5, lengths=True, append=True)
    before = k.clone()
    out, _ = attention(problem, Tensors(q, k, v, q, q, kv_lens=lens, k_new=k_new, v_new=v_new))
    for b, length in enumerate(lens.tolist()):
        assert torch.equal(k[b, length], k_new[b, 0])
        rest = torch.arange(8) != length
        assert torch.equal(k[b, rest], before[b, rest])
        due, _ = attention(*simple(q[b : b + 1], k[b : b + 1, : length + 1], v[b : b + 1, : length + 1], scale=0.5))
        torch.testing.assert_close(out[b : b + 1], due, rtol=1e-14, atol=1e-15)
    assert lens.tolist() == [0, 5, 2]


@pytest.mark.parametrize(
    ("q_lens", "k_lens", "heads", "kv_heads", "dim"),
    [([1, 0, 1], [3, 0, 5], 9, 3, 64), ([0, 0, 0, 1], [0, 0, 0, 1], 21, 7, 120)],
)
def test_AB_025_AB_026_AB_028_packed_with_empty_sequences_and_a_tail(
    q_lens: list[int], k_lens: list[int], heads: int, kv_heads: int, dim: int
) -> None:
    tail, total = 3, sum(q_lens)
    q, k, v = normals(10, (total + tail, heads, dim), *[(sum(k_lens), kv_heads, dim)] * 2, dtype=torch.bfloat16)
    q[total:] = NAN
    cu_q, cu_k = (torch.tensor([0, *torch.tensor(n).cumsum(0).tolist()]) for n in (q_lens, k_lens))
    problem = AttentionProblem(
        q.dtype, len(q_lens), max(q_lens), max(k_lens), heads, kv_heads, dim, dim, dim**-0.5, total_q=total + tail,
        total_k=sum(k_lens), packed=True, window=Window(None, 0), grads=("q", "k", "v"),
    )  # fmt: skip
    dout = torch.full_like(q, NAN)
    dout[:total] = 1
    lse = torch.empty(heads, total + tail)
    result = run(problem, Tensors(q, k, v, q.clone(), lse, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, dout=dout))
    for (q0, q1), (k0, k1) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        due, due_lse = attention(*simple(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], window=Window(None, 0)))
        assert torch.equal(result.out[q0:q1], due[0]) and torch.equal(result.lse[:, q0:q1], due_lse[0])
    assert (result.out[total:] == 0).all() and (result.lse[:, total:] == -INF).all() and (result.dq[total:] == 0).all()
    assert all(torch.isfinite(x).all() for x in (result.dq, result.dk, result.dv))


def test_AB_031_softcap_saturates_and_comes_before_the_mask() -> None:
    scores = torch.tensor([4400.0, 5000.0, -10000.0]).double()
    q, v = torch.ones(1, 1, 1, 1).double().requires_grad_(), torch.eye(3).double()[None, :, None]
    for hidden in (False, True):
        mask = torch.tensor([[True, not hidden, True]])
        out, lse = attention(*simple(q, scores.view(1, 3, 1, 1), v, softcap=50.0, scale=1.0, mask=mask))
        top = 1.0 if hidden else 2.0
        torch.testing.assert_close(lse.item(), 50 + math.log(top + math.exp(-100.0)))
        (grad,) = torch.autograd.grad((out * torch.tensor([1.0, 2.0, 3.0])).sum(), q)
        assert grad.item() == 0


@pytest.mark.parametrize("length", [32767, 32769, 33728, 65537])
def test_AB_034_many_zero_keys(length: int) -> None:
    zeros = torch.zeros(1, 16, 1, 2), torch.zeros(1, length, 1, 2), torch.zeros(1, length, 1, 2)
    out, lse = attention(*simple(*zeros))
    assert (out == 0).all()
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(length)))


def test_AB_041_AB_044_expanded_heads_and_any_dout_stride() -> None:
    q, one, two = normals(11, (2, 5, 4, 3), (2, 6, 1, 3), (2, 6, 1, 3))
    for dout in (torch.ones(1).double().expand(2, 5, 4, 3), normals(12, (2, 4, 5, 3))[0].transpose(1, 2)):
        due = run(*simple(q, one, two, dout=dout.contiguous()))
        got = run(*simple(q, one.expand(2, 6, 4, 3), two.expand(2, 6, 4, 3), dout=dout))
        torch.testing.assert_close(got.out, due.out)
        torch.testing.assert_close(got.dk.sum(2, keepdim=True), due.dk)
        torch.testing.assert_close(got.dv.sum(2, keepdim=True), due.dv)


def test_AB_047_one_query_is_the_last_row() -> None:
    problem, t = build(Case(seqlen_q=2, alibi=True, left=3, softcap=2.0, bias=(0,), sinks=True, right=0))
    out, lse = attention(problem, t)
    one = replace(t, q=t.q[:, 1:], bias=t.bias[:, :, 1:])
    last, last_lse = attention(replace(problem, seqlen_q=1, total_q=2), one)
    torch.testing.assert_close(last, out[:, 1:], rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(last_lse, lse[..., 1:], rtol=1e-14, atol=1e-15)


def test_AB_055_causal_and_mask_and_bias_all_apply() -> None:
    q, k, v, bias = normals(13, *[(1, 4, 1, 2)] * 3, (1, 1, 4, 4))
    mask = torch.tensor([True, True, False, True]).expand(4, 4)
    both, _ = attention(*simple(q, k, v, mask=mask, bias=bias, window=Window(None, 0)))
    whole = bias.masked_fill(~(mask & torch.ones(4, 4).tril().bool()), -INF)
    due, _ = attention(*simple(q, k, v, bias=whole))
    torch.testing.assert_close(both, due, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize(("left", "counts"), [(4, [1, 2, 3, 4, 5, 5, 5, 5, 5]), (3, [1, 2, 3, 4, 4, 4, 4, 4, 4])])
def test_AB_056_window_counts(left: int, counts: list[int]) -> None:
    zeros = torch.zeros(1, 9, 1, 1).double()
    _, lse = attention(*simple(zeros, zeros, zeros, window=Window(left, 0)))
    assert lse.exp().round().flatten().tolist() == counts


def test_AB_058_one_query_behind_a_window() -> None:
    q, k = torch.zeros(1, 1, 1, 1).double(), torch.zeros(1, 256, 1, 1).double()
    v = torch.arange(256).double().view(1, 256, 1, 1)
    for sinks in (None, torch.zeros(1).double()):
        out, lse = attention(*simple(q, k, v, window=Window(128, 0), sinks=sinks))
        total = 129 + (sinks is not None)
        torch.testing.assert_close(lse.exp().item(), float(total))
        torch.testing.assert_close(out.item(), sum(range(127, 256)) / total)


def test_AB_059_alibi_is_relative_to_the_aligned_position() -> None:
    zeros = torch.zeros(1, 6, 1, 1).double()
    for slopes in (torch.tensor([0.5]), torch.tensor([[0.5]])):
        _, full = attention(*simple(zeros, zeros, zeros, alibi_slopes=slopes))
        _, last = attention(*simple(zeros[:, :1], zeros, zeros, alibi_slopes=slopes))
        due = math.log(sum(math.exp(-0.5 * j) for j in range(6)))
        torch.testing.assert_close(last.item(), due)
        torch.testing.assert_close(full[..., -1].item(), due)


def test_AB_061_gradient_through_lse() -> None:
    q, k, v, dlse = normals(14, (1, 3, 1, 2), (1, 4, 1, 2), (1, 4, 1, 2), (1, 1, 3))
    result = run(*simple(q, k, v, scale=0.7, dlse=dlse))
    p = torch.softmax(0.7 * q[0, :, 0] @ k[0, :, 0].T, -1) * dlse[0, 0, :, None]
    torch.testing.assert_close(result.dq[0, :, 0], 0.7 * p @ k[0, :, 0])
    torch.testing.assert_close(result.dk[0, :, 0], 0.7 * p.T @ q[0, :, 0])
    assert (result.dv == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_AB_062_sinks(dtype: torch.dtype) -> None:
    q, k, v = (
        torch.zeros(1, 3, 2, 2, dtype=dtype),
        torch.zeros(1, 4, 2, 2, dtype=dtype),
        torch.ones(1, 4, 2, 2, dtype=dtype),
    )
    sinks = torch.tensor([0.5, 100.0], dtype=dtype)
    result = run(*simple(q, k, v, sinks=sinks, dout=torch.ones_like(q), grads=("q", "sinks")))
    torch.testing.assert_close(result.out[0, :, 0], torch.full((3, 2), 4 / (4 + math.exp(0.5)), dtype=dtype))
    assert (result.out[0, :, 1] < 2e-43).all()
    torch.testing.assert_close(result.lse[0, :, 0], torch.tensor([1.73143, 100.0], dtype=dtype), rtol=0, atol=5e-6)
    weight = math.exp(0.5) / (4 + math.exp(0.5))
    torch.testing.assert_close(result.dsinks[0].item(), -3 * weight * 2 * 4 / (4 + math.exp(0.5)))
    # no key at all: out 0, lse the sink, dsinks receives dlse
    dlse = torch.ones(1, 2, 3, dtype=result.lse.dtype)
    nan = torch.full_like(q, NAN)
    result = run(*simple(q, k[:, :0], v[:, :0], sinks=sinks, dlse=dlse, dout=nan, grads=("q", "sinks")))
    assert (result.out == 0).all() and torch.equal(result.lse[0, :, 0], sinks) and result.dsinks.tolist() == [3.0, 3.0]


def test_AB_071_dropout_follows_softmax() -> None:
    q, k, v = normals(15, (1, 4, 1, 2), (1, 4, 1, 2), (1, 4, 1, 2))
    plain, plain_lse = attention(*simple(q, k, v, window=Window(None, 0)))
    zero, _ = attention(*simple(q, k, v, window=Window(None, 0), dropout_p=1e-6, dropout_seed=torch.tensor([3])))
    assert torch.equal(plain, zero)
    for p in (0.5, 0.99):
        out, lse = attention(*simple(q, k, v, window=Window(None, 0), dropout_p=p, dropout_seed=torch.tensor([3])))
        kept = dropout_mask(3, p, 1, 1, 4, 4)[0, 0, 0, 0]
        scale = 1 / (1 - int(p * 65536 + 0.5) / 65536)
        torch.testing.assert_close(out[0, 0], plain[0, 0] * kept * scale, rtol=1e-14, atol=0)
        assert torch.equal(lse, plain_lse)
    ones = torch.ones_like(v)
    result = run(*simple(q, k, v, dropout_p=1.0, dropout_seed=torch.tensor([3]), dout=ones))
    assert all((x == 0).all() for x in (result.out, result.dq, result.dk, result.dv))


def test_AB_082_empty_sizes() -> None:
    for b, sq, sk, h, hkv, dv in [
        (0, 3, 4, 2, 2, 3),
        (2, 0, 4, 2, 2, 3),
        (2, 3, 0, 2, 2, 3),
        (2, 3, 4, 0, 0, 3),
        (2, 3, 4, 2, 1, 0),
    ]:
        q, k, v, dout = normals(16, (b, sq, h, 3), (b, sk, hkv, 3), (b, sk, hkv, dv), (b, sq, h, dv))
        result = run(*simple(q, k, v, dout=dout, dlse=torch.ones(b, h, sq).double()))
        assert result.out.shape == (b, sq, h, dv) and result.lse.shape == (b, h, sq)
        if sk == 0:
            assert (result.out == 0).all() and (result.lse == -INF).all() and (result.dq == 0).all()
        if dv == 0:
            due = attention(*simple(q, k, torch.zeros(b, sk, hkv, 1).double()))[1]
            torch.testing.assert_close(result.lse, due)


def test_AB_089_lse_is_the_natural_log_of_the_true_scores() -> None:
    q, k, v = normals(17, (1, 1, 1, 4), (1, 1, 1, 4), (1, 1, 1, 4))
    _, lse = attention(*simple(q, k, v, scale=0.3))
    torch.testing.assert_close(lse.item(), 0.3 * float((q * k).sum()))
    zero = torch.zeros(1, 2, 1, 4)
    _, lse = attention(*simple(zero, torch.zeros(1, 7, 1, 4), torch.zeros(1, 7, 1, 4)))
    torch.testing.assert_close(lse, torch.full((1, 1, 2), math.log(7.0)))
    assert lse.dtype == torch.float32
