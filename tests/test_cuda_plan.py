"""What plans launch, without a GPU: grids, and the structs that kernels are given."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from attnlib.backend import Target
from attnlib.problem import AttentionProblem, Tensors
from attnlib_cuda import config, jit, params, steps
from attnlib_cuda.plan import CudaPlan

LAYOUTS = {
    "forward_sm80": params.FORWARD, "combine": params.COMBINE, "append": params.APPEND, "delta": params.DELTA,
    "backward_sm80": params.BACKWARD, "query_gradient": params.QUERY_GRADIENT, "sink_gradient": params.SINK_GRADIENT,
    "bias_gradient": params.BIAS_GRADIENT, "backward_sm90": params.BACKWARD,
}  # fmt: skip


@dataclass
class Launch:
    entry: str
    grid: tuple[int, int, int]
    values: dict[str, Any]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """What was launched so far."""
    found: list[Launch] = []

    class Kernel:
        def __init__(self, entry: str) -> None:
            self.entry = entry

        def launch(self, grid: Any, stream: int, data: bytes, shared: int, pdl: bool, problem: Any) -> None:
            layout = LAYOUTS[self.entry]
            members = data[4 * 128 :][: layout.size] if self.entry.endswith("_sm90") else data  # behind the maps
            values = dict(zip(layout.names, layout.format.unpack(members), strict=True))
            found.append(Launch(self.entry, grid, values))

    monkeypatch.setattr(jit, "load", lambda spec, index, problem: Kernel(spec.entry))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    return found


def given(problem: AttentionProblem, **more: Any) -> Tensors:
    p = problem
    q, out, dout = (torch.zeros(p.batch, p.seqlen_q, p.num_heads_q, p.head_dim) for _ in range(3))
    k, v = (torch.zeros(p.batch, p.seqlen_k, p.num_heads_kv, p.head_dim) for _ in range(2))
    lse = torch.zeros(p.batch, p.num_heads_q, p.seqlen_q)
    stats = torch.zeros(2, *lse.shape) if p.needs_stats else None
    tensors = Tensors(q, k, v, out, lse, stats=stats, **more)
    if p.grads:
        tensors = replace(tensors, dout=dout, dq=q.clone(), dk=k.clone(), dv=v.clone())
    return tensors


PROBLEM = AttentionProblem(torch.bfloat16, 2, 300, 500, 4, 2, 64, 64, 0.125, grads=("q", "k", "v"))
TARGET = Target("cuda", "sm_90", 0, present=False)


def test_structs_of_a_call(launches: list[Launch]) -> None:
    plan = CudaPlan(PROBLEM, TARGET)
    for seqlen_q in (300, 300, 170):  # prepared, taken again, prepared for another problem
        problem = replace(PROBLEM, seqlen_q=seqlen_q, total_q=-1)
        t = given(problem)
        t.k = t.k.transpose(1, 2).contiguous().transpose(1, 2)
        launches.clear()
        plan.forward(problem, t)
        plan.backward(problem, t)
        forward, *backward = (launch for launch in launches if launch.entry != "combine")
        assert [launch.entry for launch in backward] == ["delta", "backward_sm80", "query_gradient"]
        for values in (forward.values, backward[1].values):
            assert (values["q"], values["k"], values["v"]) == (t.q.data_ptr(), t.k.data_ptr(), t.v.data_ptr())
            assert [values[f"k_{name}"] for name in "bjh"] == list(t.k.stride()[:3])
            assert (values["seqlen_q"], values["seqlen_k"], values["batch"]) == (seqlen_q, 500, 2)
            assert values["scale"] == 0.125 and values["window_left"] == values["window_right"] == -1
        assert forward.values["out"] == backward[0].values["out"] == t.out.data_ptr()
        assert backward[0].values["rows"] == backward[1].values["rows"] != 0
        assert len({launch.values["dq_sum"] for launch in backward}) == 1
        assert backward[2].values["dq"] == t.dq.data_ptr() and backward[0].values["dlse"] == 0
        rows = config.backward(problem, plan._info)[0].block_q
        assert backward[0].grid == (2 * -(-seqlen_q // rows), 4, 1)


@pytest.mark.parametrize(
    ("batch", "more", "draw"),
    [(2, {}, True), (40, {}, True), (40, {"deterministic": True}, True),
     (40, {"deterministic": True, "softcap": 30.0}, False)],
)  # fmt: skip
def test_blocks_of_the_wgmma_backward_draw_tiles(
    batch: int, more: dict[str, Any], draw: bool, launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as there are multiprocessors, or tiles; in a fixed order of additions without a warpgroup for dQ, a block
    for each tile."""
    ticket = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(steps, "operand_map", lambda tensor, rows: bytes(128))
    monkeypatch.setattr("attnlib_cuda.plan.ticket_of", lambda index, stream: ticket)
    problem = replace(PROBLEM, batch=batch, **more)
    plan = CudaPlan(problem, TARGET, wgmma=True)
    plan.backward(problem, given(problem))
    form, warps = ("apart", 16) if problem.deterministic and draw else ("keys", 12)
    assert plan.describe()["backward"].items() >= {"form": form, "warps": warps}.items()
    (main,) = (launch for launch in launches if launch.entry == "backward_sm90")
    tiles = batch * 2 * -(-500 // 128)
    assert main.grid == (min(132, tiles) if draw else tiles, 1, 1)
    assert not (draw and main.values["rotate"])  # a turn may not wait for a tile that nobody has drawn
    assert (main.values["ticket"] == ticket.data_ptr()) is not problem.deterministic and main.values["ticket"] != 0


def test_what_a_problem_does_not_say_is_read_from_every_call(launches: list[Launch]) -> None:
    """Broadcast dimensions of a bias, dlse, which lengths there are, how many tokens are appended."""
    problem = replace(PROBLEM, bias=torch.float32, grads=("q", "k", "v", "bias"), deterministic=True)
    plan = CudaPlan(problem, TARGET)
    full = (2, 4, 300, 500)
    for shape, elements in (((1, 1, 1, 500), 500), ((2, 1, 300, 1), 600), ((1, 1, 1, 500), 500)):
        bias, dbias = torch.zeros(shape).expand(full), torch.zeros(shape).expand(full)
        plan.backward(problem, replace(given(problem, bias=bias), dbias=dbias))
        last = launches[-1]
        assert last.entry == "bias_gradient" and last.grid == (elements // 4, 1, 1)
        assert [last.values[f"size_{name}"] for name in "bhij"] == list(shape)
        assert [last.values[f"dbias_{name}"] for name in "bhij"] == list(dbias.stride())

    launches.clear()
    plan = CudaPlan(PROBLEM, TARGET)
    dlse = torch.zeros(2, 4, 300)
    for given_dlse in (None, dlse, None):
        plan.backward(PROBLEM, replace(given(PROBLEM), dlse=given_dlse))
        delta = launches[-3]
        assert delta.values["dlse"] == (0 if given_dlse is None else dlse.data_ptr())

    launches.clear()
    problem = replace(PROBLEM, grads=(), lengths=True)
    plan, lens = CudaPlan(problem, TARGET), torch.tensor([3, 5], dtype=torch.int32)
    for names in ({"q_lens"}, {"kv_lens"}, {"q_lens", "kv_lens"}):
        plan.forward(problem, given(problem, **dict.fromkeys(names, lens)))
        forward = next(launch for launch in reversed(launches) if launch.entry == "forward_sm80")
        assert {name for name in ("q_lens", "kv_lens") if forward.values[name]} == names

    problem = replace(problem, append=True)
    plan = CudaPlan(problem, TARGET)
    for tokens in (1, 7, 1):
        new = torch.zeros(2, tokens, 2, 64)
        launches.clear()
        plan.forward(problem, given(problem, kv_lens=lens, k_new=new, v_new=new))
        assert launches[0].entry == "append" and launches[0].grid == (tokens, 2, 1)
        assert launches[0].values["new_tokens"] == launches[1].values["new_tokens"] == tokens


def test_pages_with_a_hint(launches: list[Launch]) -> None:
    """Where a bias has max_seqlen_k columns, longer sequences do not fit; else the table's room counts."""
    cu = torch.tensor([0, 100, 200], dtype=torch.int32)
    table = torch.zeros(2, 40, dtype=torch.int32)
    problem = replace(PROBLEM, grads=(), packed=True, page_size=16, seqlen_k=500, total_q=200, total_k=1000)
    pages, q, lse = torch.zeros(9, 16, 2, 64), torch.zeros(200, 4, 64), torch.zeros(4, 200)
    for bias, room in ((None, 640), (torch.zeros(2, 4, 300, 500), 500)):
        asked = replace(problem, bias=None if bias is None else torch.float32)
        tensors = Tensors(q, pages, pages, q, lse, bias=bias, cu_seqlens_q=cu, cu_seqlens_k=cu, page_table=table)
        launches.clear()
        CudaPlan(asked, TARGET).forward(asked, tensors)
        assert launches[0].values["seqlen_k"] == room and launches[0].values["page_row"] == 40


def best(call: Callable[[], Any]) -> float:
    """The least microseconds that a call takes, of many short runs."""
    least = 1.0
    for _ in range(200):
        start = time.perf_counter()
        for _ in range(20):
            call()
        least = min(least, (time.perf_counter() - start) / 20)
    return least * 1e6


def test_time_before_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernel:
        def launch(self, grid: Any, stream: int, data: bytes, shared: int, pdl: bool, problem: Any) -> None: ...

    monkeypatch.setattr(jit, "load", lambda spec, index, problem: Kernel())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    problem = replace(PROBLEM, seqlen_k=300, total_k=-1, num_heads_q=16, batch=16, total_q=-1)
    plan, t = CudaPlan(problem, TARGET), given(problem)
    forward, backward = best(lambda: plan.forward(problem, t)), best(lambda: plan.backward(problem, t))
    print(f"forward {forward:.1f} us, backward {backward:.1f} us")
    assert forward < 15 and backward < 60
