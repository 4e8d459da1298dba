"""What stands behind the public functions on a GPU: launches, counters, schedules, tiles by the clock."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_calls import MARKS, NAME, assert_same, operands, randn

import attnlib
from attnlib import dispatch
from attnlib.conformance.checks.seen_gpu import captured

pytestmark = MARKS


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


_SCHEDULES = ({"dq_first": True, "held": True}, {"dq_first": True, "order": True}, {})
_QUERIES, _KEYS = (500, 0, 65), (700, 0, 130)  # of three sequences; packed ones have three more between and behind them


def _spans(form: str) -> list[tuple[slice, slice, int]]:
    """Queries and keys of each sequence, and the batch they are in."""
    if form == "dense":
        return [(slice(0, 500), slice(0, 700), b) for b in range(3)]
    if form == "lengths":
        return [(slice(0, q), slice(0, k), b) for b, (q, k) in enumerate(zip(_QUERIES, _KEYS, strict=True))]
    q, k = (0, 500, 500, 565, 566, 800), (0, 700, 700, 830, 833, 1200)
    return [(slice(q[n], q[n + 1]), slice(k[n], k[n + 1]), 0) for n in range(5)]


def _leaves(form: str, dims: tuple[int, int], heads: int) -> list[torch.Tensor]:
    q_rows, k_rows = ((800,), (1200,)) if form == "packed" else ((3, 500), (3, 700))
    sizes = ((*q_rows, heads, dims[0]), (*k_rows, heads // 2, dims[0]), (*k_rows, heads // 2, dims[1]))
    return [randn(*size, seed=seed).requires_grad_() for seed, size in enumerate(sizes)]


def _gradients(form: str, leaves: list[torch.Tensor], **more: Any) -> list[torch.Tensor]:
    more["backend"] = f"{NAME}:sm_90"
    if form == "packed":
        ends = [[0] + [span[n].stop for span in _spans(form)] for n in range(2)]
        cu_q, cu_k = (torch.tensor(x, device="cuda", dtype=torch.int32) for x in ends)
        out = attnlib.attention_varlen(*leaves, cu_q, cu_k, **more)
    else:
        lens = [torch.tensor(x, device="cuda", dtype=torch.int32) for x in (_QUERIES, _KEYS)]
        given = {"q_lens": lens[0], "kv_lens": lens[1]} if form == "lengths" else {}
        out = attnlib.attention(*leaves, **given, **more)
    return [x.float() for x in torch.autograd.grad(out, leaves, randn(*out.shape, seed=7))]


def _wanted(form: str, leaves: list[torch.Tensor], window: tuple[int | None, int | None]) -> list[torch.Tensor]:
    """The same from the whole matrix of scores, in float64."""
    q, k, v = (x.detach().double().requires_grad_() for x in leaves)
    dout = randn(*q.shape[:-1], v.shape[-1], seed=7).double()
    total = q.new_zeros(())
    for rows, columns, b in _spans(form):
        pick = (lambda x, at: x[at]) if form == "packed" else (lambda x, at, b=b: x[b, at])
        s = torch.einsum("qhd,khd->hqk", pick(q, rows), pick(k, columns).repeat_interleave(2, 1)) * q.shape[-1] ** -0.5
        if 0 in s.shape:
            continue
        i = torch.arange(s.shape[1], device="cuda")[:, None] + s.shape[2] - s.shape[1]
        j = torch.arange(s.shape[2], device="cuda")[None]
        left, right = window
        hidden = ((j < i - left) if left is not None else j < 0) | ((j > i + right) if right is not None else j < 0)
        p = torch.softmax(s.masked_fill(hidden, -torch.inf), -1).nan_to_num(0.0)
        out = torch.einsum("hqk,khd->qhd", p, pick(v, columns).repeat_interleave(2, 1))
        total = total + (out * pick(dout, rows)).sum()
    return list(torch.autograd.grad(total, (q, k, v)))


def _agree(found: list[torch.Tensor], wanted: list[torch.Tensor], form: str) -> bool:
    """Every head's every 32 rows, beside the rows of that tensor: the loss of one tile's contribution is seen."""
    for n, (x, y) in enumerate(zip(found, wanted, strict=True)):
        for *spans, b in _spans(form):
            rows = spans[min(n, 1)]
            a, c = (t[rows] if form == "packed" else t[b, rows] for t in (x.double(), y))
            for part, whole in zip((a - c).split(32), c.split(32), strict=True):
                if not (part.square().sum((0, 2)) <= 4e-4 * whole.square().sum((0, 2)).mean() + 1e-12).all():
                    return False
    return True


def _on_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")


@pytest.mark.parametrize("dims", [(96, 96), (128, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("form", ["dense", "lengths", "packed"])
def test_schedules_of_the_wgmma_backward(form: str, dims: tuple[int, int]) -> None:
    """The table gives some to long calls only; here sequences of no, one and a few tiles have them."""
    _on_hopper()
    leaves = _leaves(form, dims, heads=4)
    wanted = _wanted(form, leaves, (None, 0))
    for schedule in _SCHEDULES:
        shape = (
            dict.fromkeys(("split", "order", "dq_first", "held", "wide", "apart"), False) | {"block_q": 64} | schedule
        )
        with dispatch.use_config({"wgmma_backward": shape}):
            assert _agree(_gradients(form, leaves, causal=True), wanted, form), schedule


_WINDOWS = [(None, None), (None, 0), (150, 40), (80, None)]


@pytest.mark.parametrize("window", _WINDOWS, ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (96, 80), (128, 128)], ids=str)
@pytest.mark.parametrize("form", ["dense", "lengths", "packed"])
def test_fixed_order_where_blocks_take_several_tiles(form: str, dims: tuple[int, int], window: Any) -> None:
    """A block that waits for its turn takes more than one tile where there are more of them than multiprocessors."""
    _on_hopper()
    leaves = _leaves(form, dims, heads=96)
    found = [_gradients(form, leaves, deterministic=True, window=window) for _ in range(3)]
    assert _agree(found[0], _wanted(form, leaves, window), form)
    for again in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], again, strict=True))


@pytest.mark.parametrize("window", _WINDOWS, ids=str)
@pytest.mark.parametrize("dims", [(136, 40), (184, 104), (192, 128)], ids=str)
@pytest.mark.parametrize("form", ["dense", "lengths", "packed"])
def test_wide_tiles_where_blocks_take_several(form: str, dims: tuple[int, int], window: Any) -> None:
    _on_hopper()
    leaves = _leaves(form, dims, heads=96)
    assert _agree(_gradients(form, leaves, window=window), _wanted(form, leaves, window), form)


@pytest.mark.parametrize(
    ("dims", "length", "whole"),
    [((192, 128), 2300, False), ((128, 128), 4300, False), ((64, 64), 2300, True), ((128, 128), 2300, True)],
    ids=str,
)
def test_groups_of_many_heads_see_queries_in_runs(dims: tuple[int, int], length: int, whole: bool) -> None:
    """Of eight query tiles of each head, from the last one on; the first and the last run are cut short.

    In smaller groups a run is all that a tile of keys sees.
    """
    _on_hopper()
    for group in (2, 8, 9):
        sizes = ((2 * group, dims[0]), (2, dims[0]), (2, dims[1]))
        q, k, v = (randn(1, length, *size, seed=seed) for seed, size in enumerate(sizes))
        dout = randn(1, length, 2 * group, dims[1], seed=7)
        found = []
        for family in ("sm_90", "sm_80"):
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            with dispatch.use_config({"whole_heads": True} if whole and family == "sm_90" else {}):
                out = attnlib.attention(*leaves, causal=True, backend=f"{NAME}:{family}")
                found.append(torch.autograd.grad(out, leaves, dout))
        for x, y in zip(*found, strict=True):
            for part, other in zip(x.float().split(64, 1), y.float().split(64, 1), strict=True):
                assert (part - other).norm() < 1e-2 * other.norm()


@pytest.mark.parametrize("window", [(None, None), (None, 0), (None, 37)], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (40, 40), (96, 80), (128, 128), (192, 192), (256, 136)], ids=str)
@pytest.mark.parametrize("deterministic", [False, True], ids=["any", "fixed"])
def test_blocks_that_take_whole_heads(deterministic: bool, dims: tuple[int, int], window: Any) -> None:
    """Chosen for many short heads; here few have them, and 3 * 144 more than there are multiprocessors."""
    _on_hopper()
    for heads in (4, 288):
        leaves = _leaves("dense", dims, heads)
        with dispatch.use_config({"whole_heads": True}):
            found = [_gradients("dense", leaves, deterministic=deterministic, window=window) for _ in range(3)]
        assert _agree(found[0], _wanted("dense", leaves, window), "dense")
        for again in found[1:]:
            assert all(torch.equal(x, y) for x, y in zip(found[0], again, strict=True))


def test_whole_heads_without_a_gradient_of_q_or_with_dropout() -> None:
    _on_hopper()
    leaves = _leaves("dense", (128, 128), heads=4)
    with dispatch.use_config({"whole_heads": True}):
        full = _gradients("dense", leaves, dropout_p=0.2, dropout_seed=3)
        out = attnlib.attention(leaves[0].detach(), *leaves[1:], dropout_p=0.2, dropout_seed=3, backend=f"{NAME}:sm_90")
        some = torch.autograd.grad(out, leaves[1:], randn(*out.shape, seed=7))
    plain = _gradients("dense", leaves, dropout_p=0.2, dropout_seed=3)
    assert all(torch.equal(x, y.float()) for x, y in zip(full[1:], some, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(full[1:], plain[1:], strict=True))
    assert (full[0] - plain[0]).norm() < 1e-3 * plain[0].norm()


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
