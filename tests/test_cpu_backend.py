"""The cpu backend at the level of plans: every feature against the float64 definition, and what only it promises.

The conformance suite judges rounding; here the kernels are driven with random features and layouts, and with what the
suite cannot ask for. test_cpu_tiles.py: block sizes, strides, dropout; test_cpu_few.py: few queries;
test_cpu_process.py: threads, fork, memory.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
import torch
from cpu_problems import (
    BF16,
    F16,
    F32,
    F64,
    FAMILIES,
    HERE,
    NAN,
    TOLERANCE,
    assert_close,
    attnlib_cpu,
    bitwise,
    check,
    dense,
    few,
    normal,
    outputs,
    plan_of,
    run,
    with_gradients,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import attnlib
from attnlib.backend import RefusalCode, Target
from attnlib.errors import UnsupportedError
from attnlib.problem import AttentionProblem, Tensors, Window
from attnlib.reference import ReferencePlan

# ---------------------------------------------------------------- every feature


@st.composite
def problems(draw):
    heads_kv = draw(st.sampled_from([1, 2]))
    options = {
        "dtype": draw(st.sampled_from([F64, F32, BF16, F16])),
        "batch": draw(st.sampled_from([1, 2, 3])),
        "seqlen_q": draw(st.sampled_from([1, 5, 16, 33, 70])),
        "seqlen_k": draw(st.sampled_from([0, 1, 7, 16, 31, 64, 100])),
        "heads": heads_kv * draw(st.sampled_from([1, 2, 3])),
        "heads_kv": heads_kv,
        "dim": draw(st.sampled_from([1, 7, 16, 24, 40])),
        "dim_v": draw(st.sampled_from([1, 8, 16, 33])),
        "window": Window(draw(st.sampled_from([None, None, 0, 9])), draw(st.sampled_from([None, 0, 0, 6]))),
        "top_left": draw(st.booleans()),
        "softcap": draw(st.sampled_from([None, None, 1.5])),
        "scale": draw(st.sampled_from([0.3, 0.3, -0.5, 0.0])),
        "dropout_p": draw(st.sampled_from([0.0, 0.0, 0.3])),
        "mask": draw(st.booleans()),
        "alibi": draw(st.booleans()),
        "bias": draw(st.sampled_from([None, F64, F32, BF16, F16])),
        "sinks": draw(st.sampled_from([None, F32, BF16])),
        "block_mask": draw(st.sampled_from([None, None, (16, 16), (32, 16)])),
    }
    grads = ["q", "k", "v"]
    if options["bias"] is not None and draw(st.booleans()):
        grads.append("bias")
    if options["sinks"] is not None:
        grads.append("sinks")
    options["grads"] = tuple(g for g in grads if g in ("bias", "sinks") or draw(st.integers(0, 3)) > 0) or ("v",)
    config = draw(st.sampled_from([{}, {"block_q": 5, "block_k": 7}, {"block_q": 16, "block_k": 16}, {"block_q": 33}]))
    shared = draw(st.lists(st.booleans(), min_size=4, max_size=4))
    return options, config, shared, draw(st.sampled_from(FAMILIES)), draw(st.integers(0, 2**32))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(problems())
def test_random_features_agree_with_the_definition(drawn):
    options, config, shared, family, seed = drawn
    if family == "amx":
        options["dtype"] = BF16
    torch.manual_seed(seed)
    problem, tensors = dense(**options)
    for name in ("bias", "mask"):
        x = getattr(tensors, name)
        if x is None:
            continue
        for axis, cut in enumerate(shared):
            if cut and x.shape[axis] > 0:
                x = x.narrow(axis, 0, 1)
        setattr(tensors, name, x.expand(problem.batch, problem.num_heads_q, problem.seqlen_q, problem.seqlen_k))
    check(problem, tensors, family, **config)


def lengths(problem, tensors, q_lens, kv_lens):
    problem = replace(problem, lengths=True)
    tensors.q_lens = torch.tensor(q_lens, dtype=torch.int32)
    tensors.kv_lens = torch.tensor(kv_lens, dtype=torch.int32)
    for b, (rows, keys) in enumerate(zip(q_lens, kv_lens, strict=True)):
        tensors.q[b, rows:] = NAN
        tensors.k[b, keys:] = NAN
        tensors.v[b, keys:] = NAN
    return problem, tensors


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [F64, F32, F16, BF16])
@pytest.mark.parametrize("window", [Window(), Window(None, 0), Window(9, 4)])
def test_padded_lengths_hide_everything_behind_them(family, dtype, window):
    torch.manual_seed(1)
    problem, tensors = dense(batch=4, dtype=dtype, window=window, sinks=F32, grads=("q", "k", "v", "sinks"))
    problem, tensors = lengths(problem, tensors, [37, 0, 12, 1], [53, 20, 0, 9])
    with_gradients(tensors, problem)
    for b, rows in enumerate([37, 0, 12, 1]):
        tensors.dout[b, rows:] = NAN
        tensors.dlse[b, :, rows:] = NAN
    result = check(problem, tensors, family)
    assert torch.all(result.out[1] == 0) and torch.all(result.lse[1] == -math.inf)
    assert torch.all(result.dk[0, 53:] == 0) and torch.all(result.dq[3, 1:] == 0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [F64, F32, BF16])
@pytest.mark.parametrize("page_size", [None, 1, 5, 16])
def test_packed_and_paged(family, dtype, page_size):
    torch.manual_seed(2)
    q_lens, k_lens, heads, heads_kv, dim = [20, 0, 1, 33], [31, 7, 0, 40], 4, 2, 24
    total_q, total_k = sum(q_lens) + 3, sum(k_lens) + 2  # rows past cu_seqlens[-1]
    k, v = (normal(total_k, heads_kv, dim, dtype=dtype) for _ in range(2))
    k[sum(k_lens) :], v[sum(k_lens) :] = NAN, NAN
    q = normal(total_q, heads, dim, dtype=dtype)
    q[sum(q_lens) :] = NAN
    table = None
    if page_size:
        most = -(-max(k_lens) // page_size)
        table = torch.full((4, most + 1), -1, dtype=torch.int32)
        pages = torch.randperm(4 * most)
        k, v = (torch.full((4 * most, page_size, heads_kv, dim), NAN, dtype=dtype) for _ in range(2))
        for b, n in enumerate(k_lens):
            for page in range(-(-n // page_size)):
                index = int(pages[b * most + page])
                table[b, page] = index
                rows = min(page_size, n - page * page_size)
                k[index, :rows], v[index, :rows] = normal(2, rows, heads_kv, dim, dtype=dtype)
        table[3, 0] = table[0, 0]  # shared page
        assert k_lens[0] >= page_size and k_lens[3] >= page_size
    problem = AttentionProblem(
        dtype, 4, 33, 40, heads, heads_kv, dim, dim, 0.2, total_q, total_k, packed=True, window=Window(20, 0),
        page_size=page_size, grads=("q", "k", "v"),
    )  # fmt: skip
    cu = [torch.tensor([0, *torch.tensor(n).cumsum(0)], dtype=torch.int32) for n in (q_lens, k_lens)]
    tensors = Tensors(q, k, v, None, None, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], page_table=table)  # type: ignore
    result = check(problem, tensors, family, block_q=16, block_k=16)
    assert torch.all(result.out[sum(q_lens) :] == 0) and torch.all(result.lse[:, sum(q_lens) :] == -math.inf)


@pytest.mark.parametrize("page_size", [None, 4])
def test_append_writes_behind_each_sequence_and_nowhere_else(page_size):
    torch.manual_seed(3)
    kv_lens, new_lens = [0, 5, 2, 9], [1, 3, 0, 2]
    capacity = 12
    problem = AttentionProblem(
        F32, 4, 2, capacity, 2, 2, 8, 8, 0.3, window=Window(None, 0), lengths=True, append=True, page_size=page_size
    )
    shape = (4, capacity, 2, 8) if page_size is None else (12, page_size, 2, 8)
    tensors = Tensors(
        normal(4, 2, 2, 8), normal(*shape), normal(*shape), None, None,  # type: ignore[arg-type]
        kv_lens=torch.tensor(kv_lens, dtype=torch.int32), new_lens=torch.tensor(new_lens, dtype=torch.int32),
        k_new=normal(4, 3, 2, 8), v_new=normal(4, 3, 2, 8),
        page_table=None if page_size is None else torch.randperm(12).reshape(4, 3).to(torch.int32),
    )  # fmt: skip
    mine, theirs = (replace(tensors, k=tensors.k.clone(), v=tensors.v.clone()) for _ in range(2))
    expected, result = run(ReferencePlan(), problem, theirs), run(plan_of(problem), problem, mine)
    assert torch.equal(mine.k, theirs.k) and torch.equal(mine.v, theirs.v)
    assert_close(problem, result, expected)


@pytest.mark.parametrize("page_size", [None, 4])
def test_lengths_that_do_not_fit_give_nan_and_touch_nothing(page_size):
    torch.manual_seed(4)
    problem = AttentionProblem(F32, 4, 2, 12, 2, 2, 8, 8, 0.3, lengths=True, append=True, page_size=page_size)
    shape = (4, 12, 2, 8) if page_size is None else (12, page_size, 2, 8)
    table = None if page_size is None else torch.arange(12, dtype=torch.int32).reshape(4, 3)
    if table is not None:
        table[3, 1] = 99
    tensors = Tensors(
        normal(4, 2, 2, 8), normal(*shape), normal(*shape), None, None,  # type: ignore[arg-type]
        kv_lens=torch.tensor([4, 11, -1, 7], dtype=torch.int32), k_new=normal(4, 2, 2, 8), v_new=normal(4, 2, 2, 8),
        page_table=table,
    )  # fmt: skip
    before = tensors.k.clone()
    result = run(plan_of(problem), problem, tensors)
    bad = [1, 2] if page_size is None else [1, 2, 3]
    for b in range(4):
        assert bool(result.out[b].isnan().all()) == (b in bad) == bool(result.lse[b].isnan().all())
    changed = (tensors.k != before).flatten(2).any(-1).sum()
    assert int(changed) == 2 * (4 - len(bad))


def test_one_plan_serves_caches_of_any_number_of_pages():
    torch.manual_seed(25)
    problem = AttentionProblem(F32, 1, 1, 12, 2, 2, 8, 8, 0.3, lengths=True, page_size=4)
    plan = plan_of(problem)
    for pages, width in ((3, 3), (9, 8), (2, 1), (3, 3)):
        tensors = Tensors(
            normal(1, 1, 2, 8), normal(pages, 4, 2, 8), normal(pages, 4, 2, 8), None, None,  # type: ignore[arg-type]
            kv_lens=torch.tensor([4 * width], dtype=torch.int32),
            page_table=torch.randperm(pages)[:width].to(torch.int32).view(1, width),
        )  # fmt: skip
        assert_close(problem, run(plan, problem, tensors), run(ReferencePlan(), problem, tensors))
        tensors.page_table = torch.full((1, width), pages, dtype=torch.int32)
        assert run(plan, problem, tensors).out.isnan().all()  # there is no page of that number


# ---------------------------------------------------------------- NaN, Inf and extremes


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [F64, F32, F16, BF16])
@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
@pytest.mark.parametrize("hide", ["mask", "causal", "window", "bias", "block_mask"])
def test_hidden_nonfinite_keys_reach_only_the_rows_that_see_them(family, dtype, value, hide):
    torch.manual_seed(5)
    options = {
        "mask": {"mask": True}, "causal": {"window": Window(None, 0)}, "window": {"window": Window(6, 6)},
        "bias": {"bias": F32}, "block_mask": {"block_mask": (16, 16)},
    }[hide]  # fmt: skip
    problem, tensors = dense(batch=1, seqlen_q=40, seqlen_k=40, heads=2, dtype=dtype, **options)
    if hide == "bias":
        tensors.bias[torch.rand(tensors.bias.shape) < 0.5] = -math.inf
    tensors.k[0, 30, 0, 3] = value
    tensors.v[0, 11, 1, 5] = value
    tensors.v[0, 35, 0, 0] = value
    with_gradients(tensors, problem)
    expected = run(ReferencePlan(), problem, tensors)
    result = run(plan_of(problem, family, block_q=16, block_k=16), problem, tensors)
    for name in ("out", "lse", "dq", "dk", "dv"):
        x, o = getattr(result, name), getattr(expected, name)
        if name == "dk" and hide == "bias":
            # where scores are rounded the definition's gradient stops at a score that is not finite: the bad key itself
            x[0, 30, 0] = o[0, 30, 0] = 0.0
        assert torch.equal(x.isfinite() | (x == -math.inf), o.isfinite() | (o == -math.inf)), name
        both = x.isfinite() & o.isfinite()
        error = torch.linalg.vector_norm(x[both].double() - o[both].double(), math.inf) if bool(both.any()) else 0.0
        assert float(error) <= 20 * TOLERANCE[dtype] * (1 + float(o[both].double().abs().sum())), name


@pytest.mark.parametrize("family", FAMILIES)
def test_plus_infinite_bias_is_nan_and_minus_infinite_bias_is_a_mask(family):
    torch.manual_seed(6)
    problem, tensors = dense(batch=1, bias=F32, grads=())
    tensors.bias[0, 1, 4, 7] = math.inf
    tensors.bias[0, 2, 5] = -math.inf
    result = run(plan_of(problem, family), problem, tensors)
    assert bool(result.out[0, 4, 1].isnan().all()) and bool(result.lse[0, 1, 4].isnan())
    assert int(result.out.isnan().sum()) == problem.head_dim_v
    assert bool((result.out[0, 5, 2] == 0).all()) and float(result.lse[0, 2, 5]) == -math.inf
    masked = replace(problem, bias=None, mask=True)
    seen = torch.ones(tensors.bias.shape, dtype=torch.bool)
    seen[0, 2, 5] = False
    other = run(plan_of(masked, family), masked, replace(tensors, bias=None, mask=seen))
    plain = run(plan_of(problem, family), problem, replace(tensors, bias=torch.where(seen, 0.0, -math.inf)))
    bitwise(other, plain, ("out", "lse"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("floor", [-1e9, torch.finfo(F32).min])
def test_a_huge_finite_bias_is_no_mask(family, floor):
    torch.manual_seed(7)
    problem, tensors = dense(batch=1, seqlen_q=8, seqlen_k=200, heads=2, bias=F32, dim=4)
    tensors.bias.zero_()
    tensors.bias[0, 0, 0] = floor
    tensors.bias[0, 1, :, :128] = floor
    result = check(problem, tensors, family, block_k=64)
    mean = tensors.v[0, :, 0].mean(0)
    assert floor > -1e10 or torch.allclose(result.out[0, 0, 0], mean, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [F32, F64])
def test_exponential_is_good_to_two_units(family, dtype):
    """Scores 0 and x with values 0 and 1 give e^x / (1 + e^x)."""
    x = torch.cat([-torch.rand(4000, dtype=F64) * 86, torch.tensor([0.0, -1e-9, -86.9], dtype=F64)]).to(dtype)
    n = x.numel()
    problem = AttentionProblem(dtype, 1, n, 2, 1, 1, 1, 1, 1.0)
    k = torch.tensor([0.0, 1.0], dtype=dtype).view(1, 2, 1, 1)
    result = run(plan_of(problem, family), problem, Tensors(x.view(1, n, 1, 1), k, k, None, None))  # type: ignore[arg-type]
    true = torch.sigmoid(x.double())
    error = (result.out.flatten().double() / true - 1).abs().max()
    assert float(error) <= (3.5 * 2.0**-23 if dtype == F32 else 1e-14)  # two units of exp and the division's rounding


@pytest.mark.parametrize("family", FAMILIES)
def test_softcap_saturates_without_nan(family):
    problem = AttentionProblem(F32, 1, 3, 1, 1, 1, 1, 1, 1.0, softcap=50.0, grads=("q", "k", "v"))
    q = torch.tensor([4400.0, 5000.0, -10000.0]).view(1, 3, 1, 1)
    tensors = Tensors(q, torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1), None, None)  # type: ignore[arg-type]
    with_gradients(tensors, problem)
    result = run(plan_of(problem, family), problem, tensors)
    assert result.lse.flatten().tolist() == [50.0, 50.0, -50.0]
    assert not result.dq.any() and not result.dk.any()


@pytest.mark.parametrize("sink", [0.5, 100.0])
def test_sinks(sink):
    problem = AttentionProblem(F32, 1, 3, 4, 2, 2, 8, 8, 1.0, sinks=F32)
    tensors = Tensors(
        torch.zeros(1, 3, 2, 8), torch.zeros(1, 4, 2, 8), torch.ones(1, 4, 2, 8), None, None,  # type: ignore[arg-type]
        sinks=torch.tensor([sink, -math.inf]),
    )  # fmt: skip
    result = run(plan_of(problem), problem, tensors)
    assert torch.allclose(result.out[0, :, 0], torch.tensor(4 / (4 + math.exp(sink))), rtol=1e-5, atol=1e-37)
    assert torch.allclose(result.lse[0, 0], torch.tensor(math.log(4 + math.exp(sink))))
    assert torch.allclose(result.lse[0, 1], torch.tensor(math.log(4)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_one_key_a_row_is_exact(family, dtype):
    """AB-001 and AB-002: the softmax of one key has no gradient, whatever its score."""
    cu_q, cu_k = torch.tensor([0, 76, 110, 256]), torch.tensor([0, 1, 2, 3])
    problem = AttentionProblem(
        dtype, 3, 146, 1, 1, 1, 32, 32, 32**-0.5, 256, 3, packed=True, window=Window(None, 0), grads=("q", "k", "v")
    )
    for seed in range(5):
        torch.manual_seed(seed)
        q, k, v = (3 * normal(n, 1, 32, dtype=dtype) for n in (256, 3, 3))
        tensors = Tensors(q, k, v, None, None, cu_seqlens_q=cu_q.int(), cu_seqlens_k=cu_k.int())  # type: ignore[arg-type]
        tensors.dout = torch.ones(1, dtype=dtype).expand(256, 1, 32)
        result = run(plan_of(problem, family), problem, replace(tensors, dout=tensors.dout.contiguous()))
        assert bool((result.dv == 1).all()) and not result.dq.any() and not result.dk.any()
        assert int((result.lse == -math.inf).sum()) == 253 and int((result.out != 0).any(-1).sum()) == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_the_exponential_of_bfloat16_is_good_to_two_to_the_minus_18(family):
    """exp(x) from lse = log(1 + exp(x)) of two keys, over more than a period of its series."""
    problem, tensors = dense(1, 4096, 2, 1, 1, 16, dtype=BF16, bias=F32, grads=())
    tensors.q.zero_()
    x = torch.linspace(-1.5, 0, 4096)
    tensors.bias = torch.stack((torch.zeros(4096), x), -1).view(1, 1, 4096, 2)
    lse = run(plan_of(problem, family), problem, tensors).lse.double().view(-1)
    found = torch.expm1(lse)
    assert ((found / x.double().exp() - 1).abs() <= 2**-18 + 2**-20).all()  # the latter: lse in float32


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7FC00001, -1])
def test_nan_stays_nan_whatever_its_bits(family, dtype, bits):
    """exp works on the exponent's bits."""
    torch.manual_seed(28)
    problem, tensors = dense(2, 40, 48, 2, 2, 32, dtype=dtype, bias=F32, grads=())
    tensors.bias = torch.zeros(2, 2, 40, 48)
    tensors.bias.view(torch.int32)[1, 0, 7, 20] = bits
    result = run(plan_of(problem, family), problem, tensors)
    out, lse = result.out, result.lse
    assert out[1, 7, 0].isnan().all() and lse[1, 0, 7].isnan()
    assert out.isnan().sum() == 32 and lse.isnan().sum() == 1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_nan_behind_scores_that_arithmetic_makes_infinite(family, dtype):
    """They hide 512 keys from all queries but one, whatever the others in its strip see."""
    torch.manual_seed(29)
    problem, tensors = dense(1, 64, 600, 1, 1, 32, dtype=dtype, grads=())
    tensors.q.zero_()[..., 0] = 3e19
    tensors.q[:, 1] = 0
    tensors.k.zero_()[:, :512, :, 0] = -3e19
    tensors.v[:, 3] = NAN
    out = run(plan_of(problem, family), problem, tensors).out
    assert out[0, 1].isnan().all()
    assert out[0, 0].isfinite().all() and out[0, 2:].isfinite().all()


