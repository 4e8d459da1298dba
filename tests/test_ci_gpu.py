"""ci/gpu without a GPU: its steps, and what it makes of their reports."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest
from programs import load

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    return load("gpu")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(ROOT / "ci" / "gpu"), *arguments], capture_output=True, text=True)


def test_lists_its_steps() -> None:
    out = run("--list", "--cache", "some/cache", "--time-limit", "100").stdout
    names = [line.split()[0] for line in out.splitlines()]
    assert names == ["build", "conformance", "tests", "integration", "stress", "mutants", "memcheck", "racecheck",
                     "initcheck"]  # fmt: skip
    assert "--time-limit 95" in out and "attnlib.conformance.exercise" in out
    assert [line.split()[0] for line in run("--list", "--only", "tests,build").stdout.splitlines()] == [
        "build",
        "tests",
    ]
    assert "no step named nothing" in run("--only", "nothing").stderr


@pytest.mark.parametrize(("backend", "names"), [("cupy", {"simt"}), ("triton", {"forward", "rows"}), ("yours", set())])
def test_the_sanitizer_watches_the_kernels_of_the_backend(backend: str, names: set[str]) -> None:
    out = run("--list", "--only", "memcheck", "--backend", backend).stdout
    found = set(re.findall(r"kns=(\w+)", out))
    assert names <= found and "sm80" not in found and bool(found) == bool(names)


def test_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    found = run("--only", "tests", "--here", "--folder", str(tmp_path))
    assert found.returncode == 1 and "torch sees no GPU here" in found.stderr


def test_summary_of_a_conformance_report(gpu: ModuleType) -> None:
    def check(name: str, outcome: str, *refusals: str) -> dict[str, object]:
        return {"name": name, "outcome": outcome, "message": f"about {name}", "refusals": list(refusals)}

    checks = [check("a", "passed"), check("b", "refused", "x"), check("c", "refused", "x", "x"), check("d", "failed")]
    report = {"checks": checks, "level": "full", "shard": None, "family": "sm_80", "seconds": 1.234, "jobs": 2,
              "not_run": ["e"]}  # fmt: skip
    found = gpu._checks(report)
    assert (found["passed"], found["refused"], found["failed"], found["not_run"]) == (1, 2, 1, ["e"])
    assert found["refusals"] == {"x": 2} and found["failures"] == [{"name": "d", "message": "about d"}]
    assert gpu._checks(None) is None


def test_summary_of_the_tests_and_the_sanitizer(gpu: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "tests.xml").write_text(
        '<testsuites><testsuite tests="3" failures="1" errors="0" skipped="1"><testcase name="a"/>'
        '<testcase name="b"><failure message="boom"/></testcase></testsuite></testsuites>'
    )
    found = gpu._tests(tmp_path / "tests.xml")
    assert (found["tests"], found["failures"], found["skipped"]) == (3, 1, 1)
    assert found["failed"] == [{"name": "b", "message": "boom"}]
    assert gpu._tests(tmp_path / "absent.xml") is None
    (tmp_path / "memcheck.log").write_text("========= X\n========= ERROR SUMMARY: 0 errors\n")
    (tmp_path / "racecheck.log").write_text("========= X\n")
    assert gpu._sanitizer(tmp_path) == {"memcheck": "ERROR SUMMARY: 0 errors", "racecheck": "no summary"}


def test_environment_of_the_steps_leaves_the_tree_out(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'backends'}:/some/site")
    assert gpu.clean(A="b")["PYTHONPATH"] == "/some/site" and gpu.clean(A="b")["A"] == "b"


def test_result_names_machine_and_commit(gpu: ModuleType, tmp_path: Path) -> None:
    import argparse

    (tmp_path / "tests.xml").write_text("left by another run")
    cut = {"only": "conformance", "skip": None, "shard": None, "time_limit": None, "level": "full"}
    path = gpu.write(argparse.Namespace(backend="cuda", output=None, **cut), tmp_path, [])
    assert path.parent == tmp_path  # not among the kept results
    path = gpu.write(argparse.Namespace(backend="cuda:sm_80", output=str(tmp_path / "out"), **cut), tmp_path, [])
    assert path.name == "gpu-cuda-sm_80.json"
    value = json.loads(path.read_text())
    assert value["commit"] and value["machine"]["cpu"] and value["conformance"] is None and value["steps"] == []


def test_deadline_and_resume(gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit is left; the same command again does what failed or was left, unless the commit is another."""
    import steps

    def appends(name: str, budget: int, status: int = 0) -> object:
        code = f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r}); raise SystemExit({status})"
        return steps.Step(name, budget, (sys.executable, "-c", code))

    def ran(*arguments: str) -> tuple[int, str]:
        (tmp_path / "ran").write_text("")
        given = ["--backend", "cpu", "--folder", str(folder), "--output", str(tmp_path), *arguments]
        return gpu.main(given), (tmp_path / "ran").read_text()

    folder, commit = tmp_path / "folder", "c1"
    monkeypatch.setattr(gpu, "commit_here", lambda: commit)
    bad = 1
    monkeypatch.setattr(gpu, "steps_for", lambda *_: [appends("a", 9), appends("b", 9, bad), appends("c", 50)])
    assert ran("--deadline", "30", "--resume") == (1, "ab")
    (folder / "conformance.jsonl").write_text("kept")
    assert ran("--deadline", "30", "--resume") == (1, "b")
    bad = 0
    assert ran("--deadline", "60", "--resume") == (0, "bc")
    assert ran("--deadline", "60", "--resume") == (0, "")
    value = json.loads((tmp_path / "gpu-cpu.json").read_text())
    assert [(step["name"], step["status"]) for step in value["steps"]] == [(x, "passed") for x in "abc"]
    assert (folder / "conformance.jsonl").exists()
    commit = "c2"
    assert ran("--deadline", "60", "--resume") == (0, "abc")
    assert not (folder / "conformance.jsonl").exists()
    assert ran() == (0, "abc")


