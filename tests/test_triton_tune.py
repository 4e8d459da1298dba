"""Tiles by the clock, without a GPU: kernels that only note their launch, and a clock that is told what to say."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import attnlib_triton
from attnlib import settings
from attnlib.backend import Target
from attnlib.problem import AttentionProblem, Tensors
from attnlib_cuda import cache
from attnlib_triton import archs, config, launch, plan, tune
from attnlib_triton.compile import operands
from attnlib_triton.config import Shape
from attnlib_triton.launch import Spec
from attnlib_triton.plan import TritonPlan

pytestmark = pytest.mark.skipif(archs.triton_version() is None, reason="needs triton")

GPU = Target("cuda", "sm_90", 0)
KERNELS = ("forward", "query_gradient", "key_gradient")
BEST = Shape(64, 32, 4, 2, 0, True)


def problem(**values: Any) -> AttentionProblem:
    sizes = dict(batch=2, seqlen_q=300, seqlen_k=300, num_heads_q=4, num_heads_kv=2, head_dim=64, head_dim_v=64)
    return AttentionProblem(**{"dtype": torch.bfloat16, "scale": 0.125, "grads": ("q", "k", "v"), **sizes, **values})


def tensors(p: AttentionProblem) -> Tensors:
    own = {
        name: x if x is None else torch.zeros(1, dtype=x.dtype).expand(x.shape) if 0 in x.stride()
        else torch.zeros(x.shape, dtype=x.dtype)
        for name, x in vars(next(iter(operands(p)))).items()
    }  # fmt: skip
    return Tensors(**own)


def asked(kernel: str = "forward", p: AttentionProblem | None = None, arch: str = "sm_90", **more: Any) -> tune.Asked:
    known = archs.known(arch)
    assert known is not None
    usual = {"maps": arch == "sm_90", "aligned": True, "wide": False, "small": True}
    return tune.Asked(kernel, p or problem(), known, 0, **{**usual, **more})


def table_of(one: tune.Asked) -> tune.Choice:
    shape = {} if one.maps else {"maps": False}
    if one.kernel == "forward":
        return config.forward(one.problem, one.arch, shape)
    return config.gradient(one.problem, one.arch, one.kernel, shape)


def shape_of(spec: Spec) -> Shape:
    c, with_ = spec.config, spec.launch
    return Shape(c.block_m, c.block_n, with_.warps, with_.stages, with_.registers, c.maps)


class Device:
    """What is launched, and how long it takes: BEST is the fastest of each kernel."""

    def __init__(self) -> None:
        self.launched: list[tuple[Spec, tuple[Any, ...]]] = []
        self.timed: list[Shape] = []
        self.capturing = False
        self.fail: Callable[[Spec], Exception | None] = lambda spec: None
        self.seconds: Callable[[Shape], float] = lambda shape: 2.0 - (shape[:2] == BEST[:2]) / 2 - (shape == BEST) / 2

    def load(self, spec: Spec, arch: str, index: int) -> Any:
        def start(*given: Any) -> None:
            error = self.fail(spec)
            if error is not None:
                raise error
            self.launched.append((spec, given))

        class Kernel:
            def __getitem__(self, grid: Any) -> Callable[..., None]:
                return start

        return Kernel()

    def clock(self, call: Callable[[], None]) -> float:
        before = len(self.launched)
        call()
        (shape,) = (shape_of(spec) for spec, _ in self.launched[before:] if spec.kernel in KERNELS)
        self.timed.append(shape)
        return self.seconds(shape)

    def shapes(self) -> dict[str, Shape]:
        """The last launch of each kernel."""
        return {spec.kernel: shape_of(spec) for spec, _ in self.launched if spec.kernel in KERNELS}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Device]:
    made = Device()
    monkeypatch.setattr(launch, "_loaded", made.load)
    monkeypatch.setattr(tune, "_seconds", made.clock)
    monkeypatch.setattr(tune, "_device_name", lambda index: "A GPU")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capturing)
    forget(monkeypatch)
    with settings.override(autotune=True, cache_dir=str(tmp_path / "cache")):
        yield made
    cache.reset()


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a new process."""
    monkeypatch.setattr(tune, "_decided", {})
    cache.reset()


def run(p: AttentionProblem, t: Tensors, made: TritonPlan | None = None) -> TritonPlan:
    made = made or TritonPlan(p, GPU)
    made.forward(p, t)
    made.backward(p, t)
    return made


