"""From a problem and an architecture to kernel configurations: pure functions, no GPU touched.

`forward`, `backward` and the small kernels' configurations are frozen dataclasses whose fields become `struct Config`
of csrc/cuda. Lengths, batch, head counts and scalars are never compile-time. `kernels` lists every kernel that a plan
may launch, for `attnlib compile` and ci/compile_matrix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnlib.problem import AttentionProblem

from . import device, params
from .spec import KernelSpec

FAULTS = (
    "", "no_rescale", "ignore_window_left", "drop_last_partial_key_block", "head_mod", "skip_delta",
    "dropout_ignores_head", "leak_past_kv_len", "dv_scale", "scale", "no_recompute",
)  # fmt: skip


def padded(dim: int) -> int:
    """Elements of a row in shared memory."""
    return max(32, -(-dim // 32) * 32)


@dataclass(frozen=True)
class Features:
    """What forward and backward share of a problem."""

    element: torch.dtype
    head_dim: int
    head_dim_v: int
    bias_element: torch.dtype
    tf32: bool
    aligned: bool
    packed: bool
    lengths: bool
    paged: bool
    left: bool
    right: bool
    top_left: bool
    softcap: bool
    has_bias: bool
    mask: bool
    alibi: bool
    block_mask: bool
    dropout: bool
    fault: int


@dataclass(frozen=True)
class ForwardConfig(Features):
    """Tile shape of the forward; see csrc/cuda/forward_sm80.cuh."""

    sink_element: torch.dtype
    has_sinks: bool
    stats: bool
    m_tiles: int
    warps: int
    warps_n: int
    block_k: int
    stages: int
    pack: bool
    split: bool
    maximum: bool
    q_in_registers: bool
    draw_first: bool

    entry = "forward_sm80"

    @property
    def block_q(self) -> int:
        return 16 * self.m_tiles * (self.warps // self.warps_n)

    @property
    def shared_bytes(self) -> int:
        size, d, dv = self.element.itemsize, padded(self.head_dim), padded(self.head_dim_v)
        keys = self.stages * self.block_k * (d + dv) * size
        exchange = (self.block_q * self.block_k * size + 8 * self.block_q + 4 * self.warps) if self.warps_n > 1 else 0
        return self.block_q * max(d, dv) * size + keys + (2048 if self.block_mask else 0) + exchange + 48


@dataclass(frozen=True)
class WarpgroupConfig(Features):
    """Tile shape and schedule of the wgmma forward; see csrc/cuda/forward_sm90.cuh.

    warpgroups: those that compute, 64 rows each. columns_v: width of O's product. dynamic: tiles go to whoever asks
    first. unroll: places in the rings are known at compile time. maximum: no tile does without.
    """

    sink_element: torch.dtype
    has_sinks: bool
    warpgroups: int
    block_k: int
    stages: int
    q_buffers: int
    q_in_registers: bool
    unroll: bool
    dynamic: bool
    maximum: bool
    columns_v: int
    pack: bool = False
    warps_n: int = 1

    entry = "forward_sm90"

    @property
    def warps(self) -> int:
        return 4 * (self.warpgroups + 1)

    @property
    def block_q(self) -> int:
        return 64 * self.warpgroups

    @property
    def shared_bytes(self) -> int:
        panels, panels_v = -(-self.head_dim // 64), -(-self.head_dim_v // 64)
        rows = self.q_buffers * self.block_q * panels + self.stages * self.block_k * (panels + panels_v)
        barriers = 16 * self.q_buffers + 32 * self.stages
        return rows * 128 + -(-barriers // 16) * 16 + 48 * self.q_buffers


@dataclass(frozen=True)
class BackwardConfig(Features):
    """Tile shape of the backward; see csrc/cuda/backward_sm80.cuh."""

    bias_gradient: bool
    deterministic: bool
    m_tiles: int
    warps_k: int
    warps_q: int
    block_q: int
    dq_warps: int
    stages: int
    dq_first: bool
    draw_first: bool
    dq_stage: int
    dq_parts: int
    o_stages: int
    pack: bool = False

    entry = "backward_sm80"

    @property
    def block_k(self) -> int:
        return 16 * self.m_tiles * self.warps_k

    @property
    def warps(self) -> int:
        return self.warps_k * self.warps_q

    @property
    def dq_columns(self) -> int:
        return padded(self.head_dim)

    @property
    def natural(self) -> bool:
        return self.has_bias or self.alibi or (self.element == torch.float32 and not self.tf32)

    @property
    def shared_bytes(self) -> int:
        size, d, dv = self.element.itemsize, padded(self.head_dim), padded(self.head_dim_v)
        stage = self.block_q * d * size + self.block_q * (16 if self.natural else 8)
        gradients = self.o_stages * self.block_q * dv * size
        scores = self.block_k * self.block_q * size * (3 if self.warps_q > 1 else 2)
        keys, warps = self.block_k * (d + dv) * size, (512 * self.dq_stage + 8) * self.warps
        return keys + self.stages * stage + gradients + scores + warps + 64


@dataclass(frozen=True)
class WarpgroupBackwardConfig(Features):
    """Tile shape of the wgmma backward; see csrc/cuda/backward_sm90.cuh.

    split: warpgroups share keys and divide the columns of dK and dV. columns: widths of their products. early_dv: dV is
    issued before dS is computed. drain: dK ends before the next tile begins.
    """

    deterministic: bool
    split: bool
    block_q: int
    block_k: int
    stages: int
    o_stages: int
    columns: int
    columns_v: int
    early_dv: bool
    drain: bool
    pack: bool = False

    entry = "backward_sm90"
    warps = 8  # that compute
    natural = False

    def _panels(self, dim: int) -> int:
        return -(-dim // 128) * 2 if self.split else -(-dim // 64)

    @property
    def dq_warps(self) -> int:
        return 4 * (self.block_q // 64)

    @property
    def dq_columns(self) -> int:
        return 64 * self._panels(self.head_dim)

    @property
    def shared_bytes(self) -> int:
        panels, panels_v = self._panels(self.head_dim), self._panels(self.head_dim_v)
        rows = self.block_k * (panels + panels_v) + self.block_q * (self.stages * panels + self.o_stages * panels_v)
        scores = (4 if self.split else 3) * self.block_q * self.block_k * 2
        barriers = 8 + 16 * (self.stages + self.o_stages) + 24
        return rows * 128 + scores + 8 * self.block_q * self.stages + 4 * 48 + barriers


@dataclass(frozen=True)
class RowsConfig:
    """The small kernels: combine, append, delta, query gradient, sink gradient."""

    element: torch.dtype
    sink_element: torch.dtype
    head_dim: int
    head_dim_v: int
    aligned: bool
    packed: bool
    lengths: bool
    paged: bool
    has_sinks: bool
    natural: bool
    block_q: int
    dq_warps: int
    main_warps: int
    dq_columns: int
    dq_floats: int


# ---------------------------------------------------------------- choices


def features(problem: AttentionProblem, fault: str = "") -> dict[str, Any]:
    """The fields of Features."""
    left, right = problem.window
    return {
        "element": problem.dtype,
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v,
        "bias_element": problem.bias or torch.float32,
        "tf32": problem.tf32 and problem.dtype == torch.float32,
        "aligned": problem.aligned,
        "packed": problem.packed,
        "lengths": problem.lengths or problem.append,
        "paged": problem.page_size is not None,
        "left": left is not None,
        "right": right is not None,
        "top_left": problem.top_left,
        "softcap": problem.softcap is not None,
        "has_bias": problem.bias is not None,
        "mask": problem.mask,
        "alibi": problem.alibi,
        "block_mask": problem.block_mask is not None,
        "dropout": problem.dropout_threshold > 0,
        "fault": FAULTS.index(fault),
    }


def _elementwise(problem: AttentionProblem) -> bool:
    """Whether scores are touched one by one, which needs registers."""
    asked = (problem.bias, problem.softcap, problem.block_mask)
    return any(x is not None for x in asked) or problem.mask or problem.alibi


def packable(problem: AttentionProblem) -> bool:
    """Whether the heads of a group can share a tile of rows: nothing may depend on the head but its sink."""
    alone = problem.bias is None and problem.block_mask is None and not problem.mask and not problem.alibi
    return alone and problem.dropout_threshold == 0 and 1 < problem.group <= 64


def rows(problem: AttentionProblem) -> int:
    """Rows a tile needs at most: 16, 32, 64, or 128 for everything longer."""
    longest = problem.seqlen_q
    packed = longest * problem.group if packable(problem) and longest * problem.group <= 64 else longest
    return next(size for size in (16, 32, 64, 128) if packed <= size or size == 128)


def pack(problem: AttentionProblem) -> bool:
    """Whether a tile holds all heads of a group: short query lists."""
    return packable(problem) and problem.seqlen_q * problem.group <= 64


def sections(problem: AttentionProblem, target: device.DeviceInfo) -> int:
    """Heads whose tiles are interleaved: as many as keep their keys and values in a third of L2."""
    each = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    return max(1, min(1 << 20, target.l2_bytes // 3 // max(each, 1)) * problem.group)


def splits(problem: AttentionProblem, target: device.DeviceInfo, block_q: int, block_k: int, resident: int) -> int:
    """Shares of the keys, so that a short query list still fills the device."""
    if problem.needs_stats or problem.seqlen_k < 4 * block_k:
        return 1
    heads = problem.num_heads_kv if pack(problem) else problem.num_heads_q
    per_tile = block_q // problem.group if pack(problem) else block_q
    tiles = -(-problem.seqlen_q // per_tile) * heads * problem.batch
    slots = target.sm_count * resident
    if tiles * 5 > slots * 4:
        return 1
    return max(1, min(slots // max(tiles, 1), problem.seqlen_k // (2 * block_k), 128))


_Shape = tuple[int, int, int, int, bool, int]  # m_tiles, warps, block_k, stages, q_in_registers, warps_n


def _forward_shapes(problem: AttentionProblem, old: bool) -> list[tuple[_Shape, int]]:
    """Tile shapes by preference, with the blocks a multiprocessor should hold; the first that fits is taken."""
    size = rows(problem)
    d = max(padded(problem.head_dim), padded(problem.head_dim_v))
    wide = problem.dtype == torch.float32
    small = {16: (1, 1), 32: (1, 2), 64: (1, 4)}
    stages = (1,) if old else (2, 1)
    if size < 128:
        m, w = small[size]
        narrow = [((m, n, 32, 1, False, 1), 1) for n in (2, 1) if n < w]
        return [((m, w, k, s, False, 1), 1) for k in ((32,) if wide else (64, 32)) for s in stages] + narrow
    if wide or old:
        return [((1, w, 32, s, False, 1), 1) for w in (4, 2, 1) for s in stages]
    if d > 128:
        pair = [((2, 4, 64, 1, False, 2), 2), ((2, 8, 64, 2, False, 2), 1), ((2, 4, 64, 1, False, 2), 1)]
        rest = [((1, 8, 64, 2, False, 1), 1), ((1, 4, 64, 1, False, 1), 1), ((1, 4, 32, 1, False, 1), 1)]
        if _elementwise(problem) or problem.dropout_threshold > 0:
            return [((1, 8, 32, 2, False, 1), 1), ((1, 4, 32, 1, False, 1), 1)]
        return (pair if padded(problem.head_dim_v) == 256 else []) + rest
    if _elementwise(problem):
        return [((1, 4, 64, 2, False, 1), 2), ((1, 4, 64, 1, False, 1), 2), ((1, 4, 32, 2, False, 1), 1)]
    if d <= 64 and problem.dropout_threshold == 0:
        return [((2, 4, 128, 2, False, 1), 2), ((2, 4, 64, 2, True, 1), 2)]
    if d <= 64:
        edges = problem.window != (None, None)
        return ([((1, 4, 64, 2, False, 1), 4)] if edges else []) + [((2, 4, 64, 2, True, 1), 2)]
    if problem.dropout_threshold > 0:
        return [((1, 4, 64, 1, False, 1), 3), ((2, 4, 32, 1, False, 1), 2), ((1, 4, 32, 2, False, 1), 1)]
    return [
        ((2, 4, 64, 2, False, 1), 2),
        ((2, 4, 64, 1, False, 1), 2),
        ((2, 4, 32, 1, False, 1), 1),
        ((1, 4, 32, 2, False, 1), 1),
    ]


def forward(
    problem: AttentionProblem, target: device.DeviceInfo, fault: str = "", shape: Mapping[str, Any] | None = None
) -> tuple[ForwardConfig, int]:
    """The forward's configuration and the blocks a multiprocessor should hold. shape overrides fields; ValueError if
    the result does not fit."""
    old = target.capability < 80
    common = features(problem, fault) | {
        "sink_element": problem.sinks or torch.float32,
        "has_sinks": problem.sinks is not None,
        "stats": problem.needs_stats,
        "pack": pack(problem),
        "split": False,
        "warps_n": 1,
        "draw_first": True,
        "maximum": problem.bias is not None or problem.alibi or problem.dtype == torch.float32,
    }
    if 64 < max(padded(problem.head_dim), padded(problem.head_dim_v)) <= 128:
        common["right"] = True  # an unbounded right edge costs nothing, and ptxas spills 40 bytes without it
    names = ("m_tiles", "warps", "block_k", "stages", "q_in_registers", "warps_n")
    wanted = dict(shape or {})
    blocks = wanted.pop("min_blocks", None)
    for values, count in _forward_shapes(problem, old):
        config = ForwardConfig(**(common | dict(zip(names, values, strict=True)) | wanted))
        room = target.smem_per_sm // (blocks or count) - 1024
        if config.shared_bytes <= min(target.smem_per_block, room):
            return config, blocks or count
        if wanted.keys() & set(names):
            break
    raise ValueError(f"shared memory: needs at most {target.smem_per_block} bytes, got {config.shared_bytes}")


WGMMA_WIDTHS = (64, 80, 96, 112, 128, 160, 176, 192, 256)  # that csrc/cuda/ptx/wgmma.cuh has
_WarpgroupShape = tuple[
    int, int, int, int, bool, bool
]  # warpgroups, block_k, stages, q_buffers, q_in_registers, unroll


def _warpgroup_shape(problem: AttentionProblem) -> _WarpgroupShape:
    """From the sweep of docs/kernels/sm90_forward.md."""
    d, full = problem.head_dim, problem.window == (None, None)
    capped = problem.softcap is not None  # takes registers, as a left edge does
    if d <= 64:
        return (2, 96, 2, 2, False, False) if capped else (3, 128, 3 if full else 2, 2, False, False)
    if d <= 128:
        wide = not capped and problem.window.left is None
        return (2, 128, 2, 2, True, False) if wide else (3, 80, 2, 2, False, not capped)
    if d <= 192:
        return 2, 128 if problem.head_dim_v <= 128 else 96, 2, 1, False, False
    return 2, 64, 2, 1, False, False


def warpgroup(
    problem: AttentionProblem, target: device.DeviceInfo, fault: str = "", shape: Mapping[str, Any] | None = None
) -> WarpgroupConfig | None:
    """The wgmma forward's configuration; None where that kernel does not cover the problem."""
    if target.arch != "sm_90a" or problem.dtype not in (torch.float16, torch.bfloat16) or not problem.aligned:
        return None
    lookups = problem.bias is not None or problem.mask or problem.alibi or problem.block_mask is not None
    if lookups or problem.dropout_threshold > 0 or problem.page_size is not None or problem.append:
        return None
    if not 40 <= problem.head_dim_v <= problem.head_dim <= 256 or rows(problem) < 128:
        return None
    names = ("warpgroups", "block_k", "stages", "q_buffers", "q_in_registers", "unroll")
    common = features(problem, fault) | {
        "sink_element": problem.sinks or torch.float32,
        "has_sinks": problem.sinks is not None,
        "dynamic": problem.window != (None, None) or problem.lengths or problem.packed,
        "maximum": False,
        "columns_v": next(width for width in WGMMA_WIDTHS if problem.head_dim_v <= width),
    }
    return WarpgroupConfig(**(common | dict(zip(names, _warpgroup_shape(problem), strict=True)) | dict(shape or {})))


