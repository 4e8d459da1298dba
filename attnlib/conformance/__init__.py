"""The conformance suite: whether a backend computes what docs/semantics.md says.

    python -m attnlib check --backend NAME --report out.json
    pytest --pyargs attnlib.conformance --attn-backend=NAME
    python -m attnlib.conformance.mutants

`run_check` runs it from Python. backends/README.md is the guide for a new port.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cases import CASES, Case
    from .mutants import MutantReport, run_mutants
    from .runner import Report, run_check, to_markdown
    from .tiled import Tiled

_HOMES = {
    "CASES": "cases", "Case": "cases", "MutantReport": "mutants", "run_mutants": "mutants", "Report": "runner",
    "run_check": "runner", "to_markdown": "runner", "Tiled": "tiled",
}  # fmt: skip

__all__ = ["CASES", "Case", "MutantReport", "Report", "Tiled", "run_check", "run_mutants", "to_markdown"]


def __getattr__(name: str) -> Any:
    """Import on first use: importing attnlib.conformance alone costs nothing."""
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
