"""What one attention call asks for, without its tensors: the value that dispatch, plans and tests share.

Two records live here. `AttentionProblem` is frozen, holds no tensor and can be made for hardware that is not
there. `Tensors` holds the operands of one run of a plan, already checked and brought into canonical form.
The meaning of every field is in docs/semantics.md.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from .errors import ArgumentError
from .options import drop_threshold


class Feature(enum.Enum):
    """One thing a problem may ask for. One member is one refusal, one group of conformance cases, one table column."""

    CAUSAL = "causal"
    WINDOW = "window"
    TOP_LEFT = "causal_alignment"
    SOFTCAP = "softcap"
    BIAS = "bias"
    BIAS_GRADIENT = "bias gradient"
    MASK = "mask"
    ALIBI = "alibi_slopes"
    SINKS = "sinks"
    BLOCK_MASK = "block_mask"
    LENGTHS = "q_lens/kv_lens"
    VARLEN = "cu_seqlens"
    PAGED = "page_table"
    APPEND = "k_new/v_new"
    DROPOUT = "dropout_p"
    GQA = "grouped heads"
    HEAD_DIM_V = "head_dim_v != head_dim"
    BACKWARD = "backward"
    DETERMINISTIC = "deterministic backward"


ALL_FEATURES = frozenset(Feature)


class Window(NamedTuple):
    """Visible keys relative to a query's position, both ends inclusive; None is unbounded. Causal folds into right."""

    left: int | None = None
    right: int | None = None


DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class AttentionProblem:
    """One attention call without its tensors.

    Sizes: `batch` sequences of at most `seqlen_q` queries and `seqlen_k` keys (cache: its capacity in tokens).
    `total_q` and `total_k` are the token rows of the operands (packed: rows of q and k; else batch * seqlen).
    `bias` and `sinks` hold the operand's dtype; `block_mask` is (block_q, block_k); `page_size` is the tokens a page.
    `dropout_p` is the probability in force, a multiple of 2**-16. `grads` names the operands that need a gradient, in
    the order q, k, v, bias, sinks.

    Raises ArgumentError for head counts or sizes that attention is not defined for.
    """

    dtype: torch.dtype
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    scale: float
    total_q: int = -1
    total_k: int = -1
    packed: bool = False
    window: Window = Window()
    top_left: bool = False
    softcap: float | None = None
    bias: torch.dtype | None = None
    mask: bool = False
    alibi: bool = False
    sinks: torch.dtype | None = None
    block_mask: tuple[int, int] | None = None
    lengths: bool = False
    page_size: int | None = None
    append: bool = False
    dropout_p: float = 0.0
    grads: tuple[str, ...] = ()
    deterministic: bool = False
    tf32: bool = False
    aligned: bool = True  # bases and strides of q, k, v, k_new, v_new, dout are multiples of 16 bytes

    def __post_init__(self) -> None:
        if self.num_heads_q % self.num_heads_kv if self.num_heads_kv else self.num_heads_q:
            raise ArgumentError(
                f"q, k: need num_heads_q to be a multiple of num_heads_kv, got {self.num_heads_q} query heads "
                f"and {self.num_heads_kv} key/value heads"
            )
        for name in ("batch", "seqlen_q", "seqlen_k", "num_heads_q", "num_heads_kv", "head_dim_v"):
            if getattr(self, name) < 0:
                raise ArgumentError(f"{name}: needs at least 0, got {getattr(self, name)}")
        if self.head_dim < 1:
            raise ArgumentError(f"head_dim: needs at least 1, got {self.head_dim}")
        object.__setattr__(self, "grads", tuple(self.grads))
        object.__setattr__(self, "window", Window(*self.window))
        if self.total_q < 0:
            object.__setattr__(self, "total_q", self.batch * self.seqlen_q)
        if self.total_k < 0:
            object.__setattr__(self, "total_k", self.batch * self.seqlen_k)

    @cached_property
    def features(self) -> frozenset[Feature]:
        """What this problem needs of a backend."""
        left, right = self.window
        asked = {
            Feature.CAUSAL: right == 0,
            Feature.WINDOW: left is not None or (right is not None and right > 0),
            Feature.TOP_LEFT: self.top_left and (self.window != (None, None) or self.alibi),
            Feature.SOFTCAP: self.softcap is not None,
            Feature.BIAS: self.bias is not None,
            Feature.BIAS_GRADIENT: "bias" in self.grads,
            Feature.MASK: self.mask,
            Feature.ALIBI: self.alibi,
            Feature.SINKS: self.sinks is not None,
            Feature.BLOCK_MASK: self.block_mask is not None,
            Feature.LENGTHS: self.lengths,
            Feature.VARLEN: self.packed,
            Feature.PAGED: self.page_size is not None,
            Feature.APPEND: self.append,
            Feature.DROPOUT: self.dropout_threshold > 0,
            Feature.GQA: self.num_heads_q != self.num_heads_kv,
            Feature.HEAD_DIM_V: self.head_dim_v != self.head_dim,
            Feature.BACKWARD: bool(self.grads),
            Feature.DETERMINISTIC: bool(self.grads) and self.deterministic,
        }
        return frozenset(feature for feature, wanted in asked.items() if wanted)

    @cached_property
    def signature(self) -> tuple[Any, ...]:
        """All that a refusal may depend on; lengths, batch, numbers of heads, alignment and scalar values stay out."""
        return (
            self.dtype, self.head_dim, self.head_dim_v, self.group, self.features, self.grads, self.deterministic,
            self.bias, self.sinks, self.block_mask, self.page_size, self.tf32,
        )  # fmt: skip

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads_q // self.num_heads_kv if self.num_heads_kv else 1

    @property
    def dropout_threshold(self) -> int:
        """A key is kept iff its 16-bit number is at least this; 0 is no dropout, 65536 drops all."""
        return drop_threshold(self.dropout_p)

    @property
    def needs_stats(self) -> bool:
        """Whether backward needs the row maximum and row sum beside lse (log(l) is lost beside a large bias)."""
        return bool(self.grads) and (self.bias is not None or self.alibi)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        if self.packed:
            return (self.num_heads_q, self.total_q)
        return (self.batch, self.num_heads_q, self.seqlen_q)

    @property
    def accumulate_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32


