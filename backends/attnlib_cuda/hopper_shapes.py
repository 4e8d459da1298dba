"""Tile shapes of the wgmma kernels as measured: the rows of hopper_shapes.json, and which of them decides.

`python -m benchmarks.tune` writes that file. A row holds for problems up to its sizes:

    head_dim, head_dim_v    the smallest that hold the problem's are taken
    kinds                   by the window: some of KINDS
    seqlen                  at most so many keys (backward: queries); left out: any number
    softcap, dropout, deterministic (backward)    true or false; left out: both
    shape                   every field of ForwardShape or BackwardShape
    measured                null, or TFLOP/s of some workloads, the commit, and the file of benchmarks/results
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from attnlib.problem import AttentionProblem, Window

PATH = Path(__file__).with_name("hopper_shapes.json")
KERNELS = ("forward", "backward")
KINDS = ("full", "causal", "left", "window")  # no edge, a right one (causal, too), a left one, both
LARGEST = 256  # head_dim


class ForwardShape(NamedTuple):
    """Fields of hopper.ForwardConfig."""

    warpgroups: int
    block_k: int
    stages: int
    q_buffers: int
    q_in_registers: bool
    out_panels: int


class BackwardShape(NamedTuple):
    """Fields of hopper.BackwardConfig."""

    split: bool
    block_q: int
    order: bool
    dq_first: bool
    held: bool
    wide: bool
    apart: bool


Shape = ForwardShape | BackwardShape
SHAPES: Mapping[str, type[ForwardShape] | type[BackwardShape]] = {"forward": ForwardShape, "backward": BackwardShape}


class Key(NamedTuple):
    """What decides beside sizes."""

    kernel: str
    kind: str
    softcap: bool
    dropout: bool
    deterministic: bool  # False for the forward


_EITHER = (False, True)
KEYS = tuple(
    Key(kernel, kind, softcap, dropout, deterministic)
    for kernel in KERNELS
    for kind in KINDS
    for softcap in _EITHER
    for dropout in _EITHER
    for deterministic in (_EITHER if kernel == "backward" else (False,))
)


@dataclass(frozen=True)
class Measured:
    """workload: as benchmarks.grids names it; "dropout" where its probability was not recorded. tflops: median over the
    rounds. result: a file of benchmarks/results."""

    workload: str
    tflops: float
    commit: str
    result: str


@dataclass(frozen=True)
class Row:
    """One row of the file; None for what it leaves out."""

    kernel: str
    head_dim: int
    head_dim_v: int
    kinds: tuple[str, ...]
    seqlen: int | None
    softcap: bool | None
    dropout: bool | None
    deterministic: bool | None
    shape: Shape
    measured: tuple[Measured, ...] | None = None

    def __str__(self) -> str:
        """ "forward D64 full,causal to 4096, no softcap, no dropout"."""
        dims = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        words = [f"{self.kernel} D{dims} {','.join(self.kinds)}" + (f" to {self.seqlen}" if self.seqlen else "")]
        flags = {name: getattr(self, name) for name in _FLAGS}
        words += [name if value else f"no {name}" for name, value in flags.items() if value is not None]
        return ", ".join(words)

    @property
    def sizes(self) -> tuple[int, int, float]:
        """head_dim, head_dim_v and length up to which it holds."""
        return self.head_dim, self.head_dim_v, math.inf if self.seqlen is None else self.seqlen

    def decides(self) -> Iterator[Key]:
        """The keys of all problems that it is for."""
        flags = self.softcap, self.dropout, self.deterministic
        for key in KEYS:
            allowed = all(wanted is None or wanted == x for wanted, x in zip(flags, key[2:], strict=True))
            if key.kernel == self.kernel and key.kind in self.kinds and allowed:
                yield key


_FLAGS = ("softcap", "dropout", "deterministic")
_SIZES = ("head_dim", "head_dim_v", "seqlen")


def kind_of(window: Window) -> str:
    """Which of KINDS a window is."""
    return KINDS[(window.right is not None) + 2 * (window.left is not None)]


def window_of(kind: str, left: int = 1024) -> Window:
    """A window of that kind, its right edge causal."""
    number = KINDS.index(kind)
    return Window(left if number & 2 else None, 0 if number & 1 else None)


def key_of(kernel: str, problem: AttentionProblem) -> Key:
    """A problem's key."""
    deterministic = kernel == "backward" and problem.deterministic
    dropout = problem.dropout_threshold > 0
    return Key(kernel, kind_of(problem.window), problem.softcap is not None, dropout, deterministic)


