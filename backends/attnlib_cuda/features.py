"""What the kernels of all families take of a problem: the fields of struct Config that they share, and common sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attnlib.problem import AttentionProblem

from . import device

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
    """Heads whose tiles are interleaved: as many as keep their keys and values in a third of L2, rounded down to a
    power of two, which most often divides all heads."""
    each = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    fitting = max(1, min(1 << 20, target.l2_bytes // 3 // max(each, 1)))
    return (1 << fitting.bit_length() - 1) * problem.group
