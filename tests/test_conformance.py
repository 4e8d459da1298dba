"""The suite itself: it passes what is right, sees what is wrong, and reports both."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from attnlib import numerics, registry, settings
from attnlib.backend import Refusal, RefusalCode
from attnlib.conformance import run_check, to_markdown
from attnlib.conformance.cases import CASES, FEATURE_NAMES, IMPOSSIBLE, named, pairs, select
from attnlib.conformance.faults import FAULTS
from attnlib.conformance.mutants import run_mutants
from attnlib.conformance.recipes import RECIPES, make
from attnlib.conformance.runner import chosen
from attnlib.conformance.subject import opened, same_bits
from attnlib.conformance.template import Template
from attnlib.conformance.tiled import Tiled
from attnlib.errors import ArgumentError, UnsupportedError
from attnlib.numerics import Result
from attnlib.problem import Feature

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def items():
    with opened("tiled") as subject:
        return chosen(subject, "full")


# --- a correct backend passes, a faulty one does not ----------------------------------------------------------------


_TOPICS = (
    "AB-", "arguments/", "canary/", "config/", "deterministic/", "dropout/", "empty/", "gradients/", "memory/",
    "merge/", "nan/", "poison/", "refusals/", "repeatable/", "same/", "visible/",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("only", "shard", "least"),
    [(_TOPICS, (1, 3), 80), (("forward/", "backward/"), (1, 4), 100)],
    ids=["topics", "cases"],
)
def test_tiled_passes_and_refuses_nothing(only, shard, least):
    report = run_check("tiled", only=only, shard=shard)
    failed = {check["name"]: check["message"] for check in report["checks"] if check["outcome"] == "failed"}
    assert not failed
    assert report["refused"] == 0
    assert report["passed"] == len(report["checks"]) > least


@pytest.mark.slow
def test_every_mutant_is_killed():
    report = run_mutants("tiled")
    assert report["survived"] == []
    assert report["killed"] == len(FAULTS) >= 90
    assert all(kill["killer"] and kill["message"] for kill in report["mutants"])


def test_a_small_numeric_fault_is_reported_with_the_figures_that_exceed(tmp_path):
    report = run_check("tiled", fault="dv_off", only="backward/plain/float32", report=tmp_path / "report.json")
    assert (report["passed"], report["refused"], report["failed"]) == (0, 0, 1)
    (check,) = report["checks"]
    beyond = [m for m in check["measured"] if not m["passed"]]
    assert beyond
    assert {m["quantity"] for m in beyond} == {"dv"}
    assert all(m["error"] > m["bound"] for m in beyond)
    assert json.loads((tmp_path / "report.json").read_text())["config"] == {"fault": "dv_off"}


def test_an_exception_is_a_failure_with_its_traceback():
    class Crashes(Tiled):
        def plan(self, problem, family, target, config=None):
            raise ZeroDivisionError("the plan's own fault")

    report = run_check(Crashes(), only="forward/plain/float32")
    assert report["failed"] == 1
    assert "ZeroDivisionError: the plan's own fault" in report["checks"][0]["message"]
    assert "Traceback" in report["checks"][0]["message"]


def test_refusing_at_the_call_what_explain_accepted_is_a_failure():
    class Liar(Tiled):
        def plan(self, problem, family, target, config=None):
            reason = Refusal(RefusalCode.OTHER, "mood", "a better day", "today")
            raise UnsupportedError("not today", {"tiled": (reason,)})

    report = run_check(Liar(), only="forward/plain")
    assert report["failed"] == len(report["checks"]) > 0
    assert report["refused"] == 0


def test_outputs_that_are_not_written_are_seen():
    class Idle(Tiled):
        def plan(self, problem, family, target, config=None):
            class Plan:
                def forward(self, problem, tensors):
                    tensors.lse.zero_()

                def backward(self, problem, tensors):
                    pass

            return Plan()

    report = run_check(Idle(), only=("forward/", "backward/"), shard=(1, 10))
    assert report["passed"] == 0
    assert report["failed"] > 40


def test_a_wrong_declaration_of_nan_safety_is_seen():
    report = run_check("tiled", fault="hidden_nan_leaks", only="nan/hidden")
    assert report["failed"] > 0
    report = run_check("tiled", fault="hidden_nan_leaks_backward", only="nan/hidden")
    names = {check["name"] for check in report["checks"] if check["outcome"] == "failed"}
    assert names
    assert all("backward" in name for name in names)


def test_ab_010_nan_in_the_oracle_or_in_the_result_never_passes():
    inputs = make(named("plain"), torch.float32)
    problem = inputs.problem()
    tensors = inputs.tensors(problem)
    expected = numerics.expect(problem, tensors)
    assert expected.oracle.out is not None
    assert expected.oracle.lse is not None
    out, lse = expected.oracle.out.float(), expected.oracle.lse.float()
    assert numerics.judge(problem, tensors, Result(out, lse), expected=expected).passed
    broken = out.clone()
    broken[0, 3] = torch.nan
    assert not numerics.judge(problem, tensors, Result(broken, lse), expected=expected).passed
    inputs.q[0, 3] = torch.nan  # now the oracle is NaN there, and a finite row is wrong
    tensors = inputs.tensors(problem)
    assert not numerics.judge(problem, tensors, Result(out, lse)).passed


# --- refusals and reports -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def template_report():
    return run_check(Template())


def test_the_template_is_short_and_a_correct_port(template_report):
    assert len(inspect.getsource(inspect.getmodule(Template)).splitlines()) < 100
    failed = {check["name"]: check["message"] for check in template_report["checks"] if check["outcome"] == "failed"}
    assert not failed
    assert template_report["passed"] > 100


def test_refused_checks_are_counted_apart_and_say_why(template_report):
    refused = [check for check in template_report["checks"] if check["outcome"] == "refused"]
    assert template_report["refused"] == len(refused) > 100
    assert all(check["refusals"] for check in refused)
    total = sum(template_report[kind] for kind in ("passed", "refused", "failed"))
    assert total == len(template_report["checks"])
    undeclared = {feature.value for feature in set(Feature) - Template().families[0].capabilities.features}
    said = {reason.split(":")[0] for check in refused for reason in check["refusals"]}
    assert undeclared <= said


def test_the_report_is_json_and_markdown(template_report, tmp_path):
    assert json.loads(json.dumps(template_report)) == template_report
    for check in template_report["checks"]:
        assert set(check) == {"name", "outcome", "seconds", "message", "refusals", "measured"}
    assert {"python", "torch", "platform", "threads"} <= set(template_report["versions"])
    text = to_markdown(template_report)
    assert f"| {template_report['passed']} | {template_report['refused']} | {template_report['failed']} |" in text
    assert "backward: needs" in text
    run_check("tiled", only="forward/plain/float32", fault="lse_off", report=tmp_path / "report.md")
    text = (tmp_path / "report.md").read_text()
    assert "### forward/plain/float32" in text
    assert "| lse | lse | 0.0003 | 5e-06 |" in text


def test_progress_is_called_after_every_check():
    seen = []
    report = run_check(Template(), only="refusals/", progress=lambda *call: seen.append(call))
    assert [done for done, _, _ in seen] == list(range(1, len(report["checks"]) + 1))
    assert {total for _, total, _ in seen} == {len(report["checks"])}


def test_every_check_has_a_topic_that_a_test_here_runs(items):
    for item in items:
        assert item.name.startswith((*_TOPICS, "forward/", "backward/")), item.name


def test_shards_cover_everything_once(items):
    with opened("tiled") as subject:
        parts = [chosen(subject, "full", (part, 7)) for part in range(1, 8)]
    names = [item.name for part in parts for item in part]
    assert sorted(names) == sorted(item.name for item in items)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"backend": "no_such"}, "no_such"),
        ({"backend": "tiled", "level": "some"}, "level"),
        ({"backend": "tiled", "shard": (0, 4)}, "shard"),
        ({"backend": "tiled:fast"}, "fast"),
    ],
)
def test_wrong_arguments_are_named(arguments, text):
    with pytest.raises(ArgumentError, match=text):
        run_check(arguments.pop("backend"), **arguments)


def test_nothing_stays_registered():
    before = registry.names()
    run_check(Tiled(), only="forward/plain/float32", fault="lse_off")
    run_check("tiled", only="config/")
    assert registry.names() == before


# --- the cases ------------------------------------------------------------------------------------------------------


def _asked(case):
    for direction in case.directions:
        yield make(case, torch.float32, direction=direction).problem().features


def test_every_feature_has_a_core_case_of_its_own():
    for feature, name in FEATURE_NAMES.items():
        if feature is Feature.BACKWARD:
            continue
        case = named(name)
        assert case.level == "core"
        assert all(feature in features for features in _asked(case)), feature


def test_every_pair_of_features_has_a_case():
    asked = [features for case in select("full") for features in _asked(case)]
    for first, second in pairs():
        assert any({first, second} <= features for features in asked), (first, second)
    for pair in IMPOSSIBLE:
        assert not any(pair <= features for features in asked), pair


def test_random_masks_hide_and_show():
    for case in select("full"):
        inputs = make(case, torch.float32)
        for name in ("mask", "block_mask"):
            mask = inputs.arguments.get(name)
            if mask is not None:
                mask = mask if name == "mask" else mask.mask
                assert mask.any(), case.name
                assert not mask.all(), case.name


def test_compared_tensors_are_large_enough():
    for case in select("full"):
        rows, keys = case.sequences * case.num_heads_q, case.sequences * case.num_heads_kv
        q_lens, kv_lens = case.q_lens or (case.seqlen_q,), case.kv_lens or (case.seqlen_k,)
        rows, keys = rows * sum(q_lens) / len(q_lens), keys * sum(kv_lens) / len(kv_lens)
        smallest = min(rows, keys) * min(case.head_dim, case.dim_v)
        assert smallest >= 4000, case.name  # lengths repeat along batch, so a cut cycle may lack a few


def test_every_recipe_is_used_and_inputs_repeat():
    assert set(RECIPES) <= {case.recipe for case in CASES}
    for name in ("everything", "paged", "append"):
        first, second = make(named(name), torch.bfloat16), make(named(name), torch.bfloat16)
        for which in ("q", "k", "v"):
            same_bits(which, getattr(first, which), getattr(second, which))


def test_layouts_hold_the_same_values():
    plain = make(named("strides-plain"), torch.float32)
    for how in ("transposed", "inner", "misaligned"):
        other = make(replace(named("strides-plain"), strides=how), torch.float32)
        assert other.q.stride() != plain.q.stride() or other.q.data_ptr() % 16
        same_bits(how, other.q, plain.q)


# --- the faults -----------------------------------------------------------------------------------------------------


def test_every_fault_has_a_switch_and_every_switch_a_fault():
    source = "".join(
        inspect.getsource(importlib.import_module(f"attnlib.conformance.{name}")) for name in ("tile", "tiled")
    )
    assert set(re.findall(r'has\("(\w+)"\)', source)) == set(FAULTS)


def test_killers_name_checks_that_exist(items):
    for name, fault in FAULTS.items():
        assert fault.description
        assert fault.killers, name
        for text in fault.killers:
            assert any(text in item.name for item in items), (name, text)


def test_a_config_that_does_not_fit_is_refused():
    problem = make(named("plain"), torch.float32).problem()
    for config in ({"block_q": 0}, {"block_k": "64"}, {"fault": "no_such"}, {"num_stages": 2}):
        with pytest.raises(UnsupportedError, match=next(iter(config))):
            Tiled().plan(problem, "", None, config)


# --- the pytest plugin ----------------------------------------------------------------------------------------------


def _pytest(*arguments, cwd):
    path = os.pathsep.join([str(ROOT), str(ROOT / "attnlib" / "conformance")])
    environment = dict(os.environ, PYTHONPATH=path, PYTEST_ADDOPTS="", OMP_NUM_THREADS="1")
    plugin = [] if _plugin_is_installed() else ["-p", "attnlib_pytest"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *plugin, "--pyargs", "attnlib.conformance"]
    return subprocess.run([*command, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


def _plugin_is_installed():
    return any(p.value == "attnlib_pytest" for p in importlib.metadata.entry_points(group="pytest11"))


def test_the_plugin_collects_one_item_a_check(tmp_path, items):
    done = _pytest("--collect-only", "-q", "--attn-backend=tiled", "--attn-level=full", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    collected = re.findall(r"test_conformance\[(.+)\]", done.stdout)
    assert sorted(collected) == sorted(item.name for item in items)


def test_the_plugin_runs_a_shard(tmp_path):
    done = _pytest("-q", "--attn-backend=tiled", "--attn-shard=3/60", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed", done.stdout)


def test_the_plugin_needs_a_backend(tmp_path):
    done = _pytest(cwd=tmp_path)
    assert done.returncode != 0
    assert "needs --attn-backend=NAME" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("options", "text"), [({"--attn-backend": "no_such"}, "no_such"), ({"--attn-shard": "5/4"}, "--attn-shard")]
)
def test_the_plugin_explains_wrong_options(options, text):
    from attnlib_pytest import items_of

    class Config:
        stash: ClassVar[dict] = {}

        def getoption(self, name):
            defaults = {
                "--attn-backend": "reference",
                "--attn-level": "core",
                "--attn-shard": None,
                "--attn-device": None,
            }
            return {**defaults, **options}[name]

    before = settings.current()
    with pytest.raises(pytest.UsageError, match=text):
        items_of(Config())
    assert settings.current() == before, "a session that never began left its settings behind"


def test_the_plugin_loads_nothing_heavy_until_it_is_used():
    code = "import sys, pytest, attnlib_pytest; print([m for m in ('torch', 'numpy', 'attnlib') if m in sys.modules])"
    path = os.pathsep.join([str(ROOT), str(ROOT / "attnlib" / "conformance")])
    environment = dict(os.environ, PYTHONPATH=path)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_mutants_command(capsys):
    from attnlib.conformance.mutants import main

    assert main(["--fault", "head_modulo", "--fault", "delta_missing"]) == 0
    assert "2 of 2 mutants of tiled killed" in capsys.readouterr().out
    assert main(["--fault", "no_such"]) == 2
    assert main(["--backend", "reference"]) == 2


def test_a_backend_is_asked_for_what_any_of_its_families_takes() -> None:
    """A family for one dtype may stand before the one that takes them all; asked for by name it is held to its own."""
    two = Tiled()
    (wide,) = two.families
    narrow = replace(wide.capabilities, dtypes=frozenset({torch.bfloat16}))
    two.name, two.families = "two", (replace(wide, name="narrow", capabilities=narrow), replace(wide, name="wide"))
    with opened(two) as subject:
        assert subject.family.name == "wide"
        assert subject.capabilities == wide.capabilities
    registry.register_backend(two)
    try:
        with opened("two:narrow") as subject:
            assert subject.dtypes == [torch.bfloat16]
    finally:
        registry.unregister_backend("two")
