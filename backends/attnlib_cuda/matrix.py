"""Every shipped configuration of a kernel as axes and values, and a small set of them that covers all pairs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from .jit import KernelSpec

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")


@dataclass(frozen=True)
class Matrix:
    """One kernel's configurations.

    axes maps a name to its values, e.g. {"dtype": ("float16", "bfloat16"), "head_dim": (64, 128), "causal": (False,
    True)}. build(arch, values) returns the kernel for one value of each axis, or None where that combination is
    not shipped (bfloat16 on sm_75). archs: those that may have any.
    """

    name: str
    axes: Mapping[str, tuple[Any, ...]]
    build: Callable[[str, Mapping[str, Any]], KernelSpec | None]
    archs: tuple[str, ...] = ARCHS


Row = tuple[str, dict[str, Any]]  # architecture, value of each axis


def label(spec: KernelSpec, arch: str) -> str:
    """How reports and the table of exceptions name a kernel: "forward_sm80 sm_80 element=float16 head_dim=128 causal".

    Its entry point, its architecture, and what its Config holds: flags that are set by name, fields that are 0 not.
    """
    words = [spec.entry, arch]
    for item in dataclasses.fields(spec.config):
        value = getattr(spec.config, item.name)
        if value is True:
            words.append(item.name)
        elif value is not False and value != 0:
            words.append(f"{item.name}={str(getattr(value, 'name', value)).removeprefix('torch.')}")
    if spec.min_blocks != 1:
        words.append(f"min_blocks={spec.min_blocks}")
    return " ".join(words)


def every(matrix: Matrix) -> Iterator[tuple[Row, KernelSpec]]:
    """All that is shipped."""
    for arch in matrix.archs:
        for combination in itertools.product(*matrix.axes.values()):
            values = dict(zip(matrix.axes, combination, strict=True))
            spec = matrix.build(arch, values)
            if spec is not None:
                yield (arch, values), spec


def covering(matrix: Matrix) -> list[tuple[Row, KernelSpec]]:
    """Few of them, so that any two values of two axes, the architecture being one, meet in at least one.

    Greedy and deterministic: each row starts from a pair not met yet and takes for every other axis the value that
    meets the most such pairs. A pair is given up only when no kernel that is shipped has it.
    """
    return _Covering(matrix).rows()


_ARCH = "<arch>"
_Place = tuple[str, int]  # an axis, and the index of a value


class _Covering:
    def __init__(self, matrix: Matrix) -> None:
        self.matrix = matrix
        self.axes: dict[str, tuple[Any, ...]] = {_ARCH: matrix.archs, **matrix.axes}
        self.order = {name: place for place, name in enumerate(self.axes)}
        self.places: list[list[_Place]] = [[(name, i) for i in range(len(self.axes[name]))] for name in self.axes]
        self.random = Random(matrix.name)
        self.open = {
            pair for a, b in itertools.combinations(self.places, 2) for pair in itertools.product(a, b)
        }  # pairs not met yet

    def rows(self) -> list[tuple[Row, KernelSpec]]:
        found = []
        for pair in sorted(self.open):
            if pair in self.open:
                made = self.complete(dict(pair)) or self.witnesses.get(pair)
                if made is None:
                    self.open.discard(pair)
                else:
                    chosen, row, spec = made
                    found.append((row, spec))
                    self.open.difference_update(itertools.combinations(chosen, 2))
        return found

    def complete(self, fixed: dict[str, int]) -> tuple[tuple[_Place, ...], Row, KernelSpec] | None:
        """A kernel with the fixed values that meets many open pairs, or None where a few attempts found none."""
        rest = [name for name in self.axes if name not in fixed]
        for attempt in range(24):
            chosen = dict(fixed)
            self.random.shuffle(rest)
            for name in rest:
                values = list(range(len(self.axes[name])))
                self.random.shuffle(values)
                if attempt < 12:  # later attempts are random: a greedy choice may never be shipped
                    values.sort(key=lambda i, name=name: -self.gain(chosen, (name, i)))  # type: ignore[misc]
                chosen[name] = values[0]
            made = self.build(tuple((name, chosen[name]) for name in self.axes))
            if made is not None:
                return made
        return None

    def gain(self, chosen: Mapping[str, int], place: _Place) -> int:
        first = self.order[place[0]]
        return sum(
            ((other, place) if self.order[other[0]] < first else (place, other)) in self.open
            for other in chosen.items()
        )

    def build(self, chosen: tuple[_Place, ...]) -> tuple[tuple[_Place, ...], Row, KernelSpec] | None:
        values = {name: self.axes[name][i] for name, i in chosen}
        arch = values.pop(_ARCH)
        spec = self.matrix.build(arch, values)
        return None if spec is None else (chosen, (arch, values), spec)

    @functools.cached_property
    def witnesses(self) -> dict[tuple[_Place, _Place], tuple[tuple[_Place, ...], Row, KernelSpec]]:
        """A kernel for every pair that any has: built at most once, when a pair resists."""
        found: dict[tuple[_Place, _Place], tuple[tuple[_Place, ...], Row, KernelSpec]] = {}
        for chosen in itertools.product(*self.places):
            made = self.build(chosen)
            if made is not None:
                for pair in itertools.combinations(chosen, 2):
                    found.setdefault(pair, made)
        return found
