"""Prepared launches: of a kernel that takes one struct, and of those whose struct starts with tensor maps."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch

from attnlib.problem import AttentionProblem, Tensors

from . import device, jit, params


@dataclass(frozen=True)
class Step:
    """A launch prepared for one problem: the struct is complete but for what tensors decide."""

    kernel: jit.LoadedKernel
    layout: params.ParamsLayout
    values: dict[str, Any]
    grid: tuple[int, int, int]
    shared: int
    early: bool = field(default=False, kw_only=True)  # may begin before the kernel ahead of it has ended

    def launch(
        self, values: dict[str, Any], stream: int, problem: AttentionProblem, grid: tuple[int, int, int] | None = None
    ) -> None:
        struct = self.layout.filled(values)
        self.kernel.launch(grid or self.grid, stream, struct, self.shared, pdl=self.early, problem=problem)

    def run(self, members: bytes, stream: int, problem: AttentionProblem, t: Tensors) -> None:
        """Launch with the struct's members; t: what the maps of a MappedStep are of."""
        self.kernel.launch(self.grid, stream, members, self.shared, pdl=self.early, problem=problem)


@dataclass(frozen=True)
class MappedStep(Step):
    """boxes: fields of Tensors and the rows that one copy moves. size: bytes of the whole struct. ticket: the device of
    the ticket that hands out tiles, None where they go round robin."""

    boxes: tuple[tuple[str, int], ...] = ()
    size: int = 0
    ticket: int | None = None

    def run(self, members: bytes, stream: int, problem: AttentionProblem, t: Tensors) -> None:
        given = [getattr(t, field) for field, _ in self.boxes]
        operands = [_spread(x) for x in given]  # kept until the launch
        maps = [operand_map(x, rows) for x, (_, rows) in zip(operands, self.boxes, strict=True)]
        if self.ticket is not None:
            members += ticket_of(self.ticket, stream).data_ptr().to_bytes(8, "little")
        struct = params.with_maps(maps, members, self.size)
        # What is loaded before the kernel ahead has ended must be there by then: copies are not.
        early = self.early and all(x is y for x, y in zip(given, operands, strict=True))
        self.kernel.launch(self.grid, stream, struct, self.shared, pdl=early, problem=problem)


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where it repeats in memory: maps take no stride of 0."""
    return tensor if all(tensor.stride()) else tensor.contiguous()


_TYPES = {torch.float16: 6, torch.bfloat16: 9}  # CU_TENSOR_MAP_DATA_TYPE_*
_SWIZZLE_128, _PROMOTE_256 = 3, 3


@functools.lru_cache(512)
def _map(
    type_code: int, address: int, index: int, shape: tuple[int, ...], strides: tuple[int, ...], rows: int
) -> bytes:
    """The map of a [batch, row, head, column] operand, read or written `rows` rows and 64 columns at a time."""
    batch, length, heads, columns = shape
    over_batch, over_rows, over_heads, _ = strides
    dims = [columns, length, heads, batch]
    whole = 2 * columns * length * heads  # of a dimension of size 1, any stride will do
    across = [
        2 * n if size > 1 else whole for n, size in zip((over_rows, over_heads, over_batch), dims[1:], strict=True)
    ]
    box = [64, rows, 1, 1]
    found: bytes = device.host().encode_tiled(
        type_code, address, dims, across, box, [], 0, _SWIZZLE_128, _PROMOTE_256, 0, index
    )
    return found


def operand_map(tensor: torch.Tensor, rows: int) -> bytes:
    """The tensor map of q, k, v, out or dout, [batch, row, head, column] or packed [row, head, column]."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    if len(shape) == 3:
        shape, strides = (1, *shape), (0, *strides)
    return _map(_TYPES[tensor.dtype], tensor.data_ptr(), tensor.device.index or 0, shape, strides, rows)


_tickets: dict[tuple[int, int], torch.Tensor] = {}


def ticket_of(index: int, stream: int) -> torch.Tensor:
    """A zero that the kernels of a stream, one after the other, count up and leave zero. A graph gets its own."""
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=f"cuda:{index}")
    found = _tickets.get((index, stream))
    if found is None:
        found = _tickets[index, stream] = torch.zeros(1, dtype=torch.int32, device=f"cuda:{index}")
    return found
