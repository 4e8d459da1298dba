"""Draw the GPU results: python -m benchmarks.plot [--grid training] [--folder docs/images]

GRID-tflops.png     TFLOP/s against the sequence length, one panel for each head_dim, mask and direction
GRID-speedup.png    speed relative to --baseline, likewise
memory.png          bytes beyond operands and results against the sequence length
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import record, timing

Series = dict[str, list[tuple[int, float]]]
COLOURS = ("#d62728", "#1f77b4", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f", "#bcbd22")


def panels(value: Mapping[str, Any], figure: Callable[[Mapping[str, Any]], Mapping[str, float]]) -> dict[str, Series]:
    """By panel and contender: (sequence length, figure) in order. `figure` gives each contender's of one result."""
    found: dict[str, Series] = {}
    for result in value["results"]:
        if result.get("options"):
            continue
        title = f"D {result['head_dim']}, {'causal' if result['causal'] else 'full'}, {result['direction']}"
        for name, y in figure(result).items():
            found.setdefault(title, {}).setdefault(name, []).append((result["seqlen"], y))
    return {title: {name: sorted(points) for name, points in series.items()} for title, series in found.items()}


def speedup(result: Mapping[str, Any], baseline: str) -> dict[str, float]:
    """How much faster than baseline each contender is: the median over the rounds."""
    samples: Mapping[str, Sequence[float]] = result["rounds_ms"]
    if baseline not in samples:
        return {}
    return {name: timing.ratio(mine, samples[baseline]) for name, mine in samples.items()}


def memory_panels(value: Mapping[str, Any]) -> dict[str, Series]:
    """MiB by direction and contender."""
    found: dict[str, Series] = {}
    for result in value["results"]:
        series = found.setdefault(result["direction"], {})
        for name, size in result["extra_bytes"].items():
            series.setdefault(name, []).append((result["seqlen"], max(size, 1) / 2**20))
    return found


def draw(found: Mapping[str, Series], path: Path, title: str, label: str, *, log: bool = False) -> Path:
    """One picture of panels, three to a row."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(name for series in found.values() for name in series))
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
    columns = min(3, max(1, len(found)))
    rows = -(-len(found) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(5.2 * columns, 3.6 * rows), squeeze=False)
    for axis in axes.flat[len(found) :]:
        axis.set_visible(False)
    for axis, (heading, series) in zip(axes.flat, found.items()):
        for name, points in series.items():
            x, y = zip(*points)
            mine = ":" in name or name in ("cuda", "triton", "cupy")
            axis.plot(x, y, marker="o", markersize=4, linewidth=2.2 if mine else 1.2, color=colours[name], label=name)
        lengths = sorted({x for points in series.values() for x, _ in points})
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [str(x) if x < 1024 else f"{x // 1024}k" for x in lengths])
        axis.set_yscale("log" if log else "linear")
        if not log:
            axis.set_ylim(bottom=0)
        axis.set_title(heading, fontsize=10)
        axis.grid(True, alpha=0.3)
    for row in axes:
        row[0].set_ylabel(label)
    for axis in axes[-1]:
        axis.set_xlabel("sequence length")
    lines = {line.get_label(): line for axis in axes.flat for line in axis.get_lines()}  # no panel need have them all
    handles = [lines[name] for name in names]
    figure.legend(handles, names, loc="lower center", ncol=min(6, len(names) or 1), frameon=False)
    figure.suptitle(title, fontsize=11)
    figure.tight_layout(rect=(0, 0.03 + 0.02 / rows, 1, 0.98))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def title_of(value: Mapping[str, Any]) -> str:
    gpu = value["machine"].get("gpu", value["machine"]["cpu"])
    return f"{gpu}, torch {value['versions']['torch']}, commit {value['commit']}, {value['date']}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.plot", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "--grid",
        action="append",
        help="training, gqa, memory, training-cuda-sm_80 ...; repeatable (default: all measured)",
    )
    parser.add_argument("--baseline", default="torch FA2", help='of the speed-up (default "torch FA2")')
    parser.add_argument("--folder", default="docs/images", help="where the pictures go (default docs/images)")
    options = parser.parse_args(arguments)
    folder, made = Path(options.folder), []
    for grid in options.grid or [g + b for b in ("", "-cuda-sm_80") for g in ("training", "gqa", "memory")]:
        value = record.read(f"gpu-{grid}")
        if value is None:
            if options.grid:
                print(f"benchmarks/results/gpu-{grid}.json: not measured yet", file=sys.stderr)
                return 1
            continue
        if grid.startswith("memory"):
            made.append(draw(memory_panels(value), folder / f"{grid}.png", title_of(value), "MiB", log=True))
            continue
        rates = panels(value, lambda result: result["tflops"])
        made.append(draw(rates, folder / f"{grid}-tflops.png", title_of(value), "TFLOP/s"))
        ratios = panels(value, lambda result: speedup(result, options.baseline))
        if not ratios:
            print(f"gpu-{grid}.json: no result of {options.baseline!r}, so no speed-up", file=sys.stderr)
        else:
            name = f"{title_of(value)}; speed relative to {options.baseline}"
            made.append(draw(ratios, folder / f"{grid}-speedup.png", name, "times as fast"))
    for path in made:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
