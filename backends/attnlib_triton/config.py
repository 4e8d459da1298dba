"""From a problem and an architecture to kernel configurations: pure functions, no GPU touched, no Triton imported.

The frozen dataclasses here are the kernels' only compile-time argument. Lengths, batch, head counts and scalars never
are. `Launch` holds what the compiler is told beside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from attnlib.problem import AttentionProblem

from . import amd
from .archs import Arch, interpreted

GRADIENTS = ("query_gradient", "key_gradient", "bias_gradient")


@dataclass(frozen=True)
class Features:
    """What forward and backward share of a problem.

    k_first, k_rest, v_first, v_rest: widths of the chunks that a row of keys or values is held in, the second 0 where
    there is one. single: operands are float32. precision: of float32 products. exact: q.k has plain
    float32 products whatever that is.
    """

    interpret: bool
    single: bool
    precision: str
    exact: bool
    head_dim: int
    head_dim_v: int
    k_first: int
    k_rest: int
    v_first: int
    v_rest: int
    packed: bool
    paged: bool
    lengths: bool
    append: bool
    left: bool
    right: bool
    top_left: bool
    softcap: bool
    bias: bool
    mask: bool
    blocks: bool
    alibi: bool
    dropout: bool
    pack: bool
    maps: bool  # the copy engine fetches tiles
    ptx: bool  # a kernel may hold PTX; false where there is no use for it
    block_m: int
    block_n: int

    @property
    def even(self) -> bool:
        """Whether all that lies outside of a sequence lies outside of its operand."""
        return not (self.packed or self.lengths or self.paged or self.left)

    @property
    def natural(self) -> bool:
        """Whether scores are natural and not in units of log 2."""
        return self.single or self.statistics

    @property
    def statistics(self) -> bool:
        """Whether the backward needs the forward's m and l: beside a large bias log(l) is lost in lse."""
        return self.bias or self.alibi

    @property
    def raw(self) -> bool:
        """Whether nothing but the scale stands between q.k and the exponential."""
        return not (self.natural or self.softcap or self.mask or self.blocks)

    @property
    def phases(self) -> bool:
        """Whether tiles that are visible as a whole are worth a loop of their own."""
        return not (self.statistics or self.mask or self.blocks or self.left)


@dataclass(frozen=True)
class ForwardConfig(Features):
    sinks: bool
    stats: bool
    split: bool = False
    flip: bool = False  # the scale is negative, and q gets its sign


@dataclass(frozen=True)
class GradientConfig(Features):
    """query, keys, values: which of dq, dk, dv are stored. bias_store: dbias is, by the kernel for dq.

    sum_rows, sum_columns: the bias has one row, one column.
    """

    query: bool = True
    keys: bool = True
    values: bool = True
    bias_store: bool = False
    sum_rows: bool = False
    sum_columns: bool = False


@dataclass(frozen=True)
class RowsConfig(Features):
    """The small kernels: rows a program takes; scan: elements read at a time; dlse: whether one is given."""

    rows: int = 16
    scan: int = 1024
    sinks: bool = False
    dlse: bool = False


@dataclass(frozen=True)
class Launch:
    """Warps a program has, stages of its pipeline, registers a thread may have on NVIDIA (0: as many as there are)."""

    warps: int
    stages: int
    registers: int = 0


def chunks(dim: int) -> tuple[int, int]:
    """Powers of two, at least 16, that hold dim elements with little waste: 80 = 64 + 16, 192 = 128 + 64, 112 = 128."""
    whole = 1 << max(4, dim.bit_length() - 1)
    if dim <= whole:
        return whole, 0
    rest = 1 << max(4, (dim - whole - 1).bit_length())
    return (2 * whole, 0) if rest >= whole else (whole, rest)


def width(dim: int) -> int:
    """Elements of a row as it is held."""
    return sum(chunks(dim))


# --- choices ----------------------------------------------------------------------------------------------------------


def packable(problem: AttentionProblem) -> bool:
    """Whether the heads of a group may share a tile of queries: dropout draws for two rows of one head at a time."""
    return 1 < problem.group <= 64 and problem.dropout_threshold == 0


def pack(problem: AttentionProblem) -> bool:
    """Whether they do: short query lists."""
    return packable(problem) and problem.seqlen_q * problem.group <= 64


def rows(problem: AttentionProblem) -> int:
    """Rows a tile needs at most: 16, 32, 64, or 128 for everything longer."""
    longest = problem.seqlen_q * (problem.group if pack(problem) else 1)
    return next(size for size in (16, 32, 64, 128) if longest <= size or size == 128)


