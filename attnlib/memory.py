"""Where outputs and workspaces come from: torch's allocator, NaN-filled under ATTNLIB_DEBUG=poison."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import settings


def allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialised memory on device. Backends take their workspaces from here."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if settings.current().debug:
        poison(tensor)
    return tensor


def allocate_like(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous uninitialised memory in the shape of tensor, with its dtype and device."""
    tensor = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    if settings.current().debug:
        poison(tensor)
    return tensor


def poison(*tensors: torch.Tensor | None) -> None:
    """Fill with NaN under ATTNLIB_DEBUG=poison, so that what a kernel leaves unwritten shows."""
    if "poison" in settings.current().debug:
        for tensor in tensors:
            if tensor is not None and tensor.is_floating_point():
                tensor.fill_(float("nan"))
