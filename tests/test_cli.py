"""The command line: every command, its JSON, its exit status, and what it says when it is misused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import attnlib
from attnlib import bench, cli, precompile


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit status, standard output, standard error) of one command."""
    try:
        status = cli.main(arguments)
    except SystemExit as stop:
        status = int(stop.code or 0)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def loads(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    _, out, _ = run(capsys, *arguments)
    return json.loads(out)


def test_module_runs_and_help_names_every_command() -> None:
    done = subprocess.run([sys.executable, "-m", "attnlib", "--help"], capture_output=True, text=True, check=True)
    for command in ("info", "explain", "check", "bench", "support", "demo", "compile"):
        assert command in done.stdout


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"attnlib {attnlib.__version__}\n", "")


@pytest.mark.parametrize("arguments", [(), ("nothing",), ("explain",), ("check",)])
def test_misuse_is_exit_status_2(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    status, _, error = run(capsys, *arguments)
    assert status == 2
    assert "usage: attnlib" in error


# --- info -----------------------------------------------------------------------------------------------------------


def test_info_prints_versions_backends_settings(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "info")
    assert status == 0
    for text in (f"attnlib {attnlib.__version__}", torch.__version__, "reference", "ATTNLIB_BACKEND"):
        assert text in out
    (row,) = (line for line in out.splitlines() if "ATTNLIB_AUTOTUNE" in line)
    assert row.split("│")[2].strip() == "0" and "triton times its tiles" in row


def test_info_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = loads(capsys, "info", "--json")
    assert found["versions"]["torch"] == torch.__version__
    assert found["machine"]["threads"] == torch.get_num_threads()
    names = [item["name"] for item in found["backends"]["cpu"]]
    assert names == [item.name for item in attnlib.backends("cpu")]
    assert set(found["settings"]) == {"backend", "cache_dir", "autotune", "jit", "log", "debug", "shadow"}


def test_info_for_a_device_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert "sm_90" in loads(capsys, "info", "--device", "sm_90", "--json")["devices"]
    status, _, error = run(capsys, "info", "--device", "toaster")
    assert status == 2
    assert "device" in error
    assert "toaster" in error


# --- explain --------------------------------------------------------------------------------------------------------

EVERYTHING = (
    "--shape 2,64,8,32 --seqlen-k 96 --kv-heads 2 --head-dim-v 16 --dtype float32 --causal --window 5,none "
    "--causal-alignment top_left --scale -0.5 --softcap 20 --bias bfloat16 --mask --alibi --sinks --block-mask 16,32 "
    "--lengths --dropout 0.1 --backward --bias-gradient --deterministic --backend reference"
).split()


def test_explain_tells_what_was_asked_and_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "explain", *EVERYTHING)
    assert status == 0
    assert "reference" in out
    assert "asked for by name" in out


def test_explain_builds_the_problem_that_the_call_has() -> None:
    options = cli._parser().parse_args(["explain", *EVERYTHING])
    *operands, arguments = cli._operands(options)
    problem = attnlib.explain(*operands, backend="reference", device="cpu", **arguments).problem
    q = torch.randn(2, 64, 8, 32, requires_grad=True)
    k, v = torch.randn(2, 96, 2, 32, requires_grad=True), torch.randn(2, 96, 2, 16, requires_grad=True)
    bias = torch.randn(64, 96, dtype=torch.bfloat16, requires_grad=True)
    lengths = torch.tensor([3, 5], dtype=torch.int32)
    decision = attnlib.explain(
        q,
        k,
        v,
        causal=True,
        window=(5, None),
        causal_alignment="top_left",
        scale=-0.5,
        softcap=20.0,
        bias=bias,
        mask=torch.ones(64, 96, dtype=torch.bool),
        alibi_slopes=torch.ones(8),
        sinks=torch.zeros(8),
        block_mask=attnlib.BlockMask(torch.ones(1, 1, 4, 3, dtype=torch.bool), 16, 32),
        q_lens=lengths,
        kv_lens=lengths,
        dropout_p=0.1,
        deterministic=True,
        backend="reference",
    )
    assert problem == decision.problem
    assert problem.features == decision.problem.features


