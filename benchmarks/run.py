"""Measure attnlib's GPU backends beside every peer: python -m benchmarks.run --grid training --backends cuda:sm_80

Within a round every contender runs once, in an order drawn for that round, with the L2 cache overwritten before each
call and events around it; a figure is the median of the rounds, a ratio the median of the ratios within a round.
Nothing is reported of a backend on a workload whose results, with fewer sequences and heads, do not pass the rule of
docs/semantics.md section 8. The file holds every round, the card's ceilings in this run, GPU, driver, versions, commit.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from attnlib import bench, numerics
from attnlib.conformance.inputs import Inputs, given

from . import grids, peers, record, timing
from .grids import Workload
from .peers import Contender

DIRECTIONS = ("forward", "backward")
FAR = 0.02  # of a norm; roundings to bfloat16 make at most half of it, one key more in a window of 1024 makes 0.03
PLAIN = " plain"  # behind a backend's name: the same shape without its options, in the same rounds


# --- conformance ------------------------------------------------------------------------------------------------------


def fault(work: Workload, backend: str, device: torch.device, backward: bool) -> str:
    """Why the backend's results on the workload are not right; "" if they are. Raises what refuses it.

    The call judged is the call measured (but for fewer tokens where the scores are too many for an oracle, which
    `grids.checkable` says), of whose results an oracle is made for some sequences and heads.
    """
    work = grids.checkable(work)
    o = grids.draw(work, device, seed=1)
    leaves = [x.detach().requires_grad_(backward) for x in (o.q, o.k, o.v)]
    out, lse = peers.attend(work, o, *leaves, return_lse=True, backend=backend)
    grads = torch.autograd.grad(out, leaves, o.dout) if backward else ()
    rows, heads, heads_kv, few = grids.part(work, o)
    found = {f"d{name}": x[rows][..., h, :] for name, x, h in zip("qkv", grads, (heads, heads_kv, heads_kv))}
    arguments = dict(few.arguments)
    if "dropout_seed" in arguments:
        arguments["dropout_seed"] = int(arguments["dropout_seed"])
    inputs: Inputs = given(
        few.q, few.k, few.v, dout=few.dout if backward else None, grads=("q", "k", "v") if backward else (),
        tables={} if few.cu_seqlens is None else {"cu_seqlens_q": few.cu_seqlens, "cu_seqlens_k": few.cu_seqlens},
        **arguments,
    )  # fmt: skip
    lse = lse.detach()[heads, rows] if o.cu_seqlens is not None else lse.detach()[rows, heads]
    problem = inputs.problem()
    result = numerics.Result(out.detach()[rows][..., heads, :], lse, **found)
    return "; ".join(map(str, numerics.judge(problem, inputs.tensors(problem), result, plain=True).failures))


# --- one workload -----------------------------------------------------------------------------------------------------


def verdict(work: Workload, backend: str, device: torch.device, backward: bool) -> str:
    """ "passed", "refused: " and why, or what is wrong with the results."""
    try:
        return fault(work, backend, device, backward) or "passed"
    except NotImplementedError as error:
        return f"refused: {reason(error)}"
    except Exception as error:
        return f"failed: {reason(error)}"
    finally:
        free()


def make(maker: Callable[[bool], peers.Pair], directions: Sequence[str]) -> tuple[peers.Pair | None, dict[str, str]]:
    """A contender's calls, and why it lacks a direction: what has no backward may have a forward."""
    refused: dict[str, str] = {}
    try:
        for direction in reversed(directions):
            try:
                return maker(direction == "backward"), refused
            except Exception as error:
                refused[direction] = reason(error)
        return None, refused
    finally:
        free()


