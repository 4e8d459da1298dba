"""Compile the Triton kernels for architectures that are not here, and look at the machine code.

    python ci/compile_triton.py                       all of them
    python ci/compile_triton.py --only gfx942         those whose name has this text
    python ci/compile_triton.py --pin                 write what was found to the table of exceptions

The kernels are those that plans for a small covering set of problems launch. Each has to fit into shared memory.
On AMD, half-precision kernels that multiply need a matrix instruction inside a loop, and there may be no spilled vector
register and no scratch; what does not hold is pinned in triton_exceptions.json, and a rise fails. Nothing is run: this
says nothing about races, waits or speed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from attnlib.backend import Target
from attnlib.problem import AttentionProblem, Tensors
from attnlib_triton import archs, launch
from attnlib_triton.plan import TritonPlan

ARCHS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201", "sm_80", "sm_90")
EXCEPTIONS = Path(__file__).with_name("triton_exceptions.json")
MULTIPLY = ("forward", "query_gradient", "key_gradient", "bias_gradient")
GRADS = ("q", "k", "v")


def problems() -> Iterator[tuple[str, AttentionProblem]]:
    """A few that together reach every kernel and dtype, but `page_gradient` and packed sequences."""
    sizes = dict(batch=2, seqlen_q=256, seqlen_k=256, num_heads_q=4, num_heads_kv=2)
    half, brain, single = torch.float16, torch.bfloat16, torch.float32
    yield (
        "causal-64",
        AttentionProblem(brain, head_dim=64, head_dim_v=64, scale=0.125, window=(None, 0), grads=GRADS, **sizes),
    )
    yield (
        "full-128",
        AttentionProblem(
            half,
            head_dim=128,
            head_dim_v=128,
            scale=0.1,
            grads=GRADS,
            **{**sizes, "batch": 64},  # too many to split
        ),
    )
    yield "everything-64", AttentionProblem(
        brain, head_dim=64, head_dim_v=40, scale=0.125, softcap=30.0, bias=single, alibi=True, mask=True,
        block_mask=(64, 64), dropout_p=0.5, sinks=single, window=(64, 64), grads=(*GRADS, "bias", "sinks"), **sizes,
    )  # fmt: skip
    yield "float32-64", AttentionProblem(single, head_dim=64, head_dim_v=64, scale=0.125, grads=GRADS, **sizes)
    yield (
        "paged-80",
        AttentionProblem(
            half, head_dim=80, head_dim_v=80, scale=0.1, page_size=16, append=True, **{**sizes, "seqlen_q": 1}
        ),
    )


def tensors_of(p: AttentionProblem) -> Tensors:
    """Operands in this machine's memory, for their shapes and strides alone."""

    def rows(length: int, heads: int, dim: int) -> torch.Tensor:
        return torch.zeros(p.batch, length, heads, dim, dtype=p.dtype)

    def scores(dtype: torch.dtype, heads: int = p.num_heads_q) -> torch.Tensor:
        return torch.zeros(1, heads, p.seqlen_q, p.seqlen_k, dtype=dtype).expand(p.batch, p.num_heads_q, -1, -1)

    given: dict[str, Any] = {}
    if p.page_size is None:
        given |= {
            "k": rows(p.seqlen_k, p.num_heads_kv, p.head_dim),
            "v": rows(p.seqlen_k, p.num_heads_kv, p.head_dim_v),
        }
    else:
        pages = torch.zeros(32, p.page_size, p.num_heads_kv, p.head_dim, dtype=p.dtype)
        table = torch.zeros(p.batch, p.seqlen_k // p.page_size, dtype=torch.int32)
        new = rows(1, p.num_heads_kv, p.head_dim)
        lens = torch.zeros(p.batch, dtype=torch.int32)
        given |= {"k": pages, "v": pages.clone(), "page_table": table, "k_new": new, "v_new": new.clone()}
        given |= {"kv_lens": lens, "new_lens": lens}
    lse = torch.zeros(p.batch, p.num_heads_q, p.seqlen_q)
    q, out = rows(p.seqlen_q, p.num_heads_q, p.head_dim), rows(p.seqlen_q, p.num_heads_q, p.head_dim_v)
    given |= {"q": q, "out": out, "lse": lse, "stats": torch.zeros(2, *lse.shape)}
    if p.bias is not None:
        given["bias"] = scores(p.bias)
    if p.mask:
        given["mask"] = scores(torch.bool)
    if p.block_mask is not None:
        given["block_mask"] = scores(torch.bool)[:, :, :: p.block_mask[0], :: p.block_mask[1]]
    if p.alibi:
        given["alibi_slopes"] = torch.zeros(p.batch, p.num_heads_q)
    if p.sinks is not None:
        given["sinks"] = torch.zeros(p.num_heads_q)
    if p.dropout_p:
        given["dropout_seed"] = torch.zeros(1, dtype=torch.int64)
    if p.grads:
        given |= {"dout": out.clone(), "dq": q.clone(), "dk": given["k"].clone(), "dv": given["v"].clone()}
        given["dbias"] = scores(torch.float32, 1) if "bias" in p.grads else None
        given["dsinks"] = torch.zeros(p.num_heads_q) if "sinks" in p.grads else None
    return Tensors(**given)


def specs(arch: str) -> Iterator[tuple[str, launch.Spec]]:
    """What the plans for an architecture launch, each kernel once."""
    target = Target("rocm" if arch.startswith("gfx") else "cuda", arch, present=False)
    seen: list[launch.Spec] = []
    run, launch.run = launch.run, lambda spec, *_: seen.append(spec)  # type: ignore[assignment]
    try:
        for name, problem in problems():
            seen.clear()
            plan, tensors = TritonPlan(problem, target), tensors_of(problem)
            plan.forward(problem, tensors)
            if problem.grads:
                plan.backward(problem, tensors)
            yield from ((f"{name}/{spec.kernel}", spec) for spec in seen)
    finally:
        launch.run = run


def loops(asm: str) -> list[str]:
    """The text between each label and the last branch back to it."""
    labels: dict[str, int] = {}
    found: dict[str, str] = {}
    for at in re.finditer(r"^(\.LBB\d+_\d+):|^\ts_c?branch\w*\s+(\.LBB\d+_\d+)", asm, re.MULTILINE):
        if at[1]:
            labels[at[1]] = at.start()
        elif at[2] in labels:
            found[at[2]] = asm[labels[at[2]] : at.start()]
    return list(found.values())


def figures(kernel: Any, arch: archs.Arch) -> dict[str, Any]:
    """What the compiled kernel asks of the machine."""
    found: dict[str, Any] = {"shared_bytes": kernel.metadata.shared}
    if arch.amd:
        asm = kernel.asm["amdgcn"]

        def number(key: str) -> int:
            at = re.search(rf"^\s*(?:-\s*)?\.{key}:\s*(\d+)", asm, re.MULTILINE)
            if at is None:
                raise ValueError(f"no .{key} in the machine code")
            return int(at[1])

        matrix = [len(re.findall(r"^\tv_(?:s?mfma|wmma)", loop, re.MULTILINE)) for loop in loops(asm)]
        registers = number("vgpr_count")
        found |= {
            "vgprs": registers, "vgpr_spills": number("vgpr_spill_count"),
            "scratch_bytes": number("private_segment_fixed_size"), "matrix_in_loop": max(matrix, default=0),
            "waves": min(arch.waves, arch.vgprs // max(arch.granule, -(-registers // arch.granule) * arch.granule)),
        }  # fmt: skip
    return found


def faults(arch: archs.Arch, spec: launch.Spec, found: Mapping[str, Any], pinned: Mapping[str, Any]) -> list[str]:
    """What must not be. pinned: spills and scratch that are known of."""
    wrong = []
    if found["shared_bytes"] > arch.shared_bytes:
        wrong.append(f"shared memory: {found['shared_bytes']} bytes, {arch.shared_bytes} are there")
    if not arch.amd:
        return wrong
    if spec.kernel in MULTIPLY and spec.element != "fp32" and not found["matrix_in_loop"]:
        wrong.append("no matrix instruction in a loop")
    for name in ("vgpr_spills", "scratch_bytes"):
        if found[name] > pinned.get(name, 0):
            wrong.append(f"{name}: {found[name]}, {pinned.get(name, 0)} allowed")
    return wrong


def compile_for(arch: str) -> tuple[str, dict[str, Any], list[str], float]:
    started = time.perf_counter()
    known = archs.known(arch)
    assert known is not None
    pinned = json.loads(EXCEPTIONS.read_text()).get(arch, {})
    report, wrong = {}, []
    for name, spec in specs(arch):
        found = figures(launch.compile(spec, arch), known)
        tile = {"warps": spec.launch.warps, "stages": spec.launch.stages}
        if spec.kernel in MULTIPLY:
            tile |= {"block_m": spec.config.block_m, "block_n": spec.config.block_n}
        report[name] = {**tile, **found}
        wrong += [f"{arch} {name}: {text}" for text in faults(known, spec, found, pinned.get(name, {}))]
    return arch, report, wrong, time.perf_counter() - started


def pins(report: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """The entries of the table of exceptions that a report needs."""
    names = ("vgpr_spills", "scratch_bytes")
    found = {kernel: {n: values[n] for n in names if values.get(n)} for kernel, values in report.items()}
    return {kernel: values for kernel, values in found.items() if values}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="architectures whose name has this text")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write all figures here, as JSON")
    parser.add_argument("--pin", action="store_true", help=f"write spills and scratch to {EXCEPTIONS.name}")
    options = parser.parse_args(arguments)
    chosen = [arch for arch in ARCHS if options.only in arch]
    reports: dict[str, Any] = {}
    status = 0 if chosen else 1
    with concurrent.futures.ProcessPoolExecutor(options.jobs) as pool:
        for arch, report, wrong, seconds in pool.map(compile_for, chosen):
            reports[arch] = report
            print(f"{arch}: {len(report)} kernels, {len(wrong)} faults, {seconds:.1f} s", flush=True)
            for text in wrong:
                print(f"FAILED {text}", file=sys.stderr)
                status = 1
    if options.report is not None:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        options.report.write_text(json.dumps(reports, indent=1) + "\n")
    if options.pin:
        table = json.loads(EXCEPTIONS.read_text()) | {arch: pins(report) for arch, report in reports.items()}
        EXCEPTIONS.write_text(json.dumps({arch: found for arch, found in table.items() if found}, indent=1) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
