"""Small problems of any layout and feature, for tests of the definition; everything outside a sequence is NaN."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

from attnlib.problem import AttentionProblem, Tensors, Window
from attnlib.reference import ReferencePlan

NAN, INF = float("nan"), float("inf")
LAYOUTS = ("dense", "lengths", "packed", "paged", "append", "paged append")


@dataclass(frozen=True)
class Case:
    """A small problem to draw; every field is independent of the others."""

    layout: str = "dense"
    dtype: torch.dtype = torch.float64
    batch: int = 2
    seqlen_q: int = 5
    seqlen_k: int = 7
    num_heads_kv: int = 2
    group: int = 2
    head_dim: int = 4
    head_dim_v: int = 3
    left: int | None = None
    right: int | None = None
    top_left: bool = False
    softcap: float | None = None
    bias: tuple[int, ...] | None = None  # which of the four dimensions broadcast
    bias_inf: bool = False
    mask: bool = False
    alibi: bool = False
    sinks: bool = False
    block_mask: bool = False
    dropout_p: float = 0.0
    scale: float = 0.5
    factor: float = 1.0
    seed: int = 0


def cases(**fixed: Any) -> st.SearchStrategy[Case]:
    maybe = st.one_of(st.none(), st.integers(0, 6))
    drawn: dict[str, Any] = {
        "layout": st.sampled_from(LAYOUTS),
        "dtype": st.sampled_from([torch.float64, torch.float32]),
        "batch": st.integers(1, 3),
        "seqlen_q": st.integers(1, 6),
        "seqlen_k": st.integers(1, 8),
        "num_heads_kv": st.integers(1, 2),
        "group": st.integers(1, 3),
        "head_dim_v": st.integers(1, 5),
        "left": maybe,
        "right": maybe,
        "top_left": st.booleans(),
        "softcap": st.sampled_from([None, 0.7, 3.0]),
        "bias": st.sampled_from([None, (), (0,), (0, 1), (2,), (1, 3), (0, 1, 2, 3)]),
        "bias_inf": st.booleans(),
        "mask": st.booleans(),
        "alibi": st.booleans(),
        "sinks": st.booleans(),
        "block_mask": st.booleans(),
        "dropout_p": st.sampled_from([0.0, 0.0, 0.3, 1.0]),
        "scale": st.sampled_from([0.5, -0.3, 0.0]),
        "seed": st.integers(0, 10**6),
    }
    return st.builds(Case, **{**drawn, **{name: st.just(value) for name, value in fixed.items()}})


def build(case: Case) -> tuple[AttentionProblem, Tensors]:
    """Problem and tensors of a case: inputs normal, lengths random, all that lies outside a sequence NaN."""
    g = torch.Generator().manual_seed(case.seed)
    b, sq, sk, hkv, dtype = case.batch, case.seqlen_q, case.seqlen_k, case.num_heads_kv, case.dtype
    hq, d, dv = hkv * case.group, case.head_dim, case.head_dim_v
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return (torch.randn(shape, generator=g, dtype=torch.float64) * case.factor).to(dtype)

    def ints(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high + 1, (b,), generator=g, dtype=torch.int32)

    packed, append, paged = case.layout == "packed", "append" in case.layout, "paged" in case.layout
    q_lens = kv_lens = cu_q = cu_k = table = k_new = v_new = new_lens = None
    q, k, v, dout = (normal(b, n, h, w) for n, h, w in ((sq, hq, d), (sk, hkv, d), (sk, hkv, dv), (sq, hq, dv)))
    dlse = normal(b, hq, sq, dtype=wide)
    if case.layout != "dense":
        q_lens, kv_lens = ints(0, sq), ints(0, sk)
        for n in range(b):
            for x, lens in ((q, q_lens), (k, kv_lens), (v, kv_lens), (dout, q_lens)):
                x[n, int(lens[n]) :] = NAN
            dlse[n, :, int(q_lens[n]) :] = NAN
    if append:
        room = 3
        k_new, v_new = normal(b, room, hkv, d), normal(b, room, hkv, dv)
        new_lens = torch.minimum(ints(0, room), sk - kv_lens).to(torch.int32)
        for n in range(b):
            k_new[n, int(new_lens[n]) :] = v_new[n, int(new_lens[n]) :] = NAN
    page_size = 3 if paged else None
    if paged:
        per = -(-sk // 3)
        table = torch.full((b, per + 1), -1, dtype=torch.int32)
        order = torch.randperm(b * per + 1, generator=g).to(torch.int32)
        pools = [torch.full((b * per + 1, 3, *x.shape[2:]), NAN, dtype=dtype) for x in (k, v)]
        lens = kv_lens + (new_lens if append else 0)
        for n in range(b):
            for page in range(-(-int(lens[n]) // 3)):
                table[n, page] = order[n * per + page]
                for pool, x in zip(pools, (k, v), strict=True):
                    part = x[n, page * 3 : page * 3 + 3]
                    pool[int(table[n, page]), : part.shape[0]] = part
        k, v = pools
    if packed:
        lens_q, lens_k = [int(n) for n in q_lens], [int(n) for n in kv_lens]
        cu_q, cu_k = (
            torch.tensor([0, *torch.tensor(n).cumsum(0).tolist()], dtype=torch.int32) for n in (lens_q, lens_k)
        )

        def flat(x: torch.Tensor, lens: list[int]) -> torch.Tensor:
            return torch.cat([*(x[n, :m] for n, m in enumerate(lens)), torch.full_like(x[0, :2], NAN)])

        q, dout, k, v = flat(q, lens_q), flat(dout, lens_q), flat(k, lens_k), flat(v, lens_k)
        dlse = flat(dlse.transpose(1, 2), lens_q).T
        q_lens = kv_lens = None
    bias = mask = slopes = sinks = blocks = None
    if case.bias is not None:
        shape = [1 if n in case.bias else size for n, size in enumerate((b, hq, sq, sk))]
        bias = normal(*shape, dtype=wide) * 2
        if case.bias_inf:
            bias[torch.rand(shape, generator=g) < 0.25] = -INF
        bias = bias.expand(b, hq, sq, sk)
    if case.mask:
        mask = (torch.rand((b, 1, sq, sk), generator=g) < 0.7).expand(b, hq, sq, sk)
    if case.alibi:
        slopes = torch.rand((hq,), generator=g).expand(b, hq)
    if case.sinks:
        sinks = normal(hq, dtype=wide)
    if case.block_mask:
        blocks = (torch.rand((1, hq, -(-sq // 16), -(-sk // 16)), generator=g) < 0.7).expand(b, -1, -1, -1)
    grads = ["q"] if append else ["q", "k", "v"]
    grads += [name for name, operand in (("bias", bias), ("sinks", sinks)) if operand is not None]
    problem = AttentionProblem(
        dtype, b, sq, sk, hq, hkv, d, dv, case.scale, total_q=q.shape[0] if packed else -1,
        total_k=k.shape[0] if packed else -1, packed=packed, window=Window(case.left, case.right),
        top_left=case.top_left, softcap=case.softcap, bias=None if bias is None else wide, mask=case.mask,
        alibi=case.alibi, sinks=wide if case.sinks else None, block_mask=(16, 16) if case.block_mask else None,
        lengths=case.layout not in ("dense", "packed"), page_size=page_size, append=append, dropout_p=case.dropout_p,
        grads=tuple(grads),
    )  # fmt: skip
    out, lse = torch.full_like(dout, NAN), torch.full_like(dlse, NAN).contiguous()
    tensors = Tensors(
        q, k, v, out, lse, bias=bias, mask=mask, alibi_slopes=slopes, sinks=sinks, block_mask=blocks, q_lens=q_lens,
        kv_lens=kv_lens, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, page_table=table, k_new=k_new, v_new=v_new,
        new_lens=new_lens, dropout_seed=torch.tensor([case.seed - 77]) if case.dropout_p else None,
        dout=dout, dlse=dlse,
    )  # fmt: skip
    return problem, tensors


def run(problem: AttentionProblem, tensors: Tensors) -> Tensors:
    """Forward and backward through the backend's plan, results NaN-filled before."""
    plan = ReferencePlan()
    wide = torch.float64 if tensors.q.dtype == torch.float64 else problem.accumulate_dtype
    result = replace(tensors, stats=torch.full((2, *tensors.lse.shape), NAN, dtype=torch.float64))
    plan.forward(problem, result)
    for name in ("q", "k", "v"):
        if name in problem.grads:
            setattr(result, "d" + name, torch.full_like(getattr(tensors, name), NAN))
    if tensors.bias is not None and "bias" in problem.grads:
        own = [1 if step == 0 else n for n, step in zip(tensors.bias.shape, tensors.bias.stride(), strict=True)]
        result.dbias = torch.zeros(own, dtype=wide).expand(tensors.bias.shape)
    if tensors.sinks is not None and "sinks" in problem.grads:
        result.dsinks = torch.zeros(problem.num_heads_q, dtype=wide)
    if problem.grads:
        plan.backward(problem, result)
    return result


