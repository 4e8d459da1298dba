"""The plan: workspaces, arguments and launches on torch's current stream."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from attnlib import settings
from attnlib.backend import Target
from attnlib.lru import LRU
from attnlib.memory import allocate
from attnlib.problem import AttentionProblem, Tensors

from . import config, launch, tune
from .archs import Arch, arch_of, interpreted
from .config import Features, ForwardConfig, GradientConfig, Launch
from .launch import Spec

_LOG2E = 1.4426950408889634
_UNBOUNDED = 1 << 29
_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
_MAPS = {"K_MAP": "k", "V_MAP": "v", "Q_MAP": "q", "DOUT_MAP": "dout"}  # operands for the copy engine
_FIELDS = _MAPS | {
    "BLOCKS": "block_mask", "ALIBI": "alibi_slopes", "CU_Q": "cu_seqlens_q", "CU_K": "cu_seqlens_k",
    "TABLE": "page_table", "SEED": "dropout_seed",
}  # fields of Tensors that arguments are, where the names differ  # fmt: skip
_ONCE = "a form that was met once"
Shapes = Mapping[str, Any]
Run = Callable[[Spec, str, int, tuple[int, int], Mapping[str, Any], AttentionProblem], None]


def _strides(prefix: str, tensor: torch.Tensor, packed: bool) -> dict[str, int]:
    """Strides of [batch, rows, heads, dim], or of [rows, heads, dim]."""
    strides = (0, *tensor.stride()) if packed else tensor.stride()
    return {f"{prefix}_b": strides[0], f"{prefix}_i": strides[1], f"{prefix}_h": strides[2]}


def _map_strides(prefix: str, tensor: torch.Tensor | None) -> dict[str, int]:
    strides = (0, 0, 0, 0) if tensor is None else tensor.stride()
    return {f"{prefix}_{name}": stride for name, stride in zip("bhij", strides, strict=False)}


def _reach(tensor: torch.Tensor) -> int:
    """Bytes from the first element of a view to its end."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 0)
    return (last + 1) * tensor.element_size()


def _mappable(x: torch.Tensor) -> bool:
    """Whether the copy engine can fetch tiles of an operand: aligned, and nothing of it repeats in memory."""
    strides = [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]
    size = x.element_size()
    apart = all(stride > 0 and (stride == 1 or stride * size % 16 == 0) for stride in strides)
    return apart and x.stride(-1) == 1 and x.numel() > 0 and x.data_ptr() % 16 == 0


class _Kernels(NamedTuple):
    """Configurations of the kernels that work on tiles of scores; gradients by name."""

    forward: tuple[ForwardConfig, Launch]
    gradients: dict[str, tuple[GradientConfig, Launch]]


def _kernels(problem: AttentionProblem, arch: Arch, forward: Shapes, inner: Mapping[str, Shapes]) -> _Kernels:
    wanted = {name: own for name, own in inner.items() if problem.grads or own}
    gradients = {name: config.gradient(problem, arch, name, own) for name, own in wanted.items()}
    return _Kernels(config.forward(problem, arch, forward), gradients)


