"""The arguments of a call that are no tensors, checked and normalised."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .errors import ArgumentError, ArgumentTypeError

UNBOUNDED = -1


class Options(NamedTuple):
    """The plain numbers of a call, in the form the operators take them. Window ends: -1 is unbounded."""

    left: int
    right: int
    top_left: bool
    scale: float
    softcap: float  # 0: none
    dropout_p: float
    deterministic: bool

    @staticmethod
    def of(
        head_dim: int,
        causal: bool,
        causal_alignment: str,
        window: Sequence[int | None] | None,
        scale: float | None,
        softcap: float | None,
        dropout_p: float = 0.0,
        deterministic: bool | None = None,
    ) -> Options:
        """Check and normalise. Raises ArgumentError or ArgumentTypeError naming the argument."""
        if not isinstance(causal, bool):
            raise ArgumentTypeError(f"causal: needs True or False, got {causal!r}")
        if causal_alignment not in ("bottom_right", "top_left"):
            raise ArgumentError(f"causal_alignment: needs 'bottom_right' or 'top_left', got {causal_alignment!r}")
        left, right = _window(window)
        if causal:
            right = 0
        if deterministic is None:
            deterministic = torch.are_deterministic_algorithms_enabled()
        elif not isinstance(deterministic, bool):
            raise ArgumentTypeError(f"deterministic: needs True, False or None, got {deterministic!r}")
        return Options(
            left,
            right,
            causal_alignment == "top_left",
            _default_scale(head_dim) if scale is None else _number("scale", scale),
            0.0 if softcap is None else _positive("softcap", softcap),
            _probability(dropout_p),
            deterministic,
        )


def _default_scale(head_dim: int) -> float:
    if head_dim == 0:
        raise ArgumentError("q: needs head_dim of at least 1, got 0")
    return head_dim**-0.5


def _window(window: Sequence[int | None] | None) -> tuple[int, int]:
    if window is None:
        return UNBOUNDED, UNBOUNDED
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


def _number(name: str, value: Any) -> Any:
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


def _positive(name: str, value: Any) -> float:
    number = _number(name, value)
    if not number > 0:
        raise ArgumentError(f"{name}: needs a finite number above 0, or None, got {value!r}")
    return number


def _probability(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, numbers.Real)):
        raise ArgumentTypeError(f"dropout_p: needs a number from 0 to 1, got {value!r} of type {type(value).__name__}")
    number = float(value)
    if not 0.0 <= number <= 1.0:
        raise ArgumentError(f"dropout_p: needs a number from 0 to 1, got {value!r}")
    return number
