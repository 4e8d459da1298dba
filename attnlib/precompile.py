"""`attnlib compile`: fill kernel caches for architectures that need not be here.

    attnlib compile --arch sm_80,gfx942 --problems FILE
    attnlib compile --arch sm_90 --common --backend triton

Which backend compiles for an architecture is the first, in core's order, that knows it. A backend takes part by an
attribute `compiler`, the name of a module that holds a `Compiler`'s functions; it is imported only for this.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import importlib
import itertools
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import process
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch

from . import registry, settings
from .dispatch import DEFAULT_ORDER
from .errors import ArgumentError, UnsupportedError
from .problem import AttentionProblem, Window

Job = tuple[Any, str]  # a kernel, as its backend describes it, and the architecture to compile it for


@dataclass(frozen=True)
class Result:
    """What became of one job; error is empty unless it failed. seconds is 0 for a kernel that was in the cache.

    details: what else the backend knows of it.
    """

    entry: str
    arch: str
    registers: int = 0
    spills: int = 0
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0
    path: str | None = None
    error: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)


class Compiler(Protocol):
    """What a backend's module offers."""

    def arch_of(self, word: str) -> str | None:
        """The architecture that a word of --arch means; None if it is not one of this backend's."""

    def missing(self) -> str:
        """What compiling needs and is not here; empty if nothing is."""

    def jobs(self, problem: AttentionProblem, arch: str) -> list[Job]:
        """The kernels that plans for a problem launch. Raises UnsupportedError where the backend refuses it."""

    def compile_all(self, jobs: Sequence[Job], workers: int | None = None) -> Iterator[tuple[int, Result]]:
        """Results with their places in jobs, as they come. A job that fails is a Result with error, never raised."""

    def folder(self) -> tuple[Path | None, str]:
        """Where kernels are kept; or None, and why they are not."""


# --- the command ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: `attnlib compile ...`."""
    parser = argparse.ArgumentParser(prog="attnlib compile", description="Fill a kernel cache; needs no GPU.")
    parser.add_argument("--arch", required=True, metavar="A,B", help="architectures, as in sm_80,sm_90a,gfx942")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--problems", metavar="FILE", help="a JSON list of problems: objects with AttentionProblem's fields"
    )
    which.add_argument("--common", action="store_true", help="what most models ask for")
    parser.add_argument("--backend", help="the backend whose kernels to compile (default: the first for each arch)")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes; all cores by default")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    try:
        chosen = choose(options.arch, options.backend)
        problems = common_problems() if options.common else read_problems(options.problems)
    except ArgumentError as error:
        parser.error(str(error))
    return run(chosen, problems, workers=options.jobs, as_json=options.json)


def choose(text: str, backend: str | None = None) -> dict[str, Compiler]:
    """The compiler of each architecture in a list as "sm_80,gfx942". Raises ArgumentError for what is not known."""
    compilers = _compilers(backend)
    chosen: dict[str, Compiler] = {}
    for word in filter(None, (word.strip() for word in text.split(","))):
        known = [(arch, compiler) for compiler in compilers.values() if (arch := compiler.arch_of(word)) is not None]
        if not known:
            raise ArgumentError(f"--arch: needs an architecture of {' or '.join(compilers)}, got {word!r}")
        chosen.setdefault(*known[0])
    if not chosen:
        raise ArgumentError("--arch: needs at least one architecture, as in sm_80,gfx942")
    return chosen


def _compilers(backend: str | None) -> dict[str, Compiler]:
    """By the backends' names, in core's order."""
    order = [*DEFAULT_ORDER["cuda"], *DEFAULT_ORDER["rocm"]]
    modules = {
        entry.name: module for entry in registry.entries() if (module := getattr(entry.backend, "compiler", None))
    }
    if backend is not None and backend not in modules:
        raise ArgumentError(f"--backend: needs one of {', '.join(sorted(modules))}, got {backend!r}")
    names = sorted(modules, key=lambda name: order.index(name) if name in order else len(order))
    found: dict[str, Any] = {n: importlib.import_module(modules[n]) for n in names if backend in (None, n)}
    return found


