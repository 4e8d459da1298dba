"""Attention by explicit formulas, forward and backward, in one of several arithmetics; private to numerics.py.

    dP = keep / (1 - p_drop) * (dO . v);  delta = dO . out - dlse;  dS = P * (dP - delta);  dbias = dS
    dq = scale * sum_j dS * softcap' * k;  dk = scale * sum_i dS * softcap' * q
    dv = sum_i P * keep / (1 - p_drop) * dO
    dsink = sum_i exp(sink - m) / l * (dlse - dO . out)

Shares with reference.py where a sequence lies in memory, and neither its visibility nor its derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ._extents import Extent, collapsed, extents, gather_keys, gather_rows
from .dropout import numbers_rectangle
from .problem import AttentionProblem, Tensors
from .reference import selected_product

QUANTITIES = ("out", "dq", "dk", "dv", "dbias", "dsinks")
_ELEMENTS = 1 << 22  # score elements at a time: 32 MB a float64 tensor


@dataclass
class Result:
    """What one call gave, in API layout; None where absent.

    out, dq, dk, dv: shaped like q (with head_dim_v), q, k, v. lse: [batch, Hq, seqlen_q] or packed [Hq, total_q].
    dbias: the bias's own broadcast shape (size 1 or absent where it broadcasts). dsinks: [Hq].
    """

    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    dq: torch.Tensor | None = None
    dk: torch.Tensor | None = None
    dv: torch.Tensor | None = None
    dbias: torch.Tensor | None = None
    dsinks: torch.Tensor | None = None


@dataclass
class Scale:
    """How large things are, from the oracle's pass: A of every quantity, K of every quantity, and score bounds."""

    magnitude: Result
    longest: dict[str, int] = field(default_factory=lambda: dict.fromkeys(QUANTITIES, 1))
    scores: torch.Tensor | None = None  # max |s| of each row over the keys that carry weight, shaped like lse
    max_score: float = 0.0
    max_keys: int = 0


@dataclass(frozen=True)
class Arithmetic:
    """One way to compute: dtype of every intermediate, rounding of what is stored, and where l divides."""

    dtype: torch.dtype = torch.float64
    store: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
    late_division: bool = False
    exact: bool = True  # results stay in `dtype`, out is not rounded before the backward


def round_mantissa(x: torch.Tensor, bits: int = 10) -> torch.Tensor:
    """float32 to `bits` explicit mantissa bits, to nearest, ties to even; NaN and Inf stay."""
    drop = 23 - bits
    word = x.float().contiguous().view(torch.int32).to(torch.int64)
    word = (word + (1 << (drop - 1)) - 1 + ((word >> drop) & 1)) >> drop << drop
    return torch.where(torch.isfinite(x), word.to(torch.int32).view(torch.float32), x)


def storage(problem: AttentionProblem) -> Callable[[torch.Tensor], torch.Tensor]:
    """Rounding to the storage dtype T, in float32."""
    if problem.dtype in (torch.float16, torch.bfloat16):
        return lambda x: x.to(problem.dtype).float()
    return round_mantissa if problem.tf32 and problem.dtype == torch.float32 else lambda x: x


@contextmanager
def ieee_products() -> Iterator[None]:
    """Full float32 products, whatever torch's switches say."""
    places = (torch.backends.cuda, torch.backends.mkldnn)
    homes: list[Any] = [place.matmul for place in places if hasattr(getattr(place, "matmul", None), "fp32_precision")]
    if not homes:
        old = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(old)
        return
    before = [home.fp32_precision for home in homes]
    try:
        for home in homes:
            home.fp32_precision = "ieee"
        yield
    finally:
        for home, value in zip(homes, before, strict=True):
            home.fp32_precision = value


