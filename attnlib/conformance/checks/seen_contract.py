"""AB-nnn/*: inputs that broke attention libraries in public, each with the right answer under this contract.

Here: masks, positions, gradients, sinks, lse, dropout, dtypes and torch's transforms.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.utils.checkpoint

import attnlib

from ...numerics import Result
from ..inputs import given
from ..items import Item, add, check
from ..subject import Subject, require, same_bits
from .interface import raises

# --- masks and positions ----------------------------------------------------------------------------------------------


def _counts(subject: Subject, rows: int, keys: int, **arguments: Any) -> list[list[int]]:
    """Which keys each query of the first head sees, from values that are unit vectors."""
    q = torch.zeros(1, rows, 2, 64, dtype=subject.dtype, device=subject.device)
    k = torch.zeros(1, keys, 2, 64, dtype=subject.dtype, device=subject.device)
    seen: list[list[int]] = [[] for _ in range(rows)]
    for first in range(0, keys, 64):
        v = torch.zeros(1, keys, 2, 64, dtype=subject.dtype, device=subject.device)
        count = min(64, keys - first)
        v[0, first : first + count, :, :count] = torch.eye(count, dtype=subject.dtype, device=subject.device)[:, None]
        out, _ = subject.attention(q, k, v, **arguments)
        for i in range(rows):
            seen[i] += (first + (out[0, i, 0, :count] > 0).nonzero().flatten()).tolist()
    return seen


@check("AB-055/causal_with_mask_or_bias")
def causal_with_mask(subject: Subject) -> None:
    """causal and a mask (or a bias of -inf) are both applied, never one alone."""
    mask = torch.tensor(
        [[1, 1, 0, 1], [1, 0, 1, 1], [1, 1, 1, 0], [0, 1, 1, 1]], dtype=torch.bool, device=subject.device
    )
    bias = torch.zeros(4, 4, device=subject.device).masked_fill(~mask, -math.inf)
    want = [[0], [0], [0, 1, 2], [1, 2, 3]]
    for arguments in ({"mask": mask}, {"bias": bias}, {"mask": mask, "bias": torch.ones(4, 4, device=subject.device)}):
        found = _counts(subject, 4, 4, causal=True, **arguments)
        require(found == want, f"causal with {' and '.join(arguments)}: needs keys {want}, got {found}")


@check("AB-056/window_bounds_are_inclusive")
def window_bounds(subject: Subject) -> None:
    """window (4, 0) shows up to 5 keys, (3, 0) up to 4."""
    for window, most in (((4, 0), 5), ((3, 0), 4)):
        found = [len(keys) for keys in _counts(subject, 9, 9, window=window)]
        want = [min(i + 1, most) for i in range(9)]
        require(found == want, f"window {window}: needs {want} keys a row, got {found}")


@check("AB-058/window_at_decode")
def window_at_decode(subject: Subject) -> None:
    """One query over 256 keys with window (128, 0) sees keys 127 to 255."""
    (found,) = _counts(subject, 1, 256, causal=True, window=(128, 0))
    require(
        found == list(range(127, 256)), f"needs keys 127 to 255, got {found[:2]} to {found[-2:]}, {len(found)} keys"
    )


@check("AB-059/alibi_at_decode")
def alibi_at_decode(subject: Subject) -> None:
    """Distances are counted from the query's position: one query is the last row of six; slopes [H] and [B, H]."""
    q, k, v = (subject.randn(64, 6, 2, 32, seed=s) for s in range(3))
    slopes = torch.tensor([0.5, 0.25], device=subject.device)
    whole = subject.check(given(q, k, v, alibi_slopes=slopes))
    for given_slopes in (slopes, slopes.expand(64, 2).contiguous()):
        last = subject.check(given(q[:, 5:], k, v, alibi_slopes=given_slopes))
        assert last.lse is not None and whole.lse is not None
        require((last.lse[..., 0] - whole.lse[..., 5]).abs() <= 1e-4, "lse of one query differs from the last of six")
    zeros = torch.zeros(1, 1, 2, 32, dtype=subject.dtype, device=subject.device)
    _, lse = subject.attention(zeros, torch.zeros_like(k[:1]), v[:1], alibi_slopes=slopes)
    for head, slope in enumerate((0.5, 0.25)):
        want = math.log(sum(math.exp(-slope * abs(5 - j)) for j in range(6)))
        require(abs(float(lse[0, head, 0]) - want) <= 1e-5, f"lse is {float(lse[0, head, 0])}, not {want}")


