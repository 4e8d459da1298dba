"""forward/CASE/DTYPE and backward/CASE/DTYPE: every case of the list, judged by the numerics of the contract."""

from __future__ import annotations

import functools

import torch

from ..cases import Case, select
from ..items import Item, add
from ..recipes import CANCELLING, PLAIN, make
from ..subject import Subject


def run_case(case: Case, dtype: torch.dtype, direction: str, subject: Subject) -> None:
    """Run a case in one dtype and direction and judge every result."""
    inputs = make(case, dtype, subject.device, direction=direction)
    key = (case, dtype, direction, str(subject.device))
    subject.check(inputs, key=key, cancels=case.recipe in CANCELLING, plain=case.recipe in PLAIN)


def _register() -> None:
    for case in select("full"):
        for direction in case.directions:
            for dtype in case.dtypes:
                name = f"{direction}/{case.name}/{str(dtype).removeprefix('torch.')}"
                add(Item(name, functools.partial(run_case, case, dtype, direction), case.level))


_register()
