"""The README's Python runs, and what it says of the command line is so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import attnlib
from attnlib import cli

README = Path(__file__).resolve().parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_the_first_example_runs_as_it_stands() -> None:
    with attnlib.use_backend("reference"):
        values: dict[str, Any] = {}
        exec(BLOCKS[0], values)
    assert values["out"].shape == (2, 1024, 8, 64)
    assert all(values[name].grad is not None for name in "qkv")


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    """What the first example leaves to the ones after it."""
    found: dict[str, Any] = {}
    with attnlib.use_backend("reference"):
        exec(BLOCKS[0], found)
    return found


@pytest.mark.parametrize("block", BLOCKS[1:], ids=range(1, len(BLOCKS)))
def test_examples_run(block: str, values: dict[str, Any]) -> None:
    if "from_pretrained" in block:
        block = "\n".join(line for line in block.splitlines() if "from_pretrained" not in line)
        pytest.importorskip("transformers")
    if 'backend="cpu"' in block and "cpu" not in [info.name for info in attnlib.backends() if not info.unusable]:
        pytest.skip("needs the cpu backend")
    with attnlib.use_backend("reference"):
        exec(block.replace("    ...", "    pass"), values)


def test_commands_are_the_command_line() -> None:
    text = README.read_text(encoding="utf-8")
    commands = re.findall(r"`attnlib ([a-z]+)[^`]*`", text)
    assert {"info", "explain", "check", "bench", "support", "demo"} <= set(commands)
    parser = cli._parser()
    for words in re.findall(r"`attnlib (explain [^`]*)`", text):
        if "NAME" not in words and "--" in words:
            parser.parse_args(words.split())
