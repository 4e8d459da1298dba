"""Compile every kernel for every architecture without a GPU, and fail on what makes kernels slow in silence.

    python ci/compile_matrix.py --tier ci     a covering set: any two configuration values, and each with each
                                              architecture; also fails if compile_matrix.json is stale
    python ci/compile_matrix.py --tier all    any two configuration values on each architecture, and all that most
                                              models ask for; writes compile_matrix.json (commit it)

A run that was stopped goes on where it was: what it compiled is in the kernel cache. Kernels that compile_matrix.json
has, from the same sources and NVRTC, are not compiled again for --tier all.

A kernel fails when it doesn't compile, spills registers or draws a C75xx warning of ptxas, unless
compile_exceptions.json says why that is worth it; more than it allows fails. A missing NVRTC fails.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnlib.precompile import Result, progress
from attnlib_cuda import jit, nvrtc
from attnlib_cuda.compile import Job, compile_all
from attnlib_cuda.matrix import Matrix, Rows, covering, label, thorough

RECORD = Path(__file__).with_name("compile_matrix.json")
EXCEPTIONS = Path(__file__).with_name("compile_exceptions.json")


@dataclass
class Allowed:
    """One line of compile_exceptions.json: kernels by a pattern over their label, what they may do, and why."""

    match: str
    why: str
    spills: int = 0
    warnings: dict[str, int] = field(default_factory=dict)
    used: bool = False


def read_exceptions(path: Path) -> list[Allowed]:
    if not path.exists():
        return []
    table = [Allowed(**line) for line in json.loads(path.read_text())]
    for line in table:
        if not line.why.strip():
            raise SystemExit(f"{path.name}: {line.match}: say why")
    return table


def warning_counts(warnings: Sequence[str]) -> Counter[str]:
    """How often each ptxas code appears; other warnings count under "ptxas"."""
    codes = (re.search(r"\bC7\d{3}\b", line) for line in warnings)
    return Counter(code[0] if code else "ptxas" for code in codes)


def faults(name: str, result: Result, table: Sequence[Allowed]) -> list[str]:
    """What is wrong with one kernel."""
    if result.error:
        return [f"{name}: {result.error}"]
    lines = [line for line in table if fnmatch.fnmatchcase(name, line.match)]
    spills = max((line.spills for line in lines), default=0)
    found = []
    if result.spills > spills:
        found.append(f"{name}: {result.spills} bytes of spills, {spills} allowed ({result.registers} registers)")
    for code, count in sorted(warning_counts(result.warnings).items()):
        limit = max((line.warnings.get(code, 0) for line in lines), default=0)
        if count > limit:
            text = next(text for text in result.warnings if code in text)
            found.append(f"{name}: {count} x {code}, {limit} allowed: {text}")
    for line in lines:
        line.used = line.used or result.spills > 0 or bool(result.warnings)
    return found


def tiers(matrices: Sequence[Matrix], common: Sequence[Matrix] = ()) -> dict[str, list[Job]]:
    """The kernels of each tier, each once; "all" has those of "ci" too."""

    def jobs(choose: Callable[[Matrix], Rows], chosen: Sequence[Matrix]) -> list[Job]:
        rows = [row for matrix in chosen for row in choose(matrix)]
        return list(dict.fromkeys((spec, arch) for (arch, _), specs in rows for spec in specs))

    return {"ci": jobs(covering, matrices), "all": jobs(thorough, [*matrices, *common])}


def digest_of(jobs: Sequence[Job]) -> str:
    """SHA-256 over the compile keys of jobs: changes iff some kernel's code may."""
    return hashlib.sha256("".join(sorted(jit.digest(*job) for job in jobs)).encode()).hexdigest()


def stale(record: Path, digest: str, version: tuple[int, int]) -> str:
    """Why the committed record doesn't describe this tree; empty if it does, or if none was made so far."""
    if not record.exists():
        print(f"note: {record.name} was never made: run ci/compile_matrix.py --tier all and commit it")
        return ""
    held: Mapping[str, Any] = json.loads(record.read_text())
    if held["digest"] != digest:
        return f"{record.name} is stale: the kernels changed; run ci/compile_matrix.py --tier all and commit it"
    if held["nvrtc"] != list(version):
        return f"{record.name} was made with NVRTC {held['nvrtc']}, this is {list(version)}"
    return ""


def recorded(record: Path, version: tuple[int, int], jobs: Sequence[Job]) -> dict[int, Result]:
    """What record says of those jobs whose code is as it was, by their places."""
    held = json.loads(record.read_text()) if record.exists() else {}
    kernels: Mapping[str, list[Any]] = held.get("kernels", {}) if held.get("nvrtc") == list(version) else {}
    found = {}
    for place, (spec, arch) in enumerate(jobs):
        if (line := kernels.get(_key(spec, arch))) is not None:
            registers, spills, *warnings = line
            found[place] = Result(spec.entry, arch, registers, spills, tuple(warnings))
    return found


