"""What a call costs on the host, by pytest-benchmark: pytest benchmarks/test_overhead.py --benchmark-only

Dispatch and the calls of `benchmarks.overhead` run anywhere, on a backend whose kernels do nothing. On a GPU the calls
of the cuda backend follow: what a launch costs the host, beside torch's own, with one query and one key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import attnlib
from attnlib import registry

from . import overhead

CALLS = tuple(overhead.BUDGETS)
GPU_CALLS = ("forward", "forward, with gradient", "forward and backward", "decode")

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.version.hip is not None, reason="needs an NVIDIA GPU"
)


@pytest.fixture(scope="module", autouse=True)
def _noop() -> Iterator[None]:
    attnlib.register_backend(overhead.NoopBackend())
    yield
    registry.unregister_backend(overhead.NAME)


@pytest.mark.parametrize("name", CALLS)
def test_host_work(benchmark: Any, name: str) -> None:
    """attnlib's own work, by kind of call."""
    call = overhead.calls()[name][0]
    call()
    benchmark(call)


@pytest.mark.parametrize("name", [name for name in CALLS if name.startswith("forward")])
def test_host_work_of_torch(benchmark: Any, name: str) -> None:
    """torch's SDPA, its kernel on one query and one key included."""
    call = overhead.calls()[name][1]
    assert call is not None
    call()
    benchmark(call)


def launches(attend: Callable[..., torch.Tensor], heads_first: bool) -> dict[str, Callable[[], Any]]:
    """Calls that do next to nothing on the GPU; attend takes q, k and v, laid out as heads_first says."""

    def draw(tokens: int, heads: int, grad: bool = False) -> torch.Tensor:
        shape = (1, heads, tokens, 64) if heads_first else (1, tokens, heads, 64)
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_(grad)

    q, k, v = (draw(16, 2) for _ in range(3))
    leaves = [draw(16, 2, True) for _ in range(3)]
    dout = torch.ones_like(q)
    step, keys, values = draw(1, 8), draw(512, 8), draw(512, 8)
    return {
        "forward": lambda: attend(q, k, v),
        "forward, with gradient": lambda: attend(*leaves),
        "forward and backward": lambda: torch.autograd.grad(attend(*leaves), leaves, dout),
        "decode": lambda: attend(step, keys, values),
    }


def time_launches(benchmark: Any, call: Callable[[], Any]) -> None:
    """Rounds short enough that the queue of launches never fills, which would time the GPU instead of the host."""
    call()
    torch.cuda.synchronize()
    benchmark.pedantic(call, setup=torch.cuda.synchronize, rounds=200, iterations=20, warmup_rounds=5)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_CALLS)
def test_launch(benchmark: Any, name: str) -> None:
    """The cuda backend: checks, plan, parameters and launch."""
    attend = attnlib.attention
    time_launches(benchmark, launches(lambda q, k, v: attend(q, k, v, backend="cuda"), False)[name])


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_CALLS)
def test_launch_of_torch(benchmark: Any, name: str) -> None:
    """torch's own FlashAttention-2 on the same."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        time_launches(benchmark, launches(torch.nn.functional.scaled_dot_product_attention, True)[name])
