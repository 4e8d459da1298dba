"""Configurations of the wgmma kernels, and which problems they cover: pure functions, no GPU touched.

Tile shapes were measured: hopper_shapes.json has them, hopper_shapes.py finds the row that decides. Here is what
follows from a shape, and what it must fit.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnlib.problem import AttentionProblem

from . import device, hopper_shapes, params
from .features import Features, features, rows
from .hopper_shapes import LARGEST, Key, Row, Shape, Table
from .spec import KernelSpec


@dataclass(frozen=True)
class ForwardConfig(Features):
    """Tile shape and schedule of the wgmma forward; see csrc/cuda/forward_sm90.cuh.

    warpgroups: those that compute, 64 rows each. columns_v: width of O's product. dynamic: tiles go to whoever asks
    first. out_panels: panels of 64 columns that a warp has for out; 0: out goes over Q.
    """

    sink_element: torch.dtype
    has_sinks: bool
    warpgroups: int
    block_k: int
    stages: int
    q_buffers: int
    q_in_registers: bool
    dynamic: bool
    columns_v: int
    out_panels: int
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
        records = 48 * (self.q_buffers + (self.out_panels > 0))
        of_warps = 2048 * self.out_panels + (4 * self.block_k + 80 if self.dropout else 0)
        return rows * 128 + -(-barriers // 16) * 16 + records + 4 * self.warpgroups * of_warps


@dataclass(frozen=True)
class BackwardConfig(Features):
    """Tile shape of the wgmma backward; see csrc/cuda/backward_sm90.cuh.

    split: warpgroups share keys and divide the columns of dK and dV. columns: widths of their products. order: they
    take turns with their products. dq_first: dQ (of the step before) is issued before dV. held: exponentials end
    before dP is awaited. wide: 128 keys whose columns of dK and dV the warpgroups divide (backward_sm90_wide.cuh).
    apart: deterministic, and dQ has a warpgroup of its own (backward_sm90_apart.cuh). whole: a block takes all key
    tiles of a head; chosen by sizes, not by the table (whole_heads).
    """

    deterministic: bool
    split: bool
    block_q: int
    block_k: int
    columns: int
    columns_v: int
    order: bool
    dq_first: bool
    held: bool
    wide: bool
    apart: bool
    whole: bool = False
    pack: bool = False

    entry = "backward_sm90"
    warps = dq_team = 8  # that compute dK and dV; those whose parts of dQ lie one behind the other
    natural = False

    @property
    def threads(self) -> int:
        return 512 if self.apart else 384

    @property
    def form(self) -> str:
        """How the warpgroups share the work, for explain."""
        return next((name for name in ("split", "wide", "apart") if getattr(self, name)), "keys")

    @property
    def persistent(self) -> bool:
        """Blocks, as many as multiprocessors, draw one tile after the other."""
        return self.apart or not self.deterministic

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
        panels, panels_v = self._panels(self.head_dim), 2 if self.wide else self._panels(self.head_dim_v)
        rows = self.block_k * (panels + panels_v) + 2 * self.block_q * (panels + panels_v)
        scores = (4 if self.split or self.wide else 3) * self.block_q * self.block_k * 2
        bits = 1024 if self.split else 2048 if self.block_q == 64 else 4096
        drawn = 16 + bits if self.dropout else 0
        return rows * 128 + scores + 16 * self.block_q + 8 * 64 + 288 + drawn


WGMMA_WIDTHS = (64, 80, 96, 112, 128, 160, 176, 192, 256)  # that csrc/cuda/ptx/wgmma.cuh has, and 32
# Of L2, where whole_heads pays: without an edge, and with one or instead of turns (docs/kernels/sm90_backward.md).
_WHOLE_HEADS_L2 = {False: 0.8, True: 1.45}
_COMPUTING = {2: 232, 3: 160, 4: 112}  # warpgroups: registers of a thread of theirs
_FORWARD_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "warpgroups": (2, 3, 4), "block_k": (32, *WGMMA_WIDTHS), "stages": (2, 3, 4), "q_buffers": (1, 2),
    "q_in_registers": (False, True), "out_panels": (0, 1, 2),
}  # fmt: skip
_BACKWARD_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "split": (False, True), "block_q": (64, 128), "order": (False, True), "dq_first": (False, True),
    "held": (False, True), "wide": (False, True), "apart": (False, True),
}  # fmt: skip


# ---------------------------------------------------------------- choices


def covers(problem: AttentionProblem, target: device.DeviceInfo) -> bool:
    """Whether the wgmma kernels take the problem."""
    if target.arch != "sm_90a" or problem.dtype not in (torch.float16, torch.bfloat16) or not problem.aligned:
        return False
    lookups = problem.bias is not None or problem.mask or problem.alibi or problem.block_mask is not None
    if lookups or problem.page_size is not None or problem.append:
        return False
    return 40 <= problem.head_dim_v <= problem.head_dim <= LARGEST and rows(problem) == 128


def forward(
    problem: AttentionProblem, target: device.DeviceInfo, fault: str = "", shape: Mapping[str, Any] | None = None
) -> ForwardConfig | None:
    """The wgmma forward's configuration; None where that kernel does not cover the problem. shape overrides fields;
    ValueError if the result does not fit."""
    if not covers(problem, target):
        return None
    row = hopper_shapes.table().find("forward", problem)
    chosen = row.shape._asdict() | dict(shape or {})
    common = features(problem, fault) | {
        "sink_element": problem.sinks or torch.float32,
        "has_sinks": problem.sinks is not None,
        "dynamic": problem.window != (None, None) or problem.lengths or problem.packed,
        "columns_v": next(width for width in WGMMA_WIDTHS if problem.head_dim_v <= width),
    }
    config = ForwardConfig(**(common | chosen))
    if wrong := misfit(config, target):
        raise ValueError(wrong if shape else f"{hopper_shapes.PATH.name}: {row}: {wrong}")
    return config


def backward(
    problem: AttentionProblem, target: device.DeviceInfo, fault: str = "", shape: Mapping[str, Any] | None = None,
    whole: bool | None = None,
) -> BackwardConfig | None:  # fmt: skip
    """As forward, for the backward. Its `deterministic` says that blocks add to dQ in turn; whole: see whole_heads."""
    if not covers(problem, target):
        return None
    if problem.deterministic and not shape:
        free = backward(replace(problem, deterministic=False), target, fault)
        if free is not None and whole_heads(problem, target, free, whole):
            return free
    row = hopper_shapes.table().find("backward", problem)
    chosen = row.shape._asdict() | dict(shape or {})
    split = chosen["split"]

    def width(dim: int) -> int:
        return next(n for n in WGMMA_WIDTHS if dim <= n) if not split else -(-dim // 128) * 64

    common = features(problem, fault) | {
        "deterministic": problem.deterministic,
        "block_k": 64 if split else 128,
        "columns": width(problem.head_dim),
        "columns_v": width(problem.head_dim_v),
    }
    config = BackwardConfig(**(common | chosen))
    if wrong := misfit(config, target):
        raise ValueError(wrong if shape else f"{hopper_shapes.PATH.name}: {row}: {wrong}")
    return config


def size_class(problem: AttentionProblem, target: device.DeviceInfo) -> Hashable:
    """What sizes decide: the rows of the table by lengths, and the backward of a fixed order, which may need no turns;
    None where the wgmma kernels do not cover the problem."""
    if not covers(problem, target):
        return None
    rows = tuple(hopper_shapes.table().find(kernel, problem).seqlen for kernel in hopper_shapes.KERNELS)
    return (*rows, _fixed_order(problem, target)) if problem.deterministic else rows


@functools.lru_cache(256)
def _fixed_order(problem: AttentionProblem, target: device.DeviceInfo) -> BackwardConfig | None:
    """backward(), which is not for every call."""
    return backward(problem, target)


def section(config: BackwardConfig, seqlen_k: int, target: device.DeviceInfo) -> int:
    """Heads whose tiles the backward interleaves: eight tiles for each multiprocessor, so that the last
    section has short ones to end with; and so few that about four tiles of a head (eight of 64 keys) run at a time and
    find each other's queries in L2. Half as many where tiles are longest (the schedule of long causal calls has that
    from 97 columns on). A power of two, which most often divides all heads."""
    key_tiles = -(-seqlen_k // config.block_k)
    tiles = 4 if config.dq_first and config.held else 8
    fitting = min(target.sm_count * config.block_k // 512, tiles * target.sm_count // max(key_tiles, 1))
    return 1 << max(1, fitting).bit_length() - 1


def whole_variant(problem: AttentionProblem, config: BackwardConfig) -> BackwardConfig | None:
    """The kernel whose blocks take whole heads, as some lengths of the problem may have it; None where none does."""
    dense = not (problem.packed or problem.lengths or problem.window.left is not None)
    no_room = config.held and (config.dq_first or config.dropout)  # for registers
    possible = dense and not (config.wide or config.deterministic or no_room)
    return replace(config, whole=True) if possible else None


def whole_heads(
    problem: AttentionProblem, target: device.DeviceInfo, config: BackwardConfig, asked: bool | None = None
) -> bool:
    """Whether a block takes all key tiles of a head, so that the order of additions to dQ is fixed and dQ needs neither
    zeros nor a kernel that rounds it. Chosen where the sums and the queries in flight stay in L2 and heads fill the
    multiprocessors; `asked` says so instead, a ValueError where that is not possible."""
    right = problem.window.right
    first = 0 if problem.top_left else problem.seqlen_k - problem.seqlen_q  # position of the first query
    sees = problem.seqlen_k > 0 and (right is None or first + right >= 0)
    possible = sees and whole_variant(problem, config) is not None
    if asked is not None:
        if asked and not possible:
            raise ValueError(
                "whole_heads: needs dense operands without lengths, whose every query sees the first key, and a kernel "
                f"of 64 or 128 queries in no fixed order, got {problem} and {config.form}"
            )
        return asked
    rows = -(-problem.seqlen_q // config.block_q) * config.block_q
    row_bytes = 4 * config.dq_columns + problem.dtype.itemsize * (problem.head_dim + problem.head_dim_v)
    rounds = -(-problem.batch * problem.num_heads_kv // target.sm_count)
    busy = problem.batch * problem.num_heads_kv / (target.sm_count * max(rounds, 1))
    part = _WHOLE_HEADS_L2[right is not None or problem.deterministic]
    return possible and busy >= 0.8 and target.sm_count * problem.group * rows * row_bytes <= part * target.l2_bytes


# ---------------------------------------------------------------- what fits


def misfit(config: ForwardConfig | BackwardConfig, target: device.DeviceInfo) -> str:
    """Why a configuration can't be compiled or launched; "" if it can, as far as can be said without compiling."""
    wrong = _forward_misfit(config) if isinstance(config, ForwardConfig) else _backward_misfit(config)
    if not wrong and config.shared_bytes > target.smem_per_block:
        return f"shared memory: needs at most {target.smem_per_block} bytes, got {config.shared_bytes}"
    return wrong


