"""Measuring attention: shapes, floating-point operations, interleaved rounds, and what to say about the machine.

Used by `attnlib bench` and by the scripts in benchmarks/. A sample is the mean time of enough calls to fill
MIN_SAMPLE seconds; a figure is the median of one sample per round; within a round every contender runs once, so
that a machine that slows down for a while slows all of them.
"""

from __future__ import annotations

import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import attention
from .errors import ArgumentError

MIN_SAMPLE = 0.05
DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
Call = Callable[[], Any]


@dataclass(frozen=True)
class Shape:
    """The sizes of one measured call; str() and parse() use the form "B1 S1024 H16/4 D64/32 causal"."""

    batch: int
    seqlen: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool

    def __str__(self) -> str:
        heads = str(self.heads_q) if self.heads_q == self.heads_kv else f"{self.heads_q}/{self.heads_kv}"
        dims = str(self.head_dim) if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        return f"B{self.batch} S{self.seqlen} H{heads} D{dims} {'causal' if self.causal else 'full'}"

    @staticmethod
    def parse(text: str) -> Shape:
        """Raises ArgumentError that shows the form."""
        match = re.fullmatch(
            r"B(\d+)\s+S(\d+)\s+H(\d+)(?:/(\d+))?\s+D(\d+)(?:/(\d+))?(?:\s+(causal|full))?",
            text.strip().replace(",", " "),
            re.IGNORECASE,
        )
        if match is None:
            raise ArgumentError(f'shape: needs the form "B1 S1024 H16/4 D64 causal", got {text!r}')
        batch, seqlen, heads_q, heads_kv, dim, dim_v, kind = match.groups()
        return Shape(
            int(batch),
            int(seqlen),
            int(heads_q),
            int(heads_kv or heads_q),
            int(dim),
            int(dim_v or dim),
            (kind or "full").lower() == "causal",
        )

    def flops(self, direction: str) -> float:
        """2 B H Sq Sk (D + Dv) for the forward, half of it if causal, 2.5 times as much for the backward."""
        forward = 2.0 * self.batch * self.heads_q * self.seqlen**2 * (self.head_dim + self.head_dim_v)
        return forward * (0.5 if self.causal else 1.0) * (2.5 if direction == "backward" else 1.0)


CPU_SHAPES = tuple(
    Shape.parse(text)
    for text in (
        "B8 S128 H12 D64 full",
        "B1 S1024 H16 D64 full",
        "B1 S1024 H16 D64 causal",
        "B1 S4096 H8 D64 causal",
        "B1 S2048 H8 D128 causal",
        "B1 S4096 H8 D128 full",
    )
)
GPU_SHAPES = tuple(
    Shape.parse(text)
    for text in (
        "B16 S1024 H32 D64 full",
        "B16 S1024 H32 D64 causal",
        "B4 S4096 H16 D128 full",
        "B4 S4096 H16 D128 causal",
        "B2 S8192 H32/8 D128 causal",
        "B4 S4096 H8 D256 causal",
    )
)


@dataclass(frozen=True)
class Contender:
    """A way to compute attention. `make` gives (forward, backward) for a shape, or raises what refuses it."""

    name: str
    make: Callable[[Shape, torch.dtype, torch.device], tuple[Call, Call]]


