"""The public functions. What they mean is written once, in docs/semantics.md."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import dispatch, ops, registry
from .arguments import Operands, Options, Scalars, check, check_types
from .backend import Target
from .dispatch import Decision
from .errors import ArgumentError, ArgumentTypeError
from .problem import AttentionProblem, Feature

Result = Any  # a tensor, or (out, lse) with return_lse=True


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


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    causal_alignment: str = "bottom_right",
    window: Sequence[int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    block_mask: BlockMask | None = None,
    q_lens: Any = None,
    kv_lens: Any = None,
    dropout_p: float = 0.0,
    dropout_seed: Any = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str | None = None,
) -> Result:
    """Exact attention, softmax(scale * q k^T + bias) v, computed in tiles without the seqlen_q x seqlen_k matrix.

    Differentiable in q, k, v, bias and sinks, through out and lse. Works under autocast (which casts q, k and v),
    torch.compile, torch.export, activation checkpointing, torch.func.grad and vmap.
    Source: FlashAttention, Dao et al., 2022, https://arxiv.org/abs/2205.14135, and FlashAttention-2, Dao, 2023.

    Args:
        q: [batch, seqlen_q, num_heads_q, head_dim], float64, float32, float16 or bfloat16. A torch tensor, or any
            array that speaks DLPack (NumPy, CuPy, JAX): the result is of the same kind, without gradients.
        k: [batch, seqlen_k, num_heads_kv, head_dim], dtype and device of q; num_heads_q is a multiple of num_heads_kv.
        v: [batch, seqlen_k, num_heads_kv, head_dim_v], likewise.
        causal: query i sees keys up to its own position, pos(i) = i + kv_len - q_len.
        causal_alignment: "bottom_right", or "top_left" for pos(i) = i.
        window: (left, right): a query sees keys from pos - left to pos + right, both inclusive; None is unbounded.
        scale: finite factor of q k^T; default 1 / sqrt(head_dim).
        softcap: if given, scores become softcap * tanh(scores / softcap), before bias and masks.
        bias: added to the scores; any float dtype, broadcastable to [batch, num_heads_q, seqlen_q, seqlen_k].
            -inf hides a key. Never expanded in memory.
        mask: bool, broadcasts alike; True is visible.
        alibi_slopes: float32 [num_heads_q] or [batch, num_heads_q]: adds -slope * |pos(i) - j|. No gradient.
        sinks: float [num_heads_q]: a score that every row of the head has beside its keys, with no value.
        block_mask: which blocks of the score matrix are visible.
        q_lens: int32 [batch], queries of each sequence in a padded batch; rows past them give 0 and lse -inf.
        kv_lens: int32 [batch], keys of each sequence; what lies past them is never read into a result.
        dropout_p: probability from 0 to 1 of dropping each (query, key) pair after the softmax.
        dropout_seed: int in [-2**63, 2**63), or an int64 tensor of one element on q's device; default drawn from
            torch's generator. The same seed drops the same pairs on every backend, see dropout_mask.
        return_lse: also return lse, the natural logarithm of each row's softmax denominator.
        deterministic: a bitwise repeatable backward; default torch.are_deterministic_algorithms_enabled().
        backend: name or comma list, e.g. "cpu" or "cuda:sm_90a"; default use_backend(), then ATTNLIB_BACKEND, then
            the best that takes the problem. explain() shows the choice.

    Returns:
        out [batch, seqlen_q, num_heads_q, head_dim_v] in q's dtype; with return_lse also lse [batch, num_heads_q,
        seqlen_q] in float32 (float64 for float64). A row that sees no key gives 0, and -inf or its sink as lse.

    Raises:
        ArgumentError: a value or shape is outside what is said above (also a ValueError).
        ArgumentTypeError: a type or dtype is (also a TypeError).
        UnsupportedError: no backend takes the problem; it carries every backend's reasons.

    Example:
        >>> import torch, attnlib
        >>> q = torch.randn(2, 128, 8, 64)
        >>> k, v = torch.randn(2, 128, 2, 64), torch.randn(2, 128, 2, 64)
        >>> attnlib.attention(q, k, v, causal=True).shape
        torch.Size([2, 128, 8, 64])
    """
    if not isinstance(q, torch.Tensor):
        return _through_arrays(attention, locals())
    options = Options.of(_head_dim(q), causal, causal_alignment, window, scale, softcap, dropout_p, deterministic)
    operands = Operands(
        q, k, v, bias, mask, alibi_slopes, sinks, _blocks(block_mask), q_lens, kv_lens, None, None, None,
        _seed(q, dropout_p, dropout_seed),
    )  # fmt: skip
    return _run(operands, options, block_mask, -1, -1, return_lse, backend)


def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    page_table: Any = None,
    causal: bool = False,
    causal_alignment: str = "bottom_right",
    window: Sequence[int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    block_mask: BlockMask | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Any = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str | None = None,
) -> Result:
    """Attention over sequences of different lengths packed one after the other, without padding.

    Sequence b holds rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q, and likewise of k and v. Rows of q past the
    last sequence are padding: out 0, lse -inf, no gradient. Everything else is as in attention, with positions,
    bias, mask and dropout counted inside each sequence.

    Args:
        q: [total_q, num_heads_q, head_dim].
        k: [total_k, num_heads_kv, head_dim]; with page_table [num_pages, page_size, num_heads_kv, head_dim].
        v: [total_k, num_heads_kv, head_dim_v]; with page_table [num_pages, page_size, num_heads_kv, head_dim_v].
        cu_seqlens_q: int32 [batch + 1] from 0, non-decreasing, on q's device: where each sequence starts.
        cu_seqlens_k: likewise for k; with page_table only its differences count, as lengths.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths, ints or one-element tensors; hints. With bias, mask
            or block_mask they give the last two dimensions these broadcast to (default: taken from bias or mask).
        page_table: int32 [batch, max_pages], the pages of each sequence in order.

    Returns:
        out [total_q, num_heads_q, head_dim_v]; with return_lse also lse [num_heads_q, total_q].

    Raises:
        As attention. cu_seqlens are checked where the host can see them, and clamped inside the kernels elsewhere.

    Example:
        >>> cu = torch.tensor([0, 3, 8], dtype=torch.int32)
        >>> x = torch.randn(8, 4, 64)
        >>> attnlib.attention_varlen(x, x, x, cu, cu, causal=True).shape
        torch.Size([8, 4, 64])
    """
    if not isinstance(q, torch.Tensor):
        return _through_arrays(attention_varlen, locals())
    options = Options.of(_head_dim(q), causal, causal_alignment, window, scale, softcap, dropout_p, deterministic)
    for name, tensor in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if tensor is None:
            raise ArgumentTypeError(f"{name}: needs an int32 tensor [batch + 1], got None")
    operands = Operands(
        q, k, v, bias, mask, alibi_slopes, sinks, _blocks(block_mask), None, None, cu_seqlens_q, cu_seqlens_k,
        page_table, _seed(q, dropout_p, dropout_seed),
    )  # fmt: skip
    longest_q, longest_k = _hint("max_seqlen_q", max_seqlen_q), _hint("max_seqlen_k", max_seqlen_k)
    return _run(operands, options, block_mask, longest_q, longest_k, return_lse, backend)


def attention_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    kv_lens: Any,
    *,
    page_table: Any = None,
    k_new: Any = None,
    v_new: Any = None,
    new_lens: Any = None,
    q_lens: Any = None,
    causal: bool = False,
    window: Sequence[int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Result:
    """Attention of new queries over a key/value cache, contiguous or paged, appending new keys and values first.

    Token t of row b of k_new and v_new is written to the cache at kv_lens[b] + t for t < new_lens[b]; attention then
    sees kv_lens + new_lens keys. The caches are changed in place, kv_lens is not. No gradient, no dropout; positions
    are bottom-right. Pages that two sequences share may be read; appending into one is the caller's mistake.

    Args:
        q: [batch, seqlen_q, num_heads_q, head_dim].
        k_cache: [batch, capacity, num_heads_kv, head_dim], or paged [num_pages, page_size, num_heads_kv, head_dim].
        v_cache: likewise with head_dim_v.
        kv_lens: int32 [batch], tokens in the cache before the call.
        page_table: int32 [batch, max_pages]; entries past a sequence's length are never read.
        k_new: [batch, seqlen_new, num_heads_kv, head_dim]; needs v_new.
        v_new: [batch, seqlen_new, num_heads_kv, head_dim_v].
        new_lens: int32 [batch], tokens of k_new to append; default all.
        q_lens: int32 [batch], queries of each row; default seqlen_q.
        bias, mask: broadcastable to [batch, num_heads_q, seqlen_q, capacity].
        causal, window, scale, softcap, alibi_slopes, sinks, return_lse, backend: as in attention.

    Returns:
        out [batch, seqlen_q, num_heads_q, head_dim_v]; with return_lse also lse [batch, num_heads_q, seqlen_q].

    Raises:
        ArgumentError: also if a length does not fit the cache, where the host can see it; elsewhere nothing is
            written out of bounds and the rows of that sequence are NaN. Also if an input requires a gradient.

    Example:
        >>> k_cache, v_cache = torch.zeros(2, 64, 2, 32), torch.zeros(2, 64, 2, 32)
        >>> lens = torch.tensor([5, 9], dtype=torch.int32)
        >>> new = torch.randn(2, 1, 2, 32)
        >>> attnlib.attention_kvcache(torch.randn(2, 1, 8, 32), k_cache, v_cache, lens, k_new=new, v_new=new).shape
        torch.Size([2, 1, 8, 32])
    """
    if not isinstance(q, torch.Tensor):
        return _through_arrays(attention_kvcache, locals())
    if kv_lens is None:
        raise ArgumentTypeError("kv_lens: needs an int32 tensor [batch], got None")
    if (k_new is None) != (v_new is None):
        raise ArgumentError("k_new, v_new: need to be given together, got only one of them")
    if new_lens is not None and k_new is None:
        raise ArgumentError("new_lens: needs k_new and v_new, got none")
    if torch.is_grad_enabled():
        named = dict(q=q, k_cache=k_cache, v_cache=v_cache, k_new=k_new, v_new=v_new, bias=bias, sinks=sinks)
        for name, tensor in named.items():
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                raise ArgumentError(
                    f"{name}: needs no gradient, since attention_kvcache has no backward; got requires_grad=True"
                )
    options = Options.of(_head_dim(q), causal, "bottom_right", window, scale, softcap, 0.0, False)
    operands = Operands(
        q, k_cache, v_cache, bias, mask, alibi_slopes, sinks, None, q_lens, kv_lens, None, None, page_table, None,
        k_new, v_new, new_lens,
    )  # fmt: skip
    return _run(operands, options, None, -1, -1, return_lse, backend, cache=True)


def merge(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a union of key sets from the attention over each: out = sum_n exp(lse_n - lse) out_n.

    Plain differentiable torch. A part whose lse is -inf weighs nothing, whatever its out holds. Sinks may be in one
    part at most.

    Args:
        outs: tensors of one shape, [batch, seqlen_q, num_heads_q, head_dim_v] or packed [total_q, num_heads_q, .].
        lses: as many, [batch, num_heads_q, seqlen_q] or packed [num_heads_q, total_q], natural logarithms.

    Returns:
        out in the dtype of outs[0], and lse = log(sum_n exp(lse_n)).

    Raises:
        ArgumentError: no parts, as many outs as lses not given, or shapes that do not fit together.

    Example:
        >>> parts = [attnlib.attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(0, 50), slice(50, None))]
        >>> out, lse = attnlib.merge([p[0] for p in parts], [p[1] for p in parts])
    """
    outs, lses = list(outs), list(lses)
    if not outs or len(outs) != len(lses):
        raise ArgumentError(f"outs, lses: need as many of each, at least one, got {len(outs)} and {len(lses)}")
    for name, tensors in (("outs", outs), ("lses", lses)):
        for index, tensor in enumerate(tensors):
            if not isinstance(tensor, torch.Tensor):
                raise ArgumentTypeError(f"{name}[{index}]: needs a tensor, got {type(tensor).__name__}")
            if tensor.dtype != tensors[0].dtype or tensor.device != tensors[0].device:
                needed, got = (f"{t.dtype} on {t.device}" for t in (tensors[0], tensor))
                raise ArgumentError(f"{name}[{index}]: needs {needed}, got {got}")
            if tensor.shape != tensors[0].shape:
                raise ArgumentError(f"{name}[{index}]: needs shape {list(tensors[0].shape)}, got {list(tensor.shape)}")
    shape = outs[0].shape
    rows = (shape[1], shape[0]) if len(shape) == 3 else (shape[0], shape[2], shape[1]) if len(shape) == 4 else None
    if rows is None or tuple(lses[0].shape) != rows:
        raise ArgumentError(
            f"lses: need shape {rows and list(rows)} for outs of {list(shape)}, got {list(lses[0].shape)}"
        )
    dtype = torch.float64 if outs[0].dtype == torch.float64 else torch.float32
    stacked = torch.stack([lse.to(dtype) for lse in lses])
    top = stacked.detach().amax(0)
    top = torch.where(top == -torch.inf, torch.zeros_like(top), top)
    empty = stacked == -torch.inf
    weights = torch.where(empty, 0.0, torch.exp(torch.where(empty, 0.0, stacked) - top))
    total = weights.sum(0)
    nothing = total == 0
    lse = torch.where(nothing, -torch.inf, top + torch.log(torch.where(nothing, 1.0, total)))
    shares = weights / torch.where(nothing, 1.0, total)
    out = torch.full_like(outs[0], -0.0, dtype=dtype)  # -0.0 + x is x to the bit
    for part, share, hidden in zip(outs, shares, empty):
        hidden_rows = hidden.transpose(-1, -2).unsqueeze(-1)
        weighed = share.transpose(-1, -2).unsqueeze(-1) * torch.where(hidden_rows, 0.0, part.to(dtype))
        out = torch.where(hidden_rows, out, out + weighed)
    out = torch.where(nothing.transpose(-1, -2).unsqueeze(-1), 0.0, out)
    return out.to(outs[0].dtype), lse


