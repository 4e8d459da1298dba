"""Measure attnlib's GPU backends beside every peer: python -m benchmarks.run --grid training --backends cuda:sm_80

Within a round every contender runs once, in an order drawn for that round, with the L2 cache overwritten before each
call and events around it; a figure is the median of the rounds, a ratio the median of the ratios within a round.
Nothing is reported of a backend on a workload whose results, with fewer sequences and heads, do not pass the rule of
docs/semantics.md section 8. The file holds every round, the card's ceilings in this run, GPU, driver, versions, commit.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import attnlib
from attnlib import bench, numerics
from attnlib.conformance.inputs import Inputs, given

from . import grids, peers, record, timing
from .grids import Workload
from .peers import Contender

DIRECTIONS = ("forward", "backward")
REFUSALS = (NotImplementedError, RuntimeError, ValueError, TypeError, AssertionError, KeyError)


# --- conformance ------------------------------------------------------------------------------------------------------


def fault(work: Workload, backend: str, device: torch.device, backward: bool) -> str:
    """Why the backend's results on the workload, reduced, are not right; "" if they are. Raises what refuses it."""
    small = grids.reduced(work)
    o = grids.draw(small, device, seed=1)
    arguments = dict(o.arguments)
    seed = arguments.pop("dropout_seed", None)
    if seed is not None:
        arguments["dropout_seed"] = int(seed)
    tables = {} if o.cu_seqlens is None else {"cu_seqlens_q": o.cu_seqlens, "cu_seqlens_k": o.cu_seqlens}
    inputs: Inputs = given(
        o.q, o.k, o.v, tables=tables, grads=("q", "k", "v") if backward else (),
        dout=o.dout if backward else None, **arguments,
    )  # fmt: skip
    out, lse = getattr(attnlib, inputs.function)(
        *inputs.positional, **inputs.arguments, return_lse=True, backend=backend
    )
    grads: dict[str, torch.Tensor] = {}
    if backward:
        found = torch.autograd.grad(out, inputs.leaves(), o.dout)
        grads = {f"d{name}": x for name, x in zip("qkv", found, strict=True)}
    problem = inputs.problem()
    result = numerics.Result(out.detach(), lse.detach(), **grads)
    verdict = numerics.judge(problem, inputs.tensors(problem), result, plain=True)
    return "; ".join(map(str, verdict.failures))


# --- one workload -----------------------------------------------------------------------------------------------------


def measure(
    work: Workload, contenders: Sequence[Contender], directions: Sequence[str], timer: bench.Timer, count: int
) -> list[dict[str, Any]]:
    """One record a direction."""
    device = timer.device
    backward = "backward" in directions and work.seqlen_q is None
    o = grids.draw(work, device)
    made: dict[str, peers.Pair] = {}
    refused: dict[str, str] = {}
    conformance: dict[str, str] = {}
    for contender in contenders:
        try:
            if contender.ours:
                wrong = fault(work, contender.name, device, backward)
                conformance[contender.name] = wrong or "passed"
                if wrong:
                    refused[contender.name] = f"does not conform: {wrong}"
                    continue
            made[contender.name] = contender.make(work, o, backward)
        except REFUSALS as error:
            refused[contender.name] = (str(error).strip().split("\n")[0] or type(error).__name__)[:300]
        finally:
            gc.collect()
            torch.cuda.empty_cache()
    records = []
    for direction in directions:
        if direction == "backward" and not backward:
            continue
        calls = {name: pair[DIRECTIONS.index(direction)] for name, pair in made.items()}
        seconds = timing.rounds(timer, {name: call for name, call in calls.items() if call is not None}, count)
        records.append(entry(work, direction, seconds, [c.name for c in contenders if c.ours], refused, conformance))
    return records