def simple(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> tuple[AttentionProblem, Tensors]:
    """A dense problem from tensors [batch, seqlen, heads, dim]; operands and fields of the problem by name."""
    operands = {n: more.pop(n) for n in list(more) if n in Tensors.__dataclass_fields__ and n not in ("bias", "mask")}
    b, sq, hq, d = q.shape
    shape = (b, hq, sq, k.shape[1])
    for name in ("bias", "mask"):
        if more.get(name) is not None:
            operands[name] = more[name].expand(shape)
            more[name] = more[name].dtype if name == "bias" else True
    if operands.get("sinks") is not None:
        more["sinks"] = operands["sinks"].dtype
    if operands.get("alibi_slopes") is not None:
        more["alibi"], operands["alibi_slopes"] = True, operands["alibi_slopes"].expand(b, hq)
    scale = more.pop("scale", d**-0.5)
    grads = more.pop("grads", ("q", "k", "v"))
    problem = AttentionProblem(
        q.dtype, b, sq, k.shape[1], hq, k.shape[2], d, v.shape[-1], scale, grads=grads,
        lengths="kv_lens" in operands or "q_lens" in operands, **more,
    )  # fmt: skip
    out = q.new_empty(b, sq, hq, v.shape[-1])
    lse = torch.empty((b, hq, sq), dtype=problem.accumulate_dtype)
    return problem, Tensors(q, k, v, out, lse, **operands)


def normals(seed: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes]
