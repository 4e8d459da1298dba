"""The public functions on a real GPU: streams, graphs, devices, threads, determinism, large operands, memory."""

from __future__ import annotations

import gc
import math
import threading
from typing import Any

import pytest
import torch
from gpu_calls import HALF, MARKS, NAME, assert_right, assert_same, attend, gradients, operands, randn

import attnlib
from attnlib.conformance.checks.seen_gpu import captured
from attnlib.conformance.inputs import given

pytestmark = MARKS


# --- streams, graphs, threads, devices ------------------------------------------------------------------------------


def test_AB_077_side_stream() -> None:
    """Kernels wait for the work ahead of them in the caller's stream, forward and backward."""
    tensors = operands(seqlen=256)
    want = gradients(lambda *t: attend(*t, deterministic=True), tensors)
    big, side = torch.randn(4096, 4096, device="cuda"), torch.cuda.Stream()
    for _ in range(30):
        late = [torch.full_like(x, math.nan) for x in tensors]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                big @ big
            for target, source in zip(late, tensors):
                target.copy_(source)
            got = [x.clone() for x in gradients(lambda *t: attend(*t, deterministic=True), late)]
        torch.cuda.current_stream().wait_stream(side)
        assert_same(got, want)


def test_several_streams_at_once() -> None:
    problems = [operands(seqlen=seqlen, dim=dim) for seqlen in (64, 333) for dim in (64, 128)]
    want = [attend(*p, causal=True) for p in problems]
    streams = [torch.cuda.Stream() for _ in range(8)]
    torch.cuda.synchronize()
    found: list[tuple[int, torch.Tensor]] = []
    for turn in range(40):
        with torch.cuda.stream(streams[turn % len(streams)]):
            found.append((turn % len(problems), attend(*problems[turn % len(problems)], causal=True)))
    torch.cuda.synchronize()
    for which, out in found:
        assert torch.equal(out, want[which])


@pytest.mark.parametrize("seqlen_k", [200, 5000])  # with and without split keys
def test_streams_do_not_share_scratch(seqlen_k: int) -> None:
    q = [randn(1, 1, 8, 128, seed=s) for s in range(8)]
    k, v = (randn(1, seqlen_k, 2, 128, seed=s) for s in (1, 2))
    want = [attend(x, k, v) for x in q]
    streams = [torch.cuda.Stream() for _ in q]
    torch.cuda.synchronize()
    for _ in range(10):
        got = []
        for x, stream in zip(q, streams):
            with torch.cuda.stream(stream):
                got.append(attend(x, k, v))
        torch.cuda.synchronize()
        assert_same(got, want)


def test_graph_of_a_decode_step_follows_its_lengths() -> None:
    """A captured step with an append reads the lengths of the replay, not those of the capture."""
    cache_k, cache_v = (torch.zeros(3, 600, 2, 64, device="cuda", dtype=HALF) for _ in range(2))
    kv_lens = torch.tensor([0, 0, 0], dtype=torch.int32, device="cuda")
    q, new_k, new_v = randn(3, 1, 8, 64), randn(3, 1, 2, 64, seed=1), randn(3, 1, 2, 64, seed=2)

    def step() -> torch.Tensor:
        out = attnlib.attention_kvcache(
            q, cache_k, cache_v, kv_lens, k_new=new_k, v_new=new_v, causal=True, backend=NAME
        )
        kv_lens.add_(1)
        return out

    graph, out = captured(step)
    start = torch.tensor([0, 300, 570], dtype=torch.int32, device="cuda")
    kv_lens.copy_(start)
    for turn in range(20):
        for x, seed in ((q, 3), (new_k, 4), (new_v, 5)):
            x.copy_(randn(*x.shape, seed=seed + 10 * turn))
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(kv_lens, start + 20)
    want = attnlib.attention_kvcache(q, cache_k, cache_v, kv_lens, causal=True, backend=NAME)
    assert torch.equal(out, want)


