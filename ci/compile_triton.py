"""Compile the Triton kernels for architectures that are not here, and look at the machine code.

    python ci/compile_triton.py --tier ci         some for each AMD architecture: every kernel, dtype, kind of loads
    python ci/compile_triton.py --tier all        every problem of `problems`, for NVIDIA too; writes what explain and
                                                  docs show
    python ci/compile_triton.py --only gfx942     architectures whose name has this text; writes nothing
    python ci/compile_triton.py --accept WHY      with --tier all: put what spills now into the exceptions

Every kernel has to fit into shared memory. On AMD, half-precision kernels that multiply need matrix instructions in a
loop, as float32 ones do on gfx9; where operands are up to 2 GiB they are read through buffers. No vector register is
spilled and no scratch used in half precision on gfx9, up to head_dim 128 and in every forward; what spills elsewhere is
pinned in triton_exceptions.json, and a rise fails. So does a kernel that spills 64 or more with operands up to 2 GiB:
such a problem has to be refused (of larger ones a problem doesn't know). Tier ci fails as well if figures.json is stale
or the table in docs/kernels/triton.md is another one. Nothing is run: this says nothing about races, waits or speed.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attnlib.errors import UnsupportedError
from attnlib.problem import AttentionProblem
from attnlib_triton import amd, archs, figures
from attnlib_triton import compile as compiler
from attnlib_triton.figures import Figures, label
from attnlib_triton.launch import Spec

ROOT = Path(__file__).resolve().parent.parent
NVIDIA = ("sm_80", "sm_90")  # for shared memory alone, and by hand
EXCEPTIONS = Path(__file__).with_name("triton_exceptions.json")
DOCS = ROOT / "docs/kernels/triton.md"
BEGIN, END = "<!-- generated: amd -->\n", "<!-- end: amd -->\n"
MULTIPLY = ("forward", "query_gradient", "key_gradient", "bias_gradient")
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
CAUSAL: Mapping[str, Any] = {"window": (None, 0)}
EVERYTHING: Mapping[str, Any] = {
    "softcap": 30.0, "bias": SINGLE, "alibi": True, "mask": True, "block_mask": (64, 64), "dropout_p": 0.5,
    "sinks": SINGLE, "window": (64, 64), "grads": ("q", "k", "v", "bias", "sinks"),
}  # fmt: skip
DECODE: Mapping[str, Any] = {"seqlen_q": 1, "seqlen_k": 4096, "batch": 2, "lengths": True, "grads": ()}


class Wanted(NamedTuple):
    """A problem, and whether its operands exceed 2 GiB, where buffer instructions do not reach."""

    problem: AttentionProblem
    far: bool = False


def problem(dtype: torch.dtype, dim: int, **features: Any) -> AttentionProblem:
    """A backward of so many sequences that keys need not be shared out, unless features say otherwise."""
    sizes = dict(batch=64, seqlen_q=256, seqlen_k=256, num_heads_q=4, num_heads_kv=2, head_dim=dim, head_dim_v=dim)
    return AttentionProblem(**{"dtype": dtype, "scale": 0.1, "grads": ("q", "k", "v"), **sizes, **features})


def few() -> Iterator[Wanted]:
    """Together they reach every kernel and dtype, and every way to read operands."""
    yield Wanted(problem(BRAIN, 64, **CAUSAL))
    yield Wanted(problem(HALF, 128))
    yield Wanted(problem(BRAIN, 64, **{**EVERYTHING, "head_dim_v": 40}))
    yield Wanted(problem(SINGLE, 64))
    yield Wanted(problem(HALF, 80, **DECODE, page_size=16, append=True))
    yield Wanted(problem(HALF, 64, packed=True, page_size=16, **CAUSAL), far=True)
    yield Wanted(problem(BRAIN, 128, bias=BRAIN, grads=()))
    yield Wanted(problem(BRAIN, 256, **CAUSAL, grads=()))


def problems() -> Iterator[Wanted]:
    """What is compiled by hand: head sizes, dtypes and features, one at a time and all at once."""
    yield from few()
    for dtype, dims in ((BRAIN, (80, 128, 192, 256)), (HALF, (64, 128)), (SINGLE, (64, 128, 256))):
        yield from (Wanted(problem(dtype, dim, **CAUSAL)) for dim in dims)
    for dtype in (BRAIN, SINGLE):
        yield from (Wanted(problem(dtype, dim, **EVERYTHING)) for dim in (64, 128, 256))
    for feature in ({"bias": BRAIN}, {"mask": True}, {"block_mask": (64, 64)}, {"dropout_p": 0.25}, {"alibi": True},
                    {"softcap": 30.0, "window": (64, 64)}):  # fmt: skip
        yield Wanted(problem(BRAIN, 128, **feature))
    for dim in (64, 128, 256):
        yield Wanted(problem(BRAIN, dim, **DECODE))
    for dtype, dim in ((BRAIN, 64), (HALF, 128), (SINGLE, 64)):
        yield Wanted(problem(dtype, dim, **CAUSAL), far=True)
    yield from (Wanted(problem(BRAIN, dim)) for dim in (64, 128))


def jobs_for(chosen: Sequence[Wanted], names: Sequence[str]) -> list[compiler.Job]:
    """The kernels of problems on architectures, each once; of a backward that is refused, those of the forward."""
    found: dict[compiler.Job, None] = {}
    for arch in names:
        for wanted in chosen:
            jobs: list[compiler.Job] = []
            for one in (wanted.problem, _forward_only(wanted.problem)):
                with contextlib.suppress(UnsupportedError):
                    jobs = jobs or compiler.jobs(one, arch)
            found |= {(dataclasses.replace(spec, small=not wanted.far), arch): None for spec, arch in jobs}
    return list(found)


def digest(jobs: Sequence[compiler.Job]) -> str:
    """SHA-256 of what the figures depend on, Triton's version apart: the kernels' code, and which there are."""
    sha = hashlib.sha256()
    package = ROOT / "backends/attnlib_triton"
    for path in (*sorted((package / "kernels").glob("*.py")), package / "launch.py"):
        sha.update(ast.dump(_without_docstrings(ast.parse(path.read_text(encoding="utf-8")))).encode())
    for line in sorted(f"{arch} {spec}" for spec, arch in jobs):
        sha.update(line.encode())
    return sha.hexdigest()


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return tree


def faults(arch: archs.Arch, spec: Spec, found: Figures, pinned: Mapping[str, Any]) -> list[str]:
    """What must not be. pinned: spills and scratch that are known of."""
    wrong = []
    if found.shared_bytes > arch.shared_bytes:
        wrong.append(f"shared memory: {found.shared_bytes} bytes, {arch.shared_bytes} are there")
    if not arch.amd:
        return wrong
    half = spec.element != "fp32"
    if spec.kernel in MULTIPLY and (half or arch.kind == "cdna") and not found.matrix:
        wrong.append("no matrix instruction in a loop")
    if not half and arch.kind == "rdna" and found.matrix:
        wrong.append("a matrix instruction in float32")
    if spec.small and spec.aligned and not spec.wide and spec.kernel in MULTIPLY and not found.buffer_loads:
        wrong.append("no load through a buffer")
    if not spec.small and spec.kernel in MULTIPLY and not found.other_loads:
        wrong.append("no load but through buffers, which reach 2 GiB")
    if found.spills >= amd.SPILLS and spec.small:
        wrong.append(f"{found.spills} registers spilled: such a problem has to be refused")
    strict = half and arch.kind == "cdna" and (spec.kernel == "forward" or max(_dims(spec)) <= 128)
    for name in ("spills", "scratch"):
        allowed = 0 if strict else pinned.get(name, 0)
        if getattr(found, name) > allowed:
            wrong.append(f"{name}: {getattr(found, name)}, {allowed} allowed")
    return wrong


def _dims(spec: Spec) -> tuple[int, int]:
    return spec.config.head_dim, spec.config.head_dim_v


class Report(NamedTuple):
    """What was found: figures by architecture and kernel, what must not be, how many were compiled and not cached."""

    figures: dict[str, dict[str, Figures]]
    wrong: list[str]
    compiled: int


def measure_all(jobs: Sequence[compiler.Job], workers: int) -> Report:
    exceptions = json.loads(EXCEPTIONS.read_text(encoding="utf-8"))
    report = Report({arch: {} for _, arch in jobs}, [], 0)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, context) as pool:
        for (spec, arch), (found, seconds, error) in zip(jobs, pool.map(_measure, jobs), strict=True):
            name = label(spec)
            if error:
                report.wrong.append(f"{arch} {name}: {error}")
                continue
            report.figures[arch][name] = found
            known = archs.known(arch)
            assert known is not None
            pinned = exceptions.get(arch, {}).get(name, {})
            report.wrong.extend(f"{arch} {name}: {text}" for text in faults(known, spec, found, pinned))
            report = report._replace(compiled=report.compiled + (seconds > 0))
    return report


def _measure(job: compiler.Job) -> tuple[Figures, float, str]:
    try:
        found, seconds, _ = compiler.measure(job)
    except Exception as error:  # of the compiler's many kinds
        return Figures(0), 0.0, f"{type(error).__name__}: {error}"
    return found, seconds, ""


# --- the record, the exceptions, the table ----------------------------------------------------------------------------


def triton() -> str:
    return ".".join(map(str, archs.triton_version() or ()))


def stale(report: Report, whole: str) -> list[str]:
    """Why the record does not describe this tree: digest, or figures of kernels that were looked at."""
    held = json.loads(figures.RECORD.read_text(encoding="utf-8"))
    again = "run ci/compile_triton.py --tier all and commit what it writes"
    if held["triton"] != triton():
        return [f"{figures.RECORD.name} was made with Triton {held['triton']}, this is {triton()}: {again}"]
    if held["digest"] != whole:
        return [f"{figures.RECORD.name} is stale, the kernels or their tiles changed: {again}"]
    wrong = []
    for arch, kernels in report.figures.items():
        for name, found in kernels.items():
            noted = held["kernels"].get(arch, {}).get(name)
            if arch in archs.AMD and noted != list(dataclasses.astuple(found)):
                wrong.append(f"{arch} {name}: {figures.RECORD.name} has {noted}, found {dataclasses.astuple(found)}")
    if table(held) != _shown():
        wrong.append(f"{DOCS.name}: the table is not that of {figures.RECORD.name}: {again}")
    return wrong


def write(report: Report, whole: str) -> None:
    """The record, a line a kernel; and the table in docs."""
    lines = []
    for arch in archs.AMD:
        rows = sorted(report.figures[arch].items())
        held = ",\n".join(f"   {json.dumps(name)}: {json.dumps(dataclasses.astuple(found))}" for name, found in rows)
        lines.append(f'  "{arch}": {{\n{held}\n  }}')
    fields = [item.name for item in dataclasses.fields(Figures)]
    head = f' "triton": "{triton()}",\n "digest": "{whole}",\n "fields": {json.dumps(fields)},\n "kernels": {{\n'
    figures.RECORD.write_text("{\n" + head + ",\n".join(lines) + "\n }\n}\n", encoding="utf-8")
    text = DOCS.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    made = table(json.loads(figures.RECORD.read_text(encoding="utf-8")))
    DOCS.write_text(before + BEGIN + made + END + after, encoding="utf-8")


def _shown() -> str:
    return DOCS.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]


def table(held: Mapping[str, Any]) -> str:
    """Of the kernels that multiply, for some problems: a row a kernel, a column an architecture."""
    chosen: list[tuple[str, AttentionProblem]] = []
    for dtype, dims in ((BRAIN, (64, 128, 192, 256)), (SINGLE, (64, 128, 256))):
        chosen += [("causal", problem(dtype, dim, **CAUSAL)) for dim in dims]
        chosen += [("everything", problem(dtype, dim, **EVERYTHING)) for dim in dims if dim != 192]
    cells: dict[tuple[str, str, int, str], dict[str, str]] = {}
    for arch in archs.AMD:
        for name, one in chosen:
            dtype = str(one.dtype).removeprefix("torch.")
            for spec, _ in jobs_for([Wanted(one)], [arch]):
                noted = held["kernels"].get(arch, {}).get(label(spec))
                if spec.kernel in MULTIPLY and noted is not None:
                    row = cells.setdefault((spec.kernel, dtype, one.head_dim, name), {})
                    row.setdefault(arch, _cell(spec, Figures(*noted)))
    lines = ["| kernel | dtype | head_dim | problem | " + " | ".join(archs.AMD) + " |"]
    lines.append("|---|---|--:|---|" + "---|" * len(archs.AMD))
    for key in sorted(cells, key=lambda key: (MULTIPLY.index(key[0]), key[1:])):
        row = [cells[key].get(arch, "refused") for arch in archs.AMD]
        lines.append(f"| {' | '.join(map(str, key))} | {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def _forward_only(one: AttentionProblem) -> AttentionProblem:
    return dataclasses.replace(one, grads=())


def _cell(spec: Spec, found: Figures) -> str:
    tile = f"{spec.config.block_m}x{spec.config.block_n}, {spec.launch.warps} warps"
    spilled = f" + {found.spills}" if found.spills else ""
    scratch = f", {found.scratch} x scratch" if found.scratch else ""
    return (
        f"{tile}: {found.registers}{spilled}{scratch}, {found.shared_bytes / 1024:g} KiB, {found.waves}, {found.matrix}"
    )


def accept(report: Report, why: str) -> None:
    """Make the exceptions those that a report needs; what was excepted before keeps its reason."""
    before = json.loads(EXCEPTIONS.read_text(encoding="utf-8"))
    made: dict[str, dict[str, Any]] = {}
    for arch in archs.AMD:
        for name, found in sorted(report.figures[arch].items()):
            if found.spills or found.scratch:
                reason = before.get(arch, {}).get(name, {}).get("reason", why)
                made.setdefault(arch, {})[name] = {
                    "spills": found.spills, "scratch": found.scratch, "reason": reason,
                }  # fmt: skip
    EXCEPTIONS.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tier", choices=("ci", "all"), default="ci")
    parser.add_argument("--only", default="", metavar="TEXT", help="architectures whose name has this text")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--accept", default="", metavar="WHY", help=f"write {EXCEPTIONS.name}, with this reason")
    options = parser.parse_args(arguments)
    chosen = [arch for arch in (archs.AMD if options.tier == "ci" else (*archs.AMD, *NVIDIA)) if options.only in arch]
    if not chosen or (options.accept and (options.only or options.tier != "all")):
        parser.error("--only: no such architecture" if not chosen else "--accept: needs --tier all, without --only")
    if missing := compiler.missing():
        print(f"FAILED {missing}", file=sys.stderr)
        return 1
    everything = jobs_for(list(problems()), archs.AMD)
    whole = digest(everything)
    small = [arch for arch in chosen if options.tier == "ci" or arch in NVIDIA]
    jobs = [job for job in everything if job[1] in chosen and job[1] not in small] + jobs_for(list(few()), small)
    started = time.perf_counter()
    report = measure_all(jobs, options.jobs)
    seconds = time.perf_counter() - started
    print(f"{len(jobs)} kernels for {', '.join(chosen)}: {report.compiled} compiled, {seconds:.1f} s")
    if options.accept:
        accept(report, options.accept)
        report = measure_all(jobs, options.jobs)
    wrong = report.wrong
    if options.tier == "ci" and not options.only:
        wrong += stale(report, whole)
    elif not options.only and not wrong:
        write(report, whole)
    for text in wrong:
        print(f"FAILED {text}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
