"""Decoding on the cpu backend against the bandwidth of memory: python -m benchmarks.cpu_decode

One query, 32 query and 8 key/value heads of 128, a cache in one piece and in pages of 64 tokens in random order. What
counts is the bytes of K and V over the time; the yardstick is torch's maximum over the same bytes as int32, in the
same round. The medians go into benchmarks/results/cpu_decode.json. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from attnlib import attention_kvcache, bench

from . import record

HEADS, HEADS_KV, DIM, PAGE = 32, 8, 128, 64
SIZES = ((1, 4096), (1, 16384), (1, 65536), (8, 4096), (8, 16384), (8, 65536))


def calls(batch: int, seqlen: int, dtype: torch.dtype) -> tuple[int, dict[str, Callable[[], Any]]]:
    """Bytes of K and V, and what is timed."""
    q = torch.randn(batch, 1, HEADS, DIM).to(dtype)
    k, v = (torch.randn(1, seqlen, HEADS_KV, DIM).to(dtype).repeat(batch, 1, 1, 1) for _ in range(2))
    lens = torch.full((batch,), seqlen, dtype=torch.int32)
    pages = [x.view(-1, PAGE, HEADS_KV, DIM) for x in (k, v)]
    table = torch.randperm(batch * seqlen // PAGE).to(torch.int32).view(batch, -1)
    words = [x.view(torch.int32) for x in (k, v)]
    return 2 * k.numel() * k.element_size(), {
        "reading": lambda: [x.amax() for x in words],
        "attnlib": lambda: attention_kvcache(q, k, v, lens, causal=True, backend="cpu"),
        "attnlib paged": lambda: attention_kvcache(
            q, pages[0], pages[1], lens, page_table=table, causal=True, backend="cpu"
        ),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.cpu_decode", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds (default 9, at least 5 to be kept)")
    parser.add_argument("--most", type=int, default=8 * 65536, help="leave out larger caches, in tokens")
    parser.add_argument("--dry", action="store_true", help="print, and write no file")
    options = parser.parse_args(arguments)
    timer = bench.Timer(torch.device("cpu"))
    results = []
    for dtype in ("float32", "bfloat16"):
        for batch, seqlen in SIZES:
            if batch * seqlen > options.most:
                continue
            size, timed = calls(batch, seqlen, bench.DTYPES[dtype])
            counts = {name: timer.calls_per_sample(call) for name, call in timed.items()}
            seconds: dict[str, list[float]] = {name: [] for name in timed}
            for _ in range(options.rounds):
                for name, call in timed.items():
                    seconds[name].append(timer.sample(call, counts[name]))
            rates = {name: round(size / statistics.median(found) * 1e-9, 2) for name, found in seconds.items()}
            shares = {
                name: round(statistics.median(b / a for a, b in zip(seconds[name], seconds["reading"])), 3)
                for name in timed
                if name != "reading"
            }
            results.append({"dtype": dtype, "batch": batch, "seqlen_k": seqlen, "gbs": rates, "share": shares})
            print(f"B{batch} Sk{seqlen} {dtype}: GB/s {rates}, of reading {shares}", flush=True)
            timed.clear()
    if options.dry:
        return 0
    if options.rounds < 5 or options.most < 8 * 65536:
        print("not written: a kept result needs every size and at least 5 rounds", file=sys.stderr)
        return 1
    value = {"benchmark": "cpu_decode", **record.origin(torch.device("cpu")), "rounds": options.rounds,
             "results": results}  # fmt: skip
    print(record.write(record.cpu_name("cpu_decode"), value).relative_to(record.ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
