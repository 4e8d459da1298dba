"""Tiles by the clock: what ATTNLIB_AUTOTUNE=1 asks for.

Without it config.py chooses, a pure function. With it the first call of a form times the tiles that fit, on its own
operands and into results that are thrown away; the fastest are kept in the cache, for every process that asks. A form
is all that decides which tiles fit or are fast (`key_of`). What cannot be timed has config.py's, and no call fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import statistics
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import attnlib
from attnlib import settings
from attnlib.problem import AttentionProblem
from attnlib_cuda import cache

from . import config
from .archs import Arch
from .config import Launch, Shape

RESULTS = {"forward": ("out", "lse", "stats"), "query_gradient": ("dq", "dbias"), "key_gradient": ("dk", "dv")}
_WARM, _TIMED = 2, 5  # calls of each shape: the first compiles, the second keeps what it launches
_AHEAD = 200_000  # cycles that the device waits, so that launches are queued when the clock starts
_log = logging.getLogger("attnlib.jit")

Choice = tuple[Any, Launch]
Trial = Callable[[Shape], Callable[[], None]]

_decided: dict[tuple[settings.Settings, str], Choice] = {}  # after a failure the table's
_timing = threading.Lock()


class Asked(NamedTuple):
    """A kernel of a call. maps: the copy engine can fetch its operands; aligned, wide, small: as in launch.Spec."""

    kernel: str
    problem: AttentionProblem
    arch: Arch
    device: int
    maps: bool
    aligned: bool
    wide: bool
    small: bool
    stores: bool = False  # the gradient of a bias, beside dq's


def choose(asked: Asked, table: Choice, prepare: Callable[[], Trial]) -> Choice | None:
    """A kernel's configuration. None: not decided, since nothing can be timed while a graph is captured.

    table: what config.py chooses. prepare: allocates results, and returns what makes a call of a shape.
    """
    place = settings.current(), key_of(asked)
    found = _decided.get(place)
    if found is not None:
        return found
    if place[0].jit == "never":
        return _decided.setdefault(place, _stored(asked) or table)
    if torch.cuda.is_current_stream_capturing():
        return _stored(asked)
    with _timing:
        found = _decided.get(place)
        if found is None:
            stored = _stored(asked)
            if stored is not None and _runs(stored, prepare):
                found = stored
            else:
                found = _measured(asked, table, prepare, replace=stored is not None)
            _decided[place] = found
    return found


def tell(asked: Asked, table: Choice) -> tuple[Choice, str]:
    """What the next call would have, and where that is from."""
    place = settings.current(), key_of(asked)
    found = _decided.get(place) or _stored(asked)
    if found is None:
        return table, "table" if place[0].jit == "never" else "table, to be timed at the first call"
    return found, "table" if found == table and _stored(asked) is None else "timed"


@functools.lru_cache(256)
def key_of(asked: Asked) -> str:
    """What a choice holds for, as text: batch, lengths and windows to the next power of two, all else as it is."""
    p = asked.problem
    sizes = (p.batch, p.seqlen_q, p.seqlen_k, *((p.total_q, p.total_k) if p.packed else ()))
    told = {
        "kernel": [asked.kernel, *_versions()],
        "device": [_device_name(asked.device), *dataclasses.astuple(asked.arch)],
        "signature": [sorted(f.value for f in x) if isinstance(x, frozenset) else str(x) for x in p.signature],
        "sizes": [p.num_heads_q, p.num_heads_kv, *map(_up, sizes), *map(_up, p.window), config.rows(p), config.pack(p)],
        "operands": asked[4:],
    }
    return json.dumps(told)


def _up(length: int | None) -> int | None:
    return length if length is None or length < 1 else 1 << (length - 1).bit_length()


@functools.cache
def _device_name(index: int) -> str:
    return str(torch.cuda.get_device_name(index))


@functools.cache
def _versions() -> tuple[str, ...]:
    import triton

    package = Path(__file__).parent
    files = (*sorted((package / "kernels").glob("*.py")), package / "launch.py")
    return attnlib.__version__, triton.__version__, hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()


def _entry(asked: Asked) -> str:
    return f"triton-tiles-{hashlib.sha256(key_of(asked).encode()).hexdigest()[:32]}"


def _stored(asked: Asked) -> Choice | None:
    """What the cache holds; None if that is nothing, or nothing of use, of which one warning tells."""
    name = _entry(asked)
    try:
        if (found := cache.find(name)) is not None:
            return _made(asked, Shape(**json.loads(found[1]["tiles.json"])))
    except (KeyError, TypeError, ValueError):
        pass  # not what was written
    if any(os.path.lexists(root / name) for root in cache.store().read):
        cache.warn("tiles", "tiles that were timed cannot be read, and are timed again")
    return None


def _made(asked: Asked, shape: Shape) -> Choice:
    """The configuration with a shape; ValueError if it does not fit."""
    if asked.kernel == "forward":
        return config.forward(asked.problem, asked.arch, shape._asdict())
    return config.gradient(asked.problem, asked.arch, asked.kernel, shape._asdict())


def _shape(choice: Choice) -> Shape:
    c, with_ = choice
    return Shape(c.block_m, c.block_n, with_.warps, with_.stages, with_.registers, c.maps)


def candidates(asked: Asked, table: Choice) -> list[Shape]:
    """The tiles that are timed first, the table's at their head: all with its stages, and its way to fetch."""
    (c, with_), p, forward = table, asked.problem, asked.kernel == "forward"
    most = 64 * 64 if c.single else 128 * 128 if forward else 128 * 64
    rows = (32, 64, 128) if not forward else (64, 128) if config.rows(p) == 128 else (config.rows(p),)
    found = [_shape(table)]
    for m, n in ((m, n) for m in rows for n in (32, 64, 128) if m * n <= most):
        warps = 8 if m * n * max(64, p.head_dim, p.head_dim_v) > 128 * 64 * 64 else 4
        found.append(Shape(m, n, warps, with_.stages, 0, c.maps))
    return _fitting(asked, found)


