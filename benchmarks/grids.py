"""What is measured on a GPU: grids of workloads, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import attnlib
from attnlib.bench import DTYPES, Shape


@dataclass(frozen=True)
class Workload:
    """One shape with what else is asked for.

    `seqlen_q`: queries where they are fewer than the shape's keys. `options` are arguments of attnlib.attention by
    value; "block_density" (share of visible 128 x 128 blocks) and "bias", "mask", "alibi", "sinks", "packed" stand for
    tensors.
    """

    shape: Shape
    dtype: str = "bfloat16"
    seqlen_q: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        extra = [] if self.seqlen_q is None else [f"Q{self.seqlen_q}"]
        extra += [] if self.dtype == "bfloat16" else [self.dtype]
        extra += [name if value is True else f"{name}={value}" for name, value in self.options.items()]
        return " ".join([str(self.shape), *extra])

    @property
    def queries(self) -> int:
        return self.shape.seqlen if self.seqlen_q is None else self.seqlen_q

    @property
    def plain(self) -> Workload:
        """The same without what else is asked for."""
        return Workload(self.shape, self.dtype, self.seqlen_q)

    def flops(self, direction: str) -> float:
        """As Shape.flops counts; features don't change the count, but a window and hidden blocks do."""
        s = self.shape
        if self.queries != s.seqlen:
            return 2.0 * s.batch * s.heads_q * self.queries * s.seqlen * (s.head_dim + s.head_dim_v)
        if "window" not in self.options:
            return s.flops(direction) * float(self.options.get("block_density", 1.0))
        left, right = (s.seqlen if end is None else end for end in self.options["window"])
        rows = torch.arange(s.seqlen)
        seen = (rows + (0 if s.causal else right)).clamp(max=s.seqlen - 1) - (rows - left).clamp(min=0) + 1
        return dataclasses.replace(s, causal=False).flops(direction) * float(seen.sum()) / s.seqlen**2

    def cache_bytes(self) -> float:
        """Bytes of keys and values, which a decoding step has to read."""
        s = self.shape
        width = torch.empty(0, dtype=DTYPES[self.dtype]).element_size()
        return float(s.batch * s.seqlen * s.heads_kv * (s.head_dim + s.head_dim_v) * width)


