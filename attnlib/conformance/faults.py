"""The deliberate faults of the tiled backend: what each one changes, and which checks should see it first.

A suite that lets one of them pass is not a test. `attnlib.conformance.mutants` runs them all. Most were seen in
public attention kernels; the last group is small numeric ones that a loose tolerance would accept.
"""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """What a mutant does wrong. `killers` are parts of check names that are likely to see it, best first."""

    description: str
    killers: tuple[str, ...] = ()


FAULTS: dict[str, Fault] = {
    # which keys are seen
    "window_ignored": Fault("window and causal are not applied", ("visible/causal", "visible/window")),
    "window_left_off_by_one": Fault("a left bound of L lets L + 2 keys through", ("visible/window",)),
    "window_right_off_by_one": Fault("each row sees one key of its future", ("visible/causal",)),
    "window_not_skipped": Fault("tiles before the window are read and multiplied by 0", ("AB-017",)),
    "top_left_for_bottom_right": Fault("every problem is aligned top-left", ("visible/causal",)),
    "bottom_right_for_top_left": Fault("top-left alignment is ignored", ("visible/top_left",)),
    "alignment_from_padded_sizes": Fault("position from padded sizes instead of lengths", ("lengths-causal",)),
    "partial_tile_dropped": Fault("the last, partial tile of keys is left out", ("visible/plain",)),
    "leak_past_kv_len": Fault("keys past kv_len are scored", ("visible/lengths",)),
    "padding_loaded": Fault("values past kv_len are read and multiplied by 0", ("AB-016", "poison")),
    "left_bound_not_aligned": Fault("a left bound is counted from i, also bottom-right", ("visible/window",)),
    "zero_length_is_one": Fault("a sequence without keys is given one", ("AB-025", "visible/lengths")),
    "first_kv_len_for_all": Fault("kv_lens[0] is used for every sequence", ("AB-023", "visible/lengths")),
    "q_lens_ignored": Fault("padding queries are computed like queries", ("visible/lengths",)),
    "mask_ignored": Fault("mask is not applied", ("visible/mask",)),
    "mask_transposed": Fault("mask is read as [k, q]", ("visible/mask",)),
    "mask_of_first_head": Fault("head 0's mask serves every head", ("visible/mask",)),
    "mask_dropped_by_causal": Fault("with causal, mask is ignored", ("AB-055",)),
    "causal_dropped_by_mask": Fault("with a mask or a bias, causal is ignored", ("AB-055",)),
    "block_mask_ignored": Fault("block mask is not applied", ("visible/block_mask",)),
    "block_sizes_swapped": Fault("block_q and block_k are exchanged", ("visible/block_mask",)),
    "keys_counted_in_int16": Fault("keys from 32768 on are lost", ("AB-034",)),
    # heads, layouts, memory
    "head_modulo": Fault("query head h reads key/value head h % Hkv", ("forward/gqa", "AB-047")),
    "decode_heads_swapped": Fault("one query: heads are regrouped and not put back", ("AB-047",)),
    "strides_ignored": Fault("keys and values are read as if contiguous", ("AB-040", "AB-044")),
    "dout_strides_ignored": Fault("dout is read with out's strides", ("AB-041",)),
    "cu_seqlens_shifted": Fault("each packed sequence starts one row early", ("varlen",)),
    "page_table_ignored": Fault("pages are read in the order they lie in memory", ("AB-016", "paged")),
    "page_order_reversed": Fault("the pages of a sequence are read backwards", ("AB-016", "paged")),
    "page_edge_off_by_one": Fault("the first token of a page is looked up in the page before", ("AB-016", "paged")),
    "append_off_by_one": Fault("new tokens are written one slot early", ("AB-023",)),
    "append_at_first_length": Fault("kv_lens[0] is where every sequence's tokens go", ("AB-023",)),
    "append_not_counted": Fault("new tokens are written but not attended to", ("AB-023",)),
    "append_forgets_v": Fault("only keys are appended", ("AB-023",)),
    "new_lens_ignored": Fault("every new token is taken as valid", ("append",)),
    "padding_queries_loaded": Fault("q and dO of padding rows are read", ("poison/lengths", "lengths")),
    "head_dim_tail_dropped": Fault("dimensions past a multiple of 8 are left out", ("AB-007", "head_dim-60")),
    "padding_rows_unwritten": Fault("rows that are no query keep what was in memory", ("AB-025", "AB-028")),
    "gradients_unwritten": Fault("gradient rows of padding keep what was in memory", ("AB-028",)),
    # softmax
    "out_not_rescaled": Fault("the accumulator is not rescaled when the maximum grows", ("ramp_up", "jump")),
    "sum_not_rescaled": Fault("the row sum is not rescaled when the maximum grows", ("ramp_up", "jump")),
    "maximum_of_first_tile": Fault("later tiles do not raise the maximum: overflow", ("forward/jump", "ramp_up")),
    "nan_on_empty_rows": Fault("a row without keys is 0 / 0", ("AB-004", "AB-088")),
    "average_on_empty_rows": Fault("a row without keys is the mean of v", ("AB-004",)),
    "minus_inf_is_finite": Fault("a bias of -inf is a large negative number", ("AB-004", "bias_inf")),
    "lse_in_base_2": Fault("lse is log2", ("AB-089",)),
    "empty_lse_finite": Fault("lse of an empty row is -1e30", ("AB-088", "AB-004")),
    "padding_lse_holds_sink": Fault("lse of a padding row is the sink", ("sinks-lengths", "sinks")),
    "nan_laundered": Fault("NaN becomes a number", ("nan/visible",)),
    "hidden_nan_leaks": Fault("a hidden NaN reaches rows through 0 * NaN", ("AB-008", "nan/hidden")),
    "hidden_nan_leaks_backward": Fault("a hidden NaN reaches gradients through 0 * NaN", ("nan/hidden",)),
    "forward_not_repeatable": Fault("out differs from run to run in its last bits", ("repeatable",)),
    # score modifications
    "scale_sign_lost": Fault("a negative scale is made positive", ("negative_scale",)),
    "softcap_ignored": Fault("softcap is not applied", ("AB-031", "forward/softcap")),
    "softcap_after_mask": Fault("masked scores are capped to -softcap", ("forward/everything", "softcap")),
    "softcap_overflows": Fault("tanh by exponentials: NaN for large scores", ("AB-031",)),
    "softcap_approximate": Fault("tanh good to 2^-11 only", ("forward/softcap",)),
    "softcap_gradient_missing": Fault("backward treats softcap as the identity", ("backward/softcap",)),
    "bias_ignored": Fault("bias is not applied", ("forward/bias",)),
    "bias_before_softcap": Fault("bias is capped with the score", ("everything", "softcap")),
    "bias_scaled": Fault("bias is multiplied by scale", ("forward/bias",)),
    "bias_added_in_storage_dtype": Fault("score + bias is rounded to the bias's dtype", ("AB-032", "forward/bias")),
    "bias_ignored_in_backward": Fault("backward recomputes scores without the bias", ("backward/bias",)),
    "dbias_not_reduced": Fault(
        "dbias holds one of the sequences or heads it is shared by", ("backward/bias_gradient",)
    ),
    "dbias_in_storage_dtype": Fault("dbias is accumulated in the bias's dtype", ("backward/bias-shared",)),
    "alibi_ignored": Fault("slopes are not applied", ("AB-059",)),
    "alibi_sign": Fault("distance raises scores", ("AB-059",)),
    "alibi_not_aligned": Fault("distance is counted from i, not from the query's position", ("AB-059",)),
    "alibi_not_absolute": Fault("keys of the future get a negative distance", ("forward/alibi",)),
    "alibi_of_first_sequence": Fault("slopes [B, Hq]: the first row serves every sequence", ("alibi",)),
    "sinks_ignored": Fault("sinks are not applied", ("AB-062",)),
    "sinks_scaled": Fault("sinks are multiplied by scale", ("AB-062",)),
    "sink_gradient_sign": Fault("dsinks has the wrong sign", ("AB-062", "backward/sinks")),
    "sink_not_in_lse": Fault("lse leaves the sink out", ("AB-062",)),
    "sinks_of_first_head": Fault("head 0's sink serves every head", ("sinks",)),
    "sink_joined_late": Fault("the sink joins the sum after the maximum was taken: overflow", ("AB-062",)),
    # gradients
    "delta_missing": Fault("backward leaves delta out", ("AB-001", "backward/plain")),
    "dlse_ignored": Fault("the gradient that comes through lse is dropped", ("AB-061",)),
    "dlse_sign": Fault("the gradient that comes through lse has the wrong sign", ("AB-061",)),
    "stats_ignored": Fault("backward uses exp(s - lse) beside a large bias", ("AB-007", "bias_min")),
    "stats_unwritten": Fault("forward does not keep row maximum and row sum", ("backward/bias", "AB-007")),
    "stats_without_sinks": Fault("the row sum kept for backward leaves the sink out", ("backward/everything",)),
    "last_queries_missing_in_dk": Fault(
        "the last, partial tile of queries is left out in backward", ("backward/plain",)
    ),
    "group_not_summed": Fault("dk and dv hold one query head of each group", ("backward/gqa",)),
    "scale_missing_in_dq": Fault("dq is not multiplied by scale", ("backward/plain",)),
    "empty_rows_nan_in_dq": Fault("dq of a row without keys is NaN", ("AB-001", "AB-004")),
    "tail_multiplied_by_zero": Fault("hidden scores overflow and are multiplied by 0", ("AB-011",)),
    "nondeterministic": Fault("deterministic=True is accepted and ignored", ("deterministic",)),
    # dropout
    "dropout_ignores_sequence": Fault("every sequence has the same mask", ("dropout/mask",)),
    "dropout_ignores_head": Fault("every head has the same mask", ("dropout/mask",)),
    "dropout_row_alias": Fault("i >> 4 is left out: rows repeat every 16", ("dropout/mask",)),
    "dropout_column_alias": Fault("j >> 5 is left out: columns repeat every 32", ("dropout/mask",)),
    "dropout_halves_swapped": Fault("rows i and i + 8 are exchanged", ("dropout/mask",)),
    "dropout_threshold_off_by_one": Fault("number > threshold instead of >=", ("dropout/threshold", "dropout/mask")),
    "dropout_threshold_8_bit": Fault("threshold is rounded to 8 bits", ("dropout/mask",)),
    "dropout_seed_low_half": Fault("the high 32 bits of the seed are left out", ("dropout/mask",)),
    "dropout_query_aligned": Fault("i is shifted by the alignment", ("dropout/mask",)),
    "dropout_not_rescaled": Fault("kept probabilities are not divided by 1 - p", ("forward/dropout",)),
    "dropout_before_sum": Fault("the row sum counts kept keys only", ("forward/dropout",)),
    "dropout_backward_reseeded": Fault("backward draws another mask", ("dropout/backward_mask",)),
    "dropout_missing_in_dp": Fault("backward does not drop dP", ("backward/dropout",)),
    "dropout_missing_in_dv": Fault("backward does not drop P in dv", ("dropout/backward_mask", "backward/dropout")),
    "dropout_transposed": Fault("the mask is read as [k, q] within a tile", ("dropout/mask",)),
    "dropped_at_p_zero": Fault(
        "without dropout, one pair in 65,536 is dropped all the same", ("forward/size-300x520",)
    ),
    # small numeric ones
    "scale_off_in_bfloat16": Fault("scale is 1.001 times too large, in bfloat16 only", ("peaked", "ramp", "q5")),
    "dv_off_in_bfloat16": Fault("dv is 0.4 % too large, in bfloat16 only", ("backward/",)),
    "lse_in_storage_dtype": Fault("lse is rounded to the storage dtype", ("forward/plain/bfloat16",)),
    "probabilities_in_bfloat16": Fault("float32: probabilities are rounded to bfloat16", ("forward/plain",)),
    "dscores_in_bfloat16": Fault("float32: dS is rounded to bfloat16", ("backward/plain",)),
    "scale_off": Fault("scale is 1.001 times too large", ("forward/plain",)),
    "last_key_dropped": Fault("one key of the last, partial tile is lost", ("visible/plain",)),
    "dv_off": Fault("dv is 0.4 % too large", ("backward/plain",)),
    "lse_off": Fault("lse is off by 3e-4 of its size", ("forward/plain",)),
    "tf32_products": Fault("float32 scores have 10 bits of mantissa", ("forward/plain",)),
    "accumulated_in_storage_dtype": Fault(
        "the output is accumulated in the storage dtype", ("forward/long", "forward")
    ),
}
