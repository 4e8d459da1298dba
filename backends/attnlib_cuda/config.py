"""From a problem and an architecture to kernel configurations: pure functions, no GPU touched.

Here are those of the mma.sync kernels and of the small ones; hopper.py has those of wgmma. They are frozen dataclasses
whose fields become `struct Config` of csrc/cuda. Lengths, batch, head counts and scalars are never compile-time.
`kernels` lists every kernel that a plan may launch, for `attnlib compile` and ci/compile_matrix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from attnlib.problem import AttentionProblem

from . import device, hopper, params
from .features import Features, features, pack, padded, rows
from .spec import KernelSpec


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
    partial_blocks: bool  # of the block mask: some tile may lie in several
    draw_first: int  # tile rows whose random words are drawn before S; the others when P is there

    entry = "forward_sm80"

    @property
    def block_q(self) -> int:
        return 16 * self.m_tiles * (self.warps // self.warps_n)

    @property
    def shared_bytes(self) -> int:
        size, d, dv = self.element.itemsize, padded(self.head_dim), padded(self.head_dim_v)
        keys = self.stages * self.block_k * (d + dv) * size
        exchange = (self.block_q * self.block_k * size + 8 * self.block_q + 4 * self.warps) if self.warps_n > 1 else 0
        random = 8 * self.block_k + 4 * self.block_q if self.dropout else 0
        return self.block_q * max(d, dv) * size + keys + (2048 if self.block_mask else 0) + exchange + 48 + random


@dataclass(frozen=True)
class BackwardConfig(Features):
    """Tile shape of the backward; see csrc/cuda/backward_sm80.cuh."""

    bias_gradient: bool
    deterministic: bool
    partial_blocks: bool
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
    dq_tiles: int
    stagger: bool
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
    def dq_team(self) -> int:
        """Warps that share the dQ of a query tile."""
        return self.warps // self.dq_tiles

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
        waiting = 1 if self.stages == 1 else 1 + self.dq_tiles
        scores = self.block_k * self.block_q * size * (waiting + (self.warps_q > 1))
        keys, warps = self.block_k * (d + dv) * size, (512 * self.dq_stage + 8) * self.warps
        return keys + self.stages * stage + gradients + scores + warps + 64


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
    planes: bool
    block_q: int
    dq_warps: int
    main_warps: int
    dq_columns: int
    dq_floats: int


# ---------------------------------------------------------------- choices

_Config = TypeVar("_Config", "ForwardConfig", "BackwardConfig")


def _split_blocks(problem: AttentionProblem, block_q: int, block_k: int) -> bool:
    """Whether a tile may lie in several blocks of the block mask."""
    rows, columns = problem.block_mask or (block_q, block_k)
    return rows % block_q != 0 or columns % block_k != 0


def _elementwise(problem: AttentionProblem) -> bool:
    """Whether scores are touched one by one, which needs registers, even where no block of a block mask is split."""
    return problem.bias is not None or problem.softcap is not None or problem.mask or problem.alibi


def _passes(problem: AttentionProblem) -> tuple[bool, ...]:
    """Whether to take scores as touched one by one; with a block mask, first as if no tile lay in several blocks."""
    touched = _elementwise(problem)
    return (touched,) if touched or problem.block_mask is None else (False, True)


def _in_whole_blocks(tries: Sequence[tuple[_Config, int, bool]]) -> list[tuple[_Config, int]]:
    """Configurations and numbers by preference: tiles that lie in one block, then others, if made for that. ValueError
    if there is none."""
    whole = [(config, count) for config, count, _ in tries if not config.partial_blocks]
    found = whole + [(config, count) for config, count, touched in tries if config.partial_blocks and touched]
    if not found:
        raise ValueError("shape: needs warps that can share a tile, in one block of the block mask or made for several")
    return found


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


def _forward_shapes(problem: AttentionProblem, old: bool, touched: bool) -> list[tuple[_Shape, int]]:
    """Tile shapes by preference, with the blocks a multiprocessor should hold; the first that fits is taken.

    touched: scores are touched one by one.
    """
    size = rows(problem)
    d = max(padded(problem.head_dim), padded(problem.head_dim_v))
    wide = problem.dtype == torch.float32
    small = {16: (1, 1), 32: (1, 2), 64: (1, 4)}
    stages = (1,) if old else (2, 1)
    if size < 128:
        m, w = small[size]
        narrow = [((m, n, 32, 1, False, 1), 1) for n in (2, 1) if n < w]
        tight = wide or (d > 128 and touched)  # 64 keys would spill
        return [((m, w, k, s, False, 1), 1) for k in ((32,) if tight else (64, 32)) for s in stages] + narrow
    if wide or old:
        return [((1, w, 32, s, False, 1), 1) for w in (4, 2, 1) for s in stages]
    if d > 128:
        pair = [((2, 4, 64, 1, False, 2), 2), ((2, 8, 64, 2, False, 2), 1), ((2, 4, 64, 1, False, 2), 1)]
        rest = [((1, 8, 64, 2, False, 1), 1), ((1, 4, 64, 1, False, 1), 1), ((1, 4, 32, 1, False, 1), 1)]
        if touched or problem.dropout_threshold > 0:
            return [((1, 8, 32, 2, False, 1), 1), ((1, 4, 32, 1, False, 1), 1)]
        return (pair if padded(problem.head_dim_v) == 256 else []) + rest
    if touched:
        return [((1, 4, 64, 2, False, 1), 2), ((1, 4, 64, 1, False, 1), 2), ((1, 4, 32, 2, False, 1), 1)]
    if d <= 64 and problem.dropout_threshold == 0:
        return [((2, 4, 128, 2, False, 1), 2), ((2, 4, 64, 2, True, 1), 2)]
    if d <= 64:
        return [((2, 4, 64, s, True, 1), 2) for s in stages]
    if problem.dropout_threshold > 0:
        return [((2, 4, 64, 1, False, 1), 2), ((2, 4, 32, 1, False, 1), 2), ((1, 4, 32, 2, False, 1), 1)]
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
    old, size = target.capability < 80, max(padded(problem.head_dim), padded(problem.head_dim_v))
    common = features(problem, fault) | {
        "sink_element": problem.sinks or torch.float32,
        "has_sinks": problem.sinks is not None,
        "stats": problem.needs_stats,
        "pack": pack(problem),
        "split": False,
        "warps_n": 1,
        "maximum": problem.bias is not None or problem.alibi or problem.dtype == torch.float32,
    }
    if 64 < max(padded(problem.head_dim), padded(problem.head_dim_v)) <= 128:
        common["right"] = True  # an unbounded right edge costs nothing, and ptxas spills 40 bytes without it
    names = ("m_tiles", "warps", "block_k", "stages", "q_in_registers", "warps_n")
    wanted = dict(shape or {})
    blocks = wanted.pop("min_blocks", None)

    tries = []
    for touched in _passes(problem):
        for values, count in _forward_shapes(problem, old, touched):
            chosen = {"draw_first": 2 if touched or size > 128 else 0, "partial_blocks": False}
            config = ForwardConfig(**(common | chosen | dict(zip(names, values, strict=True)) | wanted))
            split = _split_blocks(problem, config.block_q, config.block_k)
            tries.append((replace(config, partial_blocks=split), count, touched))
    if len({touched for *_, touched in tries}) > 1:  # the last resorts of the first list come after the second
        tries.sort(key=lambda each: each[0].block_k < 64)
    for config, count in _in_whole_blocks(tries):
        room = target.smem_per_sm // (blocks or count) - 1024
        if config.shared_bytes <= min(target.smem_per_block, room):
            return config, blocks or count
        if wanted.keys() & set(names):
            break
    raise ValueError(f"shared memory: needs at most {target.smem_per_block} bytes, got {config.shared_bytes}")


def dq_warps(head_dim: int, warps: int, block_q: int) -> int:
    """Rows of the grid in which warps share dQ: near-square parts, in pairs of n8 tiles; 0 if there is none."""
    for count in (1, 2) if warps == 2 else (2, 4, 1, 8):
        columns, rest = divmod(warps, count)
        if rest == 0 and block_q % (16 * count) == 0 and padded(head_dim) % (16 * columns) == 0:
            return count
    return 0


# m_tiles, warps_k, warps_q, block_q, stages, o_stages, blocks a multiprocessor should hold
_BackwardShape = tuple[int, int, int, int, int, int, int]


def _backward_shapes(problem: AttentionProblem, capability: int, touched: bool) -> list[tuple[_BackwardShape, float]]:
    """Tile shapes by preference, and which part of dQ is on its way through shared memory (sm_90 and later)."""
    d = max(padded(problem.head_dim), padded(problem.head_dim_v))
    bulk = capability >= 90
    blocks, part = 1, 1.0 if bulk else 0.0
    stages = (1,) if capability < 80 else (2, 1)
    if problem.dtype == torch.float32:
        shapes = [(1, 4, 2, 32), (1, 2, 2, 32)] if d <= 128 else [(1, 2, 4, 64), (1, 2, 2, 32), (1, 1, 2, 32)]
        shapes += [(1, 4, 1, 32), (1, 2, 1, 32), (1, 1, 1, 32)]
    elif d > 192:
        part = 0.0
        plain = problem.aligned and problem.dropout_threshold == 0
        long = plain and (problem.deterministic or problem.window[1] is None)
        large = [(2, 2, 4, 128), (2, 2, 4, 64)] if long else [(2, 2, 4, 64)]
        shapes = ([] if touched else large) + [(1, 4, 2, 32), (1, 2, 2, 32)]
        if problem.bias is not None and not bulk:
            stages = (1,)  # two spill
    elif d > 128:
        shapes = [(1, 4, 2, 32 if touched else 64), (1, 2, 2, 32)]
    elif d > 64:
        shapes = [(2, 4, 2, 32 if touched else 64), (1, 4, 2, 32), (1, 4, 1, 32)]
        if problem.bias is not None:
            shapes.insert(2, (1, 4, 2, 64))  # up to 96, where the last spills
    elif touched:
        shapes = [(2, 4, 2, 32), (1, 4, 2, 32), (1, 4, 1, 32)]
    else:
        shapes, blocks = [(2, 4, 1, 32)], 2
        part = 0.5 if bulk and problem.deterministic else 0.0
    found: list[tuple[_BackwardShape, float]] = []
    for shape in shapes:
        for share in (part, 0.0) if part else (0.0,):
            found += [((*shape, n, n, blocks), share) for n in stages]
    if blocks > 1:
        found += [((1, 4, 1, 32, n, n, 1), 0.0) for n in stages]
    return found


def _backward_of(problem: AttentionProblem, fields: Mapping[str, Any], part: float) -> BackwardConfig | None:
    """With the fields that follow from the tile's; None if the warps cannot share it."""
    chosen = dict(fields)
    ahead = chosen["m_tiles"] == chosen["stages"] == 2
    chosen.setdefault("dq_tiles", 2 if ahead and chosen["warps_q"] == 1 else 1)
    chosen.setdefault("stagger", ahead and chosen["warps_q"] == 4 and not problem.deterministic)
    warps = chosen["warps_k"] * chosen["warps_q"] // chosen["dq_tiles"]  # that share one tile of dQ
    chosen.setdefault("dq_warps", dq_warps(problem.head_dim, warps, chosen["block_q"]))
    tiles = chosen["block_q"] * padded(problem.head_dim) // (128 * warps)  # m16n8 tiles of dQ, a warp
    chosen.setdefault("dq_stage", int(tiles * part))
    columns = padded(problem.head_dim) // 8 // max(1, warps // max(1, chosen["dq_warps"]))  # n8 tiles of dQ, a warp
    parts = 4 if tiles > 16 else 2 if tiles > 8 and not problem.deterministic else 1
    chosen.setdefault("dq_parts", parts if columns % (2 * parts) == 0 and not chosen["dq_stage"] else 1)
    config = BackwardConfig(**{"partial_blocks": False, **chosen})
    pairs = 16 * config.warps_q  # a warp loads fragments of S, dK and dV in pairs of n8 tiles
    uneven = config.block_q % pairs or padded(problem.head_dim) % pairs or padded(problem.head_dim_v) % pairs
    if uneven or not config.dq_warps:
        return None
    return replace(config, partial_blocks=_split_blocks(problem, config.block_q, config.block_k))


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
    tries = []
    for touched in _passes(problem):
        for (*values, count), part in _backward_shapes(problem, target.capability, touched):
            chosen = dict(zip(names, values, strict=True)) | wanted
            made = _backward_of(problem, common | chosen, part)
            if made is not None:
                tries.append((made, count, touched))
    for config, count in _in_whole_blocks(tries):
        room = target.smem_per_sm // (blocks or count) - 1024
        if config.shared_bytes <= min(target.smem_per_block, room):
            return config, blocks or count
        if wanted.keys() & set(names):
            break
    raise ValueError(f"shared memory: needs at most {target.smem_per_block} bytes, got {config.shared_bytes}")