def unexpected(*given: Any) -> None:
    raise AssertionError("nothing is to be read")


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "cuda").glob("triton-tiles-*/tiles.json"))


# --- what is chosen ---------------------------------------------------------------------------------------------------


def test_the_fastest_is_launched_and_found_by_the_next_process(device, tmp_path, monkeypatch):
    p = problem()
    t = tensors(p)
    run(p, t)
    assert len(files(tmp_path)) == 3 and len(set(device.timed)) >= 10
    assert device.shapes() == dict.fromkeys(KERNELS, BEST)
    device.timed.clear()
    forget(monkeypatch)
    for _ in range(3):
        made = run(p, t)
        monkeypatch.setattr(cache, "find", unexpected)  # what is decided needs no file
    assert device.timed == [BEST] * 3 and device.shapes() == dict.fromkeys(KERNELS, BEST)  # once, to see that it runs
    run(p, t, made)
    assert len(made._forms) == 2  # kept, as without the clock


@pytest.mark.parametrize("more", [{"page_size": 16, "packed": True, "total_q": 500}, {"bias": torch.float32},
                                  {"dropout_p": 0.1}, {"seqlen_q": 1, "seqlen_k": 9000, "grads": ()},
                                  {"bias": torch.float32, "grads": ("q", "bias")},
                                  {"append": True, "seqlen_q": 2, "grads": ()}])  # fmt: skip
def test_other_forms_are_timed(device, tmp_path, more):
    p = problem(**more)
    made = TritonPlan(p, GPU)
    made.forward(p, t := tensors(p))
    if p.grads:
        made.backward(p, t)
    assert len(files(tmp_path)) == 1 + bool(p.grads) + ("k" in p.grads)


def test_the_table_stays_where_nothing_is_clearly_faster(device, tmp_path):
    device.seconds = lambda shape: 0.99 if shape[:2] == BEST[:2] else 1.0
    p = problem()
    run(p, tensors(p))
    assert device.shapes() == {kernel: tune.candidates(one, table_of(one))[0]
                               for kernel in KERNELS for one in [asked(kernel)]}  # fmt: skip
    assert len(files(tmp_path)) == 3


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942", "gfx1100"])
def test_candidates_fit_and_begin_with_the_table(arch):
    for kernel in KERNELS:
        for maps in {False, arch == "sm_90"}:
            one = asked(kernel, arch=arch, maps=maps)
            c, with_ = table_of(one)
            shapes = tune.candidates(one, (c, with_))
            assert shapes[0] == shape_of(Spec(kernel, c, with_)) and 5 < len(shapes) == len(set(shapes)) < 20
            assert any(shape.maps for shape in shapes) == maps
            for shape in shapes:
                assert config.shared_bytes(one.problem, one.arch, shape, kernel != "forward") <= one.arch.shared_bytes


def test_operands_that_the_copy_engine_cannot_fetch_are_a_form_of_their_own(device, tmp_path):
    p = problem(grads=())
    made, t = TritonPlan(p, GPU), tensors(p)
    made.forward(p, t)
    device.timed.clear()
    device.seconds = lambda shape: 2.0 - (shape[:2] == BEST[:2]) / 2 - (shape[:4] == BEST[:4]) / 2
    made.forward(p, replace(t, k=t.k[:, :1].expand(t.k.shape)))
    assert device.timed and not any(shape.maps for shape in device.timed)
    assert device.shapes()["forward"] == BEST._replace(maps=False) and len(files(tmp_path)) == 2


