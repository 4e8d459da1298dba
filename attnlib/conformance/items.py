"""The list of checks: those generated from the cases, and those written by hand in attnlib.conformance.checks."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from .subject import Subject

LEVELS = {"core": ("core",), "full": ("core", "full")}


@dataclass(frozen=True)
class Item:
    """One check with the name that reports show. kinds: device kinds it is for; empty for all."""

    name: str
    run: Callable[[Subject], None]
    level: str = "core"
    kinds: tuple[str, ...] = ()


_written: list[Item] = []


def check(name: str, *, level: str = "core", kinds: tuple[str, ...] = ()) -> Callable[..., Callable[[Subject], None]]:
    """Register a hand-written check under a name, "topic/what it shows"."""

    def register(run: Callable[[Subject], None]) -> Callable[[Subject], None]:
        add(Item(name, run, level, kinds))
        return run

    return register


def add(item: Item) -> None:
    assert all(item.name != other.name for other in _written), f"two checks are called {item.name}"
    _written.append(item)


def items_for(level: str, subject: Subject) -> list[Item]:
    """Every check of a level ("full" includes "core") for a subject: by its kind of device and its test configs."""
    checks = importlib.import_module("attnlib.conformance.checks")  # registers the written ones
    found = [*_written, *checks.configs.items(subject.backend)]
    kind = subject.target.kind
    return [item for item in found if item.level in LEVELS[level] and (not item.kinds or kind in item.kinds)]
