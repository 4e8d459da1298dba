"""torch.compile, export, opcheck, autocast, checkpointing, torch.func, and what second derivatives do."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from toys import Opaque, Toy

import attnlib
from attnlib import dispatch, ops, registry, settings
from attnlib.conformance.tiled import Tiled
from attnlib.operands import Operands

NAME = "opaque"


@pytest.fixture(autouse=True, scope="module")
def opaque():
    attnlib.register_backend(Opaque(NAME))
    yield
    registry.unregister_backend(NAME)


def attend(*args, **kwargs):
    return attnlib.attention(*args, backend=NAME, **kwargs)


def inputs(batch=2, seqlen_q=5, seqlen_k=7, heads=4, heads_kv=2, dim=8, dtype=torch.float32, grad=True, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad)

    return (
        draw(batch, seqlen_q, heads, dim),
        draw(batch, seqlen_k, heads_kv, dim),
        draw(batch, seqlen_k, heads_kv, dim),
    )


def gradients(function, tensors, dout_seed=1):
    out = function(*tensors)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(dout_seed), dtype=torch.float64).to(out.dtype)
    return out, torch.autograd.grad(out, tensors, dout)


def assert_equal(left, right):
    for a, b in zip(left, right):
        assert torch.equal(a, b), (a - b).abs().max()


# --- compile and export ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (2, 1), "softcap": 3.0}, {"return_lse": True}])
def test_compile_fullgraph_is_eager(options):
    def function(q, k, v):
        result = attend(q * 1.5, k, v, **options)
        return result[0] + result[1].mean() if options.get("return_lse") else result + 1

    tensors = inputs()
    expected = gradients(function, tensors)
    torch._dynamo.reset()
    got = gradients(torch.compile(function, fullgraph=True, backend="aot_eager"), tensors)
    assert_equal([expected[0], *expected[1]], [got[0], *got[1]])


def test_compile_keeps_use_backend():
    torch._dynamo.reset()
    tensors = inputs(grad=False)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def function(q, k, v):
        with attnlib.use_backend(NAME):
            return attnlib.attention(q, k, v)

    assert torch.equal(function(*tensors), attend(*tensors))


def test_compiled_graph_follows_the_environment(register):
    toys = [register(Toy("toy_a")), register(Toy("toy_b"))]
    torch._dynamo.reset()
    compiled = torch.compile(attnlib.attention, fullgraph=True, backend="aot_eager")
    for toy in toys:
        with settings.override(backend=toy.name):
            compiled(*inputs(grad=False))
    assert [len(toy.plans) for toy in toys] == [1, 1]


def test_compile_dropout_draws_its_seed_from_torch():
    torch._dynamo.reset()
    tensors = inputs(grad=False)
    compiled = torch.compile(lambda q, k, v: attend(q, k, v, dropout_p=0.5), fullgraph=True, backend="aot_eager")
    torch.manual_seed(3)
    first, second = compiled(*tensors), compiled(*tensors)
    torch.manual_seed(3)
    assert torch.equal(first, compiled(*tensors))
    assert not torch.equal(first, second)


def test_AB_067_dynamic_lengths_compile_at_most_twice():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(
        lambda q, k, v: attend(q, k, v, causal=True), fullgraph=True, dynamic=True, backend=counter
    )
    for length in (17, 18, 33, 65):
        tensors = inputs(seqlen_q=length, seqlen_k=length, grad=False)
        assert torch.equal(compiled(*tensors), attend(*tensors, causal=True))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("hint", ["int", "tensor"])
def test_AB_067_varlen_hint(hint):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()

    def function(q, k, v, cu, longest):
        return attnlib.attention_varlen(q, k, v, cu, cu, max_seqlen_q=longest, max_seqlen_k=longest, backend=NAME)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for length in (17, 18, 33, 65):
        q, k, v = (t[0] for t in inputs(1, 2 * length, 2 * length, grad=False))
        cu = torch.tensor([0, length, 2 * length], dtype=torch.int32)
        longest = length if hint == "int" else torch.tensor(length)
        assert torch.equal(compiled(q, k, v, cu, longest), function(q, k, v, cu, longest))
    assert counter.frame_count <= 2


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, 4, 8)).unbind(2)
        return attend(q, k, v, causal=True).flatten(2)


def test_export_and_run():
    block, x = Block(), torch.randn(2, 6, 32)
    program = torch.export.export(block, (x,), dynamic_shapes={"x": {1: torch.export.Dim("seqlen", min=2, max=64)}})
    longer = torch.randn(2, 9, 32)
    assert torch.allclose(program.module()(longer), block(longer))


# --- opcheck --------------------------------------------------------------------------------------------------------


def arguments(grad, **extra):
    q, k, v = inputs(grad=grad)
    operands = dict.fromkeys(Operands._fields[3:14])
    scalars = [-1, -1, -1, 0, False, 0.3, 0.0, 0.0, 0, 0, 0, False, False, NAME]
    operands.update({name: value for name, value in extra.items() if name in operands})
    scalars[10] = extra.get("grads", 0)
    scalars[7] = extra.get("dropout_p", 0.0)
    return (q, k, v, *operands.values(), *scalars)


CHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"bias": torch.randn(4, 1, 7), "grads": 15},
        {"mask": torch.rand(5, 7) > 0.3, "sinks": torch.randn(4), "grads": 23},
        {"alibi_slopes": torch.rand(4), "kv_lens": torch.tensor([3, 7], dtype=torch.int32), "grads": 1},
        {"dropout_seed": torch.tensor([5]), "dropout_p": 0.3, "grads": 7},
    ],
)
def test_AB_065_opcheck(extra):
    args = arguments(False, **extra)
    torch.library.opcheck(ops.forward_op, args, test_utils=CHECKS)
    out, lse, stats = ops.forward_op(*args)
    if extra.get("grads"):
        torch.library.opcheck(ops.backward_op, (torch.randn_like(out), None, out, lse, stats, *args), test_utils=CHECKS)


def test_AB_065_opcheck_append_declares_what_it_changes():
    args = arguments(False, kv_lens=torch.tensor([2, 5], dtype=torch.int32))
    new = torch.randn(2, 1, 2, 8)
    torch.library.opcheck(ops.append_forward_op, (new, new, None, *args), test_utils=CHECKS)
    cache = torch.zeros(2, 7, 2, 8)
    version = cache._version
    lens = torch.tensor([2, 5], dtype=torch.int32)
    attnlib.attention_kvcache(torch.randn(2, 1, 4, 8), cache, cache.clone(), lens, k_new=new, v_new=new, backend=NAME)
    assert cache._version > version
    assert torch.equal(cache[1, 5], new[1, 0])


# --- autocast, checkpoint -------------------------------------------------------------------------------------------


def test_autocast_casts_q_k_v_only():
    q, k, v = inputs()
    bias = torch.randn(5, 7)
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(q, k, v.double().float(), bias=bias)
    assert out.dtype == torch.bfloat16
    expected = attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), bias=bias)
    assert torch.equal(out, expected)
    (grad,) = torch.autograd.grad(out.float().sum(), q)
    assert grad.dtype == torch.float32


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_AB_064_checkpoint_repeats_dropout_bitwise(reentrant, autocast):
    tensors = inputs(dim=60)

    def function(q, k, v):
        return attend(q, k, v, dropout_p=0.3, deterministic=True)

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        torch.manual_seed(7)
        expected = gradients(function, tensors)
        torch.manual_seed(7)
        got = gradients_by_backward(lambda *t: checkpoint(function, *t, use_reentrant=reentrant), tensors)
    assert_equal([expected[0], *expected[1]], [got[0], *got[1]])


def gradients_by_backward(function, tensors):
    leaves = [copy.copy(t.detach()).requires_grad_() for t in tensors]
    out = function(*leaves)
    generator = torch.Generator().manual_seed(1)
    out.backward(torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype))
    return out, [leaf.grad for leaf in leaves]


# --- torch.func -----------------------------------------------------------------------------------------------------


def test_func_grad_is_autograd():
    q, k, v = inputs()
    expected = torch.autograd.grad(attend(q, k, v).square().sum(), (q, k, v))
    got = torch.func.grad(lambda *t: attend(*t).square().sum(), argnums=(0, 1, 2))(*(t.detach() for t in (q, k, v)))
    for a, b in zip(expected, got):
        assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (1, 0, 2), (0, None, 0), (None, 0, None), (3, 4, 4)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"kv_lens": torch.tensor([3, 7], dtype=torch.int32), "mask": torch.rand(5, 7) > 0.2},
        {"bias": torch.randn(2, 1, 5, 7), "alibi_slopes": torch.rand(2, 4)},
        {"dropout_p": 0.4, "dropout_seed": 9},
    ],
)
def test_AB_068_vmap_is_a_loop(in_dims, options):
    q, k, v = inputs(grad=False)
    stacked = [t if dim is None else torch.stack([t, t * 0.5 + 0.1, -t], dim) for t, dim in zip((q, k, v), in_dims)]

    def function(q, k, v):
        return attend(q, k, v, return_lse=True, **options)

    got = torch.func.vmap(function, in_dims=in_dims)(*stacked)
    for index in range(3):
        one = [t if dim is None else t.select(dim, index) for t, dim in zip(stacked, in_dims)]
        assert_equal([part[index] for part in got], function(*one))


def test_AB_068_vmap_randomness():
    q, k, v = (t.detach().expand(3, *t.shape) for t in inputs())

    def run(mode):
        torch.manual_seed(0)
        return torch.func.vmap(lambda q, k, v: attend(q, k, v, dropout_p=0.5), randomness=mode)(q, k, v)

    same, different = run("same"), run("different")
    assert torch.equal(same[0], same[1]) and torch.equal(same[0], same[2])
    assert not torch.equal(different[0], different[1])
    with pytest.raises(RuntimeError, match="random"):
        run("error")


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.4, "dropout_seed": 9}])
def test_gradients_reach_through_vmap(options):
    q, k, v = inputs(grad=False)
    stacked = torch.stack([q, -q, q + 1]).requires_grad_()
    torch.func.vmap(lambda q: attend(q, k, v, **options))(stacked).square().sum().backward()
    for index in range(3):
        leaf = stacked[index].detach().requires_grad_()
        (expected,) = torch.autograd.grad(attend(leaf, k, v, **options).square().sum(), leaf)
        assert torch.allclose(stacked.grad[index], expected, atol=1e-6)
    nested = torch.func.grad(lambda s: torch.func.vmap(lambda q: attend(q, k, v, **options))(s).square().sum())
    assert torch.allclose(nested(stacked.detach()), stacked.grad, atol=1e-6)


def test_exported_model_trains():
    block, x = Block(), torch.randn(2, 6, 32)
    block(x).square().sum().backward()
    expected = block.project.weight.grad.clone()
    with torch.no_grad():
        inference = torch.export.export(block, (x,)).module()
    for program in (torch.export.export(block, (x,)).module(), inference):
        program.zero_grad()
        program(x).square().sum().backward()
        (weight,) = [p for name, p in program.named_parameters() if name.endswith("weight")]
        assert torch.allclose(weight.grad, expected, atol=1e-5)


def test_autocast_is_off_inside_a_plan():
    q, k, v = (t.bfloat16() for t in inputs(grad=False))
    expected = attend(q, k, v, return_lse=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal(expected, attend(q, k, v, return_lse=True))


def test_meta_tensors_infer_shapes_and_strays_raise():
    q, k, v = inputs(grad=False)
    out, lse = attend(*(t.to("meta") for t in (q, k, v)), return_lse=True)
    assert out.shape == q.shape and out.is_meta and lse.shape == (2, 4, 5)
    for call in (
        lambda: attend(q, k.to("meta"), v),
        lambda: attend(q, k, v, sinks=torch.ones(4, device="meta")),
    ):
        with pytest.raises(ValueError, match="needs device cpu, as q has, got meta"):
            call()


@pytest.mark.parametrize("way", ["argument", "dynamic"])
def test_compile_with_a_scale_that_varies(way):
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def function(q, k, v, scale):
        return attend(q, k, v, scale=q.shape[-1] ** -0.5 if way == "dynamic" else scale)

    for scale in (0.5, 0.25):
        q, k, v = inputs(grad=False)
        expected = attend(q, k, v, scale=8**-0.5 if way == "dynamic" else scale)
        assert torch.allclose(function(q, k, v, scale), expected, atol=1e-6)


def test_reference_compiles_with_gradients():
    torch._dynamo.reset()
    tensors = inputs()

    def function(q, k, v):
        return attnlib.attention(q, k, v, backend="reference") * 2

    expected = gradients(function, tensors)
    got = gradients(torch.compile(function, fullgraph=True, backend="aot_eager"), tensors)
    for a, b in zip([expected[0], *expected[1]], [got[0], *got[1]]):
        assert torch.allclose(a, b, atol=1e-6)


def test_config_and_choice_serve_the_backward_too(register):
    toys = [register(Toy("toy_a")), register(Toy("toy_b"))]
    q, k, v = inputs()
    with dispatch.use_config({"block_q": 3}), settings.override(backend="toy_b"):
        out = attnlib.attention(q, k, v)
    out.sum().backward()
    assert toys[0].plans == [] and toys[1].configs == [{"block_q": 3}]
    assert toys[1].plans[0].tensors.dout is not None


def test_cache_under_forward_ad_raises():
    q, _, _ = inputs(grad=False, seqlen_q=1)
    cache, lens = torch.zeros(2, 7, 2, 8), torch.tensor([2, 5], dtype=torch.int32)
    new = torch.randn(2, 1, 2, 8)

    def step(q):
        return attnlib.attention_kvcache(q, cache, cache.clone(), lens, k_new=new, v_new=new, backend=NAME)

    with pytest.raises((NotImplementedError, RuntimeError)):
        torch.func.jvp(step, (q,), (torch.ones_like(q),))


def test_per_sample_gradients():
    q, k, v = inputs(grad=False)
    bias = torch.randn(4, 5, 7)

    def loss(bias, q, k, v):
        return attend(q[None], k[None], v[None], bias=bias).square().sum()

    got = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0, 0))(bias, q, k, v)
    for index in range(2):
        expected = torch.func.grad(loss)(bias, q[index], k[index], v[index])
        assert torch.allclose(got[index], expected, atol=1e-6)


class Logged(torch.Tensor):
    calls: list[str] = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.calls.append(str(function))
        return super().__torch_function__(function, types, args, kwargs or {})


def test_AB_068_subclass_sees_the_operator():
    q, k, v = (t.detach().as_subclass(Logged) for t in inputs())
    Logged.calls.clear()
    out = attend(q, k, v)
    assert any("attnlib" in call for call in Logged.calls)
    assert isinstance(out, Logged)


# --- what must raise ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reference", ["reference", "Reference"])
def test_second_derivative_raises_but_not_in_reference(reference):
    q, k, v = inputs(dtype=torch.float64)
    (dq,) = torch.autograd.grad(attend(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(attnlib.UnsupportedError, match="once"):
        dq.sum().backward()
    (dq,) = torch.autograd.grad(attnlib.attention(q, k, v, backend=reference).square().sum(), q, create_graph=True)
    dq.sum().backward()
    assert q.grad is not None and q.grad.abs().max() > 0


def test_jvp_raises_but_not_in_reference():
    q, k, v = inputs(grad=False, dtype=torch.float64)

    def tangent(name):
        return torch.func.jvp(lambda q: attnlib.attention(q, k, v, backend=name), (q,), (torch.ones_like(q),))[1]

    with pytest.raises((RuntimeError, NotImplementedError)):
        tangent(NAME)
    assert tangent("reference").abs().max() > 0


def test_no_gradient_where_none_is_asked():
    q, k, v = inputs()
    with torch.no_grad():
        assert not attend(q, k, v).requires_grad
    out = attend(q.detach(), k.detach(), v)
    assert torch.autograd.grad(out.sum(), v)[0].abs().max() > 0


def test_AB_061_loss_on_lse_alone():
    q, k, v = inputs(dtype=torch.float64)
    _, lse = attend(q, k, v, return_lse=True)
    got = torch.autograd.grad(lse.sum(), (q, k, v))
    _, lse = attnlib.attention(q, k, v, return_lse=True, backend="reference")
    expected = torch.autograd.grad(lse.sum(), (q, k, v), materialize_grads=True)
    for a, b in zip(got, expected):
        assert torch.allclose(a, b)
    assert got[0].abs().max() > 0 and got[2].abs().max() == 0


# --- transforms inside transforms -----------------------------------------------------------------------------------

SECOND = {
    "hessian": lambda f, x: torch.func.hessian(f)(x),
    "jvp of grad": lambda f, x: torch.func.jvp(torch.func.grad(f), (x,), (x,))[1],
    "grad of grad": lambda f, x: torch.func.grad(lambda a: torch.func.grad(f)(a).sum())(x),
    "grad through grad": lambda f, x: torch.func.grad(lambda a: f(a - 0.1 * torch.func.grad(f)(a)))(x),
    "jacrev of grad": lambda f, x: torch.func.jacrev(torch.func.grad(f))(x),
}


@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives_under_transforms_raise(name):
    q, k, v = inputs(grad=False, dtype=torch.float64)
    with pytest.raises(attnlib.UnsupportedError, match="reference"):
        SECOND[name](lambda a: attend(a, k, v).square().sum(), q)
    found = SECOND[name](lambda a: attnlib.attention(a, k, v, backend="reference").square().sum(), q)
    assert found.abs().max() > 0


FIRST = {
    "value of vjp": lambda at, q, k, v, w: torch.func.vjp(lambda a: at(a * w, k, v), q)[0],
    "tangent of a factor": lambda at, q, k, v, w: torch.func.jvp(
        lambda s: s * at(q * w, k, v), (torch.ones((), dtype=q.dtype),), (torch.ones((), dtype=q.dtype),)
    )[0],
}


@pytest.mark.parametrize("name", FIRST)
def test_first_derivatives_reach_out_of_a_transform(name):
    q, k, v = inputs(grad=False, dtype=torch.float64)
    w = torch.ones(8, dtype=torch.float64, requires_grad=True)
    (got,) = torch.autograd.grad(FIRST[name](attend, q, k, v, w).sum(), w)
    (expected,) = torch.autograd.grad(attend(q * w, k, v).sum(), w)
    assert torch.allclose(got, expected)


# --- views that are no plain memory ---------------------------------------------------------------------------------


def test_negative_views_and_symbolic_zeros():
    q, k, v = inputs(grad=False)
    bias, slopes = torch.randn(5, 7), torch.rand(4)
    expected = attend(q, k, v, bias=bias, alibi_slopes=slopes)
    for change in ({"bias": torch._neg_view(-bias)}, {"alibi_slopes": torch._neg_view(-slopes)}):
        assert torch.equal(attend(q, k, v, **({"bias": bias, "alibi_slopes": slopes} | change)), expected)
    assert torch.equal(attend(torch._neg_view(-q), k, v, bias=bias, alibi_slopes=slopes), expected)
    leaf = q.clone().requires_grad_()
    out = attend(leaf, k, v)
    dout = torch.randn_like(out)
    (expected_dq,) = torch.autograd.grad(out, leaf, dout, retain_graph=True)
    assert torch.equal(torch.autograd.grad(out, leaf, torch._neg_view(-dout), retain_graph=True)[0], expected_dq)
    assert not torch.autograd.grad(out, leaf, torch._efficientzerotensor(out.shape))[0].any()


def test_append_bumps_the_version_of_a_cache(register):
    register(Toy("toy"))  # writes nothing, so that no operator of torch does it
    k_cache, v_cache = torch.zeros(1, 8, 1, 4), torch.zeros(1, 8, 1, 4)
    w = torch.ones(4, requires_grad=True)
    loss = (k_cache * w).sum()
    new, lens = torch.ones(1, 1, 1, 4), torch.tensor([0], dtype=torch.int32)
    with torch.no_grad():
        attnlib.attention_kvcache(new, k_cache, v_cache, lens, k_new=new, v_new=new, backend="toy")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_of_a_batch_of_cotangents():
    """torch.autograd.grad(is_grads_batched=True), which torch.autograd.functional's vectorize=True uses."""
    q, k, v = (torch.randn(2, 9, 2, 8, requires_grad=True) for _ in range(3))
    out = attend(q, k, v, causal=True)
    cotangents = torch.randn(3, *out.shape)
    batched = torch.autograd.grad(out, (q, k, v), cotangents, is_grads_batched=True, retain_graph=True)
    single = [torch.autograd.grad(out, (q, k, v), x, retain_graph=True) for x in cotangents]
    for grad, parts in zip(batched, zip(*single, strict=True), strict=True):
        torch.testing.assert_close(grad, torch.stack(parts))


def test_vmap_folds_the_statistics_of_rows_too(register):
    register(Tiled())  # whose backward reads them, as the reference's does not
    q, k, v = (torch.randn(3, 2, 5, 4, 8) for _ in range(3))
    slopes = torch.rand(4)

    def loss(q, k, v):
        return attnlib.attention(q, k, v, alibi_slopes=slopes, backend="tiled").square().sum()

    grads = torch.func.grad(loss, (0, 1, 2))
    for got, parts in zip(torch.func.vmap(grads)(q, k, v), zip(*map(grads, q, k, v)), strict=True):
        torch.testing.assert_close(got, torch.stack(parts))