def run(
    chosen: Mapping[str, Compiler],
    problems: Sequence[AttentionProblem],
    *,
    workers: int | None = None,
    as_json: bool = False,
    out: TextIO | None = None,
) -> int:
    """Compile every kernel that plans for problems launch, on the architectures that are chosen's keys.

    The exit status: 0 if all are in the cache now, those of problems that are refused left out; 2 without a compiler.
    """
    out = out or sys.stdout
    started = time.perf_counter()
    results: list[Result] = []
    refused: list[str] = []
    folders: dict[str, str | None] = {}
    for compiler in dict.fromkeys(chosen.values()):
        if missing := compiler.missing():
            print(f"attnlib compile: {missing}", file=sys.stderr)
            return 2
        jobs: dict[Job, None] = {}
        for arch, problem in itertools.product((a for a, own in chosen.items() if own is compiler), problems):
            try:
                jobs |= dict.fromkeys(compiler.jobs(problem, arch))
            except UnsupportedError as error:
                refused.append(f"{arch}: {error}")
        with progress(len(jobs), "compiling", quiet=as_json) as advance:
            for _, result in compiler.compile_all(list(jobs), workers):
                results.append(result)
                advance(f"{result.entry} {result.arch}")
        folder, why = compiler.folder()
        folders[str(folder)] = None
        if folder is None:
            print(f"attnlib compile: nothing was kept: {why}", file=sys.stderr)
    results.sort(key=lambda result: (result.arch, result.entry, result.path or ""))
    failed = [result for result in results if result.error]
    summary = {
        "cache": ", ".join(folders),
        "archs": list(chosen),
        "kernels": len(results),
        "compiled": sum(result.seconds > 0 for result in results),
        "failed": len(failed),
        "refused": len(refused),
        "seconds": round(time.perf_counter() - started, 2),
    }
    if as_json:
        json.dump({**summary, "refusals": refused, "results": [dataclasses.asdict(r) for r in results]}, out, indent=1)
        out.write("\n")
    else:
        for line in dict.fromkeys(refused):
            print(f"refused: {line}", file=out)
        for result in failed:
            print(f"failed: {result.entry} for {result.arch}: {result.error}", file=out)
        print(
            f"{summary['kernels']} kernels for {', '.join(chosen)}: {summary['compiled']} compiled, "
            f"{summary['failed']} failed, {summary['seconds']} s, in {summary['cache']}",
            file=out,
        )
    return 1 if failed or "None" in folders or not results else 0


def in_processes(
    compile_one: Callable[[Job], Result],
    jobs: Sequence[Job],
    workers: int | None,
    start: Callable[..., None],
    *values: Any,
) -> Iterator[tuple[int, Result]]:
    """Compiler.compile_all by a function for one job; start(settings, *values) readies each process."""
    count = min(workers or os.cpu_count() or 1, len(jobs))
    if count <= 1:
        for place, job in enumerate(jobs):
            yield place, compile_one(job)
        return
    context = multiprocessing.get_context("spawn")  # the caller may have threads, and torch certainly has
    with concurrent.futures.ProcessPoolExecutor(count, context, start, (settings.current(), *values)) as pool:
        pending = {pool.submit(compile_one, job): place for place, job in enumerate(jobs)}
        for future in concurrent.futures.as_completed(pending):
            place = pending[future]
            try:
                yield place, future.result()
            except process.BrokenProcessPool as error:
                yield place, Result(repr(jobs[place][0]), jobs[place][1], error=f"a compiling process died: {error}")


def start_process(values: settings.Settings) -> None:
    """What is in force here, in a process that compiles."""
    settings.override(**dataclasses.asdict(values)).__enter__()  # for the life of the process


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


# --- problems ---------------------------------------------------------------------------------------------------------


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
