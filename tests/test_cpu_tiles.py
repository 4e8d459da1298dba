"""The cpu backend's tiles: block sizes, head dimensions, strides, sizes beyond 32 bits, dropout."""

from __future__ import annotations

import ctypes
import math
import mmap
from dataclasses import replace

import pytest
import torch
from cpu_problems import (
    BF16,
    F32,
    FAMILIES,
    NAN,
    SEED,
    assert_close,
    bitwise,
    check,
    dense,
    normal,
    plan_of,
    run,
    with_gradients,
)

from attnlib.problem import AttentionProblem, Tensors, Window
from attnlib.reference import ReferencePlan

# ---------------------------------------------------------------- blocks, layouts, sizes


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("blocks", [(4, 6), (6, 4), (5, 5), (1, 1), (64, 1), (1, 64)])
def test_block_sizes(family, dtype, blocks):
    """AB-014: query blocks smaller than, larger than and equal to key blocks, causal."""
    torch.manual_seed(8)
    for seqlen in (12, 13, 17):
        problem, tensors = dense(seqlen_q=seqlen, seqlen_k=seqlen, dtype=dtype, window=Window(None, 0))
        check(problem, tensors, family, block_q=blocks[0], block_k=blocks[1])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("dim", "dim_v"), [(1, 1), (7, 40), (72, 80), (128, 96), (192, 128), (512, 512)])
def test_head_dimensions(family, dtype, dim, dim_v):
    torch.manual_seed(9)
    problem, tensors = dense(batch=1, seqlen_q=50, seqlen_k=70, heads=2, dim=dim, dim_v=dim_v, dtype=dtype)
    check(problem, tensors, family)


needs_amx = pytest.mark.skipif("amx" not in FAMILIES, reason="needs a processor with AMX and leave to use it")


@needs_amx
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"),
    [(1, 1), (15, 16), (16, 17), (17, 31), (31, 33), (33, 47), (47, 63), (65, 95), (100, 129), (257, 545)],
)
@pytest.mark.parametrize(
    ("dim", "dim_v"),
    [(1, 1), (2, 3), (15, 17), (31, 33), (33, 31), (48, 16), (63, 65), (64, 128), (97, 40), (255, 256), (256, 129)],
)
def test_tails_of_tiles(seqlen_q, seqlen_k, dim, dim_v):
    """Rows, keys and both dimensions about multiples of 16 and 32, open and causal."""
    torch.manual_seed(seqlen_q * dim + dim_v)
    sizes = {"batch": 1, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "dim": dim, "dim_v": dim_v, "dtype": BF16}
    check(*dense(heads=2, heads_kv=1, **sizes), "amx")
    check(*dense(heads=3, heads_kv=3, window=Window(None, 0), **sizes), "amx", block_q=48, block_k=80)


@needs_amx
@pytest.mark.parametrize("blocks", [(16, 16), (16, 48), (32, 32), (48, 16), (64, 96)])
@pytest.mark.parametrize("config", [{}, {"block_q": 34, "block_k": 50}, {"block_q": 64, "block_k": 96}, {"block_q": 7}])
@pytest.mark.parametrize("window", [Window(), Window(70, 20)])
def test_block_masks_on_tiles(blocks, config, window):
    """Blocks that are whole tiles, halves of them and neither; key blocks that cut them."""
    torch.manual_seed(sum(blocks))
    options = {"dtype": BF16, "block_mask": blocks, "window": window, "dropout_p": 0.2}
    check(*dense(seqlen_q=150, seqlen_k=230, heads=4, heads_kv=2, dim=40, **options), "amx", **config)


@needs_amx
@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_nonfinite_operands_stay_in_their_rows_and_columns(name, value):
    torch.manual_seed(26)
    problem, tensors = dense(seqlen_q=70, seqlen_k=90, dim=40, dtype=BF16, window=Window(30, 0))
    with_gradients(tensors, problem)
    getattr(tensors, name)[0, 37, 1, 3] = value
    expected = run(ReferencePlan(), problem, tensors)
    result = run(plan_of(problem, "amx", block_q=32, block_k=48), problem, tensors)
    for field in ("out", "lse", "dq", "dk", "dv"):
        x, o = getattr(result, field), getattr(expected, field)
        assert torch.equal(x.isfinite(), o.isfinite()), field