@pytest.mark.parametrize(
    ("arguments", "features"),
    [
        ("--packed", {"cu_seqlens"}),
        ("--packed --page-size 16", {"cu_seqlens", "page_table"}),
        ("--page-size 16 --seqlen-k 100", {"page_table"}),
        ("--page-size 16 --append", {"page_table", "k_new/v_new"}),
        ("--append --seqlen-k 100 --kv-heads 2", {"k_new/v_new", "grouped heads"}),
    ],
)
def test_explain_packed_and_cached(capsys: pytest.CaptureFixture[str], arguments: str, features: set[str]) -> None:
    status, out, _ = run(capsys, "explain", "--shape", "2,8,4,32", "--backend", "reference", *arguments.split())
    assert status == 0
    for feature in features:
        assert feature in out.splitlines()[0]


@pytest.mark.parametrize("device", ["sm_90", "gfx942", "cpu"])
def test_explain_json_holds_every_reason(capsys: pytest.CaptureFixture[str], device: str) -> None:
    found = loads(capsys, "explain", "--shape", "2,64,8,320", "--device", device, "--json")
    assert device in found["target"] or device == "cpu"
    assert {candidate["name"].split(":")[0] for candidate in found["candidates"]} >= {"reference"}
    for candidate in found["candidates"]:
        if candidate["name"] != found["chosen"]:
            for reason in candidate["refusals"]:
                assert set(reason) == {"code", "what", "needs", "got", "remedy"}


def test_explain_is_exit_status_1_when_nothing_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    class Picky(attnlib.backend.BackendBase):
        def plan(self, *_: Any) -> Any:
            raise AssertionError

    from attnlib.backend import Capabilities, Family
    from attnlib.registry import unregister_backend

    capabilities = Capabilities(frozenset({"cpu"}), frozenset({torch.float64}), max_head_dim=16)
    attnlib.register_backend(Picky("picky", (Family("", capabilities),)))
    try:
        status, out, _ = run(capsys, "explain", "--shape", "1,8,2,32", "--backend", "picky")
    finally:
        unregister_backend("picky")
    assert status == 1
    assert "head_dim: needs at most 16, got 32" in out
    assert "dtype: needs float64, got bfloat16" in out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--shape 1,2,3", "4 integers"),
        ("--shape 1,8,2,x", "4 integers"),
        ("--shape 1,8,4,8 --kv-heads 3", "3 key/value heads"),
        ("--shape 1,8,4,8 --dtype int8", "--dtype"),
        ("--shape 1,8,4,8 --window 3", "LEFT,RIGHT"),
        ("--shape 1,8,4,8 --softcap -1", "softcap"),
        ("--shape 1,8,4,8 --dropout 2", "dropout_p"),
        ("--shape 1,8,4,8 --bias-gradient", "--bias"),
        ("--shape 1,8,4,8 --backend nobody", "nobody"),
        ("--shape 1,8,4,8 --append --packed", "--append"),
        ("--shape 1,8,4,8 --page-size 4 --backward", "--page-size"),
        ("--shape 1,8,4,8 --block-mask 3,16", "block_q"),
        ("--shape 1,8,4,8 --page-size 0", "at least 1"),
    ],
)
def test_explain_errors_name_the_option(capsys: pytest.CaptureFixture[str], arguments: str, text: str) -> None:
    status, _, error = run(capsys, "explain", *arguments.split())
    assert status == 2
    assert text in error


# --- check ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("passed", "failed", "status"), [(3, 0, 0), (3, 2, 1), (0, 0, 1)])
@pytest.mark.parametrize("as_json", [False, True])
def test_check_passes_its_options_on(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    passed: int,
    failed: int,
    status: int,
    as_json: bool,
) -> None:
    called: dict[str, Any] = {}

    def run_check(backend: str, **arguments: Any) -> dict[str, Any]:
        called.update(arguments, backend=backend)
        counts = {"passed": passed, "refused": 1, "failed": failed}
        checks = [{"refusals": ["bias: needs one", "mask: needs one"]}, {"refusals": ["mask: needs one"]}]
        return {
            **counts,
            "checks": checks,
            "backend": backend,
            "device": "cpu",
            "level": arguments["level"],
            "seconds": 1.0,
        }

    monkeypatch.setattr("attnlib.conformance.run_check", run_check, raising=False)
    report = tmp_path / "new" / "out.json"
    options = f"--backend reference --level full --shard 2/3 --only mask --only dropout/ --report {report}".split()
    got, out, _ = run(capsys, "check", *options, *(["--json"] if as_json else []))
    assert got == status
    assert report.parent.is_dir()
    assert called == {
        "backend": "reference",
        "level": "full",
        "shard": (2, 3),
        "only": ["mask", "dropout/"],
        "report": str(report),
        "device": None,
        "progress": not as_json,
    }
    if as_json:
        assert json.loads(out)["failed"] == failed
    else:
        assert f"{passed} PASSED, 1 REFUSED, {failed} FAILED" in out
        assert out.splitlines()[1:3] == ["  refused    2  mask: needs one", "  refused    1  bias: needs one"]