# --- gradients, sinks, lse --------------------------------------------------------------------------------------------


@check("AB-061/loss_on_lse")
def loss_on_lse(subject: Subject) -> None:
    """lse.sum().backward(): dq = scale * (P k), dk = scale * P^T q, dv = 0."""
    q, k, v = (subject.randn(2, 40, 4, 32, seed=s).requires_grad_() for s in range(3))
    _, lse = subject.attention(q, k, v)
    dq, dk, dv = torch.autograd.grad(lse.sum(), (q, k, v), allow_unused=True)
    require(dq is not None and dk is not None, "lse has no gradient")
    with torch.no_grad():
        scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * 32**-0.5
        p = scores.softmax(-1)
        want_q = torch.einsum("bhij,bjhd->bihd", p, k.double()) * 32**-0.5
        want_k = torch.einsum("bhij,bihd->bjhd", p, q.double()) * 32**-0.5
    u = {torch.float32: 2e-5, torch.float64: 1e-12}.get(subject.dtype, 0.03)
    require((dq - want_q).abs() <= u, "dq is wrong")
    require((dk - want_k).abs() <= u, "dk is wrong")
    require(dv is None or not dv.any(), "dv is not 0")


@check("AB-062/sinks")
def sinks(subject: Subject) -> None:
    """q = 0, four keys, v = 1: out = 4 / (4 + e^s), lse = ln(4 + e^s); without keys lse is the sink."""
    heads = torch.tensor([0.5, 100.0], device=subject.device)
    q = torch.zeros(64, 3, 2, 32, dtype=subject.dtype, device=subject.device)
    k, v = torch.zeros_like(q[:, :1]).expand(-1, 4, -1, -1), torch.ones_like(q[:, :1]).expand(-1, 4, -1, -1)
    inputs = given(q, k, v, sinks=heads.clone(), grads=("v", "sinks"), dout=torch.ones_like(q))
    result = subject.check(inputs, cancels=True)
    assert result.out is not None and result.lse is not None and result.dsinks is not None
    require((result.out[:, :, 0].double() - 0.7081186).abs() <= 4e-3, "out beside a sink of 0.5 is not 4 / (4 + e^0.5)")
    require(result.out[:, :, 1] <= 1e-30, "out beside a sink of 100 is not nearly 0")
    require((result.lse[:, 0] - 1.731427).abs() <= 1e-5, "lse beside a sink of 0.5 is not ln(4 + e^0.5)")
    require((result.lse[:, 1] - 100).abs() <= 1e-4, "lse beside a sink of 100 is not 100")
    share = 1 - 0.7081186
    want = -64 * 3 * 32 * share * 0.7081186
    require(abs(float(result.dsinks[0]) - want) <= 1e-2 * abs(want), f"dsinks is {float(result.dsinks[0])}, not {want}")
    out, lse = subject.attention(q, k[:, :0], v[:, :0], sinks=heads)
    require(out == 0, "out without keys is not 0")
    require(lse == heads[:, None], "lse without keys is not the sink")
    out, lse = subject.attention(q, k, v, sinks=heads, kv_lens=subject.ints(*[0] * 64))
    require(out == 0, "out of an empty row beside a sink is not 0")
    require(lse == heads[:, None], "lse of an empty row is not its sink")


def checkpointed(autocast: bool, subject: Subject) -> None:
    """Activation checkpointing gives the gradients of the plain run to the bit, dropout and autocast included."""
    case: dict[str, Any] = {"dropout_p": 0.1, "deterministic": True}
    start = [subject.randn(2, 40, 2, 60, seed=s, dtype=torch.float32 if autocast else None) for s in range(3)]

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with torch.autocast(subject.device.type, torch.bfloat16, enabled=autocast):
            return subject.attention(q, k, v, **case)[0]

    grads = []
    for wrapped in (False, True):
        leaves = [x.clone().requires_grad_() for x in start]
        torch.manual_seed(5)
        if wrapped:
            out = torch.utils.checkpoint.checkpoint(run, *leaves, use_reentrant=False)
        else:
            out = run(*leaves)
        grads.append(torch.autograd.grad(out.float().square().sum(), leaves))
    for name, plain, again in zip("qkv", *grads, strict=True):
        same_bits(f"d{name} under checkpointing", again, plain)


add(Item("AB-064/checkpoint", functools.partial(checkpointed, False)))
add(Item("AB-064/checkpoint-autocast", functools.partial(checkpointed, True)))


