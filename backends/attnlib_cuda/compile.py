"""Fill a kernel cache without a GPU: `attnlib compile --arch sm_80,sm_90a --problems FILE|--common`.

Processes, not threads: NVRTC serialises inside one. `run` is the command; `compile_all` serves ci/compile_matrix too.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import process
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from attnlib import settings
from attnlib.errors import ArgumentError, AttnlibError
from attnlib.problem import AttentionProblem, Window

from . import cache, device, jit, nvrtc, sources
from .jit import KernelSpec

Job = tuple[KernelSpec, str]  # what to compile, and for which architecture


@dataclass(frozen=True)
class Result:
    """What became of one job; error is empty unless it failed. seconds is 0 for a kernel that was in the cache."""

    entry: str
    arch: str
    registers: int = 0
    spills: int = 0
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0
    path: str | None = None
    error: str = ""


def run(
    archs: Sequence[str],
    problems: Sequence[AttentionProblem],
    *,
    workers: int | None = None,
    as_json: bool = False,
    out: TextIO | None = None,
) -> int:
    """Compile every kernel that plans for problems launch on archs; the exit status, 0 if all are in the cache now."""
    out = out or sys.stdout
    from . import config  # the kernels' module is found only when there is something to compile

    jobs = unique((spec, arch) for arch in archs for problem in problems for spec in config.kernels(problem, arch))
    started = time.perf_counter()
    try:
        nvrtc.find()
    except nvrtc.NvrtcMissing as error:
        print(f"attnlib compile: {error}", file=sys.stderr)
        return 2
    results = []
    with progress(len(jobs), "compiling", quiet=as_json) as advance:
        for _, result in compile_all(jobs, workers):
            results.append(result)
            advance(f"{result.entry} {result.arch}")
    results.sort(key=lambda result: (result.arch, result.entry, result.path or ""))
    folder = cache.store().write
    failed = [result for result in results if result.error]
    summary = {
        "cache": None if folder is None else str(folder),
        "archs": list(archs),
        "kernels": len(results),
        "compiled": sum(result.seconds > 0 for result in results),
        "failed": len(failed),
        "seconds": round(time.perf_counter() - started, 2),
    }
    if as_json:
        json.dump({**summary, "results": [dataclasses.asdict(result) for result in results]}, out, indent=1)
        out.write("\n")
    else:
        for result in failed:
            print(f"failed: {result.entry} for {result.arch}: {result.error}", file=out)
        print(
            f"{summary['kernels']} kernels for {', '.join(archs)}: {summary['compiled']} compiled, "
            f"{summary['failed']} failed, {summary['seconds']} s, in {folder or 'no folder'}",
            file=out,
        )
    if folder is None:
        print(f"attnlib compile: nothing was kept: {cache.store().why}", file=sys.stderr)
    return 1 if failed or folder is None else 0


def unique(jobs: Iterable[Job]) -> list[Job]:
    """Each kernel once, in the order of its first appearance."""
    return list(dict.fromkeys(jobs))


def compile_all(jobs: Sequence[Job], workers: int | None = None) -> Iterator[tuple[int, Result]]:
    """Results with their places in jobs, as they come. A job that fails is a Result with error, never an exception."""
    count = min(workers or os.cpu_count() or 1, len(jobs))
    if count <= 1:
        for place, job in enumerate(jobs):
            yield place, _compile_one(job)
        return
    context = multiprocessing.get_context("spawn")  # the caller may have threads, and torch certainly has
    chosen = (sources.chosen(), settings.current())
    with concurrent.futures.ProcessPoolExecutor(count, context, _start_worker, chosen) as pool:
        pending = {pool.submit(_compile_one, job): place for place, job in enumerate(jobs)}
        for future in concurrent.futures.as_completed(pending):
            place = pending[future]
            try:
                yield place, future.result()
            except process.BrokenProcessPool as error:
                spec, arch = jobs[place]
                yield place, Result(spec.entry, arch, error=f"a compiling process died: {error}")


def _start_worker(folder: Path | None, values: settings.Settings) -> None:
    if folder is not None:
        sources.use(folder)
    settings.override(**dataclasses.asdict(values)).__enter__()  # for the life of the process


def _compile_one(job: Job) -> Result:
    spec, arch = job
    try:
        with settings.override(jit="auto"):  # to compile is what was asked for
            made = jit.compile(spec, arch)
    except (AttnlibError, TypeError, ValueError) as error:
        return Result(spec.entry, arch, error=str(error))
    path = None if made.path is None else str(made.path)
    return Result(spec.entry, arch, made.registers, made.spills, made.warnings, round(made.seconds, 3), path)


@contextlib.contextmanager
def progress(total: int, what: str, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal's standard error; nothing elsewhere, or without rich."""
    try:
        if quiet or not sys.stderr.isatty():
            raise ImportError
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        yield lambda _: None
        return
    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[now]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total, now="")
        yield lambda text: bar.update(task, advance=1, now=text)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: `attnlib compile ...`."""
    parser = argparse.ArgumentParser(prog="attnlib compile", description="Fill a kernel cache; needs no GPU.")
    parser.add_argument("--arch", required=True, metavar="A,B", help="architectures, as in sm_80,sm_90a")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--problems", metavar="FILE", help="a JSON list of problems: objects with AttentionProblem's fields"
    )
    which.add_argument("--common", action="store_true", help="what most models ask for")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes; all cores by default")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    try:
        archs = parse_archs(options.arch)
        problems = common_problems() if options.common else read_problems(options.problems)
    except ArgumentError as error:
        parser.error(str(error))
    return run(archs, problems, workers=options.jobs, as_json=options.json)


def parse_archs(text: str) -> list[str]:
    """The list that "sm_80,sm_90" means: sm_80, sm_90a. Raises ArgumentError naming what is not known."""
    archs = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        arch = device.compile_arch(word)
        if arch is None or arch.rstrip("a") != word.rstrip("a"):
            raise ArgumentError(f"--arch: needs sm_{device.MIN_CAPABILITY} or later that NVRTC knows, got {word!r}")
        archs.append(arch)
    if not archs:
        raise ArgumentError("--arch: needs at least one architecture, as in sm_80,sm_90a")
    return list(dict.fromkeys(archs))


def read_problems(path: str | os.PathLike[str]) -> list[AttentionProblem]:
    """Problems from a JSON list of objects with AttentionProblem's fields. Raises ArgumentError."""
    try:
        records = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"--problems: {path}: {error}") from error
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise ArgumentError(f"--problems: {path}: needs a list of objects")
    return [problem_of(record, f"{path}, problem {place}") for place, record in enumerate(records)]


