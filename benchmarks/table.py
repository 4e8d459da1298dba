"""The generated parts of the documentation: python -m benchmarks.table [--check]

Between `<!-- generated: NAME -->` and `<!-- end: NAME -->` a document holds what this module makes: tables of the
JSON files in benchmarks/results, the support matrix, the environment variables. --check changes nothing and fails
if a document is not in step.
"""

from __future__ import annotations

import argparse
import functools
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import record
from .run import PLAIN
from .timing import geometric_mean

DOCUMENTS = ("README.md", "docs/performance.md")
NOT_MEASURED = "Not measured yet."


def _origin(value: Mapping[str, Any]) -> str:
    machine, versions = value["machine"], value["versions"]
    where = machine.get("gpu") or f"{machine['cpu']}, {machine['threads']} threads, {', '.join(machine['isa'])}"
    what = ", ".join(f"{name} {number}" for name, number in versions.items())
    return f"{where}; {what}; commit {value['commit']}, {value['date']}; median of {value['rounds']} rounds."


def cpu_table(name: str = "cpu") -> str:
    """GFLOP/s of attnlib and of torch's flash path, and their ratio."""
    value = record.read(name)
    if value is None:
        return NOT_MEASURED
    rows: dict[tuple[str, str], dict[str, Mapping[str, float]]] = {}
    for result in value["results"]:
        rows.setdefault((result["shape"], result["dtype"]), {})[result["direction"]] = result["gflops"]
    lines = [
        "| shape | dtype | forward: attnlib | torch flash | ratio | backward: attnlib | torch flash | ratio |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    ratios: dict[tuple[str, str], list[float]] = {
        (dtype, direction): [] for dtype in ("float32", "bfloat16") for direction in ("forward", "backward")
    }
    for (shape, dtype), directions in rows.items():
        cells = [shape, dtype]
        for direction in ("forward", "backward"):
            found = ratios.setdefault((dtype, direction), [])
            rates = directions.get(direction, {})
            mine, theirs = rates.get("attnlib"), rates.get("torch flash")
            ratio = mine / theirs if mine and theirs else None
            if ratio is not None:
                found.append(ratio)
            cells += [_number(mine), _number(theirs), "-" if ratio is None else f"{ratio:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    means = [f"{' '.join(what)} {geometric_mean(found):.2f}" for what, found in ratios.items() if found]
    least = min((ratio for found in ratios.values() for ratio in found), default=math.nan)
    lines += ["", f"GFLOP/s. Geometric mean of the ratios: {', '.join(means)}; the lowest ratio is {least:.2f}."]
    lines += ["", _origin(value)]
    return "\n".join(lines)


def cpu_features_table() -> str:
    """Time of a call with a feature over the time without it."""
    value = record.read("cpu_features")
    if value is None:
        return NOT_MEASURED
    columns = value["results"]
    heads = [f"{row['dtype']} {row['direction']}" for row in columns]
    lines = [f"| {columns[0]['shape']} | {' | '.join(heads)} |", "|---" + "|--:" * len(heads) + "|"]
    for name in columns[0]["median_ms"]:
        ratios = [row["median_ms"][name] / row["median_ms"]["plain"] for row in columns]
        lines.append(f"| {name} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")
    return "\n".join([*lines, "", "Time over the time of the plain call. " + _origin(value)])


def cpu_decode_table(name: str = "cpu_decode") -> str:
    """GB/s of K and V while decoding, and its share of what reading them takes."""
    value = record.read(name)
    if value is None:
        return NOT_MEASURED
    names = list(value["results"][0]["share"])
    lines = ["| shape | dtype | reading, GB/s | " + " | ".join(f"{name} | share" for name in names) + " |"]
    lines.append("|---|---|--:|" + "--:|--:|" * len(names))
    for row in value["results"]:
        cells = [f"B{row['batch']} Sk{row['seqlen_k']}", row["dtype"], _number(row["gbs"]["reading"], 1)]
        for name in names:
            cells += [_number(row["gbs"][name], 1), f"{row['share'][name]:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", _origin(value)])


