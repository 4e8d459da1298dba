"""The README's Python runs, and what it says of the command line is so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import attnlib
from attnlib import cli

README = Path(__file__).resolve().parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def namespace() -> dict[str, Any]:
    """What the README's examples take for granted."""
    lens = torch.tensor([5, 8], dtype=torch.int32)
    q, k, v = torch.randn(2, 8, 4, 16), torch.randn(2, 8, 2, 16), torch.randn(2, 8, 2, 16)
    return {"torch": torch, "attnlib": attnlib, "lens": lens, "q": q, "k": k, "v": v}


def extra(text: str) -> dict[str, Any]:
    if "cu_seqlens" not in text:
        return {}
    packed = {name: torch.randn(13, heads, 16) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
    return {**packed, "cu_seqlens": torch.tensor([0, 5, 13], dtype=torch.int32)}


def cache(text: str) -> dict[str, Any]:
    if "k_pages" not in text:
        return {}
    return {
        "k_pages": torch.zeros(8, 4, 2, 16),
        "v_pages": torch.zeros(8, 4, 2, 16),
        "kv_lens": torch.tensor([3, 0], dtype=torch.int32),
        "table": torch.arange(8, dtype=torch.int32).reshape(2, 4),
    }


def test_the_first_example_runs_as_it_stands() -> None:
    with attnlib.use_backend("reference"):
        values: dict[str, Any] = {}
        exec(BLOCKS[0], values)
    assert values["out"].shape == (2, 1024, 8, 64)
    assert all(values[name].grad is not None for name in "qkv")


@pytest.mark.parametrize("block", BLOCKS[1:], ids=range(1, len(BLOCKS)))
def test_examples_run(block: str) -> None:
    if "from_pretrained" in block:
        block = "\n".join(line for line in block.splitlines() if "from_pretrained" not in line)
        pytest.importorskip("transformers")
    lines = block.splitlines()
    # Lines that need different tensors are run one by one.
    parts = lines if any("cu_seqlens" in line for line in lines) else [block]
    for part in parts:
        if 'backend="cpu"' in part or 'use_backend("cpu"' in part:
            if "cpu" not in [info.name for info in attnlib.backends() if not info.unusable]:
                pytest.skip("needs the cpu backend")
            part = part.replace("    ...", "    pass")
        with attnlib.use_backend("reference"):
            exec(part, {**namespace(), **extra(part), **cache(part)})


def test_commands_are_the_command_line() -> None:
    text = README.read_text(encoding="utf-8")
    commands = re.findall(r"`attnlib ([a-z]+)[^`]*`", text)
    assert {"info", "explain", "check", "bench", "support", "demo"} <= set(commands)
    parser = cli._parser()
    for words in re.findall(r"`attnlib (explain [^`]*)`", text):
        if "NAME" not in words and "--" in words:
            parser.parse_args(words.split())
