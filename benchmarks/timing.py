"""Interleaved rounds on a GPU, what they come to, and the ceilings of the card in the same run."""

from __future__ import annotations

import math
import random
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from attnlib.bench import Call, Timer


def rounds(timer: Timer, calls: Mapping[str, Call], count: int, seed: int = 0) -> dict[str, list[float]]:
    """Seconds per call, one sample a round for each name; the order is drawn anew for each round."""
    counts = {name: timer.calls_per_sample(call) for name, call in calls.items()}
    found: dict[str, list[float]] = {name: [] for name in calls}
    order, dice = list(calls), random.Random(seed)
    for _ in range(count):
        dice.shuffle(order)
        for name in order:
            found[name].append(timer.sample(calls[name], counts[name]))
    return found


def ratio(mine: Sequence[float], theirs: Sequence[float]) -> float:
    """How much faster mine is: the median over rounds of theirs / mine of the same round."""
    return statistics.median(b / a for a, b in zip(mine, theirs, strict=True))


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def ceilings(device: torch.device) -> dict[str, float]:
    """TFLOP/s of a bfloat16 matrix product of 8192^3 and TB/s (read plus written) of a copy, on random data."""
    timer = Timer(device, 0.2)
    size = 8192
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    calls = timer.calls_per_sample(lambda: a @ b)
    product = min(timer.sample(lambda: a @ b, calls) for _ in range(3))  # the first one wakes the clocks
    source = torch.randn(1 << 29, device=device)
    target = torch.empty_like(source)
    copy = timer.sample(lambda: target.copy_(source), 10)
    return {
        "matmul_tflops": round(2.0 * size**3 / product * 1e-12, 1),
        "copy_tbs": round(2.0 * source.numel() * source.element_size() / copy * 1e-12, 3),
    }


# TFLOP/s on a card that nothing slows: what `ceilings` finds after it has idled (781 to 794 on several days), and
# products one after the other at its power limit (benchmarks/results/h200_ceilings.json), below which `ceilings` does
# not fall. A card that has just worked reads less than the first: let it idle before a run.
MATMUL = {"NVIDIA H200": (788.0, 684.0)}


def slowed(gpu: str, before: Mapping[str, float], after: Mapping[str, float] | None = None) -> str:
    """Why a run with these ceilings has to be repeated, a matrix product being 5 % off; "" if it has not."""
    if gpu not in MATMUL:
        return ""
    cold, warm = MATMUL[gpu]
    found = before["matmul_tflops"]
    if abs(found / cold - 1) > 0.05:
        return f"a matrix product reached {found:.0f} TFLOP/s before the run, and {cold:.0f} is usual on an {gpu}"
    if after is not None and after["matmul_tflops"] < 0.95 * warm:
        found = after["matmul_tflops"]
        return f"a matrix product reached {found:.0f} TFLOP/s after the run, and {warm:.0f} is usual on an {gpu}"
    return ""


def driver() -> str:
    """The driver's version, "" where nvidia-smi does not say."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def extra_bytes(call: Call, device: torch.device) -> int:
    """The most bytes that were allocated during a call beyond those before it, results included."""
    call()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    kept: Any = call()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    del kept
    return peak - before
