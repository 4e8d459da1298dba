"""Few queries over many keys on the cpu backend: kernels of their own (csrc/cpu/decode.h), which divide the keys."""

from __future__ import annotations

import math

import pytest
import torch
from cpu_problems import (
    BF16,
    F16,
    F32,
    F64,
    FAMILIES,
    NAN,
    bitwise,
    check,
    few,
    normal,
    plan_of,
    run,
)

from attnlib.problem import AttentionProblem, Tensors, Window


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [F64, F32, F16, BF16])
@pytest.mark.parametrize(("heads", "heads_kv", "seqlen_q"), [(8, 2, 1), (3, 3, 1), (6, 1, 2), (8, 2, 4), (5, 1, 3)])
@pytest.mark.parametrize(("dim", "dim_v"), [(64, 64), (40, 33), (128, 96), (1, 7)])
def test_few_queries(family, dtype, heads, heads_kv, seqlen_q, dim, dim_v):
    torch.manual_seed(22)
    sizes = {"heads": heads, "heads_kv": heads_kv, "seqlen_q": seqlen_q, "dim": dim, "dim_v": dim_v, "dtype": dtype}
    for seqlen_k in (1, 65, 1100):
        check(*few(seqlen_k, **sizes), family)
        check(*few(seqlen_k, window=Window(600, 0), alibi=True, sinks=F32, **sizes), family)
        check(*few(seqlen_k, mask=True, bias=BF16, softcap=2.0, scale=-0.3, **sizes), family)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_few_queries_do_not_see_what_is_hidden(family, dtype):
    torch.manual_seed(23)
    problem, tensors = few(900, seqlen_q=3, dtype=dtype, dim=32, mask=True, window=Window(500, 0))
    tensors.mask[0, :, :, 700], tensors.mask[1, :2, :, 701] = False, False
    tensors.k[0, 700, 0], tensors.v[0, 700, 1], tensors.v[1, 701, 0, 3] = NAN, math.inf, NAN
    tensors.v[:, 899, 1, 5] = NAN  # seen by the last query only
    result = check(problem, tensors, family)
    assert result.out[:, :2].isfinite().all()


@pytest.mark.parametrize("family", FAMILIES)
def test_few_queries_are_bitwise_the_same_for_any_threads_and_neighbours(family):
    torch.manual_seed(24)
    problem, tensors = few(1300, batch=3, dtype=BF16, dim=64, heads=8, heads_kv=4)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3, 16):
            torch.set_num_threads(threads)
            results.append(run(plan_of(problem, family), problem, tensors))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        bitwise(results[0], other)
    single, alone = few(1300, batch=1, dtype=BF16, dim=64, heads=8, heads_kv=4)
    alone.q, alone.k, alone.v = tensors.q[2:], tensors.k[2:], tensors.v[2:]
    assert torch.equal(run(plan_of(single, family), single, alone).out[0], results[0].out[2])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("layout", ["plain", "heads_first", "sliced", "expanded_heads"])
@pytest.mark.parametrize(
    ("heads", "heads_kv", "seqlen_q", "dim"), [(8, 2, 2, 64), (9, 1, 1, 96), (16, 1, 1, 160), (32, 32, 1, 128)]
)
def test_few_queries_read_keys_where_they_lie(family, dtype, layout, heads, heads_kv, seqlen_q, dim):
    """Tails of 16 keys, of blocks and of dims; with (32, 32) a token is wide enough for smaller blocks."""
    torch.manual_seed(25)
    for seqlen_k in (15, 16, 49, 579):
        problem, tensors = few(
            seqlen_k, seqlen_q, heads=heads, heads_kv=heads_kv, dim=dim, dtype=dtype, window=Window(None, 0)
        )
        for name in ("k", "v"):
            x = getattr(tensors, name)
            if layout == "heads_first":
                x = x.transpose(1, 2).contiguous().transpose(1, 2)
            elif layout == "sliced":
                wide = torch.full((*x.shape[:-1], dim + 6), NAN, dtype=dtype)
                wide[..., 3:-3] = x
                x = wide[..., 3:-3]
            elif layout == "expanded_heads":
                x = x[:, :, :1].expand(x.shape)
            setattr(tensors, name, x)
        check(problem, tensors, family)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("heads", [2, 8, 16])
def test_few_queries_that_all_see_an_infinity(family, dtype, heads):
    """It reaches its own dim and head alone, and the keys beside it keep their weights."""
    torch.manual_seed(26)
    problem, tensors = few(300, 1, heads=2 * heads, heads_kv=2, dim=64, dtype=dtype)
    tensors.v[0, 20, 0, 3], tensors.v[0, 21, 0, 8], tensors.v[1, 299, 1, 63] = math.inf, NAN, -math.inf
    result = check(problem, tensors, family)
    assert result.out[0, :, heads:].isfinite().all() and result.out[1, :, :heads].isfinite().all()
    assert result.out[0, 0, :heads].isfinite().sum() == heads * 62
    assert result.out[1, 0, heads:].isfinite().sum() == heads * 63
    tensors.k[0, 5, 1, 7] = NAN
    result = check(problem, tensors, family)
    assert result.out[0, 0, heads:].isnan().all()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("page_size", [1, 5, 16, 24, 64])
def test_few_queries_over_pages(family, dtype, page_size):
    torch.manual_seed(27)
    lens = [331, 64, 1]
    most = -(-max(lens) // page_size)
    table = torch.randperm(3 * most).to(torch.int32).view(3, most)
    problem = AttentionProblem(
        dtype, 3, 1, most * page_size, 8, 2, 64, 64, 0.125, lengths=True, page_size=page_size, window=Window(300, 0)
    )
    k, v = (normal(3 * most, page_size, 2, 64, dtype=dtype) for _ in range(2))
    tensors = Tensors(
        normal(3, 1, 8, 64, dtype=dtype), k, v, None, None,  # type: ignore[arg-type]
        page_table=table, kv_lens=torch.tensor(lens, dtype=torch.int32), q_lens=torch.ones(3, dtype=torch.int32),
    )  # fmt: skip
    check(problem, tensors, family)