def measure(
    work: Workload, contenders: Sequence[Contender], directions: Sequence[str], timer: bench.Timer, count: int
) -> list[dict[str, Any]]:
    """One record a direction."""
    device = timer.device
    directions = [x for x in directions if x == "forward" or work.seqlen_q is None]
    backward = "backward" in directions
    mine = [c.name for c in contenders if c.ours]
    conformance = {name: verdict(work, name, device, backward) for name in mine}
    o = grids.draw(work, device)
    makers = {c.name: functools.partial(c.make, work, o) for c in contenders}
    if work.options:
        plain = work.plain, grids.draw(work.plain, device)
        makers |= {c.name + PLAIN: functools.partial(c.make, *plain) for c in contenders if c.ours}
    made: dict[str, peers.Pair] = {}
    refused: dict[str, dict[str, str]] = {direction: {} for direction in directions}
    for name, maker in makers.items():
        wrong = conformance.get(name.removesuffix(PLAIN), "passed")
        if wrong != "passed":
            for direction in directions if name in conformance else ():
                refused[direction][name] = wrong
            continue
        pair, why = make(maker, directions)
        if pair is not None:
            made[name] = pair
        for direction, text in why.items():
            refused[direction][name] = text
    if "dropout_p" not in work.options:
        _same(made, mine, refused)
    records = []
    for direction in directions:
        calls = {name: pair[DIRECTIONS.index(direction)] for name, pair in made.items()}
        seconds = timing.rounds(timer, {name: call for name, call in calls.items() if call is not None}, count)
        records.append(entry(work, direction, seconds, mine, refused[direction], conformance))
    return records


def _same(made: dict[str, peers.Pair], mine: Sequence[str], refused: Mapping[str, dict[str, str]]) -> None:
    """Leave out the peers whose results or gradients are far from ours: they were asked for something else."""
    ours = next((made[name] for name in mine if name in made), None)
    if ours is None:
        return
    for name in [name for name in made if name.removesuffix(PLAIN) not in mine]:
        try:
            off = (distance(*results) for results in zip(_results(made[name]), _results(ours)))
            why = next((f"its results are {x:.2g} from ours" for x in off if not x < FAR), "")
        except Exception as error:
            why = reason(error)
        if why:
            del made[name]
            for reasons in refused.values():
                reasons[name] = why


def _results(pair: peers.Pair) -> Iterator[torch.Tensor]:
    """What a contender computes: out and, where it has a backward, dq, dk and dv."""
    yield pair[0]()
    if pair[1] is not None:
        yield from pair[1]()


def distance(theirs: torch.Tensor, ours: torch.Tensor) -> float:
    """Of two results in either layout, over the norm of ours: few and many keys count alike. NaN if either has one."""
    theirs = theirs if theirs.shape == ours.shape else theirs.transpose(1, 2)
    if theirs.shape != ours.shape:
        raise ValueError(f"its results are {list(theirs.shape)}, ours {list(ours.shape)}")
    return float((theirs.float() - ours.float()).norm() / ours.float().norm())


def free() -> None:
    """Give back what no contender holds any more."""
    gc.collect()
    torch.cuda.empty_cache()


def reason(error: Exception) -> str:
    return (str(error).strip().split("\n")[0] or type(error).__name__)[:300]