def attnlib_contender(
    backend: str, name: str | None = None, options: Callable[[Shape, torch.device], dict[str, Any]] | None = None
) -> Contender:
    """attnlib on the named backend; `options` gives further keywords of attention for a shape."""

    def make(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Call, Call]:
        q, k, v, dout = operands(shape, dtype, device)
        more = options(shape, device) if options is not None else {}

        def run(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
            return attention(x, y, z, causal=shape.causal, backend=backend, **more)

        return both(run, q, k, v, dout)

    return Contender(name or f"attnlib {backend}", make)


def sdpa_contender(kernel: str | None = None) -> Contender:
    """torch's scaled_dot_product_attention: its own choice, or one of flash, math, efficient, cudnn."""

    def make(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Call, Call]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        q, k, v, dout = (x.transpose(1, 2).contiguous() for x in operands(shape, dtype, device))
        kinds = {
            "flash": SDPBackend.FLASH_ATTENTION,
            "math": SDPBackend.MATH,
            "efficient": SDPBackend.EFFICIENT_ATTENTION,
            "cudnn": SDPBackend.CUDNN_ATTENTION,
        }

        def run(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(
                x, y, z, is_causal=shape.causal, enable_gqa=shape.heads_q != shape.heads_kv
            )

        def chosen(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel(kinds[kernel]):  # type: ignore[index]
                return run(x, y, z)

        return both(run if kernel is None else chosen, q, k, v, dout)

    return Contender("torch SDPA" if kernel is None else f"torch {kernel}", make)


def operands(
    shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normal q, k, v and dout in attnlib's layout [batch, seqlen, heads, dim]."""
    generator = torch.Generator(device).manual_seed(seed)
    heads = ((shape.heads_q, shape.head_dim), (shape.heads_kv, shape.head_dim), (shape.heads_kv, shape.head_dim_v))
    sizes = [(shape.batch, shape.seqlen, count, dim) for count, dim in (*heads, (shape.heads_q, shape.head_dim_v))]
    q, k, v, dout = (torch.randn(size, generator=generator, device=device).to(dtype) for size in sizes)
    return q, k, v, dout


def both(
    run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
) -> tuple[Call, Call]:
    """A call of the forward without gradients, and one of the backward alone; both have run once."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = run(*leaves)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return run(q, k, v)

    def backward() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    forward()
    backward()
    return forward, backward


class Timer:
    """Seconds per call on one device. On a GPU the L2 cache is overwritten before each call and events are read."""

    def __init__(self, device: torch.device, min_sample: float = MIN_SAMPLE) -> None:
        self.device = device
        self.min_sample = min_sample
        gpu = device.type == "cuda"
        self._flush = torch.empty(256 << 20, dtype=torch.int8, device=device) if gpu else None

    def calls_per_sample(self, call: Call) -> int:
        """How many calls fill a sample, from one trial."""
        seconds = self.sample(call, 1)
        return max(1, min(10_000, round(self.min_sample / max(seconds, 1e-7))))

    def sample(self, call: Call, calls: int) -> float:
        """Mean (GPU: median) seconds of `calls` calls."""
        if self._flush is None:
            start = time.perf_counter()
            for _ in range(calls):
                call()
            return (time.perf_counter() - start) / calls
        events = []
        for _ in range(calls):
            self._flush.zero_()
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            pair[0].record()
            call()
            pair[1].record()
            events.append(pair)
        torch.cuda.synchronize(self.device)
        return statistics.median(start.elapsed_time(end) for start, end in events) * 1e-3


@dataclass(frozen=True)
class Row:
    """What one shape, dtype and direction took: samples in seconds by contender, and why a contender is absent."""

    shape: Shape
    dtype: str
    direction: str
    seconds: Mapping[str, Sequence[float]]
    refused: Mapping[str, str]

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def rate(self, name: str) -> float:
        """GFLOP/s."""
        return self.shape.flops(self.direction) / self.median(name) * 1e-9

    def record(self) -> dict[str, Any]:
        """For a JSON file."""
        return {
            "shape": str(self.shape),
            "dtype": self.dtype,
            "direction": self.direction,
            "gflops": {name: round(self.rate(name), 1) for name in self.seconds},
            "median_ms": {name: round(1e3 * self.median(name), 4) for name in self.seconds},
            "fastest_ms": {name: round(1e3 * min(samples), 4) for name, samples in self.seconds.items()},
            "slowest_ms": {name: round(1e3 * max(samples), 4) for name, samples in self.seconds.items()},
            "refused": dict(self.refused),
        }


def measure(
    shapes: Sequence[Shape],
    dtypes: Sequence[str],
    contenders: Sequence[Contender],
    *,
    device: torch.device,
    rounds: int = 5,
    directions: Sequence[str] = ("forward", "backward"),
    min_sample: float = MIN_SAMPLE,
) -> Iterator[Row]:
    """One Row per shape, dtype and direction, as soon as it is measured."""
    timer = Timer(device, min_sample)
    for shape in shapes:
        for dtype in dtypes:
            made: dict[str, tuple[Call, Call]] = {}
            refused: dict[str, str] = {}
            for contender in contenders:
                try:
                    made[contender.name] = contender.make(shape, DTYPES[dtype], device)
                except (NotImplementedError, RuntimeError) as error:
                    refused[contender.name] = str(error).strip().split("\n")[0]
            for direction in directions:
                index = ("forward", "backward").index(direction)
                calls = {name: pair[index] for name, pair in made.items()}
                counts = {name: timer.calls_per_sample(call) for name, call in calls.items()}
                seconds: dict[str, list[float]] = {name: [] for name in calls}
                for _ in range(rounds):
                    for name, call in calls.items():
                        seconds[name].append(timer.sample(call, counts[name]))
                yield Row(shape, dtype, direction, seconds, refused)


def machine(device: torch.device) -> dict[str, Any]:
    """What a reader has to know of the machine that a figure comes from."""
    found: dict[str, Any] = {"cpu": _cpu_name(), "threads": torch.get_num_threads(), "system": platform.system()}
    flags = _cpu_flags()
    found["isa"] = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def versions() -> dict[str, str]:
    """attnlib's, torch's and Python's version."""
    from . import __version__

    found = {"attnlib": __version__, "torch": torch.__version__, "python": platform.python_version()}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if torch.version.hip:
        found["hip"] = torch.version.hip
    return found


def _cpu_info() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _cpu_name() -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", _cpu_info(), re.MULTILINE)
    name = match.group(1).strip() if match else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


def _cpu_flags() -> frozenset[str]:
    match = re.search(r"^flags\s*:\s*(.+)$", _cpu_info(), re.MULTILINE)
    return frozenset(match.group(1).split()) if match else frozenset()
