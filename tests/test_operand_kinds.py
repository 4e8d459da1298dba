"""Every kind of tensor that is not a plain one, as every tensor argument: attnlib's own error, or the right result."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import attnlib
from attnlib import ArgumentError, ArgumentTypeError


class Marked(torch.Tensor):
    """A subclass that changes nothing."""


class Wrapped(torch.Tensor):
    """A subclass that holds its values elsewhere, as distributed and quantised tensors do."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, strides=inner.stride())

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = torch.utils._pytree.tree_map_only(cls, lambda x: x.inner, (args, kwargs or {}))
        return func(*args, **kwargs)


class Unreadable:
    """An array whose memory nobody may have."""

    def __dlpack__(self, **_: Any) -> Any:
        raise BufferError("no export")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def nested(layout: torch.layout) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: torch.nested.nested_tensor(
        list(tensor if tensor.dim() > 1 else tensor[:, None]), layout=layout
    )


def negative(tensor: torch.Tensor) -> torch.Tensor:
    return torch._neg_view(-tensor)


WRONG: dict[str, Callable[[torch.Tensor], Any]] = {
    "sparse": lambda t: t.to_sparse(),
    "csr": lambda t: t.reshape(t.shape[0], -1).to_sparse_csr(),
    "nested": nested(torch.strided),
    "jagged": nested(torch.jagged),
    "quantized": lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
    "mkldnn": lambda t: t.float().to_mkldnn(),
    "complex": lambda t: t.to(torch.complex64),
    "conjugate": lambda t: t.to(torch.complex64).conj(),
    "float8": lambda t: t.float().to(torch.float8_e4m3fn),
    "uint16": lambda t: t.to(torch.uint16),
    "zero_dim": lambda t: t.flatten()[0],
    "meta": lambda t: t.to("meta"),
    "fake": lambda t: FakeTensorMode().from_tensor(t),
    "freed": freed,
    "uninitialised": lambda t: torch.nn.parameter.UninitializedParameter(),
    "string": lambda t: "a",
    "object": lambda t: object(),
    "class": lambda t: torch.Tensor,
    "array_of_objects": lambda t: t.numpy().astype(object),
    "other_byte_order": lambda t: t.numpy().astype(t.numpy().dtype.newbyteorder(">")),
    "unreadable": lambda t: Unreadable(),
    "float_gradient": lambda t: t.to(torch.float32, copy=True).requires_grad_(),
}
RIGHT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "subclass": lambda t: t.as_subclass(Marked),
    "wrapped": Wrapped,
    "negative": negative,
    "parameter": lambda t: torch.nn.Parameter(t.clone(), requires_grad=False),
    "transposed": lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0),
}
ANY_SHAPE = {"bias", "mask", "dropout_seed", "max_seqlen_q", "max_seqlen_k", "seed"}  # a tensor of no dimension fits
NOT_READ = {"max_seqlen_q", "max_seqlen_k"}  # a hint: only its form is looked at
DIFFERENTIABLE = {"q", "k", "v", "bias", "sinks", "outs", "lses"}


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def merge(outs: Any, lses: Any) -> Any:
    return attnlib.merge([randn(2, 3, 4, 8), outs], [randn(2, 4, 3), lses])


def dropout_mask(seed: Any) -> Any:
    return attnlib.dropout_mask(seed, 0.5, 1, 1, 8, 8)


def dense() -> dict[str, torch.Tensor]:
    return {
        "q": randn(2, 5, 4, 8), "k": randn(2, 7, 2, 8), "v": randn(2, 7, 2, 6), "bias": randn(5, 7),
        "mask": torch.ones(5, 7, dtype=torch.bool), "alibi_slopes": randn(4), "sinks": randn(4), "q_lens": ints(5, 4),
        "kv_lens": ints(7, 3), "dropout_seed": torch.tensor([3]),
    }  # fmt: skip


