"""What the kernels' programs are told, in groups: operands, lengths, scalars, and the place of a tile of scores.

`C` is a frozen configuration (config.Features and its children), the only compile-time argument. Offsets inside a tile
are as wide as the strides given; what leads to a tile is added to its pointer in 64 bits.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class Rows(NamedTuple):
    """An operand [batch, rows, heads, dim]: address and strides."""

    ptr: tl.tensor
    b: tl.tensor
    i: tl.tensor
    h: tl.tensor


class Map(NamedTuple):
    """An operand [batch, heads, rows, columns]: address and strides."""

    ptr: tl.tensor
    b: tl.tensor
    h: tl.tensor
    i: tl.tensor
    j: tl.tensor


class Lengths(NamedTuple):
    """Sizes of the call. given: bit 0 q_lens, bit 1 kv_lens, bit 2 new_lens. seqlen_k is a cache's capacity."""

    q_lens: tl.tensor
    kv_lens: tl.tensor
    new_lens: tl.tensor
    cu_q: tl.tensor
    cu_k: tl.tensor
    given: tl.tensor
    batch: tl.tensor
    seqlen_q: tl.tensor
    seqlen_k: tl.tensor
    total_q: tl.tensor
    total_k: tl.tensor
    new_tokens: tl.tensor


class Sequence(NamedTuple):
    """Where one sequence lies. rows, keys: tokens that it owns, padding included; shift: position of query 0.

    lo: first key that any query may see. valid is False where a length on the device does not fit: NaN results.
    """

    index: tl.tensor
    q_len: tl.tensor
    kv_len: tl.tensor
    q_row: tl.tensor
    k_row: tl.tensor
    rows: tl.tensor
    keys: tl.tensor
    shift: tl.tensor
    lo: tl.tensor
    valid: tl.tensor


class Extras(NamedTuple):
    """What is looked up for each score. rows, columns: sizes of bias and mask."""

    bias: Map
    mask: Map
    blocks: Map
    alibi: Map
    block_q: tl.tensor
    block_k: tl.tensor
    rows: tl.tensor
    columns: tl.tensor


class Scalars(NamedTuple):
    """factor: x -> s, or x -> argument of tanh; cap: softcap in the unit of s; left, right: the window."""

    factor: tl.tensor
    cap: tl.tensor
    left: tl.tensor
    right: tl.tensor
    threshold: tl.tensor
    keep_scale: tl.tensor


class Call(NamedTuple):
    """What the tiles of a call have in common."""

    k: Rows
    v: Rows
    k_map: tl.tensor
    v_map: tl.tensor
    table: tl.tensor
    table_row: tl.tensor
    page_size: tl.tensor
    lengths: Lengths
    extras: Extras
    scalars: Scalars
    seed: tl.tensor


class Place(NamedTuple):
    """A tile of scores: queries i and keys j, shaped to broadcast against each other, from i0 and j0 on.

    head is head0, or a vector shaped like i where the heads of a group share a tile.
    """

    b: tl.tensor
    head: tl.tensor
    head0: tl.tensor
    i: tl.tensor
    j: tl.tensor
    i0: tl.tensor
    j0: tl.tensor


@triton.jit
def call_of(
    K, V, K_MAP, V_MAP, BIAS, MASK, BLOCKS, ALIBI, Q_LENS, KV_LENS, NEW_LENS, CU_Q, CU_K, TABLE, SEED, k_b, k_i, k_h,
    v_b, v_i, v_h, bias_b, bias_h, bias_i, bias_j, mask_b, mask_h, mask_i, mask_j, blocks_b, blocks_h, blocks_i,
    blocks_j, alibi_b, alibi_h, table_row, given, batch, seqlen_q, seqlen_k, total_q, total_k, new_tokens, columns,
    left, right, page_size, block_q, block_k, threshold, factor, cap, keep_scale, C: tl.constexpr,
):  # fmt: skip
    """The arguments that the kernels for tiles of scores share, put in order."""
    lengths = Lengths(
        Q_LENS, KV_LENS, NEW_LENS, CU_Q, CU_K, given, batch, seqlen_q, seqlen_k, total_q, total_k, new_tokens
    )
    extras = Extras(
        Map(BIAS, bias_b, bias_h, bias_i, bias_j), Map(MASK, mask_b, mask_h, mask_i, mask_j),
        Map(BLOCKS, blocks_b, blocks_h, blocks_i, blocks_j), Map(ALIBI, alibi_b, alibi_h, 0, 0),
        block_q, block_k, seqlen_q, columns,
    )  # fmt: skip
    scalars = Scalars(factor, cap, left, right, threshold, keep_scale)
    seed = 0
    if C.dropout:
        seed = tl.load(SEED)
    k = Rows(K, k_b, k_i, k_h)
    v = Rows(V, v_b, v_i, v_h)
    return Call(k, v, K_MAP, V_MAP, TABLE, table_row, page_size, lengths, extras, scalars, seed)
