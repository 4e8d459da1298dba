"""benchmarks.tune without a GPU: workloads, what is left out, ratios, and what --apply writes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import attnlib
from attnlib import bench
from attnlib.precompile import Result
from attnlib_cuda import device, hopper, hopper_shapes
from attnlib_cuda.hopper_shapes import ForwardShape, Row, Shape

ROOT = Path(__file__).resolve().parent.parent
HOPPER = device.for_arch("sm_90")
SMALL = "forward D64 full, no softcap, no dropout"


@pytest.fixture(scope="module", autouse=True)
def _root() -> Iterator[None]:
    sys.path.insert(0, str(ROOT))
    yield
    sys.path.remove(str(ROOT))


def row_of(name: str) -> Row:
    return next(row for row in hopper_shapes.table().rows if str(row) == name)


# --- workloads --------------------------------------------------------------------------------------------------------


def test_workloads() -> None:
    from benchmarks import tune

    def names(name: str) -> list[str]:
        return [str(work) for work in tune.timed(hopper_shapes.table(), row_of(name))]

    assert names(SMALL) == ["B2 S8192 H32 D64 full", "B1 S16384 H32 D64 full"]  # a row to 4096 stands before it
    assert names("forward D128 full,causal, no softcap, no dropout") == [
        "B8 S2048 H16 D128 full", "B2 S8192 H16 D128 full", "B4 S4096 H16 D128 causal", "B2 S8192 H16 D128 causal",
    ]  # fmt: skip
    assert names("backward D64 full,causal,left,window, no softcap, dropout, deterministic")[-2:] == [
        "B8 S2048 H32 D64 causal window=(1024, 0) dropout_p=0.1 deterministic",
        "B2 S8192 H32 D64 causal window=(1024, 0) dropout_p=0.1 deterministic",
    ]
    # without what the row allows and does not ask for; its results are checked with it
    row = row_of("backward D256 full,causal,left,window, softcap")
    assert all("dropout" not in str(work) for work in tune.timed(hopper_shapes.table(), row))
    assert len(tune.checked(hopper_shapes.table(), row)) == 4 * 2 * 2


@pytest.mark.parametrize("row", hopper_shapes.table().rows, ids=str)
def test_a_workload_gets_what_its_row_says_and_what_was_compiled_ahead(row: Row) -> None:
    """A call of the public API makes a problem whose configuration is that of `hopper.typical`."""
    from benchmarks import tune

    table = hopper_shapes.table()
    make = hopper.forward if row.kernel == "forward" else hopper.backward
    compiled = {make(hopper.typical(row, key), HOPPER) for key in row.decides()}
    for work in [*tune.timed(table, row), *tune.checked(table, row)]:
        s = work.shape
        q, k, v = (
            torch.empty(1, s.seqlen, 1, dim, dtype=torch.bfloat16, requires_grad=row.kernel == "backward")
            for dim in (s.head_dim, s.head_dim, s.head_dim_v)
        )
        options = dict(work.options) | ({"dropout_seed": 1} if "dropout_p" in work.options else {})
        problem = attnlib.explain(q, k, v, causal=s.causal, device="sm_90", **options).problem
        assert table.find(row.kernel, problem) is row, work
        assert make(problem, HOPPER) in compiled, work
        assert work.flops(row.kernel) > 0


def test_rows_are_picked_by_their_names_or_those_of_workloads() -> None:
    from benchmarks import tune

    table = hopper_shapes.table()
    assert {row.kernel for row in tune.picked(table, ("backward",), None)} == {"backward"}
    assert [str(row) for row in tune.picked(table, ("forward", "backward"), ["S16384 H32 D64 full"])] == [SMALL]
    found = tune.picked(table, ("forward",), ["D256", "nothing"])
    assert len(found) == 3 and all(row.head_dim == 256 for row in found)


# --- what is left out -------------------------------------------------------------------------------------------------


def test_what_compiling_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import tune

    row = row_of(SMALL)
    other, spilling, serial, broken = (row.shape._replace(stages=2, block_k=n) for n in (64, 80, 96, 112))
    results = {
        row.shape: Result("", "", spills=8), other: Result("", "", spills=8), spilling: Result("", "", spills=16),
        serial: Result("", "", warnings=("(C7514) serialized",)), broken: Result("", "", error="no\nat all"),
    }  # fmt: skip

    def compile_all(jobs: Sequence[tuple[Any, str]]) -> Iterator[tuple[int, Result]]:
        assert len(set(jobs)) == len(jobs)
        for place, (spec, arch) in reversed(list(enumerate(jobs))):
            assert arch == "sm_90a"
            shape = ForwardShape(*(getattr(spec.config, name) for name in ForwardShape._fields))
            yield place, results[shape]

    monkeypatch.setattr(tune, "compile_all", compile_all)
    problems = tune.layouts(row)
    assert len(problems) == 3 and len({hopper.forward(problem, HOPPER) for problem in problems}) == 3
    assert tune.compiled(problems, row, [other, spilling, serial, broken]) == {
        spilling: "16 bytes of spills", serial: "ptxas: (C7514) serialized", broken: "does not compile: no at all",
    }  # fmt: skip


class FakeTimer:
    """Seconds that calls bring with them."""

    device = torch.device("cpu")

    def calls_per_sample(self, call: Any) -> int:
        return 1

    def sample(self, call: Any, calls: int) -> float:
        return float(call.seconds)


def fake_make(seconds: Callable[[Shape], float], results: Callable[[Shape], float] = lambda shape: 1.0) -> Any:
    """tune.make of calls that return four equal numbers and take what `seconds` says."""

    def make(work: Any, o: Any, kernel: str, shape: Shape) -> Any:
        def call() -> torch.Tensor:
            return torch.full((4,), results(shape))

        call.seconds = seconds(shape)  # type: ignore[attr-defined]
        return call

    return make


def small(monkeypatch: pytest.MonkeyPatch) -> Any:
    from benchmarks import run, tune

    monkeypatch.setattr(tune, "TOKENS", 1)
    monkeypatch.setattr(tune, "CHANNELS", 64)
    monkeypatch.setattr(run, "free", lambda: None)
    return tune


def test_a_row_is_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    tune = small(monkeypatch)
    row = row_of(SMALL)
    fast, wrong, nan, failing, late = (row.shape._replace(block_k=n) for n in (64, 80, 96, 112, 32))
    slow = row.shape._replace(stages=2)

    def seconds(shape: Shape) -> float:
        if shape == failing:
            raise RuntimeError("cannot be launched\nat all")
        return {fast: 0.5, wrong: 0.1, nan: 0.1, late: 0.25, row.shape: 1.0}.get(shape, 2.0)

    def compiled(problems: Any, row: Row, shapes: Sequence[Shape]) -> dict[Shape, str]:
        everywhere = len(problems) > 1  # the finalists, in every layout
        return {shape: "8 bytes of spills" for shape in shapes if shape == (late if everywhere else slow)}

    make = fake_make(seconds, lambda shape: {wrong: 1.03, nan: float("nan")}.get(shape, 1.0))
    value = tune.tune(hopper_shapes.table(), row, FakeTimer(), count=3, keep=2, make=make, compiled=compiled, differ=1)
    assert value["row"] == SMALL and value["present"] == row.shape._asdict() and value["taken"] == fast._asdict()
    assert [entry["ratio"] for entry in value["ranking"]] == [2.0, 1.0, 0.5]
    assert value["ranking"][0]["rounds_ms"]["B1 S16384 H1 D64 full"] == [500.0] * 3
    left_out = value["left_out"]
    assert left_out[tune.text(slow)] == left_out[tune.text(late)] == "8 bytes of spills"
    assert "its results are 0.03 from the present shape's" in left_out[tune.text(wrong)]
    assert "its results are nan" in left_out[tune.text(nan)]
    assert left_out[tune.text(failing)] == "B1 S8192 H1 D64 full: cannot be launched"
    assert len(left_out) == 5
    shown = list(tune.show(value))
    assert shown[0] == SMALL and shown[1].endswith("taken") and shown[2].endswith("present")
    assert sum("left out" in line for line in shown) == 5
    assert json.loads(json.dumps(value)) == value


def test_a_row_whose_present_shape_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    tune = small(monkeypatch)

    def seconds(shape: Shape) -> float:
        raise ValueError("no such kernel")

    with pytest.raises(RuntimeError, match=f"{SMALL}: the present shape fails on B1 S8192 .*: no such kernel"):
        tune.tune(
            hopper_shapes.table(), row_of(SMALL), FakeTimer(), count=1, make=fake_make(seconds),
            compiled=lambda *_: {}, differ=1,
        )  # fmt: skip


def test_calls_go_through_the_public_api_with_their_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, whose backend refuses the configuration: the error says that it arrived."""
    from benchmarks import grids, tune

    monkeypatch.setattr(tune, "BACKEND", "cpu")
    work = grids.Workload(bench.Shape.parse("B1 S64 H1 D64 full"))
    o = grids.draw(work, torch.device("cpu"))
    for kernel in ("forward", "backward"):
        with pytest.raises(attnlib.UnsupportedError, match=f"wgmma_{kernel}"):
            tune.make(work, o, kernel, row_of(SMALL).shape)


