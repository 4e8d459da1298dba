"""Exact attention in tiles on every backend: CPU, CUDA, Triton, CuPy, behind one written contract.

>>> import torch, attnlib
>>> q = k = v = torch.randn(1, 128, 8, 64)
>>> out = attnlib.attention(q, k, v, causal=True)
"""

from .api import attention, attention_kvcache, attention_varlen
from .calls import BlockMask
from .dispatch import Decision, use_backend
from .dropout import dropout_mask
from .errors import (
    ArgumentError,
    ArgumentTypeError,
    AttnlibError,
    KernelError,
    KernelNotCached,
    UnsupportedError,
)
from .inspection import BackendInfo, backends, explain, support_matrix
from .merging import merge
from .problem import AttentionProblem
from .registry import register_backend

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "AttentionProblem",
    "AttnlibError",
    "BackendInfo",
    "BlockMask",
    "Decision",
    "KernelError",
    "KernelNotCached",
    "UnsupportedError",
    "attention",
    "attention_kvcache",
    "attention_varlen",
    "backends",
    "dropout_mask",
    "explain",
    "merge",
    "register_backend",
    "support_matrix",
    "use_backend",
]
