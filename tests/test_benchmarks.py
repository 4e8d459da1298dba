"""The GPU benchmarks without a GPU: grids, counts, ratios, summaries, and a run on the CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from attnlib import bench

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module", autouse=True)
def _root():
    sys.path.insert(0, str(ROOT))
    yield
    sys.path.remove(str(ROOT))


def test_grids() -> None:
    from benchmarks import grids

    works = {name: make() for name, make in grids.GRIDS.items()}
    assert {name: len(found) for name, found in works.items()} == {
        "training": 36, "gqa": 10, "decode": 8, "features": 34, "memory": 7,
    }  # fmt: skip
    for name, found in works.items():
        assert len({str(work) for work in found}) == len(found), name
    assert str(works["training"][0]) == "B32 S512 H32 D64 full"
    assert str(works["gqa"][6]) == "B8 S2048 H16 D192/128 causal"
    full, causal = works["training"][3], works["training"][9]
    assert full.flops("forward") == 2 * causal.flops("forward") == 2.0 * 4 * 32 * 4096**2 * 128
    assert full.flops("backward") == 2.5 * full.flops("forward")
    assert works["decode"][4].cache_bytes() == 16 * 8192 * 8 * 256 * 2


def test_reduced_workloads_fit_and_keep_what_plans_depend_on() -> None:
    from benchmarks import grids

    for make in grids.GRIDS.values():
        for work in make():
            small = grids.reduced(work)
            s, t = small.shape, work.shape
            assert s.batch * s.heads_q * small.queries * s.seqlen <= 1 << 29
            assert (s.head_dim, s.head_dim_v, s.causal, s.heads_q // s.heads_kv) == (
                t.head_dim, t.head_dim_v, t.causal, t.heads_q // t.heads_kv,
            )  # fmt: skip
            assert small.options == work.options and small.dtype == work.dtype


def test_ratio_is_of_the_same_round() -> None:
    from benchmarks import timing

    assert timing.ratio([1.0, 2.0, 4.0], [2.0, 4.0, 2.0]) == 2.0
    assert timing.geometric_mean([0.5, 2.0]) == pytest.approx(1.0)


SMALL = "B1 S64 H2 D16 causal"


def records(**more: Any) -> list[dict[str, Any]]:
    from benchmarks import grids, peers, run

    works = [
        grids.Workload(bench.Shape.parse(SMALL), "float32"),
        grids.Workload(bench.Shape.parse(SMALL), "float32", options={"dropout_p": 0.1}),
        grids.Workload(bench.Shape.parse("B2 S256 H2 D16 full"), "float32", options={"block_density": 0.5}),
        grids.Workload(bench.Shape.parse("B2 S64 H2 D16 causal"), "float32", options={"packed": True}),
        grids.Workload(bench.Shape.parse("B1 S64 H4/2 D16 full"), "float32", seqlen_q=1),
    ]
    contenders = [peers.ours("cpu"), *peers.peers(["math"])]
    timer = bench.Timer(torch.device("cpu"), 1e-4)
    return list(run.run(works, contenders, ("forward", "backward"), timer, count=3, **more))


def test_run_on_the_cpu(tmp_path: Path) -> None:
    from benchmarks import record, run

    shown: list[str] = []
    found = records(show=shown.append)
    assert [value["direction"] for value in found] == ["forward", "backward"] * 4 + ["forward"]
    assert all(value["conformance"] == {"cpu": "passed"} for value in found), [v["conformance"] for v in found]
    assert found[0]["ratios"]["cpu"]["torch math"] > 0 and len(found[0]["rounds_ms"]["cpu"]) == 3
    assert found[4]["refused"] == {"torch math": "no block_density"} and found[4]["ratios"] == {"cpu": {}}
    assert found[8]["gbs"]["cpu"] > 0
    assert shown[0].startswith(f"{SMALL} float32") and "torch math" in shown[0]
    summary = run.summarise(found)
    (row,) = [
        r for r in summary if r["head_dim"] == "all" and r["direction"] == "forward" and r["peer"] == "torch math"
    ]
    assert row["shapes"] == 3 and 0 < row["minimum"] <= row["geometric_mean"]
    assert json.loads(record.write_to(tmp_path / "x.json", {"results": found}).read_text())["results"]


def test_a_backend_that_does_not_conform_is_not_reported(register: Any) -> None:
    from attnlib.backend import BackendBase, Capabilities, Family
    from attnlib.problem import DTYPES
    from benchmarks import grids, peers, run

    class Wrong(BackendBase):
        """Twice the right result."""

        def __init__(self) -> None:
            capabilities = Capabilities(device_kinds=frozenset({"cpu"}), dtypes=frozenset(DTYPES))
            super().__init__("wrong", (Family("", capabilities),))

        def plan(self, problem: Any, family: str, target: Any, config: Any = None) -> Any:
            from attnlib import registry

            (inner,) = [e.backend for e in registry.entries() if e.name == "cpu"]
            plan = inner.plan(problem, inner.families[-1].name, target)

            class Plan:
                backward = plan.backward

                def forward(self, problem: Any, tensors: Any) -> None:
                    plan.forward(problem, tensors)
                    tensors.out.mul_(2)

            return Plan()

    register(Wrong())
    work = grids.Workload(bench.Shape.parse(SMALL), "float32")
    shown: list[str] = []
    timer = bench.Timer(torch.device("cpu"), 1e-4)
    (value,) = run.run([work], [peers.ours("wrong")], ("forward",), timer, count=3, show=shown.append)
    assert "EXCEEDS" in value["conformance"]["wrong"] and value["tflops"] == {}
    assert "NOT REPORTED" in shown[0]


def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks.record over a folder with made-up GPU results."""
    from benchmarks import record, run

    monkeypatch.setattr(record, "RESULTS", tmp_path)
    from benchmarks import grids

    origin = {"machine": {"gpu": "Some GPU", "cpu": ""}, "versions": {"torch": "2"}, "commit": "abc", "date": "2026"}
    more = {**origin, "driver": "1", "rounds": 3, "ceilings": {"before": {"matmul_tflops": 700.0, "copy_tbs": 4.0}}}
    for grid in ("training", "decode"):
        found = [
            run.entry(work, direction, {"cuda:sm_80": [1e-3] * 3, "torch FA2": [2e-3] * 3, "cuDNN": [0.5e-3] * 3},
                      ["cuda:sm_80"], {}, {"cuda:sm_80": "passed"})
            for work in grids.GRIDS[grid]()
            for direction in run.DIRECTIONS
        ]  # fmt: skip
        record.write(f"gpu-{grid}", {**more, "results": found, "summary": run.summarise(found)})
    found = [
        {"workload": str(work), "seqlen": work.shape.seqlen, "direction": direction, "extra_bytes": {"cuda": 1 << 20}}
        for work in grids.memory()
        for direction in run.DIRECTIONS
    ]
    record.write("gpu-memory", {**more, "results": found, "summary": []})
    return record


