"""The cpu backend: blocked online-softmax kernels in C++ for AMX, AVX-512, AVX2 and anything else.

    out = softmax(scale * Q K^T + ...) V,  forward in one pass over blocks of keys, backward by recomputation

Memory grows with the sequence length, never with its square. Results do not depend on the number of threads, bit for
bit; threads are as many as torch's (torch.set_num_threads), and torch's own where it has OpenMP. The kernels live in
csrc/cpu.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

import torch

from attnlib.backend import BackendBase, Capabilities, Family, Refusal, RefusalCode, Target
from attnlib.errors import UnsupportedError
from attnlib.problem import DTYPES, AttentionProblem

_CAPABILITIES = Capabilities(
    device_kinds=frozenset({"cpu"}),
    dtypes=frozenset(DTYPES),
    masked_nan_safe_forward=True,
    masked_nan_safe_backward=True,
)
_INDEX = {"portable": 0, "avx2": 1, "avx512": 2, "amx": 4}
_NEEDS = {
    "amx": "AMX-TILE, AMX-BF16 and AVX512-BF16",
    "avx512": "AVX-512 F, BW, DQ and VL",
    "avx2": "AVX2, FMA and F16C",
}
_FAMILIES = (
    Family("amx", replace(_CAPABILITIES, dtypes=frozenset({torch.bfloat16})), "products on AMX tiles"),
    Family("avx512", _CAPABILITIES, "AVX-512; bfloat16 by AVX512-BF16 dot products where the processor has them"),
    Family("avx2", _CAPABILITIES, "AVX2 and FMA"),
    Family("portable", _CAPABILITIES, "any processor, as the compiler vectorises it"),
)
_MAX_BLOCK = 4096
_REMEDY = "reinstall attnlib on a machine with a C++17 compiler: pip install --no-binary attnlib attnlib"


@cache
def _module(name: str) -> ModuleType | ImportError:
    """The compiled module, or why it could not be loaded."""
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ImportError as error:
        return error


class CpuBackend(BackendBase):
    """Every dtype, head dimension and feature of the contract on the CPU, forward and backward."""

    def __init__(self) -> None:
        super().__init__("cpu", _FAMILIES)

    @property
    def faults(self) -> Mapping[str, Any]:
        """Faults that config={"fault": name} switches on, in builds made with ATTNLIB_TEST_FAULTS; else none."""
        from attnlib.conformance.faults import Fault

        found: dict[str, Any] = {
            name: name.replace("_", " ") for name in getattr(_module("_cpu_faults"), "faults", ())[1:]
        }
        if "parts_unscaled" in found:
            found["parts_unscaled"] = Fault(
                "chunks of keys are added up whatever their maxima", ("size-1x1021", "decode")
            )
        return found

    def available(self, family: str, target: Target) -> tuple[Refusal, ...]:
        """BUILD where the extension or AMX in it is missing; ARCH where the processor lacks the instruction set.

        OTHER where the operating system lets no process, or not this one, use AMX.
        """
        module = _module("_cpu")
        if isinstance(module, ImportError):
            needs = "the extension attnlib_cpu._cpu"
            return (Refusal(RefusalCode.BUILD, "compiled module", needs, str(module), _REMEDY),)
        if not target.present:
            if family in _NEEDS and target.arch not in ("x86_64", "AMD64", "amd64"):
                return (Refusal(RefusalCode.ARCH, "processor", "x86_64", target.arch, "use cpu:portable"),)
            return ()
        if not module.supported_families() >> _INDEX[family] & 1:
            state = module.amx() if family == "amx" else ""
            if state == "not built":
                needs = "kernels for AMX in attnlib_cpu._cpu"
                got = "a build by a compiler or an assembler without AMX"
                return (Refusal(RefusalCode.BUILD, "compiled module", needs, got, "reinstall with GCC 11 or later"),)
            if state == "refused":
                needs = "leave to use AMX tiles"
                got = "an operating system that refused arch_prctl(ARCH_REQ_XCOMP_PERM)"
                return (Refusal(RefusalCode.OTHER, "operating system", needs, got, "use cpu:avx512"),)
            return (Refusal(RefusalCode.ARCH, "processor", _NEEDS[family], "a processor without", "use cpu:portable"),)
        return ()

    def plan(
        self, problem: AttentionProblem, family: str, target: Target, config: Mapping[str, Any] | None = None
    ) -> Any:
        """A plan for every problem of this signature.

        Args:
            problem: what is asked for.
            family: "amx", "avx512", "avx2" or "portable".
            target: the CPU.
            config: block_q and block_k, rows and keys of a tile, 1 to 4096 each (default: by shape); fault, a name in
                attnlib_cpu._cpu_faults.faults, in builds made with ATTNLIB_TEST_FAULTS.

        Raises:
            UnsupportedError: the family cannot run here, or config does not fit.
        """
        from .plan import CpuPlan

        refusals = self.available(family, target)
        if family == "amx" and problem.dtype != torch.bfloat16:
            got = str(problem.dtype).removeprefix("torch.")
            refusals += (Refusal(RefusalCode.DTYPE, "dtype", "bfloat16", got, "use cpu:avx512"),)
        blocks = {"block_q": 0, "block_k": 0}
        fault = ""
        name = "_cpu"
        for key, value in (config or {}).items():
            if key in blocks:
                if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_BLOCK:
                    needs = f"an integer from 1 to {_MAX_BLOCK}"
                    refusals += (Refusal(RefusalCode.CONFIG, key, needs, repr(value)),)
                else:
                    blocks[key] = value
            elif key == "fault":
                name, fault = "_cpu_faults", value
            else:
                refusals += (Refusal(RefusalCode.CONFIG, "config", "block_q, block_k or fault", repr(key)),)
        module = _module(name)
        faults = getattr(module, "faults", ())
        if fault and fault not in faults:
            needs = "one of " + ", ".join(faults[1:]) if faults else "a build with ATTNLIB_TEST_FAULTS"
            refusals += (Refusal(RefusalCode.CONFIG, "fault", needs, repr(fault)),)
        if refusals or isinstance(module, ImportError):
            reasons = "; ".join(map(str, refusals))
            raise UnsupportedError(f"cpu:{family}: {reasons}", {f"cpu:{family}": refusals})
        number = faults.index(fault) if fault else 0
        return CpuPlan(module, _INDEX[family], blocks["block_q"], blocks["block_k"], number)

    def describe(self, problem: AttentionProblem, family: str, target: Target) -> Mapping[str, Any]:
        """Kernels, tiles, threads and workspace of each direction, as this machine would choose them."""
        from .plan import describe

        module = _module("_cpu")
        return {} if isinstance(module, ImportError) else describe(module, _INDEX[family], problem)


backend = CpuBackend()
