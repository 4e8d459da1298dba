"""The float64 definition against a scalar transcription of the contract, its derivatives, and the public fault cases.

`build` makes the problem and canonical tensors of any layout and feature; everything outside a sequence is NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlib.backend import Backend, Plan, Target, capability_refusals
from attnlib.dropout import dropout_mask
from attnlib.errors import UnsupportedError
from attnlib.problem import AttentionProblem, Feature, Tensors, Window
from attnlib.reference import ReferenceBackend, ReferencePlan, attention, selected_product

NAN, INF = float("nan"), float("inf")
LAYOUTS = ("dense", "lengths", "packed", "paged", "append", "paged append")


@dataclass(frozen=True)
class Case:
    """A small problem to draw; every field is independent of the others."""

    layout: str = "dense"
    dtype: torch.dtype = torch.float64
    batch: int = 2
    seqlen_q: int = 5
    seqlen_k: int = 7
    num_heads_kv: int = 2
    group: int = 2
    head_dim: int = 4
    head_dim_v: int = 3
    left: int | None = None
    right: int | None = None
    top_left: bool = False
    softcap: float | None = None
    bias: tuple[int, ...] | None = None  # which of the four dimensions broadcast
    bias_inf: bool = False
    mask: bool = False
    alibi: bool = False
    sinks: bool = False
    block_mask: bool = False
    dropout_p: float = 0.0
    scale: float = 0.5
    factor: float = 1.0
    seed: int = 0


def cases(**fixed: Any) -> st.SearchStrategy[Case]:
    maybe = st.one_of(st.none(), st.integers(0, 6))
    drawn: dict[str, Any] = {
        "layout": st.sampled_from(LAYOUTS),
        "dtype": st.sampled_from([torch.float64, torch.float32]),
        "batch": st.integers(1, 3),
        "seqlen_q": st.integers(1, 6),
        "seqlen_k": st.integers(1, 8),
        "num_heads_kv": st.integers(1, 2),
        "group": st.integers(1, 3),
        "head_dim_v": st.integers(1, 5),
        "left": maybe,
        "right": maybe,
        "top_left": st.booleans(),
        "softcap": st.sampled_from([None, 0.7, 3.0]),
        "bias": st.sampled_from([None, (), (0,), (0, 1), (2,), (1, 3), (0, 1, 2, 3)]),
        "bias_inf": st.booleans(),
        "mask": st.booleans(),
        "alibi": st.booleans(),
        "sinks": st.booleans(),
        "block_mask": st.booleans(),
        "dropout_p": st.sampled_from([0.0, 0.0, 0.3, 1.0]),
        "scale": st.sampled_from([0.5, -0.3, 0.0]),
        "seed": st.integers(0, 10**6),
    }
    return st.builds(Case, **{**drawn, **{name: st.just(value) for name, value in fixed.items()}})


def build(case: Case) -> tuple[AttentionProblem, Tensors]:
    """Problem and tensors of a case: inputs normal, lengths random, all that lies outside a sequence NaN."""
    g = torch.Generator().manual_seed(case.seed)
    b, sq, sk, hkv, dtype = case.batch, case.seqlen_q, case.seqlen_k, case.num_heads_kv, case.dtype
    hq, d, dv = hkv * case.group, case.head_dim, case.head_dim_v
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return (torch.randn(shape, generator=g, dtype=torch.float64) * case.factor).to(dtype)

    def ints(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high + 1, (b,), generator=g, dtype=torch.int32)

    packed, append, paged = case.layout == "packed", "append" in case.layout, "paged" in case.layout
    q_lens = kv_lens = cu_q = cu_k = table = k_new = v_new = new_lens = None
    q, k, v, dout = (normal(b, n, h, w) for n, h, w in ((sq, hq, d), (sk, hkv, d), (sk, hkv, dv), (sq, hq, dv)))
    dlse = normal(b, hq, sq, dtype=wide)
    if case.layout != "dense":
        q_lens, kv_lens = ints(0, sq), ints(0, sk)
        for n in range(b):
            for x, lens in ((q, q_lens), (k, kv_lens), (v, kv_lens), (dout, q_lens)):
                x[n, int(lens[n]) :] = NAN
            dlse[n, :, int(q_lens[n]) :] = NAN
    if append:
        room = 3
        k_new, v_new = normal(b, room, hkv, d), normal(b, room, hkv, dv)
        new_lens = torch.minimum(ints(0, room), sk - kv_lens).to(torch.int32)
        for n in range(b):
            k_new[n, int(new_lens[n]) :] = v_new[n, int(new_lens[n]) :] = NAN
    page_size = 3 if paged else None
    if paged:
        per = -(-sk // 3)
        table = torch.full((b, per + 1), -1, dtype=torch.int32)
        order = torch.randperm(b * per + 1, generator=g).to(torch.int32)
        pools = [torch.full((b * per + 1, 3, *x.shape[2:]), NAN, dtype=dtype) for x in (k, v)]
        lens = kv_lens + (new_lens if append else 0)
        for n in range(b):
            for page in range(-(-int(lens[n]) // 3)):
                table[n, page] = order[n * per + page]
                for pool, x in zip(pools, (k, v), strict=True):
                    part = x[n, page * 3 : page * 3 + 3]
                    pool[int(table[n, page]), : part.shape[0]] = part
        k, v = pools
    if packed:
        lens_q, lens_k = [int(n) for n in q_lens], [int(n) for n in kv_lens]
        cu_q, cu_k = (
            torch.tensor([0, *torch.tensor(n).cumsum(0).tolist()], dtype=torch.int32) for n in (lens_q, lens_k)
        )

        def flat(x: torch.Tensor, lens: list[int]) -> torch.Tensor:
            return torch.cat([*(x[n, :m] for n, m in enumerate(lens)), torch.full_like(x[0, :2], NAN)])

        q, dout, k, v = flat(q, lens_q), flat(dout, lens_q), flat(k, lens_k), flat(v, lens_k)
        dlse = flat(dlse.transpose(1, 2), lens_q).T
        q_lens = kv_lens = None
    bias = mask = slopes = sinks = blocks = None
    if case.bias is not None:
        shape = [1 if n in case.bias else size for n, size in enumerate((b, hq, sq, sk))]
        bias = normal(*shape, dtype=wide) * 2
        if case.bias_inf:
            bias[torch.rand(shape, generator=g) < 0.25] = -INF
        bias = bias.expand(b, hq, sq, sk)
    if case.mask:
        mask = (torch.rand((b, 1, sq, sk), generator=g) < 0.7).expand(b, hq, sq, sk)
    if case.alibi:
        slopes = torch.rand((hq,), generator=g).expand(b, hq)
    if case.sinks:
        sinks = normal(hq, dtype=wide)
    if case.block_mask:
        blocks = (torch.rand((1, hq, -(-sq // 16), -(-sk // 16)), generator=g) < 0.7).expand(b, -1, -1, -1)
    grads = ["q"] if append else ["q", "k", "v"]
    grads += [name for name, operand in (("bias", bias), ("sinks", sinks)) if operand is not None]
    problem = AttentionProblem(
        dtype, b, sq, sk, hq, hkv, d, dv, case.scale, total_q=q.shape[0] if packed else -1,
        total_k=k.shape[0] if packed else -1, packed=packed, window=Window(case.left, case.right),
        top_left=case.top_left, softcap=case.softcap, bias=None if bias is None else wide, mask=case.mask,
        alibi=case.alibi, sinks=wide if case.sinks else None, block_mask=(16, 16) if case.block_mask else None,
        lengths=case.layout not in ("dense", "packed"), page_size=page_size, append=append, dropout_p=case.dropout_p,
        grads=tuple(grads),
    )  # fmt: skip
    out, lse = torch.full_like(dout, NAN), torch.full_like(dlse, NAN).contiguous()
    tensors = Tensors(
        q, k, v, out, lse, bias=bias, mask=mask, alibi_slopes=slopes, sinks=sinks, block_mask=blocks, q_lens=q_lens,
        kv_lens=kv_lens, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, page_table=table, k_new=k_new, v_new=v_new,
        new_lens=new_lens, dropout_seed=torch.tensor([case.seed - 77]) if case.dropout_p else None,
        dout=dout, dlse=dlse,
    )  # fmt: skip
    return problem, tensors


def run(problem: AttentionProblem, tensors: Tensors) -> Tensors:
    """Forward and backward through the backend's plan, results NaN-filled before."""
    plan = ReferencePlan()
    wide = torch.float64 if tensors.q.dtype == torch.float64 else problem.accumulate_dtype
    result = replace(tensors, stats=torch.full((2, *tensors.lse.shape), NAN, dtype=torch.float64))
    plan.forward(problem, result)
    for name in ("q", "k", "v"):
        if name in problem.grads:
            setattr(result, "d" + name, torch.full_like(getattr(tensors, name), NAN))
    if tensors.bias is not None and "bias" in problem.grads:
        own = [1 if step == 0 else n for n, step in zip(tensors.bias.shape, tensors.bias.stride(), strict=True)]
        result.dbias = torch.zeros(own, dtype=wide).expand(tensors.bias.shape)
    if tensors.sinks is not None and "sinks" in problem.grads:
        result.dsinks = torch.zeros(problem.num_heads_q, dtype=wide)
    if problem.grads:
        plan.backward(problem, result)
    return result


