"""`attnlib compile`, covering sets of configurations and the rules of ci/compile_matrix, without a GPU."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import programs
import pytest
import torch
from tiny_kernel import SPEC, Config, csrc, folder  # noqa: F401 (fixtures)

import attnlib_cuda
from attnlib import precompile
from attnlib.errors import ArgumentError
from attnlib.problem import AttentionProblem, Window
from attnlib_cuda import compile as compiler
from attnlib_cuda import jit, nvrtc, shipped
from attnlib_cuda.matrix import ARCHS, Matrix, covering, label, thorough

COMPILER: Any = compiler


def build(arch: str, values: Mapping[str, Any]) -> list[jit.KernelSpec]:
    if values["causal"] and values["head_dim"] == 256 and values["kind"] == "c":
        return []
    return [dataclasses.replace(SPEC, config=Config(values["head_dim"]), entry=f"tiny_{values['kind']}")]


def excluded(values: Mapping[str, Any]) -> bool:
    return values.get("arch") == "sm_75" and values.get("dtype") == "bfloat16"


BIG = Matrix(
    "big",
    {
        "dtype": ("float16", "bfloat16", "float32"), "head_dim": (32, 64, 96, 128, 192, 256), "causal": (False, True),
        "kind": tuple("abcd"), "bias": (False, True), "dropout": (False, True),
    },
    build,
    excluded,
)  # fmt: skip


def pairs(rows: Iterable[tuple[str, Mapping[str, Any]]]) -> set[Any]:
    found = set()
    for arch, values in rows:
        found |= set(itertools.combinations([("arch", arch), *values.items()], 2))
    return found


def every(matrix: Matrix) -> list[tuple[str, dict[str, Any]]]:
    """All rows that are shipped."""
    rows = [
        (arch, dict(zip(matrix.axes, x))) for arch in matrix.archs for x in itertools.product(*matrix.axes.values())
    ]
    return [row for row in rows if not matrix.excluded({"arch": row[0], **row[1]}) and matrix.build(*row)]


def test_covering_set_meets_every_pair_that_is_shipped() -> None:
    everything, chosen = every(BIG), covering(BIG)
    assert pairs(row for row, _ in chosen) == pairs(everything)
    assert len(chosen) < 1.2 * len(ARCHS) * 6 < len(everything) / 20  # 42 is the least: 7 architectures, 6 head_dims
    assert chosen == covering(BIG)
    assert all(build(*row) == specs and not excluded({"arch": row[0], **row[1]}) for row, specs in chosen)


def test_thorough_set_meets_every_pair_on_every_architecture() -> None:
    everything, chosen = every(BIG), [row for row, _ in thorough(BIG)]
    assert chosen[: len(covering(BIG))] == [row for row, _ in covering(BIG)]
    for arch in ARCHS:
        assert pairs(row for row in chosen if row[0] == arch) == pairs(row for row in everything if row[0] == arch)
    assert len(chosen) < 1.3 * len(ARCHS) * 6 * 4 < len(everything) / 5  # 24 an architecture: 6 head_dims, 4 kinds


def test_covering_set_finds_rare_combinations() -> None:
    """A pair that only one of thousands of combinations has, which no greedy choice would hit."""
    axes = {name: tuple(range(4)) for name in "abcdef"}

    def rare(arch: str, values: Mapping[str, Any]) -> list[jit.KernelSpec]:
        lonely = values["a"] == 3 and values["b"] == 3
        return [SPEC] if not lonely or all(values[name] == 2 for name in "cdef") else []

    matrix = Matrix("rare", axes, rare, archs=("sm_80",))
    assert pairs(row for row, _ in covering(matrix)) == pairs(every(matrix))


def test_shipped_matrices_reach_every_choice() -> None:
    """Each value that a Config field takes in tier all is met in tier ci, for the main kernels on each architecture."""
    common = {"element", "head_dim", "paged", "packed", "lengths", "left", "right", "softcap", "has_bias", "mask",
              "alibi", "block_mask", "dropout", "aligned", "top_left", "deterministic", "split", "tf32"}  # fmt: skip

    def met(rows: Any) -> set[Any]:
        found = set()
        for (arch, _), specs in rows:
            for spec in specs:
                names = common & {item.name for item in dataclasses.fields(spec.config)}
                found |= {(spec.entry, arch, name, getattr(spec.config, name)) for name in names}
        return found

    for matrix in shipped.matrices():
        ci, more = met(covering(matrix)), met(thorough(matrix))
        small = {(entry, name, value) for entry, _, name, value in more}
        assert {(entry, name, value) for entry, _, name, value in ci} == small
        if matrix.name != "small":
            assert ci == more
        else:
            entries = {"combine", "append", "delta", "query_gradient", "sink_gradient", "bias_gradient"}
            assert {entry for entry, *_ in ci} == entries


def test_label() -> None:
    fields = [
        ("element", torch.dtype, torch.float16),
        ("head_dim", int, 64),
        ("causal", bool, True),
        ("bias", bool, False),
    ]
    config = dataclasses.make_dataclass("Features", fields, frozen=True)()
    spec = dataclasses.replace(SPEC, config=config, min_blocks=2)
    assert label(spec, "sm_80") == "tiny sm_80 element=float16 head_dim=64 causal min_blocks=2"


# --- attnlib compile --------------------------------------------------------------------------------------------------


@pytest.fixture
def kernels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: F811
    """A config module with one kernel for each head_dim, and one more for a backward."""

    def of(problem: AttentionProblem, arch: str) -> list[jit.KernelSpec]:
        forward = dataclasses.replace(SPEC, config=Config(problem.head_dim))
        return [forward, dataclasses.replace(forward, entry="backward")] if problem.grads else [forward]

    fake = SimpleNamespace(kernels=of)
    monkeypatch.setattr(attnlib_cuda, "config", fake, raising=False)
    monkeypatch.setitem(sys.modules, "attnlib_cuda.config", fake)  # type: ignore[arg-type]
    return folder


def test_compile_command(kernels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "problems.json"
    shape = {"batch": 1, "seqlen_q": 8, "seqlen_k": 8, "num_heads_q": 2, "head_dim": 64}
    backward = {**shape, "dtype": "bfloat16", "head_dim": 128, "grads": ["q", "k", "v"], "window": [None, 0]}
    file.write_text(json.dumps([{**shape, "dtype": "float16"}, backward]))
    arguments = ["--arch", "sm_80,sm_90", "--problems", str(file), "--jobs", "2"]
    assert precompile.main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kernels"], found["compiled"], found["failed"]) == (6, 6, 0)
    assert found["archs"] == ["sm_80", "sm_90a"] and found["cache"] == str(kernels)
    assert len([path for path in kernels.iterdir() if not path.name.startswith(".")]) == 6
    assert all(result["registers"] > 0 and Path(result["path"]).is_dir() for result in found["results"])
    assert precompile.main(arguments) == 0
    assert "6 kernels for sm_80, sm_90a: 0 compiled, 0 failed" in capsys.readouterr().out


def test_compile_ignores_that_calls_may_not(kernels: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from attnlib import settings

    with settings.override(jit="never"):
        problem = precompile.common_problems()[0]
        assert precompile.run({"sm_80": COMPILER}, [problem], workers=1) == 0
    assert "1 compiled" in capsys.readouterr().out


def test_compile_reports_failures(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = dataclasses.replace(SPEC, params_size=1)
    monkeypatch.setattr(attnlib_cuda.config, "kernels", lambda problem, arch: [SPEC, bad])
    out = io.StringIO()
    assert precompile.run({"sm_80": COMPILER}, precompile.common_problems()[:1], workers=1, out=out) == 1
    assert "failed: tiny for sm_80: tiny does not compile" in out.getvalue() and "1 failed" in out.getvalue()


def test_compile_without_nvrtc(
    kernels: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> nvrtc.Nvrtc:
        raise nvrtc.NvrtcMissing("NVRTC was not found")

    monkeypatch.setattr(nvrtc, "find", missing)
    assert precompile.run({"sm_80": COMPILER}, precompile.common_problems()[:1]) == 2
    assert "NVRTC was not found" in capsys.readouterr().err


def test_architectures_and_problems_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert list(precompile.choose("sm_80, sm_90,sm_90a,sm_120")) == ["sm_80", "sm_90a", "sm_120"]
    for text in ("sm_70", "gfx942", "sm_999", ""):
        with pytest.raises(ArgumentError, match="--arch"):
            precompile.choose(text, "cuda")
    with pytest.raises(ArgumentError, match="--backend: needs one of cuda, triton, got 'cpu'"):
        precompile.choose("sm_80", "cpu")
    base = {"dtype": "float16", "batch": 1, "seqlen_q": 4, "seqlen_k": 4, "num_heads_q": 1, "head_dim": 64}
    made = precompile.problem_of({**base, "window": [3, None], "sinks": "float32"}, "here")
    assert made.scale == 0.125 and made.num_heads_kv == 1 and made.head_dim_v == 64
    assert made.window == Window(3, None) and made.sinks == torch.float32 and hash(made)
    for record, text in (({**base, "head": 3}, "unknown field head"), ({**base, "dtype": "half2"}, "half2"),
                         ({"dtype": "float16"}, "head_dim")):  # fmt: skip
        with pytest.raises(ArgumentError, match=f"here: .*{text}"):
            precompile.problem_of(record, "here")
    for content in ("{", "{}", "[1]"):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(ArgumentError, match="--problems"):
            precompile.read_problems(tmp_path / "bad.json")
    with pytest.raises(SystemExit):
        precompile.main(["--arch", "sm_70", "--common"])
    assert "needs an architecture of cuda or triton, got 'sm_70'" in capsys.readouterr().err


def test_common_problems() -> None:
    problems = precompile.common_problems()
    assert len(set(problems)) == len(problems) > 30
    assert {problem.head_dim for problem in problems} == {64, 128}
    assert any(problem.grads for problem in problems) and any(problem.page_size for problem in problems)


# --- ci/compile_matrix ------------------------------------------------------------------------------------------------


@pytest.fixture
def matrix_script() -> ModuleType:
    return programs.load("compile_matrix.py")


def simple(arch: str, values: Mapping[str, Any]) -> list[jit.KernelSpec]:
    kind = values["kind"]
    if kind == "serialised" and arch != "sm_90a":
        return []
    function = "attnlib::kernel" if kind == "plain" else f"attnlib::{kind}"
    return [dataclasses.replace(SPEC, entry=kind, function=function, config=Config(values["head_dim"]))]


def test_compile_matrix(
    matrix_script: ModuleType,
    folder: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    record, table = tmp_path / "record.json", tmp_path / "exceptions.json"

    def check(tier: str, kinds: tuple[str, ...], **more: Any) -> list[str]:
        axes = {"kind": kinds, "head_dim": (64, 300)}
        matrix = Matrix("tiny", axes, simple, archs=more.get("archs", ("sm_80", "sm_90a")))
        accept = more.get("accept", "")
        found = matrix_script.check([matrix], tier, workers=1, record=record, exceptions=table, accept=accept)
        return [str(fault) for fault in found]

    capsys.readouterr()
    assert check("ci", ("plain",)) == []
    assert "record.json was never made" in capsys.readouterr().out
    assert check("all", ("plain",)) == [] and check("ci", ("plain",)) == []
    held = json.loads(record.read_text())
    compiled: list[int] = []

    def counted(jobs: Sequence[compiler.Job], workers: int | None) -> Any:
        compiled.append(len(jobs))
        return compiler.compile_all(jobs, workers)

    monkeypatch.setattr(matrix_script, "compile_all", counted)
    assert check("all", ("plain",)) == [] and json.loads(record.read_text()) == held
    record.write_text(json.dumps({**held, "kernels": dict([*held["kernels"].items()][1:])}))
    assert check("all", ("plain",)) == [] and json.loads(record.read_text()) == held
    record.write_text(json.dumps({**held, "nvrtc": [1, 0]}))
    assert check("all", ("plain",)) == [] and json.loads(record.read_text()) == held
    assert compiled == [0, 1, 4]  # what the record lacks; all, for another NVRTC
    assert held["summary"]["plain sm_80"]["kernels"] == 2 and held["excepted"] == {}
    (fault,) = check("ci", ("plain",), archs=("sm_80",))
    assert "record.json is stale" in fault

    faults = check("all", ("spilling", "serialised"))
    assert record.read_text() == json.dumps(held) or json.loads(record.read_text()) == held  # not written on failure
    assert all("head_dim=300" in fault for fault in faults if "spills" in fault)
    assert sum("bytes of spills, 0 allowed (255 registers)" in fault for fault in faults) == 2
    codes = [fault for fault in faults if "C75" in fault]
    assert codes and all("serialised sm_90a" in fault for fault in codes)

    spills = {"match": "spilling * head_dim=300", "spills": 100000, "why": "a test"}
    serial = {"match": "serialised sm_90a*", "warnings": {f"C75{n:02}": 99 for n in range(20)}, "why": "too"}
    table.write_text(json.dumps([spills, serial]))
    assert check("all", ("spilling", "serialised")) == []
    both = table.read_text()
    assert check("all", ("spilling", "serialised"), accept="for now") == [] and len(json.loads(table.read_text())) == 2
    table.write_text(both.replace("100000", "4"))  # they rose
    assert len(check("all", ("spilling", "serialised"))) == 2
    table.write_text(json.dumps([spills]))
    assert check("all", ("plain",)) == [
        "exceptions.json: spilling * head_dim=300: no kernel needs it now"
    ]  # fmt: skip
    assert check("all", ("plain",), accept="for now") == [] and json.loads(table.read_text()) == []
    assert check("all", ("spilling",), accept="for now") == []
    assert {line["why"] for line in json.loads(table.read_text())} == {"for now"}
    assert check("ci", ("plain",), accept="for now")[0].startswith("record.json is stale")
    assert len(json.loads(table.read_text())) == 2  # another tier's lines stay
    table.write_text(json.dumps([{**spills, "why": " "}]))
    with pytest.raises(SystemExit, match="say why"):
        check("all", ("plain",))

    table.write_text("[]")
    assert check("all", ()) == ["no kernel is declared"]
    monkeypatch.setattr(nvrtc, "find", lambda: (_ for _ in ()).throw(nvrtc.NvrtcMissing("NVRTC was not found")))
    assert check("ci", ("plain",)) == ["NVRTC was not found"]
