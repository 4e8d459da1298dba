"""The command line: attnlib, or python -m attnlib.

Exit status: 0 done; 1 the answer is no (no backend takes the problem, a conformance case failed, the demo's results
differ); 2 the command was not understood, or lacks a package it needs.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend import Refusal
    from .dispatch import Decision

OK, NO, USAGE, NOT_HERE = 0, 1, 2, 3  # NOT_HERE: the backend cannot run on this machine, nothing was checked


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["compile"]:  # has a parser of its own
        return _compile(words[1:])
    options = _parser().parse_args(words)
    from .errors import ArgumentError, ArgumentTypeError

    command: Callable[[argparse.Namespace], int] = options.run
    try:
        return command(options)
    except (ArgumentError, ArgumentTypeError) as error:
        return _fail(str(error))
    except BrokenPipeError:  # the reader, `head` for instance, has seen enough
        sys.stderr.close()
        return OK
    except KeyboardInterrupt:
        return 130


def _fail(message: str) -> int:
    print(f"attnlib: {message}", file=sys.stderr)
    return USAGE


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str))


# --- the commands' options ------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="attnlib", description="Exact attention on every backend.", epilog="`attnlib COMMAND --help` tells more."
    )
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    info = _command(commands, "info", _info, "versions, devices, backends and whether they can run, settings")
    info.add_argument("--device", help="ask for this device or architecture, e.g. sm_90 (default: those present)")
    _json_option(info)

    explain = _command(commands, "explain", _explain, "which backend runs a problem, and why not the others")
    _problem_options(explain)
    _json_option(explain)

    check = _command(commands, "check", _check, "run the conformance suite on a backend")
    check.add_argument("--backend", required=True, help="a backend or one of its families, e.g. cpu or cpu:avx2")
    check.add_argument("--level", choices=("core", "full"), default="core", help="how many cases (default core)")
    check.add_argument("--shard", type=_shard, metavar="I/N", help="only the I-th of N parts of the cases")
    check.add_argument("--only", action="append", metavar="TEXT", help="checks with TEXT in their name; repeatable")
    check.add_argument("--device", help="a torch device (default: one the backend runs on)")
    check.add_argument("--report", metavar="FILE", help="write the JSON report here")
    _json_option(check)

    bench = _command(commands, "bench", _bench, "measure this machine against torch's scaled_dot_product_attention")
    bench.add_argument("--backend", action="append", help="a backend to measure; repeatable (default: all that run)")
    bench.add_argument("--shape", action="append", metavar="TEXT", help='e.g. "B1 S1024 H16/4 D64 causal"; repeatable')
    bench.add_argument("--dtype", action="append", help="float32, bfloat16, float16 or float64; repeatable")
    bench.add_argument("--direction", choices=("forward", "backward", "both"), default="both")
    bench.add_argument("--device", help="cpu, cuda, cuda:1 (default: cuda where there is one)")
    bench.add_argument("--rounds", type=_positive, default=5, help="interleaved rounds, the median counts (default 5)")
    bench.add_argument("--plot", metavar="FILE", default="bench.png", help="PNG plot (default bench.png; '' for none)")
    bench.add_argument("--quick", action="store_true", help="one small shape, to see that it works")
    _json_option(bench)

    support = _command(commands, "support", _support, "what each backend takes, as a Markdown table")
    _json_option(support)

    from .demo import add_arguments

    demo = _command(commands, "demo", _demo, "a pre-trained transformer on attnlib, compared with PyTorch's attention")
    add_arguments(demo)

    commands.add_parser("compile", help="compile GPU kernels ahead of time; `attnlib compile --help` tells more")
    return parser


class _Version(argparse.Action):
    """--version, without importing torch before it is asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print attnlib's version")

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from . import __version__

        print(f"attnlib {__version__}")
        parser.exit()


def _command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=summary)
    parser.set_defaults(run=run)
    return parser