def precision(problem: AttentionProblem, arch: Arch) -> str:
    """How float32 is multiplied: as it is, or (on NVIDIA) as three products of tf32, which err no more."""
    if problem.dtype != torch.float32 or arch.kind in ("interpreter", "rdna"):
        return "ieee"
    if arch.amd:
        return "tf32" if problem.tf32 and arch.name == "gfx942" else "ieee"
    return "tf32" if problem.tf32 else "tf32x3"


def exact(problem: AttentionProblem, arch: Arch) -> bool:
    """Whether q.k is not made of tf32 products: transposed they are summed in another order, and exp magnifies that."""
    return problem.dtype == torch.float32 and arch.kind in ("interpreter", "nvidia", "rdna") and not problem.tf32


def features(problem: AttentionProblem, arch: Arch) -> dict[str, Any]:
    """The fields of Features, less the tile."""
    left, right = problem.window
    return {
        "interpret": interpreted(),
        "single": problem.dtype == torch.float32,
        "precision": precision(problem, arch),
        "exact": exact(problem, arch),
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v,
        **dict(zip(("k_first", "k_rest"), chunks(problem.head_dim), strict=True)),
        **dict(zip(("v_first", "v_rest"), chunks(problem.head_dim_v), strict=True)),
        "packed": problem.packed,
        "paged": problem.page_size is not None,
        "lengths": problem.lengths or problem.append,
        "append": problem.append,
        "left": left is not None,
        "right": right is not None,
        "top_left": problem.top_left,
        "softcap": problem.softcap is not None,
        "bias": problem.bias is not None,
        "mask": problem.mask,
        "blocks": problem.block_mask is not None,
        "alibi": problem.alibi,
        "dropout": problem.dropout_threshold > 0,
        "pack": False,
        "ptx": arch.kind == "nvidia" and problem.dropout_threshold > 0,
        "maps": False,
    }


def mappable(problem: AttentionProblem, arch: Arch) -> bool:
    """Whether the copy engine of sm_90 can fetch tiles: rows as wide as they are held, and tiles to be seen whole."""
    plain = problem.bias is None and not (problem.mask or problem.alibi) and problem.block_mask is None
    whole = all(chunks(dim) == (dim, 0) for dim in (problem.head_dim, problem.head_dim_v))
    dense = not problem.packed and problem.page_size is None and problem.window.left is None
    return arch.name == "sm_90" and problem.dtype.itemsize == 2 and plain and whole and dense


