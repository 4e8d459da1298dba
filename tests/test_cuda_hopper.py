"""The kernels of Hopper: which problems get them, and with what."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import attnlib
import attnlib_cuda
from attnlib.backend import Target
from attnlib.problem import AttentionProblem
from attnlib_cuda import compile, config, device, hopper, hopper_shapes, jit, params, steps

HOPPER = device.for_arch("sm_90")
PLAIN = AttentionProblem(
    dtype=torch.bfloat16, batch=2, seqlen_q=512, seqlen_k=512, num_heads_q=4, num_heads_kv=2, head_dim=128,
    head_dim_v=128, scale=0.1,
)  # fmt: skip
SIZES = [(40, 40), (64, 64), (80, 80), (96, 96), (128, 128), (160, 160), (192, 128), (192, 192), (224, 224), (256, 256)]
COVERED: list[dict[str, Any]] = [
    {}, {"window": (None, 0)}, {"window": (64, 64)}, {"window": (None, 0), "top_left": True}, {"softcap": 30.0},
    {"sinks": torch.float32}, {"lengths": True}, {"packed": True, "total_q": 900, "total_k": 900},
    {"dropout_p": 0.1}, {"dropout_p": 0.1, "window": (None, 0)}, {"dropout_p": 0.1, "softcap": 30.0},
]  # fmt: skip
LEFT_OUT: list[dict[str, Any]] = [
    {"dtype": torch.float32}, {"bias": torch.float32}, {"mask": True}, {"alibi": True}, {"block_mask": (64, 64)},
    {"page_size": 16, "lengths": True}, {"append": True, "lengths": True}, {"aligned": False},
    {"seqlen_q": 64}, {"head_dim": 264, "head_dim_v": 264}, {"head_dim": 32, "head_dim_v": 32},
    {"head_dim": 64, "head_dim_v": 128},
]  # fmt: skip


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("change", COVERED, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_covered_problems_fit_a_multiprocessor(
    sizes: tuple[int, int], change: dict[str, Any], dtype: torch.dtype
) -> None:
    head_dim, head_dim_v = sizes
    problem = replace(PLAIN, head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype, **change)
    forward = hopper.forward(problem, HOPPER)
    assert forward is not None
    assert forward.shared_bytes <= HOPPER.smem_per_block
    assert head_dim_v <= forward.columns_v <= 64 * -(-head_dim_v // 64)
    for more in ({}, {"dropout_p": 0.1}, {"deterministic": True}, {"dropout_p": 0.1, "deterministic": True}):
        backward = hopper.backward(replace(problem, grads=("q", "k", "v"), **more), HOPPER)
        assert backward is not None
        assert backward.shared_bytes <= HOPPER.smem_per_block
        assert backward.dq_columns >= head_dim


@pytest.mark.parametrize("change", LEFT_OUT, ids=str)
def test_what_is_left_to_the_kernels_of_sm_80(change: dict[str, Any]) -> None:
    problem = replace(PLAIN, **change)
    assert hopper.forward(problem, HOPPER) is None
    assert hopper.backward(problem, HOPPER) is None


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_100", "sm_120"])
def test_no_other_architecture_gets_them(arch: str) -> None:
    assert hopper.forward(PLAIN, device.for_arch(arch)) is None


def test_explain_names_the_kernels() -> None:
    q = torch.randn(2, 256, 4, 64, dtype=torch.bfloat16, requires_grad=True)
    found = attnlib.explain(q, q, q, causal=True, device="sm_90")
    assert found.chosen == "cuda:sm_90"
    assert "forward_sm90" in str(found)
    assert "backward_sm90" in str(found)
    assert "backward_sm80" in str(attnlib.explain(q, q, q, bias=torch.zeros(256, 256), device="sm_90"))
    assert "forward_sm80" in str(attnlib.explain(q, q, q, device="sm_80"))


def test_structs_are_as_long_as_the_kernels_expect() -> None:
    maps = [bytes(128)] * 4
    forward = params.with_maps(maps, bytes(params.FORWARD.size) + bytes(8), params.FORWARD_MAPS_SIZE)
    assert len(forward) == params.FORWARD_MAPS_SIZE
    backward = params.with_maps(
        maps, params.with_tiles(bytes(params.BACKWARD.size), {"dq": 7}), params.BACKWARD_TILES_SIZE
    )
    assert len(backward) == params.BACKWARD_TILES_SIZE
    assert backward[params.BACKWARD_MAPS_SIZE :].startswith(b"\7")
    for spec in (
        hopper.forward_kernel(hopper.forward(PLAIN, HOPPER)),  # type: ignore[arg-type]
        hopper.backward_kernel(hopper.backward(PLAIN, HOPPER)),  # type: ignore[arg-type]
    ):
        assert f"== {spec.params_size}" in jit.render(spec, "sm_90a")
        assert f"::shared_bytes == {spec.config.shared_bytes}," in jit.render(spec, "sm_90a")


SHORT = replace(PLAIN, batch=32, seqlen_q=512, seqlen_k=512, num_heads_q=32, num_heads_kv=32, grads=("q", "k", "v"))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"seqlen_q": 1024, "seqlen_k": 1024}, False),  # sums and queries of 132 heads: 1.3 times L2
        ({"seqlen_q": 1024, "seqlen_k": 1024, "window": (None, 0)}, True),
        ({"seqlen_q": 1024, "seqlen_k": 1024, "deterministic": True}, True),
        ({"seqlen_q": 2048, "seqlen_k": 2048, "window": (None, 0)}, False),
        ({"batch": 5}, False),  # 160 heads: in the second round 28 of 132 multiprocessors work
        ({"batch": 4}, True),
        ({"window": (None, 0), "seqlen_q": 513}, False),  # the first query sees no key
        ({"window": (None, 0), "seqlen_q": 513, "top_left": True}, True),
        ({"window": (None, 1), "seqlen_q": 513}, True),
        ({"window": (511, None)}, False),
        ({"lengths": True}, False),
        ({"packed": True, "total_q": 1 << 14, "total_k": 1 << 14}, False),
        ({"head_dim": 192, "head_dim_v": 128}, False),
        ({"batch": 0}, False),
        ({"seqlen_k": 0}, False),
    ],
)
def test_which_problems_have_blocks_that_take_whole_heads(change: dict[str, Any], expected: bool) -> None:
    problem = replace(SHORT, **{"head_dim": 64, "head_dim_v": 64} | change)
    found = hopper.backward(problem, HOPPER)
    assert found is not None
    assert hopper.whole_heads(problem, HOPPER, found) is expected
    if expected:
        assert hopper.backward_kernel(replace(found, whole=True)) in config.kernels(problem, "sm_90a")
    if problem.deterministic:  # turns only where blocks share a head
        assert found.deterministic is not expected
        assert hopper.size_class(problem, HOPPER)[-1] == found  # type: ignore[index]


def test_whole_heads_that_are_asked_for_and_not_possible() -> None:
    problem = replace(SHORT, lengths=True)
    config = hopper.backward(problem, HOPPER)
    assert config is not None
    with pytest.raises(ValueError, match="whole_heads: needs dense operands"):
        hopper.whole_heads(problem, HOPPER, config, True)
    assert hopper.whole_variant(problem, config) is None
    plain = replace(SHORT, deterministic=True)
    turns = hopper.backward(plain, HOPPER, whole=False)
    assert turns is not None
    assert turns.deterministic


@pytest.mark.parametrize(
    ("head_dim", "length", "heads"),
    [(64, 512, 32), (128, 2048, 32), (128, 4096, 32), (64, 8192, 16), (128, 16384, 8), (256, 2048, 16), (256, 16384, 4),
     (128, 1 << 20, 1), (128, 1, 32)],
)  # fmt: skip
def test_how_many_heads_the_backward_interleaves(head_dim: int, length: int, heads: int) -> None:
    config = hopper.backward(replace(PLAIN, head_dim=head_dim, head_dim_v=head_dim), HOPPER)
    assert config is not None
    assert hopper.section(config, length, HOPPER) == heads


def test_long_causal_calls_interleave_half_as_many_heads() -> None:
    for length, heads in ((4096, 32), (8192, 8), (16384, 4)):
        problem = replace(PLAIN, seqlen_q=length, seqlen_k=length, window=(None, 0))
        config = hopper.backward(problem, HOPPER)
        assert config is not None
        assert hopper.section(config, length, HOPPER) == heads


class Host:
    """Remembers what it was asked to encode."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def encode_tiled(self, *arguments: Any) -> bytes:
        self.asked.append(arguments)
        return bytes(128)