def _visible(problem: AttentionProblem, tensors: Tensors, group: Sequence[Extent], i0: int, i1: int) -> torch.Tensor:
    """bool [n, Hq, i1 - i0, keys]: bounds on j for each row, then the masks."""
    first, device = group[0], tensors.q.device
    pos = torch.arange(i0, i1, device=device) + first.shift
    low, high = torch.zeros_like(pos), torch.full_like(pos, first.kv_len - 1)
    if problem.window.left is not None:
        low = torch.maximum(low, pos - problem.window.left)
    if problem.window.right is not None:
        high = torch.minimum(high, pos + problem.window.right)
    j = torch.arange(first.lo, first.kv_len, device=device)
    seen = (j >= low[:, None]) & (j <= high[:, None])
    seen = seen.repeat(len(group), problem.num_heads_q, 1, 1)
    for n, e in enumerate(group):
        if tensors.mask is not None:
            seen[n] &= tensors.mask[e.sequence, :, i0:i1, e.lo : e.kv_len]
        if tensors.block_mask is not None and problem.block_mask is not None:
            block_q, block_k = problem.block_mask
            wide = tensors.block_mask[e.sequence].repeat_interleave(block_q, 1).repeat_interleave(block_k, 2)
            seen[n] &= wide[:, i0:i1, e.lo : e.kv_len]
    return seen


def _keys(problem: AttentionProblem, tensors: Tensors, name: str, group: Sequence[Extent]) -> torch.Tensor:
    """[n, Hkv, keys, dim]; appended tokens come from k_new or v_new, so the cache may be older than the call."""
    cache, new = getattr(tensors, name), getattr(tensors, name + "_new")
    if new is None:
        return gather_keys(problem, tensors, cache, group).transpose(1, 2)
    parts = []
    for e in group:
        old = Extent(e.sequence, e.q_len, min(e.lo, e.old_len), e.old_len, e.shift, e.row, e.key)
        kept = gather_keys(problem, tensors, cache, [old])
        fresh = new[e.sequence : e.sequence + 1, max(0, e.lo - e.old_len) : e.kv_len - e.old_len]
        parts.append(torch.cat([kept, fresh], 1))
    return torch.cat(parts).transpose(1, 2)