def rows_config(problem: AttentionProblem, config: BackwardConfig | hopper.BackwardConfig | None = None) -> RowsConfig:
    """For the small kernels; those of the backward follow its tiles."""
    base = features(problem) | ({"paged": False} if config else {})
    return RowsConfig(
        **{f.name: base[f.name] for f in dataclasses.fields(RowsConfig) if f.name in base},
        sink_element=problem.sinks or torch.float32,
        has_sinks=problem.sinks is not None,
        natural=config is not None and config.natural,
        planes=isinstance(config, hopper.BackwardConfig),
        block_q=config.block_q if config else 64,
        dq_warps=config.dq_warps if config else 1,
        main_warps=config.dq_team if config else 1,
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


def kernels(problem: AttentionProblem, arch: str, wgmma: bool = True) -> Sequence[KernelSpec]:
    """Every kernel that a plan for problem may launch on arch; without those of wgmma if wgmma is false."""
    target = device.for_arch(arch)
    config, blocks = forward(problem, target)
    if wgmma and (wide := hopper.forward(problem, target)) is not None:
        found = [hopper.forward_kernel(wide)]
    else:
        found = [forward_kernel(config, blocks)]
        if not problem.needs_stats:
            found.append(forward_kernel(replace(config, split=True), blocks))
            found.append(small_kernel("combine", rows_config(problem)))
    if problem.append:
        found.append(small_kernel("append", rows_config(problem)))
    if problem.grads:
        main: BackwardConfig | hopper.BackwardConfig
        if wgmma and (mine := hopper.backward(problem, target)) is not None:
            main = mine
            found.append(hopper.backward_kernel(mine))
            free = hopper.backward(replace(problem, deterministic=False), target)
            if free is not None and (whole := hopper.whole_variant(problem, free)) is not None:
                found += [hopper.backward_kernel(whole), small_kernel("delta", rows_config(problem, whole))]
        else:
            main, blocks = backward(problem, target)
            found.append(backward_kernel(main, blocks))
            if "bias" in problem.grads and problem.deterministic:
                found.append(bias_gradient_kernel(main))
        extra = rows_config(problem, main)
        found += [small_kernel("delta", extra), small_kernel("query_gradient", extra)]
        if "sinks" in problem.grads:
            found.append(small_kernel("sink_gradient", extra))
    return list(dict.fromkeys(found))
