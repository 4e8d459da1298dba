"""AB-nnn/*: inputs that broke attention libraries in public, each with the right answer under this contract.

Here: large numbers, long rows, strides, alignment, head dimensions and head counts.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

import attnlib

from ...numerics import Result
from ..inputs import given
from ..items import Item, add, check
from ..subject import Subject, require, same_bits
from .interface import raises

# --- numbers ----------------------------------------------------------------------------------------------------------


@check("AB-031/softcap_of_large_scores")
def softcap_of_large_scores(subject: Subject) -> None:
    """softcap 50 of scores 4400, 5000 and -10000 is 50, 50 and -50, with derivative 0; masked keys stay masked."""
    scores = torch.tensor([4400.0, 5000.0, -10000.0], device=subject.device)
    q = torch.full((3, 1, 1, 8), 0.0, dtype=subject.dtype, device=subject.device)
    q[:, 0, 0, 0] = torch.tensor([44.0, 50.0, -100.0], device=subject.device).to(subject.dtype)
    k = torch.zeros_like(q)
    k[..., 0] = 100.0
    inputs = given(
        q,
        k,
        torch.ones_like(q),
        scale=1.0,
        softcap=50.0,
        grads=("q", "k"),
        dlse=torch.ones(3, 1, 1, device=subject.device),
    )
    if subject.dtype == torch.float64:
        inputs.dlse = inputs.dlse.double()  # type: ignore[union-attr]
    result = subject.run(inputs)
    assert result.lse is not None and result.dq is not None and result.dk is not None
    want = torch.tensor([50.0, 50.0, -50.0], device=subject.device)
    require(
        (result.lse.flatten() - want).abs() <= 1e-4, f"capped {scores.tolist()} gives {result.lse.flatten().tolist()}"
    )
    require(result.dq == 0, "the derivative of a saturated softcap is not 0")
    require(result.dk == 0, "the derivative of a saturated softcap is not 0")
    wide = [x.detach().expand(3, 4, 1, 8).contiguous() for x in (q, k, torch.ones_like(q))]
    wide[0] = wide[0].expand(3, 4, 1, 8).contiguous()
    masked = given(*wide, scale=1.0, softcap=50.0, causal=True, grads=("q", "k", "v"), dout=torch.ones_like(wide[0]))
    subject.check(masked, cancels=True)


@check("AB-032/bias_at_the_end_of_its_range")
def bias_at_the_end_of_its_range(subject: Subject) -> None:
    """Rows of finfo.min of each bias dtype with scores of -20: a bias, added in float32; two minima added are -inf."""
    q = torch.full((64, 4, 2, 16), -5.0, dtype=subject.dtype, device=subject.device) + subject.randn(64, 4, 2, 16) * 0.1
    k = torch.ones_like(q) + subject.randn(64, 4, 2, 16, seed=1) * 0.1
    v, dout = (subject.randn(64, 4, 2, 16, seed=s) for s in (2, 3))
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        bias = torch.zeros(4, 4, dtype=dtype, device=subject.device)
        bias[1] = torch.finfo(dtype).min
        leaves = [x.clone() for x in (q, k, v)]
        result = subject.check(given(*leaves, bias=bias, grads=("q", "k", "v"), dout=dout))
        require(torch.isfinite(result.out), f"out with a bias of finfo.min in {dtype} is not finite")  # type: ignore[arg-type]
        assert result.out is not None
        if dtype != torch.float16 and subject.dtype != torch.float64:
            off = (result.out[:, 1].float() - v.float().mean(1)).abs()
            require(off <= 2.0**-6, f"a row at finfo.min of {dtype} is not the mean of v")
        doubled = (bias.float() + bias.float()).to(dtype)
        doubled[1] = -math.inf
        out, lse = subject.attention(*leaves, bias=doubled)
        require(out[:, 1] == 0, "a row of -inf is not 0")
        require(lse[:, :, 1] == -math.inf, "lse of a row of -inf is not -inf")


def many_keys(length: int, subject: Subject) -> None:
    """Zero operands over very many keys: out 0 and lse ln(Sk); the last key counts."""
    q, k = (torch.zeros(1, n, 1, 8, dtype=subject.dtype, device=subject.device) for n in (16, length))
    v = torch.zeros_like(k)
    out, lse = subject.attention(q, k, v)
    require(out == 0, "out is not 0")
    require(
        (lse - math.log(length)).abs() <= 1e-4, f"lse is {float(lse[0, 0, 0])}, not ln {length} = {math.log(length)}"
    )
    v[:, -1] = 1.0
    k[:, -1] = 1.0
    out, _ = subject.attention(q + 40.0 / 8, k, v, scale=1.0)
    require((out - 1).abs() <= 0.01, "the last key is lost")


for _length, _level in (
    (32767, "full"),
    (32768, "full"),
    (32769, "core"),
    (33728, "full"),
    (65535, "full"),
    (65536, "full"),
    (65537, "core"),
):
    add(Item(f"AB-034/many_keys-{_length}", functools.partial(many_keys, _length), _level))


@check("AB-037/offsets_beyond_2_31", kinds=("cpu",))
def offsets_beyond_2_31(subject: Subject) -> None:
    """A cache whose pages lie 2^30 elements apart, in memory that is never touched but where it is used."""
    dtype = torch.float16 if torch.float16 in subject.capabilities.dtypes else subject.dtype
    storage = torch.empty(2**31 + 2**20, dtype=dtype)
    pages = [storage.as_strided((3, 16, 2, 32), (2**30, 64, 32, 1), offset) for offset in (0, 4096)]
    fresh = [subject.randn(2, 16, 2, 32, seed=s, dtype=dtype) for s in (1, 2)]
    for target in pages:
        target.fill_(5.0)
    q, new = subject.randn(2, 4, 2, 32, dtype=dtype), [x[:, :16] for x in fresh]
    table = subject.ints(2, 1)[:, None]
    out, lse = subject.call(
        "attention_kvcache", q, *pages, subject.ints(0, 0), page_table=table, k_new=new[0], v_new=new[1], causal=True
    )
    for target, source in zip(pages, fresh, strict=True):
        require(target[0] == 5.0, "a page of nobody was overwritten")
        same_bits("a page beyond 2^31 elements", target[2].contiguous(), source[0])
        same_bits("a page at 2^30 elements", target[1].contiguous(), source[1])
    subject.check(given(q, *fresh, causal=True), result=Result(out, lse))


# --- strides, shapes, heads -------------------------------------------------------------------------------------------


@check("AB-040/innermost_stride")
def innermost_stride(subject: Subject) -> None:
    """An innermost stride other than 1, by permutation and by slicing."""
    base = [subject.randn(2, 64, 8, 2, seed=s).permute(0, 2, 3, 1) for s in range(3)]  # strides (1024, 16, 2... , 8)
    sliced = [subject.randn(2, 33, 2, 64, seed=s)[..., ::2] for s in range(3)]
    for q, k, v in (base, sliced):
        require(q.stride(-1) != 1, "the input of this check is contiguous")
        dout = subject.randn(*q.shape, seed=9)
        subject.check(given(q, k, v, grads=("q", "k", "v"), dout=dout), cancels=True)


@check("AB-041/strides_of_dout")
def strides_of_dout(subject: Subject) -> None:
    """Multi-query backward for dout as a transposed, sliced and permuted view."""
    for dtype in subject.dtypes[:2]:
        shape = (2, 32, 4, 128)
        whole = subject.randn(2, 32, 8, 128, seed=5, dtype=dtype)
        views = (
            subject.randn(2, 4, 32, 128, seed=6, dtype=dtype).transpose(1, 2), whole[:, :, ::2],
            subject.randn(32, 128, 2, 4, seed=7, dtype=dtype).permute(2, 0, 3, 1),
        )  # fmt: skip
        for dout in views:
            q = subject.randn(*shape, dtype=dtype)
            k, v = (subject.randn(2, 32, 1, 128, seed=s, dtype=dtype) for s in (1, 2))
            subject.check(given(q, k, v, grads=("q", "k", "v"), dout=dout))


@check("AB-043/misaligned")
def misaligned(subject: Subject) -> None:
    """Storage that starts 1, 2 and 3 elements into an allocation, after an aligned call of the same shape."""
    for offset in (0, 1, 2, 3):

        def view(seed: int, offset: int = offset) -> torch.Tensor:
            frame = subject.randn(2 * 40 * 4 * 64 + 8, seed=seed)
            return frame[offset : offset + 2 * 40 * 4 * 64].view(2, 40, 4, 64)

        inputs = given(view(0), view(1), view(2), causal=True, grads=("q", "k", "v"), dout=view(3))
        subject.check(inputs)


def expanded_heads(length: int, dim: int, subject: Subject) -> None:
    """Keys and values expanded over heads by stride 0, a mask, and gradients that sum over the expanded heads."""
    q, dout = (subject.randn(2, 40, 4, dim, seed=s) for s in (0, 3))
    k, v = (subject.randn(2, length, 1, dim, seed=s).requires_grad_() for s in (1, 2))
    mask = subject.randn(2, 4, 40, length, seed=4, dtype=torch.float32) > -0.5
    mask[..., 0] = True
    inputs = given(
        q,
        k.detach().expand(-1, -1, 4, -1),
        v.detach().expand(-1, -1, 4, -1),
        mask=mask,
        grads=("q", "k", "v"),
        dout=dout,
    )
    subject.check(inputs)
    out, _ = subject.attention(q.detach(), k.expand(-1, -1, 4, -1), v.expand(-1, -1, 4, -1), mask=mask)
    dk, dv = torch.autograd.grad(out, (k, v), dout)
    grouped = given(q.detach(), k, v, mask=mask, grads=("k", "v"), dout=dout)
    subject.check(grouped, result=Result(out.detach(), _.detach(), dk=dk, dv=dv), cancels=True)


for _length in (33, 65, 97):
    add(Item(f"AB-044/expanded_heads-{_length}", functools.partial(expanded_heads, _length, 64)))
add(Item("AB-044/expanded_heads-512", functools.partial(expanded_heads, 33, 512), "full"))


def decode(extra: str, subject: Subject) -> None:
    """One query with grouped heads is the last row of the run with two queries, whatever else is asked for."""
    q = subject.randn(4, 2, 8, 128)
    k, v = (subject.randn(4, 70, 2, 128, seed=s) for s in (1, 2))
    bias = subject.randn(1, 8, 2, 70, seed=3)
    arguments: dict[str, dict[str, Any]] = {
        "plain": {}, "window": {"window": (20, 0)}, "softcap": {"softcap": 2.0}, "sinks": {"sinks": subject.randn(8)},
        "alibi": {"alibi_slopes": subject.randn(8, dtype=torch.float32).abs()}, "bias": {"bias": bias},
    }  # fmt: skip
    both = given(q, k, v, causal=True, **arguments[extra])
    single = dict(arguments[extra])
    if extra == "bias":
        single["bias"] = bias[:, :, 1:]
    two = subject.check(both)
    one = subject.check(given(q[:, 1:], k, v, causal=True, **single))
    assert one.out is not None and two.out is not None
    u = {torch.float32: 1e-5, torch.float64: 1e-12}.get(subject.dtype, 2.0**-6)
    require((one.out[:, 0] - two.out[:, 1]).abs() <= 4 * u, "one query differs from the last of two")


for _extra in ("plain", "window", "softcap", "sinks", "alibi", "bias"):
    add(Item(f"AB-047/decode-{_extra}", functools.partial(decode, _extra)))


def head_dims(dim: int, dim_v: int, length: int, subject: Subject) -> None:
    """Gradients for head dimensions that are padded to a tile; out and dv have head_dim_v, the default scale has D."""
    for dtype in (torch.bfloat16, subject.dtype):
        if dtype not in subject.capabilities.dtypes:
            continue
        q, k = (subject.randn(1, length, 8, dim, seed=s, dtype=dtype) for s in (0, 1))
        v, dout = (subject.randn(1, length, 8, dim_v, seed=s, dtype=dtype) for s in (2, 3))
        inputs = given(q, k, v, grads=("q", "k", "v"), dout=dout)
        require(abs(inputs.problem().scale - dim**-0.5) < 1e-12, "the default scale is not 1 / sqrt(head_dim)")
        result = subject.check(inputs, plain=True)
        require(result.dv.shape == v.shape, "dv has not v's shape")  # type: ignore[union-attr]


for _dim in (72, 104, 144, 160, 176):
    add(Item(f"AB-049/head_dim-{_dim}", functools.partial(head_dims, _dim, _dim, 97)))
    add(Item(f"AB-049/head_dim-{_dim}-512", functools.partial(head_dims, _dim, _dim, 512), "full"))
for _dim, _dim_v in ((128, 96), (64, 128), (192, 128)):
    add(Item(f"AB-050/head_dim-{_dim}-{_dim_v}", functools.partial(head_dims, _dim, _dim_v, 70)))
add(Item("AB-053/head_dim-128", functools.partial(head_dims, 128, 128, 256)))


@check("AB-052/head_counts")
def head_counts(subject: Subject) -> None:
    """Query heads that are no multiple of key/value heads: ValueError with both counts."""
    for heads, kv_heads in ((3, 2), (4, 0), (33, 2)):
        q = subject.randn(1, 4, heads, 16)
        k = torch.zeros(1, 4, kv_heads, 16, dtype=subject.dtype, device=subject.device)
        raises(ValueError, f"{heads}", attnlib.attention, q, k, k, backend=subject.name)
        raises(ValueError, f"{kv_heads}", attnlib.attention, q, k, k, backend=subject.name)
