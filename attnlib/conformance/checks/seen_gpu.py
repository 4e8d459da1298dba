"""AB-nnn/* that need a GPU: large offsets, streams, graphs, several devices, split keys."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch

import attnlib

from ...backend import Refusal, RefusalCode
from ...errors import UnsupportedError
from ..inputs import given
from ..items import Item, add, check
from ..subject import Refused, Subject, require, same_bits

GPU = ("cuda", "rocm")
T = TypeVar("T")


def _room(subject: Subject, gibibytes: float) -> None:
    """Refuse, saying so, where the device has less free memory than the check needs."""
    free = torch.cuda.mem_get_info(subject.device)[0] / 2**30
    if free < gibibytes:
        raise Refused([Refusal(RefusalCode.OTHER, "device memory", f"{gibibytes} GiB free", f"{free:.0f} GiB")])


@check("AB-035/large_batch", level="full", kinds=GPU)
def large_batch(subject: Subject) -> None:
    """8300 sequences of one token: scratch offsets pass 2^31, dq and dk are 0 and dv == dout."""
    _room(subject, 8)
    q, k, v = (subject.randn(8300, 1, 16, 128, seed=s, dtype=torch.bfloat16).requires_grad_() for s in range(3))
    out, _ = subject.attention(q, k, v)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    require(dv == 1, "dv is not dout")
    bound = 2.0**-19 * 128 * 2 * 6 * 6
    require(dq.abs() <= bound, "dq of single keys is not nearly 0")
    require(dk.abs() <= bound, "dk of single keys is not nearly 0")


@check("AB-037/offsets_beyond_2_31-gpu", level="full", kinds=GPU)
def offsets(subject: Subject) -> None:
    """Pages 2^30 elements apart: appending and reading beyond 2^31 elements."""
    _room(subject, 6)
    storage = torch.zeros(2**31 + 2**20, dtype=torch.float16, device=subject.device)
    pages = [storage.as_strided((3, 16, 2, 64), (2**30, 128, 64, 1), offset) for offset in (0, 4096)]
    fresh = [subject.randn(2, 16, 2, 64, seed=s, dtype=torch.float16) for s in (1, 2)]
    q, table = subject.randn(2, 4, 2, 64, dtype=torch.float16), subject.ints(2, 1)[:, None]
    out, lse = subject.call(
        "attention_kvcache",
        q,
        *pages,
        subject.ints(0, 0),
        page_table=table,
        k_new=fresh[0],
        v_new=fresh[1],
        causal=True,
    )
    for target, source in zip(pages, fresh, strict=True):
        require(target[0] == 0, "a page of nobody was overwritten")
        same_bits("a page beyond 2^31 elements", target[2].contiguous(), source[0])
    from ...numerics import Result

    subject.check(given(q, *fresh, causal=True), result=Result(out, lse))


@check("AB-038/mask_beyond_2_32", level="full", kinds=GPU)
def mask_beyond(subject: Subject) -> None:
    """73,728 queries and keys with a mask that broadcasts over rows: equal to the run by chunks of rows."""
    _room(subject, 8)
    length = 73728
    q, k, v = (subject.randn(1, length, 1, 64, seed=s, dtype=torch.bfloat16) for s in range(3))
    mask = (torch.arange(length, device=subject.device) % 3 != 1)[None, None, None]
    out, lse = subject.attention(q, k, v, mask=mask)
    for first in (0, 58240, 65536, length - 128):
        part, part_lse = subject.attention(q[:, first : first + 128], k, v, mask=mask)
        require(
            (out[:, first : first + 128] - part).abs() <= 2.0**-8, f"rows from {first} differ from a run of their own"
        )
        require((lse[..., first : first + 128] - part_lse).abs() <= 1e-3, f"lse from {first} differs")


def splits(count: int, subject: Subject) -> None:
    """Every number of key splits gives the same result, more splits than blocks of keys included."""
    q = subject.randn(2, 3, 4, 64)
    k, v = (subject.randn(2, 300, 4, 64, seed=s) for s in (1, 2))
    inputs, config = given(q, k, v, causal=True), {"num_splits": count}
    try:
        subject.backend.plan(inputs.problem(), subject.family.name, subject.target, config)
    except UnsupportedError as error:
        raise Refused([Refusal(RefusalCode.CONFIG, "num_splits", "a plan that takes it", str(error))]) from None
    with subject.configured(f"splits_{count}", config) as split:
        split.check(inputs)


for _count in (1, 2, 3, 8, 16):
    add(Item(f"AB-046/splits-{_count}", functools.partial(splits, _count), "full", GPU))


def captured(step: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """step, run once on a side stream and then captured, and its result, which every replay fills anew."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result


