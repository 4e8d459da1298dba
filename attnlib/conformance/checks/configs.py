"""config/CONFIG/CASE: a few cases under each plan config that a backend lists in `test_configs`.

Block sizes with block_q below, equal to and above block_k meet the edges of a causal mask differently; a fault seen
in public (AB-014) wrote in front of a row whenever a block of keys lay wholly in the future of the first queries.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...backend import Backend
from ..cases import Case, named
from ..items import Item
from ..subject import Subject
from .accuracy import run_case

_CASES = (
    "causal", "window", "block_mask", "gqa", "dropout", "everything", "everything-packed", "everything-paged",
    "more-queries-than-keys", "size-127x63-causal", "ramp_up",
)  # fmt: skip
_SMALL = Case("causal-13", seqlen_q=13, seqlen_k=13, causal=True)


def items(backend: Backend) -> list[Item]:
    """The checks that a backend's `test_configs` ask for; none if it has no such attribute."""
    found = []
    for config in getattr(backend, "test_configs", ()):
        label = ",".join(f"{name}={value}" for name, value in config.items())
        for case in (*(named(name) for name in _CASES), _SMALL):
            name = f"config/{label}/{'AB-014-' if case is _SMALL else ''}{case.name}"
            found.append(Item(name, functools.partial(_run, case, config)))
    return found


def _run(case: Case, config: Mapping[str, Any], subject: Subject) -> None:
    suffix = "_".join(f"{name}_{value}" for name, value in config.items())
    with subject.configured(suffix, config) as configured:
        for direction in case.directions:
            run_case(replace(case), subject.dtype, direction, configured)
        subject.records.extend(configured.records)