def overhead_table(name: str = "overhead") -> str:
    """Microseconds that a call costs on the host."""
    value = record.read(name)
    if value is None:
        return NOT_MEASURED
    lines = ["| call | attnlib, us | budget, us | torch SDPA with its kernel, us |", "|---|--:|--:|--:|"]
    for row in value["results"]:
        cells = [row["call"], _number(row["attnlib_us"], 1), _number(row["budget_us"]), _number(row["torch_us"], 1)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", _origin(value)])


def gpu_table(grid: str) -> str:
    """What attnlib's backends and each peer reach on a GPU, and the ratios: the median of those within a round."""
    value = record.read(f"gpu-{grid}")
    if value is None:
        return NOT_MEASURED
    parts = []
    for direction in ("forward", "backward"):
        results = [result for result in value["results"] if result["direction"] == direction]
        if results:
            parts.append(_gpu_rows(direction, results))
    parts.append(_gpu_summary(value["summary"]))
    ceilings = value["ceilings"]["before"]
    parts.append(
        f"{_origin(value)} Driver {value['driver']}. In the same run: a matrix product of 8192^3 in bfloat16 "
        f"{ceilings['matmul_tflops']:.0f} TFLOP/s, a copy on the device {ceilings['copy_tbs']:.2f} TB/s."
        + (f" To be repeated: {value['to_be_repeated']}." if value["to_be_repeated"] else "")
    )
    return "\n\n".join(part for part in parts if part)


def _gpu_rows(direction: str, results: Sequence[Mapping[str, Any]]) -> str:
    mine = list(dict.fromkeys(name for result in results for name in result["conformance"]))
    ours = {*mine, *(name + PLAIN for name in mine)}
    peers = list(dict.fromkeys(name for result in results for name in result["median_ms"] if name not in ours))
    unit = "gbs" if "gbs" in results[0] else "tflops"
    heads = [f"{direction}, {'GB/s of K and V' if unit == 'gbs' else 'TFLOP/s'}", *mine, *peers]
    heads += [f"{name} / best peer" for name in mine]
    compared = any(result["of_plain"] for result in results)
    if compared:
        heads += [f"{name} / itself without" for name in mine]
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "--:|" * (len(heads) - 1)]
    for result in results:
        cells = [result["workload"], *(_number(result[unit].get(name)) for name in (*mine, *peers))]
        for name in mine:
            ratio = result["ratios"].get(name, {}).get(result["best_peer"])
            cells.append("-" if ratio is None else f"{ratio:.2f} ({result['best_peer']})")
        if compared:
            cells += [_number(result["of_plain"].get(name), 2) for name in mine]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _gpu_summary(summary: Sequence[Mapping[str, Any]]) -> str:
    """Geometric mean and minimum of the ratios to each peer."""
    if not summary:
        return ""
    lines = [
        "| ratio | head_dim | mask | direction | geometric mean | lowest | shapes |",
        "|---|---|---|---|--:|--:|--:|",
    ]
    for row in summary:
        what = f"{row['backend']} / {row['peer']}" + (f", {row['option']}" if row["option"] else "")
        cells = [what, str(row["head_dim"]), row["mask"], row["direction"]]
        cells += [f"{row['geometric_mean']:.2f}", f"{row['minimum']:.2f}", str(row["shapes"])]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def gpu_memory_table(name: str = "memory") -> str:
    """MiB beyond operands and results by sequence length."""
    value = record.read(f"gpu-{name}")
    if value is None:
        return NOT_MEASURED
    names = list(dict.fromkeys(name for result in value["results"] for name in result["extra_bytes"]))
    lines = ["| MiB | direction | " + " | ".join(names) + " |", "|---|---|" + "--:|" * len(names)]
    for result in value["results"]:
        sizes = [result["extra_bytes"].get(name) for name in names]
        cells = [result["workload"], result["direction"]]
        cells += ["-" if size is None else f"{size / 2**20:.1f}" for size in sizes]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", _origin(value)])