def test_two_threads_time_once(device):
    p = problem(grads=())
    plans = [TritonPlan(p, GPU) for _ in range(4)]
    threads = [threading.Thread(target=made.forward, args=(p, tensors(p))) for made in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rounds = tune._WARM + tune._TIMED
    counts = sorted(device.timed.count(shape) for shape in set(device.timed))
    assert counts == [rounds] * (len(counts) - 1) + [2 * rounds], "the fastest tile is timed again beside its variants"


# --- what is left alone -----------------------------------------------------------------------------------------------


def test_trials_write_to_one_set_of_results_that_is_not_the_callers(device, monkeypatch):
    p = problem(dropout_p=0.1)
    t = tensors(p)
    made: list[weakref.ref[torch.Tensor]] = []
    empty = torch.empty_strided

    def counted(*args: Any, **more: Any) -> torch.Tensor:
        x = empty(*args, **more)
        made.append(weakref.ref(x))
        return x

    monkeypatch.setattr(plan.torch, "empty_strided", counted)
    random, cpu_state = torch.get_rng_state(), {name: x for name, x in vars(t).items() if x is not None}
    run(p, t)
    assert len(made) == 2 + 1 + 2 and not any(x() is not None for x in made)  # out, lse; dq; dk, dv
    assert torch.equal(random, torch.get_rng_state())
    assert all(getattr(t, name) is x for name, x in cpu_state.items())
    for kernel, names in (("forward", ("OUT", "LSE")), ("query_gradient", ("DQ",)), ("key_gradient", ("DK", "DV"))):
        for name in names:
            place = launch.arguments(kernel).index(name)
            written = [given[place] for spec, given in device.launched if spec.kernel == kernel]
            mine = getattr(t, name.lower()).data_ptr()
            assert written.count(mine) == 1 and written[-1] == mine and len(set(written)) == 2


def test_without_the_setting_nothing_is_asked(device, monkeypatch):
    monkeypatch.setattr(tune, "choose", None)
    monkeypatch.setattr(tune, "key_of", None)
    p = problem()
    with settings.override(autotune=False):
        run(p, tensors(p))


def test_where_nothing_is_timed(device, monkeypatch):
    p = problem(grads=())
    t = tensors(p)
    TritonPlan(p, Target("cuda", "sm_90", None, present=False)).forward(p, t)
    TritonPlan(p, GPU, {"num_splits": 1}).forward(p, t)
    TritonPlan(p, GPU, None, lambda *given: None).forward(p, t)
    assert not device.timed
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not TritonPlan(p, GPU)._may_time


# --- failures ---------------------------------------------------------------------------------------------------------


def test_a_shape_that_fails_is_left_out(device, tmp_path):
    calls = []

    def fail(spec: Spec) -> Exception | None:
        if shape_of(spec) != BEST:
            return None
        calls.append(spec)
        return RuntimeError("does not load") if len(calls) > 3 else None

    device.fail = fail  # it is the fastest, and fails at the fourth time
    p = problem(grads=())
    TritonPlan(p, GPU).forward(p, tensors(p))
    assert device.shapes()["forward"] != BEST and len(calls) == 4 and len(files(tmp_path)) == 1
    notes = next((tmp_path / "cache" / "cuda").glob("*/entry.json")).read_text()
    assert "does not load" in notes


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("Triton Error [CUDA]: out of memory")]
)
def test_memory_that_runs_out_leaves_the_table(device, tmp_path, error):
    device.fail = lambda spec: error if shape_of(spec) == BEST else None
    p = problem(grads=())
    made, t = TritonPlan(p, GPU), tensors(p)
    for _ in range(3):
        made.forward(p, t)
        count = len(device.timed)
        assert device.shapes()["forward"] == shape_of(Spec("forward", *made._kernels.forward))
    assert 0 < count == len(device.timed) < 60, "it was tried again"
    assert not files(tmp_path) and len(made._forms) == 1