class Shape(NamedTuple):
    """A tile and how it is worked on, as in Features and Launch."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    registers: int = 0
    maps: bool = False


# On sm_90 with maps, for the larger head_dim up to so many: a window without and with an upper end. The fastest, or
# within 1% of it, on an H200 in bfloat16 with 4096 keys and head_dim 64 and 128: benchmarks/results/triton_sweep.json
_MAPPED = {
    ("forward", 64): (Shape(64, 128, 4, 3), Shape(64, 64, 4, 3)),
    ("forward", 128): (Shape(64, 64, 4, 3), Shape(64, 64, 4, 3)),
    ("query_gradient", 64): (Shape(64, 64, 4, 3), Shape(64, 64, 4, 3)),
    ("query_gradient", 128): (Shape(128, 64, 8, 3), Shape(128, 64, 8, 3)),
    ("key_gradient", 64): (Shape(64, 64, 4, 3), Shape(32, 64, 4, 3, registers=168)),
    ("key_gradient", 128): (Shape(64, 64, 4, 2), Shape(32, 64, 4, 3)),
}


def _mapped_shapes(problem: AttentionProblem, arch: Arch, kernel: str) -> list[Shape]:
    """Shapes with maps, where those are possible and were found to be faster."""
    if not mappable(problem, arch) or (kernel == "forward" and rows(problem) < 128):
        return []
    dim = max(problem.head_dim, problem.head_dim_v)
    found = _MAPPED.get((kernel, 64 if dim <= 64 else dim))
    if found is None or (kernel == "forward" and dim <= 64 and problem.dropout_threshold > 0):  # slower with them
        return []
    shape = found[problem.window.right is not None]._replace(maps=True)
    plain = problem.softcap is None and problem.dropout_threshold == 0  # else fewer registers were not tried
    return [shape if plain else shape._replace(registers=0)]


def _forward_shapes(problem: AttentionProblem, arch: Arch) -> list[tuple[Any, ...]]:
    """Shapes by preference, as the first fields of Shape; the first that fits into shared memory is taken."""
    size = rows(problem)
    dim = max(width(problem.head_dim), width(problem.head_dim_v))
    single = problem.dtype == torch.float32
    if arch.kind == "interpreter":
        return [(min(size, 64), 128, 4, 1)]
    if arch.amd:
        return [amd.tile(problem, arch, "forward", dim, size)]
    if size < 128:
        keys = 32 if single or dim > 128 else 64
        return [(size, n, 4, s) for n in (keys, 32) for s in (3, 2, 1)]
    if single:
        return [(64, 32, 4, s) for s in (2, 1)] + [(32, 32, 4, 1)]
    small_tiles = [(64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 1)]
    if dim <= 64:  # measured on an H200, as what follows for 128 is
        wide = problem.window.right is None or problem.dropout_threshold > 0
        first = (64, 128, 4, 3) if wide else (128, 64, 4, 3)
        return [first, (128, 64, 4, 3), (128, 64, 4, 2), *small_tiles]
    if dim <= 128:
        return [(128, 64, 8, 3), (128, 64, 8, 2), *small_tiles]
    return [(128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (64, 32, 4, 1), (32, 32, 4, 1)]


def _gradient_shapes(problem: AttentionProblem, arch: Arch, kernel: str) -> list[tuple[Any, ...]]:
    """As _forward_shapes, for "query_gradient" (whose programs own queries), "key_gradient" and "bias_gradient"."""
    dim = max(width(problem.head_dim), width(problem.head_dim_v))
    single = problem.dtype == torch.float32
    if arch.kind == "interpreter":
        return [(128, 64, 4, 1) if kernel == "key_gradient" else (64, 128, 4, 1)]
    if arch.amd:
        return [amd.tile(problem, arch, kernel, dim)]
    if single:
        return [(32, 32, 4, s) for s in (2, 1)]
    if kernel == "bias_gradient":
        return [(64, 64, 4, 1), (64, 32, 4, 1), (32, 32, 4, 1)]
    queries = kernel == "query_gradient"
    if dim <= 64:  # measured on an H200, as what follows for 128 is
        first = [(64, 64, 4, 3), (64, 64, 4, 2)] if queries else [(32, 128, 4, 3), (32, 128, 4, 2), (32, 64, 4, 2)]
    elif dim <= 128:
        first = [(64, 64, 4, 2), (64, 64, 4, 1)] if queries else [(32, 64, 4, 3), (32, 64, 4, 2)]
    else:
        first = [(m, n, 8, s) for m, n in [(64, 32) if queries else (32, 64)] for s in (2, 1)]
    return [*first, (32, 32, 4, 1)]


def shared_bytes(problem: AttentionProblem, arch: Arch, shape: Shape, gradient: bool = False) -> int:
    """About what a tile shape asks of shared memory: the tile of queries, and the keys of every stage."""
    m, n, _, stages = shape[:4]
    size = problem.dtype.itemsize
    if arch.amd:  # tiles take turns; at most a product's two operands are there at a time
        return (m + n) * max(width(problem.head_dim), width(problem.head_dim_v)) * size
    if exact(problem, arch):  # slices of q and k, and no stages; dO and v, or v alone, as two tf32 numbers each
        if gradient:
            return 3 * max(m, n) * max(width(problem.head_dim), width(problem.head_dim_v)) * size
        return 2 * n * width(problem.head_dim_v) * size + max(2 * m * n, 32 * (m + n)) * size
    row = (width(problem.head_dim) + width(problem.head_dim_v)) * size
    fixed = m * width(problem.head_dim) * size * (2 if problem.dtype == torch.float32 else 1)
    # a bias is fetched ahead as keys are
    bias = 0 if problem.bias is None else max(1, stages - 1) * m * n * problem.bias.itemsize
    if gradient:
        return max(m, n) * row + stages * min(m, n) * row + 2 * m * n * size + bias
    return fixed + bias + stages * n * row + (m * n * size if problem.dropout_threshold else 0)


def _chosen(problem: AttentionProblem, arch: Arch, kernel: str, shape: Mapping[str, Any] | None) -> Shape:
    wanted = dict(shape or {})
    unknown = sorted(set(wanted) - set(Shape._fields))
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: needs one of {', '.join(Shape._fields)}")
    gradient = kernel != "forward"
    shapes = _gradient_shapes(problem, arch, kernel) if gradient else _forward_shapes(problem, arch)
    if wanted.get("maps", True):
        shapes = [*_mapped_shapes(problem, arch, kernel), *shapes]
    for each in shapes:
        found = Shape(*each)._replace(**wanted)
        _check(found)
        if found.registers and arch.amd:
            raise ValueError("registers: needs 0 on AMD")
        if found.maps and not mappable(problem, arch):
            raise ValueError("maps: needs sm_90 and a problem whose tiles the copy engine can fetch")
        got = shared_bytes(problem, arch, found, gradient)
        if got <= arch.shared_bytes:
            return found
    raise ValueError(f"shared memory: needs at most {arch.shared_bytes} bytes, got {got}")


def _check(shape: Shape) -> None:
    for name, value, least in zip(("block_m", "block_n", "warps", "stages"), shape, (16, 32, 1, 1), strict=False):
        fits = isinstance(value, int) and value >= least and (name == "stages" or value & (value - 1) == 0)
        if not fits:
            raise ValueError(f"{name}: needs a power of two of at least {least}, got {value!r}")
    if not (isinstance(shape.registers, int) and 0 <= shape.registers <= 255):
        raise ValueError(f"registers: needs 0 to 255, got {shape.registers!r}")
    if not isinstance(shape.maps, bool):
        raise ValueError(f"maps: needs True or False, got {shape.maps!r}")


def _tile(found: Shape) -> dict[str, Any]:
    return {"maps": found.maps, "block_m": found.block_m, "block_n": found.block_n}


def forward(
    problem: AttentionProblem, arch: Arch, shape: Mapping[str, Any] | None = None
) -> tuple[ForwardConfig, Launch]:
    """The forward's configuration. shape overrides fields of Shape; ValueError if it does not fit."""
    found = _chosen(problem, arch, "forward", shape)
    packs = pack(problem) and problem.group <= found.block_m
    common = features(problem, arch) | {"pack": packs} | _tile(found)
    config = ForwardConfig(**common, sinks=problem.sinks is not None, stats=problem.needs_stats)
    return config, Launch(found.warps, found.stages, found.registers)


