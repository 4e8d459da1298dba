"""gradients/* and merge/*: which gradients are computed, what flows in through lse, and parts that are merged."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

import attnlib

from ...numerics import Result
from ..cases import Case, named
from ..inputs import given
from ..items import Item, add, check
from ..recipes import make
from ..subject import Subject, require, same_bits


def only(case: Case, grads: tuple[str, ...], subject: Subject) -> None:
    """Only what requires a gradient gets one, and it is right."""
    inputs = make(case, subject.dtype, subject.device, direction="backward")
    for leaf in inputs.leaves():
        leaf.requires_grad_(False)
    inputs.grads = grads
    for leaf in inputs.leaves():
        leaf.requires_grad_()
    require(inputs.problem().grads == grads, f"the problem needs grads {grads}, got {inputs.problem().grads}")
    subject.check(inputs)


def _register() -> None:
    case = Case("gradients-only", bias="1hqk", bias_gradient=True, sinks=True, num_heads_q=16)
    for grads in (("q",), ("k",), ("v",), ("bias",), ("sinks",), ("q", "sinks"), ("k", "v"), ("v", "bias")):
        plain = replace(case, bias=None, bias_gradient=False, sinks=False) if set(grads) <= {"q", "k", "v"} else case
        add(Item(f"gradients/only-{'-'.join(grads)}", functools.partial(only, plain, grads)))
    for name in ("causal", "gqa", "varlen", "sinks-lengths-causal", "bias_large", "softcap", "dropout"):
        add(Item(f"gradients/lse_only-{name}", functools.partial(lse_only, named(name))))


def lse_only(case: Case, subject: Subject) -> None:
    """A loss on lse alone: dq and dk as the oracle has them, dv exactly 0."""
    inputs = make(case, subject.dtype, subject.device, direction="backward")
    inputs.dout = None
    result = subject.check(inputs)
    require(result.dv == 0, "dv is not 0 for a loss on lse alone")


_register()


@check("gradients/nothing_needed")
def nothing_needed(subject: Subject) -> None:
    """Inputs that require a gradient under no_grad give results without history."""
    q, k, v = (subject.randn(2, 33, 2, 32, seed=s).requires_grad_() for s in range(3))
    with torch.no_grad():
        out, lse = subject.attention(q, k, v)
    require(not out.requires_grad and not lse.requires_grad, "results under no_grad require a gradient")


@check("gradients/twice")
def twice(subject: Subject) -> None:
    """A second derivative raises and is never silently zero; the reference has one."""
    q, k, v = (subject.randn(1, 20, 2, 16, seed=s).requires_grad_() for s in range(3))
    out, _ = subject.attention(q, k, v)
    (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    try:
        (second,) = torch.autograd.grad(first.square().sum(), k)
    except (attnlib.UnsupportedError, RuntimeError):
        require(subject.name != "reference", "the reference has no second derivative")
        return
    require(subject.name == "reference", "a second derivative neither raised nor belongs to the reference")
    require(second.abs().sum() > 0, "a second derivative is zero")


@check("gradients/forward_and_backward_agree")
def same_forward(subject: Subject) -> None:
    """out and lse of a call that will need gradients are those of one that will not, within the contract."""
    for name in ("plain", "everything"):
        case = named(name)
        inputs = make(case, subject.dtype, subject.device, direction="backward")
        with torch.no_grad():
            out, lse = subject.call(inputs.function, *inputs.positional, **inputs.arguments)
        for leaf in inputs.leaves():
            leaf.requires_grad_(False)
        inputs.grads = ()
        subject.check(inputs, result=Result(out, lse))


@check("merge/splits")
def splits(subject: Subject) -> None:
    """Attention over parts of the keys, merged by lse, is attention over all of them; so are its gradients."""
    q, k, v, dout = (subject.randn(3, n, 2, 32, seed=n) for n in (50, 129, 130, 51))
    k, v, dout = k[:, :129], v[:, :129], dout[:, :50]
    dlse = subject.randn(3, 2, 50, seed=9, dtype=torch.float64 if subject.dtype == torch.float64 else torch.float32)
    whole = given(q, k, v, grads=("q", "k", "v"), dout=dout, dlse=dlse)
    for cuts in ((0, 60, 129), (0, 1, 64, 65, 128, 129)):
        parts = [subject.attention(q, k[:, a:b], v[:, a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]
        if subject.dtype in (torch.float16, torch.bfloat16):  # parts are rounded before they are merged
            parts = [(out.float(), lse) for out, lse in parts]
        out, lse = attnlib.merge([part[0] for part in parts], [part[1] for part in parts])
        grads = torch.autograd.grad([out, lse], (q, k, v), [dout.to(out.dtype), dlse])
        cancels = subject.dtype not in (torch.float32, torch.float64)
        subject.check(whole, result=Result(out.detach().to(subject.dtype), lse.detach(), *grads), cancels=cancels)


@check("merge/sinks")
def merged_sinks(subject: Subject) -> None:
    """Sinks in one part of a merge count once."""
    q, k, v = (subject.randn(16, 33, 4, 32, seed=s) for s in range(3))
    sinks = subject.randn(4)
    parts = [subject.attention(q, k[:, :20], v[:, :20], sinks=sinks), subject.attention(q, k[:, 20:], v[:, 20:])]
    out, lse = attnlib.merge([parts[0][0].float(), parts[1][0].float()], [part[1] for part in parts])
    subject.check(given(q, k, v, sinks=sinks), result=Result(out.to(subject.dtype), lse), cancels=True)


@check("gradients/strides_of_dout")
def strides_of_dout(subject: Subject) -> None:
    """Gradients do not depend on how dout lies in memory: sum().backward() is a stride of 0."""
    q, k, v = (subject.randn(2, 66, 2, 32, seed=s).requires_grad_() for s in range(3))
    deterministic = "deterministic backward" in {feature.value for feature in subject.capabilities.features}
    out, _ = subject.attention(q, k, v, causal=True, deterministic=deterministic)
    flat = torch.autograd.grad(out, (q, k, v), torch.ones_like(out), retain_graph=True)
    for how, dout in (
        ("expanded", torch.ones((), dtype=out.dtype, device=out.device).expand(out.shape)),
        ("transposed", torch.ones_like(out.transpose(1, 2).contiguous()).transpose(1, 2)),
    ):
        found = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        for name, got, want in zip("qkv", found, flat, strict=True):
            if deterministic:
                same_bits(f"d{name} with {how} dout", got, want)
            else:
                require((got - want).abs() <= 0.02 * want.abs().max(), f"d{name} with {how} dout differs")
