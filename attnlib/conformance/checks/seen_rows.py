"""AB-nnn/*: inputs that broke attention libraries in public, each with the right answer under this contract.

Here: rows without keys, tails of tiles, scores far from zero.
"""

from __future__ import annotations

import functools
import math

import torch

from ...numerics import Result, magnitudes
from ..inputs import Inputs, given
from ..items import Item, add, check
from ..subject import Subject, require, same_bits

# --- rows without keys ------------------------------------------------------------------------------------------------


def _nearly_zero(subject: Subject, inputs: Inputs, result: Result, exact: bool) -> None:
    """dq and dk of single-key rows: within 2^-19 of the size of their terms, exactly 0 where the sums are exact."""
    problem = inputs.problem()
    sizes = magnitudes(problem, inputs.tensors(problem), bias_shape=inputs.bias_shape).magnitude
    for name in ("dq", "dk"):
        grad, size = getattr(result, name), getattr(sizes, name)
        require(grad.double().abs() <= 2.0**-19 * size, f"{name} exceeds 2^-19 of the size of its terms")
        if exact:
            require(grad == 0, f"{name} is not exactly 0")


def _eighths(x: torch.Tensor) -> torch.Tensor:
    """Rounded to multiples of 1/8, so that float32 sums of them are exact in any order."""
    return (x.float() * 8).round().div(8).to(x.dtype)


@check("AB-001/one_key_a_sequence")
def one_key_a_sequence(subject: Subject) -> None:
    """Packed, causal, many queries and one key each: dq and dk 0, dv 1, hidden rows 0 with lse -inf."""
    for dtype in subject.dtypes:
        starts, count = [0, 76, 110, 256], 3
        q = subject.randn(256, 1, 32, dtype=dtype) * 3
        k, v = (subject.randn(count, 1, 32, seed=s, dtype=dtype) * 3 for s in (1, 2))
        tables = {"cu_seqlens_q": subject.ints(*starts), "cu_seqlens_k": subject.ints(0, 1, 2, 3)}
        inputs = given(q, k, _eighths(v), tables=tables, causal=True, grads=("q", "k", "v"), dout=torch.ones_like(q))
        result = subject.check(inputs, cancels=True)
        assert result.out is not None and result.lse is not None and result.dv is not None
        _nearly_zero(subject, inputs, result, dtype == torch.float16)
        require(result.dv == 1, "dv is not 1")
        last = torch.zeros(256, dtype=torch.bool, device=subject.device)
        last[[75, 109, 255]] = True
        require(result.out[~last] == 0, "out of a row without keys is not 0")
        require(result.lse[:, ~last] == -math.inf, "lse of a row without keys is not -inf")
        require(result.lse[:, last] > -math.inf, "lse of a row with a key is -inf")


@check("AB-002/one_query_one_key")
def one_query_one_key(subject: Subject) -> None:
    """One query, one key, many seeds: dq and dk 0, dv == dout."""
    for dtype in subject.dtypes:
        q, k, v = (subject.randn(1000, 1, 1, 16, seed=s, dtype=dtype) * 3 for s in range(3))
        inputs = given(q, k, _eighths(v), grads=("q", "k", "v"), dout=torch.ones_like(q))
        result = subject.check(inputs, cancels=True)
        _nearly_zero(subject, inputs, result, dtype == torch.float16)
        same_bits("dv", result.dv, inputs.dout)  # type: ignore[arg-type]


@check("AB-004/all_false_row")
def all_false_row(subject: Subject) -> None:
    """A row whose mask is all False: out 0, lse -inf, dq 0; the same with a bias of -inf."""
    q, k, v, dout = (subject.randn(128, 4, 2, 8, seed=s) for s in range(4))
    mask = torch.rand((128, 1, 4, 4), generator=torch.Generator().manual_seed(4)) < 0.7
    mask[:, :, 1] = False
    mask[:, :, [0, 2, 3], 0] = True
    mask = mask.to(subject.device)
    bias = torch.zeros(mask.shape, device=subject.device).masked_fill(~mask, -math.inf)
    dout[:, 1] = 0
    for arguments in ({"mask": mask}, {"bias": bias}):
        inputs = given(q.clone(), k.clone(), v.clone(), grads=("q", "k", "v"), dout=dout, **arguments)
        result = subject.check(inputs)
        assert result.out is not None and result.lse is not None and result.dq is not None
        require(result.out[:, 1] == 0, "out of the empty row is not 0")
        require(result.lse[:, :, 1] == -math.inf, "lse of the empty row is not -inf")
        require(result.dq[:, 1] == 0, "dq of the empty row is not 0")
        seen = ~torch.isinf(result.lse)
        require(seen[:, :, [0, 2, 3]], "a row that has keys is empty")


