"""The manners of the kernel cache: damage, other processes, folders that cannot be used."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_kernel import (
    SPEC,
    Child,
    child,
    entry,
    leftovers,
    with_head_dim,
)

from attnlib import settings
from attnlib.errors import KernelNotCached
from attnlib_cuda import cache, jit, nvrtc

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
