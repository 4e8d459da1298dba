"""visible/CASE: which keys each query sees, recovered element by element and compared with the definition.

With q = 0 every visible key has the same weight 1/n, so that with unit vectors as values out[i] shows the visible
set of query i itself. The set is worked out here from the contract's sentence, without any of core's code.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import torch

from ...problem import Feature
from ..cases import Case, with_features
from ..inputs import Inputs
from ..items import Item, add
from ..recipes import make
from ..subject import Subject, require

_CHUNK = 64


def visible_set(inputs: Inputs) -> torch.Tensor:
    """bool [B, Hq, Sq, Sk] on the CPU: what each query of a call sees, padding queries nothing."""
    case, arguments = inputs.case, inputs.arguments
    batch, heads, rows = len(inputs.q_lens), case.num_heads_q, case.seqlen_q
    bias, mask, blocks = arguments.get("bias"), arguments.get("mask"), arguments.get("block_mask")
    keys = inputs.capacity
    seen = torch.zeros(batch, heads, rows, keys, dtype=torch.bool)
    left, right = case.window or (None, None)
    for b in range(batch):
        q_len, kv_len = inputs.q_lens[b], inputs.kv_lens[b] + (inputs.new_lens[b] if inputs.new_lens else 0)
        for i in range(q_len):
            position = i if case.top_left else i + kv_len - q_len
            first = 0 if left is None else max(0, position - left)
            last = kv_len - 1 if right is None else min(kv_len - 1, position + right)
            if case.causal:
                last = min(last, position)
            seen[b, :, i, first : max(first, last + 1)] = True
    if mask is not None:
        seen &= mask.cpu()
    if bias is not None:
        seen &= bias.detach().cpu() != -math.inf
    if blocks is not None:
        whole = blocks.mask.cpu().repeat_interleave(blocks.block_q, 2).repeat_interleave(blocks.block_k, 3)
        seen &= whole[:, :, :rows, :keys]
    return seen


def weights(inputs_of: Any, subject: Subject, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What each key contributes to each query, [B, Hq, Sq, keys], and lse [B, Hq, Sq]; one call for 64 keys."""
    columns, lse = [], None
    for first in range(0, keys, _CHUNK):
        inputs = inputs_of(first)
        result = subject.run(inputs)
        assert result.out is not None and result.lse is not None
        columns.append(inputs.unpack_rows(result.out).transpose(1, 2).cpu())
        lse = inputs.unpack_lse(result.lse).cpu()
    assert lse is not None
    return torch.cat(columns, -1)[..., :keys].double(), lse.double()


def run(case: Case, subject: Subject) -> None:
    case = replace(case, recipe=case.recipe if case.recipe != "normal" else "one_hot", head_dim_v=_CHUNK)
    first = make(case, subject.dtype, subject.device)
    seen = visible_set(first)
    found, lse = weights(
        lambda column: make(case, subject.dtype, subject.device, column=column), subject, first.capacity
    )
    wrong = (found > 0) != seen
    require(~torch.isnan(found), "NaN among the weights of keys")
    require(not wrong.any(), lambda: f"{_first(wrong, seen)} ({int(wrong.sum())} of {wrong.numel()} pairs are wrong)")
    if not (case.bias or case.alibi or case.sinks):
        count = seen.sum(-1)
        want = torch.where(count == 0, -math.inf, count.double().log())
        close = (lse == want) | ((lse - want).abs() <= 1e-4)
        require(close, "lse differs from the logarithm of the number of visible keys")


def _first(wrong: torch.Tensor, seen: torch.Tensor) -> str:
    b, h, i, j = (int(index) for index in wrong.nonzero()[0])
    what = "hidden but needs to be visible" if seen[b, h, i, j] else "visible but needs to be hidden"
    return f"sequence {b}, head {h}, query {i}, key {j} is {what}"


def _register() -> None:
    sizes: dict[str, Any] = {"batch": 4}
    alone = (
        Feature.CAUSAL, Feature.WINDOW, Feature.TOP_LEFT, Feature.MASK, Feature.BLOCK_MASK, Feature.LENGTHS,
        Feature.VARLEN, Feature.PAGED, Feature.APPEND, Feature.GQA,
    )  # fmt: skip
    cases = [with_features(feature.name.lower(), (feature,), **sizes) for feature in alone]
    wider: dict[str, Any] = {"batch": 2, "window": (7, 3)}
    cases += [
        Case("plain", **sizes),
        Case("plain-130", batch=2, seqlen_q=3, seqlen_k=130),
        Case("causal-more-queries", causal=True, seqlen_q=131, seqlen_k=67, batch=2),
        Case("causal-decode", causal=True, seqlen_q=1, seqlen_k=200, batch=2, num_heads_q=4),
        Case("window-causal", causal=True, window=(4, 9), seqlen_q=70, seqlen_k=70, batch=2),
        Case("window-future", window=(0, 5), seqlen_q=70, seqlen_k=90, batch=2),
        Case("window-top_left", top_left=True, **wider),
        Case("window-lengths", q_lens=(65, 1, 40), kv_lens=(97, 64, 0, 33), **{**wider, "batch": 4}),
        Case("mask-lengths-causal", mask="bhqk", causal=True, q_lens=(65, 9), kv_lens=(97, 64), batch=2),
        Case("mask-bias-block_mask", mask="b1qk", bias="1hqk", recipe="one_hot", block_mask=(16, 16), batch=2),
        Case("packed-window", layout="packed", q_lens=(65, 1, 0, 40), kv_lens=(97, 64, 5, 33), **{**wider, "batch": 4}),
        Case(
            "packed-causal-mask", layout="packed", q_lens=(65, 2), kv_lens=(97, 70), causal=True, mask="b1qk", batch=2
        ),
        Case(
            "paged-window", layout="cache", kv_lens=(97, 64, 1, 33), page_size=16, seqlen_q=5, **{**wider, "batch": 4}
        ),
        Case("cache-q_lens", layout="cache", kv_lens=(97, 64, 1, 33), q_lens=(5, 1), seqlen_q=5, causal=True, batch=4),
    ]
    for case in cases:
        add(Item(f"visible/{case.name}", functools.partial(run, case)))


_register()
