"""Every kind of configuration that is shipped, as problems along axes: what ci/compile_matrix compiles."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from attnlib.precompile import common_problems
from attnlib.problem import AttentionProblem

from .config import kernels
from .matrix import Matrix
from .spec import KernelSpec

_HALF, _BFLOAT, _SINGLE = torch.float16, torch.bfloat16, torch.float32
_SIZES: dict[str, tuple[Any, ...]] = {
    "dtype": (_HALF, _BFLOAT, "tf32", _SINGLE),
    "head_dim": (64, 80, 128, 160, 192, 224, 256),
    "head_dim_v": (0, 128),  # 0: the same
}
_FORMS: dict[str, tuple[Any, ...]] = {
    "feature": (
        "plain", "softcap", "sinks", "mask", "block_mask", "dropout", "alibi", "bias", "bias gradient", "everything"
    ),
    "window": ((None, None), (None, 0), (64, 64), (64, None)),
    "layout": ("dense", "lengths", "packed", "paged", "packed paged"),
    "top_left": (False, True),
    "aligned": (True, False),
}  # fmt: skip
_LAYOUTS: dict[str, dict[str, Any]] = {
    "dense": {}, "lengths": {"lengths": True}, "packed": {"packed": True},
    "paged": {"lengths": True, "page_size": 16}, "packed paged": {"packed": True, "page_size": 16},
    "append": {"lengths": True, "append": True}, "append paged": {"lengths": True, "append": True, "page_size": 16},
}  # fmt: skip
_FEATURES: dict[str, dict[str, Any]] = {
    "plain": {}, "softcap": {"softcap": 30.0}, "sinks": {"sinks": _SINGLE}, "mask": {"mask": True},
    "block_mask": {"block_mask": (64, 64)}, "large blocks": {"block_mask": (128, 128)},
    "odd blocks": {"block_mask": (48, 80)}, "dropout": {"dropout_p": 0.125}, "alibi": {"alibi": True},
    "capped dropout": {"softcap": 30.0, "dropout_p": 0.125},
    "bias": {"bias": _SINGLE}, "bias gradient": {"bias": _BFLOAT},
    "everything": {
        "softcap": 30.0, "sinks": _BFLOAT, "mask": True, "dropout_p": 0.125, "alibi": True, "bias": _HALF,
    },
}  # fmt: skip


def _problem(values: Mapping[str, Any], *, training: bool) -> AttentionProblem:
    """training: with the gradients of all operands, as far as a feature's name does not leave the bias out."""
    feature, size, length = _FEATURES[values["feature"]], values["head_dim"], values.get("length", 1024)
    grads: tuple[str, ...] = ()
    if training:
        wanted = {"bias": values["feature"] != "bias", "sinks": True}
        grads = ("q", "k", "v", *(name for name, asked in wanted.items() if asked and name in feature))
    return AttentionProblem(
        dtype=_SINGLE if values["dtype"] == "tf32" else values["dtype"], tf32=values["dtype"] == "tf32",
        batch=2, seqlen_q=values.get("queries", length), seqlen_k=length, num_heads_q=4, num_heads_kv=2,
        head_dim=size, head_dim_v=values["head_dim_v"] or size, scale=0.125, grads=grads,
        window=values.get("window", (None, None)), top_left=values.get("top_left", False), aligned=values["aligned"],
        deterministic=training and values["deterministic"], **feature, **_LAYOUTS[values["layout"]],
    )  # fmt: skip


def _excluded(values: Mapping[str, Any], *, training: bool) -> bool:
    """What CudaBackend refuses on sm_75."""
    sizes = values.get("head_dim", 0), values.get("head_dim_v", 0)
    return values.get("arch") == "sm_75" and (values.get("dtype", _HALF) != _HALF or (training and max(sizes) > 128))


def _kernels(problem: AttentionProblem, arch: str, wgmma: bool = False) -> Sequence[KernelSpec]:
    try:
        return kernels(problem, arch, wgmma)
    except ValueError:  # too large for that architecture's shared memory, which the backend refuses too
        return ()


