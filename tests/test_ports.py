"""A port from outside: throw-away distributions on the path, found by their entry points like any other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GOOD = """
    from attnlib.conformance.template import Template

    class Good(Template):
        def __init__(self):
            super().__init__()
            self.name = {name!r}

    backend = Good()
"""
SOURCES = {
    "good": GOOD.format(name="good"),
    "crashing": "raise RuntimeError('the driver fell over')",
    "exiting": "raise SystemExit(3)",
    "needy": "import a_package_that_is_not_there",
    "slow": "import time; time.sleep(0.4)\n" + textwrap.dedent(GOOD.format(name="slow")),
    "old": textwrap.dedent(GOOD.format(name="old")) + "backend.api_version = 0\n",
    "misnamed": GOOD.format(name="another"),
    "half": "class Half:\n    name, api_version, families = 'half', 1, ()\nbackend = Half()",
}


def _distribution(folder: Path, name: str, source: str, entry: str | None = None) -> None:
    """A distribution `name` with a module of the same name and an entry point `entry`."""
    module = f"port_{name}"
    (folder / f"{module}.py").write_text(textwrap.dedent(source))
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[attnlib.backends]\n{entry or name} = {module}:backend\n")


def _python(folder: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, PYTHONPATH=f"{folder}{os.pathsep}{ROOT}", OMP_NUM_THREADS="1")
    environment = {name: value for name, value in environment.items() if not name.startswith("ATTNLIB_")}
    command = [sys.executable, *(("-c", textwrap.dedent(code)) if code else ()), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def ports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ports")
    for name, source in SOURCES.items():
        _distribution(folder, name, source)
    _distribution(folder, "twin", GOOD.format(name="good"), entry="good")  # a name that port_good has
    _distribution(folder, "usurper", GOOD.format(name="reference"), entry="reference")  # a name that core has
    return folder


@pytest.fixture(scope="module")
def found(ports):
    code = """
        import json, torch, attnlib
        from attnlib.conformance.cases import named
        q = torch.randn(2, 70, 4, 32)
        backends = [
            dict(name=b.name, origin=b.origin, unusable=[str(r) for r in b.unusable], seconds=b.import_seconds)
            for b in attnlib.backends("cpu")
        ]
        decision = attnlib.explain(q, q, q, causal=True, backend="good")
        out = attnlib.attention(q, q, q, causal=True, backend="good")
        want = attnlib.attention(q, q, q, causal=True, backend="reference")
        errors = {}
        for name in ("crashing", "old", "needy"):
            try:
                attnlib.attention(q, q, q, backend=name)
            except Exception as error:
                errors[name] = [type(error).__name__, str(error)]
        print(json.dumps(dict(
            backends=backends, chosen=decision.chosen, text=str(decision), errors=errors,
            refusals={name: [str(r) for r in reasons] for name, reasons in decision.refusals.items()},
            close=bool((out - want).abs().max() < 1e-5),
        )))
    """
    done = _python(ports, code)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _reasons(found, name):
    return [reason for entry in found["backends"] if entry["name"] == name for reason in entry["unusable"]]


def test_a_good_port_is_found_and_runs(found):
    (entry, _twin) = [entry for entry in found["backends"] if entry["name"] == "good"]
    assert entry["unusable"] == []
    assert "port_good" in entry["origin"]
    assert found["chosen"] == "good"
    assert found["close"]


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("crashing", ("import", "RuntimeError: the driver fell over")),
        ("exiting", ("import", "SystemExit")),
        ("needy", ("import", "a_package_that_is_not_there")),
        ("old", ("api_version: needs 1, got 0",)),
        ("misnamed", ("name", "'misnamed'", "'another'")),
        ("half", ("protocol", "plan")),
    ],
)
def test_a_broken_port_is_a_refusal_with_its_reason(found, name, texts):
    (reason,) = _reasons(found, name)
    for text in texts:
        assert text in reason
        assert text in found["text"]


def test_a_second_port_of_a_name_is_refused_and_the_first_stays(found):
    entries = [entry for entry in found["backends"] if entry["name"] == "good"]
    assert [bool(entry["unusable"]) for entry in entries] == [False, True]
    assert "port_good" in entries[1]["unusable"][0]


def test_a_name_of_core_cannot_be_taken(found):
    first, second = (entry for entry in found["backends"] if entry["name"] == "reference")
    assert first["origin"] == "attnlib"
    assert first["unusable"] == []
    assert "taken" in second["unusable"][0]


def test_a_slow_import_is_measured(found):
    seconds = {entry["name"]: entry["seconds"] for entry in found["backends"]}
    assert seconds["slow"] >= 0.4
    assert _reasons(found, "slow") == []


def test_naming_a_broken_port_says_why_it_cannot_run(found):
    for name, text in (("crashing", "the driver fell over"), ("old", "api_version"), ("needy", "a_package")):
        kind, message = found["errors"][name]
        assert kind == "UnsupportedError"
        assert text in message


def test_the_command_line_checks_a_port(ports, tmp_path):
    report = tmp_path / "report.json"
    done = _python(ports, "", "-m", "attnlib", "check", "--backend", "good", "--shard", "1/20", "--report", str(report))
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(report.read_text())
    assert counts["backend"] == "good"
    assert counts["failed"] == 0
    assert counts["passed"] > 0
    assert counts["refused"] > 0


def test_pytest_shows_what_a_port_refuses(ports):
    code = """
        import sys, pytest
        sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:], "--pyargs", "attnlib.conformance",
                              "--attn-backend=good", "--attn-shard=1/20"]))
    """
    from test_conformance import _plugin_is_installed

    plugin = () if _plugin_is_installed() else ("-p", "attnlib_pytest")
    done = _python(ports, code, *plugin)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " refused" in done.stdout.splitlines()[-1]
    assert "REFUSED: " in done.stdout
    assert "backward: needs" in done.stdout