# ---------------------------------------------------------------- the Python side


def test_families_are_refused_where_the_processor_lacks_them(monkeypatch):
    backend = attnlib_cpu.backend
    assert [f.name for f in backend.families] == ["amx", "avx512", "avx2", "portable"]
    assert not backend.available("portable", HERE)
    refusal = backend.available("avx512", Target("cpu", "aarch64", present=False))[0]
    assert refusal.code is RefusalCode.ARCH and "portable" in refusal.remedy

    class Old:
        faults = ()

        @staticmethod
        def supported_families():
            return 1

    monkeypatch.setattr(attnlib_cpu, "_module", lambda name: Old)
    assert backend.available("avx2", HERE)[0].code is RefusalCode.ARCH
    assert not backend.available("portable", HERE)


@pytest.mark.parametrize(
    ("state", "code", "words"),
    [
        ("no processor", RefusalCode.ARCH, "AMX-BF16"),
        ("not built", RefusalCode.BUILD, "GCC 11"),
        ("refused", RefusalCode.OTHER, "arch_prctl"),
        ("usable", RefusalCode.ARCH, "AVX512-BF16"),  # tiles beside vectors that lack the rest
    ],
)
def test_why_amx_is_not_taken(monkeypatch, state, code, words):
    class Without:
        faults = ()

        @staticmethod
        def supported_families():
            return 7

        @staticmethod
        def amx():
            return state

    monkeypatch.setattr(attnlib_cpu, "_module", lambda name: Without)
    (refusal,) = attnlib_cpu.backend.available("amx", HERE)
    assert refusal.code is code and words in str(refusal)
    problem, _ = dense(dtype=BF16)
    with pytest.raises(UnsupportedError, match="cpu:amx"):
        attnlib_cpu.backend.plan(problem, "amx", HERE)


