"""What `attnlib compile` asks of this backend; `compile_all` serves ci/compile_matrix too.

Processes, not threads: NVRTC serialises inside one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attnlib import precompile, settings
from attnlib.errors import AttnlibError, UnsupportedError
from attnlib.precompile import Result
from attnlib.problem import AttentionProblem

from . import cache, device, jit, nvrtc, sources
from .jit import KernelSpec

Job = tuple[KernelSpec, str]  # what to compile, and for which architecture


def arch_of(word: str) -> str | None:
    """ "sm_90a" for "sm_90" or "sm_90a"; None for what is not known here."""
    arch = device.compile_arch(word)
    return arch if arch is not None and arch.rstrip("a") == word.rstrip("a") else None


def missing() -> str:
    """Why nothing can be compiled here; empty if it can."""
    try:
        nvrtc.find()
    except nvrtc.NvrtcMissing as error:
        return str(error)
    return ""


def jobs(problem: AttentionProblem, arch: str) -> list[Job]:
    """The kernels that plans for a problem launch, at this and on Hopper at any other length: tiles depend on it there.

    Raises UnsupportedError where no configuration fits.
    """
    from . import config, hopper_shapes  # the kernels' module is found only when there is something to compile

    problems = [problem]
    if arch == "sm_90a":
        for length in hopper_shapes.table().lengths():
            queries = length if problem.seqlen_q > 1 else problem.seqlen_q
            sizes: dict[str, Any] = {} if problem.packed else {"total_q": -1, "total_k": -1}
            problems.append(dataclasses.replace(problem, seqlen_q=queries, seqlen_k=length, **sizes))
    try:
        return list(dict.fromkeys((spec, arch) for one in problems for spec in config.kernels(one, arch)))
    except ValueError as error:
        raise UnsupportedError(f"cuda: {error}") from error


def folder() -> tuple[Path | None, str]:
    """Where kernels are kept; or None, and why they are not."""
    store = cache.store()
    return store.write, store.why


def compile_all(jobs: Sequence[Job], workers: int | None = None) -> Iterator[tuple[int, Result]]:
    """Results with their places in jobs, as they come. A job that fails is a Result with error, never an exception."""
    return precompile.in_processes(_compile_one, jobs, workers, _start_worker, sources.chosen())


def _start_worker(values: settings.Settings, folder: Path | None) -> None:
    if folder is not None:
        sources.use(folder)
    precompile.start_process(values)


def _compile_one(job: Job) -> Result:
    spec, arch = job
    try:
        with settings.override(jit="auto"):  # to compile is what was asked for
            made = jit.compile(spec, arch)
    except (AttnlibError, TypeError, ValueError) as error:
        return Result(spec.entry, arch, error=str(error))
    path = None if made.path is None else str(made.path)
    return Result(spec.entry, arch, made.registers, made.spills, made.warnings, round(made.seconds, 3), path)
