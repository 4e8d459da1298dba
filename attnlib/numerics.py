"""What counts as right: the oracle, two baselines that round as honest kernels do, error sizes, and the verdict.

    pass 1   max|x - o| <= 2 E + ulp_T(max|o|) + c max A,    E = max over baselines e of max|e - o|
    pass 2   ||x - o||  <= 2 max_e ||e - o|| + c ||A||       (Frobenius)
    pass 3   ||x - o|| / ||o|| <= a fixed mark               (plain normal inputs and q * 5, at least 16 keys)
    lse      |x - o| <= t max(1, |o|, max|s|), -inf exactly

x is what a backend gave, o the float64 oracle on the stored inputs, A the same formulas on absolute values, K the
longest sum and c = (16 + sqrt(K) / 2) 2^-24 (float64: 2^-53, E = 0). NaN and Inf patterns are compared first, exact
zeros (padding, empty rows: A = 0) with them, and every comparison is written so that NaN fails. Core owns these marks;
a backend never sets its own. docs/semantics.md section 8.

A statement about the largest error needs a sample: whoever builds a problem to be judged multiplies its batch by
`repeats(problem)` and draws that many sequences, so that out, dq, dk and dv have at least 4096 elements each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from ._evaluate import Arithmetic, Result, Scale, evaluate, ieee_products, round_mantissa, storage
from .errors import KernelError
from .problem import AttentionProblem, Tensors

__all__ = [
    "Check", "Expected", "Record", "Result", "Verdict", "baselines", "check_forward", "expect", "judge",
    "magnitudes", "oracle", "repeats", "round_mantissa", "ulp",
]  # fmt: skip

MINIMUM_ELEMENTS = 4096
_MANTISSA = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}
_FEW = 256  # elements
_LSE_MARK = {torch.float64: 1e-13, torch.float32: 5e-6, torch.float16: 3e-5, torch.bfloat16: 3e-5}
_HALF_MARK = {torch.float16: (7e-4, 1.5e-3), torch.bfloat16: (5e-3, 1e-2)}
_CANCEL_UNIT = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-11}


@dataclass(frozen=True)
class Check:
    """One comparison: passed iff error <= bound (NaN fails)."""

    name: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.error <= self.bound

    def __str__(self) -> str:
        sign = "<=" if self.passed else "EXCEEDS"
        return f"{self.name} {self.error:.3g} {sign} {self.bound:.3g}"


@dataclass(frozen=True)
class Record:
    """Everything measured about one quantity (out, lse, dq, dk, dv, dbias, dsinks)."""

    quantity: str
    checks: tuple[Check, ...]
    note: str = ""

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(check.passed for check in self.checks)

    def __str__(self) -> str:
        text = "; ".join(map(str, self.checks)) + (f" ({self.note})" if self.note else "")
        return f"{self.quantity}: {'ok' if self.passed else 'FAILED'}: {text}"


@dataclass(frozen=True)
class Verdict:
    """The records of one judged call."""

    records: tuple[Record, ...]

    @property
    def passed(self) -> bool:
        return bool(self.records) and all(record.passed for record in self.records)

    @property
    def failures(self) -> tuple[Record, ...]:
        return tuple(record for record in self.records if not record.passed)

    def __getitem__(self, quantity: str) -> Record:
        return next(record for record in self.records if record.quantity == quantity)

    def __str__(self) -> str:
        return "\n".join(map(str, self.records))


@dataclass(frozen=True)
class Expected:
    """What judge compares with: computed once, it serves any number of results of the same call."""

    oracle: Result
    baselines: tuple[Result, ...]
    scale: Scale


def repeats(problem: AttentionProblem) -> int:
    """By how much to multiply the batch so that out, dq, dk and dv have at least 4096 elements (1 if one is empty)."""
    rows, keys = problem.num_heads_q * problem.total_q, problem.num_heads_kv * problem.total_k
    sizes = [rows * problem.head_dim_v, rows * problem.head_dim, keys * problem.head_dim, keys * problem.head_dim_v]
    smallest = min(sizes)
    return 1 if smallest == 0 else max(1, -(-MINIMUM_ELEMENTS // smallest))


def ulp(y: float, mantissa_bits: int) -> float:
    """Spacing of numbers of that many explicit mantissa bits at |y|: 2^(floor(log2 |y|) - bits); 0 at 0."""
    return math.ldexp(1.0, math.frexp(abs(y))[1] - 1 - mantissa_bits) if y and math.isfinite(y) else 0.0


def _grads(problem: AttentionProblem, tensors: Tensors) -> tuple[str, ...]:
    return problem.grads if tensors.dout is not None or tensors.dlse is not None else ()


def oracle(problem: AttentionProblem, tensors: Tensors, *, bias_shape: tuple[int, ...] | None = None) -> Result:
    """The float64 answer on the stored inputs, by explicit formulas; with dout or dlse, the gradients of problem.grads.

    Args:
        problem: what is asked for.
        tensors: canonical operands on any device; dout, dlse as given to the backward. Nothing is written; with k_new,
            the caches may be from before or after the call.
        bias_shape: the four sizes of dbias; left out, 1 wherever tensors.bias has stride 0.

    Returns:
        Result in float64. After bias or ALiBi the scores are rounded to float32 unless the problem is float64.

    Source: docs/semantics.md sections 2, 7, 8.
    """
    return evaluate(problem, tensors, Arithmetic(), _grads(problem, tensors), bias_shape=bias_shape)[0]


def magnitudes(problem: AttentionProblem, tensors: Tensors, *, bias_shape: tuple[int, ...] | None = None) -> Scale:
    """A of every quantity (the oracle's formulas on absolute values), K, and the sizes of the scores."""
    scale = evaluate(problem, tensors, Arithmetic(), _grads(problem, tensors), True, bias_shape)[1]
    assert scale is not None
    return scale


def baselines(
    problem: AttentionProblem, tensors: Tensors, *, bias_shape: tuple[int, ...] | None = None
) -> tuple[Result, Result]:
    """Dense float32 attention with operands rounded as the storage dtype demands: (a) P rounded, (b) P' rounded.

        (a) P = T(exp(s - m) / l), out = P V          (b) P' = T(exp(s - m)), out = (P' V) / l
        delta = dO . out as stored - dlse;  dS = T(P (keep dP / (1 - p_drop) - delta) softcap')
        dV = T(P keep / (1 - p_drop))^T dO

    T rounds to the storage dtype (float32: not at all; tf32: 10 mantissa bits, of q, k, v and dO too). Products are
    full float32 whatever torch's switches say. Results come in API dtypes, rounded once.
    """
    first, second = (_baseline(problem, tensors, late, bias_shape) for late in (False, True))
    return first, second


def _baseline(problem: AttentionProblem, tensors: Tensors, late: bool, bias_shape: tuple[int, ...] | None) -> Result:
    wide = torch.float64 if problem.dtype == torch.float64 else torch.float32
    arithmetic = Arithmetic(wide, storage(problem), late, exact=False)
    with ieee_products():
        got, _ = evaluate(problem, tensors, arithmetic, _grads(problem, tensors), bias_shape=bias_shape)
    dtypes = {"out": problem.dtype, "dq": problem.dtype, "dk": problem.dtype, "dv": problem.dtype}
    dtypes |= {"dbias": problem.bias or wide, "dsinks": problem.sinks or wide}
    given = {name: getattr(got, name) for name in dtypes}
    return replace(got, **{name: x.to(dtypes[name]) for name, x in given.items() if x is not None})


def expect(problem: AttentionProblem, tensors: Tensors, *, bias_shape: tuple[int, ...] | None = None) -> Expected:
    """Oracle, baselines (none for float64) and magnitudes of one call, for judging several results of it."""
    exact, scale = evaluate(problem, tensors, Arithmetic(), _grads(problem, tensors), True, bias_shape)
    assert scale is not None
    narrow = problem.dtype != torch.float64
    return Expected(exact, baselines(problem, tensors, bias_shape=bias_shape) if narrow else (), scale)


def judge(
    problem: AttentionProblem,
    tensors: Tensors,
    result: Result,
    *,
    cancels: bool = False,
    plain: bool = False,
    expected: Expected | None = None,
) -> Verdict:
    """Compare what a backend gave with the oracle, within bounds that honest rounding needs and faults exceed.

        max|x - o| <= 2 E + ulp_T(max|o|) + c max A;   ||x - o|| <= 2 max ||e - o|| + c ||A||

    Args:
        problem: what was asked for; tf32 chooses the tf32 bounds.
        tensors: the call's operands, dout and dlse included; on any device.
        result: out, lse and gradients in API layout and dtypes. None means not asked for, but every gradient of
            problem.grads must be there when tensors has dout or dlse.
        cancels: the recipe cancels by construction (single key, constant k, constant or shifted v); u A is added.
        plain: plain normal inputs or q * 5: pass 3 is judged as well, if a query sees at least 16 keys.
        expected: what `expect` gave for the same call; left out, it is computed.

    Returns:
        Verdict with one record a quantity. str(verdict) says every error and bound.

    Source: docs/semantics.md section 8.
    """
    bias_shape = None
    if result.dbias is not None:
        bias_shape = (1,) * (4 - result.dbias.dim()) + tuple(result.dbias.shape)
    if expected is None:
        expected = expect(problem, tensors, bias_shape=bias_shape)
    names = [name for name in ("out", "lse") if getattr(result, name) is not None]
    wanted = ["d" + name for name in _grads(problem, tensors)]
    extra = [n for n in ("dq", "dk", "dv", "dbias", "dsinks") if getattr(result, n) is not None and n not in wanted]
    records = [_record(problem, name, result, expected, cancels, plain) for name in names + wanted]
    records += [Record(name, (), "given, but not among the gradients of the problem") for name in extra]
    return Verdict(tuple(records))


def check_forward(problem: AttentionProblem, tensors: Tensors, name: str) -> None:
    """Raise KernelError unless out and lse of a finished forward are right; for ATTNLIB_DEBUG=shadow."""
    verdict = judge(problem, replace(tensors, dout=None, dlse=None), Result(tensors.out, tensors.lse))
    if not verdict.passed:
        text = "; ".join(map(str, verdict.failures))
        raise KernelError(f"{name}: the forward differs from the oracle: {text}", problem=problem, kernel=name)


def _record(
    problem: AttentionProblem, name: str, result: Result, expected: Expected, cancels: bool, plain: bool
) -> Record:
    x, o = getattr(result, name), getattr(expected.oracle, name)
    if x is None or o is None:
        return Record(name, (), "missing")
    if x.numel() != o.numel() or (name != "dbias" and x.shape != o.shape):
        return Record(name, (), f"shape: needs {tuple(o.shape)}, got {tuple(x.shape)}")
    wanted = _result_dtype(problem, name)
    if x.dtype != wanted:
        return Record(name, (), f"dtype: needs {wanted}, got {x.dtype}")
    stored = x.detach().reshape(o.shape)
    pattern, sound = _pattern(stored, o)
    x = stored.double()
    zero = torch.zeros((), dtype=torch.float64, device=o.device)

    def finite(y: torch.Tensor) -> torch.Tensor:
        return torch.where(sound, y, zero)

    error = finite(x - o)
    if name == "lse":
        return Record(name, (pattern, _lse_check(problem, error, finite(o), expected)))
    a = finite(getattr(expected.scale.magnitude, name)).nan_to_num(0.0, 0.0)
    dirty = int((sound & (a == 0) & (x != 0)).sum())
    checks = [pattern, Check("nonzero where nothing contributes", dirty, 0)]
    checks += _pass_1_and_2(problem, name, stored.dtype, error, finite(o), a, expected, sound, cancels)
    if plain and expected.scale.max_keys >= 16:
        size, off = float(torch.linalg.vector_norm(finite(o))), float(torch.linalg.vector_norm(error))
        checks.append(Check("pass 3", off / size if size else off, _mark(problem, name, expected.scale)))
    return Record(name, tuple(checks))


def _result_dtype(problem: AttentionProblem, name: str) -> torch.dtype:
    if name == "lse":
        return problem.accumulate_dtype
    other = {"dbias": problem.bias, "dsinks": problem.sinks}.get(name)
    return other or problem.dtype


def _pattern(x: torch.Tensor, o: torch.Tensor) -> tuple[Check, torch.Tensor]:
    """How many elements have another kind (finite, NaN, +Inf, -Inf) than o stored in x's dtype; and where to measure.

    Finite values at the edge of overflow may go either way.
    """
    due = o.to(x.dtype)
    limit = torch.finfo(x.dtype).max
    edge = (o.abs() > limit * (1 - 2.0**-6)) & (o.abs() < limit * (1 + 2.0**-6)) & ~torch.isnan(x)
    alike = torch.where(torch.isfinite(due), torch.isfinite(x), (due == x) | (torch.isnan(due) & torch.isnan(x)))
    wrong = int((~(alike | edge)).sum())
    return Check("NaN/Inf pattern", wrong, 0), torch.isfinite(o) & torch.isfinite(due) & ~edge


def _largest(x: torch.Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _pass_1_and_2(
    problem: AttentionProblem, name: str, dtype: torch.dtype, error: torch.Tensor, o: torch.Tensor, a: torch.Tensor,
    expected: Expected, sound: torch.Tensor, cancels: bool,
) -> list[Check]:  # fmt: skip
    double = problem.dtype == torch.float64
    tf32 = problem.tf32 and problem.dtype == torch.float32
    c = (16 + math.sqrt(expected.scale.longest[name]) / 2) * (2.0**-53 if double else 2.0**-24)
    if double:  # E is 0 here, so the rounding of s, which exp multiplies by |s|, has to be in c
        c *= 1 + expected.scale.max_score
    if cancels:
        c += _CANCEL_UNIT.get(problem.dtype, 2.0**-11 if tf32 else 0.0)
    worst = spread = 0.0
    for baseline in expected.baselines:
        e = getattr(baseline, name).reshape(o.shape).double()
        off = torch.where(sound & torch.isfinite(e), e - o, 0.0)
        worst, spread = max(worst, _largest(off)), max(spread, float(torch.linalg.vector_norm(off)))
    bits = min(10 if tf32 else _MANTISSA[problem.dtype], _MANTISSA[dtype])
    # what a baseline errs on a handful of elements (dsinks) is luck, good or bad; pass 3 still holds them
    factor = 2 * max(1.0, math.sqrt(_FEW / max(o.numel(), 1)))
    norm = float(torch.linalg.vector_norm(a))
    return [
        Check("pass 1", _largest(error), factor * worst + ulp(_largest(o), bits) + c * _largest(a)),
        Check("pass 2", float(torch.linalg.vector_norm(error)), factor * spread + c * norm),
    ]


def _mark(problem: AttentionProblem, name: str, scale: Scale) -> float:
    """Pass 3's bound on the relative Frobenius error."""
    if problem.dtype == torch.float64:
        return 1e-12 * (1 + scale.max_score)
    if problem.dtype == torch.float32:
        return 3e-3 if problem.tf32 else 4e-6 + 2.0**-23 * scale.max_score + 1e-7 * math.sqrt(problem.seqlen_k)
    return _HALF_MARK[problem.dtype][0 if name in ("out", "dv") else 1]


def _lse_check(problem: AttentionProblem, error: torch.Tensor, o: torch.Tensor, expected: Expected) -> Check:
    """The largest error of lse in units of its own scale, against t."""
    assert expected.scale.scores is not None
    t = 5e-4 if problem.tf32 and problem.dtype == torch.float32 else _LSE_MARK[problem.dtype]
    unit = torch.maximum(o.abs(), expected.scale.scores).clamp(min=1.0)
    return Check("lse", _largest(error / unit), t)
