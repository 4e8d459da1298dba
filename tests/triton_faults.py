"""Deliberate faults of the Triton kernels, as edits of their source: the conformance suite must see every one.

    TRITON_INTERPRET=1 python tests/triton_faults.py [--fault NAME ...]     on a CPU
    python tests/triton_faults.py --device cuda                             on a GPU

The kernels themselves know nothing of this. An edit whose text is not found exactly once fails: correct it here.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import attnlib_triton
from attnlib.backend import Plan, Target
from attnlib.conformance.faults import Fault
from attnlib.conformance.mutants import run_mutants
from attnlib.problem import AttentionProblem
from attnlib_triton import launch
from attnlib_triton.plan import TritonPlan

KERNELS = Path(attnlib_triton.__file__).with_name("kernels")


class Edit(NamedTuple):
    """What is changed in one of the kernels' modules, and the checks that are likely to see it."""

    module: str
    before: str
    after: str
    killers: tuple[str, ...]


EDITS = {
    "no_rescale": Edit(
        "forward", "add_product(p, v, scaled(acc, correction[:, None]), C), highest",
        "add_product(p, v, acc, C), highest",
        ("forward/ramp_up/float32",),
    ),
    "window_right_off_by_one": Edit(
        "scores", "scalars.right + 1), stop)", "scalars.right + 2), stop)", ("visible/causal",)
    ),
    "window_left_off_by_one": Edit("scores", "place.j >= place.i", "place.j > place.i", ("visible/window",)),
    "last_keys_dropped": Edit(
        "tokens", "    stop = seq.kv_len\n    whole", "    stop = seq.kv_len // C.block_n * C.block_n\n    whole",
        ("visible/plain",),
    ),
    "scale_off": Edit("call", "Scalars(factor, cap,", "Scalars(factor * 1.001, cap,", ("forward/plain/float32",)),
    "head_modulo": Edit("forward", "kv_head = unit // group", "kv_head = unit % (heads_q // group)", ("forward/gqa",)),
    "sinks_weigh_nothing": Edit(
        "forward", 'm = tl.where(ok, sink, float("-inf"))\n        total = tl.where(m == float("-inf"), 0.0, 1.0)',
        'm = tl.where(ok, sink, float("-inf"))\n        total = tl.where(m == float("-inf"), 0.0, 0.5)',
        ("forward/sinks/float32",),
    ),
    "page_edge_off_by_one": Edit(
        "chunks", "j % call.page_size * rows.i", "(j + 1) % call.page_size * rows.i", ("forward/paged/float32",)
    ),
    "append_forgets_v": Edit("forward", "j, ok, True, C)", "j, ok & (j < 0), True, C)", ("AB-023", "forward/append")),
    "parts_not_rescaled": Edit(
        "forward", "before = tl.exp2((m - finite) * (LOG2E / unit))", "before = tl.where(part == 0, 0.0, 1.0)",
        ("forward/decode-long",),
    ),
    "delta_missing": Edit("backward", "ds = p * (dp - delta)", "ds = p * dp", ("backward/plain/float32",)),
    "dlse_sign": Edit("backward", "delta -= tl.load(DLSE", "delta += tl.load(DLSE", ("AB-061", "lse")),
    "softcap_gradient_missing": Edit("backward", "ds * (1.0 - t * t)", "ds", ("backward/softcap/float32",)),
    "dv_off": Edit(
        "backward", "owned, dv, True, C)", "owned, scaled(dv, 1.004), True, C)", ("backward/plain/float32",)
    ),
    "bias_gradient_not_summed": Edit("backward", "acc += ds", "acc = ds", ("backward/bias-broadcast-rows",)),
    "dropout_ignores_head": Edit(
        "dropout", "_philox(column, row, tl.cast(place.head0, tl.uint32)", "_philox(column, row, tl.cast(0, tl.uint32)",
        ("dropout/mask-0.5",),
    ),
    "dropout_transposed_alike": Edit(
        "dropout", "(2, 4, 5, 3, 0, 6, 1)", "(2, 5, 4, 3, 0, 6, 1)", ("dropout/backward_mask",)
    ),
}  # fmt: skip


class FaultyTriton(attnlib_triton.TritonBackend):
    """The backend, which takes {"fault": name} as a plan's configuration."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.name = "faulty_triton"
        self._folder = folder
        self._runs: dict[str, Callable[..., None]] = {}
        sys.path.insert(0, str(folder))

    @property
    def faults(self) -> Mapping[str, Fault]:
        return {name: Fault(name.replace("_", " "), edit.killers) for name, edit in EDITS.items()}

    def plan(
        self, problem: AttentionProblem, family: str, target: Target, config: Mapping[str, Any] | None = None
    ) -> Plan:
        rest = dict(config or {})
        name = rest.pop("fault", None)
        if name is None:
            return TritonPlan(problem, target, rest)
        if name not in self._runs:
            self._runs[name] = faulty_run(edited(name, self._folder))
        return TritonPlan(problem, target, rest, self._runs[name])


def faulty_run(package: str) -> Callable[..., None]:
    """launch.run with the kernels of that package."""

    def function(kernel: str) -> Any:
        return getattr(importlib.import_module(f"{package}.{launch._MODULES[kernel]}"), kernel)

    @functools.cache
    def loaded(spec: launch.Spec, arch: str, index: int) -> Any:
        return launch.compile(spec, arch)

    def run(*arguments: Any) -> None:
        with mock.patch.object(launch, "function", function), mock.patch.object(launch, "_loaded", loaded):
            original(*arguments)

    original = launch.run
    return run


def edited(name: str, folder: Path) -> str:
    """The name of a package in folder, with the kernels' modules as the fault leaves them."""
    edit = EDITS[name]
    package = folder / f"triton_with_{name}"
    package.mkdir()
    for path in KERNELS.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        if path.stem == edit.module:
            if text.count(edit.before) != 1:
                raise ValueError(
                    f"{name}: {edit.before!r} is in {path.name} {text.count(edit.before)} times, needs once"
                )
            text = text.replace(edit.before, edit.after)
        (package / path.name).write_text(text, encoding="utf-8")
    return package.name


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--fault", action="append", choices=list(EDITS), help="only this one; repeatable")
    parser.add_argument("--device", help="a torch device")
    parser.add_argument("--report", help="write the JSON report here")
    options = parser.parse_args()

    def show(kill: Mapping[str, Any]) -> None:
        what = f"killed by {kill['killer']}" if kill["killer"] else "SURVIVED"
        print(f"{kill['fault']:32} {what}  ({kill['checks']} checks, {kill['seconds']:.1f} s)", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        backend = FaultyTriton(Path(folder))
        found = run_mutants(
            backend, device=options.device, faults=options.fault, report=options.report, progress=show
        )  # fmt: skip
    print(f"{found['killed']} of {len(found['mutants'])} killed in {found['seconds']:.0f} s")
    return 1 if found["survived"] else 0


if __name__ == "__main__":
    sys.exit(main())
