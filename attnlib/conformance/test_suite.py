"""One pytest item for each check: pytest --pyargs attnlib.conformance --attn-backend=NAME."""

from __future__ import annotations

from typing import Any

import pytest
from attnlib_pytest import items_of, mark_refused


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    items = items_of(metafunc.config)
    metafunc.parametrize("item", items, ids=[item.name for item in items])


@pytest.mark.attnlib_conformance
def test_conformance(item: Any, attn_subject: Any, request: pytest.FixtureRequest) -> None:
    from .runner import FAILED, REFUSED, run_item

    outcome = run_item(attn_subject, item)
    if outcome["outcome"] == REFUSED:
        mark_refused(request, outcome["message"])
    if outcome["outcome"] == FAILED:
        pytest.fail(outcome["message"], pytrace=False)