def explain(
    q: Any, k: Any = None, v: Any = None, *, device: Any = None, backend: str | None = None, **arguments: Any
) -> Decision:
    """Which backend would run a call, and every reason of the others; for hardware that is not present, too.

    Args:
        q, k, v: as in attention, attention_varlen or attention_kvcache; or an AttentionProblem as the only one.
        device: None for the device of q, a torch device, or an architecture: "sm_90", "gfx942", "cpu".
        backend: as in attention.
        arguments: any keyword of the three functions; cu_seqlens_q or kv_lens may be among them.

    Returns:
        A Decision: str() prints it, .chosen names the backend or is None, .refusals holds the reasons.

    Raises:
        ArgumentError, ArgumentTypeError: as the call itself would.

    Example:
        >>> print(attnlib.explain(q, k, v, causal=True, device="sm_90"))   # doctest: +SKIP
    """
    if isinstance(q, AttentionProblem):
        if k is not None or v is not None or arguments:
            raise ArgumentTypeError(
                "explain: needs either an AttentionProblem alone, or q, k, v and keywords, got both"
            )
        problem, home = q, torch.device("cpu")
    else:
        problem, home = _problem_of(q, k, v, arguments)
    target = dispatch.parse_target(device if device is not None else home)
    decision = dispatch.select(problem, target, dispatch.requested(backend))
    return _with_details(dataclasses.replace(decision, problem=problem))