def test_check_of_a_backend_that_cannot_run_here(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ("check", "--backend", "cuda", "--report", str(tmp_path / "out.json"))
    status, _, error = run(capsys, *options, "--device", "cpu")
    assert status == 3
    assert error.startswith("cuda cannot run here: device: needs cuda, got cpu")
    if not torch.cuda.is_available():
        assert run(capsys, *options)[0] == run(capsys, *options, "--device", "cuda")[0] == 3
    assert not (tmp_path / "out.json").exists()


def test_check_of_nothing_is_misuse(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, error = run(capsys, "check", "--backend", "reference", "--only", "no/such", "--only", "no/other")
    assert status == 2
    assert "--only: no check of level core has no/such or no/other in its name" in error


@pytest.mark.parametrize("shard", ["0/3", "4/3", "1", "a/b", "1/0"])
def test_check_refuses_a_shard_that_is_none(capsys: pytest.CaptureFixture[str], shard: str) -> None:
    status, _, error = run(capsys, "check", "--backend", "reference", "--shard", shard)
    assert status == 2
    assert "I/N" in error


def test_check_refuses_an_unknown_backend(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, error = run(capsys, "check", "--backend", "nobody")
    assert status == 2
    assert "nobody" in error
    assert "reference" in error


# --- bench, support, compile ----------------------------------------------------------------------------------------


def test_bench_measures_and_plots(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "plot.png"
    options = ["--quick", "--backend", "reference", "--rounds", "1", "--dtype", "float32", "--plot", str(plot)]
    status, out, _ = run(capsys, "bench", "--json", *options)
    assert status == 0
    found = json.loads(out)
    assert [row["direction"] for row in found["results"]] == ["forward", "backward"]
    for row in found["results"]:
        assert set(row["gflops"]) == {"attnlib reference", "torch SDPA"}
        assert all(rate > 0 for rate in row["gflops"].values())
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_bench_table_and_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--shape", "B1 S32 H2/1 D16 causal", "--backend", "reference", "--rounds", "1", "--plot", ""]
    status, out, _ = run(capsys, "bench", *options, "--dtype", "float32", "--direction", "forward")
    assert status == 0
    assert "GFLOP/s" in out
    for wrong, text in ((["--shape", "32x32"], "shape"), (["--dtype", "int8"], "--dtype")):
        status, _, error = run(capsys, "bench", "--backend", "reference", *wrong)
        assert status == 2
        assert text in error


@pytest.mark.parametrize("text", ["B1 S1024 H16 D64 full", "B2 S8192 H32/8 D192/128 causal"])
def test_shapes_are_read_as_they_are_written(text: str) -> None:
    assert str(bench.Shape.parse(text)) == text


def test_flops() -> None:
    shape = bench.Shape.parse("B2 S8 H4/2 D16/32 causal")
    assert shape.flops("forward") == 2 * 2 * 4 * 8 * 8 * (16 + 32) / 2
    assert shape.flops("backward") == 2.5 * shape.flops("forward")


def test_a_contender_that_refuses_is_reported() -> None:
    def refuse(*_: Any) -> Any:
        raise attnlib.UnsupportedError("not today\nfor many reasons")

    shapes = [bench.Shape.parse("B1 S16 H1 D16")]
    contenders = [bench.Contender("idle", refuse), bench.sdpa_contender("math")]
    rows = list(bench.measure(shapes, ["float32"], contenders, device=torch.device("cpu"), rounds=1, min_sample=1e-4))
    assert [row.refused for row in rows] == [{"idle": "not today"}] * 2
    assert [list(row.seconds) for row in rows] == [["torch math"]] * 2


def test_support_is_a_table_of_every_feature(capsys: pytest.CaptureFixture[str]) -> None:
    from attnlib.problem import Feature

    _, out, _ = run(capsys, "support")
    lines = out.strip().splitlines()
    assert len({line.count("|") for line in lines}) == 1
    for feature in Feature:
        assert f"| {feature.value} |" in out
    heads = [cell.strip() for cell in lines[0].split("|")[2:-1]]
    assert [row["backend"] for row in loads(capsys, "support", "--json")] == heads


def test_compile_passes_everything_on(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(precompile, "main", lambda arguments: seen.extend(arguments) or 1)
    assert run(capsys, "compile", "--arch", "sm_90a", "--json")[0] == 1
    assert seen == ["--arch", "sm_90a", "--json"]
