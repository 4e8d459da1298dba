"""The cupy backend without CuPy: its configurations, its refusals, and its kernels on a CPU."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import emulated_cupy
import pytest
import torch

import attnlib_cupy
from attnlib.backend import RefusalCode, Resources, Target
from attnlib.conformance import run_check
from attnlib.problem import AttentionProblem, Tensors
from attnlib_cuda import sources
from attnlib_cupy import config, params, source
from attnlib_cupy.plan import CupyPlan

ROOT = Path(__file__).parents[1]
ARCHS = ("sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_120", "gfx90a", "gfx1100")

# One check of each kind: every kernel, dtype and branch of the kernels runs, in a minute on two cores.
CHECKS = (
    "forward/plain", "backward/plain", "forward/everything-dropout", "backward/everything-packed/float32",
    "backward/everything-lengths/float32", "backward/gqa/float32", "backward/jump/float32", "dropout/all",
    "forward/everything-append/bfloat16", "forward/page_size-1/", "backward/bias-one-number", "canary/varlen",
    "visible/block_mask", "poison/packed-window", "poison/packed-paged", "nan/visible-k-backward",
    "config/num_splits=3/everything-pa",
)  # fmt: skip

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def problem(**values: object) -> AttentionProblem:
    sizes = dict(batch=2, seqlen_q=300, seqlen_k=300, num_heads_q=4, num_heads_kv=2, head_dim=64, head_dim_v=64)
    return AttentionProblem(**{"dtype": torch.float32, "scale": 0.125, **sizes, **values})  # type: ignore[arg-type]


def target(arch: str) -> Target:
    return Target("rocm" if arch.startswith("gfx") else "cuda", arch, present=False)


def test_params_mirror_the_struct():
    text = sources.read("cuda/params_simt.cuh")
    assert text is not None
    body = text[text.index("struct SimtParams {") : text.index("};", text.index("struct SimtParams {"))]
    kinds = {"uint64_t": "Q", "int64_t": "q", "double": "d", "int32_t": "i"}
    members = [
        (name.strip(), kinds[kind])
        for kind, names in re.findall(r"^\s+(uint64_t|int64_t|double|int32_t) ([^;]+);", body, re.MULTILINE)
        for name in names.split(",")
    ]
    codes = re.sub(r"[<\d]|\dx", "", params.PARAMS.format.format).replace("x", "")
    assert members == list(zip(params.PARAMS.names, codes, strict=True))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "dims", [(1, 1), (64, 64), (80, 128), (128, 128), (192, 128), (256, 256), (512, 512), (576, 512)]
)
def test_every_architecture_has_a_shape(arch: str, dtype: torch.dtype, dims: tuple[int, int]):
    asked = problem(dtype=dtype, head_dim=dims[0], head_dim_v=dims[1], grads=("q", "k", "v"))
    if (arch, dtype) == ("sm_60", torch.float64) and dims[0] >= 512:  # 48 KB are too few
        (refusal,) = attnlib_cupy.backend.check(asked, "", target(arch))
        assert refusal.what == "shared memory"
        return
    assert attnlib_cupy.backend.check(asked, "", target(arch)) == ()
    for backward in (False, True):
        shape = config.tile(asked, target(arch), backward)
        assert shape.shared_bytes(backward) <= config.shared_limit(target(arch))
        assert shape.rows * shape.tile_columns // shape.lanes <= 64
        for step, wide in ((shape.step_k, dims[0]), (shape.step_v, dims[1])):
            assert shape.tile_columns % step == 0 and step % (2 if dtype == torch.float64 else 4) == 0
            assert step * wide <= shape.slice or (step == shape.step_k and not backward)


def test_shared_memory_of_a_present_device_counts():
    tiny = Target("cuda", "sm_90", 0, resources=Resources(132, 1000, 50 << 20, 32))
    (refusal,) = attnlib_cupy.backend.check(problem(), "", tiny)
    assert refusal.code is RefusalCode.CONFIG and "shared memory" in str(refusal) and "1000" in str(refusal)


def test_size_classes_are_few():
    classes = {attnlib_cupy.backend.size_class(problem(seqlen_q=n), "", target("sm_90")) for n in range(1, 5000)}
    assert len(classes) <= 16


@pytest.mark.parametrize(
    "wanted",
    [
        {"rows": 3},
        {"rows": True},
        {"num_splits": True},
        {"lanes": 4},
        {"block_q": 64},
        {"fault": "no such"},
        {"rows": 8, "lanes": 8, "tile_columns": 128},
    ],
)
def test_a_config_that_does_not_fit_is_refused(wanted: dict[str, object]):
    from attnlib.errors import UnsupportedError

    with pytest.raises(UnsupportedError, match="cupy: "):
        attnlib_cupy.backend.plan(problem(), "", target("sm_90"), wanted)


def test_short_query_lists_share_out_their_keys():
    def splits(**values: object) -> int:
        asked = problem(**{"seqlen_q": 1, "seqlen_k": 8192, "window": (None, None), **values})
        device = Target("cuda", "sm_90", 0, resources=Resources(132, 227 << 10, 50 << 20, 32))
        return config.splits(asked, device, config.tile(asked, device, False))

    assert splits(seqlen_q=8) == 33 and splits(seqlen_q=8, batch=200) == 1  # 264 blocks
    assert splits() == 32 and splits(batch=200) == 16 and splits(batch=5000) < 4  # 512 keys, not too many blocks
    assert splits(seqlen_q=300) == splits(seqlen_k=200) == splits(batch=200, seqlen_k=600) == 1
    assert splits(dropout_p=0.5) == splits()  # lse has the same bits


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3, 8, 16])
def test_every_number_of_splits_gives_the_same(count: int):
    import attnlib

    q, k, v = (torch.randn(2, n, 4, 64, generator=torch.manual_seed(n)) for n in (3, 300, 301))
    launched: list[str] = []

    def launch(kernel: source.Kernel, *rest: Any) -> None:
        launched.append(kernel.name)
        emulated_cupy.launch(kernel, *rest)

    asked = problem(batch=2, seqlen_q=3, seqlen_k=300, num_heads_q=4, num_heads_kv=4, window=(None, 0))
    plan = CupyPlan(asked, target("sm_90"), launch, {"num_splits": count})
    out, lse = torch.full_like(q, torch.nan), torch.full((2, 4, 3), torch.nan)
    plan.forward(asked, Tensors(q=q, k=k, v=v[:, :300], out=out, lse=lse))
    expected, expected_lse = attnlib.attention(
        q, k, v[:, :300], causal=True, scale=0.125, backend="reference", return_lse=True
    )
    assert launched == (["forward"] if count == 1 else ["forward", "combine"])
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=2e-6)


def test_without_cupy_there_is_a_refusal_with_a_remedy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    found = attnlib_cupy.backend.available("", Target("cuda", "sm_90", 0))
    assert [refusal.code for refusal in found] == [RefusalCode.PACKAGE] and "pip install" in found[0].remedy


def test_sources_are_one_text_without_includes():
    shape = config.tile(problem(), target("sm_90"), False)
    text = source.text(source.Kernel("forward", shape))
    assert '#include "' not in text and "#pragma once" not in text and text.count("struct SimtParams {") == 1
    assert "asm(" in text and text == source.text(source.Kernel("forward", shape))


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("only", CHECKS)
def test_kernels_on_a_cpu(only: str, monkeypatch: pytest.MonkeyPatch):
    for order in (0, 1):
        monkeypatch.setattr(emulated_cupy, "order", order)
        report = run_check(emulated_cupy.backend, only=only)
        failed = [f"{check['name']}: {check['message']}" for check in report["checks"] if check["outcome"] != "passed"]
        assert report["passed"] > 0 and not failed, "\n".join(failed)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("fault", config.FAULTS[1:])
def test_faults_in_the_kernels_are_seen(fault: str):
    from attnlib.conformance.mutants import run_mutants

    (found,) = run_mutants(emulated_cupy.backend, faults=[fault])["mutants"]
    assert found["killer"] is not None, f"{fault} passed {found['checks']} checks"
