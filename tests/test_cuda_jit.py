"""From a Config to a cubin, and the cache's manners, without a GPU."""

from __future__ import annotations

import dataclasses
import enum
import errno
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from attnlib import settings
from attnlib.errors import KernelError, KernelNotCached
from attnlib_cuda import cache, device, jit, nvrtc, sources
from attnlib_cuda.matrix import ARCHS

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
    imports = "time", "test_cuda_jit as t"
    head = "".join(f"import {name}\n" for name in imports) + "from test_cuda_jit import Path, jit, nvrtc, sources\n"
    done = subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(code)], capture_output=True, text=True, check=False, timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


# --- rendering and digest ---------------------------------------------------------------------------------------------


def test_render() -> None:
    class Mode(enum.Enum):
        CAUSAL = 2

    @dataclasses.dataclass(frozen=True)
    class Everything:
        element: torch.dtype = torch.float16
        accumulate: str = "float32"
        head_dim: int = 128
        causal: bool = True
        cut: float = 1.5
        big: int = 2**40
        mode: Mode = Mode.CAUSAL

    spec = jit.KernelSpec("a.cuh", "entry", Everything(), 256, 2, "attnlib::forward", "attnlib::Some", 96)
    assert jit.render(spec, "sm_90a") == textwrap.dedent("""\
        namespace attnlib { struct half; struct bfloat16; }
        struct Config {
            using element = attnlib::half;
            using accumulate = float;
            static constexpr int head_dim = 128;
            static constexpr bool causal = true;
            static constexpr float cut = 0x1.8000000000000p+0f;
            static constexpr long long big = 1099511627776LL;
            static constexpr int mode = 2;
            static constexpr int threads = 256;
            static constexpr int min_blocks = 2;
            static constexpr int arch = 90;
        };
        #include "a.cuh"
        static_assert(sizeof(attnlib::Some) == 96, "params_size and struct attnlib::Some differ");
        extern "C" __global__ void __launch_bounds__(Config::threads, Config::min_blocks)
        entry(const __grid_constant__ attnlib::Some params) { attnlib::forward<Config>(params); }
        """)


@pytest.mark.parametrize("value", [None, (1, 2), "half", float("nan"), 2**70, 1j])
def test_render_refuses_what_it_cannot_write(value: Any) -> None:
    made = dataclasses.make_dataclass("Odd", [("field", object, value)], frozen=True)
    with pytest.raises(TypeError, match="config field field: needs"):
        jit.render(dataclasses.replace(SPEC, config=made()), "sm_80")


def test_a_config_may_repeat_the_launch_bounds_but_not_contradict_them() -> None:
    made = dataclasses.make_dataclass("Bounds", [("threads", int, 128)], frozen=True)
    assert jit.render(dataclasses.replace(SPEC, config=made()), "sm_80").count("threads = 128") == 1
    with pytest.raises(ValueError, match=r"config\.threads is 128, but 64"):
        jit.render(dataclasses.replace(SPEC, config=made(), threads=64), "sm_80")


def test_digest_covers_what_decides_the_code_and_nothing_else(folder: Path, csrc: Path) -> None:
    def digest(spec: jit.KernelSpec = SPEC, arch: str = "sm_80") -> str:
        sources.reset()
        return jit.digest(spec, arch)

    first = digest()
    others = [
        digest(with_head_dim(128)), digest(arch="sm_86"), digest(dataclasses.replace(SPEC, options=("-lineinfo",))),
        digest(dataclasses.replace(SPEC, threads=64)), digest(dataclasses.replace(SPEC, entry="other")),
    ]  # fmt: skip
    assert len({first, *others}) == 6
    assert digest(dataclasses.replace(SPEC, pointers=(("out", 0),))) == first  # the launcher's affair
    (csrc / "cuda/unused.cuh").write_text("nobody includes this")
    (csrc / "common/philox.h").write_text("// nor this")
    os.utime(csrc / "cuda/tiny.cuh")
    assert digest() == first
    (csrc / "common/types.h").write_text((csrc / "common/types.h").read_text() + "// changed, two includes away\n")
    assert digest() != first


def test_digest_is_the_same_in_every_process(folder: Path, csrc: Path) -> None:
    code = f'sources.use(Path({str(csrc)!r}))\nprint(jit.digest(t.SPEC, "sm_90a"))'
    assert fresh(code, PYTHONHASHSEED="1").strip() == jit.digest(SPEC, "sm_90a")