def _with_details(decision: Decision) -> Decision:
    """The decision with what the chosen plan says of itself, where that can be had without the device."""
    if decision.chosen is None:
        return decision
    candidate = decision.candidate
    assert candidate.backend is not None and candidate.family is not None
    try:
        details = candidate.backend.describe(decision.problem, candidate.family.name, decision.target)
    except Exception as error:  # a port's fault must not hide the decision
        details = {"describe": f"{type(error).__name__}: {error}"}
    return dataclasses.replace(decision, details=details)


def problem_of(q: Any, k: Any, v: Any, **arguments: Any) -> AttentionProblem:
    """The AttentionProblem of a call with these arguments, any keyword of the three attention functions."""
    return _problem_of(q, k, v, arguments)[0]


def _problem_of(q: Any, k: Any, v: Any, arguments: dict[str, Any]) -> tuple[AttentionProblem, torch.device]:
    functions: tuple[Any, ...] = (attention, attention_varlen, attention_kvcache)
    known = {name for function in functions for name in function.__kwdefaults__}
    known |= {"cu_seqlens_q", "cu_seqlens_k"}
    for name in arguments:
        if name not in known:
            raise ArgumentTypeError(f"explain: no attention function has an argument {name!r}")
    if not isinstance(q, torch.Tensor):
        from .adapters import arrays

        q, k, v = (arrays.to_torch(array, name)[0] for name, array in zip("qkv", (q, k, v)))
        arguments = {name: arrays.as_torch(name, value) for name, value in arguments.items()}
    get = arguments.get
    options = Options.of(
        _head_dim(q), get("causal", False), get("causal_alignment", "bottom_right"), get("window"), get("scale"),
        get("softcap"), get("dropout_p", 0.0), get("deterministic"),
    )  # fmt: skip
    block_mask = get("block_mask")
    operands = Operands(
        q, k, v, get("bias"), get("mask"), get("alibi_slopes"), get("sinks"), _blocks(block_mask), get("q_lens"),
        get("kv_lens"), get("cu_seqlens_q"), get("cu_seqlens_k"), get("page_table"), None, get("k_new"), get("v_new"),
        get("new_lens"),
    )  # fmt: skip
    operands = _autocast(operands, cache="new_lens" in arguments or operands.k_new is not None)
    longest_q, longest_k = _hint("max_seqlen_q", get("max_seqlen_q")), _hint("max_seqlen_k", get("max_seqlen_k"))
    scalars = _scalars(operands, options, block_mask, longest_q, longest_k)
    if operands.k_new is not None:
        scalars = scalars._replace(grads=0)
    return check(operands, scalars), operands.q.device