class Table:
    """The rows, and which of them decides. Raises ValueError that names two rows for the same, or what has no row."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = tuple(rows)
        found: dict[Key, dict[tuple[int, int, float], Row]] = {}
        for row in self.rows:
            for key in row.decides():
                other = found.setdefault(key, {}).setdefault(row.sizes, row)
                if other is not row:
                    raise ValueError(f"two rows for the same problems: {other}; {row}")
        self._cells = {key: sorted(cells.items()) for key, cells in found.items()}
        for key in KEYS:
            sizes = [size for size, _ in self._cells.get(key, [])]
            for dim in sorted({LARGEST, *(dim for dim, _, _ in sizes)}):
                if (dim, dim, math.inf) not in sizes:
                    raise ValueError(f"no row for {key} that has head_dim and head_dim_v {dim} and no seqlen")

    def find(self, kernel: str, problem: AttentionProblem) -> Row:
        """The row of the least head_dim, then head_dim_v, then seqlen that the problem does not exceed.

        head_dim_v may be head_dim at most, that 256.
        """
        length = problem.seqlen_k if kernel == "forward" else problem.seqlen_q
        for (head_dim, head_dim_v, seqlen), row in self._cells[key_of(kernel, problem)]:
            if problem.head_dim <= head_dim and problem.head_dim_v <= head_dim_v and length <= seqlen:
                return row
        raise ValueError(f"head_dim, head_dim_v: need {LARGEST} at most, got {problem.head_dim}, {problem.head_dim_v}")

    def over(self, row: Row, key: Key) -> int:
        """The length that problems of that key exceed where this row decides; 0 if any length will do."""
        lengths = [seqlen for (*dims, seqlen), _ in self._cells[key] if tuple(dims) == row.sizes[:2]]
        return int(max((x for x in lengths if x < row.sizes[2]), default=0))

    def lengths(self) -> tuple[int, ...]:
        """Of each class of lengths that rows tell apart, the largest; for the last one, one more than the others."""
        told = sorted({int(size) for cell in self._cells.values() for (*_, size), _ in cell if size != math.inf})
        return (*told, told[-1] + 1) if told else (1,)


# --- the file ---------------------------------------------------------------------------------------------------------


@functools.cache
def table() -> Table:
    """The table that is shipped."""
    return parse(PATH.read_text(encoding="utf-8"), PATH.name)


def parse(text: str, source: str) -> Table:
    """The table in a file's text. Raises ValueError that names the source, the row and the field."""
    try:
        value = json.loads(text)
        if not isinstance(value, dict) or set(value) != set(KERNELS):
            raise ValueError(f"needs an object of {' and '.join(KERNELS)}")
        return Table([_row(kernel, number, row) for kernel in KERNELS for number, row in enumerate(value[kernel])])
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def _row(kernel: str, number: int, value: Any) -> Row:
    if not isinstance(value, dict):
        raise ValueError(f"{kernel} row {number}: needs an object, got {value!r}")
    where = f"{kernel} row {number} ({json.dumps({k: v for k, v in value.items() if k != 'measured'})})"
    flags = _FLAGS if kernel == "backward" else _FLAGS[:2]
    needed = {"head_dim": int, "head_dim_v": int, "kinds": list, "shape": dict}
    optional = {"seqlen": int} | dict.fromkeys(flags, bool)
    _check(value, needed, optional, where, allowed=("measured",))
    kinds = tuple(value["kinds"])
    if not kinds or any(kinds.count(kind) != 1 or kind not in KINDS for kind in kinds):
        raise ValueError(f"{where}: kinds: needs some of {', '.join(KINDS)}, each once, got {list(kinds)}")
    for name in _SIZES:
        if value.get(name, 1) < 1:
            raise ValueError(f"{where}: {name}: needs at least 1, got {value[name]}")
    if value["head_dim_v"] > value["head_dim"] or value["head_dim"] > LARGEST:
        raise ValueError(f"{where}: needs head_dim_v at most head_dim, and that at most {LARGEST}")
    shape = SHAPES[kernel]
    _check(value["shape"], get_type_hints(shape), {}, f"{where}: shape")
    given: dict[str, Any] = {name: value.get(name) for name in (*_SIZES, *_FLAGS)}
    return Row(
        kernel, kinds=kinds, shape=shape(**value["shape"]), measured=_measured(value.get("measured"), where), **given
    )


def _measured(value: Any, where: str) -> tuple[Measured, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise ValueError(f"{where}: measured: needs null or a list, got {value!r}")
    types: dict[str, Any] = dict.fromkeys(("workload", "commit", "result"), str) | {"tflops": (int, float)}
    for item in value:
        _check(item, types, {}, f"{where}: measured")
    return tuple(Measured(**item) for item in value)


def _check(
    value: Any, needed: Mapping[str, Any], optional: Mapping[str, Any], where: str, allowed: Sequence[str] = ()
) -> None:
    """That an object has its fields, of their types, and no other."""
    if not isinstance(value, dict):
        raise ValueError(f"{where}: needs an object, got {value!r}")
    known = {**needed, **optional}
    for name, item in value.items():
        if name not in known and name not in allowed:
            raise ValueError(f"{where}: unknown field {name!r}; known: {', '.join([*known, *allowed])}")
        wanted = known.get(name, object)
        if not isinstance(item, wanted) or (isinstance(item, bool) and wanted is not bool and wanted is not object):
            raise ValueError(f"{where}: {name}: got {item!r}")
    for name in needed:
        if name not in value:
            raise ValueError(f"{where}: {name} is missing")


def dump(found: Table) -> str:
    """The file's text: parse's inverse, a line for each row and each of its figures."""
    parts = []
    for kernel in KERNELS:
        lines = [_line(row) for row in found.rows if row.kernel == kernel]
        parts.append(f' "{kernel}": [\n' + ",\n".join(lines) + "\n ]")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _line(row: Row) -> str:
    flags = {name: getattr(row, name) for name in ("seqlen", *_FLAGS) if getattr(row, name) is not None}
    value = {"head_dim": row.head_dim, "head_dim_v": row.head_dim_v, "kinds": row.kinds, **flags}
    head = json.dumps({**value, "shape": row.shape._asdict()})[:-1]
    if row.measured is None:
        return f'  {head}, "measured": null}}'
    figures = [
        "    " + json.dumps({item.name: getattr(x, item.name) for item in fields(Measured)}) for x in row.measured
    ]
    return f'  {head}, "measured": [\n' + ",\n".join(figures) + "\n  ]}"