def warpgroup_backward(
    problem: AttentionProblem, target: device.DeviceInfo, fault: str = "", shape: Mapping[str, Any] | None = None
) -> WarpgroupBackwardConfig | None:
    """The wgmma backward's configuration; None where that kernel does not cover the problem."""
    if warpgroup(problem, target) is None or problem.softcap is not None:
        return None
    split = problem.head_dim > 128

    def width(dim: int) -> int:
        return next(n for n in WGMMA_WIDTHS if dim <= n) if not split else -(-dim // 128) * 64

    common = features(problem, fault) | {
        "deterministic": problem.deterministic,
        "split": split,
        "block_q": 128 if problem.head_dim <= 64 else 64,
        "block_k": 64 if split else 128,
        "stages": 2,
        "o_stages": 2,
        "columns": width(problem.head_dim),
        "columns_v": width(problem.head_dim_v),
        "early_dv": 64 < problem.head_dim <= 112,
        "drain": problem.head_dim <= 64,
    }
    return WarpgroupBackwardConfig(**(common | dict(shape or {})))


def dq_warps(head_dim: int, warps: int, block_q: int) -> int:
    """Rows of the grid in which warps share dQ: near-square parts, in pairs of n8 tiles; 0 if there is none."""
    for count in (2, 4, 1, 8):
        columns, rest = divmod(warps, count)
        if rest == 0 and block_q % (16 * count) == 0 and padded(head_dim) % (16 * columns) == 0:
            return count
    return 0


# m_tiles, warps_k, warps_q, block_q, stages, o_stages, blocks a multiprocessor should hold
_BackwardShape = tuple[int, int, int, int, int, int, int]


def _backward_shapes(problem: AttentionProblem, capability: int) -> list[tuple[_BackwardShape, float]]:
    """Tile shapes by preference, and which part of dQ is on its way through shared memory (sm_90 and later)."""
    d = max(padded(problem.head_dim), padded(problem.head_dim_v))
    bulk = capability >= 90
    blocks, part = 1, 1.0 if bulk else 0.0
    if problem.dtype == torch.float32:
        shapes = [(1, 4, 2, 32), (1, 2, 2, 32)] if d <= 128 else [(1, 2, 4, 64), (1, 2, 2, 32), (1, 1, 2, 32)]
        shapes += [(1, 4, 1, 32), (1, 2, 1, 32), (1, 1, 1, 32)]
    elif d > 192:
        part = 0.0
        shapes = [
            (1, 4, 2, 32) if _elementwise(problem) else (2, 2, 4, 64),
            (1, 4, 2, 32),
            (1, 2, 2, 32),
        ]
    elif d > 128:
        shapes = [(1, 4, 2, 32 if _elementwise(problem) else 64), (1, 2, 2, 32)]
    elif d > 64:
        shapes = [(2, 4, 2, 32 if _elementwise(problem) else 64), (1, 4, 2, 32), (1, 4, 1, 32)]
    elif _elementwise(problem):
        shapes = [(2, 4, 2, 32), (1, 4, 2, 32), (1, 4, 1, 32)]
    else:
        shapes, blocks = [(2, 4, 1, 32)], 2
        part = 1.0 if bulk and problem.deterministic else 0.0
    found: list[tuple[_BackwardShape, float]] = []
    for shape in shapes:
        for share in (part, 0.0) if part else (0.0,):
            found += [((*shape, n, n, blocks), share) for n in ((1,) if capability < 80 else (2, 1))]
    if blocks > 1:
        found += [((1, 4, 1, 32, n, n, 1), 0.0) for n in ((1,) if capability < 80 else (2, 1))]
    return found


def backward(
    problem: AttentionProblem, target: device.DeviceInfo, fault: str = "", shape: Mapping[str, Any] | None = None
) -> tuple[BackwardConfig, int]:
    """As forward, for the backward."""
    common = features(problem, fault) | {
        "paged": False,  # see pages.py
        "bias_gradient": "bias" in problem.grads and not problem.deterministic,
        "deterministic": problem.deterministic,
        "dq_first": True,
        "draw_first": False,
    }
    names = ("m_tiles", "warps_k", "warps_q", "block_q", "stages", "o_stages")
    wanted = dict(shape or {})
    blocks = wanted.pop("min_blocks", None)
    for (*values, count), part in _backward_shapes(problem, target.capability):
        chosen = dict(zip(names, values, strict=True)) | wanted
        warps = chosen["warps_k"] * chosen["warps_q"]
        chosen.setdefault("dq_warps", dq_warps(problem.head_dim, warps, chosen["block_q"]))
        tiles = chosen["block_q"] * padded(problem.head_dim) // (128 * warps)  # m16n8 tiles of dQ, a warp
        chosen.setdefault("dq_stage", int(tiles * part))
        columns = padded(problem.head_dim) // 8 // max(1, warps // max(1, chosen["dq_warps"]))  # n8 tiles of dQ, a warp
        halves = tiles > 8 and columns % 4 == 0 and not chosen["dq_stage"] and not problem.deterministic
        chosen.setdefault("dq_parts", 2 if halves else 1)
        config = BackwardConfig(**(common | chosen))
        pairs = 16 * chosen["warps_q"]  # a warp loads fragments of S, dK and dV in pairs of n8 tiles
        if (
            chosen["block_q"] % pairs
            or not config.dq_warps
            or padded(problem.head_dim) % pairs
            or padded(problem.head_dim_v) % pairs
        ):
            continue
        room = target.smem_per_sm // (blocks or count) - 1024
        if config.shared_bytes <= min(target.smem_per_block, room):
            return config, blocks or count
        if wanted.keys() & set(names):
            break
    raise ValueError(f"shared memory: needs at most {target.smem_per_block} bytes, got {config.shared_bytes}")


def rows_config(
    problem: AttentionProblem, config: BackwardConfig | WarpgroupBackwardConfig | None = None
) -> RowsConfig:
    """For the small kernels; those of the backward follow its tiles."""
    base = features(problem) | ({"paged": False} if config else {})
    return RowsConfig(
        **{f.name: base[f.name] for f in dataclasses.fields(RowsConfig) if f.name in base},
        sink_element=problem.sinks or torch.float32,
        has_sinks=problem.sinks is not None,
        natural=config is not None and config.natural,
        block_q=config.block_q if config else 64,
        dq_warps=config.dq_warps if config else 1,
        main_warps=config.warps if config else 1,
        dq_columns=config.dq_columns if config else 32,
        dq_floats=config.block_q * config.dq_columns if config else 64,
    )


# ---------------------------------------------------------------- kernels


def forward_kernel(config: ForwardConfig, blocks: int) -> KernelSpec:
    return KernelSpec(
        "forward_sm80.cuh", "forward_sm80", config, threads=32 * config.warps, min_blocks=blocks,
        params="attnlib::ForwardParams", params_size=params.FORWARD.size,
    )  # fmt: skip


def backward_kernel(config: BackwardConfig, blocks: int) -> KernelSpec:
    return KernelSpec(
        "backward_sm80.cuh", "backward_sm80", config, threads=32 * config.warps, min_blocks=blocks,
        params="attnlib::BackwardParams", params_size=params.BACKWARD.size,
    )  # fmt: skip


def warpgroup_kernel(config: WarpgroupConfig) -> KernelSpec:
    return KernelSpec(
        "forward_sm90.cuh", "forward_sm90", config, threads=128 * (config.warpgroups + 1),
        params="attnlib::ForwardMapsParams", params_size=params.FORWARD_MAPS_SIZE,
    )  # fmt: skip


def warpgroup_backward_kernel(config: WarpgroupBackwardConfig) -> KernelSpec:
    return KernelSpec(
        "backward_sm90.cuh", "backward_sm90", config, threads=384, params="attnlib::BackwardMapsParams",
        params_size=params.BACKWARD_MAPS_SIZE,
    )  # fmt: skip


_SMALL = {
    "combine": ("combine.cuh", params.COMBINE, 128),
    "append": ("append.cuh", params.APPEND, 128),
    "delta": ("gradient.cuh", params.DELTA, 256),
    "query_gradient": ("gradient.cuh", params.QUERY_GRADIENT, 256),
    "sink_gradient": ("gradient.cuh", params.SINK_GRADIENT, 256),
}


def small_kernel(name: str, config: RowsConfig) -> KernelSpec:
    file, layout, threads = _SMALL[name]
    return KernelSpec(
        file, name, config, threads=threads, function=f"attnlib::{name}_kernel",
        params=f"attnlib::{layout.name}", params_size=layout.size,
    )  # fmt: skip


def bias_gradient_kernel(config: BackwardConfig) -> KernelSpec:
    """The fixed-order bias gradient of the deterministic backward."""
    return KernelSpec(
        "bias_gradient.cuh", "bias_gradient", config, threads=128, function="attnlib::bias_gradient_kernel",
        params="attnlib::BiasGradientParams", params_size=params.BIAS_GRADIENT.size,
    )  # fmt: skip


def kernels(problem: AttentionProblem, arch: str, hopper: bool = True) -> Sequence[KernelSpec]:
    """Every kernel that a plan for problem may launch on arch; without those of Hopper if hopper is false."""
    target = device.for_arch(arch)
    wide = warpgroup(problem, target) if hopper else None
    config, blocks = forward(problem, target)
    if wide is not None:
        found = [warpgroup_kernel(wide)]
    else:
        found = [forward_kernel(config, blocks)]
        if not problem.needs_stats:
            found.append(forward_kernel(replace(config, split=True), blocks))
            found.append(small_kernel("combine", rows_config(problem)))
    if problem.append:
        found.append(small_kernel("append", rows_config(problem)))
    if problem.grads:
        main: BackwardConfig | WarpgroupBackwardConfig | None = warpgroup_backward(problem, target) if hopper else None
        if isinstance(main, WarpgroupBackwardConfig):
            found.append(warpgroup_backward_kernel(main))
        else:
            main, blocks = backward(problem, target)
            found.append(backward_kernel(main, blocks))
            if "bias" in problem.grads and problem.deterministic:
                found.append(bias_gradient_kernel(main))
        extra = rows_config(problem, main)
        found += [small_kernel("delta", extra), small_kernel("query_gradient", extra)]
        if "sinks" in problem.grads:
            found.append(small_kernel("sink_gradient", extra))
    return found
