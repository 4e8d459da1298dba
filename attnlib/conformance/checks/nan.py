"""nan/*: where a NaN goes that lies inside a sequence.

In a key or value that is visible it reaches exactly the rows that see it. From one that is hidden (by a window, a
causal edge, a mask, a block mask or a bias of -inf) it reaches nothing where the backend declares masked_nan_safe;
without that declaration it must at least stay inside its sequence.
"""

from __future__ import annotations

import functools
import math

import torch

from ...numerics import Result
from ..cases import Case
from ..inputs import Inputs
from ..items import Item, add
from ..recipes import make
from ..subject import Subject, require, same_bits

_SIZES = {"seqlen_q": 70, "seqlen_k": 97, "batch": 3, "num_heads_q": 4, "strides": "plain"}
_HIDDEN = {
    "causal": (Case("nan-causal", causal=True, **_SIZES), 60),
    "window": (Case("nan-window", window=(9, 4), **_SIZES), 60),
    "mask": (Case("nan-mask", mask="b1qk", **_SIZES), 40),
    "block_mask": (Case("nan-block_mask", block_mask=(16, 16), **_SIZES), 40),
    "bias": (Case("nan-bias", bias="b1qk", recipe="bias_inf", bias_gradient=True, **_SIZES), 80),
    "packed-causal": (
        Case("nan-packed", layout="packed", q_lens=(70, 3), kv_lens=(97, 40), causal=True, **{**_SIZES, "batch": 2}),
        60,
    ),
}  # fmt: skip


def _with_nan(case: Case, direction: str, subject: Subject, key: int, target: str, value: float = math.nan) -> Inputs:
    """Inputs whose first sequence holds `value` in one key (one element of it) or one value (all of it), of head 1."""
    inputs = make(case, subject.dtype, subject.device, direction=direction)
    with torch.no_grad():
        rows = inputs.k if target == "k" else inputs.v
        row = rows[key, 1] if case.layout == "packed" else rows[0, key, 1]
        row[3 if target == "k" else slice(None)] = value
    if inputs.dlse is not None:
        inputs.dlse = torch.zeros_like(inputs.dlse).copy_(inputs.dlse)
    return inputs


def visible(case: Case, key: int, target: str, direction: str, subject: Subject) -> None:
    """Every row sees the key: all of its sequence's rows of that key/value head, and no other."""
    subject.check(_with_nan(case, direction, subject, key, target))


def hidden(case: Case, key: int, target: str, direction: str, subject: Subject) -> None:
    """Some rows do not see the key."""
    inputs = _with_nan(case, direction, subject, key, target)
    capabilities = subject.capabilities
    safe = capabilities.masked_nan_safe_backward if direction == "backward" else capabilities.masked_nan_safe_forward
    if safe:
        subject.check(inputs)
        return
    clean = make(case, subject.dtype, subject.device, direction=direction)
    _same_elsewhere(subject.run(inputs), subject.run(clean), inputs)


def _same_elsewhere(got: Result, want: Result, inputs: Inputs) -> None:
    first_q = inputs.q_lens[0] if inputs.function == "attention_varlen" else 1
    first_k = inputs.kv_lens[0] if inputs.function == "attention_varlen" else 1
    assert got.out is not None and want.out is not None
    require(torch.isnan(got.out[:first_q]).any(), "a NaN that rows see is lost")
    same_bits("out of other sequences", got.out[first_q:], want.out[first_q:])
    for name, first in (("dq", first_q), ("dk", first_k), ("dv", first_k)):
        tensor = getattr(got, name)
        require(tensor is None or not torch.isnan(tensor[first:]).any(), f"{name}: a NaN reaches another sequence")


def infinite(subject: Subject) -> None:
    """An infinite value gives infinity to every row that sees it."""
    case = Case("nan-infinite", **_SIZES)
    subject.check(_with_nan(case, "forward", subject, 40, "v", math.inf))


def query(subject: Subject) -> None:
    """A NaN in a query reaches its own row."""
    inputs = make(Case("nan-query", **_SIZES), subject.dtype, subject.device)
    inputs.q[1, 20, 2, 5] = math.nan
    subject.check(inputs)


def _register() -> None:
    plain = Case("nan-visible", **_SIZES)
    dropped = Case("nan-dropped", dropout_p=0.5, **_SIZES)
    for direction in ("forward", "backward"):
        for target in ("k", "v"):
            name = f"{target}-{direction}"
            add(Item(f"nan/visible-{name}", functools.partial(visible, plain, 96, target, direction)))
            for kind, (case, key) in _HIDDEN.items():
                add(Item(f"nan/hidden-{kind}-{name}", functools.partial(hidden, case, key, target, direction)))
    add(Item("nan/visible-dropped", functools.partial(visible, dropped, 40, "v", "forward")))
    add(Item("nan/visible-infinite", infinite))
    add(Item("nan/visible-query", query))


_register()
