"""A kernel that compiles in no time, a cache folder of its own, and processes that use both."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnlib import settings
from attnlib_cuda import cache, jit, nvrtc, sources  # noqa: F401 (for the code of children)

ROOT = Path(__file__).resolve().parents[1]
TESTS = Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True)
class Config:
    head_dim: int = 64


SPEC = jit.KernelSpec("tiny.cuh", "tiny", Config(), threads=128, params_size=16)


@pytest.fixture
def csrc(tmp_path: Path) -> Path:
    """A source folder of the test's own."""
    folder = tmp_path / "csrc"
    shutil.copytree(ROOT / "csrc/common", folder / "common")
    (folder / "cuda").mkdir()
    shutil.copy(TESTS / "tiny.cuh", folder / "cuda/tiny.cuh")
    return folder


@pytest.fixture
def folder(tmp_path: Path, csrc: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache and the test kernel; the folder that holds the entries."""
    monkeypatch.setenv("ATTNLIB_CACHE_DIR", str(tmp_path / "cache"))
    with settings.override(cache_dir=str(tmp_path / "cache"), jit="auto"):
        sources.use(csrc)
        jit.reset()
        yield tmp_path / "cache/cuda"
    sources.use(None)
    jit.reset()


def with_head_dim(head_dim: int) -> jit.KernelSpec:
    return dataclasses.replace(SPEC, config=Config(head_dim))


def entry(folder: Path) -> Path:
    (only,) = [path for path in folder.iterdir() if not path.name.startswith(".")]
    return only


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".tmp-")]


class Child:
    """Code in a process of its own, with other environment variables (None: unset) and another source folder.

    Forked from a server that has imported torch: a fraction of the time that a fresh interpreter takes.
    """

    _context = multiprocessing.get_context("forkserver")
    _context.set_forkserver_preload(["torch", "pytest"])

    def __init__(self, csrc: Path, code: str, **environment: str | None) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="attnlib-child-"))
        arguments = (str(csrc), textwrap.dedent(code), {**os.environ, **environment}, str(self._folder))
        self.process = self._context.Process(target=_run, args=arguments)
        self.process.start()

    def printed(self, timeout: float = 60) -> str:
        """Its first words, as soon as they come."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            text = (self._folder / "out").read_text() if (self._folder / "out").exists() else ""
            if text:
                return text
            time.sleep(0.01)
        raise AssertionError("it printed nothing")

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        shutil.rmtree(self._folder)

    def finish(self, timeout: float = 120) -> tuple[str, str]:
        """What it printed to stdout and stderr; it must have ended well."""
        self.process.join(timeout)
        assert self.process.exitcode is not None, "it hangs"
        out, err = ((self._folder / name).read_text() for name in ("out", "err"))
        shutil.rmtree(self._folder)
        assert self.process.exitcode == 0, err[-4000:]
        return out, err


def _run(csrc: str, code: str, environment: dict[str, str | None], folder: str) -> None:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), number)
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    os.environ.clear()
    os.environ.update({name: value for name, value in environment.items() if value is not None})
    tempfile.tempdir = None
    settings.reload()
    warnings.simplefilter("always")
    sources.use(Path(csrc))
    exec(compile(code, "child", "exec"), {**globals(), "spec": SPEC})


def child(csrc: Path, code: str, **environment: str | None) -> tuple[str, int]:
    """What it printed, and how many warnings about the cache it gave."""
    out, err = Child(csrc, code, **environment).finish()
    return out, err.count("attnlib's kernel cache")


def fresh(code: str, **environment: str) -> str:
    """What code prints in a new interpreter."""
    paths = [str(TESTS), str(ROOT), str(ROOT / "backends"), os.environ.get("PYTHONPATH", "")]
    head = "import time\nfrom tiny_kernel import SPEC, Path, jit, nvrtc, sources\n"
    done = subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(code)], capture_output=True, text=True, check=False, timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
