"""The named problems that conformance and benchmarks share, as data.

A `Case` says what is asked, never how it is computed; `recipes.make` turns one into tensors. Level "core" is what
every commit runs, "full" adds every pair of features and the wide sweeps, "bench" holds shapes for timing only.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..problem import Feature

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
MIN_ELEMENTS = 4096  # of every compared tensor; small problems are repeated along batch


@dataclass(frozen=True)
class Case:
    """One problem.

    layout: "dense" calls attention, "packed" attention_varlen, "cache" attention_kvcache.
    batch 0: as many sequences as make MIN_ELEMENTS. q_lens, kv_lens, new_lens are repeated along batch.
    bias and mask: which dimensions are not broadcast, as in "1hqk" or "b11k". alibi: "h" or "bh". block_mask: sizes.
    new: tokens to append. strides and dout: how operands lie in memory, see inputs.LAYOUTS.
    directions: "forward" runs without gradients, "backward" with the gradients in `grads`.
    """

    name: str
    layout: str = "dense"
    seqlen_q: int = 65
    seqlen_k: int = 97
    batch: int = 0
    num_heads_q: int = 2
    num_heads_kv: int = 2
    head_dim: int = 32
    head_dim_v: int | None = None
    causal: bool = False
    top_left: bool = False
    window: tuple[int | None, int | None] | None = None
    scale: float | None = None
    softcap: float | None = None
    bias: str | None = None
    bias_dtype: torch.dtype | None = None
    bias_gradient: bool = False
    mask: str | None = None
    alibi: str | None = None
    sinks: bool = False
    block_mask: tuple[int, int] | None = None
    q_lens: tuple[int, ...] | None = None
    kv_lens: tuple[int, ...] | None = None
    page_size: int | None = None
    new: int | None = None
    new_lens: tuple[int, ...] | None = None
    dropout_p: float = 0.0
    deterministic: bool | None = None
    dlse: bool = True
    recipe: str = "normal"
    strides: str = "guarded"
    dout: str = "plain"
    dtypes: tuple[torch.dtype, ...] = (F32, BF16)
    directions: tuple[str, ...] = ("forward", "backward")
    level: str = "core"

    @property
    def dim_v(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def sequences(self) -> int:
        """How many sequences the problem has."""
        if self.batch:
            return self.batch
        q_lens, kv_lens = self.q_lens or (self.seqlen_q,), self.kv_lens or (self.seqlen_k,)
        rows = max(1, sum(q_lens)) / len(q_lens) * self.num_heads_q
        keys = max(1, sum(kv_lens)) / len(kv_lens) * self.num_heads_kv
        smallest = min(rows, keys) * max(1, min(self.head_dim, self.dim_v))
        needed = max(2, len(q_lens), len(kv_lens), -(-MIN_ELEMENTS // max(1, int(smallest))))
        return min(needed, MIN_ELEMENTS)

    @property
    def grads(self) -> tuple[str, ...]:
        """The operands that get a gradient in direction "backward"."""
        found = ("q", "k", "v")
        return found + (("bias",) if self.bias_gradient else ()) + (("sinks",) if self.sinks else ())


_LENGTHS: dict[str, Any] = {"q_lens": (65, 1, 40), "kv_lens": (97, 64, 0, 33)}
_CACHE: dict[str, Any] = {"layout": "cache", "kv_lens": (97, 64, 1, 33), "directions": ("forward",)}
_PACKED: dict[str, Any] = {"layout": "packed", "q_lens": (65, 1, 0, 40), "kv_lens": (97, 64, 5, 33)}

# dsinks has one element a head: with few heads the baselines' error in it is a matter of luck
_SINKS: dict[str, Any] = {"sinks": True, "num_heads_q": 16, "num_heads_kv": 16}

FEATURE_OPTIONS: dict[Feature, dict[str, Any]] = {
    Feature.CAUSAL: {"causal": True},
    Feature.WINDOW: {"window": (20, 5)},
    Feature.TOP_LEFT: {"top_left": True, "causal": True},
    Feature.SOFTCAP: {"softcap": 1.5},
    Feature.BIAS: {"bias": "bhqk"},
    Feature.BIAS_GRADIENT: {"bias": "1hqk", "bias_gradient": True, "directions": ("backward",)},
    Feature.MASK: {"mask": "bhqk"},
    Feature.ALIBI: {"alibi": "bh"},
    Feature.SINKS: _SINKS,
    Feature.BLOCK_MASK: {"block_mask": (16, 48)},
    Feature.LENGTHS: _LENGTHS,
    Feature.VARLEN: _PACKED,
    Feature.PAGED: {**_CACHE, "page_size": 16},
    Feature.APPEND: {**_CACHE, "kv_lens": (60, 94, 0, 33), "new": 3, "new_lens": (3, 1, 0)},
    Feature.DROPOUT: {"dropout_p": 0.25},
    Feature.GQA: {"num_heads_q": 4},
    Feature.HEAD_DIM_V: {"head_dim_v": 48},
    Feature.BACKWARD: {"directions": ("backward",)},
    Feature.DETERMINISTIC: {"deterministic": True, "directions": ("backward",)},
}
FEATURE_NAMES = {feature: feature.name.lower() for feature in Feature}

# pairs that no call can ask for together: attention_kvcache has neither gradients, dropout, block masks nor top-left
# alignment, attention_varlen has neither q_lens/kv_lens nor new tokens
_NOT_CACHED = {Feature.BACKWARD, Feature.BIAS_GRADIENT, Feature.DETERMINISTIC, Feature.DROPOUT}
_NOT_CACHED |= {Feature.BLOCK_MASK, Feature.TOP_LEFT, Feature.VARLEN}
IMPOSSIBLE = {frozenset((Feature.APPEND, other)) for other in _NOT_CACHED} | {
    frozenset((Feature.VARLEN, Feature.LENGTHS))
}


def with_features(name: str, features: tuple[Feature, ...], **options: Any) -> Case:
    """A case that asks for these features and, as far as possible, no other."""
    merged: dict[str, Any] = {}
    for feature in features:
        directions = merged.get("directions")
        merged.update(FEATURE_OPTIONS[feature])
        if directions is not None:
            both = [d for d in directions if d in merged.get("directions", directions)]
            merged["directions"] = tuple(both or ("backward",))
    asked = set(features)
    if Feature.PAGED in asked and asked & _NOT_CACHED:  # pages without a cache call: attention_varlen
        merged.update(_PACKED, page_size=16, directions=("forward", "backward"))
    if Feature.VARLEN in asked:
        merged.update(_PACKED)
    if {Feature.SINKS, Feature.GQA} <= asked:
        merged.update(_SINKS, num_heads_kv=8)
    if Feature.APPEND in asked:
        merged.update(FEATURE_OPTIONS[Feature.APPEND])
    if asked & {Feature.BACKWARD, Feature.BIAS_GRADIENT, Feature.DETERMINISTIC}:
        merged["directions"] = ("backward",)
    return Case(name, **{**merged, **options})


def _singles() -> list[Case]:
    plain = Case("plain", dtypes=(F32, BF16, F16, F64))
    return [plain] + [
        with_features(FEATURE_NAMES[feature], (feature,)) for feature in Feature if feature is not Feature.BACKWARD
    ]


def pairs() -> list[tuple[Feature, Feature]]:
    """Every pair of features that one call can ask for."""
    implied = {frozenset((Feature.BIAS, Feature.BIAS_GRADIENT)), frozenset((Feature.BACKWARD, Feature.DETERMINISTIC))}
    implied |= {frozenset((Feature.BIAS_GRADIENT, Feature.BACKWARD))}
    found = (frozenset(pair) for pair in itertools.combinations(Feature, 2))
    order = list(Feature)
    kept = (sorted(pair, key=order.index) for pair in found if pair not in IMPOSSIBLE | implied)
    return [(first, second) for first, second in kept]


def _pair_cases() -> list[Case]:
    halves = itertools.cycle((BF16, F16))
    return [
        with_features(f"{FEATURE_NAMES[a]}-{FEATURE_NAMES[b]}", (a, b), level="full", dtypes=(F32, next(halves)))
        for a, b in pairs()
        if Feature.BACKWARD not in (a, b)  # every other case runs backward wherever it exists
    ]


def _combinations() -> list[Case]:
    everything: dict[str, Any] = {
        "causal": True, "softcap": 3.0, "bias": "1hqk", "bias_gradient": True, "mask": "b1qk", "alibi": "h",
        "sinks": True, "num_heads_q": 16, "head_dim_v": 40,
    }  # fmt: skip
    return [
        Case("causal-mask-bias", causal=True, mask="b1qk", bias="b1qk"),
        Case("causal-left_window", causal=True, window=(30, None), seqlen_q=129, seqlen_k=129),
        Case("sinks-window-decode", sinks=True, causal=True, window=(128, 0), seqlen_q=1, seqlen_k=256, num_heads_q=16,
             head_dim=64, directions=("forward", "backward")),
        Case("sinks-lengths-causal", **_SINKS, causal=True, **_LENGTHS),
        Case("everything", **everything),
        Case("everything-lengths", **everything, **_LENGTHS),
        Case("everything-dropout", **everything, dropout_p=0.1, block_mask=(32, 16)),
        Case("everything-packed", **everything, **_PACKED, dropout_p=0.1),
        Case("everything-paged", **{**everything, **_CACHE, "bias_gradient": False}, page_size=16),
        Case("everything-append", **{**everything, **FEATURE_OPTIONS[Feature.APPEND], "bias_gradient": False},
             page_size=8),
        Case("everything-packed-paged", **everything, **_PACKED, page_size=32, level="full"),
        Case("everything-float64", **everything, dropout_p=0.5, dtypes=(F64,)),
        Case("bias-broadcast-rows", bias="b11k", bias_gradient=True, bias_dtype=F32),
        Case("bias-broadcast-keys", bias="1hq1", bias_gradient=True, dtypes=(F32,)),
        Case("bias-one-number", bias="1111", bias_gradient=True, dtypes=(F32,)),
        Case("bias-two-dimensions", bias="qk", bias_gradient=True, dtypes=(BF16,)),
        Case("bias-shared-by-many", bias="11qk", bias_gradient=True, batch=24, num_heads_q=8, seqlen_q=64,
             seqlen_k=64, dtypes=(BF16, F16)),
        Case("bias-wider-dtype", bias="bhqk", bias_gradient=True, bias_dtype=F32, dtypes=(BF16, F16)),
        Case("bias-float64", bias="11qk", bias_gradient=True, bias_dtype=F64, dtypes=(F32, BF16), level="full"),
        Case("mask-keys", mask="b11k"),
        Case("mask-two-dimensions", mask="qk", dtypes=(F32,)),
        Case("block_mask-64", block_mask=(64, 64), seqlen_q=200, seqlen_k=300),
        Case("block_mask-128-causal", block_mask=(128, 128), seqlen_q=300, seqlen_k=400, causal=True),
        Case("block_mask-64-deterministic", block_mask=(64, 64), seqlen_q=200, seqlen_k=300, deterministic=True),
        Case("block_mask-wide", block_mask=(64, 64), seqlen_q=200, seqlen_k=300, head_dim=256, level="full"),
        Case("block_mask-long-window", block_mask=(64, 64), seqlen_q=2200, seqlen_k=2300, window=(700, 100), batch=1,
             num_heads_q=2, num_heads_kv=1, head_dim=64, level="full"),
        Case("alibi-causal", alibi="h", causal=True),
        Case("alibi-top_left", alibi="h", top_left=True, dtypes=(F32,)),
        Case("negative_scale", scale=-0.3, dtypes=(F32,)),
        Case("zero_scale", scale=0.0, dtypes=(F32, BF16)),
        Case("large_scale", scale=4.0, dtypes=(F32,)),
        Case("dropout-half", dropout_p=0.5, seqlen_q=130, seqlen_k=190),
        Case("dropout-all", dropout_p=1.0, dtypes=(F32,)),
        Case("dropout-packed", dropout_p=0.2, causal=True, **_PACKED),
        Case("without-dlse", dlse=False),
        Case("multi_query", num_heads_q=8, num_heads_kv=1, causal=True),
        Case("three_of_nine_heads", num_heads_q=9, num_heads_kv=3, causal=True),
    ]  # fmt: skip


_LENGTH_PAIRS = (
    (1, 1), (1, 64), (1, 129), (2, 3), (63, 65), (64, 64), (65, 127), (127, 63), (129, 129), (131, 67), (257, 1),
    (1, 1021), (5, 311), (16, 16), (128, 256), (300, 520),
)  # fmt: skip


def _sizes() -> list[Case]:
    found = []
    for index, (seqlen_q, seqlen_k) in enumerate(_LENGTH_PAIRS):
        sizes: dict[str, Any] = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
        if seqlen_q == 1 and seqlen_k > 1000:  # enough elements in out without a large batch of long rows
            sizes.update(num_heads_q=16, num_heads_kv=1, head_dim=64)
        recipe = "single_key" if seqlen_k == 1 else "normal"
        dtypes = (F32,) if index % 2 else (BF16,)
        found.append(Case(f"size-{seqlen_q}x{seqlen_k}", recipe=recipe, dtypes=dtypes, **sizes))
        found.append(Case(f"size-{seqlen_q}x{seqlen_k}-causal", recipe=recipe, causal=True, dtypes=dtypes, **sizes))
        found.append(
            Case(
                f"size-{seqlen_q}x{seqlen_k}-window",
                recipe=recipe,
                window=(17, 3),
                level="full",
                **{"num_heads_q": 4, **sizes},
            )
        )
    for length in (1, 2, 7, 13, 31, 61, 63, 64, 65, 66, 95, 96, 97, 113, 127, 128, 129, 191, 192, 193):
        recipe = "single_key" if length == 1 else "normal"
        found.append(
            Case(f"square-{length}", seqlen_q=length, seqlen_k=length, causal=True, recipe=recipe, level="full")
        )
    return found


def _head_dims() -> list[Case]:
    found = []
    core, full = (16, 40, 64, 96, 128, 192, 256), (1, 7, 8, 24, 33, 48, 60, 72, 80, 104, 112, 136, 144, 160, 176, 224)
    for dim in core + full + (320, 512):
        level = "core" if dim in core else "full"
        dtypes = (BF16,) if level == "core" else (BF16, F32)
        found.append(Case(f"head_dim-{dim}", head_dim=dim, causal=True, dtypes=dtypes, level=level))
    for dim, dim_v in ((128, 96), (64, 128), (192, 128), (128, 72), (576, 512), (16, 8)):
        level = "full" if dim == 576 else "core"
        found.append(
            Case(f"head_dim-{dim}-{dim_v}", head_dim=dim, head_dim_v=dim_v, causal=True, dtypes=(BF16,), level=level)
        )
    return found


def _recipes() -> list[Case]:
    names = (
        "q5", "peaked", "constant_k", "constant_v", "shifted_v", "identity_v", "ramp_up", "ramp_down", "sink_tokens",
        "jump", "zeros", "tiny",
    )  # fmt: skip
    found = [Case(name, recipe=name, seqlen_q=70, seqlen_k=150, dtypes=(F32, BF16, F16)) for name in names]
    found += [
        Case("jump-causal", recipe="jump", causal=True, seqlen_q=150, seqlen_k=150, dtypes=(F32,)),
        Case("ramp_up-gqa", recipe="ramp_up", num_heads_q=4, seqlen_q=80, seqlen_k=260, dtypes=(F32, BF16)),
        *(  # many tiles of keys, whose largest scores a kernel meets late whichever end it starts from
            Case(
                f"{name}-many{'-causal' * causal}",
                recipe=name,
                seqlen_q=200,
                seqlen_k=700,
                head_dim=64,
                causal=causal,
                dtypes=(BF16, F16),
                level="full",
            )
            for name in ("ramp_up", "ramp_down", "sink_tokens", "jump")
            for causal in (False, True)
        ),
        Case("bias_inf", recipe="bias_inf", bias="bhqk", bias_gradient=True),
        Case("bias_inf-keys", recipe="bias_inf", bias="b11k", dtypes=(F32,)),
        Case("bias_min", recipe="bias_min", bias="bhqk", bias_dtype=F32, dtypes=(F32, BF16)),
        Case("bias_min-gradient", recipe="bias_min", bias="b1qk", bias_gradient=True, dtypes=(F32, BF16, F16)),
        Case("bias_large", recipe="bias_large", bias="1hqk", bias_gradient=True, bias_dtype=F32),
        Case("empty_rows", mask="bhqk", recipe="empty_rows"),
        Case("empty_rows-sinks", mask="bhqk", recipe="empty_rows", **_SINKS),
        Case("more-queries-than-keys", seqlen_q=140, seqlen_k=50, causal=True, sinks=True, num_heads_q=16),
        Case("long", recipe="normal", seqlen_q=20, seqlen_k=2100, num_heads_q=4, dtypes=(F32, BF16)),
    ]
    return found


def _memory() -> list[Case]:
    found = [
        Case(f"strides-{how}", strides=how, num_heads_q=4, causal=True, dtypes=(F32, BF16))
        for how in ("plain", "transposed", "inner", "misaligned", "expanded_heads", "expanded_batch")
    ]
    found += [
        Case(f"dout-{how}", dout=how, num_heads_q=4, directions=("backward",), dtypes=(F32, BF16))
        for how in ("transposed", "inner", "expanded", "misaligned")
    ]
    pages = (1, 3, 16, 64, 100, 256)
    found += [
        Case(f"page_size-{size}", **_CACHE, page_size=size, causal=True, num_heads_q=4, dtypes=(BF16,),
             seqlen_k=max(97, size), level="core" if size in (1, 16, 64) else "full")
        for size in pages
    ]  # fmt: skip
    decode: dict[str, Any] = {**_CACHE, "seqlen_q": 1, "num_heads_q": 8, "head_dim": 64}
    found += [
        Case("cache", **_CACHE, causal=True),
        Case("cache-q_lens", **_CACHE, q_lens=(65, 3, 40), causal=True),
        Case("cache-window", **_CACHE, window=(9, 0), num_heads_q=4),
        Case("decode", **decode, causal=True),
        Case("decode-long", **{**decode, "kv_lens": (1500, 1, 700)}, seqlen_k=1536),
        Case("decode-paged", **{**decode, "kv_lens": (1500, 1, 700)}, seqlen_k=1536, page_size=64, dtypes=(BF16,)),
        Case("decode-paged-window-sinks", **{**decode, "kv_lens": (600, 40, 555)}, seqlen_k=640, page_size=16,
             window=(100, 0), sinks=True, dtypes=(BF16,)),
        Case("decode-append", **{**decode, "kv_lens": (0, 96, 5)}, new=1, causal=True, dtypes=(BF16, F16)),
        Case("prefill-append-paged", **{**_CACHE, "kv_lens": (0, 13, 30)}, new=65, causal=True, page_size=16),
        Case("prefill-append-q_lens", **{**_CACHE, "kv_lens": (0, 13, 30)}, new=65, new_lens=(65, 20, 1),
             q_lens=(65, 20, 1), causal=True),
        Case("packed-causal", **_PACKED, causal=True, num_heads_q=4, dtypes=(F32, BF16, F16)),
        Case("packed-many", layout="packed", q_lens=(1, 0, 3, 129, 2, 64), kv_lens=(3, 0, 3, 129, 70, 1),
             seqlen_q=129, seqlen_k=129, causal=True, num_heads_q=4),
        Case("packed-window", **_PACKED, window=(10, 10)),
        Case("packed-bias", **_PACKED, bias="bhqk", bias_gradient=True),
        Case("packed-block_mask", **_PACKED, block_mask=(16, 16)),
        Case("lengths-bias", **_LENGTHS, bias="1hqk", bias_gradient=True, causal=True),
        Case("lengths-mask", **_LENGTHS, mask="b1qk", num_heads_q=4),
    ]  # fmt: skip
    return found


def _benchmarks() -> list[Case]:
    big: dict[str, Any] = {"level": "bench", "strides": "plain", "dtypes": (F32, BF16), "head_dim": 64}
    return [
        Case("train-512", batch=4, seqlen_q=512, seqlen_k=512, num_heads_q=12, num_heads_kv=12, **big),
        Case("train-2048-causal", batch=1, seqlen_q=2048, seqlen_k=2048, num_heads_q=8, num_heads_kv=8, causal=True,
             **big),
        Case("train-2048-gqa", batch=1, seqlen_q=2048, seqlen_k=2048, num_heads_q=16, num_heads_kv=4, causal=True,
             **{**big, "head_dim": 128}),
        Case("train-4096-window", batch=1, seqlen_q=4096, seqlen_k=4096, num_heads_q=8, num_heads_kv=8, causal=True,
             window=(512, 0), **big),
        Case("prefill-256", batch=1, seqlen_q=256, seqlen_k=4096, num_heads_q=16, num_heads_kv=4, causal=True,
             **{**big, "head_dim": 128, "directions": ("forward",)}),
        Case("decode-8192", layout="cache", batch=8, seqlen_q=1, seqlen_k=8192, kv_lens=(8192,), num_heads_q=32,
             num_heads_kv=8, causal=True, **{**big, "head_dim": 128, "directions": ("forward",)}),
        Case("decode-8192-paged", layout="cache", batch=8, seqlen_q=1, seqlen_k=8192, kv_lens=(8192, 1000),
             page_size=64, num_heads_q=32, num_heads_kv=8, causal=True,
             **{**big, "head_dim": 128, "directions": ("forward",)}),
        Case("packed-1024", layout="packed", q_lens=(1024, 100, 500, 40), kv_lens=(1024, 100, 500, 40), seqlen_q=1024,
             seqlen_k=1024, num_heads_q=12, num_heads_kv=12, **big),
    ]  # fmt: skip


def _unique(cases: list[Case]) -> tuple[Case, ...]:
    names = [case.name for case in cases]
    repeated = {name for name in names if names.count(name) > 1}
    assert not repeated, f"case names are used twice: {sorted(repeated)}"
    return tuple(cases)


CASES = _unique(
    _singles() + _combinations() + _sizes() + _head_dims() + _recipes() + _memory() + _pair_cases() + _benchmarks()
)


def select(level: str) -> tuple[Case, ...]:
    """The cases of a level; "full" includes "core"."""
    levels = {"core": ("core",), "full": ("core", "full"), "bench": ("bench",)}[level]
    return tuple(case for case in CASES if case.level in levels)


def named(name: str) -> Case:
    """The case with this name."""
    for case in CASES:
        if case.name == name:
            return case
    raise KeyError(f"no case is called {name!r}")


__all__ = ["CASES", "FEATURE_NAMES", "FEATURE_OPTIONS", "Case", "named", "pairs", "replace", "select", "with_features"]
