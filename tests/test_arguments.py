"""Bad input gets an error that names the argument, the value and what was needed, before anything is computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import attnlib
from attnlib import ArgumentError, ArgumentTypeError

Q = torch.randn(2, 5, 4, 8)
K = torch.randn(2, 7, 2, 8)
V = torch.randn(2, 7, 2, 6)


def attend(*args, **kwargs):
    return attnlib.attention(*args, backend="reference", **kwargs)


BAD = [
    ({"q": torch.randn(5, 4, 8)}, ArgumentError, r"q: needs 4 dimensions .* got shape \[5, 4, 8\]"),
    ({"q": torch.tensor(1.0)}, ArgumentError, "q: needs 4 dimensions"),
    ({"q": torch.randn(2, 5, 4, 0)}, ArgumentError, "q: needs head_dim of at least 1"),
    ({"q": Q.int()}, ArgumentTypeError, "q: needs float64, float32, float16 or bfloat16, got int32"),
    ({"q": Q.to(torch.complex64)}, ArgumentTypeError, "q: needs float64.* got complex64"),
    ({"q": [1.0]}, ArgumentTypeError, "q: needs a tensor or an array that speaks DLPack, got list"),
    ({"k": K.bfloat16()}, ArgumentTypeError, "k: needs float32, as q has, got bfloat16"),
    ({"k": K.to("meta")}, ArgumentError, "k: needs device cpu, as q has, got meta"),
    ({"k": K[..., :4]}, ArgumentError, r"k: needs head_dim 8, as q has, got shape \[2, 7, 2, 4\]"),
    ({"k": None}, ArgumentTypeError, "k: needs a tensor, got NoneType"),
    ({"k": K[:1], "v": V[:1]}, ArgumentError, "k: needs batch 2, as q has"),
    ({"v": V[:, :6]}, ArgumentError, r"v: needs shape \[2, 7, 2, 'head_dim_v'\], as k has, got \[2, 6, 2, 6\]"),
    ({"causal": 1}, ArgumentTypeError, "causal: needs True or False, got 1"),
    (
        {"causal_alignment": "middle"},
        ArgumentError,
        "causal_alignment: needs 'bottom_right' or 'top_left', got 'middle'",
    ),
    ({"window": (-1, 0)}, ArgumentError, r"window: needs ints >= 0 or None .* got \(-1, 0\)"),
    ({"window": (1.5, 0)}, ArgumentTypeError, "window: needs ints"),
    ({"window": (True, 0)}, ArgumentTypeError, "window: needs ints"),
    ({"window": 3}, ArgumentTypeError, "window: needs a pair"),
    ({"scale": float("nan")}, ArgumentError, "scale: needs a finite number, got nan"),
    ({"scale": float("inf")}, ArgumentError, "scale: needs a finite number, got inf"),
    ({"scale": "1"}, ArgumentTypeError, "scale: needs a number, got '1'"),
    ({"scale": True}, ArgumentTypeError, "scale: needs a number, got True"),
    ({"softcap": 0.0}, ArgumentError, "softcap: needs a finite number above 0, or None, got 0.0"),
    ({"softcap": -2}, ArgumentError, "softcap: needs a finite number above 0, or None, got -2"),
    ({"bias": torch.zeros(5, 6)}, ArgumentError, r"bias: needs a shape that broadcasts .*\[2, 4, 5, 7\], got \[5, 6\]"),
    ({"bias": torch.zeros(1, 1, 1, 1, 1)}, ArgumentError, "bias: needs a shape that broadcasts"),
    ({"bias": torch.zeros(5, 7, dtype=torch.int64)}, ArgumentTypeError, "bias: needs a float dtype, got int64"),
    ({"mask": torch.zeros(5, 7)}, ArgumentTypeError, "mask: needs bool, got float32; .* goes into bias"),
    ({"mask": torch.zeros(5, 7, dtype=torch.uint8)}, ArgumentTypeError, "mask: needs bool, got uint8"),
    ({"alibi_slopes": torch.zeros(3)}, ArgumentError, r"alibi_slopes: needs shape \[4\] or \[2, 4\], got \[3\]"),
    ({"alibi_slopes": torch.zeros(4).double()}, ArgumentTypeError, "alibi_slopes: needs float32, got float64"),
    ({"alibi_slopes": torch.zeros(4, requires_grad=True)}, ArgumentError, "alibi_slopes: needs no gradient"),
    ({"sinks": torch.zeros(2)}, ArgumentError, r"sinks: needs shape \[4\], got \[2\]"),
    ({"sinks": torch.zeros(4, dtype=torch.int32)}, ArgumentTypeError, "sinks: needs a float dtype, got int32"),
    ({"block_mask": torch.ones(1, 1, 1, 1).bool()}, ArgumentTypeError, "block_mask: needs an attnlib.BlockMask"),
    ({"q_lens": torch.tensor([5, 6])}, ArgumentError, "q_lens: needs values from 0 to 5, got 6 for sequence 1"),
    ({"q_lens": torch.tensor([5])}, ArgumentError, r"q_lens: needs shape \[2\], got \[1\]"),
    ({"q_lens": torch.tensor([5.0, 5.0])}, ArgumentTypeError, "q_lens: needs int32 or int64, got float32"),
    ({"kv_lens": torch.tensor([-1, 5])}, ArgumentError, "kv_lens: needs values from 0 to 7, got -1 for sequence 0"),
    ({"kv_lens": torch.tensor([2**40, 5])}, ArgumentError, "kv_lens: needs values from 0 to 7"),
    ({"dropout_p": -0.1}, ArgumentError, "dropout_p: needs a number from 0 to 1, got -0.1"),
    ({"dropout_p": 1.1}, ArgumentError, "dropout_p: needs a number from 0 to 1, got 1.1"),
    ({"dropout_p": float("nan")}, ArgumentError, "dropout_p: needs a number from 0 to 1, got nan"),
    ({"dropout_p": "a"}, ArgumentTypeError, "dropout_p: needs a number from 0 to 1, got 'a'"),
    ({"dropout_p": 0.1, "dropout_seed": 2**63}, ArgumentError, "dropout_seed: needs an int from"),
    ({"dropout_p": 0.1, "dropout_seed": 1.5}, ArgumentTypeError, "dropout_seed: needs an int or an int64 tensor"),
    (
        {"dropout_p": 0.1, "dropout_seed": torch.zeros(2).long()},
        ArgumentError,
        "dropout_seed: needs an int or an int64",
    ),
    ({"deterministic": 1}, ArgumentTypeError, "deterministic: needs True, False or None, got 1"),
]


@pytest.mark.parametrize(("change", "error", "text"), BAD, ids=[f"{i}-{next(iter(c[0]))}" for i, c in enumerate(BAD)])
def test_attention(change, error, text):
    arguments = {"q": Q, "k": K, "v": V} | change
    with pytest.raises(error, match=text):
        attend(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


@pytest.mark.parametrize(("heads_q", "heads_kv"), [(3, 2), (4, 0), (33, 2), (0, 2)])
def test_AB_052_head_counts(heads_q, heads_kv):
    q, k = torch.randn(1, 4, heads_q, 8), torch.randn(1, 4, heads_kv, 8)
    if heads_q == 0:
        assert attend(q, k, k).shape == (1, 4, 0, 8)
        return
    with pytest.raises(ValueError, match=f"{heads_q} query heads and {heads_kv} key/value heads"):
        attend(q, k, k)


def test_unknown_argument_AB_022():
    with pytest.raises(TypeError, match="cache_leftpad"):
        attnlib.attention_kvcache(Q, K, V, torch.tensor([1, 2]), cache_leftpad=torch.tensor([2, 0]))
    with pytest.raises(ArgumentTypeError, match="cache_leftpad"):
        attnlib.explain(Q, K, V, cache_leftpad=None)


BAD_CU = [
    ([0, 256, 512, 768], "cu_seqlens_q: needs to end at most at 256, the rows of q, got 768"),
    ([1, 100, 200, 256], "cu_seqlens_q: needs to start at 0, got 1"),
    ([0, 200, 100, 256], "cu_seqlens_q: needs to be non-decreasing, got 200 then 100"),
]


@pytest.mark.parametrize(("values", "text"), BAD_CU)
def test_AB_029_cu_seqlens(values, text):
    x = torch.randn(256, 2, 8)
    good = torch.tensor([0, 100, 200, 256])
    with pytest.raises(ValueError, match=text):
        attnlib.attention_varlen(x, x, x, torch.tensor(values), good, backend="reference")
    with pytest.raises(ValueError, match=text.replace("_q", "_k").replace("of q", "of k")):
        attnlib.attention_varlen(x, x, x, good, torch.tensor(values), backend="reference")


def test_AB_029_cu_seqlens_form():
    x, good = torch.randn(8, 2, 8), torch.tensor([0, 8])

    def run(cu_q, cu_k=good, **kwargs):
        return attnlib.attention_varlen(x, x, x, cu_q, cu_k, backend="reference", **kwargs)

    with pytest.raises(TypeError, match="cu_seqlens_q: needs int32 or int64, got float32"):
        run(good.float())
    with pytest.raises(ValueError, match=r"cu_seqlens_q: needs shape \[batch \+ 1\], got \[1, 2\]"):
        run(good[None])
    with pytest.raises(ValueError, match="need the same length, batch"):
        run(torch.tensor([0, 4, 8]))
    with pytest.raises(TypeError, match="cu_seqlens_q: needs an int32 tensor"):
        run(None)
    with pytest.raises(ValueError, match="max_seqlen_q: needs at least 8, the length of sequence 0, got 7"):
        run(good, max_seqlen_q=7)
    with pytest.raises(ValueError, match="max_seqlen_k: needs at least 0, got -1"):
        run(good, max_seqlen_k=-1)
    with pytest.raises(ValueError, match="device"):
        run(good.to("meta"))


def test_AB_020_cache_capacity():
    cache = torch.full((3, 16, 2, 8), 7.0)
    values = cache.clone()
    table, q, new = torch.tensor([[0, 1]]), torch.randn(1, 1, 4, 8), torch.randn(1, 1, 2, 8)

    def run(length, **kwargs):
        return attnlib.attention_kvcache(
            q, cache, values, torch.tensor([length]), page_table=table, backend="reference", **kwargs
        )

    with pytest.raises(ValueError, match="kv_lens: needs values from 0 to 32, got 33"):
        run(33)
    with pytest.raises(ValueError, match=r"kv_lens \+ new_lens of at most 32, the capacity of the cache, got 32 \+ 1"):
        run(32, k_new=new, v_new=new)
    assert (cache == 7.0).all() and (values == 7.0).all()
    with pytest.raises(ValueError, match=r"page_table: needs pages from 0 to 2, got 3 at \[0, 1\]"):
        attnlib.attention_kvcache(
            q, cache, cache, torch.tensor([17]), page_table=torch.tensor([[0, 3]]), backend="reference"
        )
    with pytest.raises(ValueError, match="k_new, v_new: need to be given together"):
        run(3, k_new=new)
    with pytest.raises(ValueError, match="new_lens: needs k_new and v_new"):
        run(3, new_lens=torch.tensor([1]))
    with pytest.raises(ValueError, match="k_new: needs shape"):
        run(3, k_new=new[..., :4], v_new=new)
    with pytest.raises(ValueError, match="q: needs no gradient"):
        attnlib.attention_kvcache(
            q.clone().requires_grad_(), cache, cache, torch.tensor([3]), page_table=table, backend="reference"
        )


def test_block_mask():
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    with pytest.raises(ArgumentError, match="block_mask.block_q: needs a positive multiple of 16, got 8"):
        attnlib.BlockMask(mask, 8, 16)
    with pytest.raises(ArgumentTypeError, match="block_mask.mask: needs bool"):
        attnlib.BlockMask(mask.float(), 16, 16)
    with pytest.raises(ArgumentError, match="block_mask.mask: needs 4 dimensions"):
        attnlib.BlockMask(mask[0], 16, 16)
    with pytest.raises(ArgumentError, match=r"block_mask: needs shape \[1 or 2, 1 or 4, 1, 1\]"):
        attend(Q, K, V, block_mask=attnlib.BlockMask(mask.expand(1, 1, 2, 1), 16, 16))


def test_merge():
    out, lse = torch.randn(2, 3, 4, 8), torch.randn(2, 4, 3)
    with pytest.raises(ArgumentError, match="at least one, got 0 and 0"):
        attnlib.merge([], [])
    with pytest.raises(ArgumentError, match="got 2 and 1"):
        attnlib.merge([out, out], [lse])
    with pytest.raises(ArgumentError, match=r"outs\[1\]: needs shape"):
        attnlib.merge([out, out[:1]], [lse, lse])
    with pytest.raises(ArgumentError, match="lses: need shape"):
        attnlib.merge([out], [lse.transpose(1, 2)])
    with pytest.raises(ArgumentTypeError, match=r"lses\[0\]: needs a tensor"):
        attnlib.merge([out], [3])


def test_AB_083_dtypes():
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        q, k, v = Q.to(dtype), K.to(dtype), V.to(dtype)
        assert attend(q, k, v).dtype == dtype
        for bias in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            assert attend(q, k, v, bias=torch.randn(5, 7).to(bias)).dtype == dtype
    for wrong in (torch.int64, torch.int32):
        with pytest.raises(TypeError, match="bias: needs a float dtype"):
            attend(Q, K, V, bias=torch.zeros(5, 7, dtype=wrong))


def test_numpy_in_numpy_out():
    arrays = [t.numpy() for t in (Q, K, V)]
    out, lse = attend(*arrays, mask=np.ones((5, 7), dtype=bool), return_lse=True)
    assert isinstance(out, np.ndarray) and isinstance(lse, np.ndarray)
    np.testing.assert_array_equal(out, attend(Q, K, V).numpy())
    frozen = arrays[0].copy()
    frozen.flags.writeable = False
    np.testing.assert_array_equal(attend(frozen, *arrays[1:]), out)


def test_numpy_cache_is_changed_in_place():
    cache, new = np.zeros((1, 4, 2, 8), np.float32), np.ones((1, 1, 2, 8), np.float32)
    q = np.ones((1, 1, 4, 8), np.float32)
    attnlib.attention_kvcache(q, cache, cache.copy(), np.array([2]), k_new=new, v_new=new, backend="reference")
    assert cache[0, 2].all() and not cache[0, 3].any()
    cache.flags.writeable = False
    with pytest.raises(ValueError, match="k_cache"):
        attnlib.attention_kvcache(q, cache, cache, np.array([2]), k_new=new, v_new=new, backend="reference")


def test_a_growing_cache_needs_memory_of_its_own():
    cache, q, new = torch.zeros(2, 8, 2, 8), torch.randn(2, 1, 4, 8), torch.randn(2, 1, 2, 8)
    lens = torch.tensor([1, 2])

    def run(k, v):
        return attnlib.attention_kvcache(q, k, v, lens, k_new=new, v_new=new, backend="reference")

    with pytest.raises(ValueError, match="k_cache, v_cache: need memory of their own"):
        run(cache, cache)
    with pytest.raises(ValueError, match="v_cache: needs memory of its own for every element"):
        run(cache, cache[:1].clone().expand(2, 8, 2, 8))
    assert not cache.any()


def test_AB_017_evicted_pages_may_hold_anything_in_the_table():
    cache = torch.randn(3, 4, 2, 8)
    q, lens = torch.randn(1, 1, 4, 8), torch.tensor([18])

    def run(first):
        table = torch.tensor([[first, first, 0, 1, 2]])
        return attnlib.attention_kvcache(q, cache, cache, lens, page_table=table, window=(5, 0), backend="reference")

    assert torch.equal(run(-1), run(0))
    with pytest.raises(ValueError, match=r"page_table: needs pages from 0 to 2, got -1 at \[0, 3\]"):
        attnlib.attention_kvcache(
            q, cache, cache, lens, page_table=torch.tensor([[0, 0, 0, -1, 2]]), window=(5, 0), backend="reference"
        )


@pytest.mark.parametrize("change", [{"scale": 1e39}, {"softcap": 1e50}, {"scale": 1e-40}])
def test_numbers_that_float32_cannot_hold(change):
    with pytest.raises(ArgumentError, match=f"{next(iter(change))}: needs a number that float32 holds"):
        attend(Q, K, V, **change)
    attend(Q.double(), K.double(), V.double(), **change)


@pytest.mark.parametrize(
    ("change", "plain"),
    [
        ({"window": (np.int64(2), np.int32(1))}, {"window": (2, 1)}),
        ({"scale": np.float32(0.5)}, {"scale": 0.5}),
        ({"softcap": np.float64(2)}, {"softcap": 2.0}),
        ({"window": (2**62, 2**31)}, {}),
        ({"dropout_p": np.float64(0.5), "dropout_seed": np.int64(3)}, {"dropout_p": 0.5, "dropout_seed": 3}),
    ],
)
def test_numbers_of_numpy_and_wide_windows(change, plain):
    assert torch.equal(attend(Q, K, V, **change), attend(Q, K, V, **plain))


WRONG_KINDS = [
    {"bias": [[0.0]]}, {"alibi_slopes": [1.0] * 4}, {"mask": np.ones((5, 7), bool)}, {"kv_lens": [7, 7]},
    {"sinks": 1.0}, {"backend": 3}, {"backend": ("cpu",)}, {"q": Q.to_sparse()},
]  # fmt: skip


@pytest.mark.parametrize("change", WRONG_KINDS, ids=lambda c: f"{next(iter(c))}")
def test_wrong_kinds(change):
    arguments = {"q": Q, "k": K, "v": V, "backend": "reference"} | change
    with pytest.raises(ArgumentTypeError, match=f"{next(iter(change))}: needs"):
        attnlib.attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


def test_AB_082_zero_sizes():
    for batch, seqlen_q, seqlen_k, heads in ((0, 3, 4, 2), (2, 0, 4, 2), (2, 3, 0, 2), (2, 3, 4, 0), (0, 0, 0, 0)):
        q = torch.randn(batch, seqlen_q, heads, 8, requires_grad=True)
        k, v = (torch.randn(batch, seqlen_k, heads, d, requires_grad=True) for d in (8, 6))
        sinks = torch.randn(heads, requires_grad=True)
        for with_sinks in (False, True):
            out, lse = attend(q, k, v, sinks=sinks if with_sinks else None, return_lse=True)
            assert out.shape == (batch, seqlen_q, heads, 6) and not out.isnan().any()
            if seqlen_k == 0:
                assert not out.any()
                expected = (
                    sinks[:, None].expand(batch, heads, seqlen_q) if with_sinks else torch.full_like(lse, -torch.inf)
                )
                assert torch.equal(lse, expected)
            grads = torch.autograd.grad(out.sum() + lse[lse.isfinite()].sum(), (q, k, v))
            assert [g.shape for g in grads] == [q.shape, k.shape, v.shape] and not any(g.isnan().any() for g in grads)


def test_zero_sizes_still_choose_a_backend():
    empty = torch.zeros(0, 3, 2, 8)
    with pytest.raises(ArgumentError, match="no backend is called 'zzz'"):
        attnlib.attention(empty, empty, empty, backend="zzz")


def test_no_values_still_have_an_lse():
    q = Q.clone().requires_grad_()
    out, lse = attnlib.attention(q, K, V[..., :0], return_lse=True, backend="reference")
    assert out.shape == (2, 5, 4, 0)
    assert torch.allclose(lse, attend(Q, K, V, return_lse=True)[1])
    (dq,) = torch.autograd.grad(lse.sum(), q)
    assert dq.abs().max() > 0


def test_what_the_key_of_a_call_does_not_hold_is_checked_every_time():
    q, new = torch.randn(2, 1, 4, 8), torch.randn(2, 1, 2, 8)
    lens = torch.tensor([3, 4])

    def run(k, v, k_new=new):
        return attnlib.attention_kvcache(q, k, v, lens, k_new=k_new, v_new=new, backend="reference")

    a = torch.zeros(2, 8, 2, 8)
    run(a.clone(), a.clone())
    with pytest.raises(ValueError, match="need memory of their own"):
        run(a, a)
    mask = torch.ones(5, 7, dtype=torch.bool)
    attend(Q, K, V, mask=mask)
    with pytest.raises(TypeError, match="mask: needs a dense"):
        attend(Q, K, V, mask=mask.to_sparse())


def test_caches_may_be_interleaved_but_not_overlap():
    q, new, lens = torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1, 4), torch.tensor([2])

    def run(k, v, k_new=new):
        return attnlib.attention_kvcache(q, k, v, lens, k_new=k_new, v_new=2 * new, backend="reference")

    both = torch.zeros(1, 8, 2, 1, 4)
    run(both[:, :, 0], both[:, :, 1])
    assert both[0, 2].flatten().tolist() == [1.0] * 4 + [2.0] * 4
    wide = torch.zeros(1, 8, 1, 12)
    run(wide[..., :4], wide[..., 4:8])
    with pytest.raises(ValueError, match="got views that overlap"):
        run(wide[..., :4], wide[..., 3:7])
    with pytest.raises(ValueError, match="k_cache: needs memory of its own for every element"):
        run(torch.zeros(64).as_strided((1, 8, 1, 4), (32, 2, 4, 1)), wide[..., :4])


def test_new_tokens_that_lie_in_the_cache_are_read_first():
    cache = torch.arange(32.0).reshape(1, 8, 1, 4)
    k, v, other = cache.clone(), cache.clone(), cache.clone()
    q, lens = torch.ones(1, 1, 1, 4), torch.tensor([3])
    attnlib.attention_kvcache(q, k, v, lens, k_new=k[:, 2:5], v_new=v[:, 2:5], backend="reference")
    other[:, 3:6] = cache[:, 2:5]
    assert torch.equal(k, other) and torch.equal(v, other)