def _forward_misfit(c: ForwardConfig) -> str:
    if c.warpgroups not in _COMPUTING:  # turns take two at least
        return f"warpgroups: needs 2, 3 or 4, got {c.warpgroups}"
    if c.block_k not in (32, *WGMMA_WIDTHS):
        return f"block_k: needs one of {(32, *WGMMA_WIDTHS)}, got {c.block_k}"
    if c.dropout and (c.block_k % 32 or c.block_k > 128):
        return f"block_k: with dropout needs a multiple of 32 up to 128, got {c.block_k}"
    if c.stages < 2 or c.q_buffers < 1 or c.out_panels < 0:
        return f"needs stages >= 2, q_buffers >= 1, out_panels >= 0, got {c.stages}, {c.q_buffers}, {c.out_panels}"
    kept = 4 * -(-c.head_dim // 16) if c.q_in_registers else 0
    held = c.columns_v // 2 + c.block_k // 2 + c.block_k // 4 + kept  # O, S, P and Q
    limit = _COMPUTING[c.warpgroups]
    return f"registers: needs less than {limit}, tiles alone take {held}" if held >= limit else ""


def _backward_misfit(c: BackwardConfig) -> str:
    if c.block_k != (64 if c.split else 128) or c.block_q not in ((64,) if c.split else (64, 128)):
        return f"tiles: need 64 queries x 64 keys split, else 64 or 128 x 128, got {c.block_q} x {c.block_k}"
    for name in ("order", "dq_first", "held"):
        if (c.split or c.wide or c.apart) and getattr(c, name):
            return f"{name}: split, wide and apart have one schedule each"
    if c.apart:
        plain = c.deterministic and not (c.split or c.wide or c.dropout or c.softcap)
        if not (plain and c.head_dim <= 128 and c.block_q == (128 if c.head_dim <= 64 else 64)):
            return "apart: needs deterministic, no softcap, no dropout, 128 queries to head_dim 64 and 64 to 128"
        return ""
    if c.wide:
        plain = not (c.split or c.dropout or c.softcap or c.deterministic)
        if not (plain and c.block_q == 64 and 128 < c.head_dim <= 192 and c.head_dim_v <= 128):
            return "wide: needs 64 queries, head_dim 129 to 192, head_dim_v to 128, and nothing but a mask"
        return ""
    queries = c.block_q // 2 if c.split else c.block_q
    of_dq = c.dq_columns // (4 if c.block_q == 64 else 2)
    taken = (c.columns + c.columns_v) // 2 + queries + of_dq  # dK, dV, S and dP, dQ
    return f"registers: needs less than 232, tiles alone take {taken}" if taken >= 232 else ""


def check(table: Table, target: device.DeviceInfo) -> None:
    """Raise ValueError that names the row whose shape does not fit target for some problem that it decides."""
    for row in table.rows:
        for key in row.decides():
            problem = typical(row, key)
            make = forward if row.kernel == "forward" else backward
            try:
                make(problem, target, shape=row.shape._asdict())
            except ValueError as error:
                raise ValueError(f"{row}: {error}") from None


def typical(row: Row, key: Key) -> AttentionProblem:
    """A problem of one of a row's keys, as large as the row allows."""
    length = row.seqlen or 8192
    return AttentionProblem(
        dtype=torch.bfloat16, batch=1, seqlen_q=length, seqlen_k=length, num_heads_q=1, num_heads_kv=1,
        head_dim=row.head_dim, head_dim_v=row.head_dim_v, scale=row.head_dim**-0.5,
        window=hopper_shapes.window_of(key.kind), softcap=30.0 if key.softcap else None,
        dropout_p=0.1 if key.dropout else 0.0, deterministic=key.deterministic,
        grads=("q", "k", "v") if row.kernel == "backward" else (),
    )  # fmt: skip


def candidates(row: Row, target: device.DeviceInfo, *, differ: int | None = None) -> list[Shape]:
    """Every shape that fits target for all problems of a row, the present one first. Whether it spills, NVRTC says.

    differ: fields, at most, in which a shape may differ from the present one.
    """
    present = row.shape
    fields = _FORWARD_FIELDS if row.kernel == "forward" else _BACKWARD_FIELDS
    make = forward if row.kernel == "forward" else backward
    problems = [typical(row, key) for key in row.decides()]
    panels_v = -(-row.head_dim_v // 64)
    found = [present]
    for values in itertools.product(*fields.values()):
        shape = type(present)(**dict(zip(fields, values, strict=True)))
        if shape == present or (differ is not None and sum(a != b for a, b in zip(shape, present)) > differ):
            continue
        if isinstance(shape, hopper_shapes.ForwardShape) and shape.out_panels > panels_v:
            continue
        try:
            for problem in problems:
                make(problem, target, shape=shape._asdict())
        except ValueError:
            continue
        found.append(shape)
    return found


# ---------------------------------------------------------------- kernels


def forward_kernel(config: ForwardConfig) -> KernelSpec:
    return KernelSpec(
        "forward_sm90.cuh", "forward_sm90", config, threads=32 * config.warps,
        params="attnlib::ForwardMapsParams", params_size=params.FORWARD_MAPS_SIZE,
        shared="attnlib::WarpgroupTile<Config>::shared_bytes",
    )  # fmt: skip


def backward_kernel(config: BackwardConfig) -> KernelSpec:
    return KernelSpec(
        "backward_sm90_kernel.cuh", "backward_sm90", config, threads=config.threads,
        params="attnlib::BackwardTilesParams", params_size=params.BACKWARD_TILES_SIZE,
        shared="attnlib::WarpgroupBackwardTile<Config>::shared_bytes",
    )  # fmt: skip
