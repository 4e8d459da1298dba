"""A small bounded cache."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class LRU(Generic[Value]):
    """A bounded, thread-safe map that drops what was not used for long: of size items, the latest half stay.

    Two generations instead of a list in order of use: a hit among the young ones is one look-up and writes nothing.
    """

    def __init__(self, size: int) -> None:
        self._half = size // 2
        self._young: dict[Hashable, Value] = {}
        self._old: dict[Hashable, Value] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Value | None:
        value = self._young.get(key)
        if value is None:
            value = self._old.get(key)
            if value is not None:
                self.put(key, value)
        return value

    def put(self, key: Hashable, value: Value) -> None:
        with self._lock:
            if len(self._young) >= self._half:
                self._old, self._young = self._young, {}
            self._young[key] = value

    def clear(self) -> None:
        with self._lock:
            self._old, self._young = {}, {}

    def __len__(self) -> int:
        return len(self._old.keys() | self._young.keys())