def _json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _problem_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--shape", type=_ints(4), required=True, metavar="B,S,H,D", help="batch, queries, query heads, head_dim")
    add("--seqlen-k", type=_positive, help="keys (default: as many as queries); with --page-size the capacity")
    add("--kv-heads", type=_positive, help="key/value heads (default: as many as query heads)")
    add("--head-dim-v", type=_positive, help="head_dim of the values (default: that of the keys)")
    add("--dtype", default="bfloat16", help="float64, float32, float16 or bfloat16 (default)")
    add("--device", default="cpu", help="cpu, cuda:0, or an architecture that need not be here: sm_90, gfx942")
    add("--backend", help="backend names to allow, comma separated")
    add("--causal", action="store_true")
    add("--causal-alignment", choices=("bottom_right", "top_left"), default="bottom_right")
    add("--window", type=_window, metavar="LEFT,RIGHT", help="either may be none")
    add("--scale", type=float, help="default 1/sqrt(D)")
    add("--softcap", type=float)
    add("--bias", nargs="?", const="float32", metavar="DTYPE", help="a bias (of float32 if no dtype is given)")
    add("--mask", action="store_true", help="a boolean mask")
    add("--alibi", action="store_true", help="ALiBi slopes")
    add("--sinks", nargs="?", const="float32", metavar="DTYPE", help="attention sinks")
    add("--block-mask", type=_ints(2), metavar="Q,K", help="a block mask with these block sizes")
    add("--lengths", action="store_true", help="q_lens and kv_lens of a padded batch")
    add("--packed", action="store_true", help="packed sequences (cu_seqlens)")
    add("--page-size", type=_positive, help="a paged cache")
    add("--append", action="store_true", help="k_new and v_new are appended to the cache")
    add("--dropout", type=float, default=0.0, metavar="P")
    add("--backward", action="store_true", help="gradients for q, k and v")
    add("--bias-gradient", action="store_true", help="a gradient for the bias")
    add("--deterministic", action="store_true", help="a bitwise repeatable backward")


def _positive(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"needs an integer of at least 1, got {text!r}")
    return value


def _ints(count: int) -> Callable[[str], tuple[int, ...]]:
    def convert(text: str) -> tuple[int, ...]:
        parts = text.split(",")
        if len(parts) != count or not all(part.strip().isdigit() for part in parts):
            raise argparse.ArgumentTypeError(f"needs {count} integers separated by commas, got {text!r}")
        return tuple(int(part) for part in parts)

    return convert


def _window(text: str) -> tuple[int | None, int | None]:
    parts = [part.strip().lower() for part in text.split(",")]
    if len(parts) != 2 or not all(part == "none" or part.isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"needs LEFT,RIGHT, each an integer or none, got {text!r}")
    left, right = (None if part == "none" else int(part) for part in parts)
    return left, right


def _shard(text: str) -> tuple[int, int]:
    parts = text.split("/")
    if len(parts) == 2 and all(part.isdigit() for part in parts) and 1 <= int(parts[0]) <= int(parts[1]):
        return int(parts[0]), int(parts[1])
    raise argparse.ArgumentTypeError(f"needs I/N with I from 1 to N, got {text!r}")


def _dtype(name: str, option: str) -> Any:
    from .bench import DTYPES
    from .errors import ArgumentError

    if name not in DTYPES:
        raise ArgumentError(f"{option}: needs one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


# --- info and explain -----------------------------------------------------------------------------------------------


def _refusal(reason: Refusal) -> dict[str, str]:
    return {
        "code": reason.code.value,
        "what": reason.what,
        "needs": reason.needs,
        "got": reason.got,
        "remedy": reason.remedy,
    }


def _devices() -> list[str]:
    """What is here: the CPU, and GPUs if torch can see any."""
    import torch

    return ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]


