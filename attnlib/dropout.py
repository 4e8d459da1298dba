"""The dropout contract in torch integer arithmetic: one 16-bit number for each (sequence, head, query, key).

Philox4x32-10 with key = (seed low 32 bits, seed high 32 bits) and counter (c0, c1, c2, c3):

    c0 = (j >> 5) * 8 + (j & 7)    c1 = (i >> 4) * 8 + (i & 7)    c2 = head    c3 = sequence

One call covers rows {i, i+8} and columns {j, j+8, j+16, j+24}: word (j >> 3) & 3, its low half for the row with
bit 3 clear, its high half for the other. i and j are indices inside the sequence. csrc/common/philox.h is the same
in C++. Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .arguments import check_dense, check_memory
from .errors import ArgumentError, ArgumentTypeError
from .options import check_probability, drop_threshold

_LOW = 0xFFFFFFFF
_CHUNK = 1 << 20  # numbers made at a time; bounds the scratch memory

Seed = int | torch.Tensor
Span = tuple[int, int]


def philox(c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor, c3: torch.Tensor, seed: Seed) -> list[torch.Tensor]:
    """Four words of Philox4x32-10 for broadcastable int64 counters in [0, 2^32); each word is int64 in [0, 2^32)."""
    key0, key1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(10):
        # the int64 products wrap modulo 2^64, which leaves both halves right after masking
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0 = ((product1 >> 32) & _LOW) ^ c1 ^ key0
        c2 = ((product0 >> 32) & _LOW) ^ c3 ^ key1
        c1, c3 = product1 & _LOW, product0 & _LOW
        key0, key1 = (key0 + 0x9E3779B9) & _LOW, (key1 + 0xBB67AE85) & _LOW
    return [word.contiguous() for word in torch.broadcast_tensors(c0, c1, c2, c3)]


def _block(seed: Seed, b: torch.Tensor, heads: Span, rows: Span, columns: Span) -> torch.Tensor:
    """Numbers of a rectangle of some sequences b (int64) and heads, int64 [sequences, heads, rows, columns]."""
    device = b.device
    first_row, first_column = rows[0] // 16, columns[0] // 32
    row_groups, column_groups = -(-rows[1] // 16) - first_row, -(-columns[1] // 32) - first_column
    c1 = torch.arange(first_row * 8, (first_row + row_groups) * 8, device=device)[:, None]
    c0 = torch.arange(first_column * 8, (first_column + column_groups) * 8, device=device)
    c2, c3 = torch.arange(*heads, device=device)[:, None, None], b[:, None, None, None]
    words = [w.unflatten(3, (column_groups, 8)).unflatten(2, (row_groups, 8)) for w in philox(c0, c1, c2, c3, seed)]
    word = torch.stack(words, dim=5)  # [b, h, row group, i & 7, column group, (j >> 3) & 3, j & 7]
    number = torch.stack((word & 0xFFFF, word >> 16), dim=3).flatten(5, 7).flatten(2, 4)
    top, left = rows[0] - first_row * 16, columns[0] - first_column * 32
    return number[:, :, top : top + rows[1] - rows[0], left : left + columns[1] - columns[0]]


def _fill(out: torch.Tensor, seed: Seed, sequences: Sequence[int], rows: Span, columns: Span, keep: int | None) -> None:
    """Write numbers (keep None) or number >= keep into out [B, H, rows, columns], a bounded piece at a time."""
    if out.numel() == 0:
        return
    if isinstance(seed, torch.Tensor):
        seed = seed.detach().reshape(()).to(out.device)
    num_heads, width = out.shape[1], columns[1] - columns[0]
    row_step = max(16, _CHUNK // width // 16 * 16)
    head_step = max(1, _CHUNK // (width * out.shape[2]))
    sequence_step = max(1, head_step // num_heads)
    for b in range(0, len(sequences), sequence_step):
        index = torch.tensor(list(sequences[b : b + sequence_step]), device=out.device)
        for h in range(0, num_heads, head_step):
            heads = (h, min(h + head_step, num_heads))
            for start in range(rows[0], rows[1], row_step):
                stop = min(start + row_step, rows[1])
                number = _block(seed, index, heads, (start, stop), columns)
                part = out[b : b + sequence_step, h : heads[1], start - rows[0] : stop - rows[0]]
                part.copy_(number if keep is None else number >= keep)


def numbers_rectangle(
    seed: Seed,
    sequences: Sequence[int],
    num_heads: int,
    rows: Span,
    columns: Span,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """The 16-bit numbers of one rectangle of several sequences, int32 [len(sequences), num_heads, rows, columns].

    rows and columns: half-open (first, last + 1), any alignment.
    """
    shape = (len(sequences), num_heads, rows[1] - rows[0], columns[1] - columns[0])
    out = torch.empty(shape, dtype=torch.int32, device=device)
    _fill(out, seed, sequences, rows, columns, None)
    return out


def numbers(
    seed: Seed,
    batch_index: int | Sequence[int],
    num_heads: int,
    seqlen_q: int,
    seqlen_k: int,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """The 16-bit numbers of whole sequences, int32 [B, num_heads, seqlen_q, seqlen_k], B = how many indices came.

    seed: int in [-2^63, 2^63) or int64 tensor of one element (read without a synchronisation). batch_index: the
    sequence's index in the call, or several.
    """
    sequences = [batch_index] if isinstance(batch_index, int) else [int(b) for b in batch_index]
    return numbers_rectangle(seed, sequences, num_heads, (0, seqlen_q), (0, seqlen_k), device)


def keep_rectangle(
    seed: Seed,
    keep: int,
    sequence: int | Sequence[int],
    num_heads: int,
    rows: Span,
    columns: Span,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Which elements of a rectangle are kept, for tiled code: bool [num_heads, rows, columns] of one sequence.

    keep: the threshold in 0..65536. rows and columns: half-open (first, last + 1), any alignment. Several sequences
    give [B, num_heads, rows, columns].
    """
    sequences = [sequence] if isinstance(sequence, int) else [int(b) for b in sequence]
    shape = (len(sequences), num_heads, rows[1] - rows[0], columns[1] - columns[0])
    out = torch.empty(shape, dtype=torch.bool, device=device)
    _fill(out, seed, sequences, rows, columns, keep)
    return out[0] if isinstance(sequence, int) else out