def test_amx_refuses_other_dtypes():
    problem, _ = dense(dtype=F32)
    with pytest.raises(UnsupportedError, match="bfloat16"):
        attnlib_cpu.backend.plan(problem, "amx", HERE)
    q = torch.zeros(1, 8, 2, 16)
    decision = attnlib.explain(q, q, q)
    assert decision.chosen != "cpu:amx" and RefusalCode.DTYPE in {r.code for r in decision.refusals["cpu:amx"]}


def test_a_missing_extension_is_a_refusal_with_a_remedy(monkeypatch):
    monkeypatch.setattr(attnlib_cpu, "_module", lambda name: ImportError("no module named _cpu"))
    for family in attnlib_cpu.backend.families:
        (refusal,) = attnlib_cpu.backend.available(family.name, HERE)
        assert refusal.code is RefusalCode.BUILD and refusal.remedy
    problem, _ = dense()
    with pytest.raises(UnsupportedError, match="compiled module"):
        plan_of(problem)


@pytest.mark.parametrize(
    "config", [{"block_q": 0}, {"block_k": -3}, {"block_q": 2.0}, {"block_k": True}, {"block_q": 10**6}, {"stages": 2}]
)
def test_a_config_that_does_not_fit_is_refused(config):
    problem, _ = dense()
    with pytest.raises(UnsupportedError) as caught:
        plan_of(problem, **config)
    (refusals,) = caught.value.refusals.values()
    assert refusals[0].code is RefusalCode.CONFIG


