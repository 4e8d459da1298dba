"""What a compiled kernel asks of the machine, read from its machine code."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .archs import Arch
from .launch import Spec

RECORD = Path(__file__).with_name("figures.json")
# fields of a configuration that a label says otherwise, or that follow from what it says
_TOLD = {"block_m", "block_n", "head_dim", "head_dim_v", "k_first", "k_rest", "v_first", "v_rest", "single"}


_SCRATCH = r"(?:scratch_|\w+ .*; \d+-byte Folded (?:Spill|Reload))"  # gfx90a reaches its stack through a buffer


@dataclass(frozen=True)
class Figures:
    """shared_bytes of a program. On AMD also: registers and spilled ones of a lane, instructions that use scratch
    memory, matrix instructions in the loop that has most, loads through buffers and not, and waves on a SIMD at once.

    Scalar registers are spilled to lanes of vector registers; the scratch that is reserved for them is then not used.
    """

    shared_bytes: int
    registers: int = 0
    spills: int = 0
    scratch: int = 0
    matrix: int = 0
    buffer_loads: int = 0
    other_loads: int = 0
    waves: int = 0


def of(kernel: Any, arch: Arch, warps: int) -> Figures:
    """The figures of one of Triton's compiled kernels."""
    shared = int(kernel.metadata.shared)
    if not arch.amd:
        return Figures(shared)
    asm: str = kernel.asm["amdgcn"]

    def number(key: str) -> int:
        at = re.search(rf"^\s*(?:-\s*)?\.{key}:\s*(\d+)", asm, re.MULTILINE)
        if at is None:
            raise ValueError(f"no .{key} in the machine code")
        return int(at[1])

    def count(pattern: str, text: str = asm) -> int:
        return len(re.findall(rf"^\t{pattern}", text, re.MULTILINE))

    registers = number("vgpr_count")
    return Figures(
        shared, registers, number("vgpr_spill_count"), count(_SCRATCH),
        max((count("v_(?:s?mfma|wmma)", loop) for loop in _loops(asm)), default=0),
        count("buffer_load_"), count("(?:global|flat)_load_"), waves(arch, registers, shared, warps),
    )  # fmt: skip


def waves(arch: Arch, registers: int, shared: int, warps: int) -> int:
    """Waves of a kernel that a SIMD holds at once; 0 if not even one program fits."""
    by_registers = arch.vgprs // max(arch.granule, -(-registers // arch.granule) * arch.granule)
    programs = arch.pool_bytes // shared if shared else arch.waves * arch.simds
    return min(arch.waves, by_registers, -(-programs * warps // arch.simds))


def _loops(asm: str) -> list[str]:
    """The text between each label and the last branch back to it."""
    labels: dict[str, int] = {}
    found: dict[str, str] = {}
    for at in re.finditer(r"^(\.LBB\d+_\d+):|^\ts_c?branch\w*\s+(\.LBB\d+_\d+)", asm, re.MULTILINE):
        if at[1]:
            labels[at[1]] = at.start()
        elif at[2] in labels:
            found[at[2]] = asm[labels[at[2]] : at.start()]
    return list(found.values())


def label(spec: Spec) -> str:
    """A kernel's name in the record: all that makes its machine code differ from another's."""
    c = spec.config
    tile = f"{c.block_m}x{c.block_n}" if c.block_m else ""
    words = [
        spec.kernel,
        spec.element,
        f"{c.head_dim}/{c.head_dim_v}",
        tile,
        f"{spec.launch.warps}x{spec.launch.stages}",
    ]
    for item in dataclasses.fields(c):
        value = getattr(c, item.name)
        usual = item.default if item.default is not dataclasses.MISSING else type(value)()
        if item.name not in _TOLD and value != usual:
            words.append({True: item.name, False: f"no_{item.name}"}.get(value, f"{item.name}={value}"))
    words += [f"{name}:{element}" for name, element in spec.types]
    marks = {"unaligned": not spec.aligned, "wide": spec.wide, "far": not spec.small}
    words += [name for name, held in marks.items() if held]
    return " ".join(filter(None, words))


def version() -> str:
    """The Triton whose machine code the record is of."""
    return str(json.loads(RECORD.read_text(encoding="utf-8"))["triton"])


@functools.cache
def record() -> Mapping[str, Mapping[str, Figures]]:
    """By architecture and label, what ci/compile_triton.py found."""
    held = json.loads(RECORD.read_text(encoding="utf-8"))
    return {arch: {name: Figures(*row) for name, row in rows.items()} for arch, rows in held["kernels"].items()}
