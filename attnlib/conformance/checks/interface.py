"""refusals/*, arguments/*, empty/*, same/*: nothing is dropped, nothing runs that was refused, no size is special."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

import attnlib

from ...numerics import Result
from ...problem import DTYPES, Feature
from ..cases import Case, with_features
from ..inputs import given
from ..items import Item, add, check
from ..recipes import make
from ..subject import Refused, Subject, fail, require, same_bits

# --- refusals ---------------------------------------------------------------------------------------------------------


def refusal(feature: Feature, subject: Subject) -> None:
    """A feature is either declared and runs, or is refused by explain and by the call, with its name."""
    direction = "backward" if feature.name in ("BACKWARD", "BIAS_GRADIENT", "DETERMINISTIC") else "forward"
    case = with_features(f"refusal-{feature.name.lower()}", (feature,), seqlen_q=65, seqlen_k=97)
    inputs = make(case, subject.dtype, subject.device, direction=direction)
    require(feature in inputs.problem().features, f"the problem of this check does not ask for {feature.value}")
    try:
        subject.run(inputs)
    except Refused as refused:
        declared = feature in subject.capabilities.features
        named = any(found.what == feature.value for found in refused.refusals)
        require(declared or named, f"{feature.value} is not declared, and no refusal names it: {refused}")
        raise
    require(feature in subject.capabilities.features, f"{feature.value} ran without being declared")


def dtype_refusal(dtype: torch.dtype, subject: Subject) -> None:
    """A dtype is either declared and runs, or is refused with a refusal named dtype."""
    q, k, v = (subject.randn(2, 40, 2, 32, seed=s, dtype=dtype) for s in range(3))
    try:
        subject.check(given(q, k, v))
    except Refused as refused:
        require(any(found.what == "dtype" for found in refused.refusals), f"no refusal names dtype: {refused}")
        require(dtype not in subject.capabilities.dtypes, f"{dtype} is declared but refused: {refused}")
        raise
    require(dtype in subject.capabilities.dtypes, f"{dtype} ran without being declared")


def _register() -> None:
    for feature in Feature:
        add(Item(f"refusals/{feature.name.lower()}", functools.partial(refusal, feature)))
    for dtype in DTYPES:
        add(Item(f"refusals/{str(dtype).removeprefix('torch.')}", functools.partial(dtype_refusal, dtype)))
    for name in _CHANGES:
        add(Item(f"arguments/AB-022-{name}", functools.partial(argument, name)))
    for name in _EMPTY:
        add(Item(f"empty/AB-082-{name}", functools.partial(empty, name)))


# --- arguments --------------------------------------------------------------------------------------------------------

_CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal": ({"causal": False}, {"causal": True}),
    "causal_alignment": ({"causal": True}, {"causal": True, "causal_alignment": "top_left"}),
    "window": ({"window": (9, 3)}, {"window": (8, 3)}),
    "window_right": ({"window": (9, 3)}, {"window": (9, 4)}),
    "scale": ({"scale": 0.2}, {"scale": 0.25}),
    "softcap": ({"softcap": 2.0}, {"softcap": 3.0}),
    "bias": ({}, {"bias": (1, 2, 40, 50)}),
    "mask": ({}, {"mask": (1, 1, 40, 50)}),
    "alibi_slopes": ({}, {"alibi_slopes": (2,)}),
    "sinks": ({}, {"sinks": (2,)}),
    "block_mask": ({}, {"block_mask": (1, 1, 3, 4)}),
    "q_lens": ({}, {"q_lens": (40, 20)}),
    "kv_lens": ({}, {"kv_lens": (50, 20)}),
    "dropout_p": ({"dropout_p": 0.1, "dropout_seed": 1}, {"dropout_p": 0.2, "dropout_seed": 1}),
    "dropout_seed": ({"dropout_p": 0.1, "dropout_seed": 1}, {"dropout_p": 0.1, "dropout_seed": 2}),
}


def _arguments(subject: Subject, given_as: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in given_as.items():
        if name in ("bias", "sinks"):
            made[name] = subject.randn(*value, seed=7)
        elif name == "mask":
            made[name] = subject.randn(*value, seed=7) > 0
        elif name == "alibi_slopes":
            made[name] = subject.randn(*value, seed=7, dtype=torch.float32).abs()
        elif name == "block_mask":
            made[name] = attnlib.BlockMask((torch.arange(12) % 3 != 1).view(value).to(subject.device), 16, 16)
        elif name in ("q_lens", "kv_lens"):
            made[name] = subject.ints(*value)
        else:
            made[name] = value
    return made


def argument(name: str, subject: Subject) -> None:
    """Changing an argument changes the result, or is refused: it is never accepted and dropped."""
    q, k, v = (subject.randn(2, n, 2, 32, seed=n) for n in (40, 50, 50))
    before, after = _CHANGES[name]
    first = subject.attention(q, k, v, **_arguments(subject, before))[0]
    second = subject.attention(q, k, v, **_arguments(subject, after))[0]
    changed = (first != second).flatten(1).any(1)
    sequences = changed[1:] if name in ("q_lens", "kv_lens") else changed
    require(sequences, f"{name}: {before or 'left out'} and {after} give the same result")


@check("arguments/AB-022-unknown")
def unknown_argument(subject: Subject) -> None:
    """A keyword that does not exist is an error and not a no-op."""
    q, k, v = (subject.randn(2, 8, 2, 32, seed=s) for s in range(3))
    lens = subject.ints(3, 8)
    for call in (
        lambda: attnlib.attention_kvcache(q, k, v, lens, cache_leftpad=subject.ints(2, 0), backend=subject.name),
        lambda: attnlib.attention(q, k, v, is_causal=True, backend=subject.name),
    ):
        try:
            call()
        except TypeError:
            continue
        fail("an unknown keyword was accepted")


# --- empty sizes ------------------------------------------------------------------------------------------------------

_EMPTY: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]] = {
    "no-batch": ((0, 5, 2, 16), (0, 7, 2, 16), 16),
    "no-queries": ((2, 0, 2, 16), (2, 7, 2, 16), 16),
    "no-keys": ((2, 5, 2, 16), (2, 0, 2, 16), 16),
    "no-heads": ((2, 5, 0, 16), (2, 7, 0, 16), 16),
    "no-values": ((2, 5, 2, 16), (2, 7, 2, 16), 0),
    "nothing": ((0, 0, 0, 16), (0, 0, 0, 16), 0),
}


def empty(name: str, subject: Subject) -> None:
    """Zero sizes keep their shapes: out 0, lse -inf (without values the right lse), gradients 0, with a sink too."""
    shape_q, shape_k, dim_v = _EMPTY[name]
    q, k, v = (
        subject.randn(*shape, seed=s).requires_grad_()
        for s, shape in enumerate((shape_q, shape_k, (*shape_k[:-1], dim_v)))
    )
    sinks = subject.randn(shape_q[2]).requires_grad_()
    for causal in (False, True):
        out, lse = subject.attention(q, k, v, causal=causal)
        require(
            out.shape == (*shape_q[:-1], dim_v), f"out: needs shape {(*shape_q[:-1], dim_v)}, got {tuple(out.shape)}"
        )
        require(lse.shape == (shape_q[0], shape_q[2], shape_q[1]), f"lse has shape {tuple(lse.shape)}")
        require(out == 0, "out is not 0")
        if name == "no-values":
            whole = given(q.detach(), k.detach(), torch.zeros_like(k).detach(), causal=causal)
            subject.check(whole, result=Result(torch.zeros_like(q).detach(), lse.detach()))
        else:
            require(lse == -math.inf, "lse is not -inf")
        grads = torch.autograd.grad(out.sum() + lse.nan_to_num(0, 0, 0).sum() * 0, (q, k, v), allow_unused=True)
        for which, leaf, grad in zip("qkv", (q, k, v), grads, strict=True):
            if grad is not None:
                require(grad.shape == leaf.shape, f"d{which} has shape {tuple(grad.shape)}")
                require(grad == 0, f"d{which} is not 0")
    if name == "no-keys":
        out, lse = subject.attention(q, k, v, sinks=sinks)
        require(out == 0, "out is not 0")
        require((lse - sinks.detach()[:, None]).abs() <= 1e-6, "lse of a row without keys is not its sink")
        dlse = torch.ones_like(lse)
        (dsinks,) = torch.autograd.grad(lse, sinks, dlse)
        require((dsinks - shape_q[0] * shape_q[1]).abs() <= 0.1, f"dsinks is {dsinks.tolist()}, not the sum of dlse")


@check("empty/AB-082-packed")
def empty_packed(subject: Subject) -> None:
    """Packed tensors without tokens, and sequences without queries or keys among others."""
    q, k = subject.randn(0, 2, 16), subject.randn(0, 2, 16)
    cu = subject.ints(0, 0, 0)
    out, lse = subject.call("attention_varlen", q, k, k, cu, cu)
    require(out.shape == (0, 2, 16) and lse.shape == (2, 0), f"shapes {tuple(out.shape)} and {tuple(lse.shape)}")
    q = subject.randn(5, 2, 16)
    out, lse = subject.call("attention_varlen", q, k, k, subject.ints(0, 2, 5), cu)
    require(out == 0, "out of queries without keys is not 0")
    require(lse == -math.inf, "lse of queries without keys is not -inf")


@check("empty/AB-082-errors")
def empty_errors(subject: Subject) -> None:
    """head_dim 0, and no key/value head for query heads, are errors that name the argument."""
    for shape_q, shape_k in (((1, 4, 2, 0), (1, 4, 2, 0)), ((1, 4, 4, 16), (1, 4, 0, 16))):
        q, k = (torch.zeros(shape, dtype=subject.dtype, device=subject.device) for shape in (shape_q, shape_k))
        raises(ValueError, "q", attnlib.attention, q, k, k, backend=subject.name)


def raises(kind: type[Exception], text: str, function: Any, *args: Any, **keywords: Any) -> None:
    """Fail unless the call raises `kind` with `text` in its message."""
    try:
        function(*args, **keywords)
    except kind as error:
        require(text in str(error), f"the message does not name {text}: {error}")
        return
    except Refused:
        raise
    except Exception as error:
        fail(f"needs {kind.__name__}, got {type(error).__name__}: {error}")
    fail(f"needs {kind.__name__}, got a result")


# --- the same problem in other layouts --------------------------------------------------------------------------------


@check("same/varlen_and_sequences")
def varlen_and_sequences(subject: Subject) -> None:
    """Each sequence of a packed call is what a dense call of that sequence alone has to be."""
    case = Case("same-varlen", layout="packed", q_lens=(65, 1, 40, 20), kv_lens=(97, 64, 5, 33), causal=True, batch=4,
                num_heads_q=16, num_heads_kv=8, head_dim=128)  # fmt: skip
    inputs = make(case, subject.dtype, subject.device, direction="backward")
    inputs.dlse = None
    packed = subject.run(inputs)
    first_q = first_k = 0
    for q_len, kv_len in zip(inputs.q_lens, inputs.kv_lens, strict=True):
        rows, keys = slice(first_q, first_q + q_len), slice(first_k, first_k + kv_len)
        q, k, v = (x.detach()[s][None].clone() for x, s in ((inputs.q, rows), (inputs.k, keys), (inputs.v, keys)))
        assert inputs.dout is not None and packed.out is not None and packed.lse is not None
        assert packed.dq is not None and packed.dk is not None and packed.dv is not None
        alone = given(q, k, v, causal=True, grads=("q", "k", "v"), dout=inputs.dout[rows][None])
        parts = Result(
            packed.out[rows][None], packed.lse[:, rows][None].contiguous(), packed.dq[rows][None],
            packed.dk[keys][None], packed.dv[keys][None],
        )  # fmt: skip
        subject.check(alone, result=parts)
        first_q, first_k = first_q + q_len, first_k + kv_len


def _paged_pair(subject: Subject, fill: float) -> tuple[Any, Any, list[int]]:
    """Keys and values [3, 64, 2, 64] and the same in shuffled pages of 16, with `fill` in every unused slot."""
    k, v = (subject.randn(3, 64, 2, 64, seed=s) for s in (1, 2))
    lens, order = [13, 64, 33], [7, 2, 9, 0, 4, 5, 1, 3]
    pages = [x.new_full((11, 16, 2, 64), fill) for x in (k, v)]
    table = torch.full((3, 4), -1, dtype=torch.int32)
    for b, length in enumerate(lens):
        for page in range(-(-length // 16)):
            table[b, page] = order.pop()
            count = min(16, length - 16 * page)
            for target, source in zip(pages, (k, v), strict=True):
                target[table[b, page], :count] = source[b, 16 * page : 16 * page + count]
    return (k, v), (*pages, table.to(subject.device)), lens


@check("same/paged_and_gathered")
def paged_and_gathered(subject: Subject) -> None:
    """Pages give what the gathered tokens give; what unused slots hold changes no bit (AB-016)."""
    q = subject.randn(3, 16, 8, 64)
    results = []
    for fill in (math.nan, 0.0, math.inf):
        (k, v), (k_pages, v_pages, table), lens = _paged_pair(subject, fill)
        kv_lens = subject.ints(*lens)
        results.append(subject.call("attention_kvcache", q, k_pages, v_pages, kv_lens, page_table=table, causal=True))
        for which in (0, 1):
            same_bits(f"{('out', 'lse')[which]} with {fill} in unused slots", results[-1][which], results[0][which])
    out, lse = results[0]
    for b, length in enumerate(lens):
        alone = given(*(x[b : b + 1].contiguous() for x in (q, k[:, :length], v[:, :length])), causal=True)
        subject.check(alone, result=Result(out[b : b + 1], lse[b : b + 1].contiguous()))


_register()
