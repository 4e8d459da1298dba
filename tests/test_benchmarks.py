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


def test_what_is_judged_fits_an_oracle() -> None:
    from benchmarks import grids

    for make in grids.GRIDS.values():
        for work in make():
            s, t = work.shape, grids.checkable(work).shape
            assert t.seqlen == s.seqlen or s.heads_q // s.heads_kv * s.seqlen**2 > grids.ELEMENTS
            assert (t.batch, t.heads_q, t.heads_kv, t.head_dim) == (s.batch, s.heads_q, s.heads_kv, s.head_dim)
            assert t.heads_q // t.heads_kv * grids.checkable(work).queries * t.seqlen <= grids.ELEMENTS


@pytest.mark.parametrize("option", ["", "dropout_p", "packed", "bias"])
def test_part(option: str) -> None:
    """The last sequences and heads, the first with dropout; each query head with its own key/value head."""
    from benchmarks import grids

    shape = bench.Shape.parse("B12 S8 H12/6 D4 full")
    work = grids.Workload(shape, "float32", options={option: 0.1} if option else {})
    o = grids.draw(work, torch.device("cpu"))
    rows, heads, heads_kv, few = grids.part(work, o)
    sequences, first = (slice(0, 8), 0) if option == "dropout_p" else (slice(4, 12), 8)
    if option == "packed":
        assert rows == slice(32, 96) and few.cu_seqlens is not None
        assert few.cu_seqlens.tolist() == (o.cu_seqlens[16:] - 32).tolist()  # type: ignore[index]
    else:
        assert rows == sequences
    assert (heads, heads_kv) == (slice(first, first + 4), slice(first // 2, first // 2 + 2))
    assert torch.equal(few.q, o.q[rows][..., heads, :]) and torch.equal(few.v, o.v[rows][..., heads_kv, :])
    if option == "bias":
        assert torch.equal(few.arguments["bias"], o.arguments["bias"][:, 8:12])


def test_every_second_length_comes_first() -> None:
    from benchmarks import grids

    works = grids.spread(grids.training())
    assert sorted(map(str, works)) == sorted(map(str, grids.training()))
    assert [work.shape.seqlen for work in works[::6]] == [1024, 4096, 16384, 512, 2048, 8192]
    assert len({(w.shape.head_dim, w.shape.causal) for w in works[:6]}) == 6


def test_a_slow_card_is_said_so() -> None:
    from benchmarks import timing

    assert timing.slowed("NVIDIA H200", {"matmul_tflops": 785.0}, {"matmul_tflops": 690.0}) == ""
    assert "740" in timing.slowed("NVIDIA H200", {"matmul_tflops": 740.0}, {"matmul_tflops": 690.0})
    assert "640" in timing.slowed("NVIDIA H200", {"matmul_tflops": 785.0}, {"matmul_tflops": 640.0})
    assert "860" in timing.slowed("NVIDIA H200", {"matmul_tflops": 860.0})  # another card, or another product
    assert timing.slowed("Some GPU", {"matmul_tflops": 1.0}) == ""


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
        r
        for r in summary
        if (r["head_dim"], r["direction"], r["peer"], r["option"]) == ("all", "forward", "torch math", "")
    ]
    assert row["shapes"] == 2 and 0 < row["minimum"] <= row["geometric_mean"]
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
    more = {
        **origin,
        "driver": "1",
        "rounds": 3,
        "to_be_repeated": "",
        "ceilings": {"before": {"matmul_tflops": 700.0, "copy_tbs": 4.0}},
    }
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
    assert table.gpu_table("gqa") == table.gpu_checks_table("gpu-cuda") == table.NOT_MEASURED


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


def test_a_peer_without_a_backward_keeps_its_forward() -> None:
    from benchmarks import grids, peers, run

    def make(work: Any, o: Any, backward: bool) -> Any:
        if backward:
            raise AttributeError("no backward here")
        return (lambda: run.peers.attend(work, o, o.q, o.k, o.v, backend="cpu")), None

    work, timer = grids.Workload(bench.Shape.parse(SMALL), "float32"), bench.Timer(torch.device("cpu"), 1e-4)
    contenders = [peers.ours("cpu"), peers.Contender("half", make), *peers.peers(["math"])]
    forward, backward = run.measure(work, contenders, ("forward", "backward"), timer, 3)
    assert set(forward["median_ms"]) == {"cpu", "half", "torch math"} and not forward["refused"]
    assert set(backward["median_ms"]) == {"cpu", "torch math"} and backward["refused"] == {"half": "no backward here"}


def test_a_peer_that_was_asked_for_something_else_is_left_out() -> None:
    from benchmarks import grids, peers, run

    work, timer = grids.Workload(bench.Shape.parse(SMALL), "float32"), bench.Timer(torch.device("cpu"), 1e-4)
    full = peers.Contender("full", lambda work, o, backward: ((lambda: o.v.transpose(1, 2)), None))
    (value,) = run.measure(work, [peers.ours("cpu"), full, *peers.peers(["math"])], ("forward",), timer, 3)
    assert set(value["median_ms"]) == {"cpu", "torch math"} and "from ours" in value["refused"]["full"]
    assert "full: its results" in run.line(value, ["cpu"])


@pytest.mark.parametrize("wrong", [0.0, float("nan")])
def test_a_peer_with_wrong_results_or_gradients_is_left_out(wrong: float) -> None:
    """Of many keys, where everything is small; and a peer whose forward alone is right."""
    from benchmarks import grids, peers, run

    (math,) = peers.peers(["math"])

    def forward(work: Any, o: Any, backward: bool) -> Any:
        return (lambda: o.q * wrong), None

    def gradients(work: Any, o: Any, backward: bool) -> Any:
        right, back = math.make(work, o, backward)
        return right, back and (lambda: (*back()[:2], o.v.transpose(1, 2) * wrong))

    work, timer = (
        grids.Workload(bench.Shape.parse("B1 S1024 H2 D16 full"), "float32"),
        bench.Timer(torch.device("cpu"), 1e-4),
    )
    contenders = [peers.ours("cpu"), math, peers.Contender("out", forward), peers.Contender("dv", gradients)]
    for value in run.measure(work, contenders, ("forward", "backward"), timer, 3):
        assert set(value["median_ms"]) == {"cpu", "torch math"}
        assert all("from ours" in value["refused"][name] for name in ("out", "dv"))


def test_a_peer_that_cannot_repeat_its_backward_has_none() -> None:
    from benchmarks import grids, peers

    work = grids.Workload(bench.Shape.parse(SMALL), "float32", options={"deterministic": True})
    (fa2,) = peers.peers(["fa2"])
    forward, backward = fa2.make(work, grids.draw(work, torch.device("cpu")), False)
    assert forward().shape == (1, 2, 64, 16) and backward is None


def test_flops_of_a_window() -> None:
    from benchmarks import grids

    for kind, window, right in (
        ("causal", (3, 0), 0), ("causal", (3, 9), 0), ("full", (3, 2), 2), ("full", (3, None), 16),
        ("full", (None, 2), 2),
    ):  # fmt: skip
        work = grids.Workload(bench.Shape.parse(f"B1 S16 H1 D4 {kind}"), options={"window": window})
        left = 16 if window[0] is None else window[0]
        pairs = sum(i - left <= j <= i + right for i in range(16) for j in range(16))
        assert work.flops("forward") == 2.0 * pairs * 8


def test_memory_says_who_was_refused() -> None:
    from benchmarks import grids, peers, run

    def refuse(work: Any, o: Any, backward: bool) -> Any:
        raise peers.Unsupported("not this")

    works, timer = [grids.memory()[0]], bench.Timer(torch.device("cpu"), 1e-4)
    shown: list[str] = []
    found = run.run(works, [peers.Contender("no", refuse)], run.DIRECTIONS, timer, count=1, only_memory=True,
                    show=shown.append)  # fmt: skip
    assert [value["refused"] for value in found] == [{"no": "not this"}] * 2 and all("no: not this" in x for x in shown)


class FakeFlash:
    """The interface of the packages of FlashAttention; it remembers what it was given."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def flash_attn_func(self, q: Any, k: Any, v: Any, **more: Any) -> Any:
        self.seen = more
        return torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=more["causal"], enable_gqa=True
        ).transpose(1, 2), None


def test_packages_of_flash_attention_get_their_names_of_things() -> None:
    from benchmarks import grids, peers

    shape = bench.Shape.parse("B1 S64 H4/2 D16 causal")
    module, options = FakeFlash(), {"window": (8, 0), "deterministic": True}
    work = grids.Workload(shape, "float32", options=options)
    o = grids.draw(work, torch.device("cpu"))
    forward, backward = peers._flash(peers.FLASH4, module, work, o, True)
    assert module.seen == {"causal": True, "window_size": (8, 0), "deterministic": True}
    assert forward().shape == o.q.shape and backward is not None and backward()[1].shape == o.k.shape
    for names, option in ((peers.FLASH3, "sinks"), (peers.FLASH4, "dropout_p"), (peers.FLASH2, "bias")):
        work = grids.Workload(shape, "float32", options={option: 0.1})
        with pytest.raises(peers.Unsupported, match=f"no {option}"):
            peers._flash(names, module, work, o, False)
    work = grids.Workload(shape, "float32", options={"alibi": True})
    peers._flash(peers.FLASH2, module, work, grids.draw(work, torch.device("cpu")), False)
    assert set(module.seen) == {"causal", "alibi_slopes"}


def test_a_folder_of_a_peers_name_is_not_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import ModuleType

    from benchmarks import peers

    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    (found,) = peers.peers(["flash_attn"])
    assert "flash_attn_func" in found.missing


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Two grids in one run, each with its file; an option is compared with the same shape without it."""
    from benchmarks import grids, run, timing

    plain = grids.Workload(bench.Shape.parse(SMALL), "float32")
    option = grids.Workload(plain.shape, "float32", options={"deterministic": True})
    monkeypatch.setitem(grids.GRIDS, "training", lambda: [plain])
    monkeypatch.setitem(grids.GRIDS, "features", lambda: [plain, option])
    monkeypatch.setattr(run, "gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(timing, "ceilings", lambda device: {"matmul_tflops": 1.0, "copy_tbs": 1.0})
    given = ["--grid", "training,features", "--backends", "cpu", "--peers", "math", "--sample", "1e-4"]
    assert run.main([*given, "--output", str(tmp_path)]) == 0
    values = {name: json.loads((tmp_path / f"gpu-{name}-cpu.json").read_text()) for name in ("training", "features")}
    assert [value["workload"] for value in values["training"]["results"]] == [str(plain)] * 2
    assert set(values["training"]["ceilings"]) == {"before", "after"} and values["training"]["not_measured"] == []
    deterministic = values["features"]["results"][2]
    assert deterministic["options"] == {"deterministic": True} and deterministic["of_plain"]["cpu"] > 0
    assert {row["option"] for row in values["features"]["summary"]} == {"", "deterministic"}
    assert "cpu / itself without deterministic" in capsys.readouterr().out
    monkeypatch.setattr(timing, "slowed", lambda *_: "slow")
    assert run.main([*given[2:], "--output", str(tmp_path), "--time-limit", "0"]) == 1
    value = json.loads((tmp_path / "gpu-training-cpu.json").read_text())
    assert value["to_be_repeated"] == "slow" and value["not_measured"] == [str(plain)]
    wrong = (["--grid", "nothing"], ["--grid", "decode", "--directions", "backward"], ["--only", "no such"],
             ["--rounds", "0"])  # fmt: skip
    for flags in wrong:
        with pytest.raises(SystemExit):
            run.main(flags)
        assert flags[-2] in capsys.readouterr().err
    partial = ["--only", str(option), *given[2:], "--grid", "features", "--output", str(tmp_path)]
    assert run.main(partial) == 1  # slow
    assert json.loads((tmp_path / "gpu-features-cpu.json").read_text())["not_measured"] == [str(plain)]


def test_unknown_peer() -> None:
    from benchmarks import peers

    with pytest.raises(SystemExit, match="no peer is called nobody"):
        peers.peers(["nobody"])