@dataclass
class Tensors:
    """Operands of one run, on one device. `Plan.forward` fills out, lse and stats; `Plan.backward` fills d*.

    Canonical form, guaranteed by core: everything is checked against the problem and on one device, which is torch's
    current one; an operand the problem does not name is None. q, k, v, k_new, v_new and dout have innermost stride 1
    and, where problem.aligned, 16-byte bases and strides; their other strides are free, 0 included. out, lse, stats,
    dq, dk, dv, dlse, sinks, dsinks and the integer operands are contiguous. bias, mask, block_mask and alibi_slopes
    have any strides and any alignment. Autocast is off while a plan runs.

    q [batch, seqlen_q, Hq, D] or packed [total_q, Hq, D]; k and v likewise with Hkv heads and D or Dv, or paged
    [num_pages, page_size, Hkv, .]. bias and mask are views [batch, Hq, seqlen_q, seqlen_k] whose broadcast
    dimensions have stride 0; block_mask likewise [batch, Hq, ceil(seqlen_q/block_q), ceil(seqlen_k/block_k)];
    alibi_slopes a float32 view [batch, Hq]; sinks [Hq]; dropout_seed int64 [1]. q_lens, kv_lens, new_lens int32
    [batch] (None: full); kv_lens counts tokens BEFORE k_new is appended. cu_seqlens int32 [batch + 1], page_table
    int32 [batch, max_pages].

    out has q's shape with Dv, lse is [batch, Hq, seqlen_q] or packed [Hq, total_q], both contiguous. stats, when
    the problem needs it, is [2, *lse.shape]: row maximum m and row sum l, sinks included (an empty row without a
    sink: -inf and 0). Every element of out, lse, stats, dq, dk and dv must be written, padding rows included.
    dbias (a stride-0 view of a zeroed accumulator in the accumulation dtype, shaped like bias) and dsinks [Hq]
    (zeroed, accumulation dtype) are added to; where problem.deterministic, in an order that does not change from run
    to run. A gradient that is not needed is None; dlse is None where no gradient flows in through lse.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    stats: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    block_mask: torch.Tensor | None = None
    q_lens: torch.Tensor | None = None
    kv_lens: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    k_new: torch.Tensor | None = None
    v_new: torch.Tensor | None = None
    new_lens: torch.Tensor | None = None
    dropout_seed: torch.Tensor | None = None
    dout: torch.Tensor | None = None
    dlse: torch.Tensor | None = None
    dq: torch.Tensor | None = None
    dk: torch.Tensor | None = None
    dv: torch.Tensor | None = None
    dbias: torch.Tensor | None = None
    dsinks: torch.Tensor | None = None