@check("AB-068/vmap")
def vmap(subject: Subject) -> None:
    """vmap equals a loop over slices; with dropout, each slice is a call of its own."""
    q, k, v = (subject.randn(3, 2, 20, 2, 32, seed=s) for s in range(3))
    for arguments in ({}, {"dropout_p": 0.3, "dropout_seed": 5}):

        def one(q: Any, k: Any, v: Any, arguments: Any = arguments) -> Any:
            return subject.attention(q, k, v, **arguments)

        want = [one(q[n], k[n], v[n]) for n in range(3)]
        out, lse = torch.vmap(lambda q, k, v, a=arguments: attnlib.attention(
            q, k, v, return_lse=True, backend=subject.name, **a))(q, k, v)  # fmt: skip
        for n in range(3):
            require((out[n] - want[n][0]).abs() <= 0.02, "vmap differs from a loop")
            require((lse[n] - want[n][1]).abs() <= 1e-4, "lse under vmap differs from a loop")


@check("AB-071/dropout_after_the_normaliser")
def dropout_after_the_normaliser(subject: Subject) -> None:
    """A row that loses every key is 0 and not 0 / 0; p outside [0, 1] is a ValueError."""
    q, k, v, dout = (subject.randn(2, 64, 4, 32, seed=s) for s in range(4))
    for p in (0.5, 0.99):
        leaves = [x.clone() for x in (q, k, v)]
        inputs = given(*leaves, causal=True, dropout_p=p, dropout_seed=3, grads=("q", "k", "v"), dout=dout)
        result = subject.check(inputs)
        kept = attnlib.dropout_mask(3, p, 2, 4, 64, 64).to(subject.device)[:, :, 0, 0]
        assert result.out is not None
        require((result.out[:, 0].abs().sum(-1) > 0) == kept, "row 0 is not 0 exactly where its only key is dropped")
    for wrong in (-0.1, 1.5, math.nan):
        raises(ValueError, "dropout_p", attnlib.attention, q, k, v, dropout_p=wrong, backend=subject.name)