def test_graph_of_a_backward_whose_keys_repeat() -> None:
    """Keys that repeat in memory are copied for their tensor maps, beside the counter that hands out tiles."""
    q, k, v = (x.requires_grad_() for x in operands(batch=40, seqlen=32, heads=4, heads_kv=1))
    dout = randn(*q.shape, seed=3)

    def step() -> tuple[torch.Tensor, ...]:
        out = attend(q, k.expand(-1, -1, 4, -1), v.expand(-1, -1, 4, -1), causal=True)
        return torch.autograd.grad(out, (q, k, v), dout)

    want = step()
    graph, got = captured(step)
    for _ in range(2):
        graph.replay()
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("capture", [False, True])
def test_gradients_of_pages(capture: bool) -> None:
    """Two sequences that share their first page, and a page of nobody: equal to packed keys, also in a graph."""
    k, v = (randn(6, 64, 2, 128, seed=s) for s in (1, 2))
    table = torch.tensor([[3, 0, -1], [3, 5, 1]], dtype=torch.int32, device="cuda")
    lens = (100, 190)
    q, dout = randn(150, 4, 128), randn(150, 4, 128, seed=3)
    q_ends, k_ends = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ((0, 50, 150), (0, 100, 290)))
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def step(k: torch.Tensor, v: torch.Tensor, **more: Any) -> tuple[torch.Tensor, ...]:
        out = attnlib.attention_varlen(
            q, k, v, q_ends, k_ends, causal=True, deterministic=True, backend=f"{NAME}:sm_80", max_seqlen_k=192, **more
        )
        return torch.autograd.grad(out, (q, k, v), dout)

    order = table.clamp(min=0).long()
    flat = [torch.cat([x[order[b]].flatten(0, 1)[: lens[b]] for b in range(2)]).detach() for x in (k, v)]
    dq, *flat = step(*(x.requires_grad_() for x in flat))
    if capture:
        graph, got = captured(lambda: step(k, v, page_table=table))
        graph.replay()
    else:
        got = step(k, v, page_table=table)
    assert_same(got[:1], [dq])
    for found, whole, leaf in zip(got[1:], flat, leaves[1:]):
        want = torch.zeros(leaf.shape, device="cuda")
        for part, pages in zip(whole.float().split(lens), ((3, 0), (3, 5, 1))):
            for n, page in enumerate(pages):
                piece = part[64 * n : 64 * n + 64]
                want[page, : len(piece)] += piece
        assert torch.equal(found, want.to(found.dtype))


def test_threads() -> None:
    """Threads that start with no context, each with problems of its own, forward and backward."""
    problems = [operands(seqlen=seqlen) for seqlen in (64, 130, 257, 40)]
    want = [gradients(lambda *t: attend(*t, deterministic=True), p) for p in problems]
    torch.cuda.synchronize()
    errors: list[BaseException] = []

    def work(which: int) -> None:
        try:
            for _ in range(10):
                assert_same(gradients(lambda *t: attend(*t, deterministic=True), problems[which]), want[which])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number % len(problems),)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_AB_076_every_device_whichever_is_current() -> None:
    home = operands()
    want = [x.cpu() for x in gradients(lambda *t: attend(*t, causal=True, deterministic=True), home)]
    for index in (0, 1, 0, 1):
        for current in (0, 1):
            with torch.cuda.device(current):
                there = [x.to(f"cuda:{index}") for x in home]
                got = gradients(lambda *t: attend(*t, causal=True, deterministic=True), there)
                assert torch.cuda.current_device() == current
            assert all(x.device.index == index for x in got)
            assert_same([x.cpu() for x in got], want)
    with pytest.raises(ValueError, match="device"):
        attend(home[0], home[1].to("cuda:1"), home[2])


# --- determinism, alignment, large offsets --------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (200, 50)}, {"causal": True, "dropout_p": 0.1, "dropout_seed": 3}],
    ids=["full", "causal", "window", "dropout"],
)  # fmt: skip
def test_AB_074_deterministic(dim: int, options: dict[str, Any]) -> None:
    tensors = operands(seqlen=1024, dim=dim)
    want = gradients(lambda *t: attend(*t, deterministic=True, **options), tensors)
    for _ in range(10):
        assert_same(gradients(lambda *t: attend(*t, deterministic=True, **options), tensors), want)


def test_AB_074_follows_torchs_switch() -> None:
    tensors = operands(seqlen=1024, dim=128)
    want = gradients(lambda *t: attend(*t, deterministic=True), tensors)
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(5):
            assert_same(gradients(attend, tensors), want)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, HALF])
def test_AB_043_misaligned(dtype: torch.dtype) -> None:
    """Storage that starts 1, 2 and 3 elements into an allocation, after an aligned call of the same shape."""
    size = 2 * 70 * 4 * 64
    for offset in (0, 1, 2, 3, 8):
        frames = [randn(size + 8, seed=s, dtype=dtype)[offset : offset + size].view(2, 70, 4, 64) for s in range(4)]
        inputs = given(*frames[:3], causal=True, grads=("q", "k", "v"), dout=frames[3])
        out, lse = attend(*inputs.positional, **inputs.arguments, return_lse=True)
        dq, dk, dv = torch.autograd.grad(out, inputs.leaves(), frames[3])
        assert_right(inputs, out.detach(), lse.detach(), dq=dq, dk=dk, dv=dv)


def _needs(gibibytes: float) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < gibibytes:
        pytest.skip(f"needs {gibibytes} GiB of free device memory, got {free:.0f}")


def test_AB_035_scratch_beyond_2_31() -> None:
    """Single keys: dq and dk are 0 and dv is dout, where the rows of scratch pass 2^31 elements."""
    _needs(30)
    q, k, v = (randn(8300, 1, 16, 128, seed=s).requires_grad_() for s in range(3))
    out = attend(q, k, v)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert torch.equal(out, v) and (dv == 1).all()
    assert dq.abs().max() <= 2.0**-19 * 128 * 72 and dk.abs().max() <= 2.0**-19 * 128 * 72