@check("AB-070/graphs", kinds=GPU)
def graphs(subject: Subject) -> None:
    """A captured step with dropout draws a new mask at each replay, and backward uses the forward's."""
    q, k = (subject.randn(2, 64, 2, 64, seed=s).requires_grad_() for s in (0, 1))
    v = (
        torch.eye(64, dtype=subject.dtype, device=subject.device)[None, :, None]
        .expand(2, -1, 2, -1)
        .contiguous()
        .requires_grad_()
    )

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        out = attnlib.attention(q * 0, k, v, dropout_p=0.5, backend=subject.name)
        (dv,) = torch.autograd.grad(
            out, v, torch.eye(64, dtype=q.dtype, device=q.device)[None, :, None].expand(2, -1, 2, -1)
        )
        return out, dv

    subject.attention(q, k, v, dropout_p=0.5)
    graph, (out, dv) = captured(step)
    masks = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        masks.append(out > 0)
        require(0.4 < float(masks[-1].float().mean()) < 0.6, "a replay does not drop about half of the pairs")
        require((dv.permute(0, 3, 2, 1) > 0) == masks[-1], "backward's mask is not the forward's in one replay")
    require(not torch.equal(*masks[:2]) and not torch.equal(*masks[1:]), "two replays drop the same pairs")


@check("AB-076/devices", kinds=GPU)
def devices(subject: Subject) -> None:
    """Two devices in turn: plans and modules belong to one device each."""
    if torch.cuda.device_count() < 2:
        raise Refused([Refusal(RefusalCode.DEVICE, "devices", "2", str(torch.cuda.device_count()))])
    home = [subject.randn(2, 70, 2, 64, seed=s) for s in range(3)]
    results = []
    for index in (0, 1, 0, 1):
        tensors = [x.to(f"cuda:{index}") for x in home]
        results.append(attnlib.attention(*tensors, causal=True, backend=subject.name).cpu())
    for result in results[1:]:
        same_bits("the result on another device", result, results[0])


@check("AB-077/streams", kinds=GPU)
def streams(subject: Subject) -> None:
    """Everything runs on the caller's stream: behind its long work, before its readers."""
    q, k, v = (subject.randn(2, 256, 4, 64, seed=s) for s in range(3))
    want = subject.attention(q, k, v)[0].clone()
    big = torch.randn(4096, 4096, device=subject.device)
    side = torch.cuda.Stream()
    for _ in range(20):
        late = torch.full_like(q, math.nan)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                big @ big
            late.copy_(q)
            out = attnlib.attention(late, k, v, backend=subject.name)
            copy = out.clone()
        torch.cuda.current_stream().wait_stream(side)
        same_bits("the result on a side stream", copy, want)


@check("tf32/allowed", kinds=GPU)
def tf32(subject: Subject) -> None:
    """With tf32 allowed float32 is judged by tf32's bounds; with ieee asked for, by float32's."""
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        for precision in ("tf32", "ieee"):
            matmul.fp32_precision = precision
            q, k, v, dout = (subject.randn(2, 130, 2, 64, seed=s, dtype=torch.float32) for s in range(4))
            inputs = given(q, k, v, causal=True, grads=("q", "k", "v"), dout=dout)
            require(inputs.problem().tf32 == (precision == "tf32"), f"the problem's tf32 does not follow {precision}")
            subject.check(inputs, plain=True)
    finally:
        matmul.fp32_precision = before