def entry(
    work: Workload, direction: str, seconds: Mapping[str, Sequence[float]], mine: Sequence[str],
    refused: Mapping[str, str], conformance: Mapping[str, str],
) -> dict[str, Any]:  # fmt: skip
    """What the file says of a workload and direction."""
    medians = {name: statistics.median(samples) for name, samples in seconds.items()}
    theirs = [name for name in seconds if name not in mine]
    best = min(theirs, key=medians.__getitem__, default=None)
    s = work.shape
    value: dict[str, Any] = {
        "workload": str(work), "shape": str(s), "dtype": work.dtype, "options": dict(work.options),
        "seqlen": s.seqlen, "seqlen_q": work.queries, "head_dim": s.head_dim, "causal": s.causal,
        "direction": direction, "best_peer": best,
        "median_ms": {name: round(1e3 * x, 5) for name, x in medians.items()},
        "tflops": {name: round(work.flops(direction) / x * 1e-12, 4) for name, x in medians.items()},
        "ratios": {
            name: {peer: round(timing.ratio(seconds[name], seconds[peer]), 3) for peer in theirs}
            for name in mine if name in seconds
        },
        "rounds_ms": {name: [round(1e3 * x, 5) for x in samples] for name, samples in seconds.items()},
        "refused": dict(refused), "conformance": dict(conformance),
    }  # fmt: skip
    if work.seqlen_q is not None:
        value["gbs"] = {name: round(work.cache_bytes() / x * 1e-9, 4) for name, x in medians.items()}
    return value


def memory(work: Workload, contenders: Sequence[Contender], directions: Sequence[str], timer: bench.Timer) -> Any:
    """Bytes allocated in one step, beyond operands and results."""
    device = timer.device
    backward = "backward" in directions
    o = grids.draw(work, device)
    size = {name: getattr(o, name).numel() * o.q.element_size() for name in ("q", "k", "v", "dout")}
    results = {"forward": size["dout"], "backward": size["q"] + size["k"] + size["v"]}
    found: dict[str, dict[str, int]] = {direction: {} for direction in directions}
    refused: dict[str, str] = {}
    for contender in contenders:
        try:
            pair = contender.make(work, o, backward)
            for direction in directions:
                call = pair[DIRECTIONS.index(direction)]
                if call is not None:
                    found[direction][contender.name] = timing.extra_bytes(call, device) - results[direction]
            del pair
        except REFUSALS as error:
            refused[contender.name] = (str(error).strip().split("\n")[0] or type(error).__name__)[:300]
        gc.collect()
        torch.cuda.empty_cache()
    return [
        {"workload": str(work), "seqlen": work.shape.seqlen, "direction": direction, "extra_bytes": found[direction],
         "refused": refused}
        for direction in directions
    ]  # fmt: skip


# --- the run ----------------------------------------------------------------------------------------------------------


def line(value: Mapping[str, Any], mine: Sequence[str]) -> str:
    """One row for the terminal: ours, then each peer with the ratio to it."""
    if "extra_bytes" in value:
        shown = ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in value["extra_bytes"].items())
        return f"{value['workload']:<36} {value['direction']:<8} {shown}"
    unit = "gbs" if "gbs" in value else "tflops"
    parts = []
    for name in mine:
        if name not in value["ratios"]:
            parts.append(f"{name} NOT REPORTED: {value['refused'].get(name, '')[:160]}")
            continue
        ratios = ", ".join(f"{peer} {value[unit][peer]:.0f} ({x:.2f})" for peer, x in value["ratios"][name].items())
        parts.append(f"{name} {value[unit][name]:.0f} | {ratios}")
    return f"{value['workload']:<36} {value['direction']:<8} {'; '.join(parts)}"