def entry(
    work: Workload, direction: str, seconds: Mapping[str, Sequence[float]], mine: Sequence[str],
    refused: Mapping[str, str], conformance: Mapping[str, str],
) -> dict[str, Any]:  # fmt: skip
    """What the file says of a workload and direction."""
    medians = {name: statistics.median(samples) for name, samples in seconds.items()}
    theirs = [name for name in seconds if name.removesuffix(PLAIN) not in mine]
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
        "of_plain": {
            name: round(timing.ratio(seconds[name], seconds[name + PLAIN]), 3)
            for name in mine if name + PLAIN in seconds
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
    o = grids.draw(work, device)
    size = {name: getattr(o, name).numel() * o.q.element_size() for name in ("q", "k", "v", "dout")}
    results = {"forward": size["dout"], "backward": size["q"] + size["k"] + size["v"]}
    found: dict[str, dict[str, int]] = {direction: {} for direction in directions}
    refused: dict[str, dict[str, str]] = {direction: {} for direction in directions}
    for contender in contenders:
        pair, why = make(functools.partial(contender.make, work, o), directions)
        for direction in directions:
            if direction in why:
                refused[direction][contender.name] = why[direction]
            call = pair and pair[DIRECTIONS.index(direction)]
            if call is not None:
                try:
                    found[direction][contender.name] = timing.extra_bytes(call, device) - results[direction]
                except Exception as error:
                    refused[direction][contender.name] = reason(error)
        call = pair = None
        free()
    return [
        {"workload": str(work), "seqlen": work.shape.seqlen, "direction": direction, "extra_bytes": found[direction],
         "refused": refused[direction]}
        for direction in directions
    ]  # fmt: skip


# --- the run ----------------------------------------------------------------------------------------------------------


def line(value: Mapping[str, Any], mine: Sequence[str]) -> str:
    """One row for the terminal: ours, then each peer with the ratio to it."""
    if "extra_bytes" in value:
        sizes = [f"{name} {size / 2**20:.1f} MiB" for name, size in value["extra_bytes"].items()]
        shown = ", ".join(sizes + [f"{name}: {why[:80]}" for name, why in value["refused"].items()])
        return f"{value['workload']:<36} {value['direction']:<8} {shown}"
    unit = "gbs" if "gbs" in value else "tflops"
    parts = []
    for name in mine:
        if name not in value["ratios"]:
            parts.append(f"{name} NOT REPORTED: {value['refused'].get(name, '')[:160]}")
            continue
        ratios = ", ".join(f"{peer} {value[unit][peer]:.0f} ({x:.2f})" for peer, x in value["ratios"][name].items())
        parts.append(f"{name} {value[unit][name]:.0f} | {ratios}")
    parts += [f"{name}: {why[:80]}" for name, why in value["refused"].items() if name not in mine]
    return f"{value['workload']:<36} {value['direction']:<8} {'; '.join(parts)}"


def summarise(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Geometric mean and minimum of the ratios to each peer, to the best one and to the same shape without options, by
    option, head_dim, direction and mask."""
    groups: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for value in results:
        option = ", ".join(f"{name} {x}" if x is not True else name for name, x in value.get("options", {}).items())
        for name, ratios in value.get("ratios", {}).items():
            found = dict(ratios)
            if ratios:
                found["best peer"] = ratios[value["best_peer"]]
            if name in value["of_plain"]:
                found["itself without"] = value["of_plain"][name]
            mask = "causal" if value["causal"] else "full"
            for dims, masks in ((value["head_dim"], mask), (value["head_dim"], "all"), ("all", "all")):
                group = groups.setdefault((name, option, dims, value["direction"], masks), {})
                for peer, x in found.items():
                    group.setdefault(peer, []).append(x)
    return [
        {"backend": name, "option": option, "head_dim": dim, "direction": direction, "mask": mask, "peer": peer,
         "shapes": len(values), "geometric_mean": round(timing.geometric_mean(values), 3),
         "minimum": round(min(values), 3)}
        for (name, option, dim, direction, mask), group in groups.items()
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
    parser.add_argument("--grid", default="training", metavar="A,B", help=f"of {', '.join(grids.GRIDS)}")
    parser.add_argument("--backends", default="cuda:sm_80", metavar="A,B", help="of attnlib (default cuda:sm_80)")
    parser.add_argument("--peers", default="all", metavar="A,B", help=f"of {', '.join(peers.NAMES)}; all; none")
    parser.add_argument("--directions", default="forward,backward", metavar="A,B")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds, at least 3 for a kept result")
    parser.add_argument("--sample", type=float, default=0.03, metavar="S", help="seconds that a sample fills")
    parser.add_argument("--only", action="append", metavar="TEXT", help="workloads whose name has this text")
    parser.add_argument("--time-limit", type=float, default=1e9, metavar="S", help="start no workload after S seconds")
    parser.add_argument("--output", metavar="DIR", help="where GRID's file goes, gpu-GRID-BACKENDS.json")
    options = parser.parse_args(arguments)
    chosen = options.grid.split(",")
    if set(chosen) - set(grids.GRIDS):
        parser.error(f"--grid: needs some of {', '.join(grids.GRIDS)}, got {options.grid!r}")
    given = set(options.directions.split(","))
    if given - set(DIRECTIONS):
        parser.error(f"--directions: needs forward, backward or both, got {options.directions!r}")
    if "decode" in chosen and "forward" not in given:
        parser.error("--directions: decoding has no backward")
    for name in chosen:
        if not any(_picked(str(work), options.only) for work in grids.GRIDS[name]()):
            parser.error(f"--only: nothing in {name} is called {' or '.join(options.only)}")
    if options.rounds < 1:
        parser.error(f"--rounds: needs at least 1, got {options.rounds}")
    device = gpu()
    if device is None:
        print("benchmarks.run: needs a GPU", file=sys.stderr)
        return 2
    begun = time.monotonic()
    names = [] if options.peers == "none" else list(peers.NAMES) if options.peers == "all" else options.peers.split(",")
    if options.peers == "all" and set(chosen) & {"training", "gqa"}:
        names.remove("math")  # a matrix of scores that may not fit, and no peer
    found = peers.peers(names)
    for peer in found:
        if peer.missing:
            print(f"{peer.name}: not here: {peer.missing}")
    contenders = [peers.ours(name) for name in options.backends.split(",") if name]
    contenders += [peer for peer in found if not peer.missing]
    timer = bench.Timer(device, options.sample)
    first = timing.ceilings(device)
    print(f"ceilings: {first}", flush=True)
    directions = [x for x in DIRECTIONS if x in given]
    results: dict[str, list[Any]] = {name: [] for name in chosen}
    for name in chosen:
        works = grids.spread([work for work in grids.GRIDS[name]() if _picked(str(work), options.only)])
        left = options.time_limit - (time.monotonic() - begun)
        for value in run(works, contenders, directions, timer, count=options.rounds, only_memory=name == "memory",
                         seconds=left, show=lambda text: print(text, flush=True)):  # fmt: skip
            results[name].append(value)
            write(name, options, device, found, [first], results[name])
    ceilings = [first, timing.ceilings(device)]
    for name in chosen:
        for row in write(name, options, device, found, ceilings, results[name])["summary"]:
            if row["mask"] == "all":
                what = f"{row['backend']} / {row['peer']} {row['option']}"
                figures = f"{row['geometric_mean']:6.3f}, at least {row['minimum']:.3f}, {row['shapes']} shapes"
                print(f"{row['direction']:<8} D {row['head_dim']:<3} {figures}: {what}")
    slow = timing.slowed(bench.machine(device).get("gpu", ""), *ceilings)
    if slow:
        print(f"TO BE REPEATED: {slow}")
    wrong = {text for values in results.values() for v in values for text in v.get("conformance", {}).values()}
    return 1 if slow or any(text != "passed" and not text.startswith("refused") for text in wrong) else 0


def gpu() -> torch.device | None:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


def _picked(name: str, only: Sequence[str] | None) -> bool:
    return not only or any(text in name for text in only)


def path_of(grid: str, backends: str, folder: str | None) -> Path:
    """gpu-GRID.json for the backend cuda, else with the backends' names."""
    what = "" if backends == "cuda" else "-" + backends.replace(":", "-").replace(",", "-")
    return Path(folder or record.RESULTS) / f"gpu-{grid}{what}.json"


def write(
    grid: str, options: argparse.Namespace, device: torch.device, found: Sequence[Contender],
    ceilings: Sequence[Mapping[str, float]], results: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:  # fmt: skip
    """The file, after every workload, so that a run that is cut short leaves what it has; in the grid's order."""
    order = [str(work) for work in grids.GRIDS[grid]()]
    results = sorted(results, key=lambda value: order.index(value["workload"]))
    value = {
        "benchmark": f"gpu-{grid}", **record.origin(device), "driver": timing.driver(),
        "backends": options.backends, "rounds": options.rounds,
        "absent": {peer.name: peer.missing for peer in found if peer.missing},
        "ceilings": dict(zip(("before", "after"), ceilings)),
        "to_be_repeated": timing.slowed(bench.machine(device).get("gpu", ""), *ceilings),
        "not_measured": [name for name in order if name not in {value["workload"] for value in results}],
        "summary": summarise(results), "results": results,
    }  # fmt: skip
    record.write_to(path_of(grid, options.backends, options.output), value)
    return value


if __name__ == "__main__":
    sys.exit(main())