def test_memory_that_runs_out_for_the_results(device, monkeypatch):
    def empty(*args: Any, **more: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    p = problem(grads=())
    with monkeypatch.context() as patch:
        patch.setattr(plan.torch, "empty_strided", empty)
        TritonPlan(p, GPU).forward(p, tensors(p))
    TritonPlan(p, GPU).forward(p, tensors(p))
    assert not device.timed and len(device.launched) == 2
    gc.collect()


def test_all_that_fail_leave_the_table(device, monkeypatch):
    def broken(call: Callable[[], None]) -> float:
        device.timed.append(BEST)
        raise RuntimeError("no events")

    monkeypatch.setattr(tune, "_seconds", broken)
    p = problem(grads=())
    for _ in range(2):
        TritonPlan(p, GPU).forward(p, tensors(p))
    assert len(device.timed) == len(tune.candidates(asked(), table_of(asked())))


def test_a_fixed_order_has_the_tables_tiles(device, tmp_path):
    """What is deterministic is the same in every process, whatever was timed there."""
    p = problem(deterministic=True)
    made = run(p, tensors(p))
    assert not device.timed and not files(tmp_path)
    assert {told["tiles"] for told in (made.describe(p), made.describe(p)["key_gradient"])} == {"table"}


def test_the_first_process_to_store_decides(device, tmp_path, monkeypatch):
    """Another one that timed at the same moment takes what is there."""
    p, seen = problem(grads=()), []
    stored = tune._stored

    def late(one: tune.Asked) -> Any:
        seen.append(one)
        return None if len(seen) == 2 else stored(one)  # as if nothing were there when timing begins

    TritonPlan(p, GPU).forward(p, tensors(p))
    forget(monkeypatch)
    device.seconds = lambda shape: 1.0 if shape[:2] == (128, 64) else 2.0
    monkeypatch.setattr(tune, "_stored", lambda one: late(one))
    seen.append(None)
    TritonPlan(p, GPU).forward(p, tensors(p))
    assert len(seen) > 2 and device.shapes()["forward"] == BEST


def test_a_stored_choice_that_fails_is_timed_again(device, tmp_path, monkeypatch):
    p = problem(grads=())
    TritonPlan(p, GPU).forward(p, tensors(p))
    forget(monkeypatch)
    device.fail = lambda spec: RuntimeError("too many registers") if shape_of(spec) == BEST else None
    TritonPlan(p, GPU).forward(p, tensors(p))
    taken = device.shapes()["forward"]
    assert taken != BEST and len(files(tmp_path)) == 1
    forget(monkeypatch)
    device.timed.clear()
    TritonPlan(p, GPU).forward(p, tensors(p))
    assert device.shapes()["forward"] == taken and len(device.timed) == 1


def test_memory_that_runs_out_says_nothing_of_a_stored_choice(device, tmp_path, monkeypatch):
    p = problem(grads=())
    TritonPlan(p, GPU).forward(p, tensors(p))
    (file,) = files(tmp_path)
    kept = file.read_bytes()
    forget(monkeypatch)
    device.timed.clear()
    monkeypatch.setattr(tune, "_seconds", lambda call: (_ for _ in ()).throw(torch.OutOfMemoryError("out of memory")))
    TritonPlan(p, GPU).forward(p, tensors(p))
    assert device.shapes()["forward"] == BEST and not device.timed and file.read_bytes() == kept


def test_the_gradient_of_a_broadcast_bias_is_no_part_of_a_trial(device):
    p = problem(bias=torch.float32, grads=("q", "k", "v", "bias"))
    t = tensors(p)
    run(p, replace(t, dbias=torch.zeros(1, 1, 1, 300).expand(t.dbias.shape)))
    assert sum(spec.kernel == "bias_gradient" for spec, _ in device.launched) == 1
    assert tune.key_of(asked("query_gradient", p)) != tune.key_of(asked("query_gradient", p, stores=True))


# --- capture and ATTNLIB_JIT=never ------------------------------------------------------------------------------------


def test_a_captured_call_is_not_timed_and_decides_nothing(device):
    p = problem()
    made, t = TritonPlan(p, GPU), tensors(p)
    device.capturing = True
    for _ in range(3):
        run(p, t, made)
    assert not device.timed and len(made._forms) == 0
    device.capturing = False
    run(p, t, made)
    assert device.shapes() == dict.fromkeys(KERNELS, BEST)


@pytest.mark.parametrize("how", ["capture", "never"])
def test_what_is_stored_is_used_where_nothing_is_timed(device, monkeypatch, how):
    p = problem()
    run(p, tensors(p))
    forget(monkeypatch)
    device.timed.clear()
    device.launched.clear()
    device.capturing = how == "capture"
    with settings.override(jit="never") if how == "never" else contextlib.nullcontext():
        run(p, tensors(p))
    assert not device.timed and device.shapes() == dict.fromkeys(KERNELS, BEST)


def test_jit_never_without_anything_stored(device, monkeypatch):
    p = problem(grads=())
    made, t = TritonPlan(p, GPU), tensors(p)
    with settings.override(jit="never"):
        made.forward(p, t)
        monkeypatch.setattr(cache, "find", unexpected)
        made.forward(p, t)
    assert not device.timed and len(made._forms) == 1


# --- the cache --------------------------------------------------------------------------------------------------------


def test_what_a_choice_holds_for(device):
    one = asked(p=problem(seqlen_q=1000, seqlen_k=1000))
    key, p, arch = tune.key_of(one), one.problem, one.arch
    assert key == tune.key_of(one._replace(problem=replace(p, seqlen_q=1024, seqlen_k=600, total_q=-1, total_k=-1)))
    assert key == tune.key_of(one._replace(device=1))  # of the same kind
    others = [one._replace(problem=replace(p, **more)) for more in (
        {"seqlen_q": 1025}, {"seqlen_k": 512}, {"batch": 3}, {"window": (None, 0)}, {"window": (64, 0)},
        {"window": (65, 0)}, {"dropout_p": 0.1}, {"head_dim": 32}, {"num_heads_q": 8, "num_heads_kv": 4},
        {"dtype": torch.float16}, {"grads": ("q",)}, {"deterministic": True}, {"tf32": True},
    )]  # fmt: skip
    others += [one._replace(arch=replace(arch, multiprocessors=114)), one._replace(kernel="key_gradient")]
    others += [one._replace(**{name: not getattr(one, name)}) for name in ("maps", "aligned", "wide", "small")]
    assert len({key, *map(tune.key_of, others)}) == 1 + len(others)


def test_devices_and_versions_are_told_apart(device, monkeypatch):
    keys = {tune.key_of(asked())}
    for name, value in (("_device_name", lambda index: "Another"), ("_versions", lambda: ("0", "0", "0"))):
        monkeypatch.setattr(tune, name, value)
        tune.key_of.cache_clear()
        keys.add(tune.key_of(asked()))
    tune.key_of.cache_clear()
    assert len(keys) == 3


def test_keys_do_not_depend_on_the_order_of_sets():
    program = (
        "import torch\nfrom attnlib_triton import archs, tune\nfrom attnlib.problem import AttentionProblem\n"
        "tune._device_name = lambda index: 'A GPU'\n"
        "p = AttentionProblem(torch.float16, 1, 64, 64, 4, 2, 64, 32, 0.1, window=(3, 0), softcap=2.0, mask=True,\n"
        "    alibi=True, dropout_p=0.5, grads=('q', 'k', 'v'), bias=torch.float32)\n"
        "print(tune.key_of(tune.Asked('forward', p, archs.known('sm_80'), 0, False, True, False, True)))\n"
    )
    found = {
        subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed},
                       capture_output=True, text=True, check=True).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(found) == 1 and "{'" not in found.pop()


