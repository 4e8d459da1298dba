"""A PNG of what `attnlib bench` measured. Needs matplotlib; imported only when a plot is wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from .bench import Row

matplotlib.use("Agg", force=False)


def plot_rows(rows: Sequence[Row], path: str | Path, machine: Mapping[str, Any], versions: Mapping[str, str]) -> None:
    """One panel per dtype and direction; a group of bars per shape, a bar per contender, GFLOP/s upwards."""
    panels = list(dict.fromkeys((row.dtype, row.direction) for row in rows))
    names = list(dict.fromkeys(name for row in rows for name in row.seconds))
    if not panels or not names:
        return
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    shapes = len({str(row.shape) for row in rows})
    width = max(4.5, 0.55 * shapes * len(names) + 1.5)
    figure = Figure(figsize=(columns * width, 3.2 * lines + 1.0), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    for axis, (dtype, direction) in zip(axes, panels, strict=False):
        group = [row for row in rows if (row.dtype, row.direction) == (dtype, direction)]
        bar = 0.8 / len(names)
        for index, name in enumerate(names):
            places = [place + (index - (len(names) - 1) / 2) * bar for place in range(len(group))]
            heights = [row.rate(name) if name in row.seconds else 0.0 for row in group]
            bars = axis.bar(places, heights, bar, label=name)
            axis.bar_label(bars, fmt="%.0f", fontsize=7)
        axis.set_title(f"{dtype}, {direction}")
        axis.set_ylabel("GFLOP/s")
        axis.set_xticks(range(len(group)), [str(row.shape).replace(" D", "\nD") for row in group], fontsize=7)
        axis.margins(y=0.12)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    axes[0].legend(fontsize=8)
    where = machine.get("gpu") or f"{machine['cpu']}, {machine['threads']} threads"
    figure.suptitle(f"{where}\nattnlib {versions['attnlib']}, torch {versions['torch']}", fontsize=9)
    figure.savefig(path, dpi=120)
