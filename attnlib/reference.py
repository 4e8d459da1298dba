"""The float64 definition of the operation in plain differentiable torch, and the backend "reference" made of it.

    s   = scale * (q . k);  s = softcap * tanh(s / softcap);  s = s + bias + alibi;  s = -inf where not visible
    m   = max(max_j s_j, sink);  l = sum_j exp(s_j - m) + exp(sink - m);  lse = m + log(l)
    out = sum_j keep_j * exp(s_j - m) / l / (1 - threshold / 65536) * v_j

Slow and clear: sequences are gathered to their extent [lo, kv_len), hidden elements are selected away and never
multiplied by 0, so a NaN that a row cannot see reaches neither its result nor any derivative of it. Second
derivatives and torch.func transforms work. docs/semantics.md has the full contract.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ._extents import Extent, append, collapsed, extents, gather_keys, gather_rows, grouped
from .backend import BackendBase, Capabilities, Family, Target
from .dropout import keep_rectangle
from .errors import UnsupportedError
from .problem import DTYPES, AttentionProblem, Tensors

# ---------------------------------------------------------------- products that select


def selected_product(weight: torch.Tensor, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Sum of weight[..., i, j] * x[..., j, :] over the j with seen[..., i, j] only, whatever x holds elsewhere."""
    weight = torch.where(seen, weight, 0.0)
    bad = ~torch.isfinite(x).all(-1)
    if not bool(bad.any()):
        return weight @ x
    out = weight @ torch.where(bad[..., None], 0.0, x)
    for j in torch.nonzero(bad.flatten(0, -2).any(0)).flatten().tolist():
        term = weight[..., j, None] * x[..., j, None, :]
        out = out + torch.where((seen & bad[..., None, :])[..., j, None], term, 0.0)
    return out