def gradient(
    problem: AttentionProblem, arch: Arch, kernel: str, shape: Mapping[str, Any] | None = None
) -> tuple[GradientConfig, Launch]:
    """The configuration of query_gradient, key_gradient or bias_gradient; what they store is decided by the plan."""
    found = _chosen(problem, arch, kernel, shape)
    config = GradientConfig(**features(problem, arch) | _tile(found))
    return config, Launch(found.warps, found.stages, found.registers)


def small(problem: AttentionProblem, arch: Arch, kernel: str, dlse: bool = False) -> tuple[RowsConfig, Launch]:
    """The configuration of rows, combine, append, page_gradient or sink_gradient: fields they don't read are fixed."""
    used = {
        "rows": "single head_dim_v v_first v_rest packed paged lengths append left top_left bias alibi",
        "combine": "single head_dim_v v_first v_rest packed bias alibi",
        "append": "head_dim head_dim_v k_first k_rest v_first v_rest paged",
        "page_gradient": "",
        "sink_gradient": "packed",
    }[kernel].split()
    all_fields = features(problem, arch)
    common = {name: value if name in used else type(value)() for name, value in all_fields.items()}
    common |= {"interpret": all_fields["interpret"], "block_m": 0, "block_n": 0}
    longest = max(width(problem.head_dim), width(problem.head_dim_v))
    size = 16 if kernel in ("append", "page_gradient") or longest > 128 else 32
    if kernel == "combine":
        size = 4 if not interpreted() else 32
    sinks = problem.sinks is not None and kernel == "combine"
    return RowsConfig(**common, rows=size, sinks=sinks, dlse=dlse), Launch(4, 1)


def splits(problem: AttentionProblem, arch: Arch, config: ForwardConfig) -> int:
    """Shares of the keys, so that a short query list still fills the device."""
    if problem.needs_stats or problem.seqlen_k < 4 * config.block_n:
        return 1
    heads = problem.num_heads_kv if config.pack else problem.num_heads_q
    per_tile = config.block_m // problem.group if config.pack else config.block_m
    tiles = -(-problem.seqlen_q // per_tile) * heads * problem.batch
    slots = arch.multiprocessors * 2
    if arch.kind == "interpreter":
        slots = 64  # so that small checks reach the kernel that joins parts
    if tiles * 5 > slots * 4:
        return 1
    return max(1, min(slots // max(tiles, 1), problem.seqlen_k // (2 * config.block_n), 128))


def sections(problem: AttentionProblem, arch: Arch) -> int:
    """Heads whose tiles run side by side: as many as keep their keys and values in a third of the cache."""
    each = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    return max(1, min(1 << 20, arch.l2_bytes // 3 // max(each, 1)) * problem.group)