# --- ratios and the table ---------------------------------------------------------------------------------------------


def test_ranking() -> None:
    """The median over rounds of ratios within a round, then the geometric mean over workloads."""
    from benchmarks import grids, tune

    row = row_of("backward D256 full,causal,left,window, softcap")
    now, other = row.shape, row.shape._replace(split=not row.shape.split)
    a, b = (grids.Workload(bench.Shape.parse(text)) for text in ("B1 S8 H1 D64 full", "B1 S16 H1 D64 full"))
    seconds = {a: {now: [1.0, 2.0, 9.0], other: [0.5, 1.0, 9.0]}, b: {now: [1.0] * 3, other: [2.0] * 3}}
    first, second = tune.ranking("backward", seconds, now)
    assert first["shape"] == now._asdict() and first["ratio"] == second["ratio"] == 1.0
    assert second["ratios"] == {str(a): 2.0, str(b): 0.5}
    assert second["tflops"][str(b)] == round(b.flops("backward") / 2.0 * 1e-12, 1)


@pytest.mark.parametrize(("ratio", "index"), [(1.02, 0), (1.01, 0), (1.0099, 1), (0.9, 1)])
def test_a_shape_is_taken_from_one_percent_on(ratio: float, index: int) -> None:
    from benchmarks import tune

    ranked = sorted(
        [{"shape": {"x": 0}, "ratio": ratio}, {"shape": {"x": 1}, "ratio": 1.0}], key=lambda value: -value["ratio"]
    )
    assert tune.taken(ranked, {"x": 1})["shape"] == {"x": index}