def test_a_tiny_call_is_quick():
    problem, tensors = dense(batch=1, seqlen_q=16, seqlen_k=16, heads=4, heads_kv=4, dim=64, grads=())
    plan, result = plan_of(problem), outputs(problem, tensors)
    best = math.inf
    for _ in range(20):
        start = time.process_time()
        for _ in range(50):
            plan.forward(problem, result)
        best = min(best, (time.process_time() - start) / 50)
    assert best < 60e-6  # 11 us undisturbed, kernel included


# ---------------------------------------------------------------- faults of the test build


def faulty_module():
    module = attnlib_cpu._module("_cpu_faults")
    return () if isinstance(module, ImportError) else module.faults[1:]


def test_the_normal_build_refuses_faults():
    problem, _ = dense()
    assert attnlib_cpu._module("_cpu").faults == ()
    with pytest.raises(UnsupportedError, match="fault"):
        plan_of(problem, fault="no such fault")


@pytest.mark.skipif(not faulty_module(), reason="needs a build with ATTNLIB_TEST_FAULTS=ON")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_fault_is_seen(family):
    torch.manual_seed(20)
    dtype = BF16 if family == "amx" else F64
    problem, tensors = dense(
        batch=2, seqlen_q=40, seqlen_k=50, heads=4, window=Window(25, 3), softcap=1.5, bias=F32, sinks=F32,
        dropout_p=0.2, dtype=dtype, grads=("q", "k", "v", "bias", "sinks"),
    )  # fmt: skip
    tensors.k *= torch.linspace(0.2, 3.0, 50, dtype=dtype).view(1, 50, 1, 1)
    problem, tensors = lengths(problem, tensors, [40, 30], [50, 44])
    tensors.k[1, 44:], tensors.v[1, 44:] = 1.0, 1.0
    with_gradients(tensors, problem)
    many = {fault for fault in faulty_module() if fault != "parts_unscaled"}
    if dtype == BF16:
        many -= {"dv_scale"}  # less than its rounding; the conformance suite sees it
    assert len(many) >= 6 and survivors(problem, tensors, family, many, block_q=16, block_k=16) == set()


