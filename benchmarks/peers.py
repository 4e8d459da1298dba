"""Who is measured: attnlib's backends, and every other attention that this machine can import.

A contender's `make` gives (forward, backward) of a workload, both run once, or raises what refuses it. Each contender
gets contiguous operands in its own layout. `Unsupported` says that a peer has no such feature.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import attnlib
from attnlib.bench import Call, both

from .grids import Operands, Workload

Pair = tuple[Call, Call | None]


class Unsupported(NotImplementedError):
    """The peer does not offer what the workload asks for."""


@dataclass(frozen=True)
class Contender:
    """`make(work, operands, backward)`; `missing` says why it can't be used on this machine."""

    name: str
    make: Callable[[Workload, Operands, bool], Pair]
    ours: bool = False
    missing: str = ""


def _pair(run: Callable[..., torch.Tensor], q: Any, k: Any, v: Any, dout: Any, backward: bool) -> Pair:
    if backward:
        return both(run, q, k, v, dout)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return run(q, k, v)

    forward()
    return forward, None


def _only(work: Workload, *allowed: str) -> None:
    for name in work.options:
        if name not in allowed:
            raise Unsupported(f"no {name}")


def attend(work: Workload, o: Operands, q: Any, k: Any, v: Any, **more: Any) -> Any:
    """What attnlib is asked for on a workload."""
    if o.cu_seqlens is None:
        return attnlib.attention(q, k, v, **o.arguments, **more)
    longest = work.shape.seqlen // 2
    more |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
    return attnlib.attention_varlen(q, k, v, o.cu_seqlens, o.cu_seqlens, **o.arguments, **more)


def ours(backend: str) -> Contender:
    """attnlib on the named backend."""

    def make(work: Workload, o: Operands, backward: bool) -> Pair:
        def run(q: Any, k: Any, v: Any) -> torch.Tensor:
            return attend(work, o, q, k, v, backend=backend)

        return _pair(run, o.q, o.k, o.v, o.dout, backward)

    return Contender(backend, make, ours=True)


# --- torch ------------------------------------------------------------------------------------------------------------


def sdpa(name: str, kind: str) -> Contender:
    """One of the kernels behind torch's scaled_dot_product_attention."""

    def make(work: Workload, o: Operands, backward: bool) -> Pair:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        allowed = ("dropout_p", "deterministic") if kind == "FLASH_ATTENTION" else ("dropout_p", "mask", "bias")
        _only(work, *allowed)
        s = work.shape
        if s.causal and work.queries != s.seqlen:
            raise Unsupported("its causal mask is top-left")
        q, k, v, dout = (x.transpose(1, 2).contiguous() for x in (o.q, o.k, o.v, o.dout))
        mask = o.arguments.get("mask", o.arguments.get("bias"))
        p = float(work.options.get("dropout_p", 0.0))
        which = getattr(SDPBackend, kind)
        torch.use_deterministic_algorithms(False)

        def run(q: Any, k: Any, v: Any) -> torch.Tensor:
            with sdpa_kernel(which):
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, dropout_p=p, is_causal=s.causal, enable_gqa=s.heads_q != s.heads_kv
                )

        forward, back = _pair(run, q, k, v, dout, backward)
        if back is None or not work.options.get("deterministic"):
            return forward, back

        def repeatable() -> Any:
            torch.use_deterministic_algorithms(True)
            try:
                return back()
            finally:
                torch.use_deterministic_algorithms(False)

        return forward, repeatable

    return Contender(name, make)


