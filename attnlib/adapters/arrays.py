"""Arrays of other libraries in and out through DLPack: NumPy, CuPy, JAX and whoever else speaks it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..errors import ArgumentError, ArgumentTypeError

_CACHES = ("k_cache", "v_cache")


def is_array(value: Any) -> bool:
    """Whether value is an array of another library, rather than a tensor, a number, a sequence or None."""
    return hasattr(value, "__dlpack__") and not isinstance(value, (torch.Tensor, np.generic, type))


def to_torch(value: Any, name: str = "q") -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
    """A tensor that shares value's memory, and the function that brings a result back to value's kind.

    Raises ArgumentTypeError if value is no array. A read-only NumPy array is copied.
    """
    if isinstance(value, torch.Tensor):
        return value, lambda tensor: tensor
    if not is_array(value):
        raise ArgumentTypeError(f"{name}: needs a tensor or an array that speaks DLPack, got {type(value).__name__}")
    if isinstance(value, np.ndarray):
        return _from_numpy(value, name), lambda tensor: tensor.numpy()
    try:
        return torch.from_dlpack(value), _back(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        kind = type(value).__name__
        raise ArgumentTypeError(
            f"{name}: needs an array that torch can read by DLPack, got {kind} ({error})"
        ) from error


def _from_numpy(array: np.ndarray, name: str) -> torch.Tensor:
    usable = array.flags.writeable and all(stride >= 0 for stride in array.strides)
    try:
        return torch.from_numpy(array if usable else array.copy())
    except (TypeError, ValueError) as error:  # ValueError: the other byte order
        raise ArgumentTypeError(f"{name}: needs a dtype that torch knows, got {array.dtype.str}") from error


def _back(value: Any) -> Callable[[torch.Tensor], Any]:
    root = type(value).__module__.partition(".")[0]
    if root in ("jax", "jaxlib"):
        import jax

        return lambda tensor: jax.dlpack.from_dlpack(tensor)
    namespace = value.__array_namespace__() if hasattr(value, "__array_namespace__") else __import__(root)
    return lambda tensor: namespace.from_dlpack(tensor)


def as_torch(name: str, value: Any) -> Any:
    """value with its arrays as tensors, those inside a BlockMask too; anything else as it is."""
    from ..calls import BlockMask

    if isinstance(value, BlockMask):
        return BlockMask(as_torch(name, value.mask), value.block_q, value.block_k)
    return to_torch(value, name)[0] if is_array(value) else value


def call(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """function(**arguments) on torch views of every array among arguments; the result in the kind of q."""
    _, back = to_torch(arguments["q"])
    if arguments.get("k_new") is not None:
        for name in _CACHES:
            _require_writeable(name, arguments[name])
    with torch.no_grad():
        result = function(**{name: as_torch(name, value) for name, value in arguments.items()})
    return tuple(back(part) for part in result) if isinstance(result, tuple) else back(result)


def _require_writeable(name: str, cache: Any) -> None:
    """A cache is changed in place, which an immutable array does not allow and a copy would lose."""
    if isinstance(cache, np.ndarray):
        fits = cache.flags.writeable and all(stride >= 0 for stride in cache.strides)
    else:
        fits = type(cache).__module__.partition(".")[0] not in ("jax", "jaxlib")
    if not fits:
        raise ArgumentError(
            f"{name}: needs an array that can be written in place, got a read-only {type(cache).__name__}"
        )
