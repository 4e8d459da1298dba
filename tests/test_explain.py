"""explain: what it tells of the kernels, and that it raises what the call itself would."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

import attnlib
from attnlib import ArgumentError, ArgumentTypeError, cli

CPU = attnlib.explain(torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1, 8)).chosen or ""
needs_cpu = pytest.mark.skipif(not CPU.startswith("cpu:"), reason="the cpu backend was not compiled")

SHAPE = ("--shape", "2,1024,16,128", "--causal")


def told(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[str, dict[str, Any]]:
    """What `attnlib explain` prints, and the details of its JSON."""
    assert cli.main(["explain", *SHAPE, *options]) == 0
    text = capsys.readouterr().out
    assert cli.main(["explain", *SHAPE, *options, "--json"]) == 0
    return text, json.loads(capsys.readouterr().out)["details"]


@needs_cpu
def test_what_the_cpu_backend_tells(capsys: pytest.CaptureFixture[str]) -> None:
    text, details = told(capsys, "--backward", "--kv-heads", "4", "--dtype", "float32")
    family = CPU.removeprefix("cpu:")
    sizes = {"block_q", "block_k", "threads", "workspace_bytes"}
    for part in (details, details["backward"]):
        assert part["kernel"] == f"{family} float32" and part["panels"] == "float32" and part["split"]
        assert all(isinstance(part[size], int) and part[size] > 0 for size in sizes)
    assert details["threads"] == torch.get_num_threads()
    assert 4 % details["heads_together"] == 0
    for line in (f"  kernel: {family} float32", f"  block_k: {details['block_k']}", "  backward: kernel "):
        assert line in text
    assert "backward" not in told(capsys, "--dtype", "float32")[1]


@needs_cpu
@pytest.mark.parametrize("seqlen", [64, 500])
def test_the_blocks_that_the_cpu_backend_tells_are_those_it_runs(seqlen: int) -> None:
    q, k, v = torch.randn(3, 1, seqlen, 2, 64, generator=torch.Generator().manual_seed(0))
    details = attnlib.explain(q, k, v, backend=CPU).details or {}

    def run(**config: int) -> torch.Tensor:
        with attnlib.dispatch.use_config(config or None):
            return attnlib.attention(q, k, v, backend=CPU)

    told = run(block_k=details["block_k"])
    assert torch.equal(told, run())  # a row's result depends on the keys of a tile, to the bit
    assert not torch.equal(told, run(block_k=details["block_k"] // 2))


def test_what_the_cuda_backend_tells_of_hardware_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    if "cuda" not in {info.name for info in attnlib.backends() if info.families}:
        pytest.skip("no cuda backend")
    text, details = told(capsys, "--backward", "--device", "sm_90", "--backend", "cuda:sm_80")
    for part in (details, details["backward"]):
        assert part["kernel"].endswith("_sm80")
        assert all(part[size] > 0 and part[size] % 16 == 0 for size in ("block_q", "block_k", "shared_bytes"))
    for name, value in details.items():
        if name != "backward":
            assert f"  {name}: {value}" in text
    assert f"  backward: kernel {details['backward']['kernel']}, " in text


def test_the_reference_tells_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    text, details = told(capsys, "--backend", "reference")
    assert details["kernel"] in text


# --- the errors of the call ------------------------------------------------------------------------------------------

Q, K, V = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 6)
CACHE = torch.randn(3, 4, 2, 8)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def packed(**changes: Any) -> tuple[Any, dict[str, Any]]:
    x = torch.randn(8, 2, 8)
    return (x, x, x), {"cu_seqlens_q": ints(0, 3, 8), "cu_seqlens_k": ints(0, 4, 8)} | changes


def cached(**changes: Any) -> tuple[Any, dict[str, Any]]:
    tables = {"kv_lens": ints(1, 2), "page_table": ints(0, 1)[:, None]}
    return (torch.randn(2, 1, 4, 8), CACHE, CACHE.clone()), tables | changes


NEW = torch.randn(2, 1, 2, 8)
BAD = [
    ("attention", ((Q, K, V), {"q_lens": ints(5, 6)})),
    ("attention", ((Q, K, V), {"kv_lens": ints(-1, 7)})),
    ("attention", ((Q, K, V), {"dropout_p": 0.5, "dropout_seed": 2**63})),
    ("attention", ((Q, K, V), {"dropout_seed": 0.5})),
    ("attention", ((Q, K, V), {"backend": "zzz"})),
    ("attention", ((Q, K, V), {"bias": torch.zeros(5, 6)})),
    ("attention", ((Q.numpy(), K.numpy(), [1.0]), {})),
    ("attention_varlen", packed(cu_seqlens_q=ints(0, 3, 9))),
    ("attention_varlen", packed(cu_seqlens_k=ints(0, 5, 4))),
    ("attention_varlen", packed(max_seqlen_q=4)),
    ("attention_varlen", packed(max_seqlen_k=torch.zeros(2))),
    ("attention_kvcache", cached(kv_lens=ints(1, 5))),
    ("attention_kvcache", cached(kv_lens=None)),
    ("attention_kvcache", cached(page_table=ints(0, 3)[:, None])),
    ("attention_kvcache", cached(k_new=NEW, v_new=NEW, kv_lens=ints(1, 4))),
    ("attention_kvcache", cached(k_new=NEW)),
    ("attention_kvcache", cached(new_lens=ints(1, 1))),
    ("attention_kvcache", cached(k_new=NEW, v_new=NEW, new_lens=ints(1, 2))),
    ("attention_kvcache", cached(k_new=NEW.clone().requires_grad_(), v_new=NEW)),
]


@pytest.mark.parametrize(("function", "call"), BAD, ids=[f"{i}-{name}" for i, (name, _) in enumerate(BAD)])
def test_what_the_call_raises(function: str, call: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    operands, keywords = call
    with pytest.raises((ArgumentError, ArgumentTypeError)) as caught:
        getattr(attnlib, function)(*operands, **keywords)
    with pytest.raises(type(caught.value), match=f"^{re.escape(str(caught.value))}$"):
        attnlib.explain(*operands, **keywords)


def test_good_lengths_are_no_error() -> None:
    for operands, keywords in (packed(), cached(), cached(k_new=NEW, v_new=NEW), ((Q, K, V), {"q_lens": ints(5, 0)})):
        assert attnlib.explain(*operands, **keywords).chosen is not None


@pytest.mark.parametrize(
    "keywords",
    [
        {"cu_seqlens_q": ints(0, 5), "q_lens": ints(5)},
        {"page_table": ints(0)[:, None], "dropout_p": 0.5},
        {"k_new": NEW, "block_mask": attnlib.BlockMask(torch.ones(1, 1, 1, 1, dtype=torch.bool), 16, 16)},
        {"new_lens": ints(1), "causal_alignment": "top_left"},
    ],
    ids=lambda keywords: " ".join(keywords),
)
def test_keywords_that_no_function_takes_together(keywords: dict[str, Any]) -> None:
    with pytest.raises(ArgumentTypeError, match=f"no attention function takes {', '.join(sorted(keywords))} together"):
        attnlib.explain(Q, K, V, **keywords)


def test_explain_draws_no_random_numbers() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    attnlib.explain(Q, K, V, dropout_p=0.5)
    assert torch.equal(torch.get_rng_state(), before)
