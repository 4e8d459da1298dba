"""Every environment variable attnlib reads, in one place. They are read once, at first use, never at import.

| variable | values | meaning |
|---|---|---|
| ATTNLIB_BACKEND | a backend name or a comma list, in order of preference | which backends may run; empty is unset |
| ATTNLIB_CACHE_DIR | a folder | where compiled kernels are kept |
| ATTNLIB_AUTOTUNE | 0, 1 | 1: triton times its tiles at the first call of a form, and keeps the fastest in the cache |
| ATTNLIB_JIT | auto, never | never: a kernel that is not in the cache raises KernelNotCached |
| ATTNLIB_LOG | dispatch, jit (comma list) | what to log, at level INFO of the logger "attnlib" |
| ATTNLIB_DEBUG | bounds, poison, sync, shadow:RATE (comma list) | checks that cost time |
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import ArgumentError

_PREFIX = "ATTNLIB_"
_KNOWN = ("BACKEND", "CACHE_DIR", "AUTOTUNE", "JIT", "LOG", "DEBUG")
_LOG_WORDS = ("dispatch", "jit")
_DEBUG_WORDS = ("bounds", "poison", "sync")


@dataclass(frozen=True)
class Settings:
    """The parsed environment. backend is a comma list; shadow is the share of calls checked against the oracle."""

    backend: str = ""
    cache_dir: str | None = None
    autotune: bool = False
    jit: str = "auto"
    log: frozenset[str] = frozenset()
    debug: frozenset[str] = frozenset()
    shadow: float = 0.0


_lock = threading.Lock()
_current: Settings | None = None


def parse(environ: Mapping[str, str]) -> Settings:
    """Settings from the ATTNLIB_* variables of environ. Raises ArgumentError naming the variable and the choices."""
    for name in sorted(environ):
        if name.startswith(_PREFIX) and name.removeprefix(_PREFIX) not in _KNOWN:
            known = ", ".join(_PREFIX + word for word in _KNOWN)
            warnings.warn(f"{name} is not a variable of attnlib and is ignored; known: {known}", stacklevel=3)

    def words(name: str) -> list[str]:
        return [word.strip().lower() for word in environ.get(_PREFIX + name, "").split(",") if word.strip()]

    autotune = environ.get(_PREFIX + "AUTOTUNE", "").strip() or "0"
    if autotune not in ("0", "1"):
        raise ArgumentError(f"ATTNLIB_AUTOTUNE: needs 0 or 1, got {autotune!r}")
    jit = environ.get(_PREFIX + "JIT", "").strip().lower() or "auto"
    if jit not in ("auto", "never"):
        raise ArgumentError(f"ATTNLIB_JIT: needs auto or never, got {jit!r}")
    for word in words("LOG"):
        if word not in _LOG_WORDS:
            raise ArgumentError(f"ATTNLIB_LOG: needs words of {', '.join(_LOG_WORDS)}, got {word!r}")
    debug, shadow = set(), 0.0
    for word in words("DEBUG"):
        if word.startswith("shadow:"):
            shadow = _rate(word)
        elif word in _DEBUG_WORDS:
            debug.add(word)
        else:
            raise ArgumentError(f"ATTNLIB_DEBUG: needs words of {', '.join(_DEBUG_WORDS)}, shadow:RATE, got {word!r}")
    return Settings(
        backend=",".join(words("BACKEND")),
        cache_dir=environ.get(_PREFIX + "CACHE_DIR", "").strip() or None,
        autotune=autotune == "1",
        jit=jit,
        log=frozenset(words("LOG")),
        debug=frozenset(debug),
        shadow=shadow,
    )


def _rate(word: str) -> float:
    try:
        rate = float(word.removeprefix("shadow:"))
    except ValueError:
        rate = -1.0
    if not 0.0 <= rate <= 1.0:
        raise ArgumentError(f"ATTNLIB_DEBUG: shadow needs a rate from 0 to 1, as in shadow:0.01, got {word!r}")
    return rate


def current() -> Settings:
    """The settings in force."""
    global _current
    settings = _current
    if settings is None:
        with _lock:
            settings = _current = parse(os.environ)
    return settings


def reload() -> Settings:
    """Read the environment again, for tests and notebooks that change it."""
    global _current
    settings = _current = parse(os.environ)
    return settings


@contextlib.contextmanager
def override(**fields: Any) -> Iterator[Settings]:
    """Replace some fields for the length of a with block, in every thread; for tests."""
    global _current
    before = current()
    settings = _current = dataclasses.replace(before, **fields)
    try:
        yield settings
    finally:
        _current = before
