"""From a problem and the shared memory of a device to kernel configurations: pure functions, no GPU touched.

Each field becomes a member of `struct Config` in front of the kernels (source.py). Compile-time are dtypes, head
dimensions (rounded up), the shape of a tile, and whether scores are more than q . k; the rest is decided at run time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from attnlib.backend import Target
from attnlib.problem import AttentionProblem

THREADS = 128
SHORT = 4  # queries for which reading the keys is everything
KILLERS = {  # faults in the order of `Fault` in csrc/cuda/params_simt.cuh, and a check that is likely to see each
    "no_rescale": "forward/ramp_up", "ignore_window_left": "visible/window",
    "drop_last_partial_key_block": "visible/plain", "head_mod": "forward/gqa",
    "skip_delta": "backward/plain", "dropout_ignores_head": "dropout/mask-0.5",
    "leak_past_kv_len": "visible/lengths", "dv_scale": "backward/plain", "scale": "forward/plain",
}  # fmt: skip
FAULTS = ("", *KILLERS)

# Bytes of shared memory a block may have, for devices that are only named; what is not listed has the first figure.
_SHARED = {
    "sm_70": 96, "sm_72": 96, "sm_75": 64, "sm_80": 163, "sm_86": 99, "sm_87": 163, "sm_89": 99, "sm_90": 227,
    "sm_100": 227, "sm_103": 227, "sm_110": 227, "sm_120": 99, "sm_121": 99,
}  # fmt: skip


@dataclass(frozen=True)
class Rows:
    """What the kernels that take rows one by one are compiled for."""

    element: torch.dtype
    fault: int
    blocks: int  # that a multiprocessor should hold


@dataclass(frozen=True)
class Shape(Rows):
    """A tile kernel: see `Tile` in csrc/cuda/tile_simt.cuh. `slice` is numbers in one of the two buffers."""

    full: bool
    head_dim: int
    head_dim_v: int
    has_bias: bool
    bias_element: torch.dtype
    paged: bool
    vectors: bool
    exact: bool
    lanes: int
    rows: int
    tile_columns: int
    depth: int
    step_k: int
    step_v: int
    slice: int
    unroll: int

    @property
    def number_bytes(self) -> int:
        return 8 if self.element == torch.float64 else 4

    @property
    def tile_rows(self) -> int:
        return THREADS // self.lanes * self.rows

    def shared_bytes(self, backward: bool) -> int:
        """Shared memory of one block; the paged backward keeps one int a thread beside its buffers."""
        row = self.head_dim + self.tile_columns + (self.head_dim_v if backward else 0)
        found = 4 * THREADS if backward and self.paged else 0
        return (self.tile_rows * row + 2 * self.slice) * self.number_bytes + found


class TooLarge(ValueError):
    """A tile needs more bytes of shared memory than a block may have."""

    def __init__(self, needs: int, limit: int) -> None:
        super().__init__(f"shared memory: needs {needs} bytes, got {limit}")
        self.needs, self.limit = needs, limit


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def shared_limit(target: Target) -> int:
    """Bytes of shared memory a block may have on target."""
    if target.resources is not None:
        return target.resources.shared_memory_per_block
    if target.kind == "rocm":
        return 64 << 10
    return _SHARED.get(target.arch, 48) << 10


def features(problem: AttentionProblem, fault: str = "") -> dict[str, Any]:
    """What forward and backward share."""
    asked = (problem.bias, problem.softcap, problem.block_mask)
    full = any(x is not None for x in asked) or problem.mask or problem.alibi or problem.dropout_threshold > 0
    return {
        "element": problem.dtype,
        "full": full,
        "fault": FAULTS.index(fault),
        "head_dim": _up(problem.head_dim, 32),
        "head_dim_v": _up(problem.head_dim_v, 32),
        "has_bias": problem.bias is not None,
        "bias_element": problem.bias or torch.float32,
        "paged": problem.page_size is not None,
        "exact": problem.head_dim % 32 == 0 and problem.head_dim_v % 32 == 0,
        "vectors": problem.aligned and problem.head_dim % 4 == 0 and problem.head_dim_v % 4 == 0,
    }


def rows_needed(problem: AttentionProblem) -> int:
    """Queries in a tile that are worth having, rounded up to a power of two: 128 for everything longer."""
    return min(128, 1 << max(0, problem.seqlen_q - 1).bit_length())


def _shapes(problem: AttentionProblem, backward: bool) -> Iterator[dict[str, int]]:
    """Tiles by preference: many rows a thread, long slices, then whatever fits."""
    dim = max(problem.head_dim_v, problem.head_dim if backward else 0)
    double = problem.dtype == torch.float64
    lanes = 8 if dim <= 96 else 16 if dim <= 192 else 32
    needed = rows_needed(problem) if not backward else 128
    if needed <= SHORT:
        lanes = 32
    most = 4 if double or backward else 8
    if backward and dim > 256:
        most = 2
    columns = 64 if lanes == 8 or (double and backward) else 128
    # Slices that pass through registers are short where tiles are wide.
    depths = (32, 16) if lanes == 8 or (problem.dtype == torch.float32 and needed > SHORT) else (16,)
    for rows in (8, 4, 2, 1):
        if rows > most or (rows > 1 and THREADS // lanes * rows >= 2 * needed):
            continue
        for tile_columns in (columns, columns // 2):
            for depth in depths:
                if tile_columns >= max(lanes, 32):
                    yield {"lanes": lanes, "rows": rows, "tile_columns": tile_columns, "depth": depth}


def _step(shape: Mapping[str, int], wide: int, width: int) -> int:
    """Rows of a slice of a product, about as large as a slice of a dot."""
    step = shape["tile_columns"]
    while step > width and step * wide > shape["tile_columns"] * (shape["depth"] + width):
        step //= 2
    return step


def tile(
    problem: AttentionProblem, target: Target, backward: bool, fault: str = "", wanted: Mapping[str, Any] | None = None
) -> Shape:
    """The first shape that fits. wanted overrides fields; ValueError or TooLarge if the result does not fit."""
    limit, common = shared_limit(target), features(problem, fault)
    width = 2 if problem.dtype == torch.float64 else 4
    needs = 0
    for choice in _shapes(problem, backward):
        # What else a score takes is registers and code, never another tile: lse has the same bits with dropout.
        unroll = 1 if backward or common["full"] or rows_needed(problem) <= SHORT else 4
        shape = {"blocks": 2, "unroll": unroll} | choice | dict(wanted or {})
        held = shape["rows"] * shape["tile_columns"] // shape["lanes"]
        if held > 64 or shape["tile_columns"] < shape["lanes"]:
            raise ValueError(f"tile: needs 1 to 64 scores a thread, got {held}")
        wide, wide_v = (_up(common[name], 4 * shape["lanes"]) for name in ("head_dim", "head_dim_v"))
        step_k, step_v = _step(shape, wide, width), _step(shape, wide_v, width)
        slices = [shape["tile_columns"] * (shape["depth"] + width), step_v * wide_v]
        if backward:
            slices.append(step_k * wide)
        found = Shape(**common, **shape, step_k=step_k, step_v=step_v, slice=max(slices))
        needs = found.shared_bytes(backward)
        if needs <= limit:
            return found
    raise TooLarge(needs, limit)


def check_override(name: str, value: Any) -> None:
    """Raises ValueError for a tile that the kernels cannot be compiled for."""
    allowed = {"lanes": (8, 16, 32), "rows": (1, 2, 4, 8), "tile_columns": (32, 64, 128), "depth": (8, 16, 32),
               "blocks": (1, 2, 3, 4), "unroll": (1, 2, 4, 8)}  # fmt: skip
    if name not in allowed:
        raise ValueError(f"config: needs {', '.join(allowed)}, num_splits or fault, got {name!r}")
    if type(value) is not int or value not in allowed[name]:
        raise ValueError(f"{name}: needs one of {', '.join(map(str, allowed[name]))}, got {value!r}")


def rows_of(shape: Shape) -> Rows:
    """The configuration of the small kernels that go with a tile kernel."""
    return Rows(shape.element, shape.fault, 1)


def splits(problem: AttentionProblem, target: Target, shape: Shape) -> int:
    """Parts of the keys: a short query list still fills the device, and heads read the same keys at the same time."""
    if target.resources is None or problem.seqlen_q > 128:
        return 1
    tiles, units = query_grid(problem, shape)
    blocks, multiprocessors = max(1, tiles * units), target.resources.multiprocessors
    found = min(2 * multiprocessors // blocks, problem.seqlen_k // (2 * shape.tile_columns))
    if rows_needed(problem) <= SHORT:
        found = max(found, min(128 * multiprocessors // blocks, problem.seqlen_k // 512))
    return max(1, min(found, 64))


def query_grid(problem: AttentionProblem, shape: Shape) -> tuple[int, int]:
    """Tiles of queries, and what each is computed for: heads of a sequence or, packed, heads."""
    if problem.packed:
        return problem.total_q // shape.tile_rows + problem.batch + 1, problem.num_heads_q
    return -(-problem.seqlen_q // shape.tile_rows), problem.num_heads_q * problem.batch


def key_grid(problem: AttentionProblem, pages: int, shape: Shape) -> tuple[int, int]:
    """The same for keys; pages: of the cache, where there are any."""
    if problem.page_size is not None:
        return pages * -(-problem.page_size // shape.tile_rows), problem.num_heads_kv
    if problem.packed:
        return problem.total_k // shape.tile_rows + problem.batch + 1, problem.num_heads_kv
    return -(-problem.seqlen_k // shape.tile_rows), problem.num_heads_kv * problem.batch
