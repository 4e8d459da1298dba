"""Configurations of the wgmma kernels, and which problems they cover: pure functions, no GPU touched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from attnlib.problem import AttentionProblem

from . import device, params
from .features import Features, features, rows
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

    split: warpgroups share keys and divide the columns of dK and dV. columns: widths of their products. early_dv: dV is
    issued before dS is computed. drain: dK ends before the next tile begins.
    """

    deterministic: bool
    split: bool
    block_q: int
    block_k: int
    columns: int
    columns_v: int
    early_dv: bool
    drain: bool
    order: bool
    pack: bool = False

    entry = "backward_sm90"
    warps = dq_team = 8  # that compute
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
        rows = self.block_k * (panels + panels_v) + 2 * self.block_q * (panels + panels_v)
        scores = (4 if self.split else 3) * self.block_q * self.block_k * 2
        drawn = 16 + (1024 if self.split else 2048) if self.dropout else 0
        return rows * 128 + scores + 16 * self.block_q + 4 * 48 + 96 + drawn


WGMMA_WIDTHS = (64, 80, 96, 112, 128, 160, 176, 192, 256)  # that csrc/cuda/ptx/wgmma.cuh has


class _Shape(NamedTuple):
    """Fields of ForwardConfig."""

    warpgroups: int
    block_k: int
    stages: int
    q_buffers: int
    q_in_registers: bool = False
    out_panels: int = 0


def _shape(problem: AttentionProblem) -> _Shape:
    """From the sweeps of docs/kernels/sm90_forward.md."""
    d, d_v, (left, right) = problem.head_dim, problem.head_dim_v, problem.window
    full = left is None and right is None
    capped = problem.softcap is not None  # takes registers, as a left edge and random words do
    if problem.dropout_threshold > 0:  # keys come in groups of 32
        if d > 192:
            return _Shape(2, 64, 2, 1) if full else _Shape(2, 32, 4, 1)
        if d <= 128:
            return _Shape(2, 96, 3, 2) if capped else _Shape(2, 128, 2, 2)
        return _Shape(2, 64, 2, 1)
    if d <= 64:
        if capped:
            return _Shape(2, 96, 2, 2)
        if problem.seqlen_k <= 4096 and left is None:
            return _Shape(4, 64, 4, 2)
        return _Shape(3, 128, 3 if full else 2, 2) if left is None or right is not None else _Shape(3, 96, 3, 2)
    if d <= 128:
        if capped or left is not None:
            return _Shape(3, 80, 3, 2)
        return _Shape(3, 64, 3, 2) if not full and problem.seqlen_k <= 2048 else _Shape(2, 128, 2, 2, True)
    if d <= 192:
        return _Shape(2, 96 if capped else 128, 2, 1, out_panels=1) if d_v <= 128 else _Shape(2, 96, 2, 1)
    return _Shape(2, 64, 2, 1, out_panels=2)


def forward(
    problem: AttentionProblem, target: device.DeviceInfo, fault: str = "", shape: Mapping[str, Any] | None = None
) -> ForwardConfig | None:
    """The wgmma forward's configuration; None where that kernel does not cover the problem."""
    if target.arch != "sm_90a" or problem.dtype not in (torch.float16, torch.bfloat16) or not problem.aligned:
        return None
    lookups = problem.bias is not None or problem.mask or problem.alibi or problem.block_mask is not None
    if lookups or problem.page_size is not None or problem.append:
        return None
    if not 40 <= problem.head_dim_v <= problem.head_dim <= 256 or rows(problem) < 128:
        return None
    common = features(problem, fault) | {
        "sink_element": problem.sinks or torch.float32,
        "has_sinks": problem.sinks is not None,
        "dynamic": problem.window != (None, None) or problem.lengths or problem.packed,
        "columns_v": next(width for width in WGMMA_WIDTHS if problem.head_dim_v <= width),
    }
    return ForwardConfig(**(common | _shape(problem)._asdict() | dict(shape or {})))


def backward(
    problem: AttentionProblem, target: device.DeviceInfo, fault: str = "", shape: Mapping[str, Any] | None = None
) -> BackwardConfig | None:
    """The wgmma backward's configuration; None where that kernel does not cover the problem."""
    if forward(problem, target) is None:
        return None
    capped = problem.softcap is not None
    split = problem.head_dim > (96 if capped else 128)
    tight = capped or (problem.dropout_threshold > 0 and problem.deterministic)  # for registers
    short = problem.window.right is not None and problem.seqlen_q <= 4096  # turns cost more than they bring

    def width(dim: int) -> int:
        return next(n for n in WGMMA_WIDTHS if dim <= n) if not split else -(-dim // 128) * 64

    common = features(problem, fault) | {
        "deterministic": problem.deterministic,
        "split": split,
        "block_q": 128 if problem.head_dim <= 64 and not tight else 64,
        "block_k": 64 if split else 128,
        "columns": width(problem.head_dim),
        "columns_v": width(problem.head_dim_v),
        "early_dv": 64 < problem.head_dim <= 112,
        "drain": problem.head_dim <= 64,
        "order": not split and not (short and problem.head_dim > 112),
    }
    return BackwardConfig(**(common | dict(shape or {})))


def forward_kernel(config: ForwardConfig) -> KernelSpec:
    return KernelSpec(
        "forward_sm90.cuh", "forward_sm90", config, threads=32 * config.warps,
        params="attnlib::ForwardMapsParams", params_size=params.FORWARD_MAPS_SIZE,
    )  # fmt: skip


def backward_kernel(config: BackwardConfig) -> KernelSpec:
    return KernelSpec(
        "backward_sm90.cuh", "backward_sm90", config, threads=384, params="attnlib::BackwardMapsParams",
        params_size=params.BACKWARD_MAPS_SIZE,
    )  # fmt: skip