def _key(spec: jit.KernelSpec, arch: str) -> str:
    return jit.digest(spec, arch)[:16]


def check(
    matrices: Sequence[Matrix],
    tier: str,
    *,
    common: Sequence[Matrix] = (),
    workers: int | None = None,
    record: Path = RECORD,
    exceptions: Path = EXCEPTIONS,
    accept: str = "",
) -> list[str]:
    """Compile a tier and say all that is wrong; tier "all" writes record when nothing is.

    common: what only tier "all" compiles. accept is a reason: what spills or warns now goes into exceptions with it,
    kernel by kernel; what a line for a group allows does not.
    """
    try:
        compiler = nvrtc.find()
    except nvrtc.NvrtcMissing as error:
        return [str(error)]
    table = read_exceptions(exceptions)
    known = tiers(matrices, common)
    digest, jobs = digest_of(known["all"]), known[tier]
    if not jobs:
        return ["no kernel is declared"]
    made = recorded(record, compiler.version, jobs) if tier == "all" else {}
    rest = [place for place in range(len(jobs)) if place not in made]
    started = time.perf_counter()
    with progress(len(rest), f"tier {tier}") as advance:
        for place, result in compile_all([jobs[place] for place in rest], workers):
            made[rest[place]] = result
            advance(f"{result.entry} {result.arch}")
    results = {label(*jobs[place]): result for place, result in made.items()}
    if accept:
        table = accept_all(exceptions, table, results, accept, whole=tier == "all")
    found = [fault for name, result in sorted(results.items()) for fault in faults(name, result, table)]
    seconds = time.perf_counter() - started
    slowest = max(results.values(), key=lambda result: result.seconds)
    print(
        f"{len(jobs)} kernels, {len(jobs) - len(rest)} of them as recorded, in {seconds:.1f} s, "
        f"slowest {slowest.entry} {slowest.arch} {slowest.seconds:.2f} s"
    )
    if tier == "ci":
        found += filter(None, [stale(record, digest, compiler.version)])
    else:
        found += [f"{exceptions.name}: {line.match}: no kernel needs it now" for line in table if not line.used]
        if not found:
            kernels = {_key(*jobs[place]): [x.registers, x.spills, *x.warnings] for place, x in made.items()}
            write_record(record, digest, compiler.version, results, kernels)
    return found


def accept_all(
    path: Path, table: list[Allowed], results: Mapping[str, Result], why: str, *, whole: bool
) -> list[Allowed]:
    """The table with a line for each kernel that no other line allows to spill or warn as it does; lines for other
    kernels stay if there may be any."""
    fresh = {name for name, result in results.items() if not result.error}
    kept = [line for line in table if line.match not in fresh]
    if whole:
        kept = [line for line in kept if fnmatch.filter(results, line.match)]
    for name in sorted(fresh):
        result = results[name]
        if faults(name, result, kept):
            kept.append(Allowed(name, why, result.spills, dict(warning_counts(result.warnings))))
    lines = [{"match": a.match, "why": a.why, "spills": a.spills, "warnings": a.warnings} for a in kept]
    path.write_text(json.dumps(lines, indent=1) + "\n")
    return kept


def write_record(
    record: Path, digest: str, version: tuple[int, int], results: Mapping[str, Result], kernels: Mapping[str, list[Any]]
) -> None:
    """For each entry point and architecture how many kernels, their most registers; each one that is excepted; and,
    for the next run, what came of each kernel."""
    summary: dict[str, dict[str, int]] = {}
    for result in results.values():
        line = summary.setdefault(f"{result.entry} {result.arch}", {"kernels": 0, "registers": 0})
        line["kernels"] += 1
        line["registers"] = max(line["registers"], result.registers)
    excepted = {
        name: {"registers": result.registers, "spills": result.spills, "warnings": warning_counts(result.warnings)}
        for name, result in results.items()
        if result.spills or result.warnings
    }
    held = {"digest": digest, "nvrtc": list(version), "summary": summary, "excepted": excepted}
    text = json.dumps(held, indent=1, sort_keys=True).removesuffix("\n}")
    lines = ",\n".join(f'  "{key}": {json.dumps(line)}' for key, line in sorted(kernels.items()))  # one a kernel
    record.write_text(f'{text},\n "kernels": {{\n{lines}\n }}\n}}\n')


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tier", choices=("ci", "all"), default="ci")
    parser.add_argument("--jobs", type=int, default=None, help="processes; all cores by default")
    parser.add_argument("--accept", default="", metavar="WHY", help="put what spills or warns now into the exceptions")
    options = parser.parse_args(arguments)
    from attnlib_cuda import shipped

    found = check(
        shipped.matrices(), options.tier, common=[shipped.common()], workers=options.jobs, accept=options.accept
    )
    for fault in found:
        print(f"FAILED {fault}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