def packed() -> dict[str, torch.Tensor]:
    return {
        "q": randn(8, 4, 8), "k": randn(3, 4, 2, 8), "v": randn(3, 4, 2, 6), "cu_seqlens_q": ints(0, 3, 8),
        "cu_seqlens_k": ints(0, 4, 8), "page_table": ints(0, 1)[:, None].clone(), "max_seqlen_q": torch.tensor([5]),
        "max_seqlen_k": torch.tensor([4]), "bias": randn(5, 4),
    }  # fmt: skip


def cache() -> dict[str, torch.Tensor]:
    return {
        "q": randn(2, 1, 4, 8), "k_cache": randn(3, 4, 2, 8), "v_cache": randn(3, 4, 2, 6), "kv_lens": ints(1, 2),
        "page_table": ints(0, 1)[:, None].clone(), "k_new": randn(2, 1, 2, 8), "v_new": randn(2, 1, 2, 6),
        "new_lens": ints(1, 0), "q_lens": ints(1, 1), "sinks": randn(4),
    }  # fmt: skip


FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, torch.Tensor]]]] = {
    "attention": (lambda **given: attnlib.attention(dropout_p=0.1, **given), dense),
    "attention_varlen": (attnlib.attention_varlen, packed),
    "attention_kvcache": (attnlib.attention_kvcache, cache),
    "explain": (lambda **given: attnlib.explain(dropout_p=0.1, **given), dense),
    "merge": (merge, lambda: {"outs": randn(2, 3, 4, 8), "lses": randn(2, 4, 3)}),
    "dropout_mask": (dropout_mask, lambda: {"seed": torch.tensor([5])}),
}
ARGUMENTS = [(function, name) for function, (_, given) in FUNCTIONS.items() for name in given()]


