"""From a `Case` to tensors: values by recipe, storage by layout, NaN everywhere that nobody may read.

Values are drawn on the CPU, from a generator seeded by the case's name, in logical order; how they lie in memory
never changes them. Every byte outside the sequences (padding rows, unused slots and pages, what surrounds a view)
holds `fill`, NaN by default.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..calls import BlockMask
from .cases import Case
from .inputs import Inputs, cumulative, lay_out

CANCELLING = frozenset({"single_key", "constant_k", "constant_v", "shifted_v", "zeros", "jump", "sink_tokens"})
PLAIN = frozenset({"normal", "q5"})
SEED = 0x123456789ABCDEF0


# --- values -----------------------------------------------------------------------------------------------------------


class _Values:
    """What a recipe changes: float32 values [B, S, H, D] and the case's sizes."""

    def __init__(self, case: Case, generator: torch.Generator, keys: int) -> None:
        batch = case.sequences
        self.case, self.generator = case, generator
        self.q = self.normal(batch, case.seqlen_q, case.num_heads_q, case.head_dim)
        self.k = self.normal(batch, keys, case.num_heads_kv, case.head_dim)
        self.v = self.normal(batch, keys, case.num_heads_kv, case.dim_v)
        self.scale = case.head_dim**-0.5 if case.scale is None else case.scale
        self.ramp = torch.linspace(0, 1, keys)[:, None, None]

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def signs(self, *shape: int) -> torch.Tensor:
        return torch.randint(0, 2, shape, generator=self.generator) * 2.0 - 1.0

    def aim(self, scores: torch.Tensor) -> None:
        """Make scale * q.k about `scores` [keys, 1, 1] for every query: q along a random sign vector."""
        direction = self.signs(self.case.head_dim)
        self.q = direction * 2.0 + 0.1 * self.q
        self.k = direction * scores / (2.0 * self.case.head_dim * self.scale) + 0.1 * self.k


def _q5(values: _Values) -> None:
    values.q = values.q * 5


def _peaked(values: _Values) -> None:
    values.aim(50.0 * values.signs(*values.k.shape[:3], 1))
    values.q = values.q * values.signs(*values.q.shape[:3], 1)


def _constant_k(values: _Values) -> None:
    values.k = values.k[:, :1].expand_as(values.k).contiguous()


def _constant_v(values: _Values) -> None:
    values.v = values.v[:, :1].expand_as(values.v).contiguous()


def _shifted_v(values: _Values) -> None:
    values.v = values.v + 30.0


def _identity_v(values: _Values) -> None:
    keys, dim = values.v.shape[1], values.v.shape[3]
    values.v = torch.eye(dim)[torch.arange(keys) % dim][None, :, None].expand_as(values.v).contiguous()


def _ramp_up(values: _Values) -> None:
    values.aim(60.0 * values.ramp)


def _ramp_down(values: _Values) -> None:
    values.aim(60.0 * values.ramp.flip(0))


def _sink_tokens(values: _Values) -> None:
    scores = torch.zeros_like(values.ramp)
    scores[:1] = 40.0
    values.aim(scores)