def test_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import table

    results(tmp_path, monkeypatch)
    text = table.gpu_table("training")
    assert "| B32 S512 H32 D64 full | 69 | 34 | 137 | 0.50 (cuDNN) |" in text
    assert "| cuda:sm_80 / torch FA2 | all | all | forward | 2.00 | 2.00 | 36 |" in text
    assert "Some GPU" in text and "700 TFLOP/s" in text
    assert "GB/s of K and V" in table.gpu_table("decode")
    assert "| B1 S1024 H16 D128 causal | forward | 1.0 |" in table.gpu_memory_table()
    assert table.gpu_table("gqa") == table.gpu_checks_table() == table.NOT_MEASURED


def test_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks import plot

    results(tmp_path, monkeypatch)
    assert plot.main(["--folder", str(tmp_path / "images")]) == 0
    names = {path.name for path in (tmp_path / "images").iterdir()}
    assert names == {"training-tflops.png", "training-speedup.png", "memory.png"}
    assert plot.main(["--grid", "gqa", "--folder", str(tmp_path)]) == 1
    assert "speed-up" not in capsys.readouterr().err
    assert plot.main(["--grid", "training", "--folder", str(tmp_path), "--baseline", "nobody"]) == 0
    assert "no result of 'nobody', so no speed-up" in capsys.readouterr().err
    rates = plot.panels({"results": [{"head_dim": 64, "causal": True, "direction": "forward", "seqlen": n,
                                      "tflops": {"a": n}} for n in (8, 4)]}, lambda r: r["tflops"])  # fmt: skip
    assert rates == {"D 64, causal, forward": {"a": [(4, 4), (8, 8)]}}


def test_the_legend_names_what_the_first_panel_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    from benchmarks import plot

    named: list[str] = []
    monkeypatch.setattr(figures.Figure, "legend", lambda _, handles, labels, **__: named.extend(labels))
    plot.draw({"x": {"a": [(1, 1.0)]}, "y": {"a": [(1, 1.0)], "b": [(1, 2.0)]}}, tmp_path / "a.png", "title", "unit")
    assert named == ["a", "b"]


def test_unknown_peer() -> None:
    from benchmarks import peers

    with pytest.raises(SystemExit, match="no peer is called nobody"):
        peers.peers(["nobody"])
