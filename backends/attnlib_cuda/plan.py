"""The plan of all kernels: workspaces, parameter structs and launches on torch's current stream."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnlib.backend import Target
from attnlib.memory import allocate, allocate_like
from attnlib.problem import AttentionProblem, Tensors

from . import config, device, features, hopper, jit, params
from .pages import PackedPages
from .spec import KernelSpec
from .steps import MappedStep, Step, ticket_of

_UNBOUNDED = 1 << 29


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _put(values: dict[str, Any], tensor: torch.Tensor, names: tuple[str, ...], packed: bool = False) -> None:
    """Address and strides as struct members: names is ("q", "q_b", "q_i", "q_h"); packed has no batch stride."""
    values[names[0]] = tensor.data_ptr()
    values.update(zip(names[2:] if packed else names[1:], tensor.stride(), strict=False))


def _members(name: str, places: str) -> tuple[str, ...]:
    return (name, *(f"{name}_{place}" for place in places))


_Q, _K, _V = _members("q", "bih"), _members("k", "bjh"), _members("v", "bjh")
_OUT, _DLSE = _members("out", "bih"), _members("dlse", "bhi")
_DOUT, _DQ = ("dout", "do_b", "do_i", "do_h"), _members("dq", "bih")
_K_NEW, _V_NEW = ("k_new", "kn_b", "kn_t", "kn_h"), ("v_new", "vn_b", "vn_t", "vn_h")
_DK, _DV, _DBIAS = _members("dk", "bjh"), _members("dv", "bjh"), _members("dbias", "bhij")
_BLOCKS = ("block_mask", "block_b", "block_h", "block_i", "block_j")
_SCORES = (
    ("bias", _members("bias", "bhij")), ("mask", _members("mask", "bhij")), ("block_mask", _BLOCKS),
    ("alibi_slopes", _members("alibi", "bh")),
)  # fmt: skip
_ADDRESSES = (
    ("q_lens", "q_lens"), ("kv_lens", "kv_lens"), ("new_lens", "new_lens"), ("cu_seqlens_q", "cu_q"),
    ("cu_seqlens_k", "cu_k"), ("page_table", "page_table"), ("dropout_seed", "seed"),
)  # fmt: skip


def _stream(index: int) -> int:
    return int(
        torch._C._cuda_getCurrentRawStream(index)
    )  # what torch.cuda.current_stream wraps, in a tenth of the time


_Strides = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # of q, k and v
_FIRST = struct.Struct("<5Q")  # addresses of q, k, v, out and lse, which FORWARD begins with


@dataclass(frozen=True)
class _Forward:
    """A forward prepared for one problem."""

    problem: AttentionProblem
    main: Step
    combine: Step | None
    splits: int
    extras: bool  # operands beside q, k and v
    tails: dict[_Strides, bytes]  # of the struct, behind the addresses of q, k, v, out and lse; for plain operands


def _tail(ready: _Forward, strides: _Strides) -> bytes:
    tail = ready.tails.get(strides)
    if tail is None:
        values = ready.main.values.copy()
        for names, own in zip((_Q, _K, _V), strides, strict=True):
            values.update(zip(names[2:] if ready.problem.packed else names[1:], own, strict=False))
        if len(ready.tails) >= 64:
            ready.tails.clear()
        tail = ready.tails[strides] = params.FORWARD.filled(values)[_FIRST.size :]
    return tail


@dataclass(frozen=True)
class _Backward:
    """A backward prepared for one problem; sizes of the workspaces are in elements."""

    problem: AttentionProblem
    delta: Step
    main: Step
    dq: Step
    dbias: Step | None
    dsinks: Step | None
    rows: int
    dq_sum: int
    order: int
    whole_heads: bool  # the kernel rounds dq itself


class CudaPlan:
    """One signature and size class on one device."""

    def __init__(
        self, problem: AttentionProblem, target: Target, shape: Mapping[str, Any] | None = None, fault: str = "",
        wgmma: bool = False,
    ) -> None:  # fmt: skip
        self._index = target.index or 0
        self._info = device.info(self._index) if target.present else device.for_arch(target.arch)
        wanted = dict(shape or {})
        fault = wanted.pop("fault", fault)
        names = ("forward", "backward", "wgmma_forward", "wgmma_backward")
        inner = {name: dict(wanted.pop(name, {})) for name in names}
        self._splits = wanted.pop("num_splits", None)
        self._whole: bool | None = wanted.pop("whole_heads", None)
        self._forward_steps: _Forward | None = None
        self._backward_steps: _Backward | None = None
        self._forward, self._blocks = config.forward(problem, self._info, fault, wanted | inner["forward"])
        self._wide = hopper.forward(problem, self._info, fault, inner["wgmma_forward"]) if wgmma else None
        self._rows = config.rows_config(problem)
        self._backward: config.BackwardConfig | hopper.BackwardConfig | None = None
        if problem.grads:
            self._backward_blocks = 1
            if wgmma:
                self._backward = hopper.backward(problem, self._info, fault, inner["wgmma_backward"], self._whole)
            if self._backward is None:
                self._backward, self._backward_blocks = config.backward(problem, self._info, fault, inner["backward"])
            elif self._whole and isinstance(self._backward, hopper.BackwardConfig):
                hopper.whole_heads(problem, self._info, self._backward, True)
            self._backward_rows = config.rows_config(problem, self._backward)

    def describe(self) -> Mapping[str, Any]:
        c = self._wide or self._forward
        found: dict[str, Any] = {
            "kernel": c.entry, "block_q": c.block_q, "block_k": c.block_k, "warps": c.warps, "num_stages": c.stages,
            "shared_bytes": c.shared_bytes,
        }  # fmt: skip
        if (b := self._backward) is not None:
            found["backward"] = {
                "kernel": b.entry, "block_q": b.block_q, "block_k": b.block_k, "warps": b.warps,
                "shared_bytes": b.shared_bytes,
            }  # fmt: skip
            if isinstance(b, hopper.BackwardConfig):
                found["backward"] |= {"warps": b.threads // 32, "form": b.form}
        return found

    # ------------------------------------------------------------ launching

    def _step(
        self, problem: AttentionProblem, spec: KernelSpec, layout: params.ParamsLayout, values: Mapping[str, Any],
        grid: tuple[int, int, int], shared: int = 0,
    ) -> Step:  # fmt: skip
        return Step(jit.load(spec, self._index, problem), layout, layout.template(values), grid, shared)

    def _sizes(self, problem: AttentionProblem) -> dict[str, Any]:
        left, right = problem.window
        threshold = problem.dropout_threshold
        block_rows, block_columns = problem.block_mask or (0, 0)
        return {
            "block_rows": block_rows, "block_columns": block_columns,
            "batch": problem.batch, "seqlen_q": problem.seqlen_q, "seqlen_k": problem.seqlen_k,
            "total_q": problem.total_q, "total_k": problem.total_k,
            "heads_q": problem.num_heads_q, "heads_kv": problem.num_heads_kv,
            "window_left": -1 if left is None else min(left, _UNBOUNDED),
            "window_right": -1 if right is None else min(right, _UNBOUNDED),
            "page_size": problem.page_size or 0, "dropout_threshold": threshold,
            "scale": problem.scale, "softcap": problem.softcap or 0.0,
            "keep_scale": 65536.0 / (65536 - threshold) if threshold < 65536 else 0.0,
        }  # fmt: skip

    def _optional(self, values: dict[str, Any], problem: AttentionProblem, t: Tensors) -> None:
        fields = t.__dict__
        for field, name in _ADDRESSES:
            if (tensor := fields[field]) is not None:
                values[name] = tensor.data_ptr()
        for field, names in _SCORES:
            if (tensor := fields[field]) is not None:
                _put(values, tensor, names)
        if t.page_table is not None:
            values["page_row"] = t.page_table.stride(0)
            if t.bias is None and t.mask is None and t.block_mask is None:  # they have max_seqlen_k columns
                values["seqlen_k"] = t.page_table.shape[1] * (problem.page_size or 0)

    # ------------------------------------------------------------ forward

    def forward(self, problem: AttentionProblem, t: Tensors) -> None:
        if t.k_new is not None and t.v_new is not None:
            self._append(problem, t)
        ready = self._forward_steps
        if ready is None or (ready.problem is not problem and ready.problem != problem):
            ready = self._forward_steps = self._prepare_forward(problem, t)
        step, stream = ready.main, _stream(self._index)
        if not ready.extras and ready.combine is None:
            q, k, v = t.q, t.k, t.v
            addresses = _FIRST.pack(q.data_ptr(), k.data_ptr(), v.data_ptr(), t.out.data_ptr(), t.lse.data_ptr())
            step.run(addresses + _tail(ready, (q.stride(), k.stride(), v.stride())), stream, problem, t)
            return
        values = step.values.copy()
        _put(values, t.q, _Q, problem.packed)
        packed_keys = problem.packed and problem.page_size is None
        _put(values, t.k, _K, packed_keys)
        _put(values, t.v, _V, packed_keys)
        values["out"], values["lse"] = t.out.data_ptr(), t.lse.data_ptr()
        if ready.extras:
            self._optional(values, problem, t)
            values["stats"], values["sinks"] = _address(t.stats), _address(t.sinks)
            values["new_tokens"] = 0 if t.k_new is None else t.k_new.shape[1]
        if ready.combine is None:
            step.run(step.layout.filled(values), stream, problem, t)
            return
        lse = allocate((ready.splits, t.lse.numel()), torch.float32, t.q.device)
        out = allocate((ready.splits, t.lse.numel(), problem.head_dim_v), torch.float32, t.q.device)
        values["partial_out"], values["partial_lse"] = out.data_ptr(), lse.data_ptr()
        step.run(step.layout.filled(values), stream, problem, t)
        joined = ready.combine.values.copy()
        for name in ("out", "lse", "sinks", "partial_out", "partial_lse", "q_lens", "cu_q"):
            joined[name] = values[name]
        ready.combine.launch(joined, stream, problem)

    def direct(self, problem: AttentionProblem, strides: tuple[tuple[int, ...], ...]) -> Any:
        """forward() of q, k, v, out and lse with these strides, as a capsule that core runs without Python.

        None if it is more than one launch, or one with tensor maps.
        """
        ready = self._forward_steps
        if ready is None or (ready.problem is not problem and ready.problem != problem):
            return None
        step = ready.main
        if ready.extras or ready.combine is not None or isinstance(step, MappedStep):
            return None
        tail = _tail(ready, (strides[0], strides[1], strides[2]))
        return step.kernel.direct(step.grid, bytes(_FIRST.size) + tail, step.shared, range(0, _FIRST.size, 8))

    def _prepare_forward(self, problem: AttentionProblem, t: Tensors) -> _Forward:
        """All of a forward that its tensors don't decide."""
        if self._wide is not None:
            return self._prepare_wide(problem, t, self._wide)
        c, packed, rows = self._forward, problem.packed, t.lse.numel()
        per_tile = c.block_q // problem.group if c.pack else c.block_q
        tiles = problem.total_q // per_tile + problem.batch + 1 if packed else -(-problem.seqlen_q // per_tile)
        units = (problem.num_heads_kv if c.pack else problem.num_heads_q) * (1 if packed else problem.batch)
        splits = self._splits or config.splits(problem, self._info, c.block_q, c.block_k, self._resident(c))
        if splits > 1:
            c = replace(c, split=True)
        right = problem.window.right
        values = {
            **self._sizes(problem), "stats_l": rows, "sinks_h": 1, "tiles": tiles, "splits": splits,
            "section": min(units, features.sections(problem, self._info)) if right is not None else 1,
        }  # fmt: skip
        spec = config.forward_kernel(c, self._blocks)
        main = self._step(problem, spec, params.FORWARD, values, (tiles * units, splits, 1), c.shared_bytes)
        combine = None
        if splits > 1:
            spec = config.small_kernel("combine", self._rows)
            layout = params.COMBINE
            combine = self._step(problem, spec, layout, layout.known(values), (-(-rows // 4), 1, 1))
        return _Forward(problem, main, combine, splits, self._extras(t), {})

    def _prepare_wide(self, problem: AttentionProblem, t: Tensors, c: hopper.ForwardConfig) -> _Forward:
        tiles, units = -(-problem.seqlen_q // c.block_q), problem.num_heads_q * problem.batch
        if problem.packed:
            tiles, units = problem.total_q // c.block_q + problem.batch + 1, problem.num_heads_q
        edge = problem.window.right is not None
        values = {
            **self._sizes(problem), "sinks_h": 1, "tiles": tiles, "splits": 1,
            "section": min(units, features.sections(problem, self._info)) if edge else 1,
        }  # fmt: skip
        kernel = jit.load(hopper.forward_kernel(c), self._index, problem)
        boxes = (("q", c.block_q), ("k", c.block_k), ("v", c.block_k), ("out", 16))
        grid = (min(self._info.sm_count, tiles * units), 1, 1)
        template = params.FORWARD.template(values)
        size, ticket = params.FORWARD_MAPS_SIZE, self._index if c.dynamic else None
        main = MappedStep(kernel, params.FORWARD, template, grid, c.shared_bytes, boxes, size, ticket)
        return _Forward(problem, main, None, 1, self._extras(t), {})

    def _extras(self, t: Tensors) -> bool:
        operands = (t.stats, t.sinks, t.q_lens, t.kv_lens, t.new_lens, t.cu_seqlens_q, t.page_table, t.bias, t.mask)
        more = (t.alibi_slopes, t.block_mask, t.dropout_seed)
        return any(x is not None for x in operands + more)

    def _resident(self, c: config.ForwardConfig) -> int:
        """Blocks a multiprocessor holds, by shared memory and threads."""
        return max(1, min(self._info.smem_per_sm // (c.shared_bytes + 1024), 16 // c.warps))

    def _append(self, problem: AttentionProblem, t: Tensors) -> None:
        assert t.k_new is not None and t.v_new is not None
        values: dict[str, Any] = {
            "kv_lens": _address(t.kv_lens), "new_lens": _address(t.new_lens), "page_table": _address(t.page_table),
            "batch": problem.batch, "capacity": problem.seqlen_k, "heads_kv": problem.num_heads_kv,
            "new_tokens": t.k_new.shape[1], "page_size": problem.page_size or 0,
        }  # fmt: skip
        for tensor, names in ((t.k, _K), (t.v, _V), (t.k_new, _K_NEW), (t.v_new, _V_NEW)):
            _put(values, tensor, names)
        if t.page_table is not None:
            values["page_row"] = t.page_table.stride(0)
            values["capacity"] = t.page_table.shape[1] * (problem.page_size or 0)
        spec = config.small_kernel("append", self._rows)
        step = self._step(problem, spec, params.APPEND, values, (t.k_new.shape[1], problem.batch, 1))
        step.launch(step.values, _stream(self._index), problem)

    # ------------------------------------------------------------ backward

    def backward(self, problem: AttentionProblem, t: Tensors) -> None:
        if problem.page_size is None:
            self._backward_dense(problem, t)
        else:
            laid_out = PackedPages(problem, t)
            self._backward_dense(laid_out.problem, laid_out.tensors)
            laid_out.store(t)

    def _backward_dense(self, problem: AttentionProblem, t: Tensors) -> None:
        ready = self._backward_steps
        if ready is None or (ready.problem is not problem and ready.problem != problem):
            ready = self._backward_steps = self._prepare_backward(problem, t)
        assert t.dout is not None
        stream, packed = _stream(self._index), problem.packed
        rows = allocate((ready.rows,), torch.float32, t.q.device)
        dq_sum = allocate((ready.dq_sum,), torch.float32, t.q.device)
        counters = None  # held until the launch, and zero before the kernel ahead of it begins
        if ready.order:
            counters = torch.zeros(ready.order, dtype=torch.int32, device=t.q.device)
        elif isinstance(ready.main, MappedStep):
            counters = ticket_of(self._index, stream)
        work = {
            "rows": rows.data_ptr(), "dq_sum": dq_sum.data_ptr(), "lse": t.lse.data_ptr(),
            "q_lens": _address(t.q_lens), "cu_q": _address(t.cu_seqlens_q),
        }  # fmt: skip

        delta = ready.delta.values | work
        if ready.whole_heads:
            delta["dq_sum"] = 0  # nothing to zero
        delta["stats"] = _address(t.stats)
        _put(delta, t.out, _OUT, packed)
        _put(delta, t.dout, _DOUT, packed)
        if t.dlse is not None:
            _put(delta, t.dlse, _DLSE, packed)
        ready.delta.launch(delta, stream, problem)

        main = ready.main.values.copy()
        self._optional(main, problem, t)
        main["rows"], main["dq_sum"] = work["rows"], work["dq_sum"]
        for tensor, names in ((t.q, _Q), (t.k, _K), (t.v, _V), (t.dout, _DOUT), (t.dk, _DK), (t.dv, _DV)):
            if tensor is not None:
                _put(main, tensor, names, packed)
        if t.dbias is not None:
            _put(main, t.dbias, _DBIAS)
        if counters is not None:
            main["order"] = counters.data_ptr()  # the ticket is the last
            main["ticket"] = main["order"] + 4 * (counters.numel() - 1)
        members = ready.main.layout.filled(main)
        if isinstance(ready.main, MappedStep):
            tiles: dict[str, Any] = {}
            if ready.whole_heads:
                dq = allocate_like(t.q) if t.dq is None else t.dq  # held until the launch
                _put(tiles, dq, _DQ, packed)
            members = params.with_tiles(members, tiles)
        ready.main.run(members, stream, problem, t)

        if t.dq is not None and not ready.whole_heads:
            last = ready.dq.values.copy()
            last["dq_sum"], last["q_lens"], last["cu_q"] = work["dq_sum"], work["q_lens"], work["cu_q"]
            _put(last, t.dq, _DQ, packed)
            ready.dq.launch(last, stream, problem)
        if ready.dbias is not None and t.dbias is not None:
            sizes = [1 if stride == 0 else size for size, stride in zip(t.dbias.shape, t.dbias.stride(), strict=True)]
            dbias = {name: main.get(name, value) for name, value in ready.dbias.values.items()}
            dbias.update(zip(("size_b", "size_h", "size_i", "size_j"), sizes, strict=True))
            ready.dbias.launch(dbias, stream, problem, (-(-math.prod(sizes) // 4), 1, 1))
        if ready.dsinks is not None:
            dsinks = ready.dsinks.values.copy()
            for name in ("rows", "lse", "q_lens", "cu_q"):
                dsinks[name] = work[name]
            dsinks["dsinks"], dsinks["sinks"] = _address(t.dsinks), _address(t.sinks)
            ready.dsinks.launch(dsinks, stream, problem)

    def _backward_section(self, problem: AttentionProblem) -> int:
        """Key/value heads whose tiles are interleaved."""
        if isinstance(self._backward, hopper.BackwardConfig):
            return hopper.section(self._backward, problem.seqlen_k, self._info)
        return features.sections(problem, self._info)

    def _prepare_backward(self, problem: AttentionProblem, t: Tensors) -> _Backward:
        """All of a backward that its tensors don't decide."""
        c = self._backward
        assert c is not None
        packed, heads = problem.packed, problem.num_heads_q
        q_tiles, k_tiles = -(-problem.seqlen_q // c.block_q), -(-problem.seqlen_k // c.block_k)
        row_tiles = problem.batch * q_tiles
        if packed:  # sequence b starts at tile cu[b] / block + b
            row_tiles = problem.total_q // c.block_q + problem.batch + 1
            k_tiles = problem.total_k // c.block_k + problem.batch + 1
        units = problem.num_heads_kv * (1 if packed else problem.batch)
        slots = heads * row_tiles
        persistent = isinstance(c, hopper.BackwardConfig) and c.persistent
        ahead = 4 * -(-problem.seqlen_k // c.block_k) <= self._info.sm_count * self._backward_blocks
        values = {
            **self._sizes(problem), "row_tiles": row_tiles, "tiles": 0 if packed else q_tiles, "key_tiles": k_tiles,
            "section": min(units, self._backward_section(problem)) if c.right and not c.deterministic else 1,
            # Blocks that wait for later ones must run together, whatever a few other streams do.
            "rotate": int(c.deterministic and ahead and not persistent),
        }  # fmt: skip
        more = {**values, "stats_l": t.lse.numel(), "sinks_h": 1, "dsinks_h": 1}

        def small(name: str, layout: params.ParamsLayout, grid: tuple[int, int, int]) -> Step:
            spec = config.small_kernel(name, self._backward_rows)
            return self._step(problem, spec, layout, layout.known(more), grid)

        dbias = None
        if t.dbias is not None and c.deterministic and isinstance(c, config.BackwardConfig):
            layout, spec = params.BIAS_GRADIENT, config.bias_gradient_kernel(c)
            dbias = self._step(problem, spec, layout, layout.known(values), (0, 1, 1))  # a warp an element: see there
        grid = (k_tiles * units, 1, 1)
        whole_heads = isinstance(c, hopper.BackwardConfig) and hopper.whole_heads(problem, self._info, c, self._whole)
        if whole_heads:
            values["section"], grid = 1, (units, 1, 1)
        if problem.deterministic and not (c.deterministic or whole_heads):
            raise RuntimeError(f"cuda: a plan without a fixed order was to serve {problem}")
        if isinstance(c, hopper.BackwardConfig):
            if persistent:  # blocks draw one tile after the other
                grid = (min(self._info.sm_count, grid[0]), 1, 1)
            kernel = jit.load(hopper.backward_kernel(replace(c, whole=whole_heads)), self._index, problem)
            boxes = (("q", c.block_q), ("k", c.block_k), ("v", c.block_k), ("dout", c.block_q))
            layout, size = params.BACKWARD, params.BACKWARD_TILES_SIZE
            template = layout.template(values)
            main: Step = MappedStep(kernel, layout, template, grid, c.shared_bytes, boxes, size, early=True)
        else:
            spec = config.backward_kernel(c, self._backward_blocks)
            main = self._step(problem, spec, params.BACKWARD, values, grid, c.shared_bytes)
        dq = small("query_gradient", params.QUERY_GRADIENT, (row_tiles, heads, 1))
        return _Backward(
            problem,
            delta=small("delta", params.DELTA, (row_tiles, heads, 1)),
            main=main,
            dq=replace(dq, early=main.early),
            dbias=dbias,
            dsinks=small("sink_gradient", params.SINK_GRADIENT, (heads, 1, 1)) if t.dsinks is not None else None,
            rows=slots * c.block_q * (4 if c.natural else 2),
            dq_sum=(grid[0] * problem.group * q_tiles if whole_heads else slots) * c.block_q * c.dq_columns,
            order=slots * c.warps + 1 if c.deterministic else 0,
            whole_heads=whole_heads,
        )