def gpu_checks_table(name: str) -> str:
    """What the last run of ci/gpu found."""
    value = record.read(name)
    if value is None:
        return NOT_MEASURED
    checks, mutants, stress = value["conformance"], value["mutants"], value.get("stress")
    lines = ["| step | result | seconds |", "|---|---|--:|"]
    found = {
        "conformance": checks and f"{checks['passed']} passed, {checks['refused']} refused, {checks['failed']} failed",
        **{
            name: tests
            and f"{tests['tests'] - tests['failures'] - tests['errors'] - tests['skipped']} passed, "
            f"{tests['skipped']} skipped, {tests['failures'] + tests['errors']} failed"
            for name in ("tests", "integration")
            for tests in [value.get(name)]
        },
        "stress": stress
        and f"{stress['calls']} calls on {stress['streams']} streams, "
        f"{len(stress['not_repeated'])} problems not repeated bitwise",
        "mutants": mutants and f"{mutants['killed']} killed, {mutants['survived']} survived",
        **value["sanitizer"],
    }
    for step in value["steps"]:
        text = found.get(step["name"]) or step["status"]
        lines.append(f"| {step['name']} | {text} | {_number(step['seconds'])} |")
    machine, versions = value["machine"], value["versions"]
    what = ", ".join(f"{name} {number}" for name, number in versions.items())
    lines += ["", f"{machine.get('gpu') or machine['cpu']}; {what}; commit {value['commit']}, {value['date']}."]
    return "\n".join(lines)


def support() -> str:
    """The support matrix, as `attnlib support` prints it."""
    from attnlib.cli import support_table

    return support_table()


def environment() -> str:
    """The table of environment variables, as attnlib/settings.py documents them."""
    from attnlib import settings

    return "\n".join(line for line in (settings.__doc__ or "").splitlines() if line.startswith("|"))


MAKERS: Mapping[str, Callable[[], str]] = {
    "cpu": cpu_table,
    "cpu_features": cpu_features_table,
    "cpu_decode": cpu_decode_table,
    "cpu_amx": functools.partial(cpu_table, "cpu_amx"),
    "cpu_decode_amx": functools.partial(cpu_decode_table, "cpu_decode_amx"),
    "overhead": overhead_table,
    "overhead_cuda": functools.partial(overhead_table, "overhead-cuda"),
    **{
        f"gpu_checks{tag}": functools.partial(gpu_checks_table, f"gpu-{backend}")
        for tag, backend in (("", "cuda"), ("_sm80", "cuda-sm_80"), ("_triton", "triton"))
    },
    **{
        f"gpu_{grid}{tag}": functools.partial(gpu_table, grid + backends)
        for grid in ("training", "gqa", "decode", "features")
        for tag, backends in (("", ""), ("_sm80", "-cuda-sm_80"), ("_triton", "-triton"))
    },
    "gpu_memory": gpu_memory_table,
    "gpu_memory_sm80": functools.partial(gpu_memory_table, "memory-cuda-sm_80"),
    "support": support,
    "environment": environment,
}


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def render(text: str, makers: Mapping[str, Callable[[], str]] = MAKERS) -> str:
    """text with every generated part made anew. Raises ValueError for a name that nothing makes."""

    def fill(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in makers:
            raise ValueError(f"no generated part is called {name!r}; known: {', '.join(makers)}")
        return f"<!-- generated: {name} -->\n{makers[name]()}\n<!-- end: {name} -->"

    return re.sub(r"<!-- generated: (\w+) -->\n.*?<!-- end: \1 -->", fill, text, flags=re.DOTALL)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.table", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a document is not in step")
    options = parser.parse_args(arguments)
    behind = []
    for name in DOCUMENTS:
        path = record.ROOT / name
        text = path.read_text(encoding="utf-8")
        new = render(text)
        if new == text:
            continue
        behind.append(name)
        if not options.check:
            path.write_text(new, encoding="utf-8")
    verb = "not in step, run python -m benchmarks.table" if options.check else "written"
    for name in behind:
        print(f"{name}: {verb}")
    return 1 if options.check and behind else 0


if __name__ == "__main__":
    sys.exit(main())
