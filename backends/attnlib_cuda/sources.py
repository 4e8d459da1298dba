"""The .cuh and .h files under csrc, found in a wheel or in the source tree, and the set of them that a text reaches."""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import json
import posixpath
import re
from pathlib import Path

_INCLUDE = re.compile(r'^([ \t]*#[ \t]*include[ \t]*)"([^"\n]+)"', re.MULTILINE)
_ROOTS = ("cuda", "common")
_chosen: Path | None = None


class MissingSource(Exception):
    """An #include that leads nowhere."""


@functools.cache
def csrc() -> Path:
    """The folder with cuda/ and common/: inside the package (wheel) or at the root of the source tree (editable)."""
    packaged = Path(str(importlib.resources.files(__package__))) / "csrc"
    live = Path(__file__).resolve().parents[2] / "csrc"
    for folder in (packaged, live) if _chosen is None else (_chosen,):
        if all((folder / root).is_dir() for root in _ROOTS):
            return folder
    raise MissingSource(f"the CUDA sources are neither in {packaged} nor in {live}")


@functools.cache
def read(name: str) -> str | None:
    """Text of "cuda/forward_sm80.cuh", or None. Read once a process."""
    path = csrc().joinpath(*name.split("/"))
    return path.read_text(encoding="utf-8") if path.is_file() else None


@functools.cache
def resolve(name: str, folder: str) -> str:
    """The path under csrc that `#include "name"` in a file of folder means."""
    for base in dict.fromkeys((folder, *_ROOTS, "")):
        path = posixpath.normpath(posixpath.join(base, name))
        if not path.startswith("..") and read(path) is not None:
            return path
    raise MissingSource(f'#include "{name}" in csrc/{folder}: no such file there, in csrc/cuda or in csrc/common')


def canonical(text: str, folder: str) -> tuple[str, tuple[str, ...]]:
    """text with its quoted includes rewritten to paths under csrc, and those paths."""
    reached: dict[str, None] = {}

    def rewrite(match: re.Match[str]) -> str:
        path = resolve(match[2], folder)
        reached[path] = None
        return f'{match[1]}"{path}"'

    return _INCLUDE.sub(rewrite, text), tuple(reached)


@functools.cache
def _file(path: str) -> tuple[str, tuple[str, ...]]:
    text = read(path)
    assert text is not None  # resolve() has read it
    return canonical(text, posixpath.dirname(path))


@functools.cache
def closure(roots: tuple[str, ...]) -> dict[str, str]:
    """Every file that roots reach, themselves included: path to text, in the order of the paths."""
    found: dict[str, str] = {}
    waiting = list(roots)
    while waiting:
        path = waiting.pop()
        if path not in found:
            found[path], more = _file(path)
            waiting += more
    return dict(sorted(found.items()))


@functools.cache
def digest(roots: tuple[str, ...]) -> str:
    """SHA-256 over closure(roots), names included."""
    return hashlib.sha256(json.dumps(list(closure(roots).items())).encode()).hexdigest()


def use(folder: Path | None) -> None:
    """Take the sources from another folder with cuda/ and common/ (None: the usual one); for tests."""
    global _chosen
    _chosen = folder
    reset()


def chosen() -> Path | None:
    """What use() was given last."""
    return _chosen


def reset() -> None:
    """Read the files again (tests, and editing them in a notebook)."""
    for cached in (csrc, read, resolve, _file, closure, digest):
        cached.cache_clear()