def _moved(x: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


class _Scores(torch.autograd.Function):
    """a [..., i, d], b [..., j, d] -> a . b where seen [..., i, j], else 0; equal leading dimensions."""

    @staticmethod
    def forward(a: torch.Tensor, b: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        return torch.where(seen, a @ b.mT, 0.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        a, b, seen = ctx.saved_tensors
        da = _combine(grad, b, seen) if ctx.needs_input_grad[0] else None
        return da, _combine(grad.mT, a, seen.mT) if ctx.needs_input_grad[1] else None, None

    @staticmethod
    def jvp(ctx: Any, da: Any, db: Any, _: Any) -> Any:
        a, b, seen = ctx.saved_tensors
        left = None if da is None else _scores(da, b, seen)
        right = None if db is None else _scores(a, db, seen)
        return _sum(left, right)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: torch.Tensor) -> Any:
        return _scores(*(_moved(x, d, info.batch_size) for x, d in zip(args, in_dims, strict=True))), 0


class _Combine(torch.autograd.Function):
    """w [..., i, j], x [..., j, d] -> sum of w * x over the seen j; equal leading dimensions."""

    @staticmethod
    def forward(w: torch.Tensor, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        return selected_product(w, x, seen)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        w, x, seen = ctx.saved_tensors
        dw = _scores(grad, x, seen) if ctx.needs_input_grad[0] else None
        return dw, _combine(w.mT, grad, seen.mT) if ctx.needs_input_grad[1] else None, None

    @staticmethod
    def jvp(ctx: Any, dw: Any, dx: Any, _: Any) -> Any:
        w, x, seen = ctx.saved_tensors
        left = None if dw is None else _combine(dw, x, seen)
        right = None if dx is None else _combine(w, dx, seen)
        return _sum(left, right)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: torch.Tensor) -> Any:
        return _combine(*(_moved(x, d, info.batch_size) for x, d in zip(args, in_dims, strict=True))), 0


def _sum(left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor | None:
    return right if left is None else left if right is None else left + right


def _scores(a: torch.Tensor, b: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _Scores.apply(a, b, seen)  # type: ignore[no-untyped-call]
    return result


def _combine(w: torch.Tensor, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _Combine.apply(w, x, seen)  # type: ignore[no-untyped-call]
    return result


# ---------------------------------------------------------------- the operation


def _rounded(s: torch.Tensor) -> torch.Tensor:
    """s to float32 and back, with the gradient passed straight through."""
    fixed = s.detach()
    near = fixed.float().double()
    return torch.where(torch.isfinite(fixed), s + (near - fixed), s)


def _part(x: torch.Tensor, group: Sequence[Extent]) -> torch.Tensor:
    """The group's sequences, rows and keys of a [batch, heads, seqlen_q, seqlen_k] operand, collapsed or not."""
    first = group[0]
    if x.shape[0] != 1:
        x = x[first.sequence : first.sequence + len(group)]
    if x.shape[2] != 1:
        x = x[:, :, : first.q_len]
    return x[..., first.lo : first.kv_len] if x.shape[3] != 1 else x


def _visible(problem: AttentionProblem, tensors: Tensors, group: Sequence[Extent]) -> torch.Tensor:
    """Window, boolean mask and block mask of a group, bool [n, Hq, q_len, kv_len - lo]."""
    first, device = group[0], tensors.q.device
    i = torch.arange(first.q_len, device=device)[:, None]
    j = torch.arange(first.lo, first.kv_len, device=device)[None, :]
    left, right = problem.window
    seen = torch.ones((first.q_len, first.kv_len - first.lo), dtype=torch.bool, device=device)
    if left is not None:
        seen = seen & (j - (i + first.shift) >= -left)
    if right is not None:
        seen = seen & (j - (i + first.shift) <= right)
    seen = seen.expand(len(group), problem.num_heads_q, *seen.shape)
    if tensors.mask is not None:
        seen = seen & _part(tensors.mask, group)
    if tensors.block_mask is not None and problem.block_mask is not None:
        block_q, block_k = problem.block_mask
        blocks = tensors.block_mask[first.sequence : first.sequence + len(group)]
        seen = seen & blocks[:, :, i // block_q, j // block_k]
    return seen


def _attend(
    problem: AttentionProblem,
    tensors: Tensors,
    group: Sequence[Extent],
    bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """out [n, Hq, q_len, Dv], lse, m and l [n, Hq, q_len] of one group, in float64."""
    first, n, hq, hkv = group[0], len(group), problem.num_heads_q, problem.num_heads_kv
    q = gather_rows(problem, tensors.q, group).double().transpose(1, 2)
    k, v = (gather_keys(problem, tensors, x, group).double().transpose(1, 2) for x in (tensors.k, tensors.v))
    k, v = (x[:, :, None].expand(n, hkv, problem.group, -1, x.shape[-1]).reshape(n, hq, *x.shape[2:]) for x in (k, v))
    seen = _visible(problem, tensors, group)
    if bias is not None:
        bias = _part(bias, group)
        seen = seen & (bias != -torch.inf)
    # hidden elements are 0 from here on, so that nothing below has a NaN in a branch that is not taken
    s = _scores(q, k, seen) * problem.scale
    if problem.softcap is not None:
        s = problem.softcap * torch.tanh(s / problem.softcap)
    if bias is not None:
        s = s + torch.where(seen, bias, 0.0)
    if tensors.alibi_slopes is not None:
        pos = torch.arange(first.q_len, device=q.device)[:, None] + first.shift
        distance = (pos - torch.arange(first.lo, first.kv_len, device=q.device)).abs()
        slopes = tensors.alibi_slopes[first.sequence : first.sequence + n].double()
        s = s - torch.where(seen, slopes[:, :, None, None] * distance, 0.0)
    if (bias is not None or tensors.alibi_slopes is not None) and problem.dtype != torch.float64:
        s = _rounded(s)
    seen = seen & (s != -torch.inf)
    m = torch.full(s.shape[:-1], -torch.inf, dtype=torch.float64, device=q.device)
    if s.shape[-1]:
        m = torch.where(seen, s.detach(), -torch.inf).amax(-1)
    if sinks is not None:
        m = torch.maximum(m, sinks.detach()[:, None].expand_as(m))
    anchor = torch.where(m == -torch.inf, 0.0, m)  # a constant: its share of every derivative cancels
    e = torch.where(seen, torch.exp(torch.where(seen, s - anchor[..., None], 0.0)), 0.0)
    total = e.sum(-1)
    if sinks is not None:
        total = total + torch.exp(sinks[:, None] - anchor)
    empty = total == 0
    divisor = torch.where(empty, 1.0, total)
    lse = torch.where(empty, -torch.inf, anchor + torch.log(divisor))
    p = e / divisor[..., None]
    if problem.dropout_threshold > 0 and tensors.dropout_seed is not None:
        kept = keep_rectangle(
            tensors.dropout_seed, problem.dropout_threshold, [x.sequence for x in group], hq,
            (0, first.q_len), (first.lo, first.kv_len), q.device,
        )  # fmt: skip
        p = p * (kept.double() / max(1.0 - problem.dropout_threshold / 65536, 2.0**-17))
    return _combine(p, v, seen), lse, m, total


def _assemble(problem: AttentionProblem, pieces: Sequence[tuple[Extent, torch.Tensor]], size: int, fill: float) -> Any:
    """Pieces [n, rows, ...] back to [batch, size, ...] or packed [size, ...]; rows that are no query hold fill."""

    def blank(like: torch.Tensor, rows: int) -> torch.Tensor:
        return torch.full((like.shape[0], rows, *like.shape[2:]), fill, dtype=like.dtype, device=like.device)

    parts, end = [], 0
    for extent, piece in pieces:
        if problem.packed:
            parts += [blank(piece, extent.row - end), piece]
            end = extent.row + piece.shape[1]
        else:
            missing = size - piece.shape[1]
            parts.append(torch.cat([piece, blank(piece, missing)], 1) if missing else piece)
    if problem.packed:
        return torch.cat([*parts, blank(parts[0], size - end)], 1)[0]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 0)


def _forward(problem: AttentionProblem, tensors: Tensors) -> tuple[torch.Tensor, ...]:
    """out, lse, m and l in float64 and in API layout."""
    hq, dv, device = problem.num_heads_q, problem.head_dim_v, tensors.q.device
    found = extents(problem, tensors)
    append(problem, tensors, found)
    narrow = problem.dtype != torch.float64
    bias = sinks = None
    if tensors.bias is not None:
        bias = collapsed(tensors.bias).double()
        bias = _rounded(bias) if narrow and tensors.bias.dtype == torch.float64 else bias
    if tensors.sinks is not None:
        sinks = tensors.sinks.double()
        sinks = _rounded(sinks) if narrow and tensors.sinks.dtype == torch.float64 else sinks
    # every result hangs on its operands, even where there is no query
    operands = [x for x in (tensors.q, tensors.k, tensors.v, bias, sinks) if x is not None]
    anchor = torch.stack([x[..., :0].sum(dtype=torch.float64) for x in operands]).sum()
    pieces: list[tuple[Extent, tuple[torch.Tensor, ...]]] = []
    for group in grouped(problem, found):
        if group[0].fits:
            out, *rows = _attend(problem, tensors, group, bias, sinks)
            piece = (out.transpose(1, 2), *(x.transpose(1, 2) for x in rows))
        else:
            shape = (1, group[0].q_len, hq)
            nan = torch.full(shape, torch.nan, dtype=torch.float64, device=device)
            piece = (nan[..., None].expand(*shape, dv), nan, nan, nan)
        pieces.append((group[0], piece))
    if not pieces:
        shape = (1 if problem.packed else 0, 0 if problem.packed else problem.seqlen_q, hq)
        none = torch.zeros(shape, dtype=torch.float64, device=device)
        pieces = [(Extent(0, 0, 0, 0, 0), (none[..., None].expand(*shape, dv), none, none, none))]
    size = tensors.q.shape[0] if problem.packed else problem.seqlen_q
    fills = (0.0, -torch.inf, -torch.inf, 0.0)
    out, *rows = (_assemble(problem, [(e, p[i]) for e, p in pieces], size, fill) for i, fill in enumerate(fills))
    lse, m, total = (x.transpose(-1, -2) for x in rows)
    return out + anchor, lse + anchor, m, total


def attention(problem: AttentionProblem, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by its definition, in float64, differentiable any number of times.

        out_i = sum_j keep_ij * exp(s_ij - m_i) / l_i / (1 - threshold / 65536) * v_j,   lse_i = m_i + log(l_i)

    with the scores, the visibility, the alignment and the dropout of docs/semantics.md. For a dtype other than float64
    the scores are rounded to float32 after a bias or ALiBi is added; the gradient passes straight through.

    Args:
        problem: what is asked for. Its precision (tf32) and grads play no part.
        tensors: the operands in canonical form; out, lse, stats and the d* fields are not touched and may be anything.
            With k_new, the caches k and v are written in place first.

    Returns:
        out in q's dtype, shaped like q with head_dim_v; lse float32 (float64 for float64), [batch, Hq, seqlen_q] or
        packed [Hq, total_q]. A sequence whose length does not fit its capacity has NaN in both.

    Source: Vaswani et al., "Attention is all you need", 2017; docs/semantics.md.
    """
    out, lse, _, _ = _forward(problem, tensors)
    lse_dtype = torch.float64 if problem.dtype == torch.float64 else torch.float32
    return out.to(problem.dtype).contiguous(), lse.to(lse_dtype).contiguous()


# ---------------------------------------------------------------- the backend


class ReferencePlan:
    """Runs the definition; one plan serves every problem."""

    def forward(self, problem: AttentionProblem, tensors: Tensors) -> None:
        with torch.no_grad():
            out, lse, m, total = _forward(problem, tensors)
            tensors.out.copy_(out)
            tensors.lse.copy_(lse)
            if tensors.stats is not None:
                tensors.stats[0].copy_(m)
                tensors.stats[1].copy_(total)

    def backward(self, problem: AttentionProblem, tensors: Tensors) -> None:
        targets = {name: getattr(tensors, "d" + name) for name in ("q", "k", "v", "bias", "sinks")}
        targets = {name: target for name, target in targets.items() if target is not None}
        leaves: dict[str, torch.Tensor] = {}
        for name, target in targets.items():
            operand: torch.Tensor = getattr(tensors, name).detach()
            # a bias is summed over its broadcast dimensions in float64, rounded once when it is added
            operand = collapsed(operand, target) if name == "bias" else operand
            leaves[name] = operand.double().requires_grad_()
        inputs: dict[str, Any] = dict(leaves)
        with _autograd_on():
            if "bias" in leaves and tensors.bias is not None:
                inputs["bias"] = leaves["bias"].expand(tensors.bias.shape)
            out, lse, _, _ = _forward(problem, replace(tensors, **inputs))
            grads_of = [(out, tensors.dout), (lse, tensors.dlse)]
            wanted = [(result, grad.detach().double()) for result, grad in grads_of if grad is not None]
            found = torch.autograd.grad(
                [result for result, _ in wanted], list(leaves.values()), [grad for _, grad in wanted], allow_unused=True
            )
        for name, grad in zip(leaves, found, strict=True):
            grad = torch.zeros_like(leaves[name]) if grad is None else grad
            if name in ("bias", "sinks"):
                collapsed(targets[name]).add_(grad)
            else:
                targets[name].copy_(grad)


@contextlib.contextmanager
def _autograd_on() -> Iterator[None]:
    """Record gradients, also inside an operator, where torch's dispatcher has switched the recording off."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradCPU", "AutogradCUDA", "AutogradFunctionality", "ADInplaceOrView"):
        exclude = exclude.remove(torch._C._dispatch_key_parse(key))
    with torch._C._ForceDispatchKeyGuard(include, exclude), torch.enable_grad():
        yield


class ReferenceBackend(BackendBase):
    """The definition as a backend: every dtype, device and feature; slow, and never chosen silently."""

    def __init__(self) -> None:
        capabilities = Capabilities(
            device_kinds=frozenset({"cpu", "cuda", "rocm"}),
            dtypes=frozenset(DTYPES),
            masked_nan_safe_forward=True,
            masked_nan_safe_backward=True,
        )
        super().__init__("reference", (Family("", capabilities, "float64 definition in torch"),))

    def describe(self, problem: AttentionProblem, family: str, target: Target) -> Mapping[str, Any]:
        return {"kernel": "torch, float64, O(seqlen_q * seqlen_k) memory"}

    def plan(
        self, problem: AttentionProblem, family: str, target: Target, config: Mapping[str, Any] | None = None
    ) -> ReferencePlan:
        if config:
            raise UnsupportedError(f"reference: needs no config, got {dict(config)}")
        return ReferencePlan()