@check("AB-005/empty_row_through_a_projection")
def through_a_projection(subject: Subject) -> None:
    """q, k, v from one linear layer, a mask that empties one row: weight gradients as without that row."""
    x = subject.randn(8, 12, 64, seed=1)
    keep = torch.arange(12, device=subject.device) != 5
    band = (torch.arange(12)[:, None] - torch.arange(12)).abs() <= 1
    mask = band.to(subject.device) & (torch.arange(12, device=subject.device) < 10)
    mask[5] = False

    def weight_gradient(rows: torch.Tensor) -> torch.Tensor:
        weight = subject.randn(192, 64, seed=2).div(8).requires_grad_()
        q, k, v = (x @ weight.T).view(8, 12, 3, 2, 32).unbind(2)
        out, _ = subject.attention(q[:, rows], k, v, mask=mask[rows])
        picked = out if rows.numel() < 12 else out[:, keep]
        (grad,) = torch.autograd.grad(picked.square().sum(), weight)
        return grad

    whole, reduced = weight_gradient(torch.arange(12, device=subject.device)), weight_gradient(keep.nonzero().flatten())
    require(torch.isfinite(whole), "a weight gradient is not finite")
    u = {torch.float32: 2.0**-20, torch.float64: 2.0**-48}.get(subject.dtype, 2.0**-6)
    require((whole - reduced).abs() <= u * reduced.abs().max(), "weight gradients differ from those without the row")


@check("AB-007/finfo_min_rows")
def finfo_min_rows(subject: Subject) -> None:
    """A finite bias is a bias: a row at finfo.min everywhere is the mean of v, a leading block at it is left out."""
    lowest = torch.finfo(torch.float32).min
    q, k, v, dout = (subject.randn(256, 3, 2, 4, seed=s) for s in range(4))
    bias = torch.ones(3, 3, device=subject.device)
    bias[0] = lowest
    result = subject.check(given(q, k, v, bias=bias, grads=("q", "k", "v"), dout=dout))
    assert result.out is not None
    u = {torch.float32: 1e-5, torch.float64: 1e-12}.get(subject.dtype, 2.0**-6)
    if subject.dtype != torch.float64:
        require(
            (result.out[:, 0].float() - v.float().mean(1)).abs() <= 4 * u, "a row at finfo.min is not the mean of v"
        )
    only_first = torch.zeros_like(dout)
    only_first[:, 0] = dout[:, 0]
    found = subject.check(given(q.clone(), k.clone(), v.clone(), bias=bias, grads=("q", "k", "v"), dout=only_first))
    assert found.dv is not None
    if subject.dtype != torch.float64:
        third = dout[:, :1].float() / 3
        require((found.dv.float() - third).abs() <= u * (1 + third.abs()), "dv of a row at finfo.min is not dO / 3")
    q, k, v = (subject.randn(2, 200, 2, 32, seed=s) for s in range(3))
    bias = torch.zeros(200, device=subject.device)
    bias[:128] = lowest
    result = subject.check(given(q, k, v, bias=bias, grads=("q", "k", "v"), dout=subject.randn(2, 200, 2, 32, seed=9)))
    alone = subject.attention(q.detach(), k.detach()[:, 128:], v.detach()[:, 128:])[0]
    assert result.out is not None
    require((result.out - alone).abs() <= 4 * u, "keys at finfo.min still weigh something")


def hidden_key(target: str, value: float, subject: Subject) -> None:
    """NaN or infinity in a key that the mask hides everywhere: the result of the call without that key."""
    subject.needs(masked_nan_safe_forward=True)
    q, k, v = (subject.randn(128, 4, 2, 8, seed=s) for s in range(3))
    mask = torch.tensor([True, True, True, False], device=subject.device)
    clean = subject.attention(q, k, v, mask=mask)
    (k if target == "k" else v)[:, 3] = value
    found = subject.attention(q, k, v, mask=mask)
    for name, got, want in zip(("out", "lse"), found, clean, strict=True):
        same_bits(f"{name} with {value} in a hidden key", got, want)
    subject.check(given(q, k[:, :3], v[:, :3]), result=Result(*found))