class _Places:
    """Zeroed results in API layout and how a group's part goes into them."""

    def __init__(
        self,
        problem: AttentionProblem,
        tensors: Tensors,
        dtype: torch.dtype,
        grads: Sequence[str],
        bias_shape: Sequence[int] | None = None,
    ) -> None:
        self.problem, self.tensors = problem, tensors
        q, device = tensors.q, tensors.q.device

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        rows = (problem.num_heads_q, q.shape[0]) if problem.packed else (*q.shape[:1], problem.num_heads_q, q.shape[1])
        self.result = Result(zeros(*q.shape[:-1], problem.head_dim_v), zeros(*rows).fill_(-torch.inf))
        self.row_scores = zeros(*rows)
        for name in grads:
            operand = getattr(tensors, name)
            shape = operand.shape if name != "bias" else bias_shape or collapsed(operand).shape
            setattr(self.result, "d" + name, zeros(*shape))

    def put_rows(self, target: torch.Tensor, group: Sequence[Extent], i0: int, part: torch.Tensor) -> None:
        """part [n, rows, heads, dim] into a tensor shaped like q or out."""
        for n, e in enumerate(group):
            home = target[e.row : e.row + e.q_len] if self.problem.packed else target[e.sequence]
            home[i0 : i0 + part.shape[1]] = part[n]

    def put_lse(self, target: torch.Tensor, group: Sequence[Extent], i0: int, part: torch.Tensor) -> None:
        """part [n, heads, rows]."""
        for n, e in enumerate(group):
            home = target[:, e.row : e.row + e.q_len] if self.problem.packed else target[e.sequence]
            home[:, i0 : i0 + part.shape[2]] = part[n]

    def add_keys(self, target: torch.Tensor, group: Sequence[Extent], part: torch.Tensor) -> None:
        """part [n, heads, keys, dim] into a tensor shaped like k or v."""
        pages, page_size = self.tensors.page_table, self.problem.page_size
        for n, e in enumerate(group):
            if pages is not None and page_size is not None:
                j = torch.arange(e.lo, e.kv_len, device=target.device)
                place = (pages[e.sequence].long()[j // page_size], j % page_size)
                target.index_put_(place, part[n].transpose(0, 1), accumulate=True)
                continue
            home = target[e.key : e.key + e.kv_len] if self.problem.packed else target[e.sequence, : e.kv_len]
            home[e.lo :] += part[n].transpose(0, 1)

    def add_bias(self, target: torch.Tensor, group: Sequence[Extent], i0: int, part: torch.Tensor) -> None:
        """part [n, Hq, rows, keys], summed over the dimensions in which target has size 1."""
        shape, rows = target.shape, part.shape[2]
        for dim in (1, 2, 3):
            part = part.sum(dim, keepdim=True) if shape[dim] == 1 else part
        for n, e in enumerate(group):
            home = target[0 if shape[0] == 1 else e.sequence]
            home = home if shape[2] == 1 else home[:, i0 : i0 + rows]
            home = home if shape[3] == 1 else home[..., e.lo : e.kv_len]
            home += part[n]


def _alike(problem: AttentionProblem, found: Sequence[Extent]) -> Iterator[list[Extent]]:
    """Sequences of one shape together, within the memory budget."""
    groups: dict[tuple[object, ...], list[Extent]] = {}
    for e in found:
        old = e.old_len if e.fits else -1
        groups.setdefault((e.fits, old, *e.shape), []).append(e)
    for group in groups.values():
        q_len, lo, kv_len, _ = group[0].shape
        step = max(1, _ELEMENTS // max(1, problem.num_heads_q * q_len * max(kv_len - lo, problem.head_dim)))
        for start in range(0, len(group), step):
            yield group[start : start + step]


@torch.no_grad()
def evaluate(
    problem: AttentionProblem,
    tensors: Tensors,
    arithmetic: Arithmetic,
    grads: Sequence[str],
    measure: bool = False,
    bias_shape: Sequence[int] | None = None,
) -> tuple[Result, Scale | None]:
    """Forward, and the backward of `grads` when not empty; with measure, also A, K and score bounds."""
    places = _Places(problem, tensors, arithmetic.dtype, grads, bias_shape)
    scale = Scale(_Places(problem, tensors, arithmetic.dtype, grads, bias_shape).result) if measure else None
    for group in _alike(problem, extents(problem, tensors)):
        if group[0].fits:
            _Group(problem, tensors, arithmetic, grads, places, scale, group).run()
        elif places.result.out is not None and places.result.lse is not None:
            n, rows = len(group), group[0].q_len
            nan = torch.full((n, rows, problem.num_heads_q, 1), torch.nan, device=tensors.q.device)
            places.put_rows(places.result.out, group, 0, nan.expand(-1, -1, -1, problem.head_dim_v))
            places.put_lse(places.result.lse, group, 0, nan[..., 0].transpose(1, 2))
    if scale is not None:
        scale.scores = places.row_scores
        scale.magnitude.lse = None
    return places.result, scale


@dataclass
class _Group:
    """Sequences of one shape, a block of rows at a time. Tensors are [n, Hkv, group * rows, .] with heads folded."""

    problem: AttentionProblem
    tensors: Tensors
    arithmetic: Arithmetic
    grads: Sequence[str]
    places: _Places
    scale: Scale | None
    group: Sequence[Extent]

    def run(self) -> None:
        p, first, n = self.problem, self.group[0], len(self.group)
        self.keys = first.kv_len - first.lo
        tf32 = p.tf32 and p.dtype == torch.float32 and not self.arithmetic.exact
        self.operand = storage(p) if tf32 else (lambda x: x)
        self.k, self.v = (self.operand(_keys(p, self.tensors, x, self.group).to(self.arithmetic.dtype)) for x in "kv")
        self.dk, self.dv = torch.zeros_like(self.k), torch.zeros_like(self.v)
        self.k_size, self.v_size = torch.zeros_like(self.k), torch.zeros_like(self.v)
        self.column_count = torch.zeros(n, p.num_heads_kv, self.keys, dtype=torch.int64, device=self.k.device)
        step = max(1, _ELEMENTS // max(1, n * p.num_heads_q * max(self.keys, p.head_dim)))
        for i0 in range(0, first.q_len, step):
            self.rows(i0, min(i0 + step, first.q_len))
        result, scale = self.places.result, self.scale
        for name, part, size in (("dk", self.dk, self.k_size), ("dv", self.dv, self.v_size)):
            if name[1:] in self.grads:
                self.places.add_keys(getattr(result, name), self.group, part)
                if scale is not None:
                    self.places.add_keys(getattr(scale.magnitude, name), self.group, size)
                    longest = int(self.column_count.max()) if self.column_count.numel() else 0
                    scale.longest[name] = max(scale.longest[name], longest)

    def fold(self, x: torch.Tensor) -> torch.Tensor:
        """[n, Hq, rows, ...] to [n, Hkv, group * rows, ...]."""
        return x.reshape(x.shape[0], self.problem.num_heads_kv, self.problem.group * x.shape[2], *x.shape[3:])

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(x.shape[0], self.problem.num_heads_q, x.shape[2] // self.problem.group, *x.shape[3:])

    def query_rows(self, x: torch.Tensor, i0: int, i1: int) -> torch.Tensor:
        part = gather_rows(self.problem, x, self.group)[:, i0:i1].transpose(1, 2)
        return self.fold(part.to(self.arithmetic.dtype))

    def dlse_rows(self, i0: int, i1: int) -> torch.Tensor | None:
        if self.tensors.dlse is None:
            return None
        packed, x = self.problem.packed, self.tensors.dlse
        parts = [x[:, e.row + i0 : e.row + i1] if packed else x[e.sequence, :, i0:i1] for e in self.group]
        return self.fold(torch.stack(parts).to(self.arithmetic.dtype))

    def add_terms(self, s: torch.Tensor, seen: torch.Tensor, i0: int, i1: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Bias and ALiBi; s and seen are [n, Hq, rows, keys]. A score of -inf is hidden."""
        p, t, first = self.problem, self.tensors, self.group[0]
        if t.bias is not None:
            bias = torch.stack([t.bias[e.sequence, :, i0:i1, e.lo : e.kv_len] for e in self.group])
            bias = bias if p.dtype == torch.float64 else bias.float()
            s = s + bias.to(s.dtype).masked_fill(~seen, 0.0)
        if t.alibi_slopes is not None:
            pos = torch.arange(i0 + first.shift, i1 + first.shift, device=s.device)
            distance = (pos[:, None] - torch.arange(first.lo, first.kv_len, device=s.device)).abs().to(s.dtype)
            slopes = torch.stack([t.alibi_slopes[e.sequence] for e in self.group]).to(s.dtype)
            s = s - slopes[:, :, None, None] * distance
        if p.dtype != torch.float64 and (t.bias is not None or t.alibi_slopes is not None):
            s = s.float().to(s.dtype)
        return s, seen & ~((s == -torch.inf) & seen)

    def kept(self, i0: int, i1: int) -> torch.Tensor | None:
        """keep / (1 - threshold / 65536), folded; None without dropout."""
        p, first = self.problem, self.group[0]
        if not p.dropout_threshold or self.tensors.dropout_seed is None:
            return None
        number = numbers_rectangle(
            self.tensors.dropout_seed, [e.sequence for e in self.group], p.num_heads_q,
            (i0, i1), (first.lo, first.kv_len), self.k.device,
        )  # fmt: skip
        keep = (number >= p.dropout_threshold).to(self.arithmetic.dtype)
        return self.fold(keep * 65536 / max(1, 65536 - p.dropout_threshold))

    def rows(self, i0: int, i1: int) -> None:
        p, t, how, places, scale = self.problem, self.tensors, self.arithmetic, self.places, self.scale
        dtype, q = how.dtype, self.operand(self.query_rows(t.q, i0, i1))
        k, v = self.k, self.v
        seen = _visible(p, t, self.group, i0, i1)
        if t.bias is not None:
            bias = torch.stack([t.bias[e.sequence, :, i0:i1, e.lo : e.kv_len] for e in self.group])
            seen &= bias.to(torch.float64 if p.dtype == torch.float64 else torch.float32) != -torch.inf
        s = torch.where(self.fold(seen), q @ k.mT, 0.0) * p.scale
        slope = size_slope = None
        if p.softcap is not None:
            tanh = torch.tanh(s / p.softcap)
            s, slope, size_slope = p.softcap * tanh, 1 - tanh * tanh, 1 + tanh * tanh
        early = s.abs() if scale is not None else s
        if scale is not None and p.tf32:  # rounded operands err by their products, not by a sum that cancels
            early = torch.where(self.fold(seen), (q.abs() @ k.abs().mT) * abs(p.scale), 0.0)
        s, shown = self.add_terms(self.heads(s), seen, i0, i1)
        s, seen = self.fold(s), self.fold(shown)
        s = s.masked_fill(~seen, -torch.inf)
        m = s.amax(-1) if self.keys else torch.full(s.shape[:-1], -torch.inf, dtype=dtype, device=s.device)
        sinks = None
        if t.sinks is not None:
            sinks = t.sinks if p.dtype == torch.float64 else t.sinks.float()
            sinks = self.fold(sinks.to(dtype)[None, :, None].expand(len(self.group), -1, i1 - i0))
            m = torch.maximum(m, sinks)
        base = m.masked_fill(m == -torch.inf, 0.0)
        e = torch.exp(s - base[..., None])  # hidden: exp(-inf) = 0
        total = e.sum(-1)
        sink_weight = None
        if sinks is not None:
            sink_weight = torch.exp(sinks - base)
            total = total + sink_weight
        empty = total == 0
        divisor = total.masked_fill(empty, 1.0)
        lse = (base + torch.log(divisor)).masked_fill(empty, -torch.inf)
        prob = torch.where(seen, e / divisor[..., None], 0.0)
        keep = self.kept(i0, i1)
        dropped = prob if keep is None else prob * keep
        if how.late_division:
            weight = how.store(torch.where(seen, e, 0.0) if keep is None else torch.where(seen, e * keep, 0.0))
            out = selected_product(weight, v, seen) / divisor[..., None]
        else:
            out = selected_product(how.store(dropped), v, seen)
        out = out if how.exact else out.to(p.dtype).to(dtype)
        assert places.result.out is not None and places.result.lse is not None
        places.put_rows(places.result.out, self.group, i0, self.heads(out).transpose(1, 2))
        places.put_lse(places.result.lse, self.group, i0, self.heads(lse))
        out_size = None
        if scale is not None:
            out_size = self.measure(scale, i0, seen, s, early, prob, dropped)
        if not self.grads:
            return
        dlse = self.dlse_rows(i0, i1)
        dlse = torch.zeros_like(lse) if dlse is None else dlse.masked_fill(lse == -torch.inf, 0.0)
        dout = torch.zeros_like(out) if t.dout is None else self.query_rows(t.dout, i0, i1)
        # an empty row's dout meets out = 0, NaN included
        inner = torch.where(seen.any(-1), (dout * out).sum(-1), 0.0)
        dout = self.operand(dout)
        grad = torch.where(seen, dout @ v.mT, 0.0)
        grad = grad if keep is None else grad * keep
        ds = torch.where(seen, prob * (grad - (inner - dlse)[..., None]), 0.0)
        ds_bias = how.store(ds)
        ds = ds_bias if slope is None else how.store(torch.where(seen, ds * slope, 0.0))
        result = places.result
        if result.dq is not None:
            dq = selected_product(ds, k, seen) * p.scale
            places.put_rows(result.dq, self.group, i0, self.heads(dq).transpose(1, 2))
        if result.dk is not None:
            self.dk += selected_product(ds.mT, q, seen.mT) * p.scale
        if result.dv is not None:
            self.dv += selected_product(how.store(dropped).mT, dout, seen.mT)
        if result.dbias is not None:
            places.add_bias(result.dbias, self.group, i0, self.heads(ds_bias))
        if result.dsinks is not None and sink_weight is not None:
            part = sink_weight / divisor * (dlse - inner)
            result.dsinks += self.heads(torch.where(empty, 0.0, part)).sum((0, 2))
        if scale is not None and out_size is not None:
            self.measure_grads(scale, i0, q, dout, dlse, seen, prob, dropped, keep, out_size, size_slope, sink_weight,
                               divisor)  # fmt: skip

    def measure(
        self, scale: Scale, i0: int, seen: torch.Tensor, s: torch.Tensor, early: torch.Tensor, prob: torch.Tensor,
        dropped: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """A of out, K along a row, and the sizes of the scores that carry weight."""
        p, places = self.problem, self.places
        out_size = selected_product(dropped, self.v.abs(), seen)
        assert scale.magnitude.out is not None
        places.put_rows(scale.magnitude.out, self.group, i0, self.heads(out_size).transpose(1, 2))
        size = torch.maximum(s.abs().nan_to_num(0.0, 0.0), early.nan_to_num(0.0, 0.0))
        weighty = torch.where(seen & (prob > 2.0**-40), size, 0.0)
        if self.keys and weighty.numel():
            places.put_lse(places.row_scores, self.group, i0, self.heads(weighty.amax(-1)))
            scale.max_score = max(scale.max_score, float(torch.where(seen, size, 0.0).max()))
            scale.max_keys = max(scale.max_keys, int(seen.sum(-1).max()))
        for name, width in (("out", p.head_dim), ("dq", max(p.head_dim, p.head_dim_v))):
            scale.longest[name] = max(scale.longest[name], scale.max_keys, width)
        self.column_count += seen.sum(-2)
        return out_size

    def measure_grads(
        self, scale: Scale, i0: int, q: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor, seen: torch.Tensor,
        prob: torch.Tensor, dropped: torch.Tensor, keep: torch.Tensor | None, out_size: torch.Tensor,
        slope: torch.Tensor | None, sink_weight: torch.Tensor | None, divisor: torch.Tensor,
    ) -> None:  # fmt: skip
        """A of every gradient: the same formulas on absolute values."""
        p, size, places = self.problem, scale.magnitude, self.places
        inner = torch.where(seen.any(-1), (dout.abs() * out_size).sum(-1), 0.0) + dlse.abs()
        grad = torch.where(seen, dout.abs() @ self.v.abs().mT, 0.0)
        grad = grad if keep is None else grad * keep
        ds_bias = torch.where(seen, prob * (grad + inner[..., None]), 0.0)
        ds = ds_bias if slope is None else torch.where(seen, ds_bias * slope, 0.0)
        if size.dq is not None:
            dq = selected_product(ds, self.k.abs(), seen) * abs(p.scale)
            places.put_rows(size.dq, self.group, i0, self.heads(dq).transpose(1, 2))
        if size.dk is not None:
            self.k_size += selected_product(ds.mT, q.abs(), seen.mT) * abs(p.scale)
        if size.dv is not None:
            self.v_size += selected_product(dropped.mT, dout.abs(), seen.mT)
        if size.dbias is not None:
            places.add_bias(size.dbias, self.group, i0, self.heads(ds_bias))
            full = p.batch * p.num_heads_q * p.seqlen_q * p.seqlen_k
            scale.longest["dbias"] = max(1, full // max(1, size.dbias.numel()))
        if size.dsinks is not None and sink_weight is not None:
            size.dsinks += self.heads(sink_weight / divisor * inner).sum((0, 2))
            scale.longest["dsinks"] = max(1, self.places.row_scores.numel() // max(1, p.num_heads_q))
