"""Which backends there are: entry points of the group attnlib.backends, and what register_backend() added.

Nothing here fails: an entry point that cannot be imported, is too old or takes a name twice stays in the list with
the reason, so that explain can show it.
"""

from __future__ import annotations

import importlib.metadata
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from .backend import API_VERSION, Backend, Family, Refusal, RefusalCode
from .errors import ArgumentError, ArgumentTypeError

GROUP = "attnlib.backends"
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_FAMILY = re.compile(r"[a-z0-9_]*")


@dataclass(frozen=True)
class Entry:
    """A known backend, or the reason why it could not be loaded. `seconds` is what importing it took."""

    name: str
    origin: str
    backend: Backend | None
    refusal: Refusal | None = None
    seconds: float = 0.0

    @property
    def families(self) -> tuple[Family, ...]:
        return tuple(self.backend.families) if self.backend is not None else ()


_lock = threading.RLock()
_registered: list[Entry] = []
_discovered: tuple[Entry, ...] | None = None
generation = 0  # grows with every change, so that caches of decisions know


def entries() -> tuple[Entry, ...]:
    """Every backend known, built-in first, then by name of the entry point, then in order of registration."""
    global _discovered
    with _lock:
        if _discovered is None:
            _discovered = tuple(_discover())
        return _discovered + tuple(_registered)


def names() -> tuple[str, ...]:
    """Every name that may be given as backend: each backend, and each of its families as backend:family."""
    return tuple(_all_names())


def _all_names() -> Iterator[str]:
    for entry in entries():
        if entry.refusal is not None and entry.refusal.what == "name":
            continue
        yield entry.name
        for family in entry.families:
            if family.name:
                yield f"{entry.name}:{family.name}"


def register_backend(backend: Backend) -> None:
    """Add a backend to this process, as an installed entry point would be.

    Args:
        backend: an object with the attributes and methods of attnlib.backend.Backend.

    Raises:
        ArgumentTypeError: backend lacks part of the protocol.
        ArgumentError: its name is malformed or taken, or its api_version is not this library's.

    Example:
        >>> attnlib.register_backend(MyBackend())   # doctest: +SKIP
    """
    global generation
    refusal = _protocol_refusal(backend)
    if refusal is not None:
        kind = ArgumentTypeError if refusal.what == "protocol" else ArgumentError
        raise kind(f"backend: {refusal}")
    with _lock:
        taken = {entry.name for entry in entries()}
        if backend.name in taken:
            raise ArgumentError(f"backend: name {backend.name!r} is taken; known: {', '.join(sorted(taken))}")
        _registered.append(Entry(backend.name, "register_backend", backend))
        generation += 1


def unregister_backend(name: str) -> None:
    """Take back what register_backend added; for tests."""
    global generation
    with _lock:
        kept = [entry for entry in _registered if entry.name != name]
        if len(kept) == len(_registered):
            raise ArgumentError(f"name: {name!r} was not added by register_backend")
        _registered[:] = kept
        generation += 1


def rediscover() -> None:
    """Look for entry points again, after a distribution was installed into the running process."""
    global _discovered, generation
    with _lock:
        _discovered = None
        generation += 1


def _discover() -> Iterator[Entry]:
    from .reference import ReferenceBackend

    reference = ReferenceBackend()
    yield Entry(reference.name, "attnlib", reference)
    seen = {reference.name: "attnlib"}
    points = importlib.metadata.entry_points(group=GROUP)
    unique = {(point.name, point.value): point for point in points}
    own = {"attnlib", None}
    for point in sorted(unique.values(), key=lambda p: ((p.dist.name if p.dist else None) not in own, p.name, p.value)):
        distribution = point.dist.name if point.dist else "an unnamed distribution"
        origin = f"{distribution}: {point.value}"
        if point.name in seen:
            reason = Refusal(
                RefusalCode.LOAD, "name", "a name of its own", f"{point.name!r}, taken by {seen[point.name]}"
            )
            yield Entry(point.name, origin, None, reason)
            continue
        seen[point.name] = origin
        yield _load(point, origin)


def _load(point: importlib.metadata.EntryPoint, origin: str) -> Entry:
    start = time.perf_counter()
    try:
        backend = point.load()
        refusal = _protocol_refusal(backend)
    except BaseException as error:  # a port may fail in any way; core must not
        if isinstance(error, (KeyboardInterrupt, MemoryError)):
            raise
        what = f"{type(error).__name__}: {error}"
        return Entry(point.name, origin, None, Refusal(RefusalCode.LOAD, "import", "an importable backend", what))
    seconds = time.perf_counter() - start
    if refusal is None and backend.name != point.name:
        refusal = Refusal(RefusalCode.LOAD, "name", f"the entry point's name {point.name!r}", repr(backend.name))
    return Entry(point.name, origin, None if refusal else backend, refusal, seconds)


def _protocol_refusal(backend: object) -> Refusal | None:
    version = getattr(backend, "api_version", None)
    if version != API_VERSION:
        return Refusal(RefusalCode.LOAD, "api_version", str(API_VERSION), repr(version))
    needed = ("name", "families", "available", "check", "size_class", "plan", "describe")
    missing = [attribute for attribute in needed if not hasattr(backend, attribute)]
    if missing:
        return Refusal(
            RefusalCode.LOAD, "protocol", f"the attributes {', '.join(needed)}", f"none of {', '.join(missing)}"
        )
    name = backend.name  # type: ignore[attr-defined]
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return Refusal(RefusalCode.LOAD, "name", "lower-case letters, digits and _", repr(name))
    families = backend.families  # type: ignore[attr-defined]
    if not families or not all(isinstance(family, Family) and _FAMILY.fullmatch(family.name) for family in families):
        return Refusal(RefusalCode.LOAD, "families", "at least one Family with a plain name", repr(families))
    if len({family.name for family in families}) != len(families):
        return Refusal(RefusalCode.LOAD, "families", "names that differ", repr([family.name for family in families]))
    if not all(family.capabilities.dtypes for family in families):
        return Refusal(RefusalCode.LOAD, "families", "at least one dtype each", "a family without any")
    return None