def test_deadline_stops_a_step(gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import steps

    slow = steps.Step("slow", 1, (sys.executable, "-c", "import time; time.sleep(60)"))
    monkeypatch.setattr(gpu, "steps_for", lambda *_: [slow])
    start = time.monotonic()
    given = ["--backend", "cpu", "--folder", str(tmp_path), "--output", str(tmp_path), "--deadline", "2"]
    assert gpu.main(given) == 1
    assert time.monotonic() - start < 30
    assert json.loads((tmp_path / "gpu-cpu.json").read_text())["steps"][0]["note"] == "stopped after 1 s"


# --- ci/stress --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stress() -> ModuleType:
    return load("stress")


SMALL = ("--backend", "cpu", "--launches", "60", "--problems", "24", "--longest", "40", "--jobs", "1")


def test_stress_repeats(stress: ModuleType, tmp_path: Path) -> None:
    """A pool of as many problems as there are kinds: four pairs of head dimensions, six features, some backward."""
    assert stress.main([*SMALL, "--report", str(tmp_path / "x.json")]) == 0
    assert not [x for x in threading.enumerate() if isinstance(x, stress.Watch)]  # it would end this process later
    found = json.loads((tmp_path / "x.json").read_text())
    assert (found["calls"], found["problems"], found["not_repeated"]) == (60, 24, {}) and 0 < found["backward"] < 60


def test_stress_names_what_does_not_repeat(
    stress: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest, calls = stress.Problem.run, []

    def run(problem: object) -> object:
        found = honest(problem)
        calls.append(0)
        if len(calls) == 50:
            found[0].view(-1)[-1] += 0.01
        return found

    monkeypatch.setattr(stress.Problem, "run", run)
    assert stress.main(SMALL) == 1
    report = json.loads(capsys.readouterr().out.rsplit("FAILED", 1)[0])
    assert list(report["not_repeated"].values()) == [1]


def test_stress_draws_its_problems_in_several_processes_first(
    stress: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[list[str]] = []
    honest = subprocess.Popen
    monkeypatch.setattr(stress.subprocess, "Popen", lambda command: (started.append(command), honest(command))[1])
    given = [*SMALL, "--jobs", "2", "--launches", "3", "--problems", "2", "--report", str(tmp_path / "x.json")]
    assert stress.main(given) == 0
    assert [command[1:] for command in started] == [[stress.__file__, *given, "--share", f"{n}/2"] for n in range(2)]


def test_stress_fails_with_too_few_calls(stress: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert stress.main([*SMALL, "--seconds", "0"]) == 1
    assert "too few calls" in capsys.readouterr().out


def test_stress_ends_what_hangs() -> None:
    code = (
        "import sys, time; sys.path.insert(0, 'tests'); from programs import load; m = load('stress');"
        "w = m.Watch(0.3); w.recent.append('the last call'); w.start(); time.sleep(60)"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert found.returncode == 3 and "HANGS" in found.stdout and "the last call" in found.stdout
