"""Compiling the Triton kernels for GPUs that are not here, what is said of them, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import programs
import pytest
import torch

import attnlib
import attnlib_triton
from attnlib import dispatch, precompile, settings, targets
from attnlib.backend import RefusalCode, Target
from attnlib.errors import ArgumentError, KernelNotCached
from attnlib.problem import AttentionProblem, Tensors
from attnlib_triton import amd, archs, config, figures
from attnlib_triton import compile as compiler
from attnlib_triton.figures import Figures
from attnlib_triton.launch import Spec
from attnlib_triton.plan import TritonPlan

pytestmark = pytest.mark.skipif(archs.triton_version() is None, reason="needs triton")
COMPILER: Any = compiler


def problem(**values: Any) -> AttentionProblem:
    sizes = dict(batch=1, seqlen_q=64, seqlen_k=64, num_heads_q=2, num_heads_kv=2, head_dim=16, head_dim_v=16)
    return AttentionProblem(**{"dtype": torch.float16, "scale": 0.25, **sizes, **values})


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with settings.override(cache_dir=str(tmp_path)):
        yield tmp_path


# --- attnlib compile --------------------------------------------------------------------------------------------------


def test_the_second_compilation_finds_the_first(folder: Path, capsys: pytest.CaptureFixture[str]):
    path = folder / "problems.json"
    path.write_text(json.dumps([{"dtype": "float16", "batch": 1, "seqlen_q": 64, "seqlen_k": 64, "num_heads_q": 2,
                                 "head_dim": 16}]))  # fmt: skip
    found = []
    for _ in range(2):
        arguments = ["--arch", "gfx942:sramecc+", "--problems", str(path), "--jobs", "1", "--json"]
        assert precompile.main(arguments) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert [(each["kernels"], each["compiled"], each["failed"]) for each in found] == [(1, 1, 0), (1, 0, 0)]
    (result,) = found[1]["results"]
    assert result["entry"] == "forward" and result["arch"] == "gfx942" and result["registers"] > 0
    assert result["details"]["matrix"] > 0 and result["details"]["buffer_loads"] > 0
    assert Path(result["path"]).parent == folder / "triton" and Path(result["path"], "forward.hsaco").exists()


def test_a_call_asks_the_cache_for_what_was_compiled(folder: Path):
    """A plan on real operands of one device, and the kernels compiled for a device that is not there."""
    p = problem()
    assert precompile.run({"gfx942": COMPILER}, [p], workers=1) == 0
    asked: list[Spec] = []
    rows = [torch.zeros(1, 64, 2, 16, dtype=torch.float16) for _ in range(4)]
    resources = targets.parse_target("gfx942")
    plan = TritonPlan(p, resources, None, lambda spec, *_: asked.append(spec))
    plan.forward(p, Tensors(*rows, torch.zeros(1, 2, 64)))
    with settings.override(jit="never"):
        for spec in asked:
            attnlib_triton.compile.launch.compile(spec, "gfx942")
        for other in (compiler.jobs(problem(softcap=3.0), "gfx942"), [(asked[0], "gfx950")]):
            with pytest.raises(KernelNotCached):
                attnlib_triton.compile.launch.compile(*other[0])


@pytest.mark.parametrize(
    "features",
    [
        {"seqlen_q": 1, "seqlen_k": 4096, "page_size": 16, "append": True},
        {"packed": True, "grads": ("q", "k", "v"), "window": (None, 0)},
        {"packed": True, "page_size": 16, "grads": ("q", "k", "v")},
        {"bias": torch.float32, "grads": ("q", "k", "v", "bias", "sinks"), "sinks": torch.float32, "mask": True},
    ],
)  # fmt: skip
def test_the_kernels_of_a_problem_are_named_without_a_device(features: dict[str, Any]):
    found = {spec.kernel for spec, _ in compiler.jobs(problem(**features), "gfx942")}
    wanted = {"forward"}
    if "append" in features:
        wanted |= {"append", "combine"}
    if "grads" in features:
        wanted |= {"rows", "query_gradient", "key_gradient"}
        wanted |= {"page_gradient"} if "page_size" in features else set()
        wanted |= {"bias_gradient", "sink_gradient"} if "bias" in features else set()
    assert found == wanted


def test_each_architecture_has_its_backend():
    names = {arch: module.__name__ for arch, module in precompile.choose("sm_90,gfx942, gfx1201").items()}  # type: ignore[attr-defined]
    assert names == {
        "sm_90a": "attnlib_cuda.compile", "gfx942": "attnlib_triton.compile", "gfx1201": "attnlib_triton.compile"
    }  # fmt: skip
    assert list(precompile.choose("sm_90", "triton")) == ["sm_90"]
    with pytest.raises(ArgumentError, match="gfx906"):
        precompile.choose("gfx906")


def test_compile_says_what_is_refused_and_what_fails(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(attnlib_triton.compile.launch, "compile", lambda *_: 1 / 0)
    wide = problem(dtype=torch.float64)
    assert precompile.run({"gfx942": COMPILER}, [wide, problem()], workers=1) == 1
    out = capsys.readouterr().out
    assert "refused: gfx942: triton: dtype: needs" in out and "failed: forward for gfx942: ZeroDivisionError" in out


def test_compile_without_triton(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(archs, "triton_version", lambda: None)
    assert precompile.run({"gfx942": COMPILER}, [problem()]) == 2
    assert "pip install" in capsys.readouterr().err


def test_operands_are_rounded_where_products_are_of_tf32(folder: Path):
    """Tensor cores do not: they cut off, which is twice the error and all of one sign."""
    for tf32 in (False, True):
        p = problem(dtype=torch.float32, window=(None, 0), grads=("q", "k", "v"), tf32=tf32)
        for spec, arch in compiler.jobs(p, "sm_90"):
            if spec.kernel in ("forward", "query_gradient", "key_gradient"):
                ptx = compiler.launch.compile(spec, arch).asm["ptx"]
                assert (re.search(r"and\.b32\s.*, -8192;", ptx) is not None) is tf32


# --- figures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "registers", "shared", "warps", "expected"),
    [
        ("gfx942", 280, 32768, 4, 1), ("gfx942", 212, 32768, 8, 2), ("gfx942", 128, 0, 4, 4), ("gfx942", 16, 0, 4, 8),
        ("gfx942", 128, 65536, 4, 1), ("gfx950", 236, 67520, 4, 2), ("gfx1100", 256, 32768, 4, 4),
        ("gfx1100", 256, 16384, 4, 5), ("gfx1100", 24, 0, 4, 16), ("gfx1201", 236, 32768, 8, 6),
    ],
)  # fmt: skip
def test_waves(arch: str, registers: int, shared: int, warps: int, expected: int):
    assert figures.waves(archs.AMD[arch], registers, shared, warps) == expected


def test_explain_shows_the_figures_of_the_machine_code():
    q = torch.zeros(64, 256, 4, 64, dtype=torch.bfloat16, requires_grad=True)
    k = torch.zeros(64, 256, 2, 64, dtype=torch.bfloat16)
    details = attnlib.explain(q, k, k, causal=True, device="gfx942").details
    assert details is not None
    noted = compiler.recorded(attnlib.inspection.problem_of(q, k, k, causal=True), "gfx942")
    assert noted["forward"].registers > 0
    assert (details["registers"], details["waves"]) == (noted["forward"].registers, noted["forward"].waves)
    assert details["query_gradient"]["spills"] == noted["query_gradient"].spills
    assert details["compiled_by"] == f"Triton {figures.version()}"
    other = attnlib.explain(q, k, k, softcap=5.0, window=(5, 7), device="gfx942").details
    assert other is not None and "attnlib compile" in other["figures"]


# --- refusals ---------------------------------------------------------------------------------------------------------


def refusals(arch: str, **values: Any) -> tuple[Any, ...]:
    return attnlib_triton.backend.check(problem(**values), "", targets.parse_target(arch))


def test_a_head_dim_that_spills_is_refused_with_the_reason():
    grads = ("q", "k", "v")
    assert not refusals("gfx1100", head_dim=128)
    assert not refusals("gfx1100", head_dim=64, grads=grads)
    for values in ({"head_dim": 192}, {"head_dim_v": 192}, {"head_dim": 80, "grads": grads}):
        (refusal,) = refusals("gfx1100", **values)
        assert refusal.code is RefusalCode.HEAD_DIM and "gfx1100" in refusal.needs and "spill" in refusal.remedy
    wide = {"head_dim": 256, "grads": grads, "dtype": torch.float32}
    assert not refusals("gfx942", **wide) and refusals("gfx942", **wide, mask=True)
    assert not refusals("gfx942", head_dim=256, grads=grads)


@pytest.mark.parametrize("arch", list(archs.AMD))
def test_what_is_not_refused_has_a_tile(arch: str):
    known = archs.AMD[arch]
    for dtype in (torch.float16, torch.float32):
        for dim in (16, 40, 64, 80, 128, 192, 256):
            for mask in (False, True):
                for rows in (1, 30, 300):
                    p = problem(dtype=dtype, head_dim=dim, mask=mask, seqlen_q=rows, grads=("q", "k", "v"))
                    assert config.forward(p, known) and [config.gradient(p, known, n) for n in config.GRADIENTS]
                    assert 64 <= amd.limit(p, known) <= 256


# --- devices ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """A ROCm build of torch with a device of the name that is in the dictionary."""
    name = {"gcn": "gfx942:sramecc+:xnack-"}

    def properties(index: Any = None) -> SimpleNamespace:
        return SimpleNamespace(
            gcnArchName=name["gcn"], multi_processor_count=228, shared_memory_per_block=65536, L2_cache_size=4 << 20,
            warp_size=64, major=9, minor=4,
        )  # fmt: skip

    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(targets, "_targets", {})
    dispatch.clear_caches()
    yield name
    dispatch.clear_caches()


def selected(device: Target) -> dispatch.Decision:
    return dispatch.select(problem(), device, dispatch.requested(None))


def test_a_rocm_device_is_served_by_triton(rocm: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(archs, "compiler", lambda: "/usr/bin/cc")
    device = targets.target_of(torch.device("cuda", 0))
    assert (device.kind, device.arch, device.present) == ("rocm", "gfx942", True)
    assert selected(device).chosen == "triton"
    assert {spec for spec, _ in compiler.jobs(problem(), "gfx942")} >= set(_launched(problem(), device))


def _launched(p: AttentionProblem, device: Target) -> list[Spec]:
    found: list[Spec] = []
    plan = TritonPlan(p, device, None, lambda spec, *_: found.append(spec))
    for tensors in compiler.operands(p):
        plan.forward(p, tensors)
    return found


def test_a_rocm_device_without_a_compiler_is_refused(rocm: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(archs, "compiler", lambda: None)
    decision = selected(targets.target_of(torch.device("cuda", 0)))
    assert decision.chosen != "triton" and "install gcc or clang" in str(decision)


@pytest.mark.parametrize(("gcn", "remedy"), [("gfx1103", "HSA_OVERRIDE_GFX_VERSION=11.0.0"), ("gfx908:xnack-", "cupy")])
def test_an_unknown_rocm_device_is_refused(gcn: str, remedy: str, rocm: dict[str, str]):
    rocm["gcn"] = gcn
    decision = selected(targets.target_of(torch.device("cuda", 0)))
    assert decision.chosen != "triton"
    (refusals,) = (c.refusals for c in decision.candidates if c.name == "triton")
    assert any(remedy in r.remedy for r in refusals)


# --- ci/compile_triton ------------------------------------------------------------------------------------------------


@pytest.fixture
def script() -> ModuleType:
    return programs.load("compile_triton.py")


def test_the_tiers_reach_every_kernel_and_labels_tell_them_apart(script: ModuleType):
    for chosen in (script.few, script.problems):
        jobs = script.jobs_for(list(chosen()), archs.AMD)
        assert len({(arch, figures.label(spec)) for spec, arch in jobs}) == len(jobs)
        for arch in archs.AMD:
            own = [spec for spec, each in jobs if each == arch]
            assert {spec.kernel for spec in own} == set(attnlib_triton.compile.launch._MODULES)
            assert {spec.element for spec in own} == {"fp16", "bf16", "fp32"}
            assert {spec.small for spec in own if spec.kernel in script.MULTIPLY} == {True, False}


GOOD = Figures(16384, 128, 0, 0, 16, 8, 2, 4)


@pytest.mark.parametrize(
    ("arch", "changes", "text"),
    [
        ("gfx942", {}, ""), ("gfx942", {"shared_bytes": 70000}, "shared memory"), ("gfx942", {"matrix": 0}, "matrix"),
        ("gfx942", {"spills": 1}, "1, 0 allowed"), ("gfx942", {"scratch": 1}, "scratch"),
        ("gfx942", {"buffer_loads": 0}, "buffer"), ("gfx1100", {"spills": 1}, ""),
        ("gfx1100", {"spills": 3}, "3, 2 allowed"),
        ("gfx1100", {"spills": 64}, "refused"),
    ],
)  # fmt: skip
def test_faults_of_machine_code(script: ModuleType, arch: str, changes: dict[str, int], text: str):
    (spec, _), *_ = compiler.jobs(problem(head_dim=64, head_dim_v=64), arch)
    found = Figures(**{**{name: getattr(GOOD, name) for name in GOOD.__dataclass_fields__}, **changes})
    wrong = script.faults(archs.AMD[arch], spec, found, {"spills": 2})
    assert (text in "; ".join(wrong)) if text else not wrong


def test_a_change_of_a_kernel_makes_the_record_stale(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    package = tmp_path / "backends/attnlib_triton"
    (package / "kernels").mkdir(parents=True)
    (package / "launch.py").write_text("a = 1\n")
    kernel = package / "kernels/one.py"
    monkeypatch.setattr(script, "ROOT", tmp_path)

    def digest(text: str) -> str:
        kernel.write_text(text)
        return str(script.digest([]))

    before = digest('"""Doc."""\ndef f():\n    return 1  # remark\n')
    assert digest("def f():\n    return 1\n") == before != digest("def f():\n    return 2\n")
    monkeypatch.setattr(script.figures, "RECORD", tmp_path / "figures.json")
    for held, text in (
        ({"triton": "3.5.0", "digest": before}, "made with Triton 3.5.0"),
        ({"triton": script.triton(), "digest": "other"}, "stale"),
    ):
        (tmp_path / "figures.json").write_text(json.dumps({**held, "kernels": {}}))
        (found,) = script.stale(script.Report({}, [], 0), before)
        assert text in found


# --- dropout ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arch", "wide", "halves"), [
    ("sm_90", r"mul\.wide\.u32", r"mul\.hi\.u32|\(u?mulhi"), ("gfx942", "v_mad_u64_u32", "v_mul_hi_u32"),
])  # fmt: skip
def test_philox_takes_one_instruction_a_product(arch: str, wide: str, halves: str, folder: Path):
    """15 of its 20 products differ from word to word; those of rows and columns alone may be made in any way."""
    found = {}
    for dropout in (0.0, 0.1):
        jobs = compiler.jobs(problem(dropout_p=dropout), arch)
        (spec,) = (spec for spec, _ in jobs if spec.kernel == "forward")
        asm = compiler.launch.compile(spec, arch).asm["amdgcn" if arch.startswith("gfx") else "ptx"]
        found[dropout] = [len(re.findall(pattern, asm)) for pattern in (wide, halves)]
    assert found[0.1][0] - found[0.0][0] >= 15 and found[0.1][1] - found[0.0][1] < 15


def test_philox_keeps_its_words_where_they_are(folder: Path):
    """On sm_90: nothing between the draw and the weights goes through shared memory."""
    jobs = compiler.jobs(problem(dropout_p=0.1, head_dim=64, head_dim_v=64, seqlen_q=4096, seqlen_k=4096), "sm_90")
    specs = [spec for spec, _ in jobs if spec.kernel == "forward"]
    for spec in specs:
        lines = compiler.launch.compile(spec, "sm_90").asm["ttgir"].splitlines()
        drawn = [line for line in lines if "mul.wide.u32" in line]
        words = [line for line in lines if "convert_layout" in line and re.search(r"x\d+xi(8|16|32|64),", line)]
        assert len(drawn) >= 15 and not words, words
    assert specs
