"""One call of a public function as data: its tensors, its arguments, and the canonical record that numerics judges."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from ..inspection import problem_of
from ..problem import AttentionProblem, Tensors
from .cases import Case

LAYOUTS = ("plain", "guarded", "transposed", "inner", "misaligned", "expanded", "expanded_heads", "expanded_batch")


@dataclass
class Inputs:
    """The tensors of one call: `function` of attnlib with q, k, v and arguments; dout and dlse for its backward."""

    case: Case
    function: str
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    arguments: dict[str, Any]
    q_lens: list[int]
    kv_lens: list[int]
    dout: torch.Tensor | None = None
    dlse: torch.Tensor | None = None
    grads: tuple[str, ...] = ()
    tables: dict[str, torch.Tensor] = field(default_factory=dict)
    new_lens: list[int] | None = None
    capacity: int = 0

    def unpack_rows(self, x: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        """q-like rows as [B, Sq, H, D]; packed rows are spread out, padding holds fill."""
        if self.function != "attention_varlen":
            return x
        padded = x.new_full((len(self.q_lens), self.case.seqlen_q, *x.shape[1:]), fill)
        for b, first in enumerate(cumulative(self.q_lens)[:-1]):
            padded[b, : self.q_lens[b]] = x[first : first + self.q_lens[b]]
        return padded

    def unpack_lse(self, lse: torch.Tensor) -> torch.Tensor:
        """lse as [B, Hq, Sq]."""
        if self.function != "attention_varlen":
            return lse
        return self.unpack_rows(lse.T, -math.inf).transpose(1, 2)

    @property
    def positional(self) -> tuple[torch.Tensor, ...]:
        """Positional arguments of the public function."""
        extra = {
            "attention": (),
            "attention_varlen": ("cu_seqlens_q", "cu_seqlens_k"),
            "attention_kvcache": ("kv_lens",),
        }
        return (self.q, self.k, self.v, *(self.tables[name] for name in extra[self.function]))

    def leaves(self) -> list[torch.Tensor]:
        """The operands that require a gradient, in the order of `grads`."""
        named = {"q": self.q, "k": self.k, "v": self.v, **self.arguments}
        return [named[name] for name in self.grads]

    def problem(self) -> AttentionProblem:
        """What is asked for, as core reads it from the arguments."""
        return problem_of(self.q, self.k, self.v, **self.keywords())

    def keywords(self) -> dict[str, Any]:
        """All that explain needs beside q, k and v."""
        unused = {"dropout_seed", "return_lse"}
        given = {name: value for name, value in self.arguments.items() if name not in unused}
        return {**given, **{name: value for name, value in self.tables.items() if name != "page_table"}, **self.paged()}

    def paged(self) -> dict[str, torch.Tensor]:
        return {"page_table": self.tables["page_table"]} if "page_table" in self.tables else {}

    def tensors(self, problem: AttentionProblem) -> Tensors:
        """The canonical record of the same call, built here and not by core."""
        named, device = self.arguments, self.q.device
        full = (problem.batch, problem.num_heads_q, problem.seqlen_q, problem.seqlen_k)
        slopes, blocks, seed = named.get("alibi_slopes"), named.get("block_mask"), named.get("dropout_seed")
        detach = {name: named[name].detach() for name in ("bias", "sinks") if named.get(name) is not None}
        return Tensors(
            q=_unit_stride(self.q), k=_unit_stride(self.k), v=_unit_stride(self.v), out=self.q, lse=self.q,
            bias=detach["bias"].expand(full) if "bias" in detach else None,
            mask=named["mask"].expand(full) if named.get("mask") is not None else None,
            alibi_slopes=None if slopes is None else slopes.expand(full[:2]),
            sinks=detach.get("sinks"),
            block_mask=None if blocks is None else blocks.mask.expand(*full[:2], *blocks.mask.shape[2:]),
            q_lens=named.get("q_lens"),
            kv_lens=named.get("kv_lens", self.tables.get("kv_lens")),
            cu_seqlens_q=self.tables.get("cu_seqlens_q"),
            cu_seqlens_k=self.tables.get("cu_seqlens_k"),
            page_table=self.tables.get("page_table"),
            k_new=_unit_stride(named.get("k_new")),
            v_new=_unit_stride(named.get("v_new")),
            new_lens=named.get("new_lens"),
            dropout_seed=None if seed is None else torch.tensor([seed], dtype=torch.int64, device=device),
            dout=_unit_stride(self.dout) if self.grads else None,
            dlse=self.dlse.contiguous() if self.grads and self.dlse is not None else None,
        )  # fmt: skip

    @property
    def bias_shape(self) -> tuple[int, ...] | None:
        """The shape that dbias is reduced to, with four dimensions."""
        bias = self.arguments.get("bias")
        return None if bias is None else (1,) * (4 - bias.dim()) + tuple(bias.shape)


def _unit_stride(tensor: Any) -> Any:
    if tensor is None:
        return None
    tensor = tensor.detach()
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def given(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    tables: dict[str, torch.Tensor] | None = None,
    grads: tuple[str, ...] = (),
    dout: torch.Tensor | None = None,
    dlse: torch.Tensor | None = None,
    **arguments: Any,
) -> Inputs:
    """Inputs around tensors made by hand. tables: cu_seqlens_q and cu_seqlens_k, or kv_lens of a cache."""
    tables = dict(tables or {})
    packed, cached = "cu_seqlens_q" in tables, "kv_lens" in tables
    function = "attention_varlen" if packed else "attention_kvcache" if cached else "attention"
    if "page_table" in arguments:
        tables["page_table"] = arguments["page_table"]
    inputs = Inputs(Case("handmade"), function, q, k, v, arguments, [], [], dout, dlse, grads, tables)
    for leaf in inputs.leaves():
        leaf.requires_grad_()
    return inputs


def cumulative(lens: list[int]) -> list[int]:
    return [sum(lens[:b]) for b in range(len(lens) + 1)]


# --- how a tensor lies in memory --------------------------------------------------------------------------------------


def lay_out(tensor: torch.Tensor, how: str, fill: float) -> torch.Tensor:
    """The same values with other strides; tensor is [..., seqlen, heads, dim] and contiguous."""
    rows, heads = tensor.dim() - 3, tensor.dim() - 2
    if how == "guarded":
        frame = tensor.new_full((*tensor.shape[:rows], tensor.shape[rows] + 2, *tensor.shape[heads:]), fill)
        view = frame.narrow(rows, 1, tensor.shape[rows])
    elif how == "transposed":
        view = tensor.new_empty(tensor.transpose(rows, heads).shape).transpose(rows, heads)
    elif how == "inner":
        view = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1]), fill)[..., ::2]
    elif how == "misaligned":
        view = tensor.new_full((tensor.numel() + 2,), fill)[1:-1].view(tensor.shape)
    elif how == "expanded":
        return tensor[(slice(0, 1),) * tensor.dim()].expand(tensor.shape)
    elif how == "expanded_heads":
        return tensor.narrow(heads, 0, 1).expand(tensor.shape)
    elif how == "expanded_batch":
        return tensor[:1].expand(tensor.shape)
    else:
        return tensor
    return view.copy_(tensor)
