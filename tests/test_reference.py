"""The float64 definition against a scalar transcription of the contract, its derivatives, and its face as a backend."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from reference_problems import INF, LAYOUTS, Case, build, cases, normals, run, simple

from attnlib.backend import Backend, Plan, Target, capability_refusals
from attnlib.dropout import dropout_mask
from attnlib.errors import UnsupportedError
from attnlib.problem import AttentionProblem, Feature, Tensors
from attnlib.reference import ReferenceBackend, attention

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