def summarise(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Geometric mean and minimum of the ratios to each peer and to the best one, by head_dim, direction and mask."""
    groups: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for value in results:
        for name, ratios in value.get("ratios", {}).items():
            mask = "causal" if value["causal"] else "full"
            for dims, masks in ((value["head_dim"], mask), ("all", "all")):
                group = groups.setdefault((name, dims, value["direction"], masks), {})
                for peer, x in ratios.items():
                    group.setdefault(peer, []).append(x)
                if ratios:
                    group.setdefault("best peer", []).append(ratios[value["best_peer"]])
    return [
        {"backend": name, "head_dim": dim, "direction": direction, "mask": mask, "peer": peer, "shapes": len(values),
         "geometric_mean": round(timing.geometric_mean(values), 3), "minimum": round(min(values), 3)}
        for (name, dim, direction, mask), group in groups.items()
        for peer, values in group.items()
    ]  # fmt: skip


def run(
    works: Sequence[Workload], contenders: Sequence[Contender], directions: Sequence[str], timer: bench.Timer, *,
    count: int, only_memory: bool = False, seconds: float = 1e9, show: Callable[[str], None] = print,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Each record as soon as it is there."""
    until = time.monotonic() + seconds
    mine = [c.name for c in contenders if c.ours]
    for work in works:
        if time.monotonic() > until:
            show(f"not measured for lack of time: {work}")
            continue
        if only_memory:
            records = memory(work, contenders, directions, timer)
        else:
            records = measure(work, contenders, directions, timer, count)
        for value in records:
            show(line(value, mine))
            yield value


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.run", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--grid", choices=tuple(grids.GRIDS), default="training")
    parser.add_argument("--backends", default="cuda:sm_80", metavar="A,B", help="of attnlib (default cuda:sm_80)")
    parser.add_argument("--peers", default="all", metavar="A,B", help=f"of {', '.join(peers.NAMES)}; all; none")
    parser.add_argument("--directions", default="forward,backward", metavar="A,B")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds, at least 3 for a kept result")
    parser.add_argument("--sample", type=float, default=0.03, metavar="S", help="seconds that a sample fills")
    parser.add_argument("--only", action="append", metavar="TEXT", help="workloads whose name has this text")
    parser.add_argument("--time-limit", type=float, default=1e9, metavar="S", help="start no workload after S seconds")
    parser.add_argument("--output", metavar="FILE", help="instead of benchmarks/results/gpu-GRID.json")
    options = parser.parse_args(arguments)
    directions = [word for word in options.directions.split(",") if word]
    if not directions or set(directions) - set(DIRECTIONS):
        parser.error(f"--directions: needs forward, backward or both, got {options.directions!r}")
    if not torch.cuda.is_available():
        print("benchmarks.run: needs a GPU", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    names = [] if options.peers == "none" else list(peers.NAMES) if options.peers == "all" else options.peers.split(",")
    if options.grid in ("training", "gqa") and options.peers == "all":
        names.remove("math")  # a matrix of scores that may not fit, and no peer
    found = peers.peers(names)
    for peer in found:
        if peer.missing:
            print(f"{peer.name}: not here: {peer.missing}")
    contenders = [peers.ours(name) for name in options.backends.split(",") if name]
    contenders += [peer for peer in found if not peer.missing]
    works = grids.GRIDS[options.grid]()
    works = [w for w in works if not options.only or any(text in str(w) for text in options.only)]
    timer = bench.Timer(device, options.sample)
    first = timing.ceilings(device)
    print(f"ceilings: {first}", flush=True)
    results = []
    for value in run(works, contenders, directions, timer, count=options.rounds,
                     only_memory=options.grid == "memory", seconds=options.time_limit,
                     show=lambda text: print(text, flush=True)):  # fmt: skip
        results.append(value)
        write(options, device, found, first, None, results)
    summary = write(options, device, found, first, timing.ceilings(device), results)["summary"]
    for row in summary:
        print(f"{row['backend']} / {row['peer']:<16} D {row['head_dim']:<4} {row['direction']:<8} {row['mask']:<7}"
              f"{row['geometric_mean']:6.3f}, at least {row['minimum']:.3f}, {row['shapes']} shapes")  # fmt: skip
    wrong = [v for v in results if any(text != "passed" for text in v.get("conformance", {}).values())]
    return 1 if wrong else 0


def write(
    options: argparse.Namespace, device: torch.device, found: Sequence[Contender],
    before: Mapping[str, float], after: Mapping[str, float] | None, results: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:  # fmt: skip
    """The file, after every workload, so that a run that is cut short leaves what it has."""
    value = {
        "benchmark": f"gpu-{options.grid}", **record.origin(device), "driver": timing.driver(),
        "backends": options.backends, "rounds": options.rounds,
        "absent": {peer.name: peer.missing for peer in found if peer.missing},
        "ceilings": {"before": dict(before), "after": None if after is None else dict(after)},
        "summary": summarise(results), "results": list(results),
    }  # fmt: skip
    if options.output:
        record.write_to(Path(options.output), value)
    else:
        record.write(f"gpu-{options.grid}", value)
    return value


if __name__ == "__main__":
    sys.exit(main())
