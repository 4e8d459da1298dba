"""The checks. Importing this package registers every one of them."""

from . import (
    accuracy,
    configs,
    dropout,
    gradients,
    interface,
    memory,
    nan,
    seen_caches,
    seen_contract,
    seen_gpu,
    seen_rows,
    seen_shapes,
    visible,
)

__all__ = [
    "accuracy",
    "configs",
    "dropout",
    "gradients",
    "interface",
    "memory",
    "nan",
    "seen_caches",
    "seen_contract",
    "seen_gpu",
    "seen_rows",
    "seen_shapes",
    "visible",
]
