"""A plain tiled attention in torch: the conformance suite's own backend, and the body of its mutants.

    for each tile of queries:                       backward, by recomputation:
        for each tile of keys it may see:               p  = exp(s - m) / l
            s = scores; m' = max(m, s)                  dv += (keep p)^T dO;  dp = keep (dO v^T)
            p = exp(s - m')                             ds = p (dp - delta),  delta = dO.out - dlse
            l = l exp(m - m') + sum p                   dq += ds k;  dk += ds^T q
            acc = acc exp(m - m') + (keep p) v
        out = acc / l;  lse = m + log l

It takes everything the contract defines, on any device torch runs on, in float32 (float64 for float64) and with
memory linear in the sequence length. It is slow. A config may set block_q, block_k and one of
`attnlib.conformance.faults.FAULTS`; each fault is one switch in the code below or in tile.py.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..backend import BackendBase, Capabilities, Family, Plan, Refusal, RefusalCode, Target
from ..errors import UnsupportedError
from ..problem import DTYPES, AttentionProblem, Tensors
from .faults import FAULTS
from .tile import Run, Scores, select_matmul

_CAPABILITIES = Capabilities(
    device_kinds=frozenset({"cpu", "cuda", "rocm"}),
    dtypes=frozenset(DTYPES),
    masked_nan_safe_forward=True,
    masked_nan_safe_backward=True,
)


class Tiled(BackendBase):
    """Backend "tiled": every feature, every dtype; `faults` and `test_configs` are read by the conformance suite."""

    faults = {name: fault.description for name, fault in FAULTS.items()}
    test_configs = ({"block_q": 16, "block_k": 48}, {"block_q": 48, "block_k": 16})

    def __init__(self) -> None:
        super().__init__("tiled", (Family("", _CAPABILITIES, "plain torch, for conformance"),))

    def plan(
        self, problem: AttentionProblem, family: str, target: Target, config: Mapping[str, Any] | None = None
    ) -> Plan:
        config = dict(config or {})
        refused = [_refusal(name, value) for name, value in config.items()]
        if found := tuple(refusal for refusal in refused if refusal is not None):
            raise UnsupportedError("tiled: " + "; ".join(map(str, found)), {"tiled": found})
        return TiledPlan(**config)


def _refusal(name: str, value: Any) -> Refusal | None:
    if name in ("block_q", "block_k"):
        fits = isinstance(value, int) and value >= 1
        return None if fits else Refusal(RefusalCode.CONFIG, name, "an int of at least 1", repr(value))
    if name == "fault":
        fits = value is None or value in FAULTS
        return None if fits else Refusal(RefusalCode.CONFIG, name, "a name in conformance.faults.FAULTS", repr(value))
    return Refusal(RefusalCode.CONFIG, "config", "block_q, block_k or fault", repr(name))


@dataclass(frozen=True)
class TiledPlan:
    """Tile sizes and, for mutants, the one thing that is wrong."""

    block_q: int = 64
    block_k: int = 64
    fault: str | None = None

    def forward(self, problem: AttentionProblem, tensors: Tensors) -> None:
        run = Run(problem, tensors, self.fault)
        if problem.append:
            run.append()
        _clear_outputs(run)
        if run.has("decode_heads_swapped") and problem.seqlen_q == 1 and problem.group > 1:
            tensors.q = tensors.q.unflatten(-2, (-1, problem.group)).transpose(-3, -2).flatten(-3, -2)
        for first in range(0, run.max_q, self.block_q):
            self._forward_rows(run, torch.arange(first, min(first + self.block_q, run.max_q), device=run.device))
        _mark_overfull(run)

    def backward(self, problem: AttentionProblem, tensors: Tensors) -> None:
        run = Run(problem, tensors, self.fault)
        shape = (problem.batch, problem.num_heads_kv, run.max_k)
        dk = torch.zeros((*shape, problem.head_dim), dtype=run.dtype, device=run.device)
        dv = torch.zeros((*shape, problem.head_dim_v), dtype=run.dtype, device=run.device)
        if tensors.dq is not None and not run.has("gradients_unwritten"):
            tensors.dq.zero_()
        for first in range(0, run.max_q, self.block_q):
            if run.has("last_queries_missing_in_dk") and first and first + self.block_q > run.max_q:
                break
            row = torch.arange(first, min(first + self.block_q, run.max_q), device=run.device)
            self._backward_rows(run, row, dk, dv)
        if run.has("dv_off") or (run.has("dv_off_in_bfloat16") and problem.dtype == torch.bfloat16):
            dv = dv * 1.004
        if run.has("nondeterministic") and problem.deterministic:
            dk = dk * (1 + _noise())
        for target, total in ((tensors.dk, dk), (tensors.dv, dv)):
            if target is not None:
                _store_keys(run, target, total)

    def _key_tiles(self, run: Run, row: torch.Tensor) -> list[torch.Tensor]:
        first, last = run.key_range(row)
        starts = range(first // self.block_k * self.block_k, last, self.block_k)
        tiles = [torch.arange(j, min(j + self.block_k, run.max_k), device=run.device) for j in starts]
        if tiles and len(tiles[-1]) < self.block_k:
            if run.has("partial_tile_dropped"):
                tiles.pop()
            elif run.has("last_key_dropped"):
                tiles[-1] = tiles[-1][:-1]
        if run.has("keys_counted_in_int16"):
            tiles = [tile for tile in tiles if int(tile[0]) < 32768]
        return tiles

    # --- forward ----------------------------------------------------------------------------------------------------

    def _forward_rows(self, run: Run, row: torch.Tensor) -> None:
        problem, tensors, has = run.problem, run.tensors, run.has
        q = run.load("q", tensors.q, row)
        row_max, row_sum = _start(run, q)
        sink_max = row_max
        if has("sink_joined_late"):
            row_max, row_sum = torch.full_like(row_max, -torch.inf), torch.zeros_like(row_sum)
        acc = q.new_zeros((*q.shape[:3], problem.head_dim_v))
        total_v = torch.zeros_like(acc[:, :, :1])
        for key in self._key_tiles(run, row):
            k = run.expand_heads(run.load("k", tensors.k, key))
            v = run.expand_heads(run.load("k", tensors.v, key))
            s = _masked(run, run.scores(q, k, row, key))
            new_max = torch.maximum(row_max, s.score.amax(-1))
            if has("maximum_of_first_tile"):
                new_max = torch.where(row_max == -torch.inf, new_max, row_max)
            finite_max = new_max.masked_fill(new_max == -torch.inf, 0)
            correction = torch.exp(row_max - finite_max)
            p = torch.exp(s.score - finite_max[..., None])
            if has("probabilities_in_bfloat16") and problem.dtype == torch.float32:
                p = p.bfloat16().float()
            keep = run.keep(row, key)
            kept = p if keep is None else p * keep
            added = (kept if has("dropout_before_sum") else p).sum(-1)
            row_sum = row_sum * (1 if has("sum_not_rescaled") else correction) + added
            multiply_all = has("hidden_nan_leaks") or has("padding_loaded") or has("window_not_skipped")
            product = kept @ v if multiply_all else select_matmul(kept, v, s.visible)
            acc = acc * (1 if has("out_not_rescaled") else correction[..., None]) + product
            if has("accumulated_in_storage_dtype"):
                acc = acc.to(problem.dtype).to(acc.dtype)
            total_v, row_max = total_v + v.sum(-2, keepdim=True), new_max
        if has("sink_joined_late"):
            row_sum = row_sum + torch.exp(sink_max - row_max.masked_fill(row_max == -torch.inf, 0))
        empty = row_sum == 0
        out = acc / row_sum[..., None]
        if not has("nan_on_empty_rows"):
            average = total_v / max(run.max_k, 1) if has("average_on_empty_rows") else 0
            out = torch.where(empty[..., None], average, out)
        if has("nan_laundered"):
            out = torch.nan_to_num(out)
        lse = torch.where(empty, -torch.inf, row_max + torch.log(row_sum))
        _store_outputs(run, row, out, lse, row_max, row_sum)

    # --- backward ---------------------------------------------------------------------------------------------------

    def _backward_rows(self, run: Run, row: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> None:
        problem, tensors, has = run.problem, run.tensors, run.has
        assert tensors.dout is not None
        q, dout = run.load("q", tensors.q, row), run.load("q", _dout(run), row)
        lse, delta = run.load_rows(tensors.lse, row), _delta(run, row, dout)
        row_max, row_sum = lse, torch.ones_like(lse)
        if tensors.stats is not None and not has("stats_ignored"):
            row_max, row_sum = (run.load_rows(part, row) for part in tensors.stats)
        exists = (row < run.q_len[:, None])[:, None]
        has_keys = exists & (lse != -torch.inf)
        delta = torch.where(has_keys, delta, 0)
        if tensors.dsinks is not None and tensors.sinks is not None:
            share = torch.exp(tensors.sinks.to(run.dtype)[:, None] - row_max) / row_sum
            if has("sink_gradient_sign"):
                share = -share
            tensors.dsinks -= torch.where(has_keys, share * delta, 0).sum((0, 2))
        dq = torch.zeros_like(q)
        for key in self._key_tiles(run, row):
            k = run.expand_heads(run.load("k", tensors.k, key))
            v = run.expand_heads(run.load("k", tensors.v, key))
            s = run.scores(q, k, row, key)
            if has("bias_ignored_in_backward") and tensors.bias is not None:
                s = s._replace(score=s.score - tensors.bias[:, :, row[:, None], key].to(run.dtype))
            p = torch.exp(s.score - row_max[..., None]) / row_sum[..., None]
            p = torch.where(s.visible, p, p * 0 if has("tail_multiplied_by_zero") else 0)
            keep = run.keep(row, key, backward=True)
            kept = p if keep is None else p * keep
            dp = dout @ v.mT if keep is None or has("dropout_missing_in_dp") else (dout @ v.mT) * keep
            ds = torch.where(s.visible, p * (dp - delta[..., None]), 0)
            if has("dscores_in_bfloat16") and problem.dtype == torch.float32:
                ds = ds.bfloat16().float()
            if tensors.dbias is not None:
                _add_bias_gradient(run, row, key, ds)
            if s.slope is not None and not has("softcap_gradient_missing"):
                ds = torch.where(s.visible, ds * s.slope, 0)
            multiply = _plain_matmul if has("hidden_nan_leaks_backward") else select_matmul
            dq = dq + multiply(ds, k, s.visible)
            dk[:, :, key] += run.reduce_heads(multiply(ds.mT, q, s.visible.mT)) * problem.scale
            dropped = p if has("dropout_missing_in_dv") else kept
            dv[:, :, key] += run.reduce_heads(multiply(dropped.mT, dout, s.visible.mT))
        if has("empty_rows_nan_in_dq"):
            dq = dq + torch.where(exists & ~has_keys, torch.nan, 0.0)[..., None]
        if tensors.dq is not None:
            run.store("q", tensors.dq, row, dq if has("scale_missing_in_dq") else dq * problem.scale)


def _start(run: Run, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """row_max and row_sum before any key: the sink alone, or nothing."""
    sinks = run.tensors.sinks
    row_max = q.new_full(q.shape[:3], -torch.inf)
    if sinks is not None and not run.has("sinks_ignored"):
        if run.has("sinks_of_first_head"):
            sinks = sinks[:1].expand_as(sinks)
        if run.has("sinks_scaled"):
            sinks = sinks * run.problem.scale
        row_max = row_max.maximum(sinks.to(run.dtype)[:, None])
    return row_max, (row_max != -torch.inf).to(run.dtype)


def _masked(run: Run, s: Scores) -> Scores:
    """Scores with -inf where hidden."""
    score = torch.where(s.visible, s.score, -torch.inf)
    if run.has("softcap_after_mask") and run.problem.softcap is not None:
        score = run.problem.softcap * torch.tanh(score / run.problem.softcap)
    return s._replace(score=score)


def _clear_outputs(run: Run) -> None:
    """What rows that are no query hold: out 0, lse -inf."""
    tensors = run.tensors
    if run.has("padding_rows_unwritten"):
        return
    tensors.out.zero_()
    tensors.lse.fill_(-torch.inf)
    if run.has("padding_lse_holds_sink") and tensors.sinks is not None:
        rows = tensors.lse.movedim(0, -1) if run.problem.packed else tensors.lse.transpose(1, 2)
        rows.copy_(tensors.sinks)
    if tensors.stats is not None:
        tensors.stats[0].fill_(-torch.inf)
        tensors.stats[1].zero_()


def _store_outputs(
    run: Run, row: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, row_max: torch.Tensor, row_sum: torch.Tensor
) -> None:
    tensors, sinks = run.tensors, run.tensors.sinks
    if run.has("sink_not_in_lse") and sinks is not None:
        lse = lse + torch.log1p(-torch.exp(sinks.to(run.dtype)[:, None] - lse))
    if run.has("lse_in_base_2"):
        lse = lse / 0.6931471805599453
    if run.has("lse_in_storage_dtype"):
        lse = lse.to(run.problem.dtype).to(lse.dtype)
    if run.has("lse_off"):
        lse = lse + 3e-4 * lse.abs().clamp(1, 1e6)
    if run.has("empty_lse_finite"):
        lse = lse.clamp(min=-1e30)
    if run.has("forward_not_repeatable"):
        out = out * (1 + _noise())
    run.store("q", tensors.out, row, out)
    run.store_rows(tensors.lse, row, lse)
    if tensors.stats is not None and not run.has("stats_unwritten"):
        run.store_rows(tensors.stats[0], row, row_max)
        if run.has("stats_without_sinks") and sinks is not None:
            row_sum = row_sum - torch.exp(sinks.to(run.dtype)[:, None] - row_max)
        run.store_rows(tensors.stats[1], row, row_sum)


def _noise() -> float:
    """A fresh number from 0 to 2^-20, different in every run."""
    return int.from_bytes(os.urandom(4), "little") / 2**52


def _mark_overfull(run: Run) -> None:
    """Sequences whose new tokens do not fit their cache: NaN, so that nobody takes the rows for a result."""
    if bool(run.overfull.any()):
        run.tensors.out[run.overfull] = torch.nan
        run.tensors.lse[run.overfull] = torch.nan


def _dout(run: Run) -> torch.Tensor:
    dout = run.tensors.dout
    assert dout is not None
    if run.has("dout_strides_ignored"):
        return dout.as_strided(dout.shape, run.tensors.out.stride())
    return dout


def _delta(run: Run, row: torch.Tensor, dout: torch.Tensor) -> torch.Tensor:
    """delta = dO.out - dlse per row."""
    if run.has("delta_missing"):
        return dout.new_zeros(dout.shape[:3])
    delta = (dout * run.load("q", run.tensors.out, row)).sum(-1)
    if run.tensors.dlse is not None and not run.has("dlse_ignored"):
        dlse = run.load_rows(run.tensors.dlse, row)
        delta = delta + dlse if run.has("dlse_sign") else delta - dlse
    return delta


def _plain_matmul(weights: torch.Tensor, values: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    return weights @ values


def _add_bias_gradient(run: Run, row: torch.Tensor, key: torch.Tensor, ds: torch.Tensor) -> None:
    """Sum ds over the dimensions along which the bias is broadcast (stride 0), and add it."""
    total = run.tensors.dbias
    assert total is not None
    rows, keys = slice(int(row[0]), int(row[-1]) + 1), slice(int(key[0]), int(key[-1]) + 1)
    total = total[:, :, rows, keys]
    for dim in range(4):
        if total.stride(dim) == 0:
            if run.has("dbias_in_storage_dtype"):
                parts = ds.to(run.problem.bias).unbind(dim)
                ds = functools.reduce(torch.add, parts).unsqueeze(dim).to(run.dtype)
            else:
                ds = ds.narrow(dim, 0, 1) if run.has("dbias_not_reduced") and dim < 2 else ds.sum(dim, keepdim=True)
            total = total.narrow(dim, 0, 1)
    total += ds


def _store_keys(run: Run, target: torch.Tensor, total: torch.Tensor) -> None:
    """Write dk or dv; a page that several sequences share gets the sum."""
    if run.has("gradients_unwritten"):
        run.store("k", target, torch.arange(run.max_k, device=run.device), total)
        return
    whole = torch.zeros(target.shape, dtype=total.dtype, device=total.device)
    key = torch.arange(run.max_k, device=run.device)
    sequence, key = (key < run.kv_len[:, None]).nonzero(as_tuple=True)
    whole.index_put_(run.address("k", sequence, key), total.transpose(1, 2)[sequence, key], accumulate=True)
    target.copy_(whole)
