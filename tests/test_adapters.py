"""The adapters say what the libraries they stand in for say, and refuse by name what they cannot."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

import attnlib
from attnlib.adapters import flash_attn
from attnlib.adapters.sdpa import scaled_dot_product_attention

torch_sdpa = torch.nn.functional.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def _backend() -> Any:
    """Adapters are about names and layouts, so the reference computes."""
    torch.manual_seed(0)
    with attnlib.use_backend("reference"):
        yield


def close(got: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(got, right, atol=2e-5, rtol=2e-5)


# --- scaled_dot_product_attention -----------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", [(), (3,), (2, 4), (2, 1, 4), (2, 3, 2, 4)], ids=lambda lead: f"{len(lead) + 2}d")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(5, 5), (3, 7), (7, 3)])
def test_sdpa_layouts_and_top_left_causal(lead: tuple[int, ...], causal: bool, sizes: tuple[int, int]) -> None:
    q, k, v = torch.randn(*lead, sizes[0], 8), torch.randn(*lead, sizes[1], 8), torch.randn(*lead, sizes[1], 6)
    close(scaled_dot_product_attention(q, k, v, is_causal=causal), torch_sdpa(q, k, v, is_causal=causal))


@pytest.mark.parametrize("shape", [(5, 7), (1, 7), (5, 1), (1, 1, 5, 7), (2, 1, 1, 7), (2, 4, 5, 7), (4, 5, 7)])
@pytest.mark.parametrize("floating", [False, True])
def test_sdpa_masks(shape: tuple[int, ...], floating: bool) -> None:
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 7, 8), torch.randn(2, 4, 7, 8)
    mask = torch.randn(shape) if floating else torch.rand(shape) < 0.7
    close(scaled_dot_product_attention(q, k, v, mask), torch_sdpa(q, k, v, mask))


@pytest.mark.parametrize("shape", [(5, 7), (2, 5, 7), (1, 5, 7)])
def test_sdpa_masks_without_heads(shape: tuple[int, ...]) -> None:
    q, k, v = torch.randn(2, 5, 8), torch.randn(2, 7, 8), torch.randn(2, 7, 8)
    mask = torch.rand(shape) < 0.7
    close(scaled_dot_product_attention(q, k, v, mask), torch_sdpa(q, k, v, mask))


@pytest.mark.parametrize("shape", [(5, 7), (4, 5, 7), (3, 1, 5, 7), (2, 3, 4, 5, 7), (2, 1, 1, 5, 7)])
def test_sdpa_masks_with_two_batch_dimensions(shape: tuple[int, ...]) -> None:
    q, k, v = torch.randn(2, 3, 4, 5, 8), torch.randn(2, 3, 4, 7, 8), torch.randn(2, 3, 4, 7, 8)
    mask = torch.randn(shape)
    close(scaled_dot_product_attention(q, k, v, mask), torch_sdpa(q, k, v, mask))


def test_sdpa_grouped_heads_scale_and_broadcast_batch() -> None:
    q, k, v = torch.randn(2, 6, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    got = scaled_dot_product_attention(q, k, v, scale=-0.3, enable_gqa=True)
    close(got, torch_sdpa(q, k, v, scale=-0.3, enable_gqa=True))
    with pytest.raises(attnlib.ArgumentError, match="enable_gqa"):
        scaled_dot_product_attention(q, k, v)
    close(scaled_dot_product_attention(q, k[:1, :1], v[:1, :1]), torch_sdpa(q, k[:1, :1], v[:1, :1]))


def test_sdpa_causal_bias_objects() -> None:
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left

    q, k, v = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    for make in (causal_lower_right, causal_upper_left):
        close(scaled_dot_product_attention(q, k, v, make(3, 5)), torch_sdpa(q, k, v, make(3, 5)))


def test_sdpa_gradients_and_mask_gradient() -> None:
    values = [torch.randn(2, 4, 5, 8), torch.randn(2, 4, 7, 8), torch.randn(2, 4, 7, 8), torch.randn(4, 5, 7)]
    grads = []
    for function in (scaled_dot_product_attention, torch_sdpa):
        leaves = [x.clone().requires_grad_() for x in values]
        out = function(*leaves)
        grads.append(torch.autograd.grad(out.sin().sum(), leaves))
    for got, right in zip(*grads, strict=True):
        close(got, right)


def test_sdpa_fully_masked_row_is_zero() -> None:
    q = k = v = torch.randn(1, 1, 2, 4)
    out = scaled_dot_product_attention(q, k, v, torch.tensor([[False, False], [True, True]]))
    assert torch.equal(out[0, 0, 0], torch.zeros(4))


def test_sdpa_dropout_is_applied() -> None:
    q = k = v = torch.randn(1, 2, 64, 8)
    torch.manual_seed(1)
    first = scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(1)
    assert torch.equal(first, scaled_dot_product_attention(q, k, v, dropout_p=0.5))
    assert not torch.allclose(first, scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize(
    ("keywords", "error", "text"),
    [
        ({"attn_mask": torch.ones(5, 5, dtype=torch.bool), "is_causal": True}, attnlib.ArgumentError, "attn_mask"),
        ({"attn_mask": torch.ones(5, 5, dtype=torch.int32)}, attnlib.ArgumentTypeError, "attn_mask"),
        ({"attn_mask": torch.ones(1, 1, 1, 5, 5)}, attnlib.ArgumentError, "attn_mask"),
        ({"dropout_p": 1.5}, attnlib.ArgumentError, "dropout_p"),
        ({"scale": math.inf}, attnlib.ArgumentError, "scale"),
    ],
)
def test_sdpa_errors(keywords: dict[str, Any], error: type[Exception], text: str) -> None:
    q = k = v = torch.randn(1, 2, 5, 8)
    with pytest.raises(error, match=text):
        scaled_dot_product_attention(q, k, v, **keywords)


# --- flash_attn -----------------------------------------------------------------------------------------------------


def packed() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    cu_q = torch.tensor([0, 3, 8], dtype=torch.int32)
    cu_k = torch.tensor([0, 5, 11], dtype=torch.int32)
    return torch.randn(8, 4, 8), torch.randn(11, 2, 8), torch.randn(11, 2, 8), cu_q, cu_k


def test_flash_attn_func_translates_conventions() -> None:
    q, k, v = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 8)
    slopes = torch.tensor([0.1, 0.2, 0.3, 0.4])
    got = flash_attn.flash_attn_func(
        q, k, v, softmax_scale=0.2, causal=True, window_size=(3, -1), softcap=5.0, alibi_slopes=slopes
    )
    right = attnlib.attention(q, k, v, scale=0.2, causal=True, window=(3, None), softcap=5.0, alibi_slopes=slopes)
    assert torch.equal(got, right)
    assert torch.equal(flash_attn.flash_attn_func(q, k, v), attnlib.attention(q, k, v))
    out, lse, nothing = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True)
    assert nothing is None
    assert lse.shape == (2, 4, 5)
    assert torch.equal(out, attnlib.attention(q, k, v))


def test_flash_attn_func_positional_order() -> None:
    q = k = v = torch.randn(1, 5, 2, 8)
    got = flash_attn.flash_attn_func(q, k, v, 0.0, 0.3, True, (2, 0), 4.0)
    assert torch.equal(got, attnlib.attention(q, k, v, scale=0.3, causal=True, window=(2, 0), softcap=4.0))


def test_flash_attn_varlen() -> None:
    q, k, v, cu_q, cu_k = packed()
    got = flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 6, causal=True)
    close(got, attnlib.attention_varlen(q, k, v, cu_q, cu_k, causal=True))
    for b in range(2):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        close(got[rows], attnlib.attention(q[None, rows], k[None, keys], v[None, keys], causal=True)[0])


def test_flash_attn_varlen_with_block_table() -> None:
    q, k, v, cu_q, cu_k = packed()
    pages_k, pages_v = torch.full((6, 4, 2, 8), torch.nan), torch.full((6, 4, 2, 8), torch.nan)
    table = torch.tensor([[5, 1], [0, 3]], dtype=torch.int32)
    for b in range(2):
        for t in range(int(cu_k[b + 1] - cu_k[b])):
            page = table[b, t // 4]
            pages_k[page, t % 4], pages_v[page, t % 4] = k[cu_k[b] + t], v[cu_k[b] + t]
    got = flash_attn.flash_attn_varlen_func(q, pages_k, pages_v, cu_q, cu_k, 5, 6, causal=True, block_table=table)
    close(got, attnlib.attention_varlen(q, k, v, cu_q, cu_k, causal=True))


def test_flash_attn_with_kvcache_appends_in_place() -> None:
    q, k, v = torch.randn(2, 1, 4, 8), torch.randn(2, 1, 2, 8), torch.randn(2, 1, 2, 8)
    k_cache, v_cache = torch.randn(2, 9, 2, 8), torch.randn(2, 9, 2, 8)
    before = k_cache.clone()
    lengths = torch.tensor([3, 8], dtype=torch.int32)
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True, return_softmax_lse=True
    )
    assert lse.shape == (2, 4, 1)
    for b, length in enumerate((3, 8)):
        assert torch.equal(k_cache[b, length], k[b, 0])
        assert torch.equal(k_cache[b, :length], before[b, :length])
        close(out[b], attnlib.attention(q[b, None], k_cache[b, None, : length + 1], v_cache[b, None, : length + 1])[0])


def test_flash_attn_with_kvcache_lengths_and_rows() -> None:
    q, k_cache, v_cache = torch.randn(2, 1, 4, 8), torch.randn(3, 9, 2, 8), torch.randn(3, 9, 2, 8)
    index = torch.tensor([2, 0], dtype=torch.int32)
    got = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=4, cache_batch_idx=index)
    close(got, attnlib.attention(q, k_cache[index.long(), :4], v_cache[index.long(), :4]))
    full = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, cache_batch_idx=index)
    close(full, attnlib.attention(q, k_cache[index.long()], v_cache[index.long()]))


def test_flash_attn_with_kvcache_appends_into_the_right_row() -> None:
    q, k, v = torch.randn(1, 1, 2, 8), torch.randn(1, 1, 2, 8), torch.randn(1, 1, 2, 8)
    k_cache, v_cache = torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 8)
    index = torch.tensor([1], dtype=torch.int32)
    flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=2, cache_batch_idx=index)
    assert torch.equal(k_cache[1, 2], k[0, 0])
    assert k_cache.count_nonzero() == k.count_nonzero()


@pytest.mark.parametrize("name", ["rotary_cos", "rotary_sin", "cache_leftpad"])
def test_flash_attn_refuses_by_name(name: str) -> None:
    q, cache = torch.randn(1, 1, 2, 8), torch.randn(1, 4, 2, 8)
    arguments: dict[str, Any] = {name: torch.zeros(1)}
    with pytest.raises(attnlib.UnsupportedError, match=name):
        flash_attn.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=2, **arguments)


def test_flash_attn_other_refusals() -> None:
    q, cache = torch.randn(1, 1, 2, 8), torch.randn(1, 4, 2, 8)
    table = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(attnlib.UnsupportedError, match="num_splits"):
        flash_attn.flash_attn_with_kvcache(q, cache, cache, num_splits=4)
    with pytest.raises(attnlib.ArgumentError, match="cache_batch_idx"):
        flash_attn.flash_attn_with_kvcache(q, cache, cache, block_table=table, cache_batch_idx=table[0])
    with pytest.raises(attnlib.ArgumentError, match="cache_seqlens"):
        flash_attn.flash_attn_with_kvcache(q, cache, cache, k=q, v=q)
    with pytest.raises(attnlib.UnsupportedError, match="return_attn_probs"):
        flash_attn.flash_attn_func(q, q, q, dropout_p=0.1, return_attn_probs=True)
    with pytest.raises(attnlib.ArgumentTypeError, match="window_size"):
        flash_attn.flash_attn_func(q, q, q, window_size=(1.5, 2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="qv"):
        flash_attn.flash_attn_func(q, q, q, qv=q)  # type: ignore[call-arg]


# --- transformers ---------------------------------------------------------------------------------------------------

transformers = pytest.importorskip("transformers")
adapter = pytest.importorskip("attnlib.adapters.transformers")


class Layer(torch.nn.Module):
    """What the adapter may look at of an attention layer."""

    def __init__(self, is_causal: bool = True) -> None:
        super().__init__()
        self.is_causal = is_causal


def heads(sq: int, sk: int, hq: int = 4, hkv: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(2, hq, sq, 8), torch.randn(2, hkv, sk, 8), torch.randn(2, hkv, sk, 8)


def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any = None, **keywords: Any) -> torch.Tensor:
    layer = Layer(keywords.pop("layer_is_causal", True))
    return adapter.attention_forward(layer, q, k, v, mask, **keywords)[0]


def direct(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **keywords: Any) -> torch.Tensor:
    return attnlib.attention(*(x.transpose(1, 2) for x in (q, k, v)), **keywords)


def test_transformers_causal_flag_and_decoding() -> None:
    q, k, v = heads(5, 5)
    close(call(q, k, v), direct(q, k, v, causal=True))
    close(call(q, k, v, is_causal=False), direct(q, k, v))
    close(call(q, k, v, layer_is_causal=False), direct(q, k, v))
    q, k, v = heads(1, 5)
    close(call(q, k, v), direct(q, k, v))  # one new token sees the whole cache
    q, k, v = heads(3, 8)  # an empty cache of fixed size: only the first three slots hold anything
    close(call(q, k, v), direct(q, k[:, :, :3], v[:, :, :3], causal=True))


def test_transformers_mask_is_the_whole_visibility() -> None:
    q, k, v = heads(5, 7)
    mask = torch.rand(2, 1, 5, 7) < 0.6
    close(call(q, k, v, mask, sliding_window=2), direct(q, k, v, mask=mask))
    bias = torch.randn(2, 1, 5, 7)
    close(call(q, k, v, bias), direct(q, k, v, bias=bias))
    with pytest.raises(attnlib.ArgumentError, match="attention_mask"):
        call(q, k, v, torch.ones(2, 7, dtype=torch.bool))


def test_transformers_every_argument_is_honoured() -> None:
    q, k, v = heads(5, 5)
    sinks, bias = torch.randn(4), torch.randn(1, 4, 5, 5)
    close(call(q, k, v, sliding_window=3), direct(q, k, v, causal=True, window=(2, 0)))
    close(call(q, k, v, sliding_window=3, is_causal=False), direct(q, k, v, window=(2, 2)))
    close(call(q, k, v, softcap=3.0, scaling=0.5), direct(q, k, v, causal=True, softcap=3.0, scale=0.5))
    close(call(q, k, v, s_aux=sinks), direct(q, k, v, causal=True, sinks=sinks))
    close(call(q, k, v, position_bias=bias), direct(q, k, v, causal=True, bias=bias))
    mask = torch.rand(2, 1, 5, 5) < 0.6
    close(call(q, k, v, mask, position_bias=bias), direct(q, k, v, mask=mask, bias=bias))
    added = torch.randn(2, 1, 5, 5)
    close(call(q, k, v, added, position_bias=bias), direct(q, k, v, bias=added + bias))
    torch.manual_seed(3)
    dropped = call(q, k, v, dropout=0.5)
    torch.manual_seed(3)
    close(dropped, direct(q, k, v, causal=True, dropout_p=0.5))


def test_transformers_packed_sequences() -> None:
    q, k, v = (x[:1] for x in heads(8, 8))
    cu = torch.tensor([0, 3, 8], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 5, "max_length_k": 5}
    parts = [direct(*(x[:, :, a:b] for x in (q, k, v)), causal=True) for a, b in ((0, 3), (3, 8))]
    right = torch.cat(parts, 1)
    close(call(q, k, v, **lengths), right)
    causal = torch.ones(8, 8, dtype=torch.bool).tril()[None, None]
    close(call(q, k, v, causal, **lengths), right)
    with pytest.raises(attnlib.ArgumentError, match="batch of one"):
        call(*heads(8, 8), **lengths)
    with pytest.raises(attnlib.ArgumentError, match="cu_seq_lens_q"):
        call(q, k, v, cu_seq_lens_q=cu)


def test_transformers_refuses_what_it_does_not_know() -> None:
    q, k, v = heads(5, 5)
    call(q, k, v, position_ids=torch.arange(5), use_cache=True, indices=None, chunked=False, output_attentions=False)
    with pytest.raises(attnlib.ArgumentTypeError, match="indices"):
        call(q, k, v, indices=torch.zeros(1))
    with pytest.raises(attnlib.ArgumentTypeError, match="attention_chunk"):
        call(q, k, v, attention_chunk=4)
    with pytest.raises(attnlib.UnsupportedError, match="output_attentions"):
        call(q, k, v, output_attentions=True)


def test_transformers_counter_counts_finished_calls() -> None:
    q, k, v = heads(5, 5)
    with adapter.count_calls() as outer:
        call(q, k, v)
        with adapter.count_calls() as inner:
            call(q, k, v)
            with pytest.raises(attnlib.UnsupportedError):
                call(q, k, v, output_attentions=True)
    call(q, k, v)
    assert (outer.calls, inner.calls) == (2, 1)


def make(model_class: Any, config: Any, implementation: str) -> Any:
    """A model of its own configuration, for the implementation is kept in that."""
    return model_class._from_config(copy.deepcopy(config), attn_implementation=implementation).eval()


def tiny(kind: str) -> Any:
    """(configuration, model class) of a random model of two layers."""
    common: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    if kind == "bert":
        return transformers.BertConfig(**common), transformers.BertModel
    if kind == "llama":
        return transformers.LlamaConfig(**common, num_key_value_heads=2), transformers.LlamaModel
    if kind == "mistral":
        config = transformers.MistralConfig(**common, num_key_value_heads=2, sliding_window=4)
        return config, transformers.MistralModel
    if kind == "gemma2":
        config = transformers.Gemma2Config(
            **common, num_key_value_heads=2, head_dim=8, sliding_window=4, attn_logit_softcapping=5.0
        )
        return config, transformers.Gemma2Model
    config = transformers.GptOssConfig(
        **common, num_key_value_heads=2, head_dim=8, sliding_window=4, num_local_experts=2, num_experts_per_tok=1
    )
    return config, transformers.GptOssModel


@pytest.mark.parametrize("kind", ["bert", "llama", "mistral", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("padded", [False, True])
def test_transformers_models_agree_with_their_own_attention(kind: str, padded: bool) -> None:
    name = adapter.register()
    config, model_class = tiny(kind)
    # softcap and sinks exist in the eager path only
    own = "eager" if kind in ("gemma2", "gpt_oss") else "sdpa"
    mine = make(model_class, config, name)
    theirs = make(model_class, config, own)
    if kind == "gpt_oss":
        for layer in mine.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
    theirs.load_state_dict(mine.state_dict())
    tokens = torch.randint(1, 64, (2, 9))
    mask = torch.ones_like(tokens)
    if padded:
        mask[1, 6:] = 0
    with torch.no_grad(), adapter.count_calls() as counter:
        got = mine(input_ids=tokens, attention_mask=mask).last_hidden_state
        assert counter.calls == 2
        right = theirs(input_ids=tokens, attention_mask=mask).last_hidden_state
        assert counter.calls == 2
    visible = mask.bool()
    torch.testing.assert_close(got[visible], right[visible], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("static", [False, True])
def test_transformers_generation_agrees(static: bool) -> None:
    name = adapter.register()
    config, _ = tiny("mistral")
    config.eos_token_id = None
    models = {
        implementation: make(transformers.MistralForCausalLM, config, implementation)
        for implementation in (name, "sdpa")
    }
    models["sdpa"].load_state_dict(models[name].state_dict())
    tokens = torch.randint(1, 64, (2, 6))
    mask = torch.ones_like(tokens)
    mask[0, :2] = 0
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "attention_mask": mask, "pad_token_id": 0}
    if static:
        options["cache_implementation"] = "static"
        options["disable_compile"] = True
    with adapter.count_calls() as counter:
        got = models[name].generate(tokens, **options)
    assert counter.calls == 2 * 6
    assert torch.equal(got, models["sdpa"].generate(tokens, **options))


def test_transformers_trains() -> None:
    name = adapter.register("attnlib_reference", backend="reference")
    config, model_class = tiny("llama")
    losses = []
    for implementation in (name, "sdpa"):
        torch.manual_seed(0)
        model = make(model_class, config, implementation).train()
        torch.manual_seed(1)
        model(input_ids=torch.randint(1, 64, (2, 9))).last_hidden_state.square().mean().backward()
        losses.append({key: value.grad for key, value in model.named_parameters()})
    for key, value in losses[1].items():
        torch.testing.assert_close(losses[0][key], value, atol=1e-5, rtol=1e-3)


def test_transformers_compiles_in_one_graph() -> None:
    name = adapter.register()
    config, model_class = tiny("llama")
    model = make(model_class, config, name)
    tokens = torch.randint(1, 64, (2, 9))
    with torch.no_grad():
        right = model(input_ids=tokens).last_hidden_state
        with adapter.count_calls() as counter:
            got = torch.compile(model, fullgraph=True, backend="aot_eager")(input_ids=tokens).last_hidden_state
    assert counter.calls == 2
    close(got, right)
