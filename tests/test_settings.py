"""Environment variables: read at first use, trimmed, checked, documented in one table."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest

from attnlib import ArgumentError, settings


def test_defaults_and_AB_080_forms():
    assert settings.parse({}) == settings.Settings()
    assert settings.parse({"ATTNLIB_BACKEND": ""}).backend == ""
    assert settings.parse({"ATTNLIB_BACKEND": " CPU "}).backend == "cpu"
    assert settings.parse({"ATTNLIB_BACKEND": "cuda:sm_80, cpu,"}).backend == "cuda:sm_80,cpu"
    parsed = settings.parse({"ATTNLIB_DEBUG": "Poison, shadow:0.25", "ATTNLIB_LOG": "jit", "ATTNLIB_JIT": " Never "})
    assert [settings.parse({"ATTNLIB_AUTOTUNE": text}).autotune for text in ("", "0", " 1 ")] == [False, False, True]
    assert parsed.debug == {"poison"} and parsed.shadow == 0.25 and parsed.log == {"jit"} and parsed.jit == "never"


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("ATTNLIB_JIT", "sometimes", "ATTNLIB_JIT: needs auto or never, got 'sometimes'"),
        ("ATTNLIB_AUTOTUNE", "yes", "ATTNLIB_AUTOTUNE: needs 0 or 1, got 'yes'"),
        ("ATTNLIB_LOG", "all", "ATTNLIB_LOG: needs words of dispatch, jit, got 'all'"),
        ("ATTNLIB_DEBUG", "1", "ATTNLIB_DEBUG: needs words of bounds, poison, sync, shadow:RATE, got '1'"),
        ("ATTNLIB_DEBUG", "shadow:2", "shadow needs a rate from 0 to 1"),
        ("ATTNLIB_DEBUG", "shadow:x", "shadow needs a rate from 0 to 1"),
    ],
)
def test_bad_values_name_the_variable_and_the_choices(name, value, text):
    with pytest.raises(ArgumentError, match=text):
        settings.parse({name: value})


def test_unknown_variable_is_a_warning():
    with pytest.warns(UserWarning, match="ATTNLIB_FOO is not a variable of attnlib.*ATTNLIB_BACKEND"):
        settings.parse({"ATTNLIB_FOO": "1"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        settings.parse({"ATTNLIB_JIT": "auto", "OTHER": "1"})


def test_read_at_first_use_and_not_at_import():
    code = """
import os
os.environ["ATTNLIB_BACKEND"] = "tritn"
import attnlib, torch
x = torch.randn(1, 2, 1, 8)
try:
    attnlib.attention(x, x, x)
except ValueError as error:
    assert "ATTNLIB_BACKEND" in str(error) and "known: reference" in str(error), error
else:
    raise SystemExit("no error")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_override_is_undone():
    before = settings.current()
    with settings.override(jit="never"):
        assert settings.current().jit == "never"
    assert settings.current() is before