@needs_amx
def test_tiles_give_the_same_bits_wherever_rows_lie():
    """Of rows and heads alone, in another batch, and in blocks of other lengths."""
    torch.manual_seed(27)
    problem, tensors = dense(batch=3, seqlen_q=200, seqlen_k=300, heads=4, heads_kv=2, dim=72, dtype=BF16, grads=())
    result = run(plan_of(problem, "amx", block_q=96, block_k=128), problem, tensors)
    for block_q in (16, 34, 200):
        bitwise(result, run(plan_of(problem, "amx", block_q=block_q, block_k=128), problem, tensors), ("out", "lse"))
    single = replace(problem, batch=1, num_heads_q=2, num_heads_kv=1)
    alone = replace(tensors, q=tensors.q[2:, :, 2:], k=tensors.k[2:, :, 1:], v=tensors.v[2:, :, 1:])
    one = run(plan_of(single, "amx", block_q=64, block_k=128), single, alone)
    assert torch.equal(one.out[0], result.out[2, :, 2:]) and torch.equal(one.lse[0], result.lse[2, 2:])


@pytest.mark.parametrize("layout", ["heads_first", "sliced", "expanded_batch", "expanded_heads"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_strides(layout, dtype):
    torch.manual_seed(10)
    problem, tensors = dense(dtype=dtype, heads=2, dim=24)

    def arrange(x):
        if layout == "heads_first":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "sliced":
            wide = torch.full((*x.shape[:-1], x.shape[-1] + 5), NAN, dtype=x.dtype)
            wide[..., 3:-2] = x
            return wide[..., 3:-2]
        return x[:1].expand(x.shape) if layout == "expanded_batch" else x[:, :, :1].expand(x.shape)

    with_gradients(tensors, problem)
    for name in ("q", "k", "v", "dout"):
        setattr(tensors, name, arrange(getattr(tensors, name)))
    tensors.dlse = tensors.dlse[:1, :, :1].expand(tensors.dlse.shape)
    check(problem, tensors)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shared", [(0,), (1,), (2,), (3,), (0, 1), (0, 1, 2), (0, 3), (0, 1, 2, 3)])
def test_bias_gradient_sums_over_broadcast_dimensions(family, shared):
    torch.manual_seed(11)
    problem, tensors = dense(bias=F32, grads=("q", "k", "v", "bias"))
    for axis in shared:
        tensors.bias = tensors.bias.narrow(axis, 0, 1)
    tensors.bias = tensors.bias.expand(2, 4, 37, 53)
    check(problem, tensors, family, block_q=16, block_k=16)


@pytest.mark.parametrize("seqlen_k", [32767, 32769, 65537])
def test_many_keys(seqlen_k):
    problem, tensors = dense(batch=1, seqlen_q=3, seqlen_k=seqlen_k, heads=1, heads_kv=1, dim=8, grads=())
    tensors.q.zero_()
    tensors.k.zero_()
    result = run(plan_of(problem), problem, tensors)
    assert torch.allclose(result.lse, torch.tensor(math.log(seqlen_k)), rtol=1e-6)
    assert torch.allclose(result.out[0, 0, 0], tensors.v[0, :, 0].double().mean(0).float(), atol=1e-5)


@pytest.mark.parametrize("zero", ["batch", "seqlen_q", "seqlen_k"])
def test_zero_sizes(zero):
    problem, tensors = dense(**{zero: 0})
    with_gradients(tensors, problem)
    result = run(plan_of(problem), problem, tensors)
    assert not result.out.any() and bool((result.lse == -math.inf).all()) and not result.dq.any()


def far_apart(shape, strides, dtype=F32):
    """A tensor over lazily committed memory, whose offsets may pass 2^32."""
    size = (sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1) * dtype.itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0))
    return torch.frombuffer(memory, dtype=dtype, count=size // dtype.itemsize).as_strided(shape, strides)


@pytest.mark.skipif(ctypes.sizeof(ctypes.c_void_p) < 8, reason="needs a 64-bit address space")
def test_offsets_beyond_32_bits():
    torch.manual_seed(12)
    problem, tensors = dense(batch=3, seqlen_q=5, seqlen_k=9, heads=2, dim=8, window=Window(None, 0))
    with_gradients(tensors, problem)
    expected = run(ReferencePlan(), problem, tensors)
    far = replace(tensors)
    for name in ("q", "k", "v", "dout"):
        x = getattr(tensors, name)
        y = far_apart(x.shape, (2**30 + 2**29, x.stride(1), x.stride(2), 1))
        y.copy_(x)
        setattr(far, name, y)
    assert_close(problem, run(plan_of(problem), problem, far), expected)


def test_pages_beyond_32_bits():
    torch.manual_seed(13)
    problem = AttentionProblem(
        F32, 1, 2, 8, 1, 1, 8, 8, 0.3, lengths=True, page_size=4, append=True, window=Window(None, 0)
    )
    caches = [far_apart((6, 4, 1, 8), (2**29, 8, 8, 1)) for _ in range(2)]
    for cache in caches:
        cache[5], cache[4] = normal(2, 4, 1, 8)
    tensors = Tensors(
        normal(1, 2, 1, 8), *caches, None, None, page_table=torch.tensor([[5, 4]], dtype=torch.int32),  # type: ignore
        kv_lens=torch.tensor([5], dtype=torch.int32), k_new=normal(1, 2, 1, 8), v_new=normal(1, 2, 1, 8),
    )  # fmt: skip
    result = run(plan_of(problem), problem, tensors)
    assert torch.equal(caches[0][4, 1:3], tensors.k_new[0])
    k, v = (cache[4:].contiguous() for cache in caches)
    near = replace(tensors, k=k, v=v, page_table=torch.tensor([[1, 0]], dtype=torch.int32))
    assert_close(problem, result, run(ReferencePlan(), problem, near))


# ---------------------------------------------------------------- dropout


@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_follows_the_contract(family):
    """q = 0 and v = identity show the kept elements themselves."""
    n, heads = 70, 3
    problem = AttentionProblem(F32, 3, n, n, heads, heads, 4, n, 1.0, dropout_p=0.1)
    eye = torch.eye(n).view(1, n, 1, n).expand(3, n, heads, n)
    tensors = Tensors(
        torch.zeros(3, n, heads, 4), torch.zeros(3, n, heads, 4), eye, None, None,  # type: ignore[arg-type]
        dropout_seed=torch.tensor([SEED]),
    )  # fmt: skip
    kept = run(plan_of(problem, family, block_q=10, block_k=24), problem, tensors).out.transpose(1, 2) > 0
    threshold = problem.dropout_threshold
    numbers = [
        (0, 0, 19606),
        (0, 1, 42457),
        (8, 0, 17412),
        (0, 8, 65300),
        (16, 0, 8198),
        (0, 32, 34412),
        (7, 31, 27739),
    ]
    for i, j, number in numbers:
        assert bool(kept[2, 1, i, j]) == (number >= threshold)
    from attnlib.dropout import keep_rectangle

    whole = keep_rectangle(tensors.dropout_seed, threshold, [0, 1, 2], heads, (0, n), (0, n), torch.device("cpu"))
    assert torch.equal(kept, whole)


def test_dropping_everything_leaves_lse():
    torch.manual_seed(14)
    problem, tensors = dense(dropout_p=1.0)
    with_gradients(tensors, problem)
    tensors.dlse = None
    result = run(plan_of(problem), problem, tensors)
    plain = replace(problem, dropout_p=0.0)
    bitwise(result, run(plan_of(plain), plain, tensors, backward=False), ("lse",))
    assert not any(bool(x.any()) for x in (result.out, result.dq, result.dk, result.dv))