def _info(options: argparse.Namespace) -> int:
    import dataclasses

    import torch

    from . import bench, dispatch, inspection, settings

    names = [options.device] if options.device else _devices()
    targets = {name: str(dispatch.parse_target(name)) for name in names}
    found = {name: inspection.backends(name) for name in names}
    here = bench.machine(torch.device("cpu"))
    values = dataclasses.asdict(settings.current())
    if options.json:
        rows = {
            name: [
                {
                    "name": item.name,
                    "origin": item.origin,
                    "families": list(item.families),
                    "available": not item.unusable,
                    "reasons": [_refusal(reason) for reason in item.unusable],
                    "import_seconds": item.import_seconds,
                }
                for item in items
            ]
            for name, items in found.items()
        }
        plain = {key: sorted(value) if isinstance(value, frozenset) else value for key, value in values.items()}
        _print_json({"versions": bench.versions(), "machine": here, "devices": targets, "backends": rows,
                     "settings": plain})  # fmt: skip
        return OK

    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=True)
    console.print(", ".join(f"{name} {value}" for name, value in bench.versions().items()), highlight=False)
    console.print(f"{here['cpu']}, {here['threads']} threads, {', '.join(here['isa']) or 'no vector extension'}")
    for name, items in found.items():
        table = Table(title=f"backends on {targets[name]}", title_justify="left")
        for heading in ("backend", "families", "runs here", "from"):
            table.add_column(heading, overflow="fold")
        for item in items:
            reasons = "yes" if not item.unusable else "\n".join(f"no: {reason}" for reason in item.unusable)
            table.add_row(item.name, ", ".join(item.families) or "-", reasons, item.origin.split(":")[0])
        console.print(table)
    table = Table(title="settings", title_justify="left")
    table.add_column("variable")
    table.add_column("value")
    table.add_column("meaning", overflow="fold")
    meanings = dict(re.findall(r"^\| (ATTNLIB_\w+) \|.*\| (.*) \|$", settings.__doc__ or "", re.MULTILINE))
    for field, value in values.items():
        if field == "shadow":
            continue
        shown = ", ".join(sorted(value)) if isinstance(value, (tuple, frozenset)) else str(value or "")
        shown = str(int(value)) if isinstance(value, bool) else shown
        if field == "debug" and values["shadow"]:
            shown = ", ".join(filter(None, (shown, f"shadow:{values['shadow']:g}")))
        name = f"ATTNLIB_{field.upper()}"
        table.add_row(name, shown or "-", meanings.get(name, ""))
    console.print(table)
    return OK


def _explain(options: argparse.Namespace) -> int:
    import dataclasses

    import torch

    from . import explain

    q, k, v, arguments = _operands(options)
    with torch.set_grad_enabled(not (options.append or options.page_size)):
        decision = explain(q, k, v, device=options.device, backend=options.backend, **arguments)
    if options.append:  # its operands need memory, so that part is said of the problem itself
        problem = dataclasses.replace(decision.problem, append=True)
        decision = explain(problem, device=options.device, backend=options.backend)
    if options.json:
        _print_json(decision_record(decision))
    else:
        print(decision)
    return OK if decision.chosen is not None else NO