# --- from the public functions to the operators ----------------------------------------------------------------------


def _run(
    operands: Operands,
    options: Options,
    block_mask: BlockMask | None,
    longest_q: int,
    longest_k: int,
    return_lse: bool,
    backend: str | None,
    cache: bool = False,
) -> Result:
    if not torch.compiler.is_compiling():
        check_types(operands)
    kind = operands.q.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        operands = _autocast(operands, cache)
    spec = dispatch.requested(backend)
    scalars = _scalars(operands, options, block_mask, longest_q, longest_k)
    if operands.k_new is not None:
        out, lse = ops.append_forward_op(
            operands.k_new, operands.v_new, operands.new_lens, *operands[:14], *scalars, spec
        )
    else:
        direct = None
        if not torch.compiler.is_compiling() and dispatch.wants_reference(spec):
            direct = ops.run_reference(operands, scalars, spec)
        out, lse = direct or ops.call(operands, scalars, spec)
    return (out, lse) if return_lse else out


def _scalars(
    operands: Operands, options: Options, block_mask: BlockMask | None, longest_q: int, longest_k: int
) -> Scalars:
    return Scalars(
        longest_q,
        longest_k,
        options.left,
        options.right,
        options.top_left,
        options.scale,
        options.softcap,
        options.dropout_p,
        0 if block_mask is None else block_mask.block_q,
        0 if block_mask is None else block_mask.block_k,
        _grads(operands) if torch.is_grad_enabled() else 0,
        options.deterministic,
        _allows_tf32(operands.q),
    )


