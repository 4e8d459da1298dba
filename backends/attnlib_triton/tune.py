"""Tile shapes chosen by the clock: asked for by ATTNLIB_AUTOTUNE, kept in the cache's folder, a file for each.

Without it config.py chooses, a pure function. With it the first call of a form times some of the shapes that fit, on
the tensors of that call (a backward on copies of its results), and every process with the same cache finds the
fastest again. What is timed differs in the order of sums alone, so results differ by rounding.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from attnlib import settings
from attnlib.problem import AttentionProblem

from . import config, launch
from .archs import Arch, interpreted

REPEATS = 5
_TILES = ((64, 64), (128, 64), (64, 128), (128, 128), (64, 32), (32, 64), (128, 32), (32, 128))
_log = logging.getLogger("attnlib.jit")

Shape = dict[str, Any]


def wanted() -> bool:
    """Whether shapes are to be found by timing, here and now."""
    now = settings.current()
    if not now.autotune or now.jit == "never":
        return False
    return interpreted() or not torch.cuda.is_current_stream_capturing()


def _class(length: int | None) -> int | None:
    """A length to the next power of two."""
    return None if length is None else 1 << max(0, length - 1).bit_length()


def key_of(problem: AttentionProblem, arch: Arch, kernel: str) -> str:
    """What a choice was made for, as text."""
    import triton

    told = {
        "arch": arch.name, "triton": triton.__version__, "kernel": kernel, "signature": repr(problem.signature),
        "lengths": [_class(n) for n in (problem.seqlen_q, problem.seqlen_k)], "batch": problem.batch,
        "heads": [problem.num_heads_q, problem.num_heads_kv], "window": [_class(n) for n in problem.window],
    }  # fmt: skip
    return json.dumps(told, sort_keys=True)


def _path(key: str) -> Path:
    return launch.cache_folder().parent / "triton-tuned" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def found(problem: AttentionProblem, arch: Arch, kernel: str) -> Shape | None:
    """The shape that was kept, None if there is none that can be read."""
    key = key_of(problem, arch, kernel)
    try:
        held = json.loads(_path(key).read_text(encoding="utf-8"))
        shape = held["shape"] if held["key"] == key else None
        return dict(shape) if isinstance(shape, dict) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def keep(
    problem: AttentionProblem, arch: Arch, kernel: str, shape: Shape, times: Sequence[tuple[Shape, float]]
) -> None:
    """Write a choice; a folder that can't be written is no error, the next process times again."""
    key = key_of(problem, arch, kernel)
    path = _path(key)
    value = {"key": key, "shape": shape, "milliseconds": [[one, round(1e3 * t, 5)] for one, t in times]}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=1)
        os.replace(name, path)
    except OSError as error:
        _log.info("triton: a choice of tiles was not kept: %s", error)


def candidates(problem: AttentionProblem, arch: Arch, kernel: str) -> list[Shape]:
    """Shapes to be timed, as config.py takes them: the one of the table first, then others that fit."""
    make: Callable[..., Any] = config.forward if kernel == "forward" else config.gradient
    arguments = (problem, arch) if kernel == "forward" else (problem, arch, kernel)

    def shape_of(wanted: Mapping[str, Any]) -> Shape | None:
        try:
            c, with_ = make(*arguments, wanted)
        except ValueError:
            return None
        return {
            "block_m": c.block_m, "block_n": c.block_n, "warps": with_.warps, "stages": with_.stages,
            "registers": with_.registers, "maps": c.maps,
        }  # fmt: skip

    first = shape_of({})
    assert first is not None
    shapes = [first]
    maps = (False, True) if config.mappable(problem, arch) else (False,)
    stages = (1,) if arch.amd or interpreted() else (2, 3)
    for m, n in _TILES:
        for count in stages:
            for mapped in maps:
                warps = 8 if m * n > 128 * 64 else 4
                asked = {"block_m": m, "block_n": n, "warps": warps, "stages": count, "registers": 0, "maps": mapped}
                one = shape_of(asked)
                if one is not None and one not in shapes:
                    shapes.append(one)
    return shapes


def fastest(shapes: Sequence[Shape], run: Callable[[Shape], Callable[[], None]], device: torch.device) -> Any:
    """The shape whose call takes the least, and the seconds of all that could be run. run: the call of a shape."""
    calls = []
    for shape in shapes:
        try:
            call = run(shape)
            call()  # compiles
        except Exception as error:  # a shape that does not compile or load is no candidate
            _log.info("triton: %s: %s", shape, error)
            continue
        calls.append((shape, call))
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(REPEATS):
        for place, (_, call) in enumerate(calls):
            samples[place].append(_seconds(call, device))
    times = [(shape, statistics.median(own)) for (shape, _), own in zip(calls, samples, strict=True)]
    return min(times, key=lambda each: each[1])[0] if times else None, times


def _seconds(call: Callable[[], None], device: torch.device) -> float:
    if device.type != "cuda":
        import time

        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3
