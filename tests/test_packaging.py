"""What can be said of packaging and of the checks without building anything; ci/packaging builds and installs."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from programs import load

import attnlib

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="needs the source tree")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def check() -> ModuleType:
    return load("check")


# --- pyproject.toml -------------------------------------------------------------------------------------------------


def test_only_three_packages_are_required(project: dict[str, Any]) -> None:
    names = {re.split(r"[<>=~! ]", text)[0] for text in project["project"]["dependencies"]}
    assert names == {"torch", "numpy", "rich"}
    assert set(project["project"]["optional-dependencies"]) == {"cuda", "triton", "cupy", "demo", "test", "bench"}


def test_packages_of_the_wheel_are_in_the_tree(project: dict[str, Any]) -> None:
    for destination, source in project["tool"]["scikit-build"]["wheel"]["packages"].items():
        assert (ROOT / source).is_dir(), source
        assert Path(destination).name == Path(source).name


def test_entry_points_name_modules_of_the_tree(project: dict[str, Any]) -> None:
    packages = project["tool"]["scikit-build"]["wheel"]["packages"]
    points = project["project"]["entry-points"]
    values = [
        *points["attnlib.backends"].values(),
        *points["pytest11"].values(),
        *project["project"]["scripts"].values(),
    ]
    for value in values:
        package, *rest = value.split(":")[0].split(".")
        place = ROOT / packages[package] / Path(*rest)
        assert place.with_suffix(".py").exists() or (place / "__init__.py").exists(), value


def test_version_is_the_installed_one(project: dict[str, Any]) -> None:
    assert "version" in project["project"]["dynamic"]
    assert re.fullmatch(r"\d+\.\d+\.\d+([ab.]\w+)?", attnlib.__version__)
    try:
        installed = importlib.metadata.version("attnlib")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("attnlib is not installed")
    assert installed == attnlib.__version__
    assert f"## {attnlib.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_typed_and_licensed(project: dict[str, Any]) -> None:
    assert (ROOT / "attnlib" / "py.typed").exists()
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert project["project"]["license"] == "Apache-2.0"


# --- commands -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("target", ["demo", "test"])
def test_make_installs_torch_first_and_as_it_is_told(target: str, tmp_path: Path) -> None:
    command = ["make", "-n", target, f"VENV={tmp_path / 'env'}", "TORCH=torch==9.9.9"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    installs = [line for line in out.splitlines() if " install " in line]
    assert "torch==9.9.9" in installs[0]
    assert "-e " in installs[1]
    assert len(installs) == 2


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_does_not_install_again(tmp_path: Path) -> None:
    environment = tmp_path / "env"
    environment.mkdir()
    for name in ("torch", "demo", "test"):
        (environment / f".stamp-{name}").touch()
    command = ["make", "-n", "test", f"VENV={environment}"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert " install " not in out
    assert "ci/check" in out


def test_ci_runs_make_test() -> None:
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "make test" in text
    subprocess.run(["bash", "-n", str(ROOT / ".ci" / "run")], check=True)


def test_check_budgets(check: ModuleType) -> None:
    budgets = {step.name: step.budget for step in check.STEPS}
    assert budgets["format"] + budgets["lint"] + budgets["types"] <= 60
    assert budgets["tests"] <= 240
    assert budgets["cpu"] <= 240
    assert budgets["nvrtc"] <= 240
    assert sum(budgets.values()) <= 20 * 60


def test_check_picks_steps(check: ModuleType) -> None:
    assert [step.name for step in check.pick(check.STEPS, "types,lint", None)] == ["lint", "types"]
    assert "packaging" not in [step.name for step in check.pick(check.STEPS, None, "packaging")]
    with pytest.raises(SystemExit, match="no step named nothing"):
        check.pick(check.STEPS, "nothing", None)


def test_check_runs_steps_and_counts_failures(check: ModuleType) -> None:
    def step(name: str, budget: int, code: str, *needs: str) -> Any:
        return check.Step(name, budget, (sys.executable, "-c", code), needs)

    assert check.run(step("good", 60, "")).status == "passed"
    bad = check.run(step("bad", 60, "raise SystemExit(3)"))
    assert (bad.status, bad.note) == ("failed", "exit status 3")
    assert check.run(step("early", 60, "", "no/such/file")).status == "skipped"
    slow = check.run(step("slow", 0, ""))
    assert slow.status == "failed"
    assert slow.note == "stopped after 0 s"
    text = check.summary([bad, slow])
    assert text.splitlines()[-1].startswith("total")
    assert "exit status 3" in text


def test_check_lists_its_steps() -> None:
    out = subprocess.run(
        [sys.executable, str(ROOT / "ci" / "check"), "--list"], capture_output=True, text=True, check=True
    ).stdout
    for name in ("format", "lint", "types", "tests", "cpu", "reference", "mutants", "nvrtc", "packaging"):
        assert re.search(rf"^{name} ", out, re.MULTILINE)


# --- documents ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "docs/README.md", "docs/performance.md"])
def test_links_lead_somewhere(name: str) -> None:
    path = ROOT / name
    for link in re.findall(r"\]\(([^)#]+)", path.read_text(encoding="utf-8")):
        if not link.startswith("http"):
            assert (path.parent / link).exists(), f"{name}: {link}"


def test_generated_parts() -> None:
    sys.path.insert(0, str(ROOT))
    try:
        from benchmarks import table
    finally:
        sys.path.remove(str(ROOT))
    old = "a\n<!-- generated: x -->\nold\n<!-- end: x -->\nb\n<!-- generated: y -->\n<!-- end: y -->\n"
    new = table.render(old, {"x": lambda: "1", "y": lambda: "2"})
    assert new == "a\n<!-- generated: x -->\n1\n<!-- end: x -->\nb\n<!-- generated: y -->\n2\n<!-- end: y -->\n"
    assert table.render(new, {"x": lambda: "1", "y": lambda: "2"}) == new
    with pytest.raises(ValueError, match="'x'"):
        table.render(old, {})
    for name in table.DOCUMENTS:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert "<!-- generated: " in text
        assert table.render(text, {key: lambda: "-" for key in table.MAKERS}).count("-->\n-\n<!--") == text.count(
            "<!-- generated: "
        )