def variants(asked: Asked, shape: Shape) -> list[Shape]:
    """What is timed then: the fastest tile, with other stages and the other way to fetch."""
    stages = {1, shape.stages} if asked.arch.amd else {2, 3, shape.stages}
    ways = [(s, maps) for s in sorted(stages) for maps in sorted({shape.maps, asked.maps})]
    return _fitting(asked, [shape, *(shape._replace(stages=s, maps=maps, registers=0) for s, maps in ways)])


def _fitting(asked: Asked, shapes: list[Shape]) -> list[Shape]:
    found: list[Shape] = []
    for shape in dict.fromkeys(shapes):
        with contextlib.suppress(ValueError):
            _made(asked, shape)
            found.append(shape)
    return found


def _measured(asked: Asked, table: Choice, prepare: Callable[[], Trial], replace: bool) -> Choice:
    """The fastest, kept in the cache unless another process was there before: then that one's, so that all have the
    same; the table's if nothing could be timed. replace: what is stored is of no use."""
    first = _shape(table)
    try:
        trial = prepare()
    except Exception:
        return table
    seconds, failed = _timed(candidates(asked, table), trial)
    if seconds:
        again, why = _timed(variants(asked, min(seconds, key=lambda shape: seconds[shape])), trial)
        seconds, failed = {**seconds, **again} if again else {}, failed + why
    if "jit" in settings.current().log:
        _log.info("triton: %s: timed %s; failed: %s", asked.kernel, seconds, failed)
    if not seconds:
        return table
    # what is within the clock's noise does not differ from process to process
    best = min(seconds, key=lambda shape: seconds[shape] * (0.98 if shape == first else 1.0))
    notes = {"key": key_of(asked), "seconds": [[*shape, own] for shape, own in seconds.items()], "failed": failed}
    own = table if best == first else _made(asked, best)
    replace = replace or (cache.find(_entry(asked)) is not None and _stored(asked) is None)
    cache.publish(_entry(asked), {"tiles.json": json.dumps(best._asdict()).encode()}, notes, replace=replace)
    return own if replace else _stored(asked) or own


def _runs(choice: Choice, prepare: Callable[[], Trial]) -> bool:
    """Whether a choice that was stored can be launched here. Memory that runs out says nothing about it."""
    try:
        _seconds(prepare()(_shape(choice)))
    except Exception as error:
        return _is_memory(error)
    return True


def _is_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


def _timed(shapes: list[Shape], trial: Trial) -> tuple[dict[Shape, float], list[str]]:
    """Seconds of a call by shape, the median of some; none if memory runs out. And why others failed."""
    calls: dict[Shape, Callable[[], None]] = {}
    samples: dict[Shape, list[float]] = {shape: [] for shape in shapes}
    failed = []
    for shape in shapes * (_WARM + _TIMED):
        try:
            if shape in samples:
                calls[shape] = calls.get(shape) or trial(shape)
                samples[shape].append(_seconds(calls[shape]))
        except Exception as error:
            if _is_memory(error):
                return {}, [str(error)]
            del samples[shape]
            failed.append(f"{tuple(shape)}: {error}")
    return {shape: statistics.median(own[_WARM:]) for shape, own in samples.items()}, failed


def _seconds(call: Callable[[], None]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_AHEAD)
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3