def training() -> list[Workload]:
    """16,384 tokens of 2,048 channels, head_dim 64 to 256, 512 to 16,384 keys."""
    return [
        Workload(Shape(16384 // seqlen, seqlen, 2048 // dim, 2048 // dim, dim, dim, causal))
        for dim in (64, 128, 256)
        for causal in (False, True)
        for seqlen in (512, 1024, 2048, 4096, 8192, 16384)
    ]


def gqa() -> list[Workload]:
    """Grouped heads, and head dimensions other than 64, 128 and 256."""
    texts = (
        "B8 S2048 H32/8 D128 causal", "B8 S2048 H64/8 D64 causal", "B2 S8192 H32/8 D128 causal",
        "B2 S8192 H64/8 D64 causal", "B1 S32768 H32/8 D128 causal", "B1 S32768 H64/8 D64 causal",
        "B8 S2048 H16 D192/128 causal", "B8 S2048 H16 D96 full", "B2 S8192 H16 D192/128 causal",
        "B2 S8192 H16 D96 full",
    )  # fmt: skip
    return [Workload(Shape.parse(text)) for text in texts]


def decode() -> list[Workload]:
    """One query token, 32 query heads, 8 key/value heads."""
    pairs = ((1, 1024), (1, 8192), (1, 65536), (16, 1024), (16, 8192), (16, 65536), (64, 1024), (64, 8192))
    return [Workload(Shape(batch, seqlen, 32, 8, 128, 128, False), seqlen_q=1) for batch, seqlen in pairs]


def features() -> list[Workload]:
    """What each feature costs, beside the same shape without it."""
    found = []
    for dim in (64, 128):
        for seqlen in (2048, 8192):
            for causal in (False, True):
                shape = Shape(16384 // seqlen, seqlen, 2048 // dim, 2048 // dim, dim, dim, causal)
                found += [Workload(shape), Workload(shape, options={"dropout_p": 0.1})]
                found += [Workload(shape, options={"deterministic": True})]
    triangle, full = (Shape.parse(f"B2 S8192 H16 D128 {kind}") for kind in ("causal", "full"))
    found.append(Workload(full, options={"block_density": 0.25}))
    for options in ({"window": (1024, 0)}, {"softcap": 30.0}, {"alibi": True}, {"sinks": True}, {"packed": True}):
        found.append(Workload(triangle, options=options))
    found += [Workload(full, options={"mask": True}), Workload(full, options={"bias": True})]
    small = Shape.parse("B8 S2048 H16 D128 causal")
    found += [Workload(small, dtype) for dtype in ("float16", "float32")]
    return found


def memory() -> list[Workload]:
    """One sequence of up to 65,536 tokens: bytes beyond operands and results."""
    lengths = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
    return [Workload(Shape(1, seqlen, 16, 16, 128, 128, True)) for seqlen in lengths]


def spread(works: Sequence[Workload]) -> list[Workload]:
    """Every second sequence length first, so that a run that is cut short has seen all kinds of shapes."""
    lengths = sorted({work.shape.seqlen for work in works})
    order = lengths[1::2] + lengths[::2]
    return sorted(works, key=lambda work: order.index(work.shape.seqlen))


GRIDS = {"training": training, "gqa": gqa, "decode": decode, "features": features, "memory": memory}


# --- tensors ----------------------------------------------------------------------------------------------------------


@dataclass
class Operands:
    """The tensors of a workload, in attnlib's layout, and attnlib's arguments."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    arguments: dict[str, Any]
    cu_seqlens: torch.Tensor | None = None


def draw(work: Workload, device: torch.device, seed: int = 0) -> Operands:
    """Normal operands; a mask hides a tenth, packed sequences share the tokens unevenly."""
    s, dtype = work.shape, DTYPES[work.dtype]
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    q = normal(s.batch, work.queries, s.heads_q, s.head_dim)
    k, v = normal(s.batch, s.seqlen, s.heads_kv, s.head_dim), normal(s.batch, s.seqlen, s.heads_kv, s.head_dim_v)
    dout = normal(s.batch, work.queries, s.heads_q, s.head_dim_v)
    arguments: dict[str, Any] = {"causal": s.causal}
    cu_seqlens = None
    for name, value in work.options.items():
        if name == "block_density":
            blocks = (1, 1, -(-work.queries // 128), -(-s.seqlen // 128))
            visible = torch.rand(blocks, generator=generator, device=device) < value
            arguments["block_mask"] = attnlib.BlockMask(visible, 128, 128)
        elif name == "bias":
            arguments["bias"] = normal(1, s.heads_q, work.queries, s.seqlen)
        elif name == "mask":
            arguments["mask"] = torch.rand((1, 1, work.queries, s.seqlen), generator=generator, device=device) < 0.9
        elif name == "alibi":
            exponents = torch.arange(1, s.heads_q + 1, device=device, dtype=torch.float32)
            arguments["alibi_slopes"] = 2.0 ** (-8.0 * exponents / s.heads_q)
        elif name == "sinks":
            arguments["sinks"] = normal(s.heads_q, dtype=torch.float32)
        elif name == "packed":
            cu_seqlens = _uneven(s.batch, s.seqlen, device)
            q, k, v, dout = (x.flatten(0, 1) for x in (q, k, v, dout))
        else:
            arguments[name] = value
    if "dropout_p" in arguments:
        arguments["dropout_seed"] = torch.tensor([1234], device=device)
    return Operands(q, k, v, dout, arguments, cu_seqlens)


def _uneven(batch: int, seqlen: int, device: torch.device) -> torch.Tensor:
    """cu_seqlens of 4 sequences for each of batch, of a half, a quarter and two eighths of its tokens."""
    lens = [seqlen // part for _ in range(batch) for part in (2, 4, 8, 8)]
    return torch.tensor([0, *lens], device=device).cumsum(0).to(torch.int32)


ELEMENTS = 1 << 28  # of a matrix of scores, in float64, of which an oracle takes a dozen


def checkable(work: Workload) -> Workload:
    """The workload, with fewer tokens where the scores of one group of heads are too many for an oracle."""
    s, queries = work.shape, work.queries
    seqlen, group = s.seqlen, s.heads_q // s.heads_kv
    while group * queries * seqlen > ELEMENTS:
        seqlen //= 2
        queries = min(queries, seqlen)
    shape = dataclasses.replace(s, seqlen=seqlen)
    return Workload(shape, work.dtype, None if work.seqlen_q is None else queries, work.options)


def part(work: Workload, o: Operands) -> tuple[slice, slice, slice, Operands]:
    """What is judged of a call's results: rows (sequences; tokens where they are packed), query heads, key/value heads,
    and the operands of these alone. They are the last ones, the first where dropout counts from them."""
    s = work.shape
    group, scores = s.heads_q // s.heads_kv, work.queries * s.seqlen
    heads = max(1, min(s.heads_kv, 4 // group, ELEMENTS // (group * scores)))
    count = max(1, min(s.batch, 8, ELEMENTS // (group * heads * scores)))
    unit = 1 if o.cu_seqlens is None else s.seqlen  # a batch's tokens are four packed sequences
    first = "dropout_p" in work.options
    rows, kv, q = (slice(0, n) if first else slice(total - n, total) for n, total in (
        (count * unit, s.batch * unit), (heads, s.heads_kv), (heads * group, s.heads_q)))  # fmt: skip
    arguments = dict(o.arguments)
    if "bias" in arguments:
        arguments["bias"] = arguments["bias"][:, q]
    for name in ("alibi_slopes", "sinks"):
        if name in arguments:
            arguments[name] = arguments[name][q]
    tables = None
    if o.cu_seqlens is not None:
        ends = o.cu_seqlens[: 4 * count + 1] if first else o.cu_seqlens[-4 * count - 1 :]
        tables = ends - ends[0]
    operands = Operands(o.q[rows][..., q, :], o.k[rows][..., kv, :], o.v[rows][..., kv, :], o.dout[rows][..., q, :],
                        arguments, tables)  # fmt: skip
    return rows, q, kv, operands