def results(name: str, shape: Shape | None = None, ratio: float = 1.5, **more: Any) -> dict[str, Any]:
    """A file of results with a row in which another shape has that ratio."""
    row = row_of(name)
    other = shape or row.shape._replace(stages=2)  # type: ignore[call-arg]
    entries = [
        {"shape": x._asdict(), "ratio": r, "tflops": {"B1 S8192 H32 D64 full": 100 * r}}
        for x, r in ((other, ratio), (row.shape, 1.0))
    ]
    result = {"row": name, "present": row.shape._asdict(), "ranking": sorted(entries, key=lambda x: -x["ratio"])}
    return {"results": [result], "commit": "abc", "to_be_repeated": "", **more}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the shipped table, in its place."""
    copy = tmp_path / "shapes.json"
    copy.write_text(hopper_shapes.PATH.read_text())
    monkeypatch.setattr(hopper_shapes, "PATH", copy)
    return copy


def test_apply(tmp_path: Path, file: Path) -> None:
    """Of the row that was measured the shape and the figures, of all others the text as it was."""
    from benchmarks import record, tune

    before = file.read_text().splitlines()
    path = record.write_to(tmp_path / "tune-forward.json", results(SMALL))
    tune.apply([path])
    new = hopper_shapes.parse(file.read_text(), "x")
    row = next(row for row in new.rows if str(row) == SMALL)
    assert row.shape == row_of(SMALL).shape._replace(stages=2)
    assert row.measured == (hopper_shapes.Measured("B1 S8192 H32 D64 full", 150.0, "abc", "tune-forward"),)
    changed = set(file.read_text().splitlines()) - set(before)
    assert len(changed) == 2  # the row and its figure
    with pytest.raises(ValueError, match=f"tune-forward: {SMALL}: the table has no such row, or another shape in it"):
        tune.apply([path])  # measured against what no longer stands there


def test_apply_keeps_a_shape_that_nothing_beats() -> None:
    from benchmarks import tune

    new = tune.applied(hopper_shapes.table(), results(SMALL, ratio=1.005), "tune-forward")
    row = next(row for row in new.rows if str(row) == SMALL)
    assert row.shape == row_of(SMALL).shape
    assert row.measured == (hopper_shapes.Measured("B1 S8192 H32 D64 full", 100.0, "abc", "tune-forward"),)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda: results(SMALL, to_be_repeated="a slow card"), "tune-x: to be repeated: a slow card"),
        (lambda: results(SMALL, commit="abc+"), "tune-x: measured on abc\\+, with changes that no commit has"),
        (lambda: results(SMALL, row_of(SMALL).shape._replace(block_k=256)), f"{SMALL}: registers"),
    ],
)  # fmt: skip
def test_apply_writes_nothing_if_something_is_wrong(
    tmp_path: Path, file: Path, value: Callable[[], dict[str, Any]], message: str
) -> None:
    from benchmarks import record, tune

    before = file.read_text()
    with pytest.raises(ValueError, match=message):
        tune.apply([record.write_to(tmp_path / "tune-x.json", value())])
    assert file.read_text() == before


# --- the command ------------------------------------------------------------------------------------------------------


def test_what_it_needs_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks import run, tune

    monkeypatch.setattr(run, "gpu", lambda: None)
    assert tune.main([]) == 2
    assert "needs a GPU of compute capability 9.0 (Hopper), got none" in capsys.readouterr().err
    monkeypatch.setattr(run, "gpu", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    assert tune.main(["--kernel", "backward"]) == 2
    assert "got NVIDIA A100 of 8.0" in capsys.readouterr().err
    for flags in (["--apply", "--rounds", "2"], ["--rounds", "0"], ["--problems", "no such"], ["--kernel", "other"]):
        with pytest.raises(SystemExit):
            tune.main(flags)
        assert flags[0] in capsys.readouterr().err
    assert tune.main(["--list", "--problems", SMALL]) == 0
    assert "B1 S16384 H32 D64 full" in capsys.readouterr().out


def test_the_command(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run, a run with a row that fails on a slow card, and --apply of the first one's file."""
    tune = small(monkeypatch)
    from benchmarks import record, run, timing

    monkeypatch.setattr(run, "gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(tune, "unsuitable", lambda _: "")
    monkeypatch.setattr(timing, "ceilings", lambda _: {"matmul_tflops": 1.0, "copy_tbs": 1.0})
    monkeypatch.setattr(bench, "Timer", lambda *_: FakeTimer())
    monkeypatch.setattr(record, "commit", lambda: "abc1234")
    whole = tune.tune

    def tune_row(*given: Any, **more: Any) -> Any:
        make = fake_make(lambda shape: 0.5 if shape.block_k == 64 else 1.0)  # type: ignore[union-attr]
        return whole(*given, **more, make=make, compiled=lambda *_: {})

    monkeypatch.setattr(tune, "tune", tune_row)
    given = ["--problems", SMALL, "--differ", "1", "--output", str(tmp_path / "out")]
    assert tune.main(given) == 0
    path = tmp_path / "out" / "tune-forward-abc1234.json"
    value = json.loads(path.read_text())
    assert set(value) >= {"machine", "versions", "driver", "commit", "date", "rounds", "ceilings", "results", "failed"}
    assert value["benchmark"] == "tune-forward" and set(value["ceilings"]) == {"before", "after"}
    assert len(value["results"][0]["ranking"][0]["rounds_ms"]["B1 S8192 H1 D64 full"]) == 5
    assert file.read_text() == hopper_shapes.dump(hopper_shapes.table())
    assert tune.main(["--results", str(path), "--apply"]) == 0
    written = next(row for row in hopper_shapes.parse(file.read_text(), "x").rows if str(row) == SMALL)
    assert written.shape == row_of(SMALL).shape._replace(block_k=64)
    assert f"written: {file}" in capsys.readouterr().out

    def failing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the present shape fails")

    monkeypatch.setattr(tune, "tune", failing)
    monkeypatch.setattr(timing, "slowed", lambda *_: "slow")
    assert tune.main([*given, "--apply"]) == 1
    assert json.loads(path.read_text())["failed"] == {SMALL: "the present shape fails"}
    output = capsys.readouterr()
    assert "FAILED: the present shape fails" in output.out and "TO BE REPEATED: slow" in output.out
    assert "--apply: tune-forward-abc1234: to be repeated: slow" in output.err