def _grads(operands: Operands) -> int:
    slopes, bias, sinks = operands.alibi_slopes, operands.bias, operands.sinks
    if slopes is not None and slopes.requires_grad:
        raise ArgumentError("alibi_slopes: needs no gradient, since none is computed for it; got requires_grad=True")
    return (
        operands.q.requires_grad
        | operands.k.requires_grad << 1
        | operands.v.requires_grad << 2
        | (bias is not None and bias.requires_grad) << 3
        | (sinks is not None and sinks.requires_grad) << 4
    )


def _autocast(operands: Operands, cache: bool = False) -> Operands:
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
    return q.dtype == torch.float32 and q.device.type == "cuda" and _torch_allows_tf32()


@torch._dynamo.assume_constant_result
def _torch_allows_tf32() -> bool:
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    if precision is None:
        return torch.get_float32_matmul_precision() != "highest"
    return precision == "tf32"


def _head_dim(q: torch.Tensor) -> int:
    if q.layout != torch.strided:
        raise ArgumentTypeError(f"q: needs a dense (strided) tensor, got layout {q.layout}")
    if q.dim() == 0:
        raise ArgumentError("q: needs 4 dimensions [batch, seqlen, heads, head_dim], or 3 when packed, got none")
    return q.shape[-1]


def _blocks(block_mask: BlockMask | None) -> torch.Tensor | None:
    if block_mask is None:
        return None
    if not isinstance(block_mask, BlockMask):
        raise ArgumentTypeError(f"block_mask: needs an attnlib.BlockMask, got {type(block_mask).__name__}")
    return block_mask.mask


