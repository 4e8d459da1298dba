"""The triton backend without a GPU: configurations, refusals, which devices it takes, Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import attnlib
import attnlib_triton
from attnlib import dispatch, targets
from attnlib.backend import RefusalCode, Target
from attnlib.errors import KernelError, UnsupportedError
from attnlib.problem import AttentionProblem, Tensors
from attnlib_triton import archs, config, launch, plan
from attnlib_triton.compile import operands
from attnlib_triton.launch import Spec
from attnlib_triton.plan import TritonPlan

ARCHS = (*archs.AMD, "sm_80", "sm_86", "sm_90", "sm_120")
Q = torch.zeros(2, 64, 4, 64, dtype=torch.bfloat16)

needs_triton = pytest.mark.skipif(archs.triton_version() is None, reason="needs triton")


def problem(**values: object) -> AttentionProblem:
    sizes = dict(batch=2, seqlen_q=300, seqlen_k=300, num_heads_q=4, num_heads_kv=2, head_dim=64, head_dim_v=64)
    return AttentionProblem(**{"dtype": torch.bfloat16, "scale": 0.125, **sizes, **values})  # type: ignore[arg-type]


def known(name: str) -> archs.Arch:
    found = archs.known(name)
    assert found is not None
    return found


# --- configurations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dims", [(1, 1), (40, 40), (64, 64), (80, 128), (128, 128), (192, 128), (256, 256)])
def test_every_architecture_has_tiles_that_fit(name: str, dtype: torch.dtype, dims: tuple[int, int]):
    arch = known(name)
    for bias in (None, torch.float32, torch.float64):
        for seqlen_q, dropout in ((1, 0.0), (300, 0.0), (300, 0.5)):
            asked = problem(
                dtype=dtype, head_dim=dims[0], head_dim_v=dims[1], bias=bias, seqlen_q=seqlen_q, dropout_p=dropout,
                grads=("q", "k", "v"),
            )  # fmt: skip
            for kernel in ("forward", *config.GRADIENTS):

                def choose(kernel: str = kernel, asked: AttentionProblem = asked):
                    if kernel == "forward":
                        return config.forward(asked, arch)
                    return config.gradient(asked, arch, kernel)

                chosen, with_ = choose()
                assert choose() == (chosen, with_)
                shape = config.Shape(chosen.block_m, chosen.block_n, with_.warps, with_.stages)
                assert config.shared_bytes(asked, arch, shape, kernel != "forward") <= arch.shared_bytes
                assert chosen.block_m >= 16 and chosen.block_n >= 32
                assert config.width(dims[0]) >= dims[0] and config.width(dims[1]) >= dims[1]


@pytest.mark.parametrize(
    ("dim", "expected"), [(1, (16, 0)), (64, (64, 0)), (80, (64, 16)), (112, (128, 0)), (192, (128, 64))]
)
def test_chunks(dim: int, expected: tuple[int, int]):
    assert config.chunks(dim) == expected


def test_a_bias_takes_shared_memory():
    dims = {"head_dim": 128, "head_dim_v": 128}
    plain, biased = (config.forward(problem(bias=bias, **dims), known("sm_86")) for bias in (None, torch.float64))
    assert plain[0].block_m * plain[0].block_n > biased[0].block_m * biased[0].block_n
    shape = config.Shape(128, 128, 8, 3)
    more = config.shared_bytes(problem(bias=torch.float64), known("sm_90"), shape)
    assert more == config.shared_bytes(problem(), known("sm_90"), shape) + 2 * 128 * 128 * 8


def test_maps_are_used_where_they_were_found_faster():
    def with_maps(name: str, kernel: str = "forward", **values: object) -> bool:
        p, arch = problem(**values), known(name)
        return (config.forward(p, arch) if kernel == "forward" else config.gradient(p, arch, kernel))[0].maps

    for kernel in ("forward", "query_gradient", "key_gradient"):
        for dim in (16, 64, 128):
            assert with_maps("sm_90", kernel, head_dim=dim, head_dim_v=dim)
            assert not with_maps("sm_80", kernel, head_dim=dim, head_dim_v=dim)
        for values in ({"head_dim": 80}, {"head_dim_v": 256}, {"bias": torch.float32}, {"mask": True},
                       {"dtype": torch.float32}, {"window": (5, 5)},
                       {"packed": True, "total_q": 64, "total_k": 64}):  # fmt: skip
            assert not with_maps("sm_90", kernel, **values)
    assert not with_maps("sm_90", seqlen_q=64)


def test_operands_that_the_copy_engine_cannot_fetch_are_read_by_pointers():
    p = problem(grads=("q", "k", "v"))
    launched: list[Spec] = []
    plan = TritonPlan(p, target("sm_90"), None, lambda spec, *_: launched.append(spec))
    for tensors in operands(p):
        for k in (tensors.k, torch.empty(2, 1, 2, 64, dtype=p.dtype, device="meta").expand(2, 300, 2, 64)):
            launched.clear()
            plan.forward(p, replace(tensors, k=k))
            plan.backward(p, replace(tensors, k=k))
            found = {spec.kernel: (spec.config, spec.launch) for spec in launched}
            maps = k is tensors.k
            for kernel in ("forward", "query_gradient", "key_gradient"):
                chosen, with_ = found[kernel]
                choose = config.forward if kernel == "forward" else partial(config.gradient, kernel=kernel)
                wanted, its = choose(p, known("sm_90"), shape={"maps": maps})
                assert chosen.maps is maps and with_ == its
                assert (chosen.block_m, chosen.block_n) == (wanted.block_m, wanted.block_n)


def test_float32_scores_are_exact_and_natural_unless_tf32_is_allowed():
    for tf32 in (False, True):
        chosen, _ = config.forward(problem(dtype=torch.float32, tf32=tf32), known("sm_90"))
        assert chosen.natural and not chosen.raw and chosen.exact is not tf32
        assert chosen.precision == ("tf32" if tf32 else "tf32x3")
    chosen, _ = config.forward(problem(), known("sm_90"))
    assert chosen.raw and not chosen.natural and not chosen.exact


def test_size_classes_are_few():
    found = {attnlib_triton.backend.size_class(problem(seqlen_q=n), "", target("sm_90")) for n in range(1, 5000)}
    assert len(found) <= 16


@pytest.mark.parametrize(
    "wanted",
    [
        {"block_m": 24}, {"block_n": 16}, {"stages": 99}, {"fault": "none such"}, {"num_splits": 0},
        {"num_splits": "3"}, {"query_gradient": {"rows": 16}}, {"registers": 256}, {"maps": 1},
    ],
)  # fmt: skip
def test_a_config_that_does_not_fit_is_refused(wanted: dict[str, object]):
    with pytest.raises(UnsupportedError, match="triton: config: "):
        attnlib_triton.backend.plan(problem(), "", target("sm_90"), wanted)


@pytest.mark.parametrize(("arch", "wanted"), [("sm_80", {"maps": True}), ("gfx942", {"registers": 128})])
def test_what_an_architecture_does_not_have_is_refused(arch: str, wanted: dict[str, object]):
    with pytest.raises(UnsupportedError, match="triton: config: "):
        attnlib_triton.backend.plan(problem(), "", target(arch), wanted)


def test_keys_are_not_shared_out_where_the_backward_needs_the_row_sums():
    biased = problem(bias=torch.float32, grads=("q",))
    assert attnlib_triton.backend.plan(biased, "", target("sm_90"), {"num_splits": 1})
    with pytest.raises(UnsupportedError, match="num_splits"):
        attnlib_triton.backend.plan(biased, "", target("sm_90"), {"num_splits": 2})


# --- dispatch ---------------------------------------------------------------------------------------------------------


def target(arch: str, present: bool = False) -> Target:
    return Target("rocm" if arch.startswith("gfx") else "cuda", arch, 0 if present else None, present=present)


def test_the_order_on_each_kind_of_device():
    assert dispatch.DEFAULT_ORDER["rocm"][0] == "triton"
    order = dispatch.DEFAULT_ORDER["cuda"]
    assert order.index("cuda") < order.index("triton") < order.index("cupy")


@needs_triton
@pytest.mark.parametrize("arch", list(archs.AMD))
def test_an_amd_device_gets_triton(arch: str):
    explained = attnlib.explain(Q, Q, Q, causal=True, device=arch)
    assert explained.chosen == "triton"
    details = explained.details
    assert details is not None and details["kernel"] == "forward"
    chosen, with_ = config.forward(problem(seqlen_q=64, seqlen_k=64, window=(None, 0), num_heads_kv=4), known(arch))
    assert (details["block_m"], details["block_n"], details["warps"]) == (chosen.block_m, chosen.block_n, with_.warps)


@needs_triton
def test_an_nvidia_device_can_be_asked_for_triton():
    assert attnlib.explain(Q, Q, Q, device="sm_90", backend="triton").chosen == "triton"
    old = attnlib.explain(Q, Q, Q, device="sm_75", backend="triton")
    assert old.chosen is None and "sm_80 or later" in str(old)


def test_a_rocm_device_is_known_by_its_gcn_name(monkeypatch: pytest.MonkeyPatch):
    properties = SimpleNamespace(
        gcnArchName="gfx942:sramecc+:xnack-", multi_processor_count=304, shared_memory_per_block=65536,
        L2_cache_size=4 << 20, warp_size=64,
    )  # fmt: skip
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(targets, "_targets", {})
    found = targets.target_of(torch.device("cuda", 0))
    assert (found.kind, found.arch) == ("rocm", "gfx942")
    assert archs.arch_of(found).multiprocessors == 304 and archs.arch_of(found).kind == "cdna"


def test_triton_is_not_imported_before_a_kernel_is_needed():
    program = (
        "import sys, torch, attnlib, attnlib_triton\n"
        "q = torch.zeros(1, 8, 2, 16, dtype=torch.float16)\n"
        "attnlib.explain(q, q, q, device='gfx942', backend='triton')\n"
        "assert 'triton' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_without_triton_there_is_a_refusal_with_a_remedy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(archs, "triton_version", lambda: None)
    (refusal,) = attnlib_triton.backend.available("", target("gfx942"))
    assert refusal.code is RefusalCode.PACKAGE and "pip install" in refusal.remedy


def test_an_old_triton_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(archs, "triton_version", lambda: (3, 5, 1))
    (refusal,) = attnlib_triton.backend.available("", target("gfx942"))
    assert refusal.code is RefusalCode.PACKAGE and "3.5.1" in str(refusal)


def test_without_a_compiler_there_is_a_refusal_where_it_would_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(archs, "triton_version", lambda: (3, 9, 0))
    monkeypatch.setattr(archs, "compiler", lambda: None)
    assert attnlib_triton.backend.available("", target("sm_90")) == ()
    (refusal,) = attnlib_triton.backend.available("", target("sm_90", present=True))
    assert "CC" in refusal.remedy


@pytest.mark.parametrize(("arch", "remedy"), [("gfx1103", "HSA_OVERRIDE_GFX_VERSION=11.0.0"), ("gfx906", "another")])
def test_an_architecture_that_is_not_compiled_for_is_refused(arch: str, remedy: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(archs, "triton_version", lambda: (3, 9, 0))
    (refusal,) = attnlib_triton.backend.available("", target(arch))
    assert refusal.code is RefusalCode.ARCH and remedy in refusal.remedy


@needs_triton
def test_float64_is_refused():
    wide = Q.double()
    explained = attnlib.explain(wide, wide, wide, device="gfx942", backend="triton")
    assert explained.chosen is None and "float64" in str(explained)


# --- the second call of a form ----------------------------------------------------------------------------------------


def in_memory(tensors: Tensors) -> Tensors:
    """The same operands with memory of their own."""
    own = {
        name: x if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
        for name, x in vars(tensors).items()
    }
    return Tensors(**own)


def told(value: object) -> object:
    """What a launch was given, in a form that can be compared."""
    if type(value).__name__ == "TensorDescriptor":
        fields = {name: x for name, x in vars(value).items() if name != "base"}
        return fields, value.base.data_ptr(), value.base.dtype
    return value


FORMS = {
    "plain": {}, "mapped": {"head_dim": 128, "head_dim_v": 128}, "pointers": {"head_dim": 80, "head_dim_v": 80},
    "dropout": {"dropout_p": 0.1}, "sinks": {"sinks": torch.float32}, "alibi": {"alibi": True},
    "bias": {"bias": torch.float32}, "mask": {"mask": True}, "blocks": {"block_mask": (64, 64)},
    "packed": {"packed": True, "total_q": 500, "total_k": 490}, "lengths": {"lengths": True},
    "paged": {"packed": True, "total_q": 500, "page_size": 16}, "cap": {"softcap": 3.0},
    "decode": {"seqlen_q": 1, "seqlen_k": 9000}, "append": {"seqlen_q": 2, "append": True, "lengths": True},
    "window": {"window": (5, 0)}, "float32": {"dtype": torch.float32}, "lse": {}, "keys": {},
}  # fmt: skip


@needs_triton
@pytest.mark.parametrize("name", FORMS)
def test_the_second_call_of_a_form_launches_the_same(name: str, monkeypatch: pytest.MonkeyPatch):
    launched: list[tuple[object, ...]] = []
    workspaces: list[int] = []

    class Kernel:
        def __init__(self, spec: Spec, arch: str, index: int) -> None:
            self.about = (spec, arch, index)

        def __getitem__(self, grid: tuple[int, int, int]):
            return lambda *given: launched.append((*self.about, grid, *map(told, given)))

    def counted(shape, dtype, device):
        made = torch.empty(shape, dtype=dtype)
        workspaces.append(made.data_ptr())
        kept_alive.append(made)
        return made

    kept_alive: list[torch.Tensor] = []
    monkeypatch.setattr(launch, "_loaded", Kernel)
    monkeypatch.setattr(plan, "allocate", counted)
    grads = {"append": (), "decode": (), "sinks": ("q", "k", "v", "sinks"), "keys": ("k",)}.get(name, ("q", "k", "v"))
    p = problem(grads=grads, **FORMS[name])
    same_bound = next(iter(operands(p)))
    if name == "lse":
        same_bound = replace(same_bound, dlse=same_bound.lse)
    first, second = in_memory(same_bound), in_memory(same_bound)

    def run(plan_: TritonPlan, tensors: Tensors) -> list[tuple[object, ...]]:
        """What is launched, with workspaces by their order."""
        launched.clear()
        workspaces.clear()
        plan_.forward(p, tensors)
        if grads:
            plan_.backward(p, tensors)
        places = {address: f"workspace {place}" for place, address in enumerate(workspaces)}
        return [tuple(places.get(x, x) if isinstance(x, int) else x for x in one) for one in launched]

    one, fresh = (TritonPlan(p, target("sm_90")) for _ in range(2))
    run(one, first)
    run(one, first)
    assert len(one._forms) == 1 + bool(grads), "a form was not kept"
    with monkeypatch.context() as patch:
        patch.setattr(plan, "_Call", None)  # what makes arguments anew
        again = run(one, second)
    assert again == run(fresh, second) and again
    assert run(one, first) == run(TritonPlan(p, target("sm_90")), first) != again


@needs_triton
def test_what_fails_to_load_is_a_kernel_error(monkeypatch: pytest.MonkeyPatch):
    class Broken:
        def __getitem__(self, grid: tuple[int, int, int]):
            raise RuntimeError("Triton Error [CUDA]: device kernel image is invalid")

    monkeypatch.setattr(launch, "_loaded", lambda *about: Broken())
    p = problem()
    with pytest.raises(KernelError, match="forward: .*image is invalid"):
        TritonPlan(p, target("sm_90")).forward(p, in_memory(next(iter(operands(p)))))


@needs_triton
def test_operands_of_another_form_are_not_launched_alike(monkeypatch: pytest.MonkeyPatch):
    launched: list[tuple[object, ...]] = []
    monkeypatch.setattr(launch, "_loaded", lambda *about: {(10, 1, 1): lambda *given: launched.append(given)})
    p = problem(seqlen_q=300, num_heads_kv=4)
    monkeypatch.setattr(plan, "_tiles", lambda *_: (10, 1))
    one = TritonPlan(p, target("sm_80"))
    tensors = in_memory(next(iter(operands(p))))
    shared = replace(tensors, k=tensors.v)
    for t in (shared, tensors, shared, tensors):
        one.forward(p, t)
    places = [launch.arguments("forward").index(name) for name in ("Q", "K", "V")]
    want = [[x.data_ptr() for x in (t.q, t.k, t.v)] for t in (shared, tensors, shared, tensors)]
    assert [[given[place] for place in places] for given in launched] == want and len(one._forms) == 1
    for other in (
        replace(tensors, k=torch.empty(2, 300, 4, 128, dtype=p.dtype)[..., :64]),
        replace(tensors, v=torch.empty(2 * 300 * 4 * 64 + 1, dtype=p.dtype)[1:].view(2, 300, 4, 64)),
    ):
        one.forward(p, other)
    assert len(one._forms) == 3


# --- Triton's interpreter ---------------------------------------------------------------------------------------------


def test_only_the_interpreter_takes_cpu_tensors(monkeypatch: pytest.MonkeyPatch):
    for value, kinds in (("0", {"rocm", "cuda"}), ("1", {"cpu"})):
        monkeypatch.setenv("TRITON_INTERPRET", value)
        (family,) = attnlib_triton.TritonBackend().families
        assert family.capabilities.device_kinds == kinds


@needs_triton
def test_the_interpreter_finds_the_same_scores_either_way_round():
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    generator = np.random.default_rng(0)
    q, k = (1024 * generator.standard_normal((64, 32), dtype=np.float32) for _ in range(2))

    def product(a, b):
        handles = (interpreter.TensorHandle(x, tl.float32) for x in (a, b, np.zeros((64, 64), np.float32)))
        return interpreter.InterpreterBuilder().create_dot(*handles, None, 0).data

    with launch._patched():
        one, other = product(q, k.T), product(k, q.T)
    assert (one == other.T).all() and np.abs(one).max() > 1e6
    assert (one == (q.astype(np.float64) @ k.T.astype(np.float64)).astype(np.float32)).all()


@needs_triton
@pytest.mark.slow
def test_the_interpreter_computes_attention():
    program = (
        "import torch, attnlib\n"
        "def run(backend, seed):\n"
        "    qkv = torch.randn(3, 1, 40, 2, 16, generator=torch.Generator().manual_seed(seed)).requires_grad_()\n"
        "    out = attnlib.attention(*qkv, causal=True, backend=backend)\n"
        "    return out, *torch.autograd.grad(out.square().sum(), qkv)\n"
        "for seed in range(4):\n"  # the third and fourth call are of a known form
        "    for got, want in zip(run('triton', seed), run('reference', seed)):\n"
        "        assert float(want.abs().max()) > 0.5 and float((got - want).abs().max()) < 1e-5\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