def simple(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> tuple[AttentionProblem, Tensors]:
    """A dense problem from tensors [batch, seqlen, heads, dim]; operands and fields of the problem by name."""
    operands = {n: more.pop(n) for n in list(more) if n in Tensors.__dataclass_fields__ and n not in ("bias", "mask")}
    b, sq, hq, d = q.shape
    shape = (b, hq, sq, k.shape[1])
    for name in ("bias", "mask"):
        if more.get(name) is not None:
            operands[name] = more[name].expand(shape)
            more[name] = more[name].dtype if name == "bias" else True
    if operands.get("sinks") is not None:
        more["sinks"] = operands["sinks"].dtype
    if operands.get("alibi_slopes") is not None:
        more["alibi"], operands["alibi_slopes"] = True, operands["alibi_slopes"].expand(b, hq)
    scale = more.pop("scale", d**-0.5)
    grads = more.pop("grads", ("q", "k", "v"))
    problem = AttentionProblem(
        q.dtype, b, sq, k.shape[1], hq, k.shape[2], d, v.shape[-1], scale, grads=grads,
        lengths="kv_lens" in operands or "q_lens" in operands, **more,
    )  # fmt: skip
    out = q.new_empty(b, sq, hq, v.shape[-1])
    lse = torch.empty((b, hq, sq), dtype=problem.accumulate_dtype)
    return problem, Tensors(q, k, v, out, lse, **operands)


def normals(seed: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes]


# ---------------------------------------------------------------- the contract, one scalar at a time


def literal(problem: AttentionProblem, t: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """docs/semantics.md sections 1 to 6 in Python's floats, for small problems."""
    p, narrow = problem, problem.dtype != torch.float64
    out = torch.zeros(*t.q.shape[:-1], p.head_dim_v, dtype=torch.float64)
    lse = torch.full(t.lse.shape, -INF, dtype=torch.float64)
    kept = (
        dropout_mask(t.dropout_seed, p.dropout_p, p.batch, p.num_heads_q, p.seqlen_q, p.seqlen_k)
        if p.dropout_p
        else None
    )
    for b in range(p.batch):
        if p.packed:
            q0, q1 = int(t.cu_seqlens_q[b]), int(t.cu_seqlens_q[b + 1])
            k0, k1 = int(t.cu_seqlens_k[b]), int(t.cu_seqlens_k[b + 1])
            queries, keys, values = t.q[q0:q1], list(t.k[k0:k1]), list(t.v[k0:k1])
        else:
            queries = t.q[b, : p.seqlen_q if t.q_lens is None else int(t.q_lens[b])]
            n = p.seqlen_k if t.kv_lens is None else int(t.kv_lens[b])
            if p.page_size:
                spots = [(int(t.page_table[b, j // p.page_size]), j % p.page_size) for j in range(n)]
            else:
                spots = [(b, j) for j in range(n)]
            keys, values = [t.k[s] for s in spots], [t.v[s] for s in spots]
            if t.k_new is not None:
                keys += list(t.k_new[b, : int(t.new_lens[b])])
                values += list(t.v_new[b, : int(t.new_lens[b])])
        for h in range(p.num_heads_q):
            for i, query in enumerate(queries):
                pos = i if p.top_left else i + len(keys) - len(queries)
                scores: dict[int, float] = {}
                for j, key in enumerate(keys):
                    left, right = p.window
                    hidden = (left is not None and j < pos - left) or (right is not None and j > pos + right)
                    hidden = hidden or (t.mask is not None and not t.mask[b, h, i, j])
                    hidden = hidden or (t.block_mask is not None and not t.block_mask[b, h, i // 16, j // 16])
                    if hidden:
                        continue
                    s = p.scale * float(query[h].double() @ key[h // p.group].double())
                    s = p.softcap * math.tanh(s / p.softcap) if p.softcap else s
                    s += float(t.bias[b, h, i, j]) if t.bias is not None else 0.0
                    s -= float(t.alibi_slopes[b, h]) * abs(pos - j) if t.alibi_slopes is not None else 0.0
                    if narrow and (t.bias is not None or t.alibi_slopes is not None):
                        s = float(torch.tensor(s, dtype=torch.float64).float())
                    if s != -INF:
                        scores[j] = s
                sink = [float(t.sinks[h])] if t.sinks is not None else []
                if not scores and not sink:
                    continue
                m = max([*scores.values(), *sink])
                total = sum(math.exp(s - m) for s in [*scores.values(), *sink])
                row = torch.zeros(p.head_dim_v, dtype=torch.float64)
                for j, s in scores.items():
                    if kept is None or kept[b, h, i, j]:
                        weight = math.exp(s - m) / total / (1 - p.dropout_threshold / 65536)
                        row += weight * values[j][h // p.group].double()
                if p.packed:
                    out[q0 + i, h], lse[h, q0 + i] = row, m + math.log(total)
                else:
                    out[b, i, h], lse[b, h, i] = row, m + math.log(total)
    return out, lse


def narrow_tolerance(problem: AttentionProblem) -> dict[str, float]:
    return {"rtol": 1e-12, "atol": 1e-12} if problem.dtype == torch.float64 else {"rtol": 3e-7, "atol": 3e-7}


@settings(max_examples=150, deadline=None)
@given(cases())
def test_equals_the_scalar_transcription(case: Case) -> None:
    problem, tensors = build(case)
    due_out, due_lse = literal(problem, tensors)
    before = [x.clone() for x in (tensors.k, tensors.v)]
    out, lse = attention(problem, tensors)
    assert out.dtype == problem.dtype and lse.dtype == problem.accumulate_dtype
    torch.testing.assert_close(out.double(), due_out, **narrow_tolerance(problem))
    torch.testing.assert_close(lse.double(), due_lse, **narrow_tolerance(problem))
    if not problem.append:
        for old, new in zip(before, (tensors.k, tensors.v), strict=True):
            assert torch.equal(old.view(torch.uint8), new.view(torch.uint8))


@settings(max_examples=80, deadline=None)
@given(cases())
def test_backend_writes_everything_and_equals_autograd(case: Case) -> None:
    problem, tensors = build(case)
    result = run(problem, replace(tensors, k=tensors.k.clone(), v=tensors.v.clone()))
    leaves = {name: getattr(tensors, name).detach().clone() for name in problem.grads}
    if "bias" in leaves:
        leaves["bias"] = result.dbias[tuple(slice(0, 1 if s == 0 else None) for s in result.dbias.stride())].clone()
        view = tensors.bias[tuple(slice(0, 1 if s == 0 else None) for s in tensors.bias.stride())]
        leaves["bias"].copy_(view)
    for leaf in leaves.values():
        leaf.requires_grad_()
    given_ = {**leaves, "bias": leaves["bias"].expand(tensors.bias.shape)} if "bias" in leaves else leaves
    out, lse = attention(problem, replace(tensors, **given_))
    assert torch.equal(out, result.out) and torch.equal(lse, result.lse)
    due = torch.autograd.grad((out, lse), list(leaves.values()), (tensors.dout, tensors.dlse))
    for name, grad in zip(leaves, due, strict=True):
        got = getattr(result, "d" + name)
        got = got[tuple(slice(0, n) for n in grad.shape)] if name == "bias" else got
        assert torch.isfinite(got).all()
        torch.testing.assert_close(got, grad, **narrow_tolerance(problem))
    m, total = result.stats
    lives = result.lse > -INF
    torch.testing.assert_close((m + total.log())[lives], result.lse[lives].double(), **narrow_tolerance(problem))
    assert (m[~lives] == -INF).all() and (total[~lives] == 0).all()


# ---------------------------------------------------------------- derivatives

DERIVATIVE_CASES = {
    "plain": Case(),
    "all": Case(left=3, right=0, softcap=2.0, bias=(0, 1), mask=True, sinks=True, dropout_p=0.3),
    "lengths": Case("lengths", seed=4, bias=(2,), bias_inf=True, top_left=True, right=1),
    "packed": Case("packed", seed=1, alibi=True, sinks=True, batch=3),
    "paged": Case("paged", seed=2, softcap=1.0, block_mask=True, left=2),
}


def differentiable(case: Case) -> tuple[Any, list[torch.Tensor]]:
    problem, tensors = build(replace(case, batch=min(case.batch, 2), seqlen_q=3, seqlen_k=4, group=2, num_heads_kv=1))
    # numerical differences want finite inputs everywhere
    clean = {name: getattr(tensors, name).nan_to_num(0.3) for name in ("q", "k", "v")}
    leaves = [x.requires_grad_() for x in clean.values()]
    if tensors.bias is not None:
        small = tensors.bias[tuple(slice(0, 1 if s == 0 else None) for s in tensors.bias.stride())]
        leaves.append(small.clone().requires_grad_())
    if tensors.sinks is not None:
        leaves.append(tensors.sinks.clone().requires_grad_())

    def function(*args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rest = list(args[3:])
        named: dict[str, Any] = dict(zip("qkv", args, strict=False))
        if tensors.bias is not None:
            named["bias"] = rest.pop(0).expand(tensors.bias.shape)
        if tensors.sinks is not None:
            named["sinks"] = rest.pop(0)
        out, lse = attention(problem, replace(tensors, **named))
        return out, torch.where(lse == -INF, 0.0, lse)

    return function, leaves


@pytest.mark.parametrize("name", DERIVATIVE_CASES)
def test_gradcheck_and_gradgradcheck(name: str) -> None:
    function, leaves = differentiable(DERIVATIVE_CASES[name])
    finite = [x for x in leaves if torch.isfinite(x).all()]
    if len(finite) < len(leaves):  # a bias with -inf cannot be moved
        place = [torch.isfinite(x).all().item() for x in leaves]
        full, whole = list(leaves), function

        def partial(*args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            moving = iter(args)
            return whole(*(next(moving) if ok else x.detach() for ok, x in zip(place, full, strict=True)))

        function, leaves = partial, finite
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


def test_gradcheck_in_full() -> None:
    function, leaves = differentiable(DERIVATIVE_CASES["all"])
    assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize("name", ["all", "packed"])
def test_torch_func(name: str) -> None:
    function, leaves = differentiable(DERIVATIVE_CASES[name])
    leaves = [x.detach() for x in leaves]
    tangents = normals(3, *(tuple(x.shape) for x in leaves))
    _, (jvp, _) = torch.func.jvp(function, tuple(leaves), tuple(tangents))
    pulled, vjp = torch.func.vjp(function, *leaves)
    cotangent = normals(4, tuple(pulled[0].shape))[0]
    pairs = zip(vjp((cotangent, torch.zeros_like(pulled[1]))), tangents, strict=True)
    torch.testing.assert_close((jvp * cotangent).sum(), sum((a * b).sum() for a, b in pairs), rtol=1e-10, atol=1e-10)

    def loss(q: torch.Tensor) -> torch.Tensor:
        out, lse = function(q, *leaves[1:])
        return (out**2).sum() + lse.sum()

    forward_over_reverse = torch.func.hessian(loss)(leaves[0])
    twice_reverse = torch.func.jacrev(torch.func.jacrev(loss))(leaves[0])
    torch.testing.assert_close(forward_over_reverse, twice_reverse, rtol=1e-9, atol=1e-9)


def test_dbias_is_summed_before_it_is_rounded() -> None:
    """4096 rows add 2^-9 each to one bfloat16 element: a sum in bfloat16 would stop early."""
    q, k = torch.zeros(1, 4096, 1, 1), torch.zeros(1, 2, 1, 1)
    v = torch.tensor([1.0, 0.0]).view(1, 2, 1, 1)
    bias = torch.zeros(1, 1, 1, 2, dtype=torch.bfloat16, requires_grad=True)
    out, _ = attention(*simple(q, k, v, bias=bias))
    out.sum().backward()
    assert bias.grad is not None
    assert bias.grad.flatten().tolist() == [1024.0, -1024.0]


# ---------------------------------------------------------------- NaN, Inf, hidden and missing things


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


# ---------------------------------------------------------------- the backend's face


def test_backend_takes_everything() -> None:
    backend = ReferenceBackend()
    assert isinstance(backend, Backend) and backend.name == "reference"
    (family,) = backend.families
    assert family.capabilities.features == frozenset(Feature)
    assert family.capabilities.masked_nan_safe_forward and family.capabilities.masked_nan_safe_backward
    target = Target("cuda", "sm_90", present=False)
    for layout in LAYOUTS:
        problem, _ = build(Case(layout, bias=(), mask=True, sinks=True, alibi=True, softcap=1.0))
        assert capability_refusals(problem, family, target) == ()
        assert isinstance(backend.plan(problem, "", target), Plan)
    assert backend.size_class(problem, "", target) is None
    assert "kernel" in backend.describe(problem, "", target)
    with pytest.raises(UnsupportedError, match=r"reference: needs no config, got \{'block_q': 64\}"):
        backend.plan(problem, "", target, {"block_q": 64})


# ---------------------------------------------------------------- faults seen in public


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
