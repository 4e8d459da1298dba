"""What a feature costs on the cpu backend, against the same call without it: python -m benchmarks.cpu_features

A block mask of 25 % density, dropout, a window, a bias. The median of interleaved rounds goes into
benchmarks/results/cpu_features.json. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console

from attnlib import BlockMask, bench

from . import record

SHAPE = bench.Shape.parse("B1 S4096 H8 D64 full")
Options = Callable[[bench.Shape, torch.device], dict[str, Any]]


def blocks(size: int, density: float) -> Options:
    """A block mask in which every row of blocks has the same share of True, at random places."""

    def options(shape: bench.Shape, device: torch.device) -> dict[str, Any]:
        count = shape.seqlen // size
        generator = torch.Generator(device).manual_seed(1)
        order = torch.rand(1, shape.heads_q, count, count, generator=generator, device=device).argsort(-1)
        return {"block_mask": BlockMask(order < round(density * count), size, size)}

    return options


def bias(shape: bench.Shape, device: torch.device) -> dict[str, Any]:
    return {"bias": torch.randn(1, shape.heads_q, shape.seqlen, shape.seqlen, device=device)}


FEATURES: dict[str, Options | None] = {
    "plain": None,
    "block mask 128x128, all True": blocks(128, 1.0),
    "block mask 128x128, 25 %": blocks(128, 0.25),
    "block mask 64x64, 25 %": blocks(64, 0.25),
    "block mask 16x16, 25 %": blocks(16, 0.25),
    "dropout 0.1": lambda shape, device: {"dropout_p": 0.1, "dropout_seed": 1},
    "window (256, 0)": lambda shape, device: {"window": (256, 0)},
    "bias [1, heads, seqlen, seqlen]": bias,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.cpu_features", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default 5, at least 5 to be kept)")
    parser.add_argument("--dry", action="store_true", help="print, and write no file")
    options = parser.parse_args(arguments)
    device = torch.device("cpu")
    console = Console(stderr=True)
    contenders = [bench.attnlib_contender("cpu", name, make) for name, make in FEATURES.items()]
    results = []
    for row in bench.measure([SHAPE], ["float32", "bfloat16"], contenders, device=device, rounds=options.rounds):
        plain = row.median("plain")
        console.print(f"{row.shape} {row.dtype} {row.direction}: plain {plain * 1e3:.1f} ms", highlight=False)
        for name in FEATURES:
            console.print(f"  {name:32} time / plain {row.median(name) / plain:.3f}", highlight=False)
        results.append(row.record())
    if options.dry:
        return 0
    if options.rounds < 5:
        print("not written: a kept result needs at least 5 rounds", file=sys.stderr)
        return 1
    value = {"benchmark": "cpu_features", **record.origin(device), "rounds": options.rounds, "results": results}
    print(record.write("cpu_features", value))
    return 0


if __name__ == "__main__":
    sys.exit(main())
