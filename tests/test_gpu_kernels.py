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