def _hint(name: str, value: Any) -> int:
    if value is None or isinstance(value, torch.Tensor):
        return -1  # a tensor's value is not worth a synchronisation: grids come from totals
    if isinstance(value, bool) or not isinstance(value, (int, numbers.Integral, torch.SymInt)):
        raise ArgumentTypeError(f"{name}: needs an int, a one-element tensor or None, got {value!r}")
    length: Any = value if isinstance(value, torch.SymInt) else int(value)
    if length < 0:
        raise ArgumentError(f"{name}: needs at least 0, got {length}")
    if length > 2**31 - 1:
        raise ArgumentError(f"{name}: needs at most 2**31 - 1, got {length}")
    return length


def _seed(q: torch.Tensor, dropout_p: float, seed: Any) -> torch.Tensor | None:
    if isinstance(seed, torch.Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1:
            raise ArgumentError(
                "dropout_seed: needs an int or an int64 tensor of one element, got "
                f"{str(seed.dtype).removeprefix('torch.')} {list(seed.shape)}"
            )
    elif seed is not None:
        if isinstance(seed, bool) or not isinstance(seed, (int, numbers.Integral)):
            raise ArgumentTypeError(f"dropout_seed: needs an int or an int64 tensor of one element, got {seed!r}")
        if not -(2**63) <= int(seed) < 2**63:
            raise ArgumentError(f"dropout_seed: needs an int from -2**63 to 2**63 - 1, got {seed}")
    if int(dropout_p * 65536 + 0.5) == 0:
        return None
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=q.device)
    if isinstance(seed, torch.Tensor):
        return seed
    return torch.full((1,), int(seed), dtype=torch.int64, device=q.device)


def _through_arrays(function: Any, arguments: dict[str, Any]) -> Any:
    """Run function on torch views of DLPack arrays and hand the result back as arrays of q's kind."""
    from .adapters import arrays

    return arrays.call(function, arguments)


# --- what there is --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BackendInfo:
    """A backend as attnlib.backends() lists it. `unusable` says why it can't run on the device asked about."""

    name: str
    origin: str
    families: tuple[str, ...]
    unusable: tuple[Any, ...]
    import_seconds: float


def backends(device: Any = "cpu") -> tuple[BackendInfo, ...]:
    """Every backend known, with the reasons why one cannot run on device (see explain); never makes a CUDA context.

    Example:
        >>> [info.name for info in attnlib.backends()][:1]
        ['reference']
    """
    target = dispatch.parse_target(device)
    return tuple(_info(entry, target) for entry in registry.entries())


def _info(entry: registry.Entry, target: Target) -> BackendInfo:
    if entry.backend is None:
        return BackendInfo(entry.name, entry.origin, (), (entry.refusal,), entry.seconds)
    reasons: list[Any] = []
    for family in entry.families:
        mine = [*dispatch.device_refusals(family, target), *entry.backend.available(family.name, target)]
        if not mine:
            reasons = []
            break
        reasons += [reason for reason in mine if reason not in reasons]
    names = tuple(family.name for family in entry.families if family.name)
    return BackendInfo(entry.name, entry.origin, names, tuple(reasons), entry.seconds)


def support_matrix() -> list[dict[str, Any]]:
    """One row for each kernel family, made from the declared capabilities: devices, dtypes, head_dim, features.

    Example:
        >>> attnlib.support_matrix()[0]["backend"]
        'reference'
    """
    rows = []
    for entry in registry.entries():
        for family in entry.families:
            caps = family.capabilities
            rows.append(
                {
                    "backend": f"{entry.name}:{family.name}" if family.name else entry.name,
                    "devices": sorted(caps.device_kinds),
                    "archs": list(caps.archs),
                    "dtypes": sorted(str(dtype).removeprefix("torch.") for dtype in caps.dtypes),
                    "max_head_dim": caps.max_head_dim,
                    "features": {feature.value: feature in caps.features for feature in Feature},
                    "masked_nan_safe": (caps.masked_nan_safe_forward, caps.masked_nan_safe_backward),
                    "note": family.note,
                }
            )
    return rows