@pytest.mark.parametrize(
    "text", ["", "[]", '{"block_m": 64}', '{"block_m": 24, "block_n": 64, "warps": 4, "stages": 2}']
)
@pytest.mark.parametrize("signed", [False, True])
def test_a_damaged_file_is_a_warning_and_replaced(device, tmp_path, monkeypatch, text, signed):
    p = problem(grads=("q",))
    run(p, tensors(p))
    for file in files(tmp_path):
        if signed:  # as another version could have written it
            cache.publish(file.parent.name, {file.name: text.encode()}, {}, replace=True)
        else:
            file.write_text(text)
    forget(monkeypatch)
    device.timed.clear()
    with pytest.warns(RuntimeWarning, match="cannot be read") as caught:
        run(p, tensors(p))
    assert len(caught) == 1 and device.timed and device.shapes()["forward"] == BEST
    forget(monkeypatch)
    device.timed.clear()
    run(p, tensors(p))
    assert device.timed == [BEST] * 2, "what is stored is tried once, and not timed again"


def test_a_cache_that_cannot_be_written_is_a_warning(device, tmp_path):
    (tmp_path / "file").write_text("")
    p = problem()
    with settings.override(cache_dir=str(tmp_path / "file")):
        with pytest.warns(RuntimeWarning) as caught:
            run(p, tensors(p))
        count = len(device.timed)
        assert len(caught) == 1 and device.shapes() == dict.fromkeys(KERNELS, BEST)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run(p, tensors(p))
        assert len(device.timed) == count


# --- explain ----------------------------------------------------------------------------------------------------------


def test_explain_says_where_tiles_are_from(device, monkeypatch):
    p = problem()

    def told(**more: Any) -> tuple[dict[str, Any], set[str]]:
        with settings.override(**more):
            found = dict(attnlib_triton.backend.describe(p, "", GPU))
        parts = [found, found["query_gradient"], found["key_gradient"]]
        return found, {part["tiles"] for part in parts}

    assert told()[1] == {"table, to be timed at the first call"}
    assert told(jit="never")[1] == told(autotune=False)[1] == {"table"}
    run(p, tensors(p))
    for _ in range(2):
        found, origins = told()
        assert origins == {"timed"} and (found["block_m"], found["block_n"]) == BEST[:2]
        forget(monkeypatch)
    assert told(autotune=False)[1] == {"table"}
    assert attnlib_triton.backend.describe(p, "", replace(GPU, present=False))["tiles"] == "table"
