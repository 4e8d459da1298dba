"""Building blocks of the tiled backend: where tokens live, which keys a query sees, scores, dropout.

Everything works on one tile of queries and one tile of keys, of all sequences and heads at once. Tokens are
addressed by index, so that dense, packed and paged operands share one path; a token that does not exist is loaded
as zero. `has(name)` switches on one of the deliberate faults of `attnlib.conformance.faults`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..problem import AttentionProblem, Tensors

_LOW = 0xFFFFFFFF


def philox_words(
    c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor, c3: torch.Tensor, seed: torch.Tensor
) -> torch.Tensor:
    """The four words of Philox4x32-10 (Salmon et al., 2011), stacked; int64 operands that broadcast, below 2^32."""
    key0, key1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(10):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # int64 wraps; its 64 bits are the unsigned product's
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _LOW) ^ c1 ^ key0,
            product1 & _LOW,
            ((product0 >> 32) & _LOW) ^ c3 ^ key1,
            product0 & _LOW,
        )
        key0, key1 = (key0 + 0x9E3779B9) & _LOW, (key1 + 0xBB67AE85) & _LOW
    return torch.stack(torch.broadcast_tensors(c0, c1, c2, c3))


def select_matmul(weights: torch.Tensor, values: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """weights @ values where a hidden pair adds nothing, even if the value is NaN or infinite."""
    if bool(torch.isfinite(values).all()):
        return weights @ values
    return torch.where(visible[..., None], weights[..., None] * values[..., None, :, :], 0).sum(-2)


def _to_tf32(x: torch.Tensor) -> torch.Tensor:
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


class Scores(NamedTuple):
    """A tile of scores [batch, Hq, bq, bk], which of them are visible, and d(capped score)/d(score)."""

    score: torch.Tensor
    visible: torch.Tensor
    slope: torch.Tensor | None


class Run:
    """One run of the tiled backend: problem, operands, lengths and positions of every sequence."""

    def __init__(self, problem: AttentionProblem, tensors: Tensors, fault: str | None) -> None:
        self.problem, self.tensors, self.fault = problem, tensors, fault
        self.device, self.dtype = tensors.q.device, problem.accumulate_dtype
        rows, keys = problem.total_q, problem.total_k if problem.page_size is None else 2**31
        self.q_start, self.q_len = self._extents(tensors.cu_seqlens_q, tensors.q_lens, problem.seqlen_q, rows)
        self.k_start, self.kv_len = self._extents(tensors.cu_seqlens_k, tensors.kv_lens, problem.seqlen_k, keys)
        if self.has("zero_length_is_one"):
            self.kv_len = self.kv_len.clamp(min=min(1, problem.seqlen_k))
        if self.has("q_lens_ignored") and tensors.q_lens is not None:
            self.q_len = torch.full_like(self.q_len, problem.seqlen_q)
        if self.has("first_kv_len_for_all"):
            self.kv_len = self.kv_len[:1].expand_as(self.kv_len)
        if self.has("cu_seqlens_shifted") and self.k_start is not None:
            self.k_start = (self.k_start - 1).clamp(min=0)
        if tensors.k_new is not None:
            self._count_new(tensors.k_new.shape[1])
        self.overfull = (self.kv_len < 0) | (self.kv_len > problem.seqlen_k)
        self.overfull = self.overfull | (self.q_len < 0) | (self.q_len > problem.seqlen_q)
        self.kv_len = torch.where(self.overfull, 0, self.kv_len)
        self.q_len = torch.where(self.overfull, 0, self.q_len)
        self.offset = self.kv_len - self.q_len
        if self.has("alignment_from_padded_sizes"):
            self.offset = torch.full_like(self.offset, problem.seqlen_k - problem.seqlen_q)
        if self.has("top_left_for_bottom_right") or (problem.top_left and not self.has("bottom_right_for_top_left")):
            self.offset = torch.zeros_like(self.offset)
        self.max_q = int(self.q_len.max()) if problem.batch else 0
        self.max_k = int(self.kv_len.max()) if problem.batch else 0
        self.readable = self._allocated() if self.has("padding_loaded") or self.has("leak_past_kv_len") else self.kv_len
        if self.has("leak_past_kv_len") and problem.batch:
            self.max_k = int(self.readable.max())

    def has(self, fault: str) -> bool:
        return self.fault == fault

    def _extents(
        self, cu_seqlens: torch.Tensor | None, lens: torch.Tensor | None, full: int, total: int
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Start (packed operands only) and length of every sequence; cu_seqlens are clamped to the rows there are."""
        if cu_seqlens is not None:
            ends = cu_seqlens.long().clamp(0, total)
            return ends[:-1], ends.diff().clamp(min=0)
        whole = torch.full((self.problem.batch,), full, dtype=torch.long, device=self.device)
        return None, whole if lens is None else lens.long()

    def _allocated(self) -> torch.Tensor:
        """Tokens of each sequence that have storage behind them, valid or not."""
        problem, length = self.problem, self.kv_len
        if problem.page_size is not None:
            return -(-length // problem.page_size) * problem.page_size
        if self.k_start is not None:
            return torch.minimum(length + 8, problem.total_k - self.k_start).clamp(max=problem.seqlen_k)
        return torch.full_like(length, problem.seqlen_k)

    def _count_new(self, most: int) -> None:
        new = self.tensors.new_lens
        count = torch.full_like(self.kv_len, most)
        if new is not None and not self.has("new_lens_ignored"):
            count = new.long()
        self.new_start = self.kv_len
        if self.has("append_off_by_one"):
            self.new_start = (self.kv_len - 1).clamp(min=0)
        if self.has("append_at_first_length"):
            self.new_start = self.kv_len[:1].expand_as(self.kv_len)
        total = self.kv_len + count
        fits = (self.kv_len >= 0) & (count >= 0) & (total <= self.problem.seqlen_k)
        self.new_count = torch.where(fits, count, 0)
        if not self.has("append_not_counted"):
            self.kv_len = torch.where(fits, total, -1)

    def append(self) -> None:
        """Write k_new and v_new behind the tokens of each sequence; one that does not fit is left alone."""
        k_new, v_new = self.tensors.k_new, self.tensors.v_new
        assert k_new is not None and v_new is not None
        token = torch.arange(k_new.shape[1], device=self.device)
        sequence, token = (token < self.new_count[:, None]).nonzero(as_tuple=True)
        where = self.address("k", sequence, self.new_start[sequence] + token)
        self.tensors.k[where] = k_new[sequence, token]
        if not self.has("append_forgets_v"):
            self.tensors.v[where] = v_new[sequence, token]

    def address(self, side: str, sequence: torch.Tensor, token: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Index of tokens in q-like (side "q") or k-like (side "k") operands."""
        table, page_size = self.tensors.page_table, self.problem.page_size
        if side == "k" and table is not None and page_size is not None:
            page = token // page_size
            if self.has("page_edge_off_by_one"):
                page = (token - 1).clamp(min=0) // page_size
            if self.has("page_order_reversed"):
                page = (self.kv_len[sequence] - 1) // page_size - page
            if self.has("page_table_ignored"):
                return (sequence * table.shape[1] + page) % self.tensors.k.shape[0], token % page_size
            return table.long()[sequence, page], token % page_size
        start = self.q_start if side == "q" else self.k_start
        return (sequence, token) if start is None else (start[sequence] + token,)

    def load(self, side: str, source: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        """Rows `token` of every sequence, [batch, heads, n, dim] in the accumulation dtype; missing ones are zero."""
        if self.has("strides_ignored") and side == "k":
            source = source.as_strided(source.shape, torch.empty(source.shape, device="meta").stride())
        length = self.readable if side == "k" else self.q_len
        if self.has("padding_queries_loaded") and side == "q" and not self.problem.packed:
            length = torch.full_like(length, self.problem.seqlen_q)
        sequence, column = (token < length[:, None]).nonzero(as_tuple=True)
        tile = source.new_zeros((self.problem.batch, len(token), *source.shape[-2:]))
        tile[sequence, column] = source[self.address(side, sequence, token[column])]
        if self.has("head_dim_tail_dropped"):
            tile[..., tile.shape[-1] // 8 * 8 :] = 0
        return tile.to(self.dtype).transpose(1, 2)

    def load_rows(self, source: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        """Per-row figures (lse, m, l, dlse) of a tile of queries, [batch, Hq, n]; missing ones are zero."""
        rows = source.movedim(0, -1) if self.problem.packed else source.transpose(1, 2)
        return self.load("q", rows.unsqueeze(-1), token).squeeze(-1)

    def store(self, side: str, target: torch.Tensor, token: torch.Tensor, tile: torch.Tensor) -> None:
        """Write the rows that exist of a tile [batch, heads, n, dim]."""
        length = self.kv_len if side == "k" else self.q_len
        sequence, column = (token < length[:, None]).nonzero(as_tuple=True)
        target[self.address(side, sequence, token[column])] = tile.transpose(1, 2)[sequence, column].to(target.dtype)

    def store_rows(self, target: torch.Tensor, token: torch.Tensor, tile: torch.Tensor) -> None:
        rows = target.movedim(0, -1) if self.problem.packed else target.transpose(1, 2)
        self.store("q", rows.unsqueeze(-1), token, tile.unsqueeze(-1))

    def expand_heads(self, tile: torch.Tensor) -> torch.Tensor:
        """Key/value heads repeated for the query heads that read them: head h reads h // group."""
        head = torch.arange(self.problem.num_heads_q, device=self.device)
        return tile[:, head % tile.shape[1] if self.has("head_modulo") else head // self.problem.group]

    def reduce_heads(self, tile: torch.Tensor) -> torch.Tensor:
        """The transpose of expand_heads: sums over the query heads of each group."""
        tile = tile.unflatten(1, (self.problem.num_heads_kv, self.problem.group))
        return tile[:, :, 0] if self.has("group_not_summed") else tile.sum(2)

    def position(self, row: torch.Tensor) -> torch.Tensor:
        """The place of queries on the key axis, [batch, n]."""
        return row + self.offset[:, None]

    def key_range(self, row: torch.Tensor) -> tuple[int, int]:
        """First key, and one past the last, that any of these queries may see in any sequence."""
        left, right = self._window()
        if self.max_k == 0 or len(row) == 0:
            return 0, 0
        first = 0 if left is None else max(0, int(self.position(row[:1]).min()) - left)
        last = self.max_k if right is None else min(self.max_k, int(self.position(row[-1:]).max()) + right + 1)
        if self.has("window_not_skipped"):
            first = 0
        return first, last

    def _window(self) -> tuple[int | None, int | None]:
        left, right = self.problem.window
        if self.has("window_ignored"):
            return None, None
        if self.has("causal_dropped_by_mask") and (self.problem.mask or self.problem.bias is not None):
            right = None
        if self.has("window_left_off_by_one") and left is not None:
            left += 1
        if self.has("window_right_off_by_one") and right is not None:
            right += 1
        return left, right

    def visible(self, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Which keys of a tile each query sees by length, window, mask and block mask: [batch, Hq, bq, bk]."""
        tensors, (left, right) = self.tensors, self._window()
        apart = key - self.position(row)[..., None]  # [batch, bq, bk]
        seen = (key < self.readable[:, None] if self.has("leak_past_kv_len") else key < self.kv_len[:, None])[:, None]
        seen = seen & (row < self.q_len[:, None])[..., None]
        if left is not None:
            if self.has("left_bound_not_aligned"):
                seen = seen & (key - row[:, None] >= -left)[None]
            seen = seen & (apart >= -left)
        if right is not None:
            seen = seen & (apart <= right)
        seen = seen[:, None].expand(-1, self.problem.num_heads_q, -1, -1)
        causal_drops_mask = self.has("mask_dropped_by_causal") and self.problem.window.right == 0
        if tensors.mask is not None and not self.has("mask_ignored") and not causal_drops_mask:
            mask = tensors.mask[:, :1] if self.has("mask_of_first_head") else tensors.mask
            if self.has("mask_transposed"):
                mask = mask[:, :, (key % mask.shape[2])[None, :], (row % mask.shape[3])[:, None]]
            else:
                mask = mask[:, :, row[:, None], key]
            seen = seen & mask
        if (
            tensors.block_mask is not None
            and self.problem.block_mask is not None
            and not self.has("block_mask_ignored")
        ):
            block_q, block_k = self.problem.block_mask
            if self.has("block_sizes_swapped"):
                block_q, block_k = block_k, block_q
            blocks = tensors.block_mask
            row, key = (row // block_q) % blocks.shape[2], (key // block_k) % blocks.shape[3]
            seen = seen & blocks[:, :, row[:, None], key]
        if tensors.bias is not None and not self.has("bias_ignored") and not self.has("minus_inf_is_finite"):
            seen = seen & (tensors.bias[:, :, row[:, None], key] != -torch.inf)
        return seen

    def scores(self, q: torch.Tensor, k: torch.Tensor, row: torch.Tensor, key: torch.Tensor) -> Scores:
        """softcap(scale * q.k) + bias + alibi, before anything is masked."""
        problem, tensors = self.problem, self.tensors
        bfloat16 = problem.dtype == torch.bfloat16
        off = self.has("scale_off") or (bfloat16 and self.has("scale_off_in_bfloat16"))
        scale = problem.scale * (1.001 if off else 1.0)
        if self.has("tf32_products") and problem.dtype == torch.float32:
            q, k = _to_tf32(q), _to_tf32(k)
        score = (q @ k.mT) * (abs(scale) if self.has("scale_sign_lost") else scale)
        slope = None
        bias = None if tensors.bias is None else tensors.bias[:, :, row[:, None], key].to(self.dtype)
        if self.has("bias_before_softcap") and bias is not None:
            score, bias = score + bias, torch.zeros_like(bias)
        if problem.softcap is not None and not self.has("softcap_ignored"):
            bent = score / problem.softcap
            bent = self._tanh_by_exp(bent) if self.has("softcap_overflows") else torch.tanh(bent)
            if self.has("softcap_approximate"):
                bent = (bent * 2048).round() / 2048
            score, slope = problem.softcap * bent, 1 - bent * bent
        if tensors.bias is not None and bias is not None and not self.has("bias_ignored"):
            if self.has("bias_scaled"):
                bias = bias * scale
            if self.has("minus_inf_is_finite"):
                bias = bias.clamp(min=-1e30)
            score = score + bias
            if self.has("bias_added_in_storage_dtype"):
                score = score.to(tensors.bias.dtype).to(self.dtype)
        if tensors.alibi_slopes is not None and not self.has("alibi_ignored"):
            score = score + self._alibi(row, key)
        return Scores(score, self.visible(row, key), slope)

    @staticmethod
    def _tanh_by_exp(x: torch.Tensor) -> torch.Tensor:
        return (torch.exp(x) - torch.exp(-x)) / (torch.exp(x) + torch.exp(-x))

    def _alibi(self, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        slopes = self.tensors.alibi_slopes
        assert slopes is not None
        if self.has("alibi_of_first_sequence"):
            slopes = slopes[:1]
        position = row.expand(self.problem.batch, -1) if self.has("alibi_not_aligned") else self.position(row)
        distance = (position[..., None] - key).to(self.dtype)[:, None]
        if not self.has("alibi_not_absolute"):
            distance = distance.abs()
        return (1 if self.has("alibi_sign") else -1) * slopes[:, :, None, None].to(self.dtype) * distance

    def keep(self, row: torch.Tensor, key: torch.Tensor, backward: bool = False) -> torch.Tensor | None:
        """What each probability of a tile is multiplied by: 0 or 1 / (1 - p), or None without dropout."""
        problem, seed = self.problem, self.tensors.dropout_seed
        threshold = problem.dropout_threshold
        if self.has("dropped_at_p_zero") and threshold == 0:
            threshold, seed = 1, torch.zeros(1, dtype=torch.int64, device=self.device)
        if threshold == 0 or seed is None:
            return None
        if self.has("dropout_threshold_8_bit"):
            threshold = threshold // 256 * 256
        if self.has("dropout_threshold_off_by_one"):
            threshold += 1
        if self.has("dropout_seed_low_half"):
            seed = seed & _LOW
        if self.has("dropout_backward_reseeded") and backward:
            seed = seed + 1
        if self.has("dropout_query_aligned"):
            row = row + (self.max_k - self.max_q)
        c0 = (0 if self.has("dropout_column_alias") else key >> 5) * 8 + (key & 7)
        c1 = (0 if self.has("dropout_row_alias") else row >> 4) * 8 + (row & 7)
        (columns, column), (rows, line) = (torch.unique(c, return_inverse=True) for c in (c0, c1))
        head = torch.arange(problem.num_heads_q, device=self.device) * (not self.has("dropout_ignores_head"))
        sequence = torch.arange(problem.batch, device=self.device) * (not self.has("dropout_ignores_sequence"))
        words = philox_words(columns, rows[:, None], head[:, None, None], sequence[:, None, None, None], seed)
        word = words[:, :, :, line][..., column].gather(0, self._which(words, (key >> 3) & 3, line, column))[0]
        half = (row & 8).bool() != self.has("dropout_halves_swapped")
        number = torch.where(half[:, None], word >> 16, word & 0xFFFF)
        if self.has("dropout_transposed"):
            number = number.mT if number.shape[-2] == number.shape[-1] else number.flip(-1)
        factor = 1.0 if self.has("dropout_not_rescaled") or threshold >= 65536 else 1 / (1 - threshold / 65536)
        return (number >= threshold).to(self.dtype) * factor

    @staticmethod
    def _which(words: torch.Tensor, word: torch.Tensor, line: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        return word.expand(1, *words.shape[1:3], len(line), len(column))