class TritonPlan:
    """One signature and size class on one device."""

    def __init__(
        self, problem: AttentionProblem, target: Target, shape: Shapes | None = None, run: Run = launch.run
    ) -> None:
        self._call, self._target = run, target
        self._may_time = target.present and not shape and run is launch.run and not interpreted()
        self._index = target.index or 0
        self._arch = arch_of(target)
        wanted = dict(shape or {})
        inner = {name: dict(wanted.pop(name, {})) for name in config.GRADIENTS}
        self._splits = wanted.pop("num_splits", None)
        most = 1 if problem.needs_stats else 128  # parts leave no statistics for the backward of a bias
        if self._splits is not None and not (isinstance(self._splits, int) and 1 <= self._splits <= most):
            raise ValueError(f"num_splits: needs 1 to {most}, got {self._splits!r}")
        self._kernels = _kernels(problem, self._arch, wanted, inner)
        self._unmapped = self._kernels  # for operands that the copy engine can't fetch
        if any(c.maps for c, _ in (self._kernels.forward, *self._kernels.gradients.values())):
            inner = {name: own | {"maps": False} for name, own in inner.items()}
            self._unmapped = _kernels(problem, self._arch, wanted | {"maps": False}, inner)
        self._element = _NAMES[problem.dtype]
        self._forms: LRU[_Form | str] = LRU(256)

    def describe(self, problem: AttentionProblem) -> Mapping[str, Any]:
        """Tiles of the kernels, and where those are from: the table, the clock, or the table until they are timed."""
        from .compile import operands

        def told(kernel: str) -> dict[str, Any]:
            chosen, origin = self._table(kernel, True), "table"
            if self._timed(problem):
                t = next(operands(problem))
                call = _Call(problem, t, self._kernels.forward[0].natural)
                chosen, origin = tune.tell(self._asked(kernel, call, t), chosen)
            c, with_ = chosen
            sizes = {"block_m": c.block_m, "block_n": c.block_n, "warps": with_.warps, "stages": with_.stages}
            return {**sizes, "tiles": origin}

        gradients = {name: told(name) for name in self._kernels.gradients if name != "bias_gradient"}
        return {"kernel": "forward", **told("forward"), **gradients}

    # ------------------------------------------------------------ launching

    def _spec(self, kernel: str, c: Features, with_: Launch, call: _Call, **types: str) -> Spec:
        return Spec(
            kernel, c, with_, tuple(sorted(types.items())), self._element, call.aligned, call.wide, call.small
        )  # fmt: skip

    def _table(self, kernel: str, mappable: bool) -> tuple[Any, Launch]:
        kernels = self._kernels if mappable else self._unmapped
        return kernels.forward if kernel == "forward" else kernels.gradients[kernel]

    def _timed(self, problem: AttentionProblem) -> bool:
        """Whether the clock decides: not where the last bits, which tiles decide, are to be the same in every call."""
        return self._may_time and settings.current().autotune and not problem.deterministic

    def _asked(self, kernel: str, call: _Call, t: Tensors) -> tune.Asked:
        maps = call.mappable and config.mappable(call.problem, self._arch)
        stores = kernel == "query_gradient" and t.dbias is not None and not _is_shared(t.dbias)
        memory = maps, call.aligned, call.wide, call.small
        return tune.Asked(kernel, call.problem, self._arch, self._index, *memory, stores)

    def _fitting(self, kernel: str, call: _Call, t: Tensors) -> tuple[Any, Launch]:
        """A kernel's configuration: of the table, or the fastest where that was asked for."""
        table = self._table(kernel, call.mappable)
        if not self._timed(call.problem):
            return table
        found = tune.choose(
            self._asked(kernel, call, t), table, functools.partial(self._trial, kernel, call.problem, t)
        )
        call.settled = call.settled and found is not None
        return found or table

    def _trial(self, kernel: str, problem: AttentionProblem, t: Tensors) -> tune.Trial:
        """How a shape is tried: as a plan of its own, on the operands of a call, into results that all shapes share."""
        own = dataclasses.replace(t, dq=None, dk=None, dv=None, dbias=None, dsinks=None)
        for name in tune.RESULTS[kernel]:
            if (x := getattr(t, name)) is not None and not (name == "dbias" and _is_shared(x)):
                setattr(own, name, torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device))

        def trial(shape: config.Shape) -> Callable[[], None]:
            forward = kernel == "forward"
            plan = TritonPlan(problem, self._target, shape._asdict() if forward else {kernel: shape._asdict()})
            return functools.partial(plan.forward if forward else plan.backward, problem, own)

        return trial

    def _run(self, call: _Call, spec: Spec, programs: int, values: Mapping[str, Any], parts: int = 1) -> None:
        grid = (programs, parts)
        self._call(spec, self._arch.name, self._index, grid, values, call.problem)
        call.launches.append((spec, grid, values))

    def _again(self, problem: AttentionProblem, t: Tensors, backward: bool) -> bool:
        """Launch what the last call of this form did, if there was one."""
        form = self._forms.get(_form_key(problem, t, backward))
        if not isinstance(form, _Form):
            return False
        form.launch(t)
        return True

    def _keep(self, call: _Call, t: Tensors, backward: bool) -> None:
        """Have _again() do what was just done."""
        if self._call is not launch.run or not call.settled:
            return  # nothing was launched, or the next call may have other tiles
        key = _form_key(call.problem, t, backward)
        if self._forms.get(key) is None:
            self._forms.put(key, _ONCE)  # most forms of a decoding loop never return
            return
        form = _Form.of(call, t, self._arch.name, self._index)
        if form is not None:
            self._forms.put(key, form)

    def _section(self, problem: AttentionProblem, units: int, group: int = 1) -> int:
        if problem.window.right is None:
            return 1
        return max(1, min(units, config.sections(problem, self._arch) // group))

    # ------------------------------------------------------------ forward

    def forward(self, problem: AttentionProblem, t: Tensors) -> None:
        if self._again(problem, t, False):
            return
        call = _Call(problem, t, self._kernels.forward[0].natural)
        c, with_ = self._fitting("forward", call, t)
        if t.k_new is not None and t.v_new is not None:
            self._append(problem, t, call)
        per_tile = c.block_m // problem.group if c.pack else c.block_m
        tiles, units = _tiles(problem, per_tile, problem.num_heads_kv if c.pack else problem.num_heads_q)
        parts = self._splits or config.splits(problem, self._arch, c)
        values = call.common | {
            "OUT": t.out, "LSE": t.lse, "STATS": t.stats, "SINKS": t.sinks, "PARTIAL": None, "PARTIAL_ROWS": None,
            "units": units, "tiles": tiles, "section": self._section(problem, units),
            "new_tokens": 0 if t.k_new is None else t.k_new.shape[1],
        }  # fmt: skip
        if c.raw:
            c = dataclasses.replace(c, flip=values["factor"] < 0)
            values["factor"] = abs(values["factor"]) or 1e-30  # is multiplied by -inf
        if parts > 1:
            c = dataclasses.replace(c, split=True, sinks=False)
            lines = t.lse.numel()
            values["PARTIAL"] = call.allocate((parts, lines, problem.head_dim_v))
            values["PARTIAL_ROWS"] = call.allocate((2, parts, lines))
        types = {"BIAS": _NAMES[problem.bias or torch.float32], "SINKS": _NAMES[problem.sinks or torch.float32]}
        self._run(call, self._spec("forward", c, with_, call, **types), tiles * units, values, parts)
        if parts > 1:
            small, its = config.small(problem, self._arch, "combine")
            spec = self._spec("combine", small, its, call, SINKS=types["SINKS"])
            self._run(call, spec, -(-t.lse.numel() // small.rows), values | {"parts": parts})
        self._keep(call, t, False)

    def _append(self, problem: AttentionProblem, t: Tensors, call: _Call) -> None:
        assert t.k_new is not None and t.v_new is not None
        small, with_ = config.small(problem, self._arch, "append")
        count = t.k_new.shape[1]
        blocks = -(-count // small.rows)
        values = call.common | _strides("kn", t.k_new, False) | _strides("vn", t.v_new, False) | {
            "K_NEW": t.k_new, "V_NEW": t.v_new, "new_tokens": count, "capacity": call.common["seqlen_k"],
            "heads_kv": problem.num_heads_kv, "blocks": blocks,
        }  # fmt: skip
        spec = self._spec("append", small, with_, call)
        self._run(call, spec, problem.batch * problem.num_heads_kv * blocks, values)

    # ------------------------------------------------------------ backward

    def backward(self, problem: AttentionProblem, t: Tensors) -> None:
        assert t.dout is not None
        if self._again(problem, t, True):
            return
        call = _Call(problem, t, self._kernels.forward[0].natural)
        lines = problem.total_q if problem.packed else -(-problem.seqlen_q // 16) * 16
        figures_all = -(-lines * problem.num_heads_q * (1 if problem.packed else problem.batch) // 16) * 16
        figures = call.allocate((3 if self._kernels.forward[0].statistics else 2, figures_all))
        small, with_ = config.small(problem, self._arch, "rows", t.dlse is not None)
        tiles, units = _tiles(problem, small.rows, problem.num_heads_q)
        values = call.common | _strides("do", t.dout, problem.packed) | {
            "OUT": t.out, "DOUT": t.dout, "LSE": t.lse, "STATS": t.stats, "DLSE": t.dlse, "ROWS": figures,
            "scale": problem.scale, "DBIAS": None, "DQ": None, "lines": lines, "figures_all": figures_all,
        }  # fmt: skip
        sized = {"units": units, "tiles": tiles}
        self._run(call, self._spec("rows", small, with_, call), tiles * units, values | sized)
        shared = t.dbias is not None and _is_shared(t.dbias)
        if t.dq is not None or (t.dbias is not None and not shared):
            self._query_gradient(problem, t, call, values, t.dbias if not shared else None)
        if t.dk is not None or t.dv is not None:
            self._key_gradient(problem, t, call, values)
        if t.dbias is not None and shared:
            self._bias_gradient(problem, t, call, values)
        if t.dsinks is not None:
            small, with_ = config.small(problem, self._arch, "sink_gradient")
            spec = self._spec("sink_gradient", small, with_, call, SINKS=_NAMES[problem.sinks or torch.float32])
            values |= {"DSINKS": t.dsinks, "SINKS": t.sinks}
            self._run(call, spec, problem.num_heads_q, values)
        if not (t.dbias is not None and shared):  # what _bias_gradient adds up behind its kernel is no launch
            self._keep(call, t, True)

    def _query_gradient(
        self, problem: AttentionProblem, t: Tensors, call: _Call, values: dict[str, Any], dbias: torch.Tensor | None
    ) -> None:
        c, with_ = self._fitting("query_gradient", call, t)
        c = dataclasses.replace(c, query=t.dq is not None, bias_store=dbias is not None)
        tiles, units = _tiles(problem, c.block_m, problem.num_heads_q)
        own = values | _map_strides("dbias", dbias) | _strides("dq", t.q if t.dq is None else t.dq, problem.packed)
        own |= {"DQ": t.dq, "DBIAS": dbias, "units": units, "tiles": tiles, "section": self._section(problem, units)}
        spec = self._spec("query_gradient", c, with_, call, BIAS=_NAMES[problem.bias or torch.float32])
        self._run(call, spec, tiles * units, own)

    def _key_gradient(self, problem: AttentionProblem, t: Tensors, call: _Call, values: dict[str, Any]) -> None:
        c, with_ = self._fitting("key_gradient", call, t)
        c = dataclasses.replace(c, keys=t.dk is not None, values=t.dv is not None)
        paged = problem.page_size is not None
        targets = {"dk": t.dk, "dv": t.dv}
        if paged:  # a row a token of every sequence, summed into pages behind
            capacity = values["seqlen_k"]
            shape = (problem.batch, capacity, problem.num_heads_kv)
            targets = {name: None if x is None else call.allocate((*shape, x.shape[-1])) for name, x in targets.items()}
            tiles, units = -(-capacity // c.block_n), problem.num_heads_kv * problem.batch
        elif problem.packed:
            tiles, units = problem.total_k // c.block_n + problem.batch + 1, problem.num_heads_kv
        else:
            tiles, units = -(-problem.seqlen_k // c.block_n), problem.num_heads_kv * problem.batch
        own = values | {"units": units, "tiles": tiles, "section": self._section(problem, units, problem.group)}
        types = {"BIAS": _NAMES[problem.bias or torch.float32]}
        for name, x in targets.items():
            own |= {name.upper(): x} | _strides(name, t.q if x is None else x, problem.packed and not paged)
            types[name.upper()] = "fp32" if paged else self._element
        self._run(call, self._spec("key_gradient", c, with_, call, **types), tiles * units, own)
        if paged:
            for name, x in targets.items():
                if x is not None:
                    self._page_gradient(problem, t, call, x, getattr(t, name))

    def _page_gradient(
        self, problem: AttentionProblem, t: Tensors, call: _Call, source: torch.Tensor, target: torch.Tensor
    ) -> None:
        small, with_ = config.small(problem, self._arch, "page_gradient")
        pages, page_size, heads, dim = target.shape
        values = call.common | _strides("s", source, False) | _strides("t", target, False) | {
            "SOURCE": source, "TARGET": target, "pages": pages, "capacity": source.shape[1], "heads_kv": heads,
        }  # fmt: skip
        first, rest = config.chunks(dim)
        small = dataclasses.replace(small, head_dim_v=dim, v_first=first, v_rest=rest)
        spec = self._spec("page_gradient", small, with_, call, TARGET=self._element)
        self._run(call, spec, pages * heads * -(-page_size // small.rows), values)

    def _bias_gradient(self, problem: AttentionProblem, t: Tensors, call: _Call, values: dict[str, Any]) -> None:
        assert t.dbias is not None
        c, with_ = self._kernels.gradients["bias_gradient"]
        sizes = [1 if stride == 0 else size for size, stride in zip(t.dbias.shape, t.dbias.stride(), strict=True)]
        c = dataclasses.replace(c, sum_rows=sizes[2] == 1, sum_columns=sizes[3] == 1)
        tiles_i, tiles_j = -(-problem.seqlen_q // c.block_m), -(-t.dbias.shape[3] // c.block_n)
        programs = sizes[0] * sizes[1] * (tiles_i if sizes[2] > 1 else 1) * (tiles_j if sizes[3] > 1 else 1)
        pairs = problem.batch * problem.num_heads_q * tiles_i * tiles_j // programs
        parts = max(1, min(pairs, 4 * self._arch.multiprocessors // programs))
        elements = sizes[0] * sizes[1] * sizes[2] * sizes[3]
        partial = call.allocate((parts, elements))
        own = values | dict(zip(("size_b", "size_h", "size_i", "size_j"), sizes, strict=True)) | {
            "PARTIAL": partial, "tiles_i": tiles_i, "tiles_j": tiles_j, "elements": elements,
        }  # fmt: skip
        spec = self._spec("bias_gradient", c, with_, call, BIAS=_NAMES[problem.bias or torch.float32])
        self._run(call, spec, programs, own, parts)
        own_part = t.dbias
        for dim, size in enumerate(sizes):
            own_part = own_part.narrow(dim, 0, size)
        own_part += partial.sum(0).view(sizes)


def _tiles(problem: AttentionProblem, per_tile: int, heads: int) -> tuple[int, int]:
    """Tiles of queries, and what each is needed for: heads, of every sequence unless packed."""
    if problem.packed:
        return problem.total_q // per_tile + problem.batch + 1, heads
    return -(-problem.seqlen_q // per_tile), heads * problem.batch


def _form_key(problem: AttentionProblem, t: Tensors, backward: bool) -> tuple[Any, ...]:
    """All that the launches of a call depend on, but for addresses."""
    forms = [None if x is None else (x.shape, x.stride(), x.data_ptr() & 15) for x in t.__dict__.values()]
    return (id(problem), backward, *forms)


def _is_shared(dbias: torch.Tensor) -> bool:
    """Whether it is the gradient of a broadcast bias, which a kernel of its own adds up."""
    return any(stride == 0 and size > 1 for size, stride in zip(dbias.shape, dbias.stride(), strict=True))


class _Form:
    """The launches of one form of call: all that they are but the addresses of operands and workspaces."""

    def __init__(self, problem: AttentionProblem, launches: list[launch.Bound], workspaces: list[tuple[int, ...]]):
        self._problem = problem  # kept alive, since the key holds its id
        self._launches, self._workspaces = launches, workspaces

    @classmethod
    def of(cls, call: _Call, t: Tensors, arch: str, index: int) -> _Form | None:
        """The form of a call that has run; None if it passed a tensor that the next one would not have."""
        fields = {name: place for place, name in enumerate(t.__dict__)}
        own = {id(x): len(fields) + place for place, x in enumerate(call.workspaces)}
        own |= {id(x): fields[field] for field, x in (("dk", t.dk), ("dv", t.dv)) if x is not None}  # made by core
        bound = []
        for spec, grid, values in call.launches:
            sources = {}
            for name in launch.arguments(spec.kernel):
                value, field = values.get(name), _FIELDS.get(name, name.lower())
                if not isinstance(value, torch.Tensor):
                    continue
                if id(value) in own:
                    sources[name] = own[id(value)]
                elif field in fields and value is getattr(t, field):
                    sources[name] = fields[field]
                else:
                    return None
            bound.append(launch.Bound(spec, arch, index, grid, values, sources, call.problem))
        return cls(call.problem, bound, [tuple(x.shape) for x in call.workspaces])

    def launch(self, t: Tensors) -> None:
        tensors = list(t.__dict__.values())
        for shape in self._workspaces:
            tensors.append(allocate(shape, torch.float32, t.q.device))
        for one in self._launches:
            one(tensors)


class _Call:
    """What the kernels of one call share: arguments by name, and how operands lie in memory.

    natural: whether scores are, as in Features. launches and workspaces say what the call did; settled: whether the
    next one does the same.
    """

    def __init__(self, problem: AttentionProblem, t: Tensors, natural: bool) -> None:
        self.problem, self._device = problem, t.q.device
        self.settled = True
        self.launches: list[tuple[Spec, tuple[int, int], Mapping[str, Any]]] = []
        self.workspaces: list[torch.Tensor] = []
        paged = problem.page_size is not None
        operands = [x for x in (t.q, t.k, t.v, t.out, t.dout, t.dq, t.dk, t.dv, t.k_new, t.v_new) if x is not None]
        maps = [x for x in (t.bias, t.mask, t.block_mask, t.dbias) if x is not None]
        self.aligned = problem.aligned and all(x.data_ptr() % 16 == 0 for x in operands)
        rows = (problem.head_dim * t.q.element_size() | problem.head_dim_v * t.q.element_size()) % 16
        self.aligned = self.aligned and rows == 0
        self.small = all(_reach(x) < 1 << 31 for x in operands + maps)
        # offsets within a tile reach over 256 rows or columns
        self.wide = any(stride * 256 >= 1 << 31 for x in operands + maps for stride in x.stride())
        mapped = {name: getattr(t, field) for name, field in _MAPS.items()}
        self.mappable = all(x is None or _mappable(x) for x in mapped.values())
        left, right = problem.window
        threshold = problem.dropout_threshold
        unit = 1.0 if natural else _LOG2E
        cap = problem.softcap
        capacity = problem.seqlen_k
        if paged and t.page_table is not None:
            capacity = t.page_table.shape[1] * (problem.page_size or 0)
        given = (t.q_lens is not None) + 2 * (t.kv_lens is not None) + 4 * (t.new_lens is not None)
        block_q, block_k = problem.block_mask or (1, 1)
        alibi_b, alibi_h = (0, 0) if t.alibi_slopes is None else t.alibi_slopes.stride()
        self.common: dict[str, Any] = {
            "Q": t.q, "K": t.k, "V": t.v, "BIAS": t.bias, "MASK": t.mask, "BLOCKS": t.block_mask,
            "ALIBI": t.alibi_slopes, "Q_LENS": t.q_lens, "KV_LENS": t.kv_lens, "NEW_LENS": t.new_lens,
            "CU_Q": t.cu_seqlens_q, "CU_K": t.cu_seqlens_k, "TABLE": t.page_table, "SEED": t.dropout_seed,
            **_strides("q", t.q, problem.packed), **_strides("k", t.k, problem.packed and not paged),
            **_strides("v", t.v, problem.packed and not paged), **_map_strides("bias", t.bias),
            **_map_strides("mask", t.mask), **_map_strides("blocks", t.block_mask),
            "alibi_b": alibi_b, "alibi_h": alibi_h,
            "table_row": 0 if t.page_table is None else t.page_table.stride(0),
            "given": given, "batch": problem.batch, "seqlen_q": problem.seqlen_q, "seqlen_k": capacity,
            "total_q": problem.total_q, "total_k": problem.total_k, "new_tokens": 0,
            "heads_q": problem.num_heads_q, "group": problem.group, "columns": problem.seqlen_k,
            "left": min(left or 0, _UNBOUNDED), "right": min(right or 0, _UNBOUNDED),
            "page_size": problem.page_size or 1, "block_q": block_q, "block_k": block_k, "threshold": threshold,
            "factor": problem.scale * unit if cap is None else problem.scale / cap,
            "cap": 0.0 if cap is None else cap * unit,
            "keep_scale": 65536.0 / (65536 - threshold) if threshold < 65536 else 0.0,
            "rows_all": t.lse.numel(),
            **mapped,
        }  # fmt: skip

    def allocate(self, shape: tuple[int, ...]) -> torch.Tensor:
        """A float32 workspace."""
        self.workspaces.append(allocate(shape, torch.float32, self._device))
        return self.workspaces[-1]
