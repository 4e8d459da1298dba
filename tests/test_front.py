"""The quick way into attention(): the same results, and nothing kept that a later call must not find."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from contextlib import nullcontext

import pytest
import torch
from toys import Nothing, Toy

import attnlib
from attnlib import dispatch, front, registry, settings
from attnlib.errors import ArgumentError, ArgumentTypeError

pytestmark = pytest.mark.skipif(front.find is None, reason="needs the compiled module attnlib._front")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def nothing_kept():
    dispatch.clear_caches()
    with settings.override(debug=frozenset(), shadow=0.0, backend=""):
        yield
    dispatch.clear_caches()


def qkv(batch=2, seqlen_q=19, seqlen_k=33, heads=4, heads_kv=2, dim=24, dim_v=40, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = ((seqlen_q, heads, dim), (seqlen_k, heads_kv, dim), (seqlen_k, heads_kv, dim_v))
    return tuple(torch.randn(batch, *size, generator=generator).to(dtype) for size in sizes)


def form(q, k, v, **options):
    """The arguments of find()."""
    given = dict(
        causal=False, causal_alignment="bottom_right", window=None, scale=None, softcap=None, bias=None, mask=None,
        alibi_slopes=None, sinks=None, block_mask=None, q_lens=None, kv_lens=None, dropout_p=0.0, dropout_seed=None,
        return_lse=False, deterministic=None, backend=None,
    ) | options  # fmt: skip
    return (q, k, v, *given.values())


def whole_way(q, k, v, monkeypatch, **options):
    with monkeypatch.context() as patch:
        patch.setattr(front, "find", None)
        return attnlib.attention(q, k, v, **options)


def kept(*operands, **options):
    """Run a call so that its form is kept."""
    attnlib.attention(*operands, **options)
    assert front._front.size() > 0


def left_to_python(*operands, **options):
    return front.find(*form(*operands, **options)) is None


OPTIONS = (
    {}, {"causal": True}, {"causal": True, "causal_alignment": "top_left"}, {"window": (5, 2)}, {"window": (None, 3)},
    {"scale": 0.3}, {"softcap": 4.0}, {"deterministic": True}, {"window": (7, None), "softcap": 2.0, "scale": -0.5},
)  # fmt: skip


@pytest.mark.parametrize("family", ["", "amx", "avx512", "avx2", "portable"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_second_call_gives_the_bits_of_the_whole_way(family, dtype, monkeypatch):
    backend = f"cpu:{family}" if family else None
    if family and attnlib.explain(*qkv(dtype=dtype), backend=backend).chosen is None:
        pytest.skip("this machine lacks the instruction set, or the family the dtype")
    for shape in (
        {},
        {"seqlen_q": 1, "seqlen_k": 700, "heads": 8},
        {"batch": 1, "seqlen_q": 40, "dim": 64, "dim_v": 64},
    ):
        for options in OPTIONS:
            operands = qkv(dtype=dtype, **shape)
            want, want_lse = whole_way(*operands, monkeypatch, return_lse=True, backend=backend, **options)
            kept(*operands, backend=backend, **options)
            other = qkv(dtype=dtype, seed=1, **shape)
            got = front.find(*form(*operands, backend=backend, **options))
            out, lse = front.find(*form(*operands, backend=backend, return_lse=True, **options))
            assert isinstance(got, torch.Tensor), "the form was not kept"
            assert torch.equal(got, want) and torch.equal(out, want) and torch.equal(lse, want_lse)
            assert (
                got.is_contiguous()
                and lse.is_contiguous()
                and lse.dtype == want_lse.dtype
                and lse.shape == want_lse.shape
            )
            assert not torch.equal(front.find(*form(*other, backend=backend, **options)), want)


def test_every_form_is_a_form_of_its_own(monkeypatch):
    """Calls that differ in one thing, in every order: none gets what another kept."""
    x = torch.randn(2, 64, 4, 64)
    transposed = x.transpose(1, 2).contiguous().transpose(1, 2)
    shifted = torch.randn(2 * 64 * 4 * 64 + 1)[1:].view_as(x).copy_(x)
    wider = torch.cat([x, x], 3)[..., :64]
    calls = [((x, x, x), options) for options in OPTIONS]
    calls += [((a, b, x), {}) for a, b in itertools.product((transposed, shifted, wider), repeat=2)]
    calls += [((x[:, :16], x, x), {}), ((x, x[:, :16], x[:, :16]), {}), ((x, x[:, :, :2], x[:, :, :2]), {}),
              ((x, x, x[..., :32]), {}), ((x[:1], x[:1], x[:1]), {}), ((x[..., :32], x[..., :32], x), {}),
              ((x.half(), x.half(), x.half()), {}), ((x.bfloat16(), x.bfloat16(), x.bfloat16()), {}),
              ((x.expand(2, 64, 4, 64), x[:1].expand(2, -1, -1, -1), x), {})]  # fmt: skip
    want = [whole_way(*operands, monkeypatch, **options) for operands, options in calls]
    for order in (calls, calls, calls[::-1]):
        expected = want if order is calls else want[::-1]
        for (operands, options), right in zip(order, expected):
            got = attnlib.attention(*operands, **options)
            assert got.dtype == right.dtype and torch.equal(got, right)
    assert front._front.size() >= len(calls) - 4  # contiguous operands and their like are one form


def test_gradients_follow_the_mode(monkeypatch):
    operands = qkv(dim_v=24)
    leaves = [x.clone().requires_grad_() for x in operands]
    want = torch.autograd.grad(whole_way(*leaves, monkeypatch, causal=True).square().sum(), leaves)
    for _ in range(3):
        assert not attnlib.attention(*operands, causal=True).requires_grad
        with torch.no_grad():
            assert not attnlib.attention(*leaves, causal=True).requires_grad
        out, lse = attnlib.attention(*leaves, causal=True, return_lse=True)
        assert out.requires_grad and lse.requires_grad
        got = torch.autograd.grad(attnlib.attention(*leaves, causal=True).square().sum(), leaves)
        assert all(torch.equal(a, b) for a, b in zip(got, want))
        for one in range(3):  # only one of them
            some = [x if i == one else x.detach() for i, x in enumerate(leaves)]
            (grad,) = torch.autograd.grad(attnlib.attention(*some, causal=True).square().sum(), [leaves[one]])
            torch.testing.assert_close(grad, want[one])
    with torch.inference_mode():
        assert attnlib.attention(*operands, causal=True).is_inference()


def test_parameters_are_tensors():
    operands = [torch.nn.Parameter(x) for x in qkv()]
    kept(*operands)
    assert front.find(*form(*operands)).requires_grad


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"causal": 1}, ArgumentTypeError),
        ({"causal": 0}, ArgumentTypeError),
        ({"scale": float("nan")}, ArgumentError),
        ({"scale": "1"}, ArgumentTypeError),
        ({"softcap": -1.0}, ArgumentError),
        ({"softcap": 0.0}, ArgumentError),
        ({"window": (-2, 0)}, ArgumentError),
        ({"window": (1, 2, 3)}, ArgumentTypeError),
        ({"window": (True, 0)}, ArgumentTypeError),
        ({"window": (1.0, 0)}, ArgumentTypeError),
        ({"causal_alignment": "left"}, ArgumentError),
        ({"return_lse": 1}, ArgumentTypeError),
        ({"deterministic": 1}, ArgumentTypeError),
        ({"backend": ""}, ArgumentError),
        ({"backend": "cpu\0"}, ArgumentError),
        ({"backend": "no_such"}, ArgumentError),
        ({"backend": 3}, ArgumentTypeError),
        ({"dropout_p": 2.0}, ArgumentError),
        ({"dropout_p": "0"}, ArgumentTypeError),
        ({"dropout_seed": "x"}, ArgumentTypeError),
    ],
)
def test_wrong_arguments_stay_wrong(options, error):
    operands = qkv()
    for same in ({}, {"causal": True}, {"causal": False}, {"window": (1, 0)}, {"scale": 1.0}, {"backend": "cpu"}):
        kept(*operands, **same)
    for _ in range(2):
        with pytest.raises(error, match=next(iter(options))):
            attnlib.attention(*operands, **options)


@pytest.mark.parametrize("wrong", ["seqlen", "heads", "dtype", "dims", "batch"])
def test_wrong_tensors_stay_wrong(wrong):
    q, k, v = qkv()
    kept(q, k, v)
    bad = {"seqlen": v[:, :5], "heads": v[:, :, :1], "dtype": v.double(), "dims": v[0], "batch": v[:1]}[wrong]
    for _ in range(2):
        with pytest.raises((ArgumentError, ArgumentTypeError), match="v"):
            attnlib.attention(q, k, bad)


class Sub(torch.Tensor):
    pass


def test_what_watches_is_left_to_python():
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    class See(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    operands = qkv()
    kept(*operands)
    modes = (
        Watch(), See(), torch.autograd.forward_ad.dual_level(), torch.profiler.profile(), torch.autocast("cpu"),
        torch.device("cpu"), attnlib.use_backend("cpu"), dispatch.use_config({"block_q": 12}),
    )  # fmt: skip
    for mode in modes:
        assert isinstance(front.find(*form(*operands)), torch.Tensor)
        with mode:
            assert left_to_python(*operands), mode
    assert left_to_python(*(x.as_subclass(Sub) for x in operands))
    assert left_to_python(operands[0], operands[1], operands[2].to("meta"))
    assert left_to_python(operands[0], operands[1], operands[2].numpy())
    assert left_to_python(operands[0], operands[1], None)
    assert left_to_python(torch._neg_view(operands[0]), operands[1], operands[2])
    assert left_to_python(operands[0].to_sparse(), operands[1], operands[2])
    assert torch.equal(
        torch.func.vmap(attnlib.attention)(*(x[None] for x in operands))[0], attnlib.attention(*operands)
    )


def test_operands_beside_q_k_v_are_left_to_python():
    operands = qkv()
    kept(*operands)
    ones = torch.ones(2, dtype=torch.int32)
    for name, value in {
        "bias": torch.zeros(19, 33), "mask": torch.ones(19, 33, dtype=torch.bool), "alibi_slopes": torch.zeros(4),
        "sinks": torch.zeros(4), "q_lens": ones, "kv_lens": ones, "dropout_p": 0.5, "dropout_seed": 3, "block_mask": 0,
    }.items():  # fmt: skip
        assert left_to_python(*operands, **{name: value}), name


def test_freed_memory_is_an_error_again():
    q, k, v = qkv()
    kept(q, k, v)
    v.untyped_storage().resize_(0)
    with pytest.raises(ArgumentError, match="v"):
        attnlib.attention(q, k, v)


def test_settings_and_backends_that_change_are_seen():
    operands = qkv()
    kept(*operands)
    with settings.override(backend="reference"):
        assert front.find(*form(*operands)) is False
        attnlib.attention(*operands)
    with settings.override(backend="no_such"), pytest.raises(ArgumentError, match="no_such"):
        attnlib.attention(*operands)
    with settings.override(debug=frozenset({"poison"})):
        assert front.find(*form(*operands)) is False
        attnlib.attention(*operands)
        assert left_to_python(*operands), "a call to be poisoned was kept"
    assert isinstance(front.find(*form(*operands)), torch.Tensor)
    before = front._front.size()
    assert before > 0
    registry.generation += 1
    try:
        assert front.find(*form(*operands)) is False and front._front.size() == 0
    finally:
        registry.generation -= 1
    dispatch.clear_caches()
    assert front.find(*form(*operands)) is False


def test_deterministic_algorithms_are_part_of_the_form():
    operands = qkv()
    kept(*operands)
    torch.use_deterministic_algorithms(True)
    try:
        assert front.find(*form(*operands)) is False
        assert isinstance(front.find(*form(*operands, deterministic=False)), torch.Tensor)
    finally:
        torch.use_deterministic_algorithms(False)


def test_empty_problems_and_copies_are_not_kept():
    for shape in ({"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}, {"heads": 0, "heads_kv": 0}, {"dim_v": 0}):
        operands = qkv(**shape)
        for _ in range(2):
            attnlib.attention(*operands)
    q, k, v = qkv(dim_v=24)
    strided = torch.randn(*q.shape, 2)[..., 0]
    assert front.find(*form(strided, k, v)) is False
    attnlib.attention(strided, k, v)
    assert left_to_python(strided, k, v), "not for here, which is to be known the next time"


def test_forms_are_bounded():
    for seqlen in range(1, 1100):
        x = torch.zeros(1, seqlen, 1, 1)
        attnlib.attention(x, x, x)
    assert 0 < front._front.size() <= 1024


def test_nothing_leaks():
    operands = qkv()
    leaves = [x.clone().requires_grad_() for x in operands]

    def calls(count):
        for _ in range(count):
            attnlib.attention(*operands, return_lse=True, window=(3, 4), backend="cpu")
            attnlib.attention(*leaves)
            front.find(*form(*operands, scale=0.25))
            dispatch.clear_caches()
        gc.collect()
        return len(gc.get_objects())

    first = calls(20)
    assert calls(200) - first < 50


def test_threads_share_the_forms():
    shapes = [qkv(seqlen_k=n) for n in (5, 17, 64, 200)]
    want = [attnlib.attention(*operands) for operands in shapes]
    wrong: list[str] = []
    stop = threading.Event()

    def work(index):
        context = attnlib.use_backend("reference") if index == 3 else nullcontext()
        with context:
            while not stop.is_set():
                for operands, right in zip(shapes, want):
                    got = attnlib.attention(*operands)
                    if not (torch.allclose(got, right, atol=1e-5) if index == 3 else torch.equal(got, right)):
                        wrong.append(f"thread {index}")
                        return

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        dispatch.clear_caches()
        attnlib.attention(*shapes[0])
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("change", ["grads", "deterministic", "backend", "registry"])
def test_what_changes_during_the_first_call_is_not_kept(change, register):
    """The call ran in one state; its result must not be found in another."""
    q, k, v = qkv()
    undo = []

    class Meddler(Nothing):
        def forward(self, problem, tensors):
            if change == "grads":
                q.requires_grad_()
            elif change == "deterministic":
                torch.use_deterministic_algorithms(True)
                undo.append(lambda: torch.use_deterministic_algorithms(False))
            elif change == "backend":
                context = settings.override(backend="reference")
                context.__enter__()
                undo.append(lambda: context.__exit__(None, None, None))
            else:
                registry.generation += 1

    class Port(Toy):
        def plan(self, problem, family, target, config=None):
            return Meddler()

    register(Port("meddler"))
    with settings.override(backend="meddler"):
        try:
            attnlib.attention(q, k, v)
        finally:
            for step in undo:
                step()
        assert front.find(*form(q, k, v)) is False and front._front.size() == 0


def test_what_cannot_be_read_is_left_alone_quickly():
    """DLPack throws for meta tensors and under transforms: a millisecond, if it is asked."""
    operands = qkv()
    kept(*operands)
    meta = [x.to("meta") for x in operands]
    asked = []

    def ask(*given):
        begun = time.thread_time()
        asked.append((front.find(*form(*given)), time.thread_time() - begun))
        return given[0]

    for _ in range(20):
        ask(*meta)
        torch.func.vmap(ask, randomness="same")(*(x[None] for x in operands))
    assert all(found is None for found, _ in asked)
    assert min(seconds for _, seconds in asked[::2]) < 2e-4 and min(seconds for _, seconds in asked[1::2]) < 2e-4


def test_compiled_graphs_do_not_see_it():
    operands = qkv()
    kept(*operands)
    compiled = torch.compile(lambda q, k, v: attnlib.attention(q, k, v) + 1, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*operands), attnlib.attention(*operands) + 1)


def test_without_the_exchange_interface_every_call_takes_the_whole_way(monkeypatch):
    monkeypatch.setattr(front, "_front", None)
    assert front._configured() is None


def test_misuse_of_the_module_is_an_error():
    with pytest.raises(TypeError, match="needs 20 arguments, got 1"):
        front._front.find(1)
    with pytest.raises(TypeError, match="needs 29 arguments, got 0"):
        front._front.keep()
    with pytest.raises(TypeError, match="needs 14 arguments"):
        front._front.configure()


def test_a_plan_without_a_direct_entry_is_run_by_python(register):
    toy = register(Toy("toy"))
    operands = qkv()
    kept(*operands, backend="toy")
    toy.plans[0].tensors = None
    out, lse = front.find(*form(*operands, backend="toy", return_lse=True)) or pytest.fail("not kept")
    ran = toy.plans[0].tensors
    assert ran is not None and ran.q is operands[0] and ran.out is out and ran.lse is lse
