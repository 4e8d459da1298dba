"""The oracle against the reference, the bounds against honest rounding, and the bounds against small faults."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_problems import INF, NAN, Case, build, cases, normals, run, simple

from attnlib import _evaluate, numerics
from attnlib.errors import KernelError
from attnlib.numerics import Check, Record, Result, Verdict, baselines, expect, judge, oracle, round_mantissa, ulp
from attnlib.problem import AttentionProblem, Tensors, Window

NAMES = ("out", "lse", "dq", "dk", "dv", "dbias", "dsinks")
HALF = (torch.float16, torch.bfloat16)
FLOATS = (torch.float64, torch.float32, *HALF)


def result_of(problem: AttentionProblem, tensors: Tensors) -> Result:
    """What the reference gives, in API form."""
    got = run(problem, replace(tensors, k=tensors.k.clone(), v=tensors.v.clone()))
    found = Result(got.out, got.lse, got.dq, got.dk, got.dv, got.dbias, got.dsinks)
    if found.dbias is not None:
        own = found.dbias[tuple(slice(0, 1 if step == 0 else None) for step in found.dbias.stride())]
        found.dbias = own.to(problem.bias)
    if found.dsinks is not None:
        found.dsinks = found.dsinks.to(problem.sinks)
    return found


def widened(tensors: Tensors) -> Tensors:
    """The same values in float64 buffers, so that nothing is rounded on the way out."""
    names = ("q", "k", "v", "k_new", "v_new", "dout", "dlse", "out", "lse")
    return replace(tensors, **{n: x.double() for n in names if (x := getattr(tensors, n)) is not None})


def assert_same(got: Result, due: Result, tolerance: float = 1e-12) -> None:
    for name in NAMES:
        a, b = getattr(got, name), getattr(due, name)
        assert (a is None) == (b is None), name
        if a is not None and b is not None:
            torch.testing.assert_close(
                a.double(), b.double().reshape(a.shape), rtol=tolerance, atol=tolerance, equal_nan=True, msg=name
            )


# ---------------------------------------------------------------- oracle and reference check each other


@settings(max_examples=250, deadline=None)
@given(cases())
def test_oracle_equals_reference(case: Case) -> None:
    problem, tensors = build(case)
    double = replace(problem, bias=problem.bias and torch.float64, sinks=problem.sinks and torch.float64)
    assert_same(result_of(double, widened(tensors)), oracle(problem, tensors))


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from(["q", "k", "v", "dout", "dlse"]), st.sampled_from([NAN, INF, -INF]), st.integers(0, 99))
def test_oracle_equals_reference_with_a_poisoned_element(case: Case, name: str, value: float, where: int) -> None:
    problem, tensors = build(replace(case, layout="dense", bias=None, alibi=False, dtype=torch.float64))
    spoiled = getattr(tensors, name).clone()
    spoiled.view(-1)[where % spoiled.numel()] = value
    tensors = replace(tensors, **{name: spoiled})
    got, due = result_of(problem, tensors), oracle(problem, tensors)
    assert_same(Result(got.out, got.lse), Result(due.out, due.lse))
    if value != value:  # Inf - Inf and 0 * Inf depend on the order of the formulas
        for grad in ("dq", "dk", "dv"):
            a, b = getattr(got, grad), getattr(due, grad)
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, equal_nan=True, msg=grad)


def test_oracle_before_and_after_an_append() -> None:
    for layout in ("append", "paged append"):
        problem, tensors = build(Case(layout, seed=2, batch=3, left=2))
        before = oracle(problem, tensors)
        run(replace(problem, grads=()), tensors)
        assert_same(oracle(problem, tensors), before, 0.0)


def test_blocks_of_rows_are_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(seqlen_q=6, bias=(0,), mask=True, sinks=True, softcap=2.0, left=3, dropout_p=0.3, dtype=torch.float32)
    problem, tensors = build(case)
    whole = expect(problem, tensors)
    for elements in (1, 40, 100):
        monkeypatch.setattr(_evaluate, "_ELEMENTS", elements)
        parts = expect(problem, tensors)
        assert_same(parts.oracle, whole.oracle)
        assert_same(parts.baselines[1], whole.baselines[1], 1e-6)
        assert_same(parts.scale.magnitude, whole.scale.magnitude)
        assert parts.scale.longest == whole.scale.longest
        torch.testing.assert_close(parts.scale.scores, whole.scale.scores)


def test_magnitudes_bound_the_answer() -> None:
    problem, tensors = build(Case(bias=(0, 1), sinks=True, softcap=1.0, dropout_p=0.3, seed=8))
    got, size = oracle(problem, tensors), numerics.magnitudes(problem, tensors)
    for name in ("out", "dq", "dk", "dv", "dbias", "dsinks"):
        assert (getattr(got, name).abs() <= getattr(size.magnitude, name) * (1 + 1e-12)).all(), name
    assert size.longest["dsinks"] == 2 * 5 and size.longest["dbias"] == 2 * 4 and size.longest["dk"] == 2 * 5
    positive = [x.abs() for x in (tensors.v, tensors.dout)]
    got = oracle(problem, replace(tensors, v=positive[0], dout=positive[1]))
    torch.testing.assert_close(got.out, size.magnitude.out)
    torch.testing.assert_close(got.dv, size.magnitude.dv)


def test_AB_007_oracle_rounds_scores_beside_a_finite_minimum() -> None:
    q, k, v = normals(3, *[(1, 3, 1, 4)] * 3, dtype=torch.float32)
    problem, tensors = simple(q, k, v, bias=torch.full((3, 3), torch.finfo(torch.float32).min))
    torch.testing.assert_close(oracle(problem, tensors).out, v.double().mean(1, keepdim=True).expand(1, 3, 1, 4))


# ---------------------------------------------------------------- honest results pass


@settings(max_examples=150, deadline=None)
@given(
    cases(dtype=torch.float64), st.sampled_from(FLOATS), st.booleans(), st.sampled_from([0.1, 1.0, 5.0]), st.booleans()
)
def test_baselines_and_rounded_truth_pass(
    case: Case, dtype: torch.dtype, tf32: bool, factor: float, long: bool
) -> None:
    case = replace(case, dtype=dtype, factor=factor, seqlen_k=case.seqlen_k * (7 if long else 1), head_dim=8)
    problem, tensors = build(case)
    problem = replace(problem, tf32=tf32 and dtype == torch.float32)
    expected = expect(problem, tensors)
    results = [*baselines(problem, tensors), result_of(problem, tensors)]
    # TF32 rounds a score by its terms, lse is judged by the score: of large terms that cancel, honest results may miss.
    cancels = problem.tf32 and factor > 1
    for result in results if dtype != torch.float64 else results[2:]:
        judged = replace(result, lse=None) if cancels else result
        verdict = judge(problem, tensors, judged, expected=expected)
        assert verdict.passed, str(verdict)


def tiled(problem: AttentionProblem, tensors: Tensors, block: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Online softmax over blocks of keys in float32 with P rounded: what an honest kernel does."""
    q, k, v = (x.float().transpose(1, 2) for x in (tensors.q, tensors.k, tensors.v))
    m, total, out = torch.full(q.shape[:-1], -INF), torch.zeros(q.shape[:-1]), torch.zeros(*q.shape[:-1], v.shape[-1])
    for j in range(0, k.shape[2], block):
        s = q @ k[:, :, j : j + block].mT * problem.scale
        new = torch.maximum(m, s.amax(-1))
        p, shrink = torch.exp(s - new[..., None]), torch.exp(m - new)
        total, m = total * shrink + p.sum(-1), new
        out = out * shrink[..., None] + p.to(problem.dtype).float() @ v[:, :, j : j + block]
    return (out / total[..., None]).to(problem.dtype).transpose(1, 2), m + total.log()


