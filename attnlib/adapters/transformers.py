"""`attn_implementation="attnlib"` for Hugging Face transformers (5.0 or later).

    from transformers import AutoModel
    from attnlib.adapters.transformers import register

    register()
    model = AutoModel.from_pretrained(name, attn_implementation="attnlib")

Masks come from the same function that transformers uses for torch's SDPA: a boolean [B, 1, Sq, Sk], or None where the
causal flag says it all. A mask that is given is the whole visibility, sliding window included, as it is in
transformers' own sdpa and eager paths. Every other argument of a model is honoured or refused by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .. import attention, attention_varlen
from ..errors import ArgumentError, ArgumentTypeError, UnsupportedError

NAME = "attnlib"

# Keywords that models pass down to the attention function and that do not concern what it computes. Positions have
# been applied to query and key before; the flags choose what a model returns or keeps.
UNRELATED = frozenset(
    {
        "cache_position",
        "input_ids",
        "labels",
        "layer_idx",
        "logits_to_keep",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "seq_idx",
        "token_type_ids",
        "use_cache",
    }
)


@dataclass
class CallCounter:
    """How many attention calls attnlib has finished; see count_calls."""

    calls: int = 0


_counters: list[CallCounter] = []


@contextlib.contextmanager
def count_calls() -> Iterator[CallCounter]:
    """Count the attention calls that models make through attnlib inside the with block.

    A model that fell back to another implementation is one that was not counted.

    Example:
        >>> with count_calls() as counter:
        ...     model(**batch)  # doctest: +SKIP
        >>> assert counter.calls == model.config.num_hidden_layers  # doctest: +SKIP
    """
    counter = CallCounter()
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters[:] = [other for other in _counters if other is not counter]


def register(name: str = NAME, *, backend: str | None = None) -> str:
    """Make attnlib known to transformers under `name`, for every model made afterwards.

    Args:
        name: what to pass as attn_implementation.
        backend: an attnlib backend by name, for all calls through this name; default: attnlib's own choice.

    Returns:
        name.

    Raises:
        ImportError: transformers is not installed, or older than 5.0.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise ImportError(f"attnlib.adapters.transformers needs transformers 5.0 or later ({error})") from error
    AttentionInterface.register(name, attention_forward if backend is None else partial(_forward, backend=backend))
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """One attention layer of a model, as transformers' AttentionInterface calls it.

    Args:
        module: the layer; its is_causal (default True) holds where the keyword is not given.
        query: [B, Hq, Sq, D].
        key: [B, Hkv, Sk, D]. Hkv may divide Hq.
        value: [B, Hkv, Sk, Dv].
        attention_mask: bool [B, 1 or Hq, Sq, Sk], or floating and then added to the scores, or None.
        scaling: factor of the scores; default 1 / sqrt(D).
        dropout: probability with which a weight is dropped.
        kwargs: is_causal, sliding_window, softcap, s_aux (attention sinks [Hq]), position_bias, deterministic,
            cu_seq_lens_q and cu_seq_lens_k (packed sequences in a batch of one) are honoured.

    Returns:
        ([B, Sq, Hq, Dv], None); attention weights are never formed.

    Raises:
        UnsupportedError: output_attentions=True, or no backend takes the call.
        ArgumentTypeError: a keyword that is not known here and is not None, False or 0.
    """
    return _forward(module, query, key, value, attention_mask, scaling, dropout, backend=None, **kwargs)


def _forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    backend: str | None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    deterministic: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    output_attentions: bool = False,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    _refuse_unknown(others)
    if output_attentions:
        raise UnsupportedError("output_attentions: attnlib never forms the weights, got True (use 'eager' to see them)")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    options: dict[str, Any] = {
        "scale": scaling,
        "softcap": softcap,
        "sinks": s_aux,
        "dropout_p": dropout,
        "deterministic": deterministic or None,
        "backend": backend,
    }
    if (cu_seq_lens_q is None) != (cu_seq_lens_k is None):
        raise ArgumentError("cu_seq_lens_q, cu_seq_lens_k: need each other, got one of them")

    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    bias, mask = position_bias, None
    if attention_mask is not None:
        if attention_mask.dim() != 4:
            raise ArgumentError(f"attention_mask: needs [B, H, Sq, Sk], got {tuple(attention_mask.shape)}")
        if attention_mask.dtype == torch.bool:
            mask = attention_mask
        else:
            bias = attention_mask if bias is None else bias + attention_mask

    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        if q.shape[0] != 1:
            raise ArgumentError(f"cu_seq_lens_q: needs a batch of one packed row, got a batch of {q.shape[0]}")
        if attention_mask is None:
            if bias is not None:
                raise UnsupportedError(
                    "position_bias: needs an attention_mask beside it for packed sequences, got None"
                )
            options.update(causal=causal, window=_window(sliding_window, causal))
            options.update(max_seqlen_q=max_length_q, max_seqlen_k=max_length_k)
            return _counted(attention_varlen(q[0], k[0], v[0], cu_seq_lens_q, cu_seq_lens_k, **options)[None])
        same = _segments(cu_seq_lens_q, q.shape[1])[:, None] == _segments(cu_seq_lens_k, k.shape[1])[None, :]
        mask = same[None, None] if mask is None else mask & same
    elif attention_mask is None:
        if causal and 1 < q.shape[1] < k.shape[1]:
            # The first pass over a cache of fixed size: the slots behind the queries hold nothing yet.
            k, v = k[:, : q.shape[1]], v[:, : q.shape[1]]
            bias = bias[..., : q.shape[1]] if bias is not None else None
        options.update(causal=causal and q.shape[1] > 1, window=_window(sliding_window, causal))
        if q.shape[1] > k.shape[1]:
            options["causal_alignment"] = "top_left"
    return _counted(attention(q, k, v, mask=mask, bias=bias, **options))


def _counted(out: torch.Tensor) -> tuple[torch.Tensor, None]:
    for counter in _counters:
        counter.calls += 1
    return out, None


def _refuse_unknown(others: dict[str, Any]) -> None:
    for name, value in others.items():
        if name in UNRELATED or value is None or (isinstance(value, (bool, int, float)) and not value):
            continue
        got = f"a tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise ArgumentTypeError(
            f"{name}: attnlib does not know what it means for attention, got {got} "
            "(register it in attnlib.adapters.transformers.UNRELATED only if it does not change the result)"
        )


def _window(sliding_window: int | None, causal: bool) -> tuple[int, int] | None:
    """transformers counts the query itself: a window of 4 is the query and three keys on each visible side."""
    if sliding_window is None:
        return None
    if sliding_window < 1:
        raise ArgumentError(f"sliding_window: needs at least 1, got {sliding_window}")
    return sliding_window - 1, 0 if causal else sliding_window - 1


def _segments(cu_seq_lens: torch.Tensor, length: int) -> torch.Tensor:
    """The index of the packed sequence that each of `length` rows belongs to."""
    rows = torch.arange(length, device=cu_seq_lens.device)
    return torch.bucketize(rows, cu_seq_lens[1:].to(rows.dtype), right=True)