def converted(convert: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
    with warnings.catch_warnings():  # nested, quantised and CSR tensors are said to be beta, or on their way out
        warnings.simplefilter("ignore")
        return convert(tensor)


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize(("function", "name"), ARGUMENTS)
def test_what_is_no_plain_tensor_is_an_error_that_names_the_argument(function: str, name: str, kind: str) -> None:
    call, make = FUNCTIONS[function]
    given = make()
    given[name] = converted(WRONG[kind], given[name])
    fits = (
        (kind == "zero_dim" and name in ANY_SHAPE)
        or (kind in ("meta", "fake", "freed") and name in NOT_READ)
        or (kind == "float_gradient" and name in DIFFERENTIABLE and function != "attention_kvcache")
    )
    if fits:
        call(**given)
        return
    with pytest.raises((ArgumentError, ArgumentTypeError)) as caught:
        call(**given)
    message = str(caught.value)
    named = re.match(rf"{name}(\[1\])?: needs", message)
    assert named or (kind == "meta" and name == "q" and "needs device meta, as q has, got cpu" in message), message


def plain(result: Any) -> list[torch.Tensor]:
    return [part.inner if isinstance(part, Wrapped) else part.as_subclass(torch.Tensor) for part in result]


@pytest.mark.parametrize("kind", RIGHT)
@pytest.mark.parametrize(("function", "name"), ARGUMENTS)
def test_what_stands_for_a_plain_tensor_gives_its_result(function: str, name: str, kind: str) -> None:
    call, make = FUNCTIONS[function]
    if kind == "negative" and (make()[name].dtype == torch.bool or name in ("k_cache", "v_cache")):
        pytest.skip("there is no such view, or it can't be written")
    tensor = make()[name]
    given = make() | {name: converted(RIGHT[kind], tensor)}
    if function == "explain":
        assert call(**given).chosen is not None
        return
    wants_lse = function.startswith("attention")
    results = [call(**case, **({"return_lse": True} if wants_lse else {})) for case in (given, make())]
    got, right = (plain(result if isinstance(result, tuple) else (result,)) for result in results)
    for ours, theirs in zip(got, right, strict=True):
        assert torch.equal(ours.resolve_neg(), theirs)


def test_caches_that_cannot_be_written() -> None:
    for name in ("k_cache", "v_cache"):
        for convert in (negative, lambda t: torch._efficientzerotensor(t.shape)):
            given = cache()
            given[name] = convert(given[name])
            with pytest.raises(ArgumentError, match=f"{name}: needs plain memory to be written"):
                attnlib.attention_kvcache(**given)


@pytest.mark.parametrize("function", ["attention", "attention_varlen", "attention_kvcache", "explain"])
@pytest.mark.parametrize("value", [1, 0, None, "yes", np.True_, torch.tensor(True)], ids=repr)
def test_flags_are_true_or_false(function: str, value: Any) -> None:
    call, make = FUNCTIONS[function]
    for name in ("causal", "return_lse"):
        with pytest.raises(ArgumentTypeError, match=f"{name}: needs True or False, got"):
            call(**make(), **{name: value})
    if function == "attention" and value is not None:
        with pytest.raises(ArgumentTypeError, match="deterministic: needs True, False or None, got"):
            call(**make(), deterministic=value)


def test_a_flag_is_checked_before_a_cache_is_written() -> None:
    given = cache()
    before = given["k_cache"].clone()
    with pytest.raises(ArgumentTypeError, match="return_lse"):
        attnlib.attention_kvcache(**given, return_lse=1)
    assert torch.equal(given["k_cache"], before)


# --- merge: arrays in, arrays out; one tensor is no list of parts -----------------------------------------------------


def test_merge_of_arrays_gives_arrays() -> None:
    outs, lses = [randn(2, 3, 4, 8), randn(2, 3, 4, 8) + 1], [randn(2, 4, 3), randn(2, 4, 3) + 1]
    right = attnlib.merge(outs, lses)
    got = attnlib.merge([x.numpy() for x in outs], [x.numpy() for x in lses])
    for ours, theirs in zip(got, right, strict=True):
        assert isinstance(ours, np.ndarray)
        np.testing.assert_array_equal(ours, theirs.numpy())
    with pytest.raises(ArgumentTypeError, match=r"lses\[1\]: needs a tensor, as outs\[0\] is, got ndarray"):
        attnlib.merge(outs, [lses[0], lses[1].numpy()])
    with pytest.raises(ArgumentTypeError, match=r"outs\[1\]: needs a tensor or an array"):
        attnlib.merge([outs[0].numpy(), [1.0]], [x.numpy() for x in lses])


def test_merge_takes_floats_in_lists() -> None:
    out, lse = randn(2, 3, 4, 8), randn(2, 4, 3)
    with pytest.raises(ArgumentTypeError, match=r"outs\[0\]: needs float64, float32, float16 or bfloat16, got int32"):
        attnlib.merge([out.int()], [lse])
    with pytest.raises(ArgumentTypeError, match=r"lses\[0\]: needs float64, .* got int64"):
        attnlib.merge([out], [lse.long()])
    with pytest.raises(ArgumentTypeError, match=r"outs\[1\]: needs torch.float32, as outs\[0\] has, got torch.float16"):
        attnlib.merge([out, out.half()], [lse, lse])
    for one in (out, out.numpy(), 3, None):
        with pytest.raises(ArgumentTypeError, match="outs: needs a sequence of tensors or arrays, got one"):
            attnlib.merge(one, [lse])
    with pytest.raises(ArgumentError, match=r"outs: need shape \[batch, .* got \[4, 8\]"):
        attnlib.merge([out[0, 0]], [lse[0, 0]])


def test_the_place_of_a_dropout_mask() -> None:
    with pytest.raises(ArgumentError, match="device: needs a torch device, got 'toaster'"):
        attnlib.dropout_mask(3, 0.5, 1, 1, 4, 4, device="toaster")
    same = attnlib.dropout_mask(np.int64(3), np.float32(0.5), np.int32(1), 1, 4, 4)
    assert torch.equal(same, attnlib.dropout_mask(3, 0.5, 1, 1, 4, 4))
