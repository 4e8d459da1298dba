"""The public functions on a real GPU: streams, graphs, devices, threads, compile, autocast, memory."""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import attnlib
from attnlib import dispatch, numerics
from attnlib.conformance.cases import Case
from attnlib.conformance.checks.seen_gpu import captured
from attnlib.conformance.inputs import given
from attnlib.conformance.recipes import make

NAME = "cuda"
HALF = torch.bfloat16

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.version.hip is not None, reason="needs an NVIDIA GPU"),
]


@pytest.fixture(autouse=True)
def _synchronous() -> Iterator[None]:
    """Errors of a test's kernels are its own."""
    yield
    torch.cuda.synchronize()


def attend(*args: Any, **kwargs: Any) -> Any:
    return attnlib.attention(*args, backend=NAME, **kwargs)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = HALF, device: Any = "cuda") -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def operands(batch: int = 2, seqlen: int = 200, heads: int = 4, heads_kv: int = 2, dim: int = 64, **more: Any) -> Any:
    sizes = ((heads, 0), (heads_kv, 1), (heads_kv, 2))
    return [randn(batch, seqlen, count, dim, seed=seed, **more) for count, seed in sizes]


def gradients(function: Any, tensors: Any) -> list[torch.Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = function(*leaves)
    dout = randn(*out.shape, seed=9, dtype=out.dtype, device=out.device)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def assert_same(got: Any, want: Any) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert torch.equal(a.nan_to_num(), b.nan_to_num()), f"differ by up to {(a.float() - b.float()).abs().max()}"


def assert_right(inputs: Any, out: torch.Tensor, lse: torch.Tensor | None = None, **grads: torch.Tensor) -> None:
    """Within the bounds of the contract."""
    problem = inputs.problem()
    verdict = numerics.judge(problem, inputs.tensors(problem), numerics.Result(out, lse, **grads))
    assert verdict.passed, str(verdict)


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


def test_a_known_form_is_launched_where_its_call_is() -> None:
    """Without a gradient a form's second call is launched from C++: on its stream, in graphs, with and without lse."""
    q, k, v = operands(seqlen=48)
    want = attnlib.attention(q, k, v, return_lse=True, deterministic=True, backend="cuda:sm_80")

    def step(*tensors: torch.Tensor, **more: Any) -> Any:
        return attnlib.attention(*tensors, backend="cuda:sm_80", **more)

    step(q, k, v, return_lse=True)
    assert_same(step(q, k, v, return_lse=True), want)
    assert_same([step(q, k, v)], want[:1])
    assert_same([step(q, k, v)], want[:1])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = torch.zeros_like(q)
        torch.cuda._sleep(20_000_000)
        late.copy_(q)
        out = step(late, k, v)
    stream.synchronize()
    assert_same([out], want[:1])
    still = [x.clone() for x in (q, k, v)]
    graph, out = captured(lambda: step(*still))
    still[0].zero_()
    graph.replay()
    zero = out.clone()
    still[0].copy_(q)
    graph.replay()
    assert_same([out], want[:1])
    assert not torch.equal(zero, out)
    if torch.cuda.device_count() > 1:
        there = [x.to("cuda:1") for x in (q, k, v)]
        for _ in range(3):
            assert_same([step(*there).cpu()], [want[0].cpu()])


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


@pytest.mark.parametrize("packed", [False, True])
def test_tickets_are_zero_after_a_call(packed: bool) -> None:
    """Blocks that stay draw one tile after the other from a counter of the stream; the last to draw sets it back."""
    from attnlib_cuda import steps

    if packed:  # sequences without tokens, too: tiles that nobody has
        cu = torch.tensor([0, 700, 700, 700, 701, 1034, 1034], device="cuda", dtype=torch.int32)
        leaves = [randn(1034, 4, 64, seed=s).requires_grad_() for s in range(3)]
    else:
        leaves = [x.requires_grad_() for x in operands(seqlen=1500)]

    def results(backend: str) -> list[torch.Tensor]:
        more = {"causal": True, "backend": backend}
        out = attnlib.attention_varlen(*leaves, cu, cu, **more) if packed else attnlib.attention(*leaves, **more)
        return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    other = [x.float() for x in results(f"{NAME}:sm_80")]  # whose blocks draw nothing
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.current_stream()):
        with torch.cuda.stream(stream):
            torch.cuda.synchronize()
            found = results(NAME)
            torch.cuda.synchronize()
        assert not any(ticket.item() for ticket in steps._tickets.values())
        for x, y in zip(found, other, strict=True):
            assert float((x.float() - y).norm() / y.norm()) < 0.02


