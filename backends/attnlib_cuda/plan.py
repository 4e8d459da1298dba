"""The plan of the sm_80 and sm_75 kernels: workspaces, parameter structs and launches on torch's current stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnlib.backend import Target
from attnlib.memory import allocate
from attnlib.problem import AttentionProblem, Tensors

from . import config, device, jit, params
from .spec import KernelSpec
from .warpgroup import WarpgroupForward, launch_backward

_UNBOUNDED = 1 << 29


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _strides(prefix: str, tensor: torch.Tensor, packed: bool, names: str) -> dict[str, int]:
    """Strides as struct members: names is "bih" or "bjh"; a packed operand has no batch stride."""
    strides = (0, *tensor.stride()) if packed else tensor.stride()
    return {f"{prefix}_{name}": stride for name, stride in zip(names, strides, strict=False)}


@dataclass(frozen=True)
class _Ready:
    """A forward prepared for one problem: the struct without its addresses and strides, and the launch."""

    problem: AttentionProblem
    values: dict[str, Any]
    grid: tuple[int, int, int]
    splits: int
    spec: KernelSpec
    shared: int
    extras: bool  # operands beside q, k and v


class Sm80Plan:
    """One signature and size class on one device."""

    def __init__(
        self, problem: AttentionProblem, target: Target, shape: Mapping[str, Any] | None = None, fault: str = "",
        warpgroups: bool = False,
    ) -> None:  # fmt: skip
        self._index = target.index or 0
        self._info = device.info(self._index) if target.present else device.for_arch(target.arch)
        wanted = dict(shape or {})
        fault = wanted.pop("fault", fault)
        inner = {name: dict(wanted.pop(name, {})) for name in ("forward", "backward", "warpgroup", "warpgroup_backward")}
        self._warpgroup = None
        if warpgroups and not fault:
            chosen = config.warpgroup(problem, self._info, inner["warpgroup"])
            if chosen is not None:
                self._warpgroup = WarpgroupForward(chosen, self._info, self._index)
        self._splits = wanted.pop("num_splits", None)
        self._ready: _Ready | None = None
        self._forward, self._blocks = config.forward(problem, self._info, fault, wanted | inner["forward"])
        self._rows = config.rows_config(problem)
        self._backward: config.BackwardConfig | config.WarpgroupBackwardConfig | None = None
        if problem.grads:
            self._backward, self._backward_blocks = None, 1
            if self._warpgroup is not None:
                self._backward = config.warpgroup_backward(problem, self._info, inner["warpgroup_backward"])
            if self._backward is None:
                self._backward, self._backward_blocks = config.backward(problem, self._info, fault, inner["backward"])
            self._backward_rows = config.rows_config(problem, self._backward)

    def describe(self) -> Mapping[str, Any]:
        found: dict[str, Any] = {
            "kernel": "forward_sm80", "block_q": self._forward.block_q, "block_k": self._forward.block_k,
            "warps": self._forward.warps, "num_stages": self._forward.stages,
            "shared_bytes": self._forward.shared_bytes,
        }  # fmt: skip
        if self._warpgroup is not None:
            w = self._warpgroup.config
            found |= {
                "kernel": "forward_sm90", "block_q": w.block_q, "block_k": w.block_k, "warps": 4 * w.warpgroups + 4,
                "num_stages": w.stages, "shared_bytes": w.shared_bytes,
            }  # fmt: skip
        if self._backward is not None:
            found["backward"] = {
                "kernel": f"backward_{'sm90' if isinstance(self._backward, config.WarpgroupBackwardConfig) else 'sm80'}",
                "block_q": self._backward.block_q, "block_k": self._backward.block_k,
                "warps": self._backward.warps, "shared_bytes": self._backward.shared_bytes,
            }  # fmt: skip
        return found

    # ------------------------------------------------------------ launching

    def _launch(
        self, spec: KernelSpec, layout: params.ParamsLayout, values: Mapping[str, Any], grid: tuple[int, int, int],
        shared: int, problem: AttentionProblem,
    ) -> None:  # fmt: skip
        stream = torch.cuda.current_stream(self._index).cuda_stream
        jit.load(spec, self._index, problem).launch(grid, stream, layout.pack(values), shared, problem=problem)

    def _common(self, problem: AttentionProblem, t: Tensors) -> dict[str, Any]:
        return self._sizes(problem) | self._optional(problem, t)

    def _sizes(self, problem: AttentionProblem) -> dict[str, Any]:
        left, right = problem.window
        threshold = problem.dropout_threshold
        return {
            "batch": problem.batch, "seqlen_q": problem.seqlen_q, "seqlen_k": problem.seqlen_k,
            "total_q": problem.total_q, "total_k": problem.total_k,
            "heads_q": problem.num_heads_q, "heads_kv": problem.num_heads_kv,
            "window_left": -1 if left is None else min(left, _UNBOUNDED),
            "window_right": -1 if right is None else min(right, _UNBOUNDED),
            "page_size": problem.page_size or 0, "dropout_threshold": threshold,
            "scale": problem.scale, "softcap": problem.softcap or 0.0,
            "keep_scale": 65536.0 / (65536 - threshold) if threshold < 65536 else 0.0,
        }  # fmt: skip

    def _optional(self, problem: AttentionProblem, t: Tensors) -> dict[str, Any]:
        values: dict[str, Any] = {
            "q_lens": _address(t.q_lens), "kv_lens": _address(t.kv_lens), "new_lens": _address(t.new_lens),
            "cu_q": _address(t.cu_seqlens_q), "cu_k": _address(t.cu_seqlens_k),
            "page_table": _address(t.page_table), "bias": _address(t.bias), "mask": _address(t.mask),
            "alibi": _address(t.alibi_slopes), "block_mask": _address(t.block_mask), "seed": _address(t.dropout_seed),
            "new_tokens": 0 if t.k_new is None else t.k_new.shape[1],
        }  # fmt: skip
        if t.bias is not None:
            values |= dict(zip(("bias_b", "bias_h", "bias_i", "bias_j"), t.bias.stride(), strict=True))
        if t.mask is not None:
            values |= dict(zip(("mask_b", "mask_h", "mask_i", "mask_j"), t.mask.stride(), strict=True))
        if t.block_mask is not None and problem.block_mask is not None:
            values |= dict(zip(("block_b", "block_h", "block_i", "block_j"), t.block_mask.stride(), strict=True))
            values["block_rows"], values["block_columns"] = problem.block_mask
        if t.alibi_slopes is not None:
            values["alibi_b"], values["alibi_h"] = t.alibi_slopes.stride()
        if t.page_table is not None:
            values["page_row"] = t.page_table.stride(0)
            values["seqlen_k"] = t.page_table.shape[1] * (problem.page_size or 0)
        return values

    # ------------------------------------------------------------ forward

    def forward(self, problem: AttentionProblem, t: Tensors) -> None:
        if t.k_new is not None and t.v_new is not None:
            self._append(problem, t)
        ready = self._ready
        if ready is None or ready.problem != problem:
            ready = self._ready = self._prepare(problem, t)
        values = ready.values.copy()
        values["q"], values["k"], values["v"] = t.q.data_ptr(), t.k.data_ptr(), t.v.data_ptr()
        values["out"], values["lse"] = t.out.data_ptr(), t.lse.data_ptr()
        if problem.packed:
            values["q_i"], values["q_h"], _ = t.q.stride()
        else:
            values["q_b"], values["q_i"], values["q_h"], _ = t.q.stride()
        if problem.packed and problem.page_size is None:
            values["k_j"], values["k_h"], _ = t.k.stride()
            values["v_j"], values["v_h"], _ = t.v.stride()
        else:
            values["k_b"], values["k_j"], values["k_h"], _ = t.k.stride()
            values["v_b"], values["v_j"], values["v_h"], _ = t.v.stride()
        if ready.extras:
            values.update(self._extras(problem, t))
        if ready.splits > 1:
            lse = allocate((ready.splits, t.lse.numel()), torch.float32, t.q.device)
            out = allocate((ready.splits, t.lse.numel(), problem.head_dim_v), torch.float32, t.q.device)
            values["partial_out"], values["partial_lse"] = out.data_ptr(), lse.data_ptr()
        if self._warpgroup is not None:
            self._warpgroup.launch(problem, t, values, ready.grid[0])
            return
        stream = torch.cuda.current_stream(self._index).cuda_stream
        kernel = jit.load(ready.spec, self._index, problem)
        kernel.launch(ready.grid, stream, params.FORWARD.filled(values), ready.shared, problem=problem)
        if ready.splits > 1:
            joined = {
                "out": values["out"], "lse": values["lse"], "sinks": _address(t.sinks), "sinks_h": 1,
                "partial_out": out.data_ptr(), "partial_lse": lse.data_ptr(), "q_lens": _address(t.q_lens),
                "cu_q": _address(t.cu_seqlens_q), "batch": problem.batch, "seqlen_q": problem.seqlen_q,
                "total_q": problem.total_q, "heads_q": problem.num_heads_q, "splits": ready.splits,
            }  # fmt: skip
            spec = config.small_kernel("combine", self._rows)
            self._launch(spec, params.COMBINE, joined, (-(-t.lse.numel() // 4), 1, 1), 0, problem)

    def _prepare(self, problem: AttentionProblem, t: Tensors) -> _Ready:
        """All of a forward that its tensors don't decide."""
        c, packed = self._forward, problem.packed
        if self._warpgroup is not None:
            (tiles, units), splits = self._warpgroup.tiles(problem), 1
        else:
            per_tile = c.block_q // problem.group if c.pack else c.block_q
            tiles = problem.total_q // per_tile + problem.batch + 1 if packed else -(-problem.seqlen_q // per_tile)
            units = (problem.num_heads_kv if c.pack else problem.num_heads_q) * (1 if packed else problem.batch)
            splits = self._splits or config.splits(problem, self._info, c.block_q, c.block_k, self._resident(c))
            if splits > 1:
                c = replace(c, split=True)
        right = problem.window.right
        values = {
            **self._sizes(problem), "stats_l": t.lse.numel(), "sinks_h": 1, "tiles": tiles, "splits": splits,
            "section": min(units, config.sections(problem, self._info)) if right is not None else 1,
        }  # fmt: skip
        operands = (t.stats, t.sinks, t.q_lens, t.kv_lens, t.new_lens, t.cu_seqlens_q, t.page_table, t.bias, t.mask)
        more = (t.alibi_slopes, t.block_mask, t.dropout_seed, t.k_new)
        extras = any(x is not None for x in operands + more)
        spec = config.forward_kernel(c, self._blocks)
        template = params.FORWARD.template(values)
        return _Ready(problem, template, (tiles * units, splits, 1), splits, spec, c.shared_bytes, extras)

    def _extras(self, problem: AttentionProblem, t: Tensors) -> dict[str, Any]:
        values = self._optional(problem, t)
        values["stats"], values["sinks"] = _address(t.stats), _address(t.sinks)
        return values

    def _resident(self, c: config.ForwardConfig) -> int:
        """Blocks a multiprocessor holds, by shared memory and threads."""
        return max(1, min(self._info.smem_per_sm // (c.shared_bytes + 1024), 16 // c.warps))

    def _append(self, problem: AttentionProblem, t: Tensors) -> None:
        assert t.k_new is not None and t.v_new is not None
        values: dict[str, Any] = {
            "k": _address(t.k), "v": _address(t.v), "k_new": _address(t.k_new), "v_new": _address(t.v_new),
            "kv_lens": _address(t.kv_lens), "new_lens": _address(t.new_lens), "page_table": _address(t.page_table),
            "batch": problem.batch, "capacity": problem.seqlen_k, "heads_kv": problem.num_heads_kv,
            "new_tokens": t.k_new.shape[1], "page_size": problem.page_size or 0,
        } | _strides("k", t.k, False, "bjh") | _strides("v", t.v, False, "bjh")  # fmt: skip
        values |= _strides("kn", t.k_new, False, "bth") | _strides("vn", t.v_new, False, "bth")
        if t.page_table is not None:
            values["page_row"] = t.page_table.stride(0)
            values["capacity"] = t.page_table.shape[1] * (problem.page_size or 0)
        spec = config.small_kernel("append", self._rows)
        self._launch(spec, params.APPEND, values, (t.k_new.shape[1], problem.batch, 1), 0, problem)

    # ------------------------------------------------------------ backward

    def backward(self, problem: AttentionProblem, t: Tensors) -> None:
        c = self._backward
        assert c is not None and t.dout is not None
        packed, heads = problem.packed, problem.num_heads_q
        row_tiles = problem.total_q // c.block_q + problem.batch + 1 if packed else (
            problem.batch * -(-problem.seqlen_q // c.block_q)
        )  # fmt: skip
        q_tiles = 0 if packed else -(-problem.seqlen_q // c.block_q)
        floats = 4 if c.natural else 2
        slots = heads * row_tiles
        rows = allocate((slots * c.block_q * floats,), torch.float32, t.q.device)
        dq_sum = allocate((slots * c.block_q * c.dq_columns,), torch.float32, t.q.device)
        shared = {
            "rows": rows.data_ptr(), "dq_sum": dq_sum.data_ptr(), "row_tiles": row_tiles,
            "batch": problem.batch, "seqlen_q": problem.seqlen_q, "total_q": problem.total_q, "heads_q": heads,
        }  # fmt: skip
        places = {"q_lens": _address(t.q_lens), "cu_q": _address(t.cu_seqlens_q), "tiles": q_tiles}
        dlse: dict[str, int] = {"dlse": _address(t.dlse)}
        if t.dlse is not None:
            strides = (0, *t.dlse.stride()) if packed else t.dlse.stride()
            dlse |= dict(zip(("dlse_b", "dlse_h", "dlse_i"), strides, strict=True))
        delta = shared | places | dlse | {
            "out": _address(t.out), "dout": _address(t.dout), "lse": _address(t.lse), "stats": _address(t.stats),
            "stats_l": t.lse.numel(),
        } | _strides("out", t.out, packed, "bih") | _strides("do", t.dout, packed, "bih")  # fmt: skip
        spec = config.small_kernel("delta", self._backward_rows)
        self._launch(spec, params.DELTA, delta, (row_tiles, heads, 1), 0, problem)

        k_tiles = problem.total_k // c.block_k + problem.batch + 1 if packed else -(-problem.seqlen_k // c.block_k)
        units = problem.num_heads_kv * (1 if packed else problem.batch)
        values = self._common(problem, t) | {
            "q": _address(t.q), "k": _address(t.k), "v": _address(t.v), "dout": _address(t.dout),
            "dk": _address(t.dk), "dv": _address(t.dv), "dbias": _address(t.dbias),
            "rows": rows.data_ptr(), "dq_sum": dq_sum.data_ptr(), "row_tiles": row_tiles,
            "tiles": q_tiles, "section": 1,
        }  # fmt: skip
        values |= _strides("q", t.q, packed, "bih") | _strides("k", t.k, packed, "bjh")
        values |= _strides("v", t.v, packed, "bjh") | _strides("do", t.dout, packed, "bih")
        for name, tensor in (("dk", t.dk), ("dv", t.dv)):
            if tensor is not None:
                values |= _strides(name, tensor, packed, "bjh")
        if t.dbias is not None:
            values |= dict(zip(("dbias_b", "dbias_h", "dbias_i", "dbias_j"), t.dbias.stride(), strict=True))
        values["key_tiles"] = k_tiles
        values["section"] = min(units, config.sections(problem, self._info)) if c.right and not c.deterministic else 1
        if c.deterministic:
            order = torch.zeros(slots * c.warps + 1, dtype=torch.int32, device=t.q.device)
            values |= {"order": order.data_ptr(), "ticket": order.data_ptr() + 4 * slots * c.warps}
            # Blocks that wait for later ones must run together, whatever a few other streams do.
            slots_at_once = self._info.sm_count * self._backward_blocks
            values["rotate"] = int(4 * -(-problem.seqlen_k // c.block_k) <= slots_at_once)
        if isinstance(c, config.WarpgroupBackwardConfig):
            launch_backward(c, self._index, problem, t, values, k_tiles * units)
        else:
            spec = config.backward_kernel(c, self._backward_blocks)
            self._launch(spec, params.BACKWARD, values, (k_tiles * units, 1, 1), c.shared_bytes, problem)
        if t.dq is not None:
            gradient = shared | places | {"dq": _address(t.dq), "scale": problem.scale}
            gradient |= _strides("dq", t.dq, packed, "bih")
            del gradient["rows"]
            spec = config.small_kernel("query_gradient", self._backward_rows)
            self._launch(spec, params.QUERY_GRADIENT, gradient, (row_tiles, heads, 1), 0, problem)
        if t.dbias is not None and c.deterministic:
            self._bias_gradient(problem, t, values)
        if t.dsinks is not None:
            sinks = shared | places | {
                "dsinks": _address(t.dsinks), "sinks": _address(t.sinks), "lse": _address(t.lse),
                "sinks_h": 1, "dsinks_h": 1,
            }  # fmt: skip
            del sinks["dq_sum"]
            spec = config.small_kernel("sink_gradient", self._backward_rows)
            self._launch(spec, params.SINK_GRADIENT, sinks, (heads, 1, 1), 0, problem)

    def _bias_gradient(self, problem: AttentionProblem, t: Tensors, main: Mapping[str, Any]) -> None:
        assert self._backward is not None and t.dbias is not None
        known = set(params.BIAS_GRADIENT.names)
        values = {name: value for name, value in main.items() if name in known}
        sizes = [1 if stride == 0 else size for size, stride in zip(t.dbias.shape, t.dbias.stride(), strict=True)]
        values |= dict(zip(("size_b", "size_h", "size_i", "size_j"), sizes, strict=True))
        elements = sizes[0] * sizes[1] * sizes[2] * sizes[3]
        spec = config.bias_gradient_kernel(self._backward)
        self._launch(spec, params.BIAS_GRADIENT, values, (-(-elements // 4), 1, 1), 0, problem)
