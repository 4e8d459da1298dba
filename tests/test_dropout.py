"""The dropout contract: known answers, the values of docs/semantics.md, and independence of how it is computed."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlib.dropout import dropout_mask, keep_rectangle, numbers, philox
from attnlib.errors import ArgumentError, ArgumentTypeError
from attnlib.options import drop_threshold

SEED = 0x123456789ABCDEF0
SEEDS = st.integers(-(2**63), 2**63 - 1)


def plain_philox(counter: tuple[int, int, int, int], seed: int) -> list[int]:
    """Philox4x32-10 in Python's integers."""
    c0, c1, c2, c3 = counter
    key0, key1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ key0, b & 0xFFFFFFFF, (a >> 32) ^ c3 ^ key1, a & 0xFFFFFFFF
        key0, key1 = (key0 + 0x9E3779B9) & 0xFFFFFFFF, (key1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def plain_number(seed: int, b: int, h: int, i: int, j: int) -> int:
    words = plain_philox(((j >> 5) * 8 + (j & 7), (i >> 4) * 8 + (i & 7), h, b), seed)
    word = words[(j >> 3) & 3]
    return word & 0xFFFF if (i & 8) == 0 else word >> 16


@pytest.mark.parametrize(
    ("counter", "seed", "answer"),
    [
        ((0, 0, 0, 0), 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, -1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0_A4093822,
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_random123_known_answers(counter: tuple[int, int, int, int], seed: int, answer: str) -> None:
    words = philox(*(torch.full((1,), c) for c in counter), seed)
    assert " ".join(f"{int(word):08x}" for word in words) == answer


@pytest.mark.parametrize(
    ("i", "j", "number"),
    [
        (0, 0, 19606), (0, 1, 42457), (8, 0, 17412), (0, 8, 65300), (16, 0, 8198), (0, 32, 34412), (7, 31, 27739),
        (511, 767, 54308), (599, 799, 495),
    ],
)  # fmt: skip
def test_numbers_of_the_contract(i: int, j: int, number: int) -> None:
    assert int(numbers(SEED, 2, 2, i + 1, j + 1)[0, 1, i, j]) == number


def test_count_of_the_contract() -> None:
    mask = dropout_mask(SEED, 0.1, 3, 2, 600, 800)
    assert mask.shape == (3, 2, 600, 800) and mask.dtype == torch.bool
    assert int(mask[2, 1].sum()) == 431554
    assert torch.equal(mask, dropout_mask(torch.tensor([SEED]), 0.1, 3, 2, 600, 800))


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.integers(0, 2**31 - 1), st.integers(0, 5), st.integers(0, 40), st.integers(0, 70))
def test_numbers_equal_plain_integers(seed: int, b: int, h: int, i: int, j: int) -> None:
    assert int(numbers(seed, b, h + 1, i + 1, j + 1)[0, h, i, j]) == plain_number(seed, b, h, i, j)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rectangle_is_a_part_of_the_mask(data: st.DataObject) -> None:
    rows = sorted(data.draw(st.tuples(st.integers(0, 70), st.integers(0, 70))))
    columns = sorted(data.draw(st.tuples(st.integers(0, 90), st.integers(0, 90))))
    whole = dropout_mask(SEED, 0.4, 3, 2, 70, 90)
    part = whole[:, :, rows[0] : rows[1], columns[0] : columns[1]]
    got = keep_rectangle(SEED, drop_threshold(0.4), 1, 2, (rows[0], rows[1]), (columns[0], columns[1]))
    assert torch.equal(got, part[1])
    several = keep_rectangle(SEED, drop_threshold(0.4), [2, 0], 2, (rows[0], rows[1]), (columns[0], columns[1]))
    assert torch.equal(several, part[[2, 0]])


def test_mask_does_not_depend_on_sizes() -> None:
    small, large = dropout_mask(SEED, 0.3, 2, 3, 33, 47), dropout_mask(SEED, 0.3, 3, 5, 100, 129)
    assert torch.equal(small, large[:2, :3, :33, :47])


def test_pieces_are_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = dropout_mask(SEED, 0.3, 3, 3, 50, 70)
    for chunk in (1, 70 * 20, 70 * 50, 70 * 50 * 2, 70 * 50 * 7):
        monkeypatch.setattr("attnlib.dropout._CHUNK", chunk)
        assert torch.equal(whole, dropout_mask(SEED, 0.3, 3, 3, 50, 70))


def test_batch_indices_may_be_any() -> None:
    whole = numbers(SEED, range(4), 2, 20, 20)
    assert whole.dtype == torch.int32
    assert torch.equal(numbers(SEED, [3, 1], 2, 20, 20), whole[[3, 1]])


def test_ends_of_p() -> None:
    assert dropout_mask(5, 0.0, 1, 1, 40, 40).all()
    assert not dropout_mask(5, 1.0, 1, 1, 40, 40).any()
    assert (
        drop_threshold(1e-6) == 0
        and drop_threshold(1 / 65536) == 1
        and drop_threshold(0.1) == 6554
        and drop_threshold(1.0) == 65536
    )
    share = dropout_mask(5, 0.25, 1, 4, 256, 256).double().mean()
    assert abs(float(share) - 0.75) < 0.003


def test_empty_masks() -> None:
    for sizes in ((0, 1, 3, 3), (1, 0, 3, 3), (1, 1, 0, 3), (1, 1, 3, 0)):
        assert dropout_mask(1, 0.5, *sizes).shape == sizes


@pytest.mark.parametrize("p", [-0.1, 1.1, math.nan, math.inf])
def test_AB_071_p_outside_0_to_1_is_an_error(p: float) -> None:
    with pytest.raises(ArgumentError, match=r"^p: needs a number from 0 to 1, got"):
        dropout_mask(1, p, 1, 1, 4, 4)


def test_bad_arguments() -> None:
    for seed in (2**63, -(2**63) - 1):
        with pytest.raises(ArgumentError, match=rf"seed: needs an int in \[-2\^63, 2\^63\), got {seed}"):
            dropout_mask(seed, 0.5, 1, 1, 4, 4)
    with pytest.raises(ArgumentError, match=r"seed: needs an int64 tensor of one element, got shape \(2,\)"):
        dropout_mask(torch.zeros(2, dtype=torch.int64), 0.5, 1, 1, 4, 4)
    with pytest.raises(ArgumentTypeError, match=r"seed: .* got dtype torch.int32"):
        dropout_mask(torch.zeros(1, dtype=torch.int32), 0.5, 1, 1, 4, 4)
    for seed in (1.5, True):
        with pytest.raises(ArgumentTypeError, match=r"seed: needs an int"):
            dropout_mask(seed, 0.5, 1, 1, 4, 4)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match=r"^p: needs a number from 0 to 1, got '0.5'"):
        dropout_mask(1, "0.5", 1, 1, 4, 4)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"seqlen_k: needs an int >= 0, got -4"):
        dropout_mask(1, 0.5, 1, 1, 4, -4)
    with pytest.raises(ArgumentTypeError, match=r"batch: needs an int >= 0, got float"):
        dropout_mask(1, 0.5, 1.0, 1, 4, 4)  # type: ignore[arg-type]
