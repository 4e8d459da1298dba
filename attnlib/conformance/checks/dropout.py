"""dropout/*: the keep mask, recovered pair by pair from a backend's results, is the contract's to the bit.

With q = 0 and unit vectors as values, out[i, j] > 0 iff pair (i, j) was kept; with unit vectors as dO, dv[j, i] > 0
says the same of backward.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from ... import dropout_mask
from ..cases import Case
from ..inputs import Inputs
from ..items import Item, add, check
from ..recipes import SEED, make, one_hot
from ..subject import Subject, require, same_bits
from .visible import visible_set, weights

_CHUNK = 64


def _kept(inputs: Inputs, p: float) -> torch.Tensor:
    case = inputs.case
    whole = dropout_mask(SEED, p, len(inputs.q_lens), case.num_heads_q, case.seqlen_q, inputs.capacity)
    return whole & visible_set(inputs)


def _compare(what: str, found: torch.Tensor, want: torch.Tensor) -> None:
    wrong = found != want
    require(
        not wrong.any(),
        lambda: (
            f"{what}: {int(wrong.sum())} of {wrong.numel()} pairs differ from dropout_mask, the first at (sequence, "
            f"head, query, key) = {tuple(wrong.nonzero()[0].tolist())}"
        ),
    )


def mask(case: Case, subject: Subject) -> None:
    """The forward's mask, and the value of what it keeps."""
    case = replace(case, recipe="one_hot", head_dim_v=_CHUNK)
    first = make(case, subject.dtype, subject.device)
    found, _ = weights(lambda column: make(case, subject.dtype, subject.device, column=column), subject, first.capacity)
    want = _kept(first, case.dropout_p)
    _compare("forward", found > 0, want)
    count = visible_set(first).sum(-1, keepdim=True).clamp(min=1)
    share = 1 - int(case.dropout_p * 65536 + 0.5) / 65536
    close = (found - 1 / count / share).abs() <= 0.01 / count / share
    require(close | ~want, "kept weights are not divided by 1 - threshold / 65536")


def backward_mask(case: Case, subject: Subject) -> None:
    """The backward's mask, read from dv."""
    case = replace(case, recipe="one_hot", head_dim_v=_CHUNK)
    parts = []
    for first in range(0, case.seqlen_q, _CHUNK):
        inputs = make(case, subject.dtype, subject.device, direction="backward")
        unit = one_hot(case.seqlen_q, _CHUNK, first).expand(len(inputs.q_lens), -1, case.num_heads_q, -1)
        inputs.dout, inputs.dlse = unit.to(subject.dtype).to(subject.device), None
        dv = subject.run(inputs).dv
        assert dv is not None
        parts.append(dv.permute(0, 2, 3, 1).cpu())  # [B, H, rows, keys]
    found = torch.cat(parts, 2)[:, :, : case.seqlen_q]
    _compare("backward", found > 0, _kept(inputs, case.dropout_p))


def _register() -> None:
    sizes = {"seqlen_q": 70, "seqlen_k": 130, "batch": 3, "num_heads_q": 4, "num_heads_kv": 4}
    for p in (0.1, 0.5, 0.9):
        add(Item(f"dropout/mask-{p}", functools.partial(mask, Case("dropout-mask", dropout_p=p, **sizes))))
    add(Item("dropout/backward_mask", functools.partial(backward_mask, Case("dropout-mask", dropout_p=0.4, **sizes))))
    # the number of pair (0, 0) of sequence 2, head 1 under this seed is 19606
    for number in (19606, 19607):
        case = Case("dropout-mask", dropout_p=number / 65536, **sizes)
        add(Item(f"dropout/threshold-{number}", functools.partial(mask, case)))
    forms = [
        Case("dropout-causal", dropout_p=0.3, causal=True, **{**sizes, "seqlen_k": 100}),
        Case("dropout-gqa", dropout_p=0.3, **{**sizes, "num_heads_kv": 2}),
        Case("dropout-decode", dropout_p=0.3, **{**sizes, "seqlen_q": 1}),
        Case("dropout-window", dropout_p=0.3, window=(20, 10), **sizes),
        Case("dropout-lengths", dropout_p=0.3, q_lens=(70, 3, 41), kv_lens=(130, 64, 9), **sizes),
        Case("dropout-packed", layout="packed", dropout_p=0.3, q_lens=(70, 3, 41), kv_lens=(130, 64, 9), **sizes),
    ]
    for case in forms:
        add(Item(f"dropout/mask-{case.name.removeprefix('dropout-')}", functools.partial(mask, case)))


