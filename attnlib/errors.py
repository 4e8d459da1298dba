"""Every exception attnlib raises, in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend import Refusal
    from .problem import AttentionProblem


class AttnlibError(Exception):
    """Base class of every error raised by attnlib itself (out of memory stays torch's)."""


class ArgumentError(AttnlibError, ValueError):
    """An argument has a value that attention is not defined for."""


class ArgumentTypeError(AttnlibError, TypeError):
    """An argument has the wrong type or dtype."""


class UnsupportedError(AttnlibError, NotImplementedError):
    """No backend takes the call. ``refusals`` maps each backend to all of its reasons."""

    def __init__(self, message: str, refusals: dict[str, tuple[Refusal, ...]] | None = None) -> None:
        super().__init__(message)
        self.refusals = refusals or {}


class KernelNotCached(UnsupportedError):
    """A kernel would have to be compiled, and ATTNLIB_JIT=never forbids it."""

    def __init__(self, message: str, problem: AttentionProblem | None = None) -> None:
        super().__init__(message)
        self.problem = problem


class KernelError(AttnlibError, RuntimeError):
    """A kernel failed on the device after its backend had accepted the problem."""

    def __init__(
        self, message: str, *, problem: AttentionProblem | None = None, kernel: str = "", code: Any = None
    ) -> None:
        super().__init__(message)
        self.problem = problem
        self.kernel = kernel
        self.code = code
