"""The kernels of Hopper: which problems get them, and with what."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import attnlib
from attnlib.problem import AttentionProblem
from attnlib_cuda import device, hopper, jit, params, steps

HOPPER = device.for_arch("sm_90")
PLAIN = AttentionProblem(
    dtype=torch.bfloat16, batch=2, seqlen_q=512, seqlen_k=512, num_heads_q=4, num_heads_kv=2, head_dim=128,
    head_dim_v=128, scale=0.1,
)  # fmt: skip
SIZES = [(40, 40), (64, 64), (80, 80), (96, 96), (128, 128), (160, 160), (192, 128), (192, 192), (224, 224), (256, 256)]
COVERED: list[dict[str, Any]] = [
    {}, {"window": (None, 0)}, {"window": (64, 64)}, {"window": (None, 0), "top_left": True}, {"softcap": 30.0},
    {"sinks": torch.float32}, {"lengths": True}, {"packed": True, "total_q": 900, "total_k": 900},
    {"dropout_p": 0.1}, {"dropout_p": 0.1, "window": (None, 0)}, {"dropout_p": 0.1, "softcap": 30.0},
]  # fmt: skip
LEFT_OUT: list[dict[str, Any]] = [
    {"dtype": torch.float32}, {"bias": torch.float32}, {"mask": True}, {"alibi": True}, {"block_mask": (64, 64)},
    {"page_size": 16, "lengths": True}, {"append": True, "lengths": True}, {"aligned": False},
    {"seqlen_q": 64}, {"head_dim": 264, "head_dim_v": 264}, {"head_dim": 32, "head_dim_v": 32},
    {"head_dim": 64, "head_dim_v": 128},
]  # fmt: skip


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("change", COVERED, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_covered_problems_fit_a_multiprocessor(
    sizes: tuple[int, int], change: dict[str, Any], dtype: torch.dtype
) -> None:
    head_dim, head_dim_v = sizes
    problem = replace(PLAIN, head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype, **change)
    forward = hopper.forward(problem, HOPPER)
    assert forward is not None
    assert forward.shared_bytes <= HOPPER.smem_per_block
    assert head_dim_v <= forward.columns_v <= 64 * -(-head_dim_v // 64)
    for more in ({}, {"dropout_p": 0.1}, {"deterministic": True}, {"dropout_p": 0.1, "deterministic": True}):
        backward = hopper.backward(replace(problem, grads=("q", "k", "v"), **more), HOPPER)
        assert backward is not None
        assert backward.shared_bytes <= HOPPER.smem_per_block
        assert backward.dq_columns >= head_dim


@pytest.mark.parametrize("change", LEFT_OUT, ids=str)
def test_what_is_left_to_the_kernels_of_sm_80(change: dict[str, Any]) -> None:
    problem = replace(PLAIN, **change)
    assert hopper.forward(problem, HOPPER) is None
    assert hopper.backward(problem, HOPPER) is None


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_100", "sm_120"])
def test_no_other_architecture_gets_them(arch: str) -> None:
    assert hopper.forward(PLAIN, device.for_arch(arch)) is None


def test_explain_names_the_kernels() -> None:
    q = torch.randn(2, 256, 4, 64, dtype=torch.bfloat16, requires_grad=True)
    found = attnlib.explain(q, q, q, causal=True, device="sm_90")
    assert found.chosen == "cuda:sm_90"
    assert "forward_sm90" in str(found)
    assert "backward_sm90" in str(found)
    assert "backward_sm80" in str(attnlib.explain(q, q, q, bias=torch.zeros(256, 256), device="sm_90"))
    assert "forward_sm80" in str(attnlib.explain(q, q, q, device="sm_80"))


def test_structs_are_as_long_as_the_kernels_expect() -> None:
    maps = [bytes(128)] * 4
    forward = params.with_maps(maps, bytes(params.FORWARD.size) + bytes(8), params.FORWARD_MAPS_SIZE)
    assert len(forward) == params.FORWARD_MAPS_SIZE
    backward = params.with_maps(maps, bytes(params.BACKWARD.size), params.BACKWARD_MAPS_SIZE)
    assert len(backward) == params.BACKWARD_MAPS_SIZE
    for spec in (
        hopper.forward_kernel(hopper.forward(PLAIN, HOPPER)),  # type: ignore[arg-type]
        hopper.backward_kernel(hopper.backward(PLAIN, HOPPER)),  # type: ignore[arg-type]
    ):
        assert f"== {spec.params_size}" in jit.render(spec, "sm_90a")


class Host:
    """Remembers what it was asked to encode."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def encode_tiled(self, *arguments: Any) -> bytes:
        self.asked.append(arguments)
        return bytes(128)


def test_maps_say_where_the_operands_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host()
    monkeypatch.setattr(device, "host", lambda: host)
    steps._map.cache_clear()
    x = torch.empty(3, 100, 4, 80, dtype=torch.float16)[:, :, 1:3]
    steps.operand_map(x, 192)
    steps.operand_map(x, 192)
    packed = torch.empty(100, 1, 64, dtype=torch.bfloat16)
    steps.operand_map(packed, 64)
    (dense, flat) = host.asked
    assert dense[:5] == (6, x.data_ptr(), [80, 100, 2, 3], [2 * 320, 2 * 80, 2 * 32000], [64, 192, 1, 1])
    assert flat[0] == 9
    assert flat[2] == [64, 100, 1, 1]
    assert flat[3][0] == 128
    assert all(stride % 16 == 0 and stride > 0 for stride in flat[3])
    steps._map.cache_clear()


def test_what_repeats_in_memory_is_copied_for_its_map(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host()
    monkeypatch.setattr(device, "host", lambda: host)
    k = torch.randn(2, 5, 1, 64, dtype=torch.bfloat16).expand(2, 5, 4, 64)
    copy = steps._spread(k)
    assert torch.equal(copy, k)
    steps.operand_map(copy, 64)
    assert 0 not in host.asked[0][3]
    plain = torch.randn(2, 5, 4, 64)[:, :, ::2]
    assert steps._spread(plain) is plain
    steps._map.cache_clear()