def _jump(values: _Values) -> None:
    scores = torch.zeros_like(values.ramp)
    scores[len(scores) * 4 // 5] = 1024.0
    values.aim(scores)


def one_hot(rows: int, dim: int, first: int) -> torch.Tensor:
    """[1, rows, 1, dim]: row first + d is the unit vector d, every other row is 0."""
    return (torch.arange(rows)[:, None] - first == torch.arange(dim)).float()[None, :, None]


def _zeros(values: _Values) -> None:
    values.q, values.k, values.v = values.q * 0, values.k * 0, values.v * 0


def _tiny(values: _Values) -> None:
    values.q, values.k, values.v = values.q / 64, values.k / 64, values.v / 64


RECIPES: dict[str, Callable[[_Values], None]] = {
    "q5": _q5, "peaked": _peaked, "constant_k": _constant_k, "constant_v": _constant_v, "shifted_v": _shifted_v,
    "identity_v": _identity_v, "ramp_up": _ramp_up, "ramp_down": _ramp_down, "sink_tokens": _sink_tokens, "jump": _jump,
    "zeros": _zeros, "tiny": _tiny,
}  # fmt: skip
_ELSEWHERE = {"normal", "one_hot", "single_key", "bias_inf", "bias_min", "bias_large", "empty_rows"}


def _bias(case: Case, values: _Values, sizes: dict[str, int]) -> torch.Tensor:
    """A bias of the case's pattern; recipes bias_* shape its values."""
    dtype = case.bias_dtype or torch.float32
    bias = values.normal(*_broadcast_shape(case.bias or "", sizes))
    rows, keys = bias.shape[-2], bias.shape[-1]
    if case.recipe == "bias_inf":
        bias = bias.masked_fill(torch.rand(bias.shape, generator=values.generator) < 0.3, -math.inf)
        bias[..., rows // 2, :] = -math.inf
        if rows > 1:
            bias[..., : rows // 3, keys // 2 :] = -math.inf
    elif case.recipe == "bias_min":
        lowest = torch.finfo(dtype).min
        bias[..., : keys * 2 // 3] = lowest
        bias[..., rows // 2 :: 7, :] = lowest
    elif case.recipe == "bias_large":
        bias = bias - 1e4
    return bias


def _mask(case: Case, values: _Values, sizes: dict[str, int]) -> torch.Tensor:
    mask = torch.rand(_broadcast_shape(case.mask or "", sizes), generator=values.generator) < 0.6
    if case.recipe == "empty_rows":
        mask[..., 3::9, :] = False
        mask[..., ::2, : mask.shape[-1] * 2 // 3] = False
    return mask


def _broadcast_shape(pattern: str, sizes: dict[str, int]) -> tuple[int, ...]:
    return tuple(1 if letter == "1" else sizes[letter] for letter in pattern)


# --- putting a call together ------------------------------------------------------------------------------------------


def _repeat(lens: tuple[int, ...] | None, batch: int, full: int) -> list[int]:
    lens = lens or (full,)
    return [lens[b % len(lens)] for b in range(batch)]


def make(
    case: Case,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    direction: str = "forward",
    fill: float = math.nan,
    column: int = 0,
) -> Inputs:
    """The tensors of a case.

    direction "backward" adds gradients; fill is what lies wherever nobody may read. column: with recipe "one_hot",
    where q is 0 and so every visible key weighs the same, the key whose value is the first unit vector.
    """
    assert case.recipe in RECIPES or case.recipe in _ELSEWHERE, f"unknown recipe {case.recipe!r}"
    generator = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))
    batch = case.sequences
    capacity = case.seqlen_k
    if case.page_size is not None and case.layout == "cache":
        capacity = -(-case.seqlen_k // case.page_size) * case.page_size
    values = _Values(case, generator, capacity)
    if case.recipe == "one_hot":
        values.q = values.q * 0
        values.v = one_hot(capacity, case.dim_v, column).expand_as(values.v).contiguous()
    elif case.recipe in RECIPES:
        RECIPES[case.recipe](values)
    q_lens, kv_lens = _repeat(case.q_lens, batch, case.seqlen_q), _repeat(case.kv_lens, batch, case.seqlen_k)
    sizes = {"b": batch, "h": case.num_heads_q, "q": case.seqlen_q, "k": capacity}

    def place(tensor: torch.Tensor, to: torch.dtype | None = None) -> torch.Tensor:
        return tensor.to(to or dtype).to(device)

    def lens(numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    arguments: dict[str, Any] = {
        "causal": case.causal, "window": case.window, "scale": case.scale, "softcap": case.softcap,
    }  # fmt: skip
    if case.bias is not None:
        arguments["bias"] = place(_bias(case, values, sizes), case.bias_dtype)
    if case.mask is not None:
        arguments["mask"] = _mask(case, values, sizes).to(device)
    if case.alibi is not None:
        shape = _broadcast_shape(case.alibi, sizes)
        arguments["alibi_slopes"] = (0.02 + 0.4 * torch.rand(shape, generator=generator)).to(device)
    if case.sinks:
        arguments["sinks"] = place(2 * values.normal(case.num_heads_q))
    if case.block_mask is not None:
        block_q, block_k = case.block_mask
        blocks = torch.rand(batch, case.num_heads_q, -(-case.seqlen_q // block_q), -(-case.seqlen_k // block_k),
                            generator=generator) < 0.6  # fmt: skip
        arguments["block_mask"] = BlockMask(blocks.to(device), block_q, block_k)
    if case.layout != "cache":
        alignment = "top_left" if case.top_left else "bottom_right"
        arguments.update(dropout_p=case.dropout_p, deterministic=case.deterministic, causal_alignment=alignment)
        if case.dropout_p:
            arguments["dropout_seed"] = SEED
    dout, dlse = (
        values.normal(batch, case.seqlen_q, case.num_heads_q, case.dim_v),
        values.normal(batch, case.num_heads_q, case.seqlen_q),
    )
    store = _Storage(case, fill, q_lens, kv_lens, place)
    tables: dict[str, torch.Tensor] = {}
    if case.new is not None:  # the tokens that follow kv_lens in the logical sequence
        new_lens = _repeat(case.new_lens, batch, case.new)
        token = torch.tensor(kv_lens)[:, None] + torch.arange(case.new)
        for name, source in (("k_new", values.k), ("v_new", values.v)):
            new = source[torch.arange(batch)[:, None], token.clamp(max=capacity - 1)]
            arguments[name] = lay_out(place(store.padded(new, new_lens)), case.strides, fill)
        if case.new_lens is not None:
            arguments["new_lens"] = lens(new_lens)
    if case.layout == "packed":
        function = "attention_varlen"
        q, dout, dlse = store.packed(values.q, q_lens, 3), store.packed(dout, q_lens, 3), store.packed_rows(dlse)
        k, v = (store.packed(x, kv_lens, 2) for x in (values.k, values.v))
        tables["cu_seqlens_q"], tables["cu_seqlens_k"] = lens(cumulative(q_lens)), lens(cumulative(kv_lens))
        arguments.update(max_seqlen_q=case.seqlen_q, max_seqlen_k=case.seqlen_k)
    else:
        q, dout, dlse = store.padded(values.q, q_lens), store.padded(dout, q_lens), store.padded_rows(dlse)
        k, v = (store.padded(x, kv_lens) for x in (values.k, values.v))
        if case.layout == "cache":
            function = "attention_kvcache"
            tables["kv_lens"] = lens(kv_lens)
        else:
            function = "attention"
        if case.q_lens is not None:
            arguments["q_lens"] = lens(q_lens)
        if case.kv_lens is not None and case.layout == "dense":
            arguments["kv_lens"] = lens(kv_lens)
    if case.page_size is not None:
        total = [
            length + new for length, new in zip(kv_lens, _repeat(case.new_lens, batch, case.new or 0), strict=True)
        ]
        table, k, v = store.pages(values.k, values.v, total, generator)
        tables["page_table"] = torch.tensor(table, dtype=torch.int32, device=device)
        if case.layout == "cache":
            arguments["page_table"] = tables["page_table"]
    q, k, v = (lay_out(place(x), case.strides, fill) for x in (q, k, v))
    inputs = Inputs(case, function, q, k, v, arguments, q_lens, kv_lens, tables=tables, capacity=capacity)
    if case.new is not None:
        inputs.new_lens = _repeat(case.new_lens, batch, case.new)
    if case.layout == "packed" and case.page_size is not None:
        arguments["page_table"] = tables["page_table"]
    if direction == "backward":
        inputs.grads = case.grads
        inputs.dout = lay_out(place(dout), case.dout, fill)
        inputs.dlse = place(dlse, torch.float64 if dtype == torch.float64 else torch.float32) if case.dlse else None
        for leaf in inputs.leaves():
            leaf.requires_grad_()
    return inputs


@dataclass
class _Storage:
    """Where logical rows [B, S, ...] go: padded, packed or paged; everything else is `fill`."""

    case: Case
    fill: float
    q_lens: list[int]
    kv_lens: list[int]
    place: Callable[..., torch.Tensor]

    def padded(self, tensor: torch.Tensor, lens: list[int]) -> torch.Tensor:
        tensor = tensor.clone()
        for b, length in enumerate(lens):
            tensor[b, length:] = self.fill
        return tensor

    def padded_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return self.padded(rows.transpose(1, 2), self.q_lens).transpose(1, 2)

    def packed(self, tensor: torch.Tensor, lens: list[int], tail: int) -> torch.Tensor:
        end = tensor.new_full((tail, *tensor.shape[2:]), self.fill)
        return torch.cat([*(tensor[b, :length] for b, length in enumerate(lens)), end])

    def packed_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return self.packed(rows.transpose(1, 2), self.q_lens, 3).T

    def pages(
        self, k: torch.Tensor, v: torch.Tensor, total: list[int], generator: torch.Generator
    ) -> tuple[list[list[int]], torch.Tensor, torch.Tensor]:
        """Pages in random order, two more than needed; table entries that nobody may read are -1 or far outside."""
        size = self.case.page_size or 1
        columns = -(-self.case.seqlen_k // size)
        used = [-(-length // size) for length in total]
        order = torch.randperm(sum(used) + 2, generator=generator).tolist()
        table = [[-1 if (b + column) % 2 else 2**30 for column in range(columns)] for b in range(len(total))]
        paged = [x.new_full((len(order), size, *x.shape[2:]), self.fill) for x in (k, v)]
        for b, count in enumerate(used):
            for column in range(count):
                page = table[b][column] = order.pop()
                first, last = column * size, min((column + 1) * size, self.kv_lens[b])
                for target, source in zip(paged, (k, v), strict=True):
                    target[page, : max(0, last - first)] = source[b, first : max(first, last)]
        return table, paged[0], paged[1]
