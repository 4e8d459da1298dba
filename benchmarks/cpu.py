"""The cpu backend against torch's flash attention on the CPU: python -m benchmarks.cpu

Six shapes, float32 and bfloat16, forward and backward, normal inputs; the median of interleaved rounds goes into
benchmarks/results/cpu.json. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from attnlib import bench

from . import record


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.cpu", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (default 7, at least 5 to be kept)")
    parser.add_argument("--backend", default="cpu", help="the backend measured (default cpu)")
    parser.add_argument("--shape", action="append", help='only this shape, e.g. "B1 S1024 H16 D64 causal"; repeatable')
    parser.add_argument("--dtype", action="append", choices=tuple(bench.DTYPES), help="only this dtype; repeatable")
    parser.add_argument("--math", action="store_true", help="measure torch's unfused path too")
    parser.add_argument("--dry", action="store_true", help="print, and write no file")
    options = parser.parse_args(arguments)
    shapes = [bench.Shape.parse(text) for text in options.shape] if options.shape else bench.CPU_SHAPES
    dtypes = options.dtype or ["float32", "bfloat16"]
    contenders = [bench.attnlib_contender(options.backend, "attnlib"), bench.sdpa_contender("flash")]
    if options.math:
        contenders.append(bench.sdpa_contender("math"))
    device = torch.device("cpu")
    console = Console(stderr=True)
    rows = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=2 * len(shapes) * len(dtypes))
        for row in bench.measure(shapes, dtypes, contenders, device=device, rounds=options.rounds):
            rows.append(row)
            shown = ", ".join(f"{name} {row.rate(name):.0f}" for name in row.seconds)
            progress.console.print(f"{row.shape} {row.dtype} {row.direction}: {shown} GFLOP/s", highlight=False)
            for name, reason in row.refused.items():
                progress.console.print(f"  {name} refused: {reason}", highlight=False)
            progress.advance(task)
    if options.dry:
        return 0
    if options.rounds < 5 or options.shape or options.dtype:
        print("not written: a kept result needs every shape and dtype and at least 5 rounds", file=sys.stderr)
        return 1
    value = {
        "benchmark": "cpu",
        **record.origin(device),
        "backend": options.backend,
        "rounds": options.rounds,
        "results": [row.record() for row in rows],
    }
    print(Path(record.write(record.cpu_name("cpu"), value)).relative_to(record.ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
