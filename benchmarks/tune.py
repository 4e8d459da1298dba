"""Measure the tile shapes of Hopper's kernels anew: python -m benchmarks.tune --kernel forward [--apply]

For each row of backends/attnlib_cuda/hopper_shapes.json every shape that fits is compiled and run on the row's
workloads. Left out, with the reason, is what fails, what spills more registers than the present shape or is serialised
by ptxas where that one is not, and what differs from its results. One sample each says which are timed against it in
interleaved rounds. A ratio is the median over the rounds, over several workloads their geometric mean. --apply takes
the best shape into the file if its ratio is at least 1.01, and the figures of the shape that then stands there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from attnlib import bench, dispatch
from attnlib.bench import Call
from attnlib.problem import AttentionProblem
from attnlib_cuda import device as devices
from attnlib_cuda import hopper, hopper_shapes
from attnlib_cuda.compile import compile_all
from attnlib_cuda.hopper_shapes import Key, Measured, Row, Shape, Table
from attnlib_cuda.spec import KernelSpec

from . import peers, record, run, timing
from .grids import Operands, Workload, draw

BACKEND = "cuda:sm_90"
WORTH = 1.01  # the ratio from which a new shape is taken
TOKENS, CHANNELS = 16384, 2048
Make = Callable[[Workload, Operands, str, Shape], Call]
_LAYOUTS: tuple[dict[str, Any], ...] = ({}, {"lengths": True}, {"packed": True})


def text(shape: Shape) -> str:
    """ "warpgroups=2 block_k=128 ..."."""
    return " ".join(f"{name}={value}" for name, value in shape._asdict().items())


# --- what is measured -------------------------------------------------------------------------------------------------


def lengths(table: Table, row: Row, key: Key) -> tuple[int, ...]:
    """Two lengths at which the row decides, if its span has two."""
    over = table.over(row, key)
    if row.seqlen is not None:
        return tuple(n for n in (row.seqlen // 4, row.seqlen) if n > over)
    return (2 * over, 4 * over) if over else (2048, 8192)


def workload(row: Row, key: Key, seqlen: int) -> Workload:
    """16,384 tokens of 2,048 channels (head dims rounded up to a power of two) with the row's head dims."""
    heads = CHANNELS // (1 << (row.head_dim - 1).bit_length())
    window = hopper_shapes.window_of(key.kind)
    causal = window.right is not None
    shape = bench.Shape(max(1, TOKENS // seqlen), seqlen, heads, heads, row.head_dim, row.head_dim_v, causal)
    options: dict[str, Any] = {} if window.left is None else {"window": tuple(window)}
    options |= {"softcap": 30.0} if key.softcap else {}
    options |= {"dropout_p": 0.1} if key.dropout else {}
    options |= {"deterministic": True} if key.deterministic else {}
    return Workload(shape, options=options)


def timed(table: Table, row: Row) -> list[Workload]:
    """What decides: each kind of window, without what the row allows but doesn't ask for."""
    return [workload(row, key, seqlen) for key in _asked(row) for seqlen in lengths(table, row, key)]


def _asked(row: Row) -> list[Key]:
    wanted = tuple(bool(x) for x in (row.softcap, row.dropout, row.deterministic))
    return [key for key in row.decides() if key[2:] == wanted]


def checked(table: Table, row: Row) -> list[Workload]:
    """What a shape must get right: everything that the row decides, at one length."""
    return [workload(row, key, lengths(table, row, key)[0]) for key in row.decides()]


def picked(table: Table, kernels: Sequence[str], only: Sequence[str] | None) -> list[Row]:
    """The rows of these kernels; with `only` those whose name, or the name of a workload, has one of its texts."""
    rows = [row for row in table.rows if row.kernel in kernels]
    if not only:
        return rows
    names = {row: [str(row), *map(str, timed(table, row))] for row in rows}
    return [row for row in rows if any(part in name for part in only for name in names[row])]


# --- one row ----------------------------------------------------------------------------------------------------------


def make(work: Workload, o: Operands, kernel: str, shape: Shape) -> Call:
    """A call of the public API with that shape, which has run once. Raises what refuses it."""
    config = {f"wgmma_{kernel}": shape._asdict()}
    with dispatch.use_config(config):
        forward, backward = peers.ours(BACKEND).make(work, o, kernel == "backward")
    if backward is not None:
        return backward  # autograd keeps what was in force for the forward

    def call() -> Any:
        with dispatch.use_config(config):
            return forward()

    return call


def results(call: Call) -> list[torch.Tensor]:
    """out, or dq, dk and dv."""
    found = call()
    return [found] if isinstance(found, torch.Tensor) else list(found)


def compiled(problems: Sequence[AttentionProblem], row: Row, shapes: Sequence[Shape]) -> dict[Shape, str]:
    """Why shapes are left out before they run: those that do not compile, spill more than row.shape or are serialised
    (C75xx) where that one is not, for one of the problems."""
    info = devices.for_arch("sm_90")

    def spec(problem: AttentionProblem, shape: Shape) -> KernelSpec:
        if row.kernel == "forward":
            forward = hopper.forward(problem, info, shape=shape._asdict())
            assert forward is not None
            return hopper.forward_kernel(forward)
        backward = hopper.backward(problem, info, shape=shape._asdict())
        assert backward is not None
        return hopper.backward_kernel(backward)

    wanted = [(place, shape) for place in range(len(problems)) for shape in dict.fromkeys([row.shape, *shapes])]
    specs = [spec(problems[place], shape) for place, shape in wanted]
    jobs = [(spec, info.arch) for spec in dict.fromkeys(specs)]
    found = {jobs[place][0]: result for place, result in compile_all(jobs)}
    made = {pair: found[spec] for pair, spec in zip(wanted, specs)}
    reasons: dict[Shape, str] = {}
    for (place, shape), result in made.items():
        now = made[place, row.shape]
        if result.error:
            why = f"does not compile: {' '.join(result.error.split())[:300]}"
        elif result.spills > now.spills:
            why = f"{result.spills} bytes of spills"
        elif len(result.warnings) > len(now.warnings):
            why = f"ptxas: {result.warnings[-1]}"
        else:
            continue
        reasons.setdefault(shape, why)
    return reasons


def layouts(row: Row) -> list[AttentionProblem]:
    """A problem for each kernel that the row decides: its keys, dense, with lengths and packed."""
    typical = [hopper.typical(row, key) for key in row.decides()]
    return [dataclasses.replace(problem, **more) for problem in typical for more in _LAYOUTS]


def screen(
    works: Sequence[Workload], row: Row, shapes: Sequence[Shape], timer: bench.Timer, make: Make
) -> tuple[dict[Shape, float], dict[Shape, str]]:
    """Of each shape how much faster than row.shape one sample says it is, and why others are left out.

    Raises RuntimeError if row.shape itself fails.
    """
    gains: dict[Shape, list[float]] = {shape: [] for shape in shapes}
    wrong: dict[Shape, str] = {}
    for work in works:
        o = draw(work, timer.device)
        now, right = 0.0, list[torch.Tensor]()
        for shape in dict.fromkeys([row.shape, *shapes]):
            if shape in wrong:
                continue
            try:
                found, seconds = _sample(make(work, o, row.kernel, shape), right, timer)
            except Exception as error:
                if shape == row.shape:
                    raise RuntimeError(f"{row}: the present shape fails on {work}: {run.reason(error)}") from error
                wrong[shape] = f"{work}: {run.reason(error)}"
                continue
            finally:
                run.free()
            now, right = now or seconds, right or found
            gains.setdefault(shape, []).append(now / seconds)
    return {x: timing.geometric_mean(values) for x, values in gains.items() if x not in wrong and values}, wrong


def _sample(call: Call, right: Sequence[torch.Tensor], timer: bench.Timer) -> tuple[list[torch.Tensor], float]:
    """A call's results and seconds. Raises ValueError if they are far from what is right, or hold NaN."""
    found = results(call)
    for mine, present in zip(found, right or found, strict=True):
        if not (off := run.distance(mine, present)) < run.FAR:
            raise ValueError(f"its results are {off:.2g} from the present shape's")
    return found, timer.sample(call, timer.calls_per_sample(call))


def rounds(
    works: Sequence[Workload], row: Row, shapes: Sequence[Shape], timer: bench.Timer, count: int, make: Make
) -> dict[Workload, dict[Shape, list[float]]]:
    """Seconds of each round of shapes that have passed `screen`."""
    found = {}
    for work in works:
        o = draw(work, timer.device)
        calls = {text(shape): make(work, o, row.kernel, shape) for shape in shapes}
        seconds = timing.rounds(timer, calls, count)
        found[work] = {shape: seconds[text(shape)] for shape in shapes}
        calls = {}
        run.free()
    return found


def ranking(
    kernel: str, seconds: Mapping[Workload, Mapping[Shape, Sequence[float]]], present: Shape
) -> list[dict[str, Any]]:
    """What the file says of each shape, the fastest first; its ratio is that to the present one."""
    found = []
    for shape in dict.fromkeys(shape for samples in seconds.values() for shape in samples):
        ratios = {str(work): timing.ratio(samples[shape], samples[present]) for work, samples in seconds.items()}
        found.append({
            "shape": shape._asdict(),
            "ratio": round(timing.geometric_mean(ratios.values()), 4),
            "ratios": {name: round(x, 4) for name, x in ratios.items()},
            "tflops": {
                str(work): round(work.flops(kernel) / statistics.median(samples[shape]) * 1e-12, 1)
                for work, samples in seconds.items()
            },
            "rounds_ms": {
                str(work): [round(1e3 * x, 5) for x in samples[shape]] for work, samples in seconds.items()
            },
        })  # fmt: skip
    return sorted(found, key=lambda value: -value["ratio"])


def taken(ranked: Sequence[Mapping[str, Any]], present: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entry of the shape to take: the fastest one, or the present one if that gains less than WORTH says."""
    if ranked[0]["ratio"] >= WORTH:
        return ranked[0]
    return next(value for value in ranked if value["shape"] == dict(present))


def tune(
    table: Table, row: Row, timer: bench.Timer, *, count: int, keep: int = 8, differ: int | None = None,
    make: Make = make, compiled: Callable[..., dict[Shape, str]] = compiled,
) -> dict[str, Any]:  # fmt: skip
    """The record of a row. Raises RuntimeError if its present shape fails.

    keep: how many shapes the rounds time beside the present one. differ: as hopper.candidates has it.
    """
    works = timed(table, row)
    shapes = hopper.candidates(row, devices.for_arch("sm_90"), differ=differ)
    left_out = compiled([hopper.typical(row, key) for key in _asked(row)], row, shapes)
    left_out.pop(row.shape, None)  # whether it fails, its calls say
    gains, wrong = screen(works, row, [shape for shape in shapes if shape not in left_out], timer, make)
    left_out |= wrong
    others = sorted((shape for shape in gains if shape != row.shape), key=lambda shape: -gains[shape])
    running: list[Shape] = []
    while others and len(running) < keep:  # whoever is left out makes room
        few, others = others[: keep - len(running)], others[keep - len(running) :]
        wrong = compiled(layouts(row), row, few)
        wrong |= screen(checked(table, row), row, [shape for shape in few if shape not in wrong], timer, make)[1]
        wrong.pop(row.shape, None)
        left_out |= wrong
        running += [shape for shape in few if shape not in wrong]
    ranked = ranking(row.kernel, rounds(works, row, [row.shape, *running], timer, count, make), row.shape)
    return {
        "row": str(row), "kernel": row.kernel, "present": row.shape._asdict(),
        "taken": taken(ranked, row.shape._asdict())["shape"], "ranking": ranked,
        "screened": {text(shape): round(x, 4) for shape, x in gains.items() if shape not in left_out},
        "left_out": {text(shape): why for shape, why in left_out.items()},
    }  # fmt: skip


def show(value: Mapping[str, Any]) -> Iterator[str]:
    """A row's lines for the terminal."""
    yield value["row"]
    for entry in value["ranking"]:
        mark = {True: " present", False: ""}[entry["shape"] == value["present"]]
        mark += " taken" if entry["shape"] == value["taken"] != value["present"] else ""
        shape = " ".join(f"{name}={x}" for name, x in entry["shape"].items())
        yield f"  {entry['ratio']:6.3f}  {shape}{mark}"
    for shape, why in value["left_out"].items():
        yield f"  left out: {shape}: {why}"


# --- the table --------------------------------------------------------------------------------------------------------


def applied(table: Table, value: Mapping[str, Any], name: str) -> Table:
    """The table with what a file of results, of that name, says of its rows.

    Raises ValueError if the file has a row that the table lacks or whose shape was another one, or is to be repeated.
    """
    if value["to_be_repeated"]:
        raise ValueError(f"{name}: to be repeated: {value['to_be_repeated']}")
    if value["commit"].endswith("+"):
        raise ValueError(
            f"{name}: measured on {value['commit']}, with changes that no commit has: commit, and measure again"
        )
    rows = {str(row): row for row in table.rows}
    for result in value["results"]:
        row = rows.get(result["row"])
        if row is None or row.shape._asdict() != result["present"]:
            raise ValueError(f"{name}: {result['row']}: the table has no such row, or another shape in it")
        best = taken(result["ranking"], result["present"])
        figures = tuple(Measured(work, x, value["commit"], name) for work, x in best["tflops"].items())
        shape = type(row.shape)(**best["shape"])
        rows[result["row"]] = dataclasses.replace(row, shape=shape, measured=figures)
    new = Table(tuple(rows.values()))
    hopper.check(new, devices.for_arch("sm_90"))
    return new


def apply(paths: Iterable[Path]) -> Table:
    """Rewrite the table with files of results; ValueError, and nothing written, if one can't be applied."""
    file = hopper_shapes.PATH
    new = hopper_shapes.parse(file.read_text(encoding="utf-8"), file.name)
    for path in paths:
        new = applied(new, json.loads(path.read_text(encoding="utf-8")), path.stem)
    file.write_text(hopper_shapes.dump(new), encoding="utf-8")
    return new


# --- the run ----------------------------------------------------------------------------------------------------------


def unsuitable(device: torch.device | None) -> str:
    """Why nothing can be measured on a device; "" if it can."""
    needs = "needs a GPU of compute capability 9.0 (Hopper)"
    if device is None:
        return f"{needs}, got none"
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"{needs}, got {torch.cuda.get_device_name(device)} of {capability[0]}.{capability[1]}"
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.tune", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--kernel", choices=(*hopper_shapes.KERNELS, "both"), default="both")
    parser.add_argument("--problems", nargs="+", metavar="TEXT", help="rows whose name or workloads have this")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds, at least 3 for a kept result")
    parser.add_argument("--sample", type=float, default=0.03, metavar="S", help="seconds that a sample fills")
    parser.add_argument("--keep", type=int, default=8, metavar="N", help="shapes that the rounds time (default 8)")
    parser.add_argument("--differ", type=int, metavar="N", help="only shapes with at most N fields other than now")
    parser.add_argument("--list", action="store_true", help="show rows, workloads and numbers of shapes; needs no GPU")
    parser.add_argument("--results", nargs="+", type=Path, metavar="FILE", help="use these instead of a run; no GPU")
    parser.add_argument("--apply", action="store_true", help="write what was found into hopper_shapes.json")
    parser.add_argument("--output", metavar="DIR", help="where tune-KERNEL-COMMIT.json goes")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.keep < 1:
        parser.error(f"--rounds, --keep: need at least 1, got {options.rounds}, {options.keep}")
    if options.apply and options.rounds < 3 and not options.results:
        parser.error(f"--apply: needs at least 3 rounds, got {options.rounds}")
    table = hopper_shapes.table()
    kernels = hopper_shapes.KERNELS if options.kernel == "both" else (options.kernel,)
    rows = picked(table, kernels, options.problems)
    if not rows:
        parser.error(f"--problems: no row of {' and '.join(kernels)} is called {' or '.join(options.problems)}")
    if options.list:
        for row in rows:
            count = len(hopper.candidates(row, devices.for_arch("sm_90"), differ=options.differ))
            print(f"{row}: {count} shapes; {'; '.join(map(str, timed(table, row)))}")
        return 0
    paths, status = options.results, 0
    if paths is None:
        device = run.gpu()
        if why := unsuitable(device):
            print(f"benchmarks.tune: {why}", file=sys.stderr)
            return 2
        assert device is not None
        paths, status = _measure(table, rows, device, options)
    if options.apply:
        try:
            apply(paths)
        except ValueError as error:
            print(f"benchmarks.tune: --apply: {error}", file=sys.stderr)
            return 1
        print(f"written: {hopper_shapes.PATH}")
    return status


def _measure(
    table: Table, rows: Sequence[Row], device: torch.device, options: argparse.Namespace
) -> tuple[list[Path], int]:
    """The files written, after every row, and the exit status: 1 if something has to be repeated."""
    origin = {**record.origin(device), "driver": timing.driver(), "backend": BACKEND, "rounds": options.rounds,
              "keep": options.keep, "differ": options.differ}  # fmt: skip
    timer = bench.Timer(device, options.sample)
    ceilings = [timing.ceilings(device)]
    values: dict[str, dict[str, Any]] = {}
    for row in rows:
        new = {"benchmark": f"tune-{row.kernel}", **origin, "results": [], "failed": {}}
        value = values.setdefault(row.kernel, new)
        try:
            found = tune(table, row, timer, count=options.rounds, keep=options.keep, differ=options.differ)
            value["results"].append(found)
            print("\n".join(show(found)), flush=True)
        except RuntimeError as error:
            value["failed"][str(row)] = str(error)
            print(f"FAILED: {error}", flush=True)
        _write(value, ceilings, device, options)
    ceilings.append(timing.ceilings(device))
    paths = [_write(value, ceilings, device, options) for value in values.values()]
    wrong = [value["to_be_repeated"] or value["failed"] for value in values.values()]
    for what in filter(None, wrong):
        print(f"TO BE REPEATED: {what}")
    return paths, 1 if any(wrong) else 0


def _write(
    value: dict[str, Any], ceilings: Sequence[Mapping[str, float]], device: torch.device, options: argparse.Namespace
) -> Path:
    value["ceilings"] = dict(zip(("before", "after"), ceilings))
    value["to_be_repeated"] = timing.slowed(bench.machine(device).get("gpu", ""), *ceilings)
    name = f"{value['benchmark']}-{value['commit'].rstrip('+')}.json"  # rows of the table cite it: never another run's
    return record.write_to(Path(options.output or record.RESULTS) / name, value)


if __name__ == "__main__":
    sys.exit(main())
