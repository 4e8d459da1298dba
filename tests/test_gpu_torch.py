"""What torch does around the public functions on a GPU: compile, autocast, checkpoints, func, dispatch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_calls import HALF, MARKS, NAME, assert_right, assert_same, attend, gradients, operands
from torch.utils.checkpoint import checkpoint

import attnlib
from attnlib import dispatch
from attnlib.conformance.cases import Case
from attnlib.conformance.recipes import make

pytestmark = MARKS


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (20, 10), "softcap": 5.0}], ids=["causal", "window"])
def test_compile_fullgraph(backend: str, options: dict[str, Any]) -> None:
    def function(q: Any, k: Any, v: Any) -> Any:
        return attend(q * 1.5, k, v, deterministic=True, **options) + 1

    if backend == "inductor":
        pytest.importorskip("triton")
    tensors = operands(dtype=torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for got, want in zip(gradients(compiled, tensors), gradients(function, tensors), strict=True):
        assert torch.allclose(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_compile_reads_float32_precision(precision: str) -> None:
    """float32 under compile takes the precision in force, and its accuracy shows it."""
    matmul: Any = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("needs torch with fp32_precision")
    before = matmul.fp32_precision
    tensors = operands(dtype=torch.float32)
    try:
        matmul.fp32_precision = precision
        torch._dynamo.reset()
        compiled = torch.compile(lambda q, k, v: attend(q, k, v), fullgraph=True, backend="aot_eager")
        got, eager = compiled(*tensors), attend(*tensors)
    finally:
        matmul.fp32_precision = before
    exact = attnlib.attention(*(x.double() for x in tensors), backend="reference")
    error = float((got - exact).norm() / exact.norm())
    assert torch.equal(got, eager)
    assert error < 4e-6 if precision == "ieee" else 1e-5 < error < 3e-3


def test_compile_dropout_and_dynamic_lengths() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: attend(q, k, v, causal=True, dropout_p=0.5), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for seqlen in (17, 18, 65):
        tensors = operands(seqlen=seqlen)
        torch.manual_seed(3)
        first, second = compiled(*tensors), compiled(*tensors)
        torch.manual_seed(3)
        assert torch.equal(first, compiled(*tensors)) and not torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float16, HALF])
def test_autocast(dtype: torch.dtype) -> None:
    q, k, v = operands(dtype=torch.float32)
    q.requires_grad_()
    with torch.autocast("cuda", dtype):
        out = attend(q, k, v)
    assert out.dtype == dtype
    assert torch.equal(out, attend(q.to(dtype), k.to(dtype), v.to(dtype)))
    (grad,) = torch.autograd.grad(out.float().sum(), q)
    assert grad.dtype == torch.float32 and grad.isfinite().all()


@pytest.mark.parametrize("reentrant", [False, True])
def test_AB_064_checkpoint_repeats_dropout(reentrant: bool) -> None:
    tensors = operands(dim=128)

    def function(q: Any, k: Any, v: Any) -> Any:
        return attend(q, k, v, dropout_p=0.3, deterministic=True)

    def run(call: Any) -> list[torch.Tensor]:
        torch.manual_seed(7)
        leaves = [x.detach().clone().requires_grad_() for x in tensors]
        out = call(*leaves)
        out.backward(torch.ones_like(out))
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    assert_same(run(lambda *t: checkpoint(function, *t, use_reentrant=reentrant)), run(function))


def test_vmap_and_func_grad() -> None:
    q, k, v = operands()
    stacked = torch.stack([q, q * 0.5, -q])
    got = torch.func.vmap(lambda q: attend(q, k, v, causal=True))(stacked)
    for index in range(3):
        assert torch.equal(got[index], attend(stacked[index], k, v, causal=True))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    want = torch.autograd.grad(attend(*leaves, deterministic=True).float().square().sum(), leaves)
    loss = torch.func.grad(lambda *t: attend(*t, deterministic=True).float().square().sum(), argnums=(0, 1, 2))
    assert_same(loss(q, k, v), want)


def test_dispatch_names_the_device() -> None:
    q, k, v = operands()
    decision = attnlib.explain(q, k, v, causal=True)
    assert decision.chosen is not None and decision.target.kind == "cuda" and decision.target.present
    double = attnlib.explain(*(x.double() for x in (q, k, v)), backend=NAME)
    assert double.chosen is None and any(r.what == "dtype" for rs in double.refusals.values() for r in rs)


def test_host_lengths_on_the_device() -> None:
    """Every layout with lengths on the device gives what the case asks for, without reading them on the host."""
    for layout, more in (("packed", {"q_lens": (65, 1, 0, 40)}), ("cache", {"directions": ("forward",)})):
        case = Case(f"gpu-{layout}", layout=layout, kv_lens=(97, 64, 5, 33), causal=True, head_dim=64, **more)
        inputs = make(case, HALF, torch.device("cuda"))
        attnlib_call = getattr(attnlib, inputs.function)
        attnlib_call(*inputs.positional, **inputs.arguments, backend=NAME)  # compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            out, lse = attnlib_call(*inputs.positional, **inputs.arguments, return_lse=True, backend=NAME)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert_right(inputs, out, lse)


def test_caches_survive_clearing() -> None:
    q, k, v = operands()
    want = attend(q, k, v)
    dispatch.clear_caches()
    assert torch.equal(attend(q, k, v), want)