_SCHEDULES = ({"dq_first": True, "held": True}, {"dq_first": True, "order": True})


@pytest.mark.parametrize("more", [{}, {"deterministic": True}, {"dropout_p": 0.2, "dropout_seed": 3}], ids=str)
@pytest.mark.parametrize("dims", [(96, 96), (128, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("form", ["dense", "lengths", "packed"])
def test_schedules_of_the_wgmma_backward(form: str, dims: tuple[int, int], more: dict[str, Any]) -> None:
    """The table gives some to long calls only; here sequences of no, one and a few tiles have them."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")
    widths = ((4, dims[0]), (2, dims[0]), (2, dims[1]))
    sizes = (1034,) if form == "packed" else (3, 700)
    leaves = [randn(*sizes, *width, seed=seed).requires_grad_() for seed, width in enumerate(widths)]
    cu = torch.tensor([0, 700, 700, 701, 966, 1034, 1034], device="cuda", dtype=torch.int32)
    lens = torch.tensor([700, 0, 65], device="cuda", dtype=torch.int32)

    def results(backend: str) -> list[torch.Tensor]:
        wanted = {"causal": True, "backend": backend, **more}
        if form == "packed":
            out = attnlib.attention_varlen(*leaves, cu, cu, **wanted)
        else:
            given_lens = {"q_lens": lens, "kv_lens": lens} if form == "lengths" else {}
            out = attnlib.attention(*leaves, **given_lens, **wanted)
        return [x.float() for x in torch.autograd.grad(out, leaves, randn(*out.shape, seed=7))]

    other = results(f"{NAME}:sm_80")
    for schedule in _SCHEDULES:
        shape = {"split": False, "block_q": 64, "order": False, "dq_first": False, "held": False} | schedule
        with dispatch.use_config({"wgmma_backward": shape}):
            found = results(f"{NAME}:sm_90")
        for x, y in zip(found, other, strict=True):
            assert x.isfinite().all() and float((x - y).norm() / y.norm()) < 0.02, schedule


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


# --- tiles by the clock ---------------------------------------------------------------------------------------------

_TUNED = """
import torch, attnlib
from attnlib_triton import tune

timed, measure = [], tune._measured
tune._measured = lambda *given, **how: timed.append(given[0].kernel) or measure(*given, **how)
q, k, v = (torch.randn(2, 300, heads, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for heads in (4, 2, 2))
dout = torch.randn_like(q)


def step(backend, *leaves, seed=5):
    out = attnlib.attention(*leaves, causal=True, dropout_p=0.1, dropout_seed=seed, backend=backend)
    return [out, *torch.autograd.grad(out, leaves, dout.to(out.dtype))]


exact = step("reference", *(x.detach().double().requires_grad_() for x in (q, k, v)))
torch.cuda.synchronize()
before, random = torch.cuda.memory_allocated(), torch.cuda.get_rng_state()
found = [step("triton", q, k, v) for _ in range(4)]
for one in found:
    for got, want in zip(one, exact):
        assert float((got.detach().double() - want.detach()).norm() / want.detach().norm()) < 0.02
        assert got.isfinite().all()
    assert all(torch.equal(a, b) for a, b in zip(one, found[0]))
assert torch.equal(random, torch.cuda.get_rng_state())
del found, one, got, want
assert torch.cuda.memory_allocated() == before, (torch.cuda.memory_allocated(), before)
print("timed", *timed)
"""


def test_tiles_by_the_clock(tmp_path: Path) -> None:
    """The first process times and keeps a file for each kernel; the next finds them. Nothing else is different."""
    pytest.importorskip("triton")
    environment = {**os.environ, "ATTNLIB_AUTOTUNE": "1", "ATTNLIB_CACHE_DIR": str(tmp_path)}
    for expected, jit in (("timed forward query_gradient key_gradient", "auto"), ("timed", "auto"), ("timed", "never")):
        environment["ATTNLIB_JIT"] = jit
        done = subprocess.run([sys.executable, "-c", _TUNED], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == expected
        assert len(list((tmp_path / "cuda").glob("triton-tiles-*/tiles.json"))) == 3


# --- torch ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (20, 10), "softcap": 5.0}], ids=["causal", "window"])
def test_compile_fullgraph(backend: str, options: dict[str, Any]) -> None:
    def function(q: Any, k: Any, v: Any) -> Any:
        return attend(q * 1.5, k, v, deterministic=True, **options) + 1

    if backend == "inductor":
        pytest.importorskip("triton")
    tensors = operands(dtype=torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for got, want in zip(gradients(compiled, tensors), gradients(function, tensors), strict=True):
        assert torch.allclose(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_compile_reads_float32_precision(precision: str) -> None:
    """float32 under compile takes the precision in force, and its accuracy shows it."""
    matmul: Any = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("needs torch with fp32_precision")
    before = matmul.fp32_precision
    tensors = operands(dtype=torch.float32)
    try:
        matmul.fp32_precision = precision
        torch._dynamo.reset()
        compiled = torch.compile(lambda q, k, v: attend(q, k, v), fullgraph=True, backend="aot_eager")
        got, eager = compiled(*tensors), attend(*tensors)
    finally:
        matmul.fp32_precision = before
    exact = attnlib.attention(*(x.double() for x in tensors), backend="reference")
    error = float((got - exact).norm() / exact.norm())
    assert torch.equal(got, eager)
    assert error < 4e-6 if precision == "ieee" else 1e-5 < error < 3e-3


def test_compile_dropout_and_dynamic_lengths() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: attend(q, k, v, causal=True, dropout_p=0.5), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for seqlen in (17, 18, 65):
        tensors = operands(seqlen=seqlen)
        torch.manual_seed(3)
        first, second = compiled(*tensors), compiled(*tensors)
        torch.manual_seed(3)
        assert torch.equal(first, compiled(*tensors)) and not torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float16, HALF])
def test_autocast(dtype: torch.dtype) -> None:
    q, k, v = operands(dtype=torch.float32)
    q.requires_grad_()
    with torch.autocast("cuda", dtype):
        out = attend(q, k, v)
    assert out.dtype == dtype
    assert torch.equal(out, attend(q.to(dtype), k.to(dtype), v.to(dtype)))
    (grad,) = torch.autograd.grad(out.float().sum(), q)
    assert grad.dtype == torch.float32 and grad.isfinite().all()


@pytest.mark.parametrize("reentrant", [False, True])
def test_AB_064_checkpoint_repeats_dropout(reentrant: bool) -> None:
    tensors = operands(dim=128)

    def function(q: Any, k: Any, v: Any) -> Any:
        return attend(q, k, v, dropout_p=0.3, deterministic=True)

    def run(call: Any) -> list[torch.Tensor]:
        torch.manual_seed(7)
        leaves = [x.detach().clone().requires_grad_() for x in tensors]
        out = call(*leaves)
        out.backward(torch.ones_like(out))
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    assert_same(run(lambda *t: checkpoint(function, *t, use_reentrant=reentrant)), run(function))


def test_vmap_and_func_grad() -> None:
    q, k, v = operands()
    stacked = torch.stack([q, q * 0.5, -q])
    got = torch.func.vmap(lambda q: attend(q, k, v, causal=True))(stacked)
    for index in range(3):
        assert torch.equal(got[index], attend(stacked[index], k, v, causal=True))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    want = torch.autograd.grad(attend(*leaves, deterministic=True).float().square().sum(), leaves)
    loss = torch.func.grad(lambda *t: attend(*t, deterministic=True).float().square().sum(), argnums=(0, 1, 2))
    assert_same(loss(q, k, v), want)


def test_dispatch_names_the_device() -> None:
    q, k, v = operands()
    decision = attnlib.explain(q, k, v, causal=True)
    assert decision.chosen is not None and decision.target.kind == "cuda" and decision.target.present
    double = attnlib.explain(*(x.double() for x in (q, k, v)), backend=NAME)
    assert double.chosen is None and any(r.what == "dtype" for rs in double.refusals.values() for r in rs)


def test_host_lengths_on_the_device() -> None:
    """Every layout with lengths on the device gives what the case asks for, without reading them on the host."""
    for layout, more in (("packed", {"q_lens": (65, 1, 0, 40)}), ("cache", {"directions": ("forward",)})):
        case = Case(f"gpu-{layout}", layout=layout, kv_lens=(97, 64, 5, 33), causal=True, head_dim=64, **more)
        inputs = make(case, HALF, torch.device("cuda"))
        problem = inputs.problem()
        attnlib_call = getattr(attnlib, inputs.function)
        attnlib_call(*inputs.positional, **inputs.arguments, backend=NAME)  # compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            out, lse = attnlib_call(*inputs.positional, **inputs.arguments, return_lse=True, backend=NAME)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        verdict = numerics.judge(problem, inputs.tensors(problem), numerics.Result(out, lse))
        assert verdict.passed, str(verdict)


def test_caches_survive_clearing() -> None:
    q, k, v = operands()
    want = attend(q, k, v)
    dispatch.clear_caches()
    assert torch.equal(attend(q, k, v), want)
