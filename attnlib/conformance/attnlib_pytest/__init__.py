"""pytest options for the conformance suite; imports nothing heavy until they are used.

    pytest --pyargs attnlib.conformance --attn-backend=NAME [--attn-level=full] [--attn-shard=1/4] [--attn-device=cpu]

Installed as a top-level module of its own: pytest imports it at every start, and importing attnlib imports torch.

One test item a check. A refused check is skipped with the reason "REFUSED: ..." and counted apart in the summary.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest

_REFUSED = "attn_refused"
_STACK: Any = pytest.StashKey()
_SUBJECT: Any = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("attnlib", "attnlib conformance")
    group.addoption("--attn-backend", metavar="NAME", help="backend to check, e.g. cpu, cpu:avx2, tiled")
    group.addoption("--attn-level", choices=("core", "full"), default="core", help="how many checks (default core)")
    group.addoption("--attn-shard", metavar="I/N", help="only the I-th of N parts of the checks")
    group.addoption("--attn-device", metavar="DEVICE", help="a torch device (default: one the backend runs on)")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "attnlib_conformance: a check of the conformance suite")


def _shard(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    part, _, parts = text.partition("/")
    if part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts):
        return int(part), int(parts)
    raise pytest.UsageError(f"--attn-shard: needs I/N with I from 1 to N, got {text!r}")


def subject_of(config: pytest.Config) -> Any:
    """The backend that --attn-backend names, opened once a session."""
    if _SUBJECT not in config.stash:
        name = config.getoption("--attn-backend")
        if not name:
            raise pytest.UsageError("attnlib.conformance: needs --attn-backend=NAME")
        from attnlib.conformance.subject import opened
        from attnlib.errors import AttnlibError

        stack = ExitStack()
        try:
            config.stash[_SUBJECT] = stack.enter_context(opened(name, config.getoption("--attn-device")))
        except AttnlibError as error:
            raise pytest.UsageError(f"--attn-backend: {error}") from error
        config.stash[_STACK] = stack
    return config.stash[_SUBJECT]


def items_of(config: pytest.Config) -> list[Any]:
    """The checks that the options select."""
    from attnlib.conformance.runner import chosen

    shard = _shard(config.getoption("--attn-shard"))  # before a backend is opened
    return chosen(subject_of(config), config.getoption("--attn-level"), shard)


def pytest_unconfigure(config: pytest.Config) -> None:
    if _STACK in config.stash:
        config.stash[_STACK].close()


def pytest_report_teststatus(report: Any) -> tuple[str, str, str] | None:
    """Refused checks have a status of their own, so that the last line counts them apart."""
    if getattr(report, "skipped", False) and _REFUSED in getattr(report, "keywords", {}):
        return "refused", "R", "REFUSED"
    return None


def pytest_terminal_summary(terminalreporter: Any) -> None:
    refused = terminalreporter.stats.get("refused", [])
    if not refused:
        return
    reasons: dict[str, int] = {}
    for report in refused:
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = text.removeprefix("Skipped: ")
        reasons[reason] = reasons.get(reason, 0) + 1
    terminalreporter.section("refused by the backend")
    for reason, count in sorted(reasons.items(), key=lambda item: -item[1]):
        terminalreporter.line(f"{count:5}  {reason}")


@pytest.fixture
def attn_subject(request: pytest.FixtureRequest) -> Any:
    """The backend under test."""
    return subject_of(request.config)


def mark_refused(request: pytest.FixtureRequest, message: str) -> None:
    """End a test as refused."""
    request.node.keywords[_REFUSED] = True
    pytest.skip(f"REFUSED: {message}")