def check_seed(seed: Seed, device: torch.device) -> None:
    """Raise unless seed is an int in [-2^63, 2^63) or an int64 tensor of one element that can be read on device."""
    if isinstance(seed, torch.Tensor):
        check_dense("seed", seed)
        if seed.dtype != torch.int64:
            raise ArgumentTypeError(f"seed: needs an int64 tensor of one element, got dtype {seed.dtype}")
        if seed.numel() != 1:
            raise ArgumentError(f"seed: needs an int64 tensor of one element, got shape {tuple(seed.shape)}")
        fake = isinstance(seed, FakeTensor) and not torch._C._len_torch_dispatch_stack()
        if fake or (seed.is_meta and device.type != "meta"):
            raise ArgumentError(f"seed: needs a tensor that has memory, got a {type(seed).__name__} without any")
        check_memory([("seed", seed)])
    elif isinstance(seed, bool) or not isinstance(seed, Integral):
        raise ArgumentTypeError(f"seed: needs an int or an int64 tensor of one element, got {type(seed).__name__}")
    elif not -(1 << 63) <= int(seed) < 1 << 63:
        raise ArgumentError(f"seed: needs an int in [-2^63, 2^63), got {seed}")


def dropout_mask(
    seed: Seed,
    p: float,
    batch: int,
    num_heads_q: int,
    seqlen_q: int,
    seqlen_k: int,
    *,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """The keep mask that every backend applies for this seed: True where the attention weight is kept.

        kept[b, h, i, j] = number(seed, b, h, i, j) >= floor(p * 65536 + 0.5)

    number is a 16-bit part of Philox4x32-10 with key = seed and counter ((j >> 5) * 8 + (j & 7), (i >> 4) * 8 +
    (i & 7), h, b); the word is (j >> 3) & 3, its low half if i & 8 == 0, else its high half. Kept weights are divided
    by 1 - threshold / 65536. i and j count inside the sequence, so a padded or packed batch has the same mask.

    Args:
        seed: int in [-2^63, 2^63), or an int64 tensor of one element on any device (read without synchronising when
            it is on `device`).
        p: probability of dropping, float in [0, 1]. 0 keeps all, 1 keeps none.
        batch: number of sequences. num_heads_q: query heads. seqlen_q, seqlen_k: queries and keys; all ints >= 0.
        device: where the mask is made.

    Returns:
        bool [batch, num_heads_q, seqlen_q, seqlen_k].

    Raises:
        ArgumentError: p outside [0, 1] or NaN, a negative size, a seed out of range or of more than one element.
        ArgumentTypeError: an argument of another type.

    Example:
        >>> dropout_mask(7, 0.1, 1, 2, 64, 64).shape
        torch.Size([1, 2, 64, 64])

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(f"device: needs a torch device, got {device!r} ({error})") from None
    check_seed(seed, device)
    p = check_probability("p", p)
    sizes = {"batch": batch, "num_heads_q": num_heads_q, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, Integral):
            raise ArgumentTypeError(f"{name}: needs an int >= 0, got {type(size).__name__}")
        if size < 0:
            raise ArgumentError(f"{name}: needs an int >= 0, got {size}")
    batch, num_heads_q, seqlen_q, seqlen_k = (int(size) for size in sizes.values())
    seed = seed if isinstance(seed, torch.Tensor) else int(seed)
    return keep_rectangle(seed, drop_threshold(p), range(batch), num_heads_q, (0, seqlen_q), (0, seqlen_k), device)
