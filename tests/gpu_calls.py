"""What the tests on a GPU share: calls, operands and how results are compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attnlib
from attnlib import numerics

NAME = "cuda"
HALF = torch.bfloat16

MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.version.hip is not None, reason="needs an NVIDIA GPU"),
]


def attend(*args: Any, **kwargs: Any) -> Any:
    return attnlib.attention(*args, backend=NAME, **kwargs)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = HALF, device: Any = "cuda") -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def operands(batch: int = 2, seqlen: int = 200, heads: int = 4, heads_kv: int = 2, dim: int = 64, **more: Any) -> Any:
    sizes = ((heads, 0), (heads_kv, 1), (heads_kv, 2))
    return [randn(batch, seqlen, count, dim, seed=seed, **more) for count, seed in sizes]


def gradients(function: Any, tensors: Any) -> list[torch.Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = function(*leaves)
    dout = randn(*out.shape, seed=9, dtype=out.dtype, device=out.device)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def assert_same(got: Any, want: Any) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert torch.equal(a.nan_to_num(), b.nan_to_num()), f"differ by up to {(a.float() - b.float()).abs().max()}"


def assert_right(inputs: Any, out: torch.Tensor, lse: torch.Tensor | None = None, **grads: torch.Tensor) -> None:
    """Within the bounds of the contract."""
    problem = inputs.problem()
    verdict = numerics.judge(problem, inputs.tensors(problem), numerics.Result(out, lse, **grads))
    assert verdict.passed, str(verdict)
