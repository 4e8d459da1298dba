"""The quick way into attention(): calls whose form was seen before run without the way through Python.

A form is all of a call but the values in its tensors. When a plain call (q, k and v alone) has gone through checks and
dispatch once, `keep` hands what was found to the compiled module attnlib._front, and `find` runs the next call of that
form: by the backend's `direct` entry if it has one, else by `run_kept`. Without the compiled module, or with a torch
that has no C exchange interface of DLPack, `find` is None and every call takes the whole way.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from . import dispatch, ops, registry, settings
from .operands import Operands, Scalars
from .run import Prepared, prepare, run_forward

_front: Any
try:
    _front = importlib.import_module("attnlib._front")
except ImportError:  # a wheel without compiled modules
    _front = None

Form = tuple[Any, ...]  # the arguments of attention(), in the order of enum Argument in csrc/front/front.cpp


def run_kept(kept: tuple[Prepared, Scalars], q: Any, k: Any, v: Any, with_lse: bool) -> Any:
    """What attention() returns, for a form that was kept."""
    prepared, scalars = kept
    operands = Operands(q, k, v)
    if scalars.grads:
        return ops.apply_plain(operands, prepared, scalars, with_lse)
    out, lse, _ = run_forward(prepared, operands)
    return (out, lse) if with_lse else out


def _configured() -> Callable[..., Any] | None:
    """find(*form): the result; False if the form was not kept yet; None if the call has to take the whole way."""
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if _front is None or exchange is None:
        return None
    watchers = (*ops.WATCHERS, torch._C._is_any_autocast_enabled)
    readable = _front.configure(
        exchange, torch.Tensor, torch.nn.Parameter, watchers, torch.is_grad_enabled,
        torch.are_deterministic_algorithms_enabled, torch.get_num_threads, vars(forward_ad), vars(settings),
        vars(registry), dispatch.stack, torch.Tensor.is_neg, torch.Tensor.new_empty_strided, run_kept,
    )  # fmt: skip
    return _front.find if readable else None


find = _configured()
if _front is not None:
    dispatch.caches.append(_front)


def keep(form: Form, operands: Operands, scalars: Scalars, spec: str) -> None:
    """Let find() run the next call like this one, which has just run, or leave it alone at once."""
    if spec != dispatch.requested(form[-1]):
        return  # another thread has changed what is set
    prepared = prepare(operands, scalars, spec)
    if not dispatch.settled(prepared.problem, dispatch.target_of(operands.q.device), spec):
        return
    asked = (scalars.grads, scalars.deterministic)
    set_now = settings.current()
    if set_now.debug or set_now.shadow or not (prepared.as_is and prepared.in_memory):
        _front.keep(*form, *asked, *[None] * 7)  # what is asked for is done on the whole way
        return
    direct = None if scalars.grads else getattr(prepared.plan, "direct", None)
    if direct is not None:
        strides = (*(x.stride() for x in operands[:3]), prepared.out[1], prepared.lse[1])
        direct = direct(prepared.problem, strides)
    dtype = None if prepared.lse_dtype == prepared.problem.dtype else prepared.lse_dtype
    _front.keep(*form, *asked, (prepared, scalars), direct, *prepared.out, *prepared.lse, dtype)