def _forward(arch: str, values: Mapping[str, Any]) -> Sequence[KernelSpec]:
    training = values["statistics"] and values["layout"] != "paged"
    found = _kernels(_problem({**values, "deterministic": False}, training=training), arch)
    forwards = [spec for spec in found if spec.entry.startswith("forward")]
    return [spec for spec in forwards if getattr(spec.config, "split", False) == values["split"]]


def _backward(arch: str, values: Mapping[str, Any]) -> Sequence[KernelSpec]:
    found = _kernels(_problem(values, training=True), arch)
    return [spec for spec in found if spec.entry.startswith("backward")]


def _wgmma(arch: str, values: Mapping[str, Any]) -> Sequence[KernelSpec]:
    found = _kernels(_problem(values, training=True), arch, wgmma=True)
    return [spec for spec in found if spec.entry.endswith("sm90")]


def _blocks(arch: str, values: Mapping[str, Any]) -> Sequence[KernelSpec]:
    found = _kernels(_problem(values, training=True), arch)
    return [spec for spec in found if spec.entry.startswith(("forward", "backward"))]


def _small(arch: str, values: Mapping[str, Any]) -> Sequence[KernelSpec]:
    """Kernels around the main ones. Those of the backward know nothing of pages and new tokens."""
    found = [*_kernels(_problem(values, training=False), arch)]
    trained = {**values, "layout": values["layout"].removesuffix(" paged").replace("append", "lengths")}
    if not _excluded({"arch": arch, **values}, training=True):
        found += _kernels(_problem(trained, training=True), arch)
    return [spec for spec in found if not spec.entry.startswith(("forward", "backward"))]


def matrices() -> Sequence[Matrix]:
    """Forward kernels, backward kernels, those of Hopper, the small ones around them, and more sizes of mask blocks."""
    forward = {**_SIZES, **_FORMS, "queries": (8, 16, 64, 1024), "statistics": (False, True), "split": (False, True)}
    backward = {**_SIZES, **_FORMS, "layout": ("dense", "lengths", "packed"), "deterministic": (False, True)}
    small = {
        **_SIZES, "feature": ("plain", "sinks", "alibi", "bias gradient", "everything"), "aligned": (True, False),
        "layout": ("dense", "append", "packed", "append paged", "packed paged"), "deterministic": (True, False),
    }  # fmt: skip
    wgmma = {
        **_SIZES, "dtype": (_HALF, _BFLOAT), "window": _FORMS["window"],
        "feature": ("plain", "softcap", "sinks", "dropout", "capped dropout"), "length": (1024, 8192),
        "layout": ("dense", "lengths", "packed"), "top_left": (False, True), "aligned": (True,),
        "deterministic": (False, True),
    }  # fmt: skip
    blocks = {
        **_SIZES, "head_dim_v": (0,), "feature": ("large blocks", "odd blocks"), "window": _FORMS["window"],
        "layout": ("dense", "packed"), "aligned": (True,), "deterministic": (False, True),
    }  # fmt: skip
    inference, training = (functools.partial(_excluded, training=x) for x in (False, True))
    return [
        Matrix("forward", forward, _forward, inference),
        Matrix("backward", backward, _backward, training),
        Matrix("wgmma", wgmma, _wgmma, archs=("sm_90a",)),
        Matrix("small", small, _small, inference),
        Matrix("blocks", blocks, _blocks, training),
    ]


def common() -> Matrix:
    """What most models ask for, on every architecture."""

    def build(arch: str, values: Mapping[str, Any]) -> Sequence[KernelSpec]:
        problem = values["problem"]
        return (
            ()
            if _excluded({"arch": arch, "dtype": problem.dtype}, training=False)
            else _kernels(problem, arch, wgmma=True)
        )

    return Matrix("common", {"problem": tuple(common_problems())}, build)
