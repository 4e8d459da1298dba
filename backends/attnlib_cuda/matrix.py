"""Configurations of kernels as axes and values, and small sets of them that cover all pairs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from .jit import KernelSpec

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")


@dataclass(frozen=True)
class Matrix:
    """Configurations of one kind of kernel.

    axes maps a name to its values, cheap ones first, e.g. {"dtype": ("float16", "bfloat16"), "head_dim": (64, 128)}.
    build(arch, values) returns the kernels for one value of each axis, none where that combination is not shipped.
    excluded(values) may say so of some values alone, "arch" among them, which spares a search (bfloat16 on sm_75).
    archs: those that may have any.
    """

    name: str
    axes: Mapping[str, tuple[Any, ...]]
    build: Callable[[str, Mapping[str, Any]], Sequence[KernelSpec]]
    excluded: Callable[[Mapping[str, Any]], bool] = lambda values: False
    archs: tuple[str, ...] = ARCHS


Row = tuple[str, dict[str, Any]]  # architecture, value of each axis
Rows = list[tuple[Row, Sequence[KernelSpec]]]


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


def covering(matrix: Matrix) -> Rows:
    """Few of them, so that any two values of two axes, the architecture being one, meet in at least one.

    Greedy and deterministic: each row starts from a pair not met yet and takes for every other axis the value that
    meets the most such pairs. A pair is given up only when no kernel that is shipped has it.
    """
    return _Covering(matrix).rows()


def thorough(matrix: Matrix) -> Rows:
    """The covering set and more, so that any two values of two axes meet on every architecture."""
    found = covering(matrix)
    for arch in matrix.archs:
        one = _Covering(dataclasses.replace(matrix, name=f"{matrix.name} {arch}", archs=(arch,)))
        for (known, values), _ in found:
            if known == arch:
                one.meet([arch, *values.values()])
        found += one.rows()
    return found


class _Covering:
    """Values of axes have numbers; `open[n]` has the bits of those that value n has not met yet."""

    def __init__(self, matrix: Matrix) -> None:
        self.matrix = matrix
        sizes = [len(matrix.archs), *(len(values) for values in matrix.axes.values())]
        ends = list(itertools.accumulate(sizes))
        self.axes = [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        self.values = [*matrix.archs, *itertools.chain.from_iterable(matrix.axes.values())]
        self.open = [((1 << ends[-1]) - 1) & ~sum(1 << n for n in axis) for axis in self.axes for _ in axis]
        self.random = Random(matrix.name)

    def rows(self) -> Rows:
        found: Rows = []
        for first in range(len(self.values)) if all(self.axes) else ():
            while self.open[first]:
                second = (self.open[first] & -self.open[first]).bit_length() - 1
                made = self.best(first, second) or self.any(first, second)
                if made is None:
                    self.open[first] &= ~(1 << second)
                    self.open[second] &= ~(1 << first)
                    continue
                chosen, row, specs = made
                found.append((row, specs))
                self.close(chosen)
        return found

    def meet(self, values: Sequence[Any]) -> None:
        """Count a row that is there already, its architecture first."""
        self.close([next(n for n in axis if self.values[n] is x) for axis, x in zip(self.axes, values, strict=True)])

    def close(self, chosen: Sequence[int]) -> None:
        met = sum(1 << n for n in chosen)
        for n in chosen:
            self.open[n] &= ~met

    def best(self, first: int, second: int) -> tuple[Sequence[int], Row, Sequence[KernelSpec]] | None:
        """A row with two values that meets many open pairs, or None where a few attempts found none."""
        most, found = -1, None
        for attempt in range(24):
            if attempt >= 8 and found is not None:
                break
            chosen = self.complete(first, second, greedy=attempt < 8)
            met = sum(1 << n for n in chosen)
            gain = sum((self.open[n] & met).bit_count() for n in chosen)
            if gain > most and (made := self.build(chosen)) is not None:
                most, found = gain, made
        return found

    def complete(self, first: int, second: int, *, greedy: bool) -> list[int]:
        chosen = {place: n for place, axis in enumerate(self.axes) for n in (first, second) if n in axis}
        met = 1 << first | 1 << second
        rest = [place for place in range(len(self.axes)) if place not in chosen]
        self.random.shuffle(rest)
        for place in rest:
            axis = self.axes[place]
            if greedy:  # the first of equals: it is the cheapest
                n = max(axis, key=lambda n: (self.open[n] & met).bit_count())
            else:  # a greedy choice may never be shipped
                n = self.random.choice(axis)
            chosen[place] = n
            met |= 1 << n
        return [chosen[place] for place in range(len(self.axes))]

    def any(self, first: int, second: int) -> tuple[Sequence[int], Row, Sequence[KernelSpec]] | None:
        """A row with two values, if any is shipped."""
        fixed = [[n for n in (first, second) if n in axis] or axis for axis in self.axes]
        names = ("arch", *self.matrix.axes)
        known = {name: self.values[ns[0]] for name, ns in zip(names, fixed, strict=True) if len(ns) == 1}
        if self.matrix.excluded(known):
            return None
        return next(filter(None, map(self.build, itertools.product(*fixed))), None)

    def build(self, chosen: Sequence[int]) -> tuple[Sequence[int], Row, Sequence[KernelSpec]] | None:
        arch, *rest = [self.values[n] for n in chosen]
        values = dict(zip(self.matrix.axes, rest, strict=True))
        specs = () if self.matrix.excluded({"arch": arch, **values}) else self.matrix.build(arch, values)
        return (chosen, (arch, values), specs) if specs else None
