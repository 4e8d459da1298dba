"""Launching the wgmma forward: tensor maps of its operands, and the ticket that hands out tiles."""

from __future__ import annotations

import functools
from typing import Any

import torch

from attnlib.problem import AttentionProblem, Tensors

from . import config, device, jit, params

_TYPES = {torch.float16: 6, torch.bfloat16: 9}  # CU_TENSOR_MAP_DATA_TYPE_*
_SWIZZLE_128, _PROMOTE_256 = 3, 3


@functools.lru_cache(512)
def _map(type_code: int, address: int, shape: tuple[int, ...], strides: tuple[int, ...], rows: int) -> bytes:
    """The map of a [batch, row, head, column] operand, read or written `rows` rows and 64 columns at a time."""
    batch, length, heads, columns = shape
    over_batch, over_rows, over_heads, _ = strides
    across = [2 * over_rows, 2 * over_heads, 2 * over_batch]
    dims = [columns, length, heads, batch]
    whole = [2 * columns * length * heads] * 3  # of a dimension of size 1, any stride will do
    across = [stride if size > 1 else other for stride, size, other in zip(across, dims[1:], whole, strict=True)]
    return device.host().encode_tiled(
        type_code, address, dims, across, [64, rows, 1, 1], [], 0, _SWIZZLE_128, _PROMOTE_256, 0
    )  # fmt: skip


def operand_map(tensor: torch.Tensor, rows: int) -> bytes:
    shape, strides = tuple(tensor.shape), tensor.stride()
    if len(shape) == 3:
        shape, strides = (1, *shape), (0, *strides)
    return _map(_TYPES[tensor.dtype], tensor.data_ptr(), shape, strides, rows)


_tickets: dict[tuple[int, int], torch.Tensor] = {}


def _ticket(index: int, stream: int) -> torch.Tensor:
    """A zero that the kernels of a stream, one after the other, count up and leave zero. A graph gets its own."""
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=f"cuda:{index}")
    ticket = _tickets.get((index, stream))
    if ticket is None:
        ticket = _tickets[index, stream] = torch.zeros(1, dtype=torch.int32, device=f"cuda:{index}")
    return ticket


class WarpgroupForward:
    """One configuration on one device."""

    def __init__(self, chosen: config.WarpgroupConfig, info: device.DeviceInfo, index: int) -> None:
        self.config = chosen
        self._info = info
        self._index = index
        self._spec = config.warpgroup_kernel(chosen)

    def tiles(self, problem: AttentionProblem) -> tuple[int, int]:
        """Tiles of rows for a head, and heads."""
        rows = self.config.block_q
        if problem.packed:
            return problem.total_q // rows + problem.batch + 1, problem.num_heads_q
        return -(-problem.seqlen_q // rows), problem.num_heads_q * problem.batch

    def launch(self, problem: AttentionProblem, t: Tensors, values: dict[str, Any], grid: int) -> None:
        """values: all members of ForwardParams."""
        c = self.config
        stream = torch.cuda.current_stream(self._index).cuda_stream
        maps = [operand_map(t.q, c.block_q), operand_map(t.k, c.block_k), operand_map(t.v, c.block_k), operand_map(t.out, 16)]
        ticket = _ticket(self._index, stream) if c.dynamic else None
        counter = (0 if ticket is None else ticket.data_ptr()).to_bytes(8, "little")
        struct = params.with_maps(maps, params.FORWARD.filled(values) + counter, params.FORWARD_MAPS_SIZE)
        kernel = jit.load(self._spec, self._index, problem)
        kernel.launch((min(self._info.sm_count, grid), 1, 1), stream, struct, c.shared_bytes, problem=problem)


def launch_backward(
    chosen: config.WarpgroupBackwardConfig, index: int, problem: AttentionProblem, t: Tensors, values: dict[str, Any],
    grid: int,
) -> None:  # fmt: skip
    """values: members of BackwardParams."""
    assert t.dout is not None
    rows, keys = chosen.block_q, chosen.block_k
    maps = [operand_map(t.q, rows), operand_map(t.k, keys), operand_map(t.v, keys), operand_map(t.dout, rows)]
    struct = params.with_maps(maps, params.BACKWARD.pack(values), params.BACKWARD_MAPS_SIZE)
    kernel = jit.load(config.warpgroup_backward_kernel(chosen), index, problem)
    stream = torch.cuda.current_stream(index).cuda_stream
    kernel.launch((grid, 1, 1), stream, struct, chosen.shared_bytes, problem=problem)