def test_includes(folder: Path, csrc: Path) -> None:
    (csrc / "cuda/ptx").mkdir()
    (csrc / "cuda/ptx/copy.cuh").write_text('#include "types.h"\n#  include  "../shared.cuh"\n// #include "none.h"\n')
    (csrc / "cuda/ptx/types.h").write_text("#pragma once\n")
    (csrc / "cuda/shared.cuh").write_text("#pragma once\n")
    sources.reset()
    text, reached = sources.canonical('#include "ptx/copy.cuh"\n#include "types.h"\n', "cuda")
    assert text == '#include "cuda/ptx/copy.cuh"\n#include "common/types.h"\n'
    assert list(sources.closure(reached)) == [
        "common/types.h", "cuda/ptx/copy.cuh", "cuda/ptx/types.h", "cuda/shared.cuh",
    ]  # fmt: skip
    with pytest.raises(KernelError, match=r'tiny: #include "gone.cuh" in csrc/cuda: no such file'):
        jit.compile(dataclasses.replace(SPEC, file="gone.cuh"), "sm_80")


def test_sources_of_this_installation_are_found() -> None:
    sources.use(None)
    assert (sources.csrc() / "common/philox.h").is_file()


# --- compiling --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
def test_every_architecture(arch: str, folder: Path) -> None:
    made = jit.compile(SPEC, arch)
    assert made.cubin[:4] == b"\x7fELF" and 0 < made.registers < 64
    assert made.spills == made.stack == 0 and made.warnings == () and made.seconds > 0
    assert made.path == entry(folder)
    files = {path.name: path for path in made.path.iterdir()}
    assert set(files) == {"kernel.cubin", "kernel.cu", "kernel.log", "entry.json"}
    assert files["kernel.cubin"].read_bytes() == made.cubin
    assert "registers" in files["kernel.log"].read_text()
    source = files["kernel.cu"].read_text()
    assert jit.render(SPEC, arch).replace('"tiny', '"cuda/tiny') in source and "// common/window.h" in source


def test_compiling_is_deterministic_and_the_second_call_reads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = jit.compile(SPEC, "sm_90a")
    assert jit.compile(SPEC, "sm_90a", force=True).cubin == first.cubin
    monkeypatch.setattr(nvrtc, "find", lambda: pytest.fail("compiled again"))
    again = jit.compile(SPEC, "sm_90a")
    assert again.cubin == first.cubin and again.seconds == 0
    assert dataclasses.replace(again, seconds=first.seconds) == first


def test_errors_name_the_kernel_and_the_problem(folder: Path) -> None:
    with pytest.raises(KernelError, match="params_size and struct attnlib::Params differ") as caught:
        jit.compile(dataclasses.replace(SPEC, params_size=24), "sm_80", "the problem")
    assert caught.value.problem == "the problem" and caught.value.kernel == "tiny"
    assert "tiny does not compile for sm_80" in str(caught.value) and "the problem" in str(caught.value)


def test_spills_are_seen(folder: Path) -> None:
    spec = dataclasses.replace(SPEC, entry="spilling", function="attnlib::spilling", config=Config(300))
    made = jit.compile(spec, "sm_80")
    assert made.spills > 0 and made.registers == 255
    assert jit.compile(spec, "sm_80").spills == made.spills  # from the cache, too


def test_serialised_wgmma_is_seen(folder: Path) -> None:
    made = jit.compile(dataclasses.replace(SPEC, entry="serialised", function="attnlib::serialised"), "sm_90a")
    assert any("C75" in line for line in made.warnings), made.log


def test_read_log() -> None:
    log = textwrap.dedent("""\
        ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
        ptxas info    : Compiling entry function 'k' for 'sm_90a'
        ptxas         .     64 bytes stack frame, 108 bytes spill stores, 8 bytes spill loads
        ptxas info    : Used 168 registers, used 2 barriers, 64 bytes cumulative stack size
        ptxas         .     8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
        ptxas warning : setmaxnreg ignored
        """)
    found = jit.read_log(log)
    assert (found["registers"], found["stack"], found["spills"], len(found["warnings"])) == (168, 72, 116, 2)