_register()


def _qkv(subject: Subject, requires_grad: bool = False) -> tuple[torch.Tensor, ...]:
    tensors = tuple(subject.randn(2, n, 2, 32, seed=n) for n in (70, 90, 90))
    return tuple(t.requires_grad_(requires_grad) for t in tensors)


@check("dropout/zero")
def zero(subject: Subject) -> None:
    """p = 0, and a p that rounds to threshold 0, are the path without dropout to the bit and draw no number."""
    q, k, v = _qkv(subject, True)
    plain = subject.attention(q, k, v)
    grads = torch.autograd.grad(plain[0].sum(), (q, k, v))
    before = torch.random.get_rng_state()
    for p in (0.0, 1e-6, 7e-6):
        out, lse = subject.attention(q, k, v, dropout_p=p)
        same_bits(f"out at p = {p}", out, plain[0])
        same_bits(f"lse at p = {p}", lse, plain[1])
        for name, got, want in zip("qkv", torch.autograd.grad(out.sum(), (q, k, v)), grads, strict=True):
            same_bits(f"d{name} at p = {p}", got, want)
    require(torch.equal(before, torch.random.get_rng_state()), "p = 0 draws from torch's generator")


@check("dropout/seed")
def seed(subject: Subject) -> None:
    """A seed given as int or tensor, negative too, gives one result; without one, torch's generator decides."""
    q, k, v = _qkv(subject)
    for number in (7, -7, 2**62 + 12345, -(2**63)):
        first = subject.attention(q, k, v, dropout_p=0.3, dropout_seed=number)[0]
        tensor = torch.tensor([number], device=subject.device)
        same_bits(f"seed {number}", subject.attention(q, k, v, dropout_p=0.3, dropout_seed=tensor)[0], first)
    high = subject.attention(q, k, v, dropout_p=0.3, dropout_seed=7 + 2**40)[0]
    require(
        not torch.equal(high, subject.attention(q, k, v, dropout_p=0.3, dropout_seed=7)[0]), "high seed bits are lost"
    )
    torch.manual_seed(11)
    drawn = [subject.attention(q, k, v, dropout_p=0.3)[0] for _ in range(2)]
    require(not torch.equal(*drawn), "two calls without a seed drop the same pairs")
    torch.manual_seed(11)
    same_bits("after manual_seed", subject.attention(q, k, v, dropout_p=0.3)[0], drawn[0])


@check("dropout/mean")
def mean(subject: Subject) -> None:
    """Over many seeds a kept row sums to 1 on average: with v = 1, out has mean 1."""
    q, k = subject.randn(4, 64, 4, 32), subject.randn(4, 64, 4, 32, seed=1)
    v = torch.ones_like(k)
    for p in (0.1, 0.5):
        out = torch.stack(
            [subject.attention(q, k, v, dropout_p=p, dropout_seed=s)[0].double().mean() for s in range(8)]
        )
        require((out.mean() - 1).abs() <= 0.02, f"the mean row sum at p = {p} is {float(out.mean()):.4f}, not 1")


@check("dropout/all")
def everything(subject: Subject) -> None:
    """p = 1 drops every pair: out and the gradients are 0, lse is what it is without dropout."""
    q, k, v = _qkv(subject, True)
    out, lse = subject.attention(q, k, v, dropout_p=1.0, dropout_seed=3)
    require(out == 0, "out is not 0 at p = 1")
    same_bits("lse at p = 1", lse, subject.attention(q, k, v)[1])
    for name, grad in zip("qkv", torch.autograd.grad(out.sum(), (q, k, v)), strict=True):
        require(grad == 0, f"d{name} is not 0 at p = 1")
