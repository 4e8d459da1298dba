"""Problems and plans of the cpu backend, below dispatch, and the definition's results beside them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnlib.backend import Target
from attnlib.problem import AttentionProblem, Tensors
from attnlib.reference import ReferencePlan

attnlib_cpu = pytest.importorskip("attnlib_cpu")
HERE = Target("cpu", "x86_64")
FAMILIES = [f.name for f in attnlib_cpu.backend.families if not attnlib_cpu.backend.available(f.name, HERE)]
if not FAMILIES:
    pytest.skip("the extension attnlib_cpu._cpu is not built", allow_module_level=True)
BEST = next(f for f in FAMILIES if f != "amx")  # of those that take any dtype
F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
SEED = 0x123456789ABCDEF0
# relative Frobenius error that rounding of out and gradients explains here; faults exceed it by far
TOLERANCE = {F64: 1e-11, F32: 2e-5, F16: 4e-3, BF16: 3e-2}
RESULTS = ("out", "lse", "stats", "dq", "dk", "dv", "dbias", "dsinks")
NAN = float("nan")


def plan_of(problem, family=None, **config):
    """A plan by one family; the best one that takes the dtype if none is named."""
    if family is None:
        family = FAMILIES[0] if problem.dtype == BF16 else BEST
    if family == "amx" and problem.dtype != BF16:
        pytest.skip("cpu:amx takes bfloat16 only")
    return attnlib_cpu.backend.plan(problem, family, HERE, config or None)


def normal(*shape, dtype=F32):
    return torch.randn(shape, dtype=F64).to(dtype)


def dense(
    batch=2, seqlen_q=37, seqlen_k=53, heads=4, heads_kv=2, dim=16, dim_v=None, dtype=F32, grads=("q", "k", "v"),
    **options,
):  # fmt: skip
    """A padded problem and its operands; options are fields of AttentionProblem."""
    dim_v = dim if dim_v is None else dim_v
    scale = options.pop("scale", dim**-0.5)
    problem = AttentionProblem(
        dtype, batch, seqlen_q, seqlen_k, heads, heads_kv, dim, dim_v, scale, grads=grads, **options
    )
    tensors = outputs(
        problem,
        Tensors(
            normal(batch, seqlen_q, heads, dim, dtype=dtype),
            normal(batch, seqlen_k, heads_kv, dim, dtype=dtype),
            normal(batch, seqlen_k, heads_kv, dim_v, dtype=dtype),
            None,  # type: ignore[arg-type]
            None,  # type: ignore[arg-type]
        ),
    )
    extras(problem, tensors)
    return problem, tensors


def few(seqlen_k=700, seqlen_q=2, **options):
    """A problem that is cut by keys: no gradients, few queries."""
    return dense(seqlen_q=seqlen_q, seqlen_k=seqlen_k, grads=(), **options)


def extras(problem, tensors):
    """Random operands for what the problem asks for."""
    shape = (problem.batch, problem.num_heads_q, problem.seqlen_q, problem.seqlen_k)
    if problem.bias is not None:
        tensors.bias = normal(*shape, dtype=problem.bias)
    if problem.mask:
        tensors.mask = torch.rand(shape) < 0.7
    if problem.alibi:
        tensors.alibi_slopes = torch.rand(shape[:2])
    if problem.sinks is not None:
        tensors.sinks = normal(problem.num_heads_q, dtype=problem.sinks)
    if problem.block_mask is not None:
        block_q, block_k = problem.block_mask
        tensors.block_mask = torch.rand(*shape[:2], -(-shape[2] // block_q), -(-shape[3] // block_k)) < 0.5
    if problem.dropout_threshold:
        tensors.dropout_seed = torch.tensor([SEED])


def outputs(problem, tensors):
    """The same operands with fresh outputs, all NaN where the backend must write."""
    real = problem.accumulate_dtype
    fresh = replace(
        tensors,
        out=torch.full((*tensors.q.shape[:-1], problem.head_dim_v), NAN, dtype=problem.dtype),
        lse=torch.full(problem.lse_shape, NAN, dtype=real),
        stats=torch.full((2, *problem.lse_shape), NAN, dtype=real) if problem.needs_stats else None,
    )
    for name in ("q", "k", "v"):
        x = getattr(tensors, name)
        setattr(fresh, "d" + name, torch.full(x.shape, NAN, dtype=x.dtype) if name in problem.grads else None)
    if "bias" in problem.grads and tensors.bias is not None:
        sizes = [1 if s == 0 else n for n, s in zip(tensors.bias.shape, tensors.bias.stride(), strict=True)]
        fresh.dbias = torch.zeros(sizes, dtype=real).expand(tensors.bias.shape)
    if "sinks" in problem.grads:
        fresh.dsinks = torch.zeros(problem.num_heads_q, dtype=real)
    return fresh


def run(plan, problem, tensors, backward=True):
    """Forward and, where gradients are asked for, backward, into fresh outputs."""
    result = outputs(problem, tensors)
    plan.forward(problem, result)
    if backward and problem.grads:
        plan.backward(problem, result)
    return result


def with_gradients(tensors, problem):
    tensors.dout = normal(*tensors.q.shape[:-1], problem.head_dim_v, dtype=problem.dtype)
    tensors.dlse = normal(*problem.lse_shape, dtype=problem.accumulate_dtype)
    return tensors


def assert_close(problem, result, expected, names=RESULTS):
    for name in names:
        x, o = getattr(result, name), getattr(expected, name)
        if x is None or o is None:
            continue
        x, o = x.double(), o.double()
        assert torch.equal(torch.isnan(x), torch.isnan(o)), f"{name}: NaN pattern"
        finite = torch.isfinite(o)
        assert torch.equal(x[~finite].nan_to_num(0.0), o[~finite].nan_to_num(0.0)), f"{name}: infinities"
        error = float(torch.linalg.vector_norm(x[finite] - o[finite]))
        size = float(torch.linalg.vector_norm(o[finite])) + 1e-3
        assert error <= TOLERANCE[problem.dtype] * size, f"{name}: {error:.3g} of {size:.3g}"


def check(problem, tensors, family=None, **config):
    """One problem against the definition; returns the backend's result."""
    if problem.grads and tensors.dout is None:
        with_gradients(tensors, problem)
    expected = run(ReferencePlan(), problem, tensors)
    result = run(plan_of(problem, family, **config), problem, tensors)
    assert_close(problem, result, expected)
    return result


def bitwise(a, b, names=RESULTS):
    for name in names:
        x, y = getattr(a, name), getattr(b, name)
        if x is not None:
            assert torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)), name