@pytest.mark.skipif(not faulty_module(), reason="needs a build with ATTNLIB_TEST_FAULTS=ON")
@pytest.mark.parametrize("family", FAMILIES)
def test_faults_are_seen_where_queries_are_few(family):
    torch.manual_seed(21)
    dtype = BF16 if family == "amx" else F64
    problem, tensors = few(seqlen_k=1500, window=Window(1400, 1), softcap=1.5, bias=F32, sinks=F32, dtype=dtype)
    tensors.k *= torch.linspace(0.2, 3.0, 1500, dtype=dtype).view(1, 1500, 1, 1)
    problem, tensors = lengths(problem, tensors, [2, 1], [1500, 1200])
    tensors.k[1, 1200:], tensors.v[1, 1200:] = 1.0, 1.0
    faults = {"no_rescale", "ignore_window_left", "drop_last_partial_key_block", "leak_past_kv_len",
              "softcap_after_bias", "sink_forgotten", "parts_unscaled"}  # fmt: skip
    if dtype == BF16:
        faults -= {"leak_past_kv_len", "sink_forgotten"}  # one of 1500 keys, and less: the conformance suite sees them
    assert survivors(problem, tensors, family, faults) == set()


def survivors(problem, tensors, family, faults, **config):
    """The faults that change no result; without any, the results are right."""
    expected = run(ReferencePlan(), problem, tensors)
    assert_close(problem, run(plan_of(problem, family, **config), problem, tensors), expected)
    found = set()
    for fault in faults:
        result = run(plan_of(problem, family, fault=fault, **config), problem, tensors)
        try:
            assert_close(problem, result, expected)
        except AssertionError:
            continue
        found.add(fault)
    return found
