"""NVRTC by ctypes: find the library, compile one translation unit to a cubin. Needs no toolkit and no driver."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REMEDY = 'pip install "attnlib[cuda]", or pip install nvidia-cuda-nvrtc'
_WHEEL_FOLDERS = ("cu13/lib", "cuda_nvrtc/lib")


class NvrtcMissing(Exception):
    """No usable libnvrtc."""


@dataclass(frozen=True)
class Output:
    """What NVRTC gave back; cubin is empty when compiling failed, and log says why."""

    cubin: bytes
    log: str


class Nvrtc:
    """One loaded libnvrtc."""

    def __init__(self, path: str) -> None:
        self.path = path
        # Wheels up to 13.0.88 have no RPATH: NVRTC would not find its builtins beside itself.
        for builtins in _builtins(path):
            try:
                ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            except OSError:
                continue
        self._lib = ctypes.CDLL(path)
        self._lib.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._lib, name)(*arguments)
        if status != 0:
            raise NvrtcMissing(f"{self.path}: {name}: {self._lib.nvrtcGetErrorString(status).decode()}")

    @functools.cached_property
    def archs(self) -> tuple[int, ...]:
        """Architectures it can compile for, as numbers (90 for sm_90)."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", numbers)
        return tuple(sorted(numbers))

    def compile(self, source: str, name: str, headers: Mapping[str, str], options: Sequence[str]) -> Output:
        """Compile source; headers maps the names that #include uses to texts. Errors are in the log, not raised."""
        program = ctypes.c_void_p()
        texts = (ctypes.c_char_p * len(headers))(*(text.encode() for text in headers.values()))
        names = (ctypes.c_char_p * len(headers))(*(key.encode() for key in headers))
        self._call(
            "nvrtcCreateProgram", ctypes.byref(program), source.encode(), name.encode(), len(headers), texts, names
        )
        if self.version >= (12, 9):
            options = (*options, "--no-cache")  # NVRTC's own cache has no log, which says registers and spills
        try:
            words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            status = self._lib.nvrtcCompileProgram(program, len(options), words)
            log = self._text(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog").decode(errors="replace")
            if status != 0:
                reason = self._lib.nvrtcGetErrorString(status).decode()
                return Output(b"", f"{log.strip()}\n{reason}".strip())
            log = "\n".join(line for line in log.splitlines() if "Compile time" not in line)  # the same every time
            return Output(self._bytes(program, "nvrtcGetCUBINSize", "nvrtcGetCUBIN"), log.strip())
        finally:
            self._lib.nvrtcDestroyProgram(ctypes.byref(program))

    def _bytes(self, program: ctypes.c_void_p, size_of: str, get: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(size_of, program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(get, program, buffer)
        return buffer.raw

    def _text(self, program: ctypes.c_void_p, size_of: str, get: str) -> bytes:
        return self._bytes(program, size_of, get).rstrip(b"\0")


@functools.cache
def find() -> Nvrtc:
    """The NVRTC of this process: that of a pip wheel, else the one cuda.pathfinder finds, else the system's."""
    failures = []
    for path in _candidates():
        try:
            return Nvrtc(path)
        except (OSError, AttributeError, NvrtcMissing) as error:
            failures.append(f"{path}: {error}")
    raise NvrtcMissing(f"NVRTC was not found ({REMEDY})" + "".join(f"\n  {text}" for text in failures))


@functools.cache
def version() -> tuple[int, int] | None:
    """The version of find() without loading 100 MB, where the names of its files tell it; None if there is none."""
    path = next(_wheels(), None)
    for builtins in _builtins(path) if path is not None else ():
        numbers = _version(builtins)
        if len(numbers) >= 2:
            return numbers[0], numbers[1]
    try:
        return find().version
    except NvrtcMissing:
        return None


def _builtins(path: str) -> list[Path]:
    if "/" not in path:
        return []
    return sorted(p for p in Path(path).parent.glob("libnvrtc-builtins.so*") if ".alt." not in p.name)


def _candidates() -> Iterator[str]:
    yield from _wheels()  # where cuda.pathfinder looks first, too; importing it takes longer than looking
    found = _pathfinder()
    if found is not None:
        yield found
    yield from ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")
    for folder in sorted(Path("/usr/local").glob("cuda*/lib64"), reverse=True):
        yield from map(str, sorted(folder.glob("libnvrtc.so.*"), key=_version, reverse=True)[:1])


def _pathfinder() -> str | None:
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib  # type: ignore[import-not-found, unused-ignore]

        return str(load_nvidia_dynamic_lib("nvrtc").abs_path)
    except Exception:  # whatever another package raises, the search goes on
        return None


def _wheels() -> Iterator[str]:
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        return
    for root in (spec.submodule_search_locations or ()) if spec is not None else ():
        for folder in _WHEEL_FOLDERS:
            libraries = (p for p in Path(root, folder).glob("libnvrtc.so.*") if ".alt." not in p.name)
            yield from map(str, sorted(libraries, key=_version, reverse=True)[:1])


def _version(path: Path) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", path.name))