def test_maps_say_where_the_operands_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host()
    monkeypatch.setattr(device, "host", lambda: host)
    steps._map.cache_clear()
    x = torch.empty(3, 100, 4, 80, dtype=torch.float16)[:, :, 1:3]
    steps.operand_map(x, 192)
    steps.operand_map(x, 192)
    packed = torch.empty(100, 1, 64, dtype=torch.bfloat16)
    steps.operand_map(packed, 64)
    (dense, flat) = host.asked
    assert dense[:5] == (6, x.data_ptr(), [80, 100, 2, 3], [2 * 320, 2 * 80, 2 * 32000], [64, 192, 1, 1])
    assert flat[0] == 9
    assert flat[2] == [64, 100, 1, 1]
    assert flat[3][0] == 128
    assert all(stride % 16 == 0 and stride > 0 for stride in flat[3])
    steps._map.cache_clear()


def test_what_repeats_in_memory_is_copied_for_its_map(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host()
    monkeypatch.setattr(device, "host", lambda: host)
    k = torch.randn(2, 5, 1, 64, dtype=torch.bfloat16).expand(2, 5, 4, 64)
    copy = steps._spread(k)
    assert torch.equal(copy, k)
    steps.operand_map(copy, 64)
    assert 0 not in host.asked[0][3]
    plain = torch.randn(2, 5, 4, 64)[:, :, ::2]
    assert steps._spread(plain) is plain
    steps._map.cache_clear()


# --- the table of shapes ----------------------------------------------------------------------------------------------


def problems() -> Iterator[AttentionProblem]:
    """All that decides between rows, at head dims between theirs."""
    for head_dim, head_dim_v in [*SIZES, (72, 56), (104, 104), (112, 112), (120, 96), (136, 128), (136, 136)]:
        for window, softcap, dropout_p, deterministic, seqlen in itertools.product(
            [(None, None), (None, 0), (64, None), (64, 64)], [None, 30.0], [0.0, 0.1], [False, True], [2048, 2049, 5000]
        ):
            yield replace(
                PLAIN, head_dim=head_dim, head_dim_v=head_dim_v, window=window, softcap=softcap, dropout_p=dropout_p,
                deterministic=deterministic, seqlen_q=seqlen, seqlen_k=seqlen, grads=("q", "k", "v"),
            )  # fmt: skip


def test_the_shipped_table_fits_and_decides_everything() -> None:
    table = hopper_shapes.table()
    hopper.check(table, HOPPER)
    used = set()
    for problem in problems():
        for kernel, make in (("forward", hopper.forward), ("backward", hopper.backward)):
            row = table.find(kernel, problem)
            used.add(str(row))
            assert problem.head_dim <= row.head_dim and problem.head_dim_v <= row.head_dim_v
            config = make(problem, HOPPER)
            assert config is not None and config == make(replace(problem), HOPPER)
            assert {name: getattr(config, name) for name in row.shape._fields} == row.shape._asdict()
    assert used == {str(row) for row in table.rows}


def test_the_table_is_the_text_of_its_file() -> None:
    text = hopper_shapes.PATH.read_text(encoding="utf-8")
    assert hopper_shapes.dump(hopper_shapes.parse(text, "x")) == text
    results = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
    for row in hopper_shapes.table().rows:
        for figure in row.measured or ():
            if results.exists():  # an sdist has none
                assert json.loads((results / f"{figure.result}.json").read_text())["commit"] == figure.commit


@pytest.mark.parametrize(
    ("problem", "kernel", "name"),
    [
        ({"head_dim": 56, "head_dim_v": 48}, "forward", "forward D64 full,causal to 4096, no softcap, no dropout"),
        ({"head_dim": 72, "head_dim_v": 72, "window": (None, 0), "seqlen_k": 2048}, "forward",
         "forward D128 causal to 2048, no softcap, no dropout"),
        ({"head_dim": 136, "head_dim_v": 128}, "forward",
         "forward D192/128 full,causal,left,window, no softcap, no dropout"),
        ({"head_dim": 136, "head_dim_v": 136}, "forward", "forward D192 full,causal,left,window, no dropout"),
        ({"head_dim": 64, "head_dim_v": 64, "dropout_p": 0.5}, "forward",
         "forward D64 full,causal,left,window, no softcap, dropout"),
        ({"head_dim": 72, "head_dim_v": 64, "dropout_p": 0.5, "softcap": 9.0}, "forward",
         "forward D128 full,causal,left,window, dropout"),
        ({"seqlen_q": 4097, "window": (9, 9)}, "backward",
         "backward D128 full,left,window, no softcap, no dropout, no deterministic"),
        ({"dropout_p": 0.5, "deterministic": True}, "backward",
         "backward D128 full,causal,left,window, no softcap, dropout, deterministic"),
    ],
)  # fmt: skip
def test_the_next_row_that_holds_a_problem_decides(problem: dict[str, Any], kernel: str, name: str) -> None:
    assert str(hopper_shapes.table().find(kernel, replace(PLAIN, **problem))) == name


def edited(change: Callable[[dict[str, Any]], Any]) -> str:
    value = json.loads(hopper_shapes.PATH.read_text(encoding="utf-8"))
    change(value)
    return json.dumps(value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v["forward"][3].update(warp=1), r"f.json: forward row 3 \(.*unknown field 'warp'; known: head_dim"),
        (lambda v: v["forward"][3].update(deterministic=True), r"forward row 3 .*unknown field 'deterministic'"),
        (lambda v: v["backward"][1]["shape"].update(stages=2), "backward row 1 .*shape: unknown field 'stages'"),
        (lambda v: v["backward"][1]["shape"].pop("order"), "backward row 1 .*shape: order is missing"),
        (lambda v: v["forward"][0]["shape"].update(stages=True), "forward row 0 .*shape: stages: got True"),
        (lambda v: v["forward"][0].update(head_dim="64"), "forward row 0 .*head_dim: got '64'"),
        (lambda v: v["forward"][0].update(kinds=["causal", "causal"]), "forward row 0 .*kinds: needs some of full"),
        (lambda v: v["forward"][0].update(head_dim_v=128), "forward row 0 .*head_dim_v at most head_dim"),
        (lambda v: v["forward"][0].update(seqlen=0), "forward row 0 .*seqlen: needs at least 1"),
        (lambda v: v["forward"][0]["measured"][0].pop("commit"), "forward row 0 .*measured: commit is missing"),
        (lambda v: v["forward"][0].update(measured=5), "forward row 0 .*measured: needs null or a list"),
        (lambda v: v["forward"].append(5), "forward row 18: needs an object, got 5"),
        (lambda v: v["forward"].append(v["forward"][0]), "two rows for the same problems: forward D64 full,causal to"),
        (lambda v: v["backward"].pop(14), "no row for .*backward.*head_dim_v 256 and no seqlen"),
        (lambda v: v.update(other=[]), "f.json: needs an object of forward and backward"),
    ],
)  # fmt: skip
def test_a_wrong_file_names_the_row(change: Callable[[dict[str, Any]], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hopper_shapes.parse(edited(change), "f.json")


@pytest.mark.parametrize(
    ("place", "shape", "message"),
    [
        (("forward", 12), {"block_k": 128}, "forward D256 .*shared memory: needs at most 232448 bytes"),
        (("forward", 6), {"block_k": 72}, "forward D128 full,causal, .*block_k: needs one of"),
        (("forward", 13), {"block_k": 80}, "forward D64 .*block_k: with dropout needs a multiple of 32"),
        (("forward", 0), {"warpgroups": 5}, "forward D64 .*warpgroups: needs 2, 3 or 4, got 5"),
        (("forward", 0), {"block_k": 128}, "forward D64 .*registers: needs less than 112, tiles alone take 128"),
        (("forward", 0), {"stages": 1}, "forward D64 .*needs stages >= 2"),
        (("backward", 14), {"split": False}, "backward D256 .*registers: needs less than 232"),
        (("backward", 14), {"order": True}, "backward D256 .*order: split, wide and apart"),
        (("backward", 14), {"held": True}, "backward D256 .*held: split, wide and apart"),
        (("backward", 0), {"block_q": 64}, "backward D64 .*apart: needs deterministic, .*128 queries to head_dim 64"),
        (("backward", 1), {"order": False, "apart": True}, "backward D64 .*apart: needs deterministic"),
        (("backward", 14), {"block_q": 128}, "backward D256 .*tiles: need 64 queries x 64 keys split"),
    ],
)  # fmt: skip
def test_a_shape_that_does_not_fit_names_its_row(place: tuple[str, int], shape: dict[str, Any], message: str) -> None:
    kernel, number = place
    table = hopper_shapes.parse(edited(lambda v: v[kernel][number]["shape"].update(shape)), "x")
    with pytest.raises(ValueError, match=message):
        hopper.check(table, HOPPER)


@pytest.mark.parametrize("row", hopper_shapes.table().rows, ids=str)
def test_candidates_fit_and_begin_with_the_present_shape(row: hopper_shapes.Row) -> None:
    found = hopper.candidates(row, HOPPER)
    near = hopper.candidates(row, HOPPER, differ=1)
    assert found[0] == near[0] == row.shape and len(set(found)) == len(found) and set(near) <= set(found)
    make = hopper.forward if row.kernel == "forward" else hopper.backward
    for shape in found[:: max(1, len(found) // 20)]:
        for key in row.decides():
            for more in ({}, {"lengths": True}, {"packed": True}):
                config = make(replace(hopper.typical(row, key), **more), HOPPER, shape=shape._asdict())
                assert config is not None and config.shared_bytes <= HOPPER.smem_per_block
                assert {name: getattr(config, name) for name in shape._fields} == shape._asdict()


def test_what_was_tried_is_among_the_candidates() -> None:
    """Shapes of docs/kernels/sm90_forward.md."""
    rows = {str(row): row for row in hopper_shapes.table().rows}
    wide = hopper.candidates(rows["forward D128 full,causal, no softcap, no dropout"], HOPPER)
    for shape in ((3, 80, 3, 2, False, 0), (3, 64, 3, 2, False, 0), (2, 64, 4, 2, True, 0)):
        assert hopper_shapes.ForwardShape(*shape) in wide
    small = hopper.candidates(rows["forward D64 full, no softcap, no dropout"], HOPPER)
    assert {(4, 64, 4, 2, False, 0), (2, 192, 2, 2, False, 0)} <= {tuple(shape) for shape in small}


def test_the_length_decides_in_every_call_not_in_the_first() -> None:
    """A plan is kept for a class of sizes: rows of the table must not share one."""
    target = attnlib.dispatch.parse_target("sm_90")
    found = {}
    for seqlen in (1024, 8192, 1024):
        problem = replace(PLAIN, head_dim=64, head_dim_v=64, seqlen_q=seqlen, seqlen_k=seqlen)
        plan = attnlib.dispatch.plan_for(problem, target, "cuda:sm_90")[1]
        config = hopper.forward(problem, HOPPER)
        assert config is not None
        found[seqlen] = plan.describe()["block_k"], config.block_k  # type: ignore[attr-defined]
    assert found == {1024: (64, 64), 8192: (128, 128)}


def test_a_shape_that_is_asked_for_and_does_not_fit_is_refused() -> None:
    target = attnlib.dispatch.parse_target("sm_90")
    with attnlib.dispatch.use_config({"wgmma_forward": {"block_k": 256}}):
        spec = attnlib.dispatch.requested("cuda:sm_90")
    with pytest.raises(attnlib.UnsupportedError, match="cuda:sm_90: config: registers: needs less than 232"):
        attnlib.dispatch.plan_for(PLAIN, target, spec)


@pytest.mark.parametrize("window", [(None, None), (None, 0)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_cache_filled_for_one_length_serves_every_length(
    head_dim: int, window: tuple[int | None, int | None]
) -> None:
    """What `attnlib compile` takes of a problem must be there for ATTNLIB_JIT=never, however long the next text is."""

    def asked(length: int) -> AttentionProblem:
        return AttentionProblem(
            torch.bfloat16, 2, length, length, 16, 16, head_dim, head_dim, 0.1, window=window, grads=("q", "k", "v")
        )  # fmt: skip

    filled = {spec for spec, _ in compile.jobs(asked(4096), "sm_90a")}
    for length in (256, 512, 1024, 2048, 2049, 4097, 8192, 100_000):
        assert set(config.kernels(asked(length), "sm_90a")) <= filled
    assert len(compile.jobs(asked(4096), "sm_80")) == len(config.kernels(asked(4096), "sm_80"))
    target = Target("cuda", "sm_90", present=False)
    classes = {attnlib_cuda.backend.size_class(asked(length), "sm_90", target) for length in range(1, 20_000, 7)}
    assert 1 < len(classes) <= 16
