"""A few cases run and not judged, for tools that watch a run: python -m attnlib.conformance.exercise --backend cuda

    compute-sanitizer --tool memcheck python -m attnlib.conformance.exercise --backend cuda

The cases are small and reach every kernel: forward and backward, grouped heads, every mask, packed and paged layouts,
split keys, appending, dropout, and the bias's and the sinks' gradients, with and without deterministic=True.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from .. import settings
from ..errors import ArgumentError
from .cases import BF16, F16, F32, Case, named
from .recipes import make
from .subject import Refused, opened

SMALL = {"seqlen_q": 70, "seqlen_k": 97, "batch": 1}
CASES: tuple[tuple[Case, torch.dtype], ...] = (
    (Case("causal", causal=True, num_heads_q=4, head_dim=64, **SMALL), BF16),
    (Case("wide", head_dim=128, head_dim_v=96, window=(40, 3), **SMALL), F16),
    (Case("widest", head_dim=256, **SMALL), BF16),
    (Case("block_mask", block_mask=(64, 64), seqlen_q=200, seqlen_k=300, batch=1, head_dim=64), BF16),
    (Case("float32", causal=True, head_dim=64, **SMALL), F32),
    (Case("odd", head_dim=60, strides="misaligned", **SMALL), BF16),
    (replace(named("everything"), batch=1), BF16),
    (replace(named("everything-dropout"), batch=1), F32),
    (replace(named("everything-packed"), deterministic=True), BF16),
    (replace(named("bias_gradient"), batch=1, deterministic=True), BF16),
    (Case("lengths", causal=True, q_lens=(65, 1), kv_lens=(97, 0), deterministic=True), F16),
    (replace(named("decode-paged"), batch=3), BF16),
    (replace(named("prefill-append-paged"), batch=3), BF16),
    (Case("split", seqlen_q=3, seqlen_k=1100, batch=1, directions=("forward",)), BF16),
)


def exercise(backend: str, names: Sequence[str] = (), seconds: float = 1e9) -> list[str]:
    """Run the cases (those whose names are given) once; the names of those that were refused or left out."""
    until, missing = time.monotonic() + seconds, []
    with opened(backend) as subject, settings.override(debug=frozenset()):  # unwritten outputs stay so
        for case, dtype in CASES:
            if names and case.name not in names:
                continue
            if time.monotonic() > until:
                missing.append(case.name)
                continue
            start = time.monotonic()
            try:
                subject.run(make(case, dtype, subject.device, direction=case.directions[-1]))
            except Refused as refused:
                print(f"{case.name}: refused: {refused}", flush=True)
                missing.append(case.name)
                continue
            if subject.device.type == "cuda":
                torch.cuda.synchronize(subject.device)
            print(f"{case.name}: {time.monotonic() - start:.1f} s", flush=True)
    return missing


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m attnlib.conformance.exercise", description=__doc__.split("\n")[0])
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further case after so long")
    parser.add_argument("case", nargs="*", help=f"of {', '.join(case.name for case, _ in CASES)}; default all")
    options = parser.parse_args(arguments)
    try:
        missing = exercise(options.backend, options.case, options.seconds)
    except ArgumentError as error:
        print(error, file=sys.stderr)
        return 2
    if missing:
        print(f"not run: {', '.join(missing)}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