def plain_problem(
    dtype: torch.dtype, seed: int = 0, factor: float = 1.0, **more: Any
) -> tuple[AttentionProblem, Tensors]:
    shape = (2, 64, 2, 32)
    q, k, v, dout = normals(seed, shape, (2, 80, 2, 32), (2, 80, 2, 32), shape, dtype=dtype)
    dlse = torch.zeros(2, 2, 64, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    return simple((q * factor).to(dtype), k, v, dout=dout, dlse=dlse, **more)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("factor", [1.0, 5.0])
def test_pass_3_on_plain_inputs(dtype: torch.dtype, factor: float) -> None:
    for seed in range(5):
        problem, tensors = plain_problem(dtype, seed, factor)
        honest = [*baselines(problem, tensors), result_of(problem, tensors)]
        if dtype != torch.float64:
            honest.append(Result(*tiled(problem, tensors)))
            tensors_forward = replace(tensors, dout=None, dlse=None)
            assert judge(problem, tensors_forward, honest.pop(), plain=True).passed
        for result in honest[2:] if dtype == torch.float64 else honest:
            verdict = judge(problem, tensors, result, plain=True)
            assert verdict.passed, str(verdict)
            assert [check.name for check in verdict["dq"].checks][-1] == "pass 3"


def test_pass_3_needs_16_keys() -> None:
    problem, tensors = plain_problem(torch.float32)
    few = replace(problem, window=Window(14, 0))
    verdict = judge(few, tensors, result_of(few, tensors), plain=True)
    assert verdict.passed and verdict["out"].checks[-1].name == "pass 2"


@pytest.mark.parametrize("dtype", HALF)
def test_cancelling_recipes_are_given_room(dtype: torch.dtype) -> None:
    """Constant k: dq is exactly 0, and P rounded before the sum is not."""
    problem, tensors = plain_problem(dtype)
    tensors = replace(tensors, k=torch.ones_like(tensors.k))
    expected = expect(problem, tensors)
    got = result_of(problem, tensors)
    worst = max(float(x.dq.double().abs().max()) for x in expected.baselines)
    got.dq = torch.full_like(got.dq, 4 * worst)
    assert not judge(problem, tensors, got, expected=expected).passed
    assert judge(problem, tensors, got, cancels=True, expected=expected).passed


# ---------------------------------------------------------------- faults fail

SHARP = (torch.float32, torch.float16)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("seed", range(3))
def test_scale_off_by_1e_3_fails(dtype: torch.dtype, seed: int) -> None:
    problem, tensors = plain_problem(dtype, seed, 5.0)
    wrong = replace(problem, scale=problem.scale * 1.001)
    verdict = judge(problem, tensors, result_of(wrong, tensors), plain=True)
    assert not verdict["lse"].passed
    if dtype in (torch.float64, torch.float32):
        assert not verdict["out"].passed and not verdict["dk"].passed


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shift", [3e-4, -3e-4])
def test_lse_off_by_3e_4_fails(dtype: torch.dtype, shift: float) -> None:
    problem, tensors = plain_problem(dtype)
    result = result_of(problem, tensors)
    result.lse = result.lse + shift
    verdict = judge(problem, tensors, result)
    assert [record.quantity for record in verdict.failures] == ["lse"]


@pytest.mark.parametrize("dtype", [torch.float64, *SHARP])
@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
def test_a_result_off_by_4_in_1000_fails(dtype: torch.dtype, name: str) -> None:
    for seed in range(3):
        problem, tensors = plain_problem(dtype, seed)
        result = result_of(problem, tensors)
        setattr(result, name, (getattr(result, name).double() * 1.004).to(dtype))
        verdict = judge(problem, tensors, result, plain=True)
        assert [record.quantity for record in verdict.failures] == [name]


def test_dv_off_in_bfloat16_fails_from_1_percent() -> None:
    problem, tensors = plain_problem(torch.bfloat16)
    result = result_of(problem, tensors)
    result.dv = (result.dv.double() * 1.01).to(torch.bfloat16)
    assert [r.quantity for r in judge(problem, tensors, result, plain=True).failures] == ["dv"]


def test_tf32_bounds_are_not_for_float32() -> None:
    problem, tensors = plain_problem(torch.float32)
    rounded = replace(tensors, **{n: round_mantissa(getattr(tensors, n)) for n in ("q", "k", "v", "dout")})
    result = result_of(problem, rounded)
    assert not judge(problem, tensors, result, plain=True).passed
    verdict = judge(replace(problem, tf32=True), tensors, result, plain=True)
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv"])
@pytest.mark.parametrize("value", [NAN, INF])
def test_one_nan_or_inf_fails(dtype: torch.dtype, name: str, value: float) -> None:
    problem, tensors = plain_problem(dtype)
    result = result_of(problem, tensors)
    spoiled = getattr(result, name).clone()
    spoiled.view(-1)[77] = value
    verdict = judge(problem, tensors, replace(result, **{name: spoiled}))
    assert [record.quantity for record in verdict.failures] == [name]
    assert verdict[name].checks[0] == Check("NaN/Inf pattern", 1, 0)


def test_AB_010_a_nan_in_the_truth_is_not_a_pass() -> None:
    problem, tensors = plain_problem(torch.bfloat16)
    spoiled = tensors.q.clone()
    spoiled[0, 3, 1] = NAN
    tensors = replace(tensors, q=spoiled)
    result = result_of(problem, tensors)
    assert judge(problem, tensors, result).passed
    result.out = result.out.nan_to_num(0.0)
    assert [r.quantity for r in judge(problem, tensors, result).failures] == ["out"]
    assert not Check("x", NAN, 1.0).passed and not Check("x", 1.0, NAN).passed
    # peaked scores in bfloat16: honest, and far from another bfloat16 run
    problem, tensors = simple(*normals(1, (1, 1, 8, 64), (1, 1000, 8, 64), (1, 1000, 8, 64), dtype=torch.bfloat16))
    tensors.q = tensors.q * 5
    assert judge(problem, tensors, Result(*tiled(problem, tensors)), plain=True).passed


def test_empty_and_padding_rows_must_be_exact() -> None:
    problem, tensors = build(Case("lengths", dtype=torch.float32, batch=3, seed=5))
    assert int(tensors.q_lens.min()) < 5
    row = int(tensors.q_lens.argmin())
    for name, value in (("out", 1e-30), ("dq", 1e-30), ("lse", 0.0), ("lse", -1e30)):
        result = result_of(problem, tensors)
        spoiled = getattr(result, name)
        place = spoiled[row, :, -1] if name == "lse" else spoiled[row, -1]
        place.fill_(value)
        assert [r.quantity for r in judge(problem, tensors, result).failures] == [name]


def test_overflow_is_as_ieee_does() -> None:
    q, k, v = normals(4, *[(1, 16, 2, 16)] * 3, dtype=torch.float16)
    v = torch.full_like(v, 60000.0)
    sums = replace(simple(q, k, v)[0], dropout_p=0.5)
    tensors = replace(simple(q, k, v)[1], dropout_seed=torch.tensor([5]))
    result = Result(oracle(sums, tensors).out.half())
    assert torch.isinf(result.out).any() and judge(sums, tensors, result).passed
    result.out = result.out.clamp(max=65504)
    assert not judge(sums, tensors, result).passed


def test_missing_extra_and_misshapen_results() -> None:
    problem, tensors = plain_problem(torch.float32)
    good = result_of(problem, tensors)
    verdict = judge(problem, tensors, replace(good, dk=None))
    assert verdict.failures == (Record("dk", (), "missing"),) and "dk: FAILED" in str(verdict)
    assert judge(problem, tensors, replace(good, out=good.out[:, 1:]))["out"].note.startswith(
        "shape: needs (2, 64, 2, 32)"
    )
    assert judge(problem, tensors, replace(good, dq=good.dq.double()))["dq"].note.startswith(
        "dtype: needs torch.float32"
    )
    only_q = replace(problem, grads=("q",))
    assert not judge(only_q, tensors, good)["dv"].passed
    assert judge(only_q, tensors, replace(good, dk=None, dv=None)).passed
    forward = replace(tensors, dout=None, dlse=None)
    assert judge(problem, forward, Result(good.out, good.lse)).passed
    assert not judge(problem, forward, Result()).passed and not Verdict(()).passed


def test_dbias_of_any_shape() -> None:
    problem, tensors = build(Case(dtype=torch.float32, bias=(0, 1), seqlen_q=30, seqlen_k=40))
    good = result_of(problem, tensors)
    assert good.dbias is not None and good.dbias.shape == (1, 1, 30, 40)
    assert judge(problem, tensors, replace(good, dbias=good.dbias[0, 0])).passed
    assert not judge(problem, tensors, replace(good, dbias=good.dbias[0, 0] * 1.004)).passed
    # an operand that was itself expanded: every element has its own gradient
    full = oracle(problem, tensors, bias_shape=(2, 4, 30, 40)).dbias
    assert judge(problem, tensors, replace(good, dbias=full.float())).passed
    torch.testing.assert_close(full.sum((0, 1)), oracle(problem, tensors).dbias[0, 0])


def test_check_forward_raises_with_every_figure() -> None:
    problem, tensors = plain_problem(torch.float32)
    result = result_of(problem, tensors)
    finished = replace(tensors, out=result.out, lse=result.lse)
    numerics.check_forward(problem, finished, "someone")
    with pytest.raises(
        KernelError, match=r"someone: the forward differs from the oracle: lse: FAILED: .* EXCEEDS 5e-06"
    ) as e:
        numerics.check_forward(problem, replace(finished, lse=finished.lse + 1e-3), "someone")
    assert e.value.problem is problem and e.value.kernel == "someone"


# ---------------------------------------------------------------- the measures themselves


@pytest.mark.parametrize(
    ("dtype", "tf32", "figures"),
    [
        (
            torch.float16,
            False,
            [
                (2.827e-04, 3.056e-04, 3.035e-04, 2.912e-04, 2.567e-04, 3.047e-04, 3.041e-04, 2.912e-04),
                (2.924e-04, 3.261e-04, 3.170e-04, 2.948e-04, 2.660e-04, 3.171e-04, 2.976e-04, 2.948e-04),
                (2.850e-04, 3.148e-04, 3.034e-04, 2.984e-04, 2.642e-04, 3.063e-04, 3.031e-04, 2.984e-04),
            ],
        ),
        (
            torch.bfloat16,
            False,
            [
                (2.312e-03, 2.514e-03, 2.452e-03, 2.325e-03, 2.133e-03, 2.474e-03, 2.436e-03, 2.325e-03),
                (2.377e-03, 2.497e-03, 2.438e-03, 2.395e-03, 2.147e-03, 2.413e-03, 2.430e-03, 2.395e-03),
                (2.241e-03, 2.501e-03, 2.426e-03, 2.348e-03, 2.079e-03, 2.449e-03, 2.422e-03, 2.348e-03),
            ],
        ),
        (
            torch.float32,
            True,
            [
                (3.840e-04, 4.944e-04, 4.839e-04, 3.924e-04, 3.605e-04, 4.989e-04, 4.873e-04, 3.924e-04),
                (3.892e-04, 5.100e-04, 4.877e-04, 3.752e-04, 3.841e-04, 4.997e-04, 4.805e-04, 3.752e-04),
                (3.669e-04, 4.947e-04, 4.845e-04, 3.865e-04, 3.548e-04, 4.903e-04, 4.789e-04, 3.865e-04),
            ],
        ),
    ],
)
def test_baselines_are_pinned(dtype: torch.dtype, tf32: bool, figures: list[tuple[float, ...]]) -> None:
    """Relative Frobenius errors of out, dq, dk, dv of (a), then (b), for seeds 0, 1, 2; the bounds rest on these."""
    for seed, due in enumerate(figures):
        torch.testing.assert_close(torch.tensor(measured(dtype, tf32, seed)), torch.tensor(due), rtol=0.02, atol=0)


def measured(dtype: torch.dtype, tf32: bool, seed: int) -> list[float]:
    problem, tensors = plain_problem(dtype, seed, window=Window(None, 0), softcap=5.0)
    problem = replace(problem, tf32=tf32)
    exact = oracle(problem, tensors)
    found = []
    for baseline in baselines(problem, tensors):
        for name in ("out", "dq", "dk", "dv"):
            o, e = getattr(exact, name), getattr(baseline, name).double()
            found.append(float(torch.linalg.vector_norm(e - o) / torch.linalg.vector_norm(o)))
    return found


def test_products_are_ieee_whatever_the_switches_say() -> None:
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    problem, tensors = plain_problem(torch.float32)
    due = baselines(problem, tensors)
    try:
        matmul.fp32_precision = "bf16"
        got = baselines(problem, tensors)
        assert matmul.fp32_precision == "bf16"
    finally:
        matmul.fp32_precision = before
    for a, b in zip(got, due, strict=True):
        assert_same(a, b, 0.0)


def test_round_mantissa() -> None:
    one = torch.tensor([1.0, 1 + 2.0**-10, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-11 + 2.0**-20, -1 - 3 * 2.0**-11])
    due = torch.tensor([1.0, 1 + 2.0**-10, 1.0, 1 + 2.0**-9, 1 + 2.0**-10, -1 - 2.0**-9])
    assert torch.equal(round_mantissa(one), due)
    assert torch.equal(round_mantissa(torch.tensor([INF, -INF, 0.0])), torch.tensor([INF, -INF, 0.0]))
    assert torch.isnan(round_mantissa(torch.tensor([NAN]))).all()
    x = normals(0, (1000,), dtype=torch.float32)[0]
    assert torch.equal(round_mantissa(x, 7), x.bfloat16().float())


def test_ulp() -> None:
    assert (
        ulp(1.0, 23) == 2.0**-23 and ulp(1.999, 10) == 2.0**-10 and ulp(-2.0, 7) == 2.0**-6 and ulp(0.75, 7) == 2.0**-8
    )
    assert ulp(0.0, 7) == 0.0 and ulp(INF, 7) == 0.0


def test_repeats() -> None:
    problem, _ = simple(*[torch.zeros(1, 16, 2, 32)] * 3)
    assert numerics.repeats(problem) == 4
    assert numerics.repeats(replace(problem, batch=4, total_q=64, total_k=64)) == 1
    assert numerics.repeats(replace(problem, seqlen_k=0, total_k=0)) == 1


def test_lse_is_measured_in_its_own_scale() -> None:
    problem, tensors = plain_problem(torch.float32, factor=50.0)
    scale = expect(problem, tensors).scale
    result = result_of(problem, tensors)
    row = scale.scores[0, 0, 0]
    assert row > 10
    for factor, passed in ((0.9, True), (1.1, False)):
        moved = result.lse.clone()
        moved[0, 0, 0] += 5e-6 * factor * max(float(row), abs(float(moved[0, 0, 0])))
        assert judge(problem, tensors, replace(result, lse=moved))["lse"].passed == passed
    assert math.isclose(scale.max_score, float(scale.scores.max()), rel_tol=0.5)