def test_AB_037_batch_stride_beyond_2_31() -> None:
    """A cache whose rows lie 2^30 elements apart, as a batch stride and as a page stride."""
    _needs(14)
    storage = torch.zeros(3 * 2**30, dtype=torch.float16, device="cuda")
    caches = [storage.as_strided((3, 16, 2, 64), (2**30, 128, 64, 1), offset) for offset in (0, 4096)]
    new = [randn(3, 16, 2, 64, seed=s, dtype=torch.float16) for s in (1, 2)]
    q, lens = randn(3, 16, 2, 64, dtype=torch.float16), torch.zeros(3, dtype=torch.int32, device="cuda")
    pages = torch.tensor([[2], [0], [1]], dtype=torch.int32, device="cuda")
    for table in (None, pages):
        storage.zero_()
        out = attnlib.attention_kvcache(
            q, *caches, lens, k_new=new[0], v_new=new[1], page_table=table, causal=True, backend=NAME
        )
        order = [0, 1, 2] if table is None else [2, 0, 1]
        for cache, fresh in zip(caches, new):
            assert torch.equal(cache[order], fresh)
        assert_right(given(q, *new, causal=True), out)
    assert torch.equal(attend(q, *(cache[order] for cache in caches), causal=True), out)


def test_AB_037_queries_beyond_2_31() -> None:
    """Strides of q, out and their gradients beyond 2^31 elements."""
    _needs(30)
    storage = torch.empty(5 * 2**29, dtype=HALF, device="cuda")
    shape, strides = (5, 64, 2, 64), (2**29, 128, 64, 1)
    q = storage.as_strided(shape, strides)
    q.copy_(randn(*shape))
    k, v = (randn(5, 90, 2, 64, seed=s) for s in (1, 2))
    want = gradients(lambda *t: attend(*t, causal=True, deterministic=True), (q.contiguous(), k, v))
    leaves = [q.detach().requires_grad_(), k.requires_grad_(), v.requires_grad_()]
    out = attend(*leaves, causal=True, deterministic=True)
    dout = torch.empty(5 * 2**29, dtype=HALF, device="cuda").as_strided(shape, strides)
    dout.copy_(randn(*shape, seed=9))
    assert_same([out.detach(), *torch.autograd.grad(out, leaves, dout)], want)


def test_AB_038_scores_beyond_2_32() -> None:
    """73,728 queries and keys with a mask of stride 0 and dropout: equal to a run of some rows alone."""
    length = 73728
    _needs(4)
    q, k, v = (randn(1, length, 1, 64, seed=s) for s in range(3))
    mask = (torch.arange(length, device="cuda") % 3 != 1)[None, None, None]
    out, lse = attend(q, k, v, mask=mask, return_lse=True)
    for first in (0, 58240, 65536, length - 128):
        part, part_lse = attend(q[:, first : first + 128], k, v, mask=mask, return_lse=True)
        assert (out[:, first : first + 128] - part).abs().max() <= 2.0**-8
        assert (lse[..., first : first + 128] - part_lse).abs().max() <= 1e-3
    plain = attend(q[:, :128], k, v, dropout_p=0.5, dropout_seed=5)
    whole = attend(q, k, v, dropout_p=0.5, dropout_seed=5)
    assert (whole[:, :128] - plain).abs().max() <= 2.0**-8
    assert whole.isfinite().all() and not torch.equal(whole[:, -128:], whole[:, :128])


# --- memory ---------------------------------------------------------------------------------------------------------


def test_out_of_memory_leaves_the_process_usable() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    left = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()  # by earlier tests: what may be had again
    tensors = operands(batch=8 + (left >> 24), seqlen=4096, heads=16, heads_kv=16, dim=128)  # 16 MiB a batch
    small = operands()
    want = gradients(lambda *t: attend(*t, deterministic=True), small)
    leaves = [x.requires_grad_() for x in tensors]

    def step() -> Any:
        out = attend(*leaves)
        return torch.autograd.grad(out, leaves, torch.ones_like(out))

    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    fraction = (torch.cuda.memory_reserved() + (80 << 20)) / total
    torch.cuda.set_per_process_memory_fraction(fraction)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            step()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert_same(gradients(lambda *t: attend(*t, deterministic=True), small), want)
    assert all(grad.isfinite().all() for grad in step())


@pytest.mark.parametrize("deterministic", [False, True])
def test_memory_is_linear_in_the_sequence(deterministic: bool) -> None:
    """Beyond inputs and results, a step with gradients takes a number of bytes that grows with S, not S^2."""
    extra = []
    for seqlen in (2048, 8192, 32768):
        leaves = [randn(1, seqlen, 4, 64, seed=s).requires_grad_() for s in range(3)]
        attend(*leaves, causal=True)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = attend(*leaves, causal=True, deterministic=deterministic)
        torch.autograd.grad(out, leaves, torch.ones_like(out))
        extra.append(torch.cuda.max_memory_allocated() - before)
        del out, leaves
    assert extra[1] <= 5 * extra[0] + (4 << 20) and extra[2] <= 5 * extra[1]