def _operands(options: argparse.Namespace) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Operands without memory and the keywords of the call that the options of `explain` describe."""
    import torch

    from . import BlockMask
    from .errors import ArgumentError

    batch, seqlen_q, heads, head_dim = options.shape
    seqlen_k, kv_heads = options.seqlen_k or seqlen_q, options.kv_heads or heads
    head_dim_v = options.head_dim_v or head_dim
    cache = options.append or options.page_size is not None
    if options.bias_gradient and options.bias is None:
        raise ArgumentError("--bias-gradient: needs --bias")
    if cache and (options.backward or options.bias_gradient or options.dropout):
        raise ArgumentError("--append, --page-size: a cache has neither gradients nor dropout")
    if options.append and options.packed:
        raise ArgumentError("--append: needs queries that are not packed")
    dtype = _dtype(options.dtype, "--dtype")
    grads = options.backward or options.bias_gradient

    def empty(*shape: int, dtype: Any = dtype, grad: bool = False) -> Any:
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)

    def int32(*shape: int) -> Any:
        return empty(*shape, dtype=torch.int32)

    found: dict[str, Any] = {
        "causal": options.causal,
        "causal_alignment": options.causal_alignment,
        "window": options.window,
        "scale": options.scale,
        "softcap": options.softcap,
        "dropout_p": options.dropout,
        "deterministic": options.deterministic,
    }
    full = (batch, heads, seqlen_q, seqlen_k)
    if options.bias:
        found["bias"] = empty(*full, dtype=_dtype(options.bias, "--bias"), grad=options.bias_gradient)
    if options.mask:
        found["mask"] = empty(*full, dtype=torch.bool)
    if options.alibi:
        found["alibi_slopes"] = empty(heads, dtype=torch.float32)
    if options.sinks:
        found["sinks"] = empty(heads, dtype=_dtype(options.sinks, "--sinks"))
    if options.block_mask:
        block_q, block_k = options.block_mask
        blocks = (-(-seqlen_q // max(block_q, 1)), -(-seqlen_k // max(block_k, 1)))
        found["block_mask"] = BlockMask(empty(1, 1, *blocks, dtype=torch.bool), block_q, block_k)
    if options.lengths:
        found["q_lens"] = int32(batch)
    if options.lengths or (cache and not options.packed):
        found["kv_lens"] = int32(batch)

    rows_q = (batch * seqlen_q,) if options.packed else (batch, seqlen_q)
    rows_k = (batch * seqlen_k,) if options.packed else (batch, seqlen_k)
    if options.packed:
        found.update(cu_seqlens_q=int32(batch + 1), cu_seqlens_k=int32(batch + 1))
        found.update(max_seqlen_q=seqlen_q, max_seqlen_k=seqlen_k)
    if options.page_size:
        pages = -(-seqlen_k // options.page_size)
        found["page_table"] = int32(batch, pages)
        rows_k = (batch * pages, options.page_size)
    q = empty(*rows_q, heads, head_dim, grad=grads)
    k, v = (empty(*rows_k, kv_heads, dim, grad=grads) for dim in (head_dim, head_dim_v))
    return q, k, v, found


def decision_record(decision: Decision) -> dict[str, Any]:
    """A Decision as plain values, for JSON."""
    from .dispatch import summary

    return {
        "problem": summary(decision.problem),
        "target": str(decision.target),
        "chosen": decision.chosen,
        "rule": decision.rule,
        "candidates": [
            {"name": candidate.name, "refusals": [_refusal(reason) for reason in candidate.refusals]}
            for candidate in decision.candidates
        ],
        "details": dict(decision.details or {}),
    }


# --- check, bench, support, demo, compile ---------------------------------------------------------------------------


def _check(options: argparse.Namespace) -> int:
    from pathlib import Path

    from .conformance import run_check
    from .conformance.runner import refusal_counts

    reasons = _unusable(options.backend, options.device)
    if reasons:
        print(f"{options.backend} cannot run here: " + "; ".join(reasons), file=sys.stderr)
        return NOT_HERE
    if options.report:
        Path(options.report).parent.mkdir(parents=True, exist_ok=True)
    report = run_check(
        options.backend,
        level=options.level,
        shard=options.shard,
        only=options.only,
        device=options.device,
        report=options.report,
        progress=not options.json,
    )
    if options.only and not report["checks"]:
        return _fail(f"--only: no check of level {options.level} has {' or '.join(options.only)} in its name")
    if options.json:
        _print_json(report)
    else:
        counts = ", ".join(f"{report[kind]} {kind.upper()}" for kind in ("passed", "refused", "failed"))
        print(
            f"{report['backend']} on {report['device']}, level {report['level']}: {counts}, {report['seconds']:.0f} s"
        )
        for reason, count in refusal_counts(report).items():
            print(f"  refused {count:4}  {reason}")
        if options.report:
            print(f"report: {options.report}")
    # Nothing passed and nothing failed: everything was refused, which is no proof of anything.
    return OK if report["passed"] and not report["failed"] else NO


def _unusable(backend: str, device: str | None) -> list[str]:
    """Why a known backend runs on no device of this machine (or not on the one asked for); empty if it does."""
    import torch

    from .inspection import backends

    name = backend.split(":")[0].strip().lower()
    present = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    if device is not None and device.split(":")[0] == "cuda" and len(present) == 1:
        return [f"device: needs {device}, got a machine or a torch build without CUDA"]
    reasons: list[str] = []
    for place in [device] if device is not None else present:
        for info in backends(place):
            if info.name == name:
                if not info.unusable:
                    return []
                reasons += [str(reason) for reason in info.unusable if str(reason) not in reasons]
    return reasons


def _bench(options: argparse.Namespace) -> int:
    import torch

    from . import bench
    from .errors import ArgumentError

    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    gpu = device.type == "cuda"
    defaults = bench.GPU_SHAPES if gpu else bench.CPU_SHAPES
    shapes = [bench.Shape.parse(text) for text in options.shape] if options.shape else list(defaults)
    if options.quick:
        shapes = [bench.Shape.parse("B1 S256 H4 D64 causal")]
    dtypes = options.dtype or (["bfloat16", "float16"] if gpu else ["float32", "bfloat16"])
    for name in dtypes:
        _dtype(name, "--dtype")
    backends = options.backend or _able(device)
    if not backends:
        raise ArgumentError(f"--backend: no backend runs on {device}; `attnlib info` tells why")
    directions = ("forward", "backward") if options.direction == "both" else (options.direction,)
    contenders = [*(bench.attnlib_contender(name) for name in backends), bench.sdpa_contender()]
    rows = _measure(bench, shapes, dtypes, contenders, device, options.rounds, directions, quiet=options.json)
    if options.json:
        _print_json({"machine": bench.machine(device), "versions": bench.versions(), "rounds": options.rounds,
                     "results": [row.record() for row in rows]})  # fmt: skip
    else:
        _print_rows(rows, [contender.name for contender in contenders], bench.machine(device), options.rounds)
    if options.plot:
        try:
            from .plot import plot_rows
        except ImportError:
            print(f"attnlib: no {options.plot}: needs matplotlib (pip install 'attnlib[bench]')", file=sys.stderr)
        else:
            plot_rows(rows, options.plot, bench.machine(device), bench.versions())
            print(f"plot: {options.plot}", file=sys.stderr)
    return OK


def _able(device: Any) -> list[str]:
    """The backends that run on device, the reference left out."""
    from .dispatch import ONLY_BY_NAME
    from .inspection import backends

    return [item.name for item in backends(device) if not item.unusable and item.name not in ONLY_BY_NAME]


def _measure(
    bench: Any, shapes: Any, dtypes: Any, contenders: Any, device: Any, rounds: int, directions: Any, *, quiet: bool
) -> list[Any]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True, quiet=quiet)
    rows = []
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=len(shapes) * len(dtypes) * len(directions))
        for row in bench.measure(shapes, dtypes, contenders, device=device, rounds=rounds, directions=directions):
            rows.append(row)
            progress.update(task, advance=1, description=f"{row.shape} {row.dtype} {row.direction}")
    return rows


def _print_rows(rows: Sequence[Any], names: Sequence[str], machine: dict[str, Any], rounds: int) -> None:
    from rich.console import Console
    from rich.table import Table

    where = machine.get("gpu") or f"{machine['cpu']}, {machine['threads']} threads"
    table = Table(title=f"GFLOP/s on {where}, median of {rounds}", title_justify="left")
    for heading in ("shape", "dtype", "direction"):
        table.add_column(heading, no_wrap=True)
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        cells = [f"{row.rate(name):.0f}" if name in row.seconds else "refused" for name in names]
        table.add_row(str(row.shape), row.dtype, row.direction, *cells)
    console = Console()
    console.print(table)
    refused = {f"{name}: {reason}" for row in rows for name, reason in row.refused.items()}
    for line in sorted(refused):
        console.print(f"refused by {line}", highlight=False, soft_wrap=True)


def _support(options: argparse.Namespace) -> int:
    from .inspection import support_matrix

    if options.json:
        _print_json(support_matrix())
    else:
        print(support_table())
    return OK


def support_table() -> str:
    """The support matrix in Markdown: a column per kernel family, a row per property and feature."""
    from .inspection import support_matrix

    matrix = support_matrix()
    lines = ["| | " + " | ".join(row["backend"] for row in matrix) + " |", "|---" * (len(matrix) + 1) + "|"]

    def add(name: str, cell: Callable[[dict[str, Any]], str]) -> None:
        lines.append(f"| {name} | " + " | ".join(cell(row) for row in matrix) + " |")

    add("devices", lambda row: ", ".join(row["devices"]))
    add("architectures", lambda row: ", ".join(row["archs"]) or "any")
    add("dtypes", lambda row: ", ".join(row["dtypes"]))
    add("largest head_dim", lambda row: "any" if row["max_head_dim"] is None else str(row["max_head_dim"]))
    for feature in matrix[0]["features"] if matrix else ():
        add(feature, lambda row, feature=feature: "yes" if row["features"][feature] else "no")  # type: ignore[misc]
    for index, direction in enumerate(("forward", "backward")):
        add(
            f"NaN in a masked key stays out ({direction})",
            lambda row, index=index: "yes" if row["masked_nan_safe"][index] else "no",  # type: ignore[misc]
        )
    return "\n".join(lines)


def _demo(options: argparse.Namespace) -> int:
    from . import demo

    return demo.main(options)


def _compile(arguments: Sequence[str]) -> int:
    from . import precompile

    return precompile.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