def test_no_nvrtc(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = jit.compile(SPEC, "sm_80")

    def missing() -> nvrtc.Nvrtc:
        raise nvrtc.NvrtcMissing(f"NVRTC was not found ({nvrtc.REMEDY})")

    monkeypatch.setattr(nvrtc, "find", missing)
    monkeypatch.setattr(nvrtc, "version", lambda: None)
    assert jit.compile(SPEC, "sm_80").cubin == made.cubin  # a filled cache is enough
    with pytest.raises(KernelError, match="pip install"):
        jit.compile(SPEC, "sm_86")


def test_the_version_is_known_without_loading_the_library() -> None:
    code = """
        assert nvrtc.version() is not None
        print("libnvrtc" in open("/proc/self/maps").read(), nvrtc.version() == nvrtc.find().version)
    """
    loaded, same = fresh(code).split()
    assert same == "True"
    assert loaded == "False" or not list(nvrtc._wheels())


# --- the cache --------------------------------------------------------------------------------------------------------


def test_jit_never(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with settings.override(jit="never"):
        with pytest.raises(KernelNotCached, match="ATTNLIB_JIT=never") as caught:
            jit.compile(SPEC, "sm_80", "the problem")
        assert caught.value.problem == "the problem" and "attnlib compile --arch sm_80" in str(caught.value)
        assert not folder.exists() or not any(path.suffix for path in folder.iterdir())
    made = jit.compile(SPEC, "sm_80")
    with settings.override(jit="never"):
        assert jit.compile(SPEC, "sm_80").cubin == made.cubin
        monkeypatch.setattr(nvrtc, "version", lambda: (99, 1))  # an image filled by another NVRTC still serves
        assert jit.compile(SPEC, "sm_80").cubin == made.cubin
    assert jit.compile(with_head_dim(32), "sm_80").seconds > 0


def truncate_cubin(found: Path) -> None:
    (found / "kernel.cubin").write_bytes((found / "kernel.cubin").read_bytes()[:100])


def drop_cubin(found: Path) -> None:
    (found / "kernel.cubin").unlink()


def empty_manifest(found: Path) -> None:
    (found / "entry.json").write_bytes(b"")


def odd_manifest(found: Path) -> None:
    (found / "entry.json").write_text("[1, 2]")


def become_a_file(found: Path) -> None:
    shutil.rmtree(found)
    found.write_text("not a folder")


def other_architecture(found: Path) -> None:
    shutil.rmtree(found)
    jit.compile(SPEC, "sm_90a")
    entry(found.parent).rename(found)


@pytest.mark.parametrize(
    "damage", [truncate_cubin, drop_cubin, empty_manifest, odd_manifest, become_a_file, other_architecture]
)
def test_a_damaged_entry_is_rebuilt(damage: Any, folder: Path) -> None:
    first = jit.compile(SPEC, "sm_80")
    damage(entry(folder))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = jit.compile(SPEC, "sm_80")
    assert again.cubin == first.cubin and again.seconds > 0 and again.path == entry(folder)
    assert jit.compile(SPEC, "sm_80").seconds == 0 and not leftovers(folder)


def test_many_processes_compile_once(folder: Path, csrc: Path) -> None:
    code = """
        made = jit.compile(SPEC, "sm_90a")
        import hashlib
        print(hashlib.sha256(made.cubin).hexdigest(), made.seconds > 0)
    """
    lines = []
    for process in [Child(csrc, code) for _ in range(5)]:
        out, err = process.finish()
        assert "Warning" not in err
        lines.append(out.split())
    assert len({line[0] for line in lines}) == 1
    assert [line[1] for line in lines].count("True") == 1
    assert not leftovers(folder) and jit.compile(SPEC, "sm_90a").seconds == 0


def test_processes_that_ignore_the_lock_still_agree(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that publish the same entry at once: the second finds it there and is content."""
    made = jit.compile(SPEC, "sm_80")
    assert made.path is not None
    name, files = made.path.name, {"kernel.cubin": b"other"}
    assert cache.publish(name, files, {}) == made.path
    assert (made.path / "kernel.cubin").read_bytes() == made.cubin and not leftovers(folder)
    assert cache.publish(name, files, {}, replace=True) == made.path
    assert (made.path / "kernel.cubin").read_bytes() == b"other" and not leftovers(folder)


HANG = """
    real = nvrtc.Nvrtc.compile
    def compile(self, *arguments):
        print("compiling", flush=True)
        time.sleep(600)
    nvrtc.Nvrtc.compile = compile
    jit.compile(SPEC, "sm_80")
"""


def test_AB_085_a_killed_process_blocks_nobody(folder: Path, csrc: Path) -> None:
    hanging = Child(csrc, HANG)
    assert hanging.printed() == "compiling\n"
    hanging.kill()
    began = time.monotonic()
    assert jit.compile(SPEC, "sm_80").seconds > 0
    assert time.monotonic() - began < 10


def test_a_stopped_process_delays_but_does_not_block(folder: Path, csrc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = Child(csrc, HANG)
    try:
        assert hanging.printed() == "compiling\n" and hanging.process.pid is not None
        os.kill(hanging.process.pid, signal.SIGSTOP)
        monkeypatch.setattr(cache, "PATIENCE", 1.0)
        began = time.monotonic()
        assert jit.compile(SPEC, "sm_80").path is not None
        assert 0.9 < time.monotonic() - began < 10
    finally:
        hanging.kill()


def test_a_file_system_without_locks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(cache.fcntl, "flock", refuse)
    assert jit.compile(SPEC, "sm_80").path is not None


@pytest.mark.parametrize("function", ["fsync", "rename", "mkdir"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.ESTALE, errno.EDQUOT])
def test_disk_errors_cost_the_entry_not_the_call(
    function: str, code: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.store()

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, function, fail)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made = jit.compile(SPEC, "sm_80")
            jit.compile(with_head_dim(32), "sm_80")
            assert jit.compile(SPEC, "sm_80") is made
    assert "compiled into memory" in str(caught[0].message)
    assert len(caught) == 1 and os.strerror(code) in str(caught[0].message)
    assert made.path is None and made.cubin and not leftovers(folder)


def test_unreadable_entry(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = jit.compile(SPEC, "sm_80")
    real = Path.read_bytes

    def stale(self: Path) -> bytes:
        if self.name == "kernel.cubin":
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(self)

    monkeypatch.setattr(Path, "read_bytes", stale)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert jit.compile(SPEC, "sm_80").cubin == first.cubin


def test_rubbish_of_killed_processes_is_swept(folder: Path) -> None:
    old, new = folder / ".tmp-1-dead", folder / ".tmp-2-alive"
    for path in (old, new):
        path.mkdir(parents=True)
        (path / "kernel.cubin").write_bytes(b"half")
    os.utime(old, (1, 1))
    jit.compile(SPEC, "sm_80")
    assert leftovers(folder) == [new.name]


# --- folders that can't be used ---------------------------------------------------------------------------------------

AS_NOBODY = """
nvrtc.find(), jit.digest(SPEC, "sm_80")  # what lies in folders that the other user may not enter
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
"""
COMPILE_TWO = """
for head_dim in (64, 32):
    made = jit.compile(with_head_dim(head_dim), "sm_80")
    print(made.seconds > 0, made.path)
"""


@pytest.fixture
def open_tmp(tmp_path: Path) -> Iterator[Path]:
    """A TMPDIR that every user can reach and write; pytest's own folders are 0700."""
    path = Path(f"/tmp/attnlib-test-{os.getpid()}-{time.monotonic_ns()}")
    path.mkdir()
    path.chmod(0o1777)
    yield path
    for inner in path.rglob("*"):
        if inner.is_dir() and not inner.is_symlink():
            inner.chmod(0o700)
    shutil.rmtree(path)


def test_AB_086_a_read_only_cache_is_read_and_new_kernels_stay_in_memory(csrc: Path, open_tmp: Path) -> None:
    given = open_tmp / "image"
    shutil.copytree(csrc, open_tmp / "csrc")
    child(open_tmp / "csrc", 'jit.compile(SPEC, "sm_80")', ATTNLIB_CACHE_DIR=str(given))
    for path in (given / "cuda", given):
        path.chmod(0o555)
    once = AS_NOBODY + COMPILE_TWO + 'jit.compile(with_head_dim(16), "sm_80")\n'
    out, warned = child(open_tmp / "csrc", once, ATTNLIB_CACHE_DIR=str(given), TMPDIR=str(open_tmp))
    lines = out.splitlines()
    assert lines[0].startswith(f"False {given}") and lines[1] == "True None" and warned == 1
    silent = AS_NOBODY + 'jit.compile(SPEC, "sm_80")\n'
    assert child(open_tmp / "csrc", silent, ATTNLIB_CACHE_DIR=str(given), TMPDIR=str(open_tmp))[1] == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make another user's folder")
def test_AB_086_another_users_folder(csrc: Path, open_tmp: Path) -> None:
    shutil.copytree(csrc, open_tmp / "csrc")
    given = open_tmp / "private"
    given.mkdir(mode=0o700)  # root's
    environment = {"ATTNLIB_CACHE_DIR": str(given), "TMPDIR": str(open_tmp)}
    out, warned = child(open_tmp / "csrc", AS_NOBODY + COMPILE_TWO, **environment)
    ours = open_tmp / "attnlib-65534"
    assert all(line.startswith(f"True {ours}/cuda/tiny") for line in out.splitlines()) and warned == 1
    assert ours.stat().st_mode & 0o777 == 0o700
    again, _ = child(open_tmp / "csrc", AS_NOBODY + COMPILE_TWO, **environment)
    assert all(line.startswith("False") for line in again.splitlines())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a folder to another user")
def test_default_folder_of_another_user_is_not_trusted(csrc: Path, open_tmp: Path) -> None:
    """Machine code is run from it: readable is not enough."""
    xdg = open_tmp / "xdg"
    environment = {"ATTNLIB_CACHE_DIR": None, "XDG_CACHE_HOME": str(xdg), "TMPDIR": str(open_tmp)}
    assert child(csrc, COMPILE_TWO, **environment)[1] == 0
    os.chown(xdg / "attnlib/cuda", 12345, 12345)
    out, warned = child(csrc, COMPILE_TWO, **environment)
    assert warned == 1 and all(line.startswith(f"True {open_tmp}/attnlib-0") for line in out.splitlines())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a folder to another user")
def test_in_a_folder_for_all_only_trusted_owners_count(folder: Path) -> None:
    jit.compile(SPEC, "sm_80")
    folder.chmod(0o1777)
    assert jit.compile(SPEC, "sm_80").seconds == 0
    os.chown(entry(folder), 12345, 12345)
    assert jit.compile(SPEC, "sm_80").seconds > 0


@pytest.mark.parametrize(
    "environment",
    [
        {"HOME": "/nonexistent", "XDG_CACHE_HOME": None},
        {"HOME": "/dev/null", "XDG_CACHE_HOME": None},
        {"HOME": "/proc", "XDG_CACHE_HOME": None},
        {"XDG_CACHE_HOME": "/proc/cache"},
        {"HOME": "/nonexistent", "XDG_CACHE_HOME": "relative/ignored"},
        {"ATTNLIB_CACHE_DIR": "/dev/null/cache"},
    ],
)
def test_AB_086_no_usable_home_means_a_private_temporary_folder(
    environment: dict[str, str | None], csrc: Path, open_tmp: Path
) -> None:
    given = {"ATTNLIB_CACHE_DIR": None, "TMPDIR": str(open_tmp), **environment}
    out, warned = child(csrc, COMPILE_TWO, **given)
    assert all(line.startswith(f"True {open_tmp}/attnlib-{os.geteuid()}/cuda") for line in out.splitlines())
    assert warned == 1 and not Path("/nonexistent").exists()


def test_home_unset_and_home_a_link(csrc: Path, tmp_path: Path, open_tmp: Path) -> None:
    out, _ = child(csrc, COMPILE_TWO, HOME=None, XDG_CACHE_HOME=str(tmp_path / "x"), ATTNLIB_CACHE_DIR=None)
    assert f"True {tmp_path}/x/attnlib/cuda" in out
    code = AS_NOBODY + "print(cache._default())\n"
    shutil.copytree(csrc, open_tmp / "csrc")
    out, _ = child(open_tmp / "csrc", code, HOME=None, XDG_CACHE_HOME=None, ATTNLIB_CACHE_DIR=None)
    assert out.strip().endswith("/.cache/attnlib")  # the password database's home
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    environment = {"HOME": str(tmp_path / "link"), "XDG_CACHE_HOME": None, "ATTNLIB_CACHE_DIR": None}
    out, warned = child(csrc, COMPILE_TWO, **environment)
    assert warned == 0 and (tmp_path / "real/.cache/attnlib/cuda").is_dir()


@pytest.mark.parametrize("trap", ["link", "open", "file"])
def test_a_temporary_folder_that_is_not_ours_is_not_used(trap: str, csrc: Path, open_tmp: Path) -> None:
    private = open_tmp / f"attnlib-{os.geteuid()}"
    if trap == "link":
        (open_tmp / "elsewhere").mkdir()
        private.symlink_to(open_tmp / "elsewhere")
    elif trap == "open":
        private.mkdir()
        private.chmod(0o777)
    else:
        private.write_text("")
    environment = {"ATTNLIB_CACHE_DIR": None, "HOME": "/nonexistent", "XDG_CACHE_HOME": None, "TMPDIR": str(open_tmp)}
    out, warned = child(csrc, COMPILE_TWO, **environment)
    assert out.splitlines() == ["True None", "True None"] and warned == 1


# --- devices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "version", "expected"),
    [
        ("sm_75", (13, 0), "sm_75"), ("sm_80", (13, 0), "sm_80"), ("sm_90", (13, 0), "sm_90a"),
        ("sm_90a", (12, 0), "sm_90a"), ("sm_100", (13, 0), "sm_100"), ("sm_103", (12, 8), "sm_100"),
        ("sm_121", (12, 8), "sm_120"), ("sm_88", (12, 0), "sm_87"), ("sm_100", (12, 4), None),
        ("sm_130", (13, 0), None), ("sm_70", (13, 0), None), ("gfx942", (13, 0), None),
    ],
)  # fmt: skip
def test_compile_arch(arch: str, version: tuple[int, int], expected: str | None) -> None:
    assert device.compile_arch(arch, version) == expected


def test_typical_devices() -> None:
    h100 = device.for_arch("sm_90")
    assert (h100.arch, h100.capability, h100.sm_count, h100.smem_per_block) == ("sm_90a", 90, 132, 227 << 10)
    assert device.for_arch("sm_86").smem_per_block == 99 << 10
    with pytest.raises(ValueError, match="sm_75 or later"):
        device.for_arch("sm_70")


class FakeHost:
    class DriverError(RuntimeError):
        pass

    def __init__(self, driver: int | None) -> None:
        self.driver = driver

    def driver_version(self) -> int:
        if self.driver is None:
            raise self.DriverError(-1, "NO_DRIVER", "no NVIDIA driver: libcuda.so.1", "dlopen")
        return self.driver


def refused(monkeypatch: pytest.MonkeyPatch, arch: str = "sm_80", driver: int | None = 13000, **more: Any) -> str:
    from attnlib.backend import Target

    monkeypatch.setattr(device, "host", lambda: FakeHost(driver))
    monkeypatch.setattr(nvrtc, "version", lambda: more.get("version", (13, 0)))
    found = device.refusals(Target("cuda", arch, 0, more.get("present", True)))
    return "; ".join(f"{refusal.code.value} {refusal}" for refusal in found)


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    assert refused(monkeypatch) == ""
    assert "arch architecture: needs sm_75 or later, got sm_70" in refused(monkeypatch, "sm_70")
    assert "got sm_130 with NVRTC 13.0" in refused(monkeypatch, "sm_130")
    assert "driver driver: needs an NVIDIA driver, got no NVIDIA driver" in refused(monkeypatch, driver=None)
    assert refused(monkeypatch, driver=None, present=False) == ""
    old = refused(monkeypatch, driver=12040)
    assert "needs one for CUDA 13.0 or later, as NVRTC is 13.0, got CUDA 12.4 (update the driver" in old
    assert "package NVRTC: needs libnvrtc 12 or later, got none (pip install" in refused(monkeypatch, version=None)
    with settings.override(jit="never"):
        assert refused(monkeypatch, version=None) == ""  # a filled cache needs no compiler
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "package torch: needs a CUDA build of torch, got torch for ROCm 6.4" in refused(monkeypatch)


# --- time -------------------------------------------------------------------------------------------------------------


def test_warm_start_is_quick(folder: Path, csrc: Path) -> None:
    cold = jit.compile(SPEC, "sm_90a")
    code = f"""
        sources.use(Path({str(csrc)!r}))
        began = time.perf_counter()
        made = jit.compile(t.SPEC, "sm_90a")
        assert made.seconds == 0
        print(time.perf_counter() - began)
    """
    warm = min(float(fresh(code)) for _ in range(2))
    print(f"NVRTC {cold.seconds * 1e3:.0f} ms, first kernel of a process from the cache {warm * 1e3:.1f} ms")
    assert warm < 0.05