@functools.cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def flex() -> Contender:
    """torch's FlexAttention, compiled anew for every workload, which takes about ten seconds each."""

    def make(work: Workload, o: Operands, backward: bool) -> Pair:
        from torch.nn.attention.flex_attention import create_block_mask

        _only(work, "window", "softcap", "alibi", "block_density", "mask", "bias")
        s, a = work.shape, o.arguments
        q, k, v, dout = (x.transpose(1, 2).contiguous() for x in (o.q, o.k, o.v, o.dout))
        shift = s.seqlen - work.queries
        window, blocks = a.get("window"), a.get("block_mask")
        softcap, slopes, bias, mask = a.get("softcap"), a.get("alibi_slopes"), a.get("bias"), a.get("mask")

        def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
            seen = j >= 0
            if s.causal:
                seen = seen & (j <= i + shift)
            if window is not None:
                seen = seen & (j >= i + shift - window[0]) & (j <= i + shift + window[1])
            if blocks is not None:
                seen = seen & blocks.mask[0, 0, i // 128, j // 128]
            if mask is not None:
                seen = seen & mask[0, 0, i, j]
            return seen

        def score(x: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            if softcap is not None:
                x = softcap * torch.tanh(x / softcap)
            if bias is not None:
                x = x + bias[0, h, i, j]
            if slopes is not None:
                x = x - slopes[h] * (i + shift - j).abs()
            return x

        masked = s.causal or window is not None or blocks is not None or mask is not None
        block_mask = None
        if masked:
            block_mask = create_block_mask(visible, None, None, work.queries, s.seqlen, device=q.device)
        changed = softcap is not None or bias is not None or slopes is not None
        torch._dynamo.reset()  # beyond a few shapes the compiler would give up, and run it uncompiled
        call = _compiled_flex()

        def run(q: Any, k: Any, v: Any) -> torch.Tensor:
            return call(q, k, v, score if changed else None, block_mask, enable_gqa=s.heads_q != s.heads_kv)

        return _pair(run, q, k, v, dout, backward)

    return Contender("FlexAttention", make)


# --- packages ---------------------------------------------------------------------------------------------------------


def _package(name: str, module: str, function: str, make: Callable[[Any, Workload, Operands, bool], Pair]) -> Contender:
    """A contender of a package that may not be here."""
    try:
        found = importlib.import_module(module)
        getattr(found, function)  # a folder of this name may hold another package
    except Exception as error:  # a package for another torch may fail in any way
        return Contender(name, _never, missing=str(error).split("\n")[0] or type(error).__name__)
    return Contender(name, functools.partial(make, found))


def _never(work: Workload, o: Operands, backward: bool) -> Pair:
    raise Unsupported("not here")


def _first(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


# attnlib's arguments by the names of each interface of FlashAttention
FLASH2 = {"dropout_p": "dropout_p", "deterministic": "deterministic", "window": "window_size", "softcap": "softcap",
          "alibi_slopes": "alibi_slopes"}  # fmt: skip
FLASH3 = {"deterministic": "deterministic", "window": "window_size", "softcap": "softcap"}
FLASH4 = FLASH3 | {"sinks": "learnable_sink"}


def _flash(names: Mapping[str, str], module: Any, work: Workload, o: Operands, backward: bool) -> Pair:
    """FlashAttention's packages, from the second on: [batch, seqlen, heads, head_dim], bottom-right causal masks."""
    options = {"alibi_slopes": "alibi"}
    _only(work, "packed", *(options.get(name, name) for name in names))
    extra = {theirs: o.arguments[mine] for mine, theirs in names.items() if mine in o.arguments}
    extra["causal"] = work.shape.causal

    def run(q: Any, k: Any, v: Any) -> torch.Tensor:
        if o.cu_seqlens is None:
            return _first(module.flash_attn_func(q, k, v, **extra))
        longest = work.shape.seqlen // 2
        return _first(
            module.flash_attn_varlen_func(
                q, k, v, cu_seqlens_q=o.cu_seqlens, cu_seqlens_k=o.cu_seqlens, max_seqlen_q=longest,
                max_seqlen_k=longest, **extra,
            )
        )  # fmt: skip

    return _pair(run, o.q, o.k, o.v, o.dout, backward)


def _xformers(module: Any, work: Workload, o: Operands, backward: bool) -> Pair:
    _only(work, "dropout_p")
    s = work.shape
    if s.heads_q != s.heads_kv:
        raise Unsupported("no grouped heads without expanding them")
    bias = module.LowerTriangularMask() if s.causal else None
    p = float(work.options.get("dropout_p", 0.0))

    def run(q: Any, k: Any, v: Any) -> torch.Tensor:
        return module.memory_efficient_attention(q, k, v, attn_bias=bias, p=p)

    return _pair(run, o.q, o.k, o.v, o.dout, backward)


NAMES = ("fa2", "cudnn", "efficient", "math", "flex", "flash_attn", "fa3", "fa4", "xformers")


def peers(names: list[str]) -> list[Contender]:
    """The peers of these names; those that can't be imported say so in `missing`."""

    def flash(name: str, module: str, words: Mapping[str, str]) -> Contender:
        return _package(name, module, "flash_attn_func", functools.partial(_flash, words))

    makers: dict[str, Callable[[], Contender]] = {
        "fa2": lambda: sdpa("torch FA2", "FLASH_ATTENTION"),
        "cudnn": lambda: sdpa("cuDNN", "CUDNN_ATTENTION"),
        "efficient": lambda: sdpa("torch efficient", "EFFICIENT_ATTENTION"),
        "math": lambda: sdpa("torch math", "MATH"),
        "flex": flex,
        "flash_attn": lambda: flash("flash_attn", "flash_attn", FLASH2),
        "fa3": lambda: flash("FA3", "flash_attn_interface", FLASH3),
        "fa4": lambda: flash("FA4", "flash_attn.cute", FLASH4),
        "xformers": lambda: _package("xformers", "xformers.ops", "memory_efficient_attention", _xformers),
    }
    unknown = [name for name in names if name not in makers]
    if unknown:
        raise SystemExit(f"--peers: no peer is called {', '.join(unknown)}; known: {', '.join(NAMES)}")
    return [makers[name]() for name in names]