for _target in ("k", "v"):
    for _value in (math.nan, math.inf, 1e4):
        add(Item(f"AB-008/hidden_{_target}_{_value}", functools.partial(hidden_key, _target, _value)))


@check("AB-010/long_row_of_large_scores")
def long_row(subject: Subject) -> None:
    """q * 5, one query, 1000 keys: judged against the float64 oracle beside a naive run of the same dtype."""
    for dtype in subject.dtypes:
        q, k, v = (
            subject.randn(32, 1, 2, 64, dtype=dtype) * 5,
            *(subject.randn(32, 1000, 2, 64, seed=s, dtype=dtype) for s in (1, 2)),
        )
        subject.check(given(q, k, v), plain=True)


# --- tails, shifts ----------------------------------------------------------------------------------------------------


def shift(length: int, subject: Subject) -> None:
    """A constant added to every score changes nothing but lse, which it shifts."""
    q, k, v, dout = (subject.randn(2, length, 4, 64, seed=s) for s in range(4))
    lens = subject.ints(length, max(1, length - 3))
    results = []
    for constant in (0.0, -200.0, 200.0):
        bias = torch.full((1, 1, 1, 1), constant, device=subject.device)
        leaves = [x.clone() for x in (q, k, v)]
        inputs = given(*leaves, bias=bias, kv_lens=lens, grads=("q", "k", "v"), dout=dout)
        results.append(subject.check(inputs, cancels=length == 1))
        first, now = results[0].lse, results[-1].lse
        assert first is not None and now is not None
        require(
            (now - (first + constant)).abs() <= 2.0**-22 * abs(constant) + 1e-5, f"lse does not shift by {constant}"
        )


def shifted_scores(length: int, subject: Subject) -> None:
    """Scores near -200 by themselves: zero-filled lanes of a padded tile would score 0, far above every real one."""
    q = subject.randn(2, length, 4, 64) * 0.1 + 5.0
    k = subject.randn(2, length, 4, 64, seed=1) * 0.1 - 5.0
    v, dout = (subject.randn(2, length, 4, 64, seed=s) for s in (2, 3))
    lens = subject.ints(length, max(1, length - 3))
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=subject.device)
    for arguments in ({"mask": mask}, {"causal": True}):
        leaves = [x.clone() for x in (q, k, v)]
        inputs = given(*leaves, kv_lens=lens, grads=("q", "k", "v"), dout=dout, **arguments)
        result = subject.check(inputs, cancels=True)
        require(torch.isfinite(result.dq), "dq is not finite")  # type: ignore[arg-type]


for _length in (1, 17, 64, 65, 96, 129, 192):
    add(Item(f"AB-011/shift-{_length}", functools.partial(shift, _length)))
    add(Item(f"AB-011/scores_near_-200-{_length}", functools.partial(shifted_scores, _length)))
add(Item("AB-011/scores_near_-200-704", functools.partial(shifted_scores, 704), "full"))


def bias_tail(length: int, subject: Subject) -> None:
    """A bias that is a view into a wider buffer with 1e4 behind every row: the tail is never read."""
    q, k, v, dout = (subject.randn(1, length, 2, 64, seed=s) for s in range(4))
    frame = torch.full((1, 1, length + 5, length + 64), 1e4, device=subject.device)
    bias = frame[:, :, :length, :length]
    bias.copy_((torch.arange(length)[:, None] - torch.arange(length)).to(subject.device))
    subject.check(given(q, k, v, causal=True, bias=bias, grads=("q", "k", "v", "bias"), dout=dout))


add(Item("AB-013/bias_tail-129", functools.partial(bias_tail, 129)))
add(Item("AB-013/bias_tail-1025", functools.partial(bias_tail, 1025), "full"))


@check("AB-014/causal-4097", level="full")
def causal_4097(subject: Subject) -> None:
    """A long causal square one past a power of two."""
    q, k, v = (subject.randn(1, 4097, 1, 32, seed=s) for s in range(3))
    subject.check(given(q, k, v, causal=True))
