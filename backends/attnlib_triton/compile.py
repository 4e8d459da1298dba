"""What `attnlib compile` asks of this backend: the kernels of a problem for an architecture that need not be here."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from attnlib import precompile, settings
from attnlib.backend import Target, capability_refusals
from attnlib.errors import UnsupportedError
from attnlib.precompile import Result
from attnlib.problem import AttentionProblem, Tensors
from attnlib.targets import parse_target

from . import archs, backend, figures, launch
from .figures import Figures
from .launch import Spec
from .plan import TritonPlan

Job = tuple[Spec, str]  # what to compile, and for which architecture


def arch_of(word: str) -> str | None:
    """The architecture's name; None for what the kernels are not for."""
    found = archs.known(word.split(":")[0])
    return None if found is None else found.name


def missing() -> str:
    """Why nothing can be compiled here; empty if it can."""
    return "; ".join(map(str, archs.refusals(Target("cuda", "sm_90", present=False))))


def jobs(problem: AttentionProblem, arch: str) -> list[Job]:
    """The kernels that plans for a problem launch. Raises UnsupportedError where it is refused."""
    target = parse_target(arch)
    (family,) = backend.families
    refusals = capability_refusals(problem, family, target) or backend.check(problem, family.name, target)
    if refusals:
        raise UnsupportedError(f"triton: {'; '.join(map(str, refusals))}")
    return [(spec, arch) for spec in kernels(problem, arch)]


def folder() -> tuple[Path | None, str]:
    """Where kernels are kept."""
    return launch.cache_folder(), ""


def compile_all(jobs: Sequence[Job], workers: int | None = None) -> Iterator[tuple[int, Result]]:
    """Results with their places in jobs, as they come. A job that fails is a Result with error, never an exception."""
    return precompile.in_processes(_compile_one, jobs, workers, precompile.start_process)


def _compile_one(job: Job) -> Result:
    spec, arch = job
    try:
        found, seconds, path = measure(job)
    except Exception as error:  # of the compiler's many kinds
        return Result(spec.kernel, arch, error=f"{type(error).__name__}: {error}")
    details = {"kernel": figures.label(spec), **dataclasses.asdict(found)}
    return Result(spec.kernel, arch, found.registers, found.spills, (), seconds, path, details=details)


def measure(job: Job) -> tuple[Figures, float, str]:
    """A kernel's figures, the seconds that compiling it took (0: it was in the cache), and its folder."""
    from triton import knobs

    spec, arch = job
    known = archs.known(arch)
    assert known is not None
    told: dict[str, Any] = {}
    started = time.perf_counter()
    with settings.override(jit="auto"), knobs.compilation.scope():  # to compile is what was asked for
        knobs.compilation.listener = lambda **values: told.update(values)
        kernel = launch.compile(spec, arch)
    seconds = 0.0 if told["cache_hit"] else round(time.perf_counter() - started, 3)
    path = Path(next(iter(told["metadata_group"].values()))).parent
    return figures.of(kernel, known, spec.launch.warps), seconds, str(path)


def kernels(problem: AttentionProblem, arch: str) -> list[Spec]:
    """What plans for a problem launch, each kernel once; raises ValueError where no configuration fits.

    Of what depends on the device or the operands and not on the problem, the usual: keys shared out as on a typical
    device, and not; the gradient of a bias that is nowhere broadcast, and of one that all sequences and heads share.
    """
    target = parse_target(arch)
    found: dict[Spec, None] = {}

    def note(spec: Spec, *_: Any) -> None:
        found[spec] = None

    for shape in ({}, {"num_splits": 1}):
        for tensors in operands(problem):
            plan = TritonPlan(problem, target, shape, note)
            plan.forward(problem, tensors)
            if problem.grads:
                plan.backward(problem, tensors)
    return list(found)


def recorded(problem: AttentionProblem, arch: str) -> dict[str, Figures]:
    """By kernel, what ci/compile_triton.py found of those that a plan launches; what it did not look at is left out."""
    held = figures.record().get(arch, {})
    found: dict[str, Figures] = {}
    for spec in kernels(problem, arch):
        if (noted := held.get(figures.label(spec))) is not None:
            found.setdefault(spec.kernel, noted)
    return found


def operands(problem: AttentionProblem) -> Iterator[Tensors]:
    """Operands without memory: contiguous ones, for their shapes and strides."""

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def rows(keys: bool, dim: int, length: int = 0) -> torch.Tensor:
        heads = problem.num_heads_kv if keys else problem.num_heads_q
        if keys and problem.page_size is not None and not length:
            pages = problem.batch * -(-problem.seqlen_k // problem.page_size)
            return empty(pages, problem.page_size, heads, dim, dtype=problem.dtype)
        if problem.packed:
            return empty(problem.total_k if keys else problem.total_q, heads, dim, dtype=problem.dtype)
        length = length or (problem.seqlen_k if keys else problem.seqlen_q)
        return empty(problem.batch, length, heads, dim, dtype=problem.dtype)

    def scores(dtype: torch.dtype, shared: bool = False) -> torch.Tensor:
        block_q, block_k = problem.block_mask if problem.block_mask and dtype == torch.uint8 else (1, 1)
        lengths = (-(-problem.seqlen_q // block_q), -(-problem.seqlen_k // block_k))
        own = empty(*((1, 1) if shared else (problem.batch, problem.num_heads_q)), *lengths, dtype=dtype)
        return own.expand(problem.batch, problem.num_heads_q, -1, -1)

    def ints(*shape: int) -> torch.Tensor:
        return empty(*shape, dtype=torch.int32)

    batch, heads, wide = problem.batch, problem.num_heads_q, problem.accumulate_dtype
    q, k = rows(False, problem.head_dim), rows(True, problem.head_dim)
    v, out = rows(True, problem.head_dim_v), rows(False, problem.head_dim_v)
    lse = empty(*problem.lse_shape)
    given: dict[str, Any] = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    if problem.needs_stats:
        given["stats"] = empty(2, *problem.lse_shape)
    if problem.bias is not None:
        given["bias"] = scores(problem.bias)
    if problem.mask:
        given["mask"] = scores(torch.bool)
    if problem.block_mask is not None:
        given["block_mask"] = scores(torch.uint8).view(torch.bool)
    if problem.alibi:
        given["alibi_slopes"] = empty(batch, heads)
    if problem.sinks is not None:
        given["sinks"] = empty(heads, dtype=problem.sinks)
    if problem.lengths or problem.append:
        given["q_lens"], given["kv_lens"] = ints(batch), ints(batch)
    if problem.packed:
        given["cu_seqlens_q"], given["cu_seqlens_k"] = ints(batch + 1), ints(batch + 1)
    if problem.page_size is not None:
        given["page_table"] = ints(batch, -(-problem.seqlen_k // problem.page_size))
    if problem.append:
        given |= {"k_new": rows(True, problem.head_dim, 1), "v_new": rows(True, problem.head_dim_v, 1)}
    if problem.dropout_threshold:
        given["dropout_seed"] = empty(1, dtype=torch.int64)
    if problem.grads:
        given["dout"] = rows(False, problem.head_dim_v)
        given |= {
            f"d{name}": torch.empty_like(x) for name, x in (("q", q), ("k", k), ("v", v)) if name in problem.grads
        }
        if "sinks" in problem.grads:
            given["dsinks"] = empty(heads, dtype=wide)
    if "bias" not in problem.grads:
        yield Tensors(**given)
        return
    for shared in (False, True):
        yield Tensors(**given, dbias=scores(wide, shared))