def problem_of(record: Mapping[str, Any], where: str) -> AttentionProblem:
    """{"dtype": "float16", "batch": 1, ..., "window": [null, 0]} as a problem; scale defaults to 1/sqrt(head_dim)."""
    known = {item.name for item in dataclasses.fields(AttentionProblem)}
    if unknown := sorted(set(record) - known):
        raise ArgumentError(f"{where}: unknown field {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    values = dict(record)
    values.setdefault("head_dim_v", values.get("head_dim"))
    values.setdefault("num_heads_kv", values.get("num_heads_q"))
    try:
        values.setdefault("scale", 1.0 / math.sqrt(values["head_dim"]))
        for name in ("dtype", "bias", "sinks"):
            if isinstance(values.get(name), str):
                values[name] = _dtype(values[name])
        for name, make in (("window", Window._make), ("block_mask", tuple), ("grads", tuple)):
            if isinstance(values.get(name), list):
                values[name] = make(values[name])
        return AttentionProblem(**values)
    except (KeyError, TypeError, ValueError) as error:
        raise ArgumentError(f"{where}: {error}") from error


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return found


def common_problems() -> list[AttentionProblem]:
    """What most models ask for: half types, head_dim 64 and 128, full and causal, training, prefill and decoding."""
    problems = []
    for dtype, head_dim in itertools.product((torch.float16, torch.bfloat16), (64, 128)):
        base = AttentionProblem(dtype, 2, 4096, 4096, 16, 4, head_dim, head_dim, 1.0 / math.sqrt(head_dim))
        for window, heads, grads in itertools.product((Window(), Window(right=0)), (4, 16), ((), ("q", "k", "v"))):
            problems.append(dataclasses.replace(base, window=window, num_heads_kv=heads, grads=grads))
        packed = dataclasses.replace(base, window=Window(right=0), packed=True, total_q=8192, total_k=8192)
        problems += [packed, dataclasses.replace(packed, grads=("q", "k", "v"))]
        step = dataclasses.replace(base, seqlen_q=1, total_q=2, lengths=True)
        problems += [step, dataclasses.replace(step, page_size=64), dataclasses.replace(step, append=True)]
    return problems