@check("AB-074/deterministic_algorithms")
def deterministic_algorithms(subject: Subject) -> None:
    """torch.use_deterministic_algorithms(True) asks for a backward that repeats to the bit; it does, or is refused."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        inputs = [given(*(subject.randn(2, 300, n, 64, seed=n + s) for s, n in enumerate((4, 2, 2))), causal=True,
                        grads=("q", "k", "v"), dout=subject.randn(2, 300, 4, 64)) for _ in range(4)]  # fmt: skip
        require(inputs[0].problem().deterministic, "the problem does not ask for a deterministic backward")
        results = [subject.run(call) for call in inputs]
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    for result in results[1:]:
        for name in ("dq", "dk", "dv"):
            same_bits(f"{name} of another run", getattr(result, name), getattr(results[0], name))


@check("AB-083/dtypes")
def dtypes(subject: Subject) -> None:
    """Integers, bools and complex numbers are TypeErrors that name the argument; a float bias of any dtype is taken."""
    q, k, v = (subject.randn(2, 16, 4, 32, seed=s) for s in range(3))
    for dtype in (torch.int32, torch.bool, torch.complex64):
        raises(TypeError, "q", attnlib.attention, *(x.to(dtype) for x in (q, k, v)), backend=subject.name)
    other = torch.float16 if subject.dtype != torch.float16 else torch.float32
    raises(TypeError, "k", attnlib.attention, q, k.to(other), v, backend=subject.name)
    raises(TypeError, "bias", attnlib.attention, q, k, v, bias=torch.ones(16, 16, dtype=torch.int64, device=q.device),
           backend=subject.name)  # fmt: skip
    raises(
        TypeError, "bias", attnlib.attention, q, k, v, mask=torch.ones(16, 16, device=q.device), backend=subject.name
    )
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        bias = subject.randn(4, 16, 16, dtype=dtype)
        subject.check(
            given(q.clone(), k.clone(), v.clone(), bias=bias, grads=("q", "bias"), dout=subject.randn(2, 16, 4, 32))
        )


@check("AB-083/autocast")
def autocast(subject: Subject) -> None:
    """autocast casts q, k and v, and leaves the bias as it is."""
    q, k, v = (subject.randn(2, 16, 4, 32, seed=s, dtype=torch.float32) for s in range(3))
    bias = subject.randn(4, 16, 16, dtype=torch.float32)
    with torch.autocast(subject.device.type, torch.bfloat16):
        out, lse = subject.attention(q, k, v, bias=bias)
    require(out.dtype == torch.bfloat16, f"out under autocast(bfloat16) is {out.dtype}")
    subject.check(given(*(x.bfloat16() for x in (q, k, v)), bias=bias), result=Result(out, lse))


@check("AB-088/merging_empty_parts")
def merging_empty_parts(subject: Subject) -> None:
    """lse of rows without keys is -inf; merging such a part changes no bit; two of them merge to empty."""
    q, k, v = (subject.randn(2, n, 2, 32, seed=n) for n in (9, 5, 5))
    part = subject.attention(q, k, v)
    nothing = subject.attention(q, k[:, :0], v[:, :0])
    hidden = subject.attention(q, k, v, mask=torch.zeros(1, dtype=torch.bool, device=q.device))
    causal = subject.attention(q, k, v, causal=True)
    require(causal[1][..., :4] == -math.inf, "lse of queries before the first key is not -inf")
    require(causal[0][:, :4] == 0, "out of queries before the first key is not 0")
    for empty in (nothing, hidden):
        require(empty[1] == -math.inf, "lse of an empty row is not -inf")
        require(empty[0] == 0, "out of an empty row is not 0")
        for pair in ((part, empty), (empty, part)):
            out, lse = attnlib.merge([p[0] for p in pair], [p[1] for p in pair])
            same_bits("out merged with an empty part", out, part[0])
            same_bits("lse merged with an empty part", lse, part[1])
    out, lse = attnlib.merge([nothing[0], hidden[0]], [nothing[1], hidden[1]])
    require(out == 0, "two empty parts do not merge to 0")
    require(lse == -math.inf, "two empty parts do not merge to lse -inf")


@check("AB-089/units_of_lse")
def units_of_lse(subject: Subject) -> None:
    """One key: lse is the score. q = 0: lse is ln(Sk). It is the natural logarithm, float32, [B, Hq, Sq]."""
    q, k, v = (subject.randn(64, 1, 2, 32, seed=s) for s in range(3))
    _, lse = subject.attention(q, k, v)
    scores = (q.double() * k.double()).sum(-1) * 32**-0.5
    require(
        (lse.double() - scores.transpose(1, 2)).abs() <= 1e-5 * (1 + scores.abs().max()),
        "lse of one key is not its score",
    )
    wanted = torch.float64 if subject.dtype == torch.float64 else torch.float32
    require(lse.dtype == wanted and lse.shape == (64, 2, 1), f"lse is {lse.dtype} {tuple(lse.shape)}")
    keys = subject.randn(64, 37, 2, 32, seed=4)
    _, lse = subject.attention(torch.zeros_like(q), keys, keys)
    require((lse - math.log(37)).abs() <= 1e-5, "lse of 37 equal scores is not ln 37")


@check("AB-073/dropout_packed")
def dropout_packed(subject: Subject) -> None:
    """Packed sequences with dropout and no request for probabilities: works, and the seed reproduces it."""
    q, k, v = (subject.randn(90, 4, 32, seed=s) for s in range(3))
    ends = subject.ints(0, 30, 31, 90)
    first, second = (
        subject.call("attention_varlen", q, k, v, ends, ends, dropout_p=0.1, dropout_seed=9)[0] for _ in range(2)
    )
    same_bits("another run with the seed", second, first)


@check("AB-079/importing", level="core")
def importing(subject: Subject) -> None:
    """Importing and listing backends makes no CUDA context, so that a process may still fork."""
    import subprocess
    import sys

    code = (
        "import attnlib, torch; attnlib.backends(); attnlib.support_matrix(); "
        "assert not torch.cuda.is_initialized(), 'CUDA was initialised'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    require(done.returncode == 0, f"import and listing failed: {done.stderr[-2000:]}")


@check("AB-067/compile_dynamic", level="full")
def compile_dynamic(subject: Subject) -> None:
    """torch.compile with dynamic shapes does not specialise on the sequence length."""
    compiles = 0

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        nonlocal compiles
        compiles += 1
        return graph.forward

    torch._dynamo.reset()
    run = torch.compile(
        lambda q, k, v: attnlib.attention(q, k, v, causal=True, backend=subject.name),
        backend=count,
        dynamic=True,
        fullgraph=True,
    )
    for length in (17, 18, 33, 65):
        q, k, v = (subject.randn(2, length, 2, 32, seed=s) for s in range(3))
        same_bits(f"compiled at {length}", run(q, k, v), subject.attention(q, k, v, causal=True)[0])
    torch._dynamo.reset()
    require(compiles <= 2, f"{compiles} compiles for four lengths")
