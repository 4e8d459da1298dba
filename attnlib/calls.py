"""What the public functions share on the way to the operators: plain numbers, seeds, autocast, BlockMask."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .arguments import check_dense
from .errors import ArgumentError, ArgumentTypeError
from .operands import Operands, Scalars, grads_of
from .options import (
    UNBOUNDED,
    check_flag,
    check_number,
    check_positive,
    check_probability,
    check_window,
    drop_threshold,
)


@dataclass(frozen=True, eq=False)
class BlockMask:
    """Block-sparse visibility: key block n is visible to query block m iff mask[b, h, m, n] is True.

    Kernels skip blocks that are wholly hidden, so a mask of 25 % density costs about a quarter of a dense call.
    Source: block-sparse FlashAttention, Dao et al., 2022, https://arxiv.org/abs/2205.14135, section 3.3.

    Args:
        mask: bool [batch or 1, num_heads_q or 1, ceil(seqlen_q / block_q), ceil(seqlen_k / block_k)].
        block_q: queries a block, a multiple of 16.
        block_k: keys a block, a multiple of 16.

    Raises:
        ArgumentTypeError: mask is not a bool tensor, or a block size is not an int.
        ArgumentError: mask has not four dimensions, or a block size is not a positive multiple of 16.
    """

    mask: torch.Tensor
    block_q: int
    block_k: int

    def __post_init__(self) -> None:
        for name in ("block_q", "block_k"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int):
                raise ArgumentTypeError(f"block_mask.{name}: needs an int, got {size!r}")
            if size <= 0 or size % 16 or size > 1 << 30:
                raise ArgumentError(f"block_mask.{name}: needs a positive multiple of 16, got {size}")
        if not hasattr(self.mask, "shape"):
            raise ArgumentTypeError(f"block_mask.mask: needs a bool tensor, got {type(self.mask).__name__}")
        if isinstance(self.mask, torch.Tensor) and self.mask.dtype != torch.bool:
            raise ArgumentTypeError(f"block_mask.mask: needs bool, got {self.mask.dtype}")
        if len(self.mask.shape) != 4:
            raise ArgumentError(f"block_mask.mask: needs 4 dimensions, got shape {list(self.mask.shape)}")


def scalars_of(
    operands: Operands,
    causal: bool,
    causal_alignment: str,
    window: Sequence[int | None] | None,
    scale: float | None,
    softcap: float | None,
    dropout_p: float,
    deterministic: bool | None,
    block_mask: BlockMask | None,
    longest_q: int,
    longest_k: int,
) -> Scalars:
    """The arguments of a call that are no tensors, checked and normalised: ArgumentError or ArgumentTypeError."""
    check_flag("causal", causal)
    if causal_alignment not in ("bottom_right", "top_left"):
        raise ArgumentError(f"causal_alignment: needs 'bottom_right' or 'top_left', got {causal_alignment!r}")
    left, right = (UNBOUNDED, UNBOUNDED) if window is None else check_window(window)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    elif not isinstance(deterministic, bool):
        raise ArgumentTypeError(f"deterministic: needs True, False or None, got {deterministic!r}")
    slopes = operands.alibi_slopes
    if slopes is not None and slopes.requires_grad and torch.is_grad_enabled():
        raise ArgumentError("alibi_slopes: needs no gradient, since none is computed for it; got requires_grad=True")
    return Scalars(
        longest_q,
        longest_k,
        left,
        0 if causal else right,
        causal_alignment == "top_left",
        _default_scale(operands.q) if scale is None else check_number("scale", scale),
        0.0 if softcap is None else check_positive("softcap", softcap),
        check_probability("dropout_p", dropout_p),
        0 if block_mask is None else block_mask.block_q,
        0 if block_mask is None else block_mask.block_k,
        grads_of(operands),
        deterministic,
        _allows_tf32(operands.q),
    )


def autocast(operands: Operands, cache: bool = False) -> Operands:
    """q, k and v in autocast's dtype; a cache keeps its own, which q and the new tokens then take."""
    kind = operands.q.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return operands
    dtype = operands.k.dtype if cache else torch.get_autocast_dtype(kind)

    def cast(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
            return tensor
        return tensor.to(dtype)

    names = ("q", "k_new", "v_new") if cache else ("q", "k", "v")
    changes: dict[str, Any] = {name: cast(getattr(operands, name)) for name in names}
    return operands._replace(**changes)


def _allows_tf32(q: torch.Tensor) -> bool:
    return q.is_cuda and q.dtype == torch.float32 and _torch_allows_tf32()


def _torch_allows_tf32() -> bool:
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    if precision is None:
        return torch.get_float32_matmul_precision() != "highest"
    return precision == "tf32"


# What torch._dynamo.assume_constant_result sets; importing that module takes longer than all of attnlib.
_torch_allows_tf32._dynamo_marked_constant = True  # type: ignore[attr-defined]


def check_cache(operands: Operands) -> None:
    """What attention_kvcache asks of its operands beyond their form. Raises ArgumentError or ArgumentTypeError."""
    if operands.kv_lens is None:
        raise ArgumentTypeError("kv_lens: needs an int32 tensor [batch], got None")
    if (operands.k_new is None) != (operands.v_new is None):
        raise ArgumentError("k_new, v_new: need to be given together, got only one of them")
    if operands.new_lens is not None and operands.k_new is None:
        raise ArgumentError("new_lens: needs k_new and v_new, got none")
    if torch.is_grad_enabled():
        for name, tensor in zip(Operands._fields, operands):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                name = {"k": "k_cache", "v": "v_cache"}.get(name, name)
                raise ArgumentError(
                    f"{name}: needs no gradient, since attention_kvcache has no backward; got requires_grad=True"
                )


def _default_scale(q: torch.Tensor) -> float:
    try:
        head_dim = q.shape[-1]
    except (IndexError, RuntimeError, ValueError) as error:  # none, nested or not initialised
        check_dense("q", q)
        message = "q: needs 4 dimensions [batch, seqlen, heads, head_dim], or 3 when packed, got none"
        raise ArgumentError(message) from error
    if head_dim == 0:
        raise ArgumentError("q: needs head_dim of at least 1, got 0")
    return head_dim**-0.5


def blocks_of(block_mask: BlockMask | None) -> torch.Tensor | None:
    if block_mask is None:
        return None
    if not isinstance(block_mask, BlockMask):
        raise ArgumentTypeError(f"block_mask: needs an attnlib.BlockMask, got {type(block_mask).__name__}")
    return block_mask.mask


def length_hint(name: str, value: Any) -> int:
    if value is None:
        return -1
    if isinstance(value, torch.Tensor):
        check_dense(name, value)
        if value.dtype not in (torch.int32, torch.int64) or value.numel() != 1:
            got = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
            raise ArgumentTypeError(f"{name}: needs an int, an int32 or int64 tensor of one element or None, got {got}")
        return -1  # its value is not worth a synchronisation: grids come from totals
    if isinstance(value, bool) or not isinstance(value, (int, numbers.Integral, torch.SymInt)):
        raise ArgumentTypeError(f"{name}: needs an int, a one-element tensor or None, got {value!r}")
    length: Any = value if isinstance(value, torch.SymInt) else int(value)
    if length < 0:
        raise ArgumentError(f"{name}: needs at least 0, got {length}")
    if length > 2**31 - 1:
        raise ArgumentError(f"{name}: needs at most 2**31 - 1, got {length}")
    return length


def seed_tensor(q: torch.Tensor, dropout_p: float, seed: Any) -> torch.Tensor | None:
    """The seed as an operand; None where no key is dropped."""
    if seed is None and type(dropout_p) is float and dropout_p == 0.0:
        return None
    dropped = drop_threshold(check_probability("dropout_p", dropout_p))
    if seed is None and dropped == 0:
        return None
    if isinstance(seed, torch.Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1:
            check_dense("dropout_seed", seed)
            raise ArgumentError(
                "dropout_seed: needs an int or an int64 tensor of one element, got "
                f"{str(seed.dtype).removeprefix('torch.')} {list(seed.shape)}"
            )
    elif seed is not None:
        if isinstance(seed, bool) or not isinstance(seed, (int, numbers.Integral)):
            raise ArgumentTypeError(f"dropout_seed: needs an int or an int64 tensor of one element, got {seed!r}")
        if not -(2**63) <= int(seed) < 2**63:
            raise ArgumentError(f"dropout_seed: needs an int from -2**63 to 2**63 - 1, got {seed}")
    if dropped == 0:
        return None
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=q.device)
    if isinstance(seed, torch.Tensor):
        return seed
    return torch.full((1,), int(seed), dtype=torch.int64, device=q.device)
