"""Checks of the arguments that are no tensors; each gives back the number that the operators take."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch

from .errors import ArgumentError, ArgumentTypeError

UNBOUNDED = -1


def check_flag(name: str, value: Any) -> None:
    """Raises ArgumentTypeError for anything but True and False: 1 and numpy.bool_ may be another argument's value."""
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{name}: needs True or False, got {value!r}")


def check_window(window: Sequence[int | None]) -> tuple[int, int]:
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ArgumentTypeError(f"window: needs a pair (left, right) of ints >= 0 or None, got {window!r}")
    ends: list[Any] = []
    for end in window:
        if end is None:
            ends.append(UNBOUNDED)
        elif isinstance(end, bool) or not isinstance(end, (int, numbers.Integral, torch.SymInt)):
            raise ArgumentTypeError(f"window: needs ints >= 0 or None, got {window!r}")
        elif end < 0:
            raise ArgumentError(f"window: needs ints >= 0 or None (None is unbounded), got {window!r}")
        else:
            ends.append(end if isinstance(end, torch.SymInt) else min(int(end), 1 << 40))
    return ends[0], ends[1]


def check_number(name: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float, numbers.Real, torch.SymFloat, torch.SymInt)):
        raise ArgumentTypeError(f"{name}: needs a number, got {value!r} of type {type(value).__name__}")
    if isinstance(value, (torch.SymFloat, torch.SymInt)):
        return value
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not number - number == 0:  # NaN or infinite, in a form that torch.compile can trace
        raise ArgumentError(f"{name}: needs a finite number, got {value!r}")
    return number


def check_positive(name: str, value: Any) -> float:
    number = check_number(name, value)
    if not number > 0:
        raise ArgumentError(f"{name}: needs a finite number above 0, or None, got {value!r}")
    return number


def check_probability(name: str, value: Any) -> float:
    if type(value) is not float:
        if isinstance(value, bool) or not isinstance(value, (int, float, numbers.Real)):
            raise ArgumentTypeError(f"{name}: needs a number from 0 to 1, got {value!r} of type {type(value).__name__}")
        value = float(value)
    if not 0.0 <= value <= 1.0:
        raise ArgumentError(f"{name}: needs a number from 0 to 1, got {value!r}")
    return value


def drop_threshold(p: float) -> int:
    """The least 16-bit number that is kept at drop probability p, in 0..65536."""
    return int(p * 65536 + 0.5)
