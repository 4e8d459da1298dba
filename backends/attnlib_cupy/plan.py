"""The plan of the SIMT kernels: the workspace, one parameter struct, and launches on torch's current stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from attnlib.backend import Target
from attnlib.memory import allocate
from attnlib.problem import AttentionProblem, Tensors

from . import config
from .params import PARAMS
from .source import Kernel

_UNBOUNDED = 1 << 29
_SINKS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Launch(Protocol):
    """Starts a kernel of `blocks` blocks with the bytes of a SimtParams, on torch's current stream."""

    def __call__(self, kernel: Kernel, device: torch.device, blocks: int, params: bytes, shared_bytes: int) -> None: ...


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _strides(prefix: str, tensor: torch.Tensor, packed: bool, names: str) -> dict[str, int]:
    """Strides as struct members: names is "bih" or "bjh"; a packed operand has no batch stride."""
    strides = (0, *tensor.stride()) if packed else tensor.stride()
    return {f"{prefix}_{name}": stride for name, stride in zip(names, strides)}


class CupyPlan:
    """One signature and size class on one device."""

    def __init__(
        self, problem: AttentionProblem, target: Target, launch: Launch, shape: Mapping[str, Any] | None = None
    ) -> None:
        wanted = dict(shape or {})
        fault = wanted.pop("fault", "")
        if fault not in config.FAULTS:
            raise ValueError(f"fault: needs one of {', '.join(config.FAULTS[1:])}, got {fault!r}")
        self._splits = wanted.pop("num_splits", None)
        if self._splits is not None and (type(self._splits) is not int or not 1 <= self._splits <= 256):
            raise ValueError(f"num_splits: needs 1 to 256, got {self._splits!r}")
        for name, value in wanted.items():
            config.check_override(name, value)
        self._launch_kernel = launch
        self._target = target
        self._forward = config.tile(problem, target, False, fault, wanted)
        self._backward = config.tile(problem, target, True, fault, wanted) if problem.grads else None
        self._rows = config.rows_of(self._forward)

    def describe(self) -> Mapping[str, Any]:
        """Names and tile shapes of the kernels."""

        def about(kernel: str, shape: config.Shape, backward: bool) -> dict[str, Any]:
            return {
                "kernel": kernel, "tile_rows": shape.tile_rows, "tile_columns": shape.tile_columns,
                "rows": shape.rows, "lanes": shape.lanes, "shared_bytes": shape.shared_bytes(backward),
            }  # fmt: skip

        found = about("forward_simt", self._forward, False)
        if self._backward is not None:
            found["backward"] = about("backward_simt", self._backward, True)
        return found

    # ------------------------------------------------------------ parameters

    def _values(self, problem: AttentionProblem, t: Tensors) -> dict[str, Any]:
        """What both directions pass."""
        packed, paged = problem.packed, problem.page_size is not None
        left, right = problem.window
        threshold = problem.dropout_threshold
        values: dict[str, Any] = {
            "q": _address(t.q), "k": _address(t.k), "v": _address(t.v), "out": _address(t.out), "lse": _address(t.lse),
            "stats": _address(t.stats), "sinks": _address(t.sinks), "seed": _address(t.dropout_seed),
            "q_lens": _address(t.q_lens), "kv_lens": _address(t.kv_lens), "new_lens": _address(t.new_lens),
            "cu_q": _address(t.cu_seqlens_q), "cu_k": _address(t.cu_seqlens_k),
            "page_table": _address(t.page_table), "bias": _address(t.bias), "mask": _address(t.mask),
            "alibi": _address(t.alibi_slopes), "block_mask": _address(t.block_mask),
            "batch": problem.batch, "seqlen_q": problem.seqlen_q, "seqlen_k": problem.seqlen_k,
            "total_q": problem.total_q, "total_k": problem.total_k, "capacity": problem.seqlen_k,
            "heads_q": problem.num_heads_q, "heads_kv": problem.num_heads_kv,
            "head_dim": problem.head_dim, "head_dim_v": problem.head_dim_v,
            "window_left": -1 if left is None else min(left, _UNBOUNDED),
            "window_right": -1 if right is None else min(right, _UNBOUNDED),
            "top_left": problem.top_left, "page_size": problem.page_size or 0, "dropout_threshold": threshold,
            "scale": problem.scale, "softcap": problem.softcap or 0.0,
            "keep_scale": 65536.0 / (65536 - threshold) if threshold < 65536 else 0.0,
        }  # fmt: skip
        values |= _strides("q", t.q, packed, "bih")
        values |= _strides("k", t.k, packed and not paged, "bjh") | _strides("v", t.v, packed and not paged, "bjh")
        if t.bias is not None:
            values |= _strides("bias", t.bias, False, "bhij")
        if t.mask is not None:
            values |= _strides("mask", t.mask, False, "bhij")
        if t.block_mask is not None and problem.block_mask is not None:
            values |= _strides("block", t.block_mask, False, "bhij")
            values["block_rows"], values["block_columns"] = problem.block_mask
        if t.alibi_slopes is not None:
            values |= _strides("alibi", t.alibi_slopes, False, "bh")
        if t.page_table is not None:
            values["page_row"] = t.page_table.stride(0)
            values["capacity"] = t.page_table.shape[1] * t.k.shape[1]
        if t.sinks is not None:
            values["sinks_type"] = _SINKS.index(t.sinks.dtype)
        if t.k_new is not None and t.v_new is not None:
            values |= {"k_new": _address(t.k_new), "v_new": _address(t.v_new), "new_tokens": t.k_new.shape[1]}
            values |= _strides("kn", t.k_new, False, "bth") | _strides("vn", t.v_new, False, "bth")
        return values

    def _launch(
        self, name: str, shape: config.Rows, t: Tensors, blocks: int, values: Mapping[str, Any], shared_bytes: int = 0
    ) -> None:
        if blocks > 0:
            self._launch_kernel(Kernel(name, shape), t.q.device, blocks, PARAMS.pack(values), shared_bytes)

    # ------------------------------------------------------------ forward and backward

    def forward(self, problem: AttentionProblem, t: Tensors) -> None:
        shape, values = self._forward, self._values(problem, t)
        if t.k_new is not None:
            self._launch("append", self._rows, t, problem.batch * t.k_new.shape[1], values)
        splits = self._splits or config.splits(problem, self._target, shape)
        tiles, units = config.query_grid(problem, shape)
        values |= {"tiles": tiles, "units": units, "splits": splits}
        if splits > 1:
            size, number = (splits, t.lse.numel()), problem.accumulate_dtype
            out = allocate((*size, problem.head_dim_v), number, t.q.device)
            stats = allocate((2, *size), number, t.q.device)
            values |= {"part_out": _address(out), "part_stats": _address(stats)}
        self._launch("forward", shape, t, tiles * units * splits, values, shape.shared_bytes(False))
        if splits > 1:
            self._launch("combine", self._rows, t, -(-t.lse.numel() // (config.THREADS // 32)), values)

    def backward(self, problem: AttentionProblem, t: Tensors) -> None:
        shape, packed = self._backward, problem.packed
        assert shape is not None and t.dout is not None
        rows = allocate((3, t.lse.numel()), problem.accumulate_dtype, t.q.device)
        values = self._values(problem, t) | {
            "dout": _address(t.dout), "dlse": _address(t.dlse), "rows": _address(rows),
            "dq": _address(t.dq), "dk": _address(t.dk), "dv": _address(t.dv),
            "dbias": _address(t.dbias), "dsinks": _address(t.dsinks),
        } | _strides("do", t.dout, packed, "bih")  # fmt: skip
        if t.dlse is not None:
            values |= _strides("dlse", t.dlse, packed, "bhi")
        shared = shape.shared_bytes(True)
        self._launch("delta", self._rows, t, -(-t.lse.numel() // (config.THREADS // 32)), values)
        if t.dq is not None:
            tiles, units = config.query_grid(problem, shape)
            self._launch("query", shape, t, tiles * units, values | {"tiles": tiles, "units": units}, shared)
        if t.dk is not None or t.dv is not None:
            tiles, units = config.key_grid(problem, t.k.shape[0], shape)
            self._launch("key", shape, t, tiles * units, values | {"tiles": tiles, "units": units}, shared)
        if t.dbias is not None:
            values |= _strides("dbias", t.dbias, False, "bhij")
            sizes = [1 if stride == 0 else size for size, stride in zip(t.dbias.shape, t.dbias.stride())]
            values |= dict(zip(("size_b", "size_h", "size_i", "size_j"), sizes))
            blocks = sizes[0] * sizes[1] * -(-sizes[2] // shape.tile_rows) * -(-sizes[3] // shape.tile_columns)
            self._launch("bias", shape, t, blocks, values, shared)
        if t.dsinks is not None:
            self._launch("sink", self._rows, t, problem.num_heads_q, values, 8 * config.THREADS)
