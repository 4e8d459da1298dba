"""Content-addressed folders of small files, shared by processes, ranks and machines; never the reason a call fails.

An entry is a folder `<root>/cuda/<name>/` that holds its files and `entry.json` with the SHA-256 of each. It is written
beside its place and renamed into it, so a reader sees all of it or nothing; what does not match its digests is
treated as absent. A lock only saves work: it is a flock, which dies with its holder, and waiting for it is bounded.

Where: ATTNLIB_CACHE_DIR; else $XDG_CACHE_HOME/attnlib or ~/.cache/attnlib; else, with one warning, a folder of this
user in the temporary directory. A folder that can only be read is read, and new entries stay in memory.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import pwd
import secrets
import shutil
import stat
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnlib import settings

try:
    import fcntl
except ImportError:  # no flock on this system: entries are still published atomically
    fcntl = None  # type: ignore[assignment]

MANIFEST = "entry.json"
PATIENCE = 20.0  # seconds to wait for another process that builds the same entry
_STALE = 3600.0  # seconds after which an unfinished folder is rubbish


@dataclass(frozen=True)
class Store:
    """Folders to look in, in order, and the one to write to (None: memory only, for the reason in `why`)."""

    read: tuple[Path, ...]
    write: Path | None
    why: str = ""


_stores: dict[tuple[Any, ...], Store] = {}
_warned: set[str] = set()
_swept: set[Path] = set()
_guard = threading.Lock()


def reset() -> None:
    """Forget folders and warnings, as a new process would."""
    with _guard:
        _stores.clear()
        _warned.clear()
        _swept.clear()


def store() -> Store:
    """The folders in force, resolved once for each setting of the environment."""
    explicit = settings.current().cache_dir
    key = (explicit, os.environ.get("XDG_CACHE_HOME"), os.environ.get("HOME"), os.environ.get("TMPDIR"), os.geteuid())
    found = _stores.get(key)
    if found is None:
        found = _stores[key] = _resolve(explicit)
    return found


def find(name: str) -> tuple[Path, dict[str, bytes], dict[str, Any]] | None:
    """Folder, files and notes of an intact entry, or None."""
    for root in store().read:
        entry = _read(root, name)
        if entry is not None:
            return root / name, *entry
    return None


def find_any(prefix: str) -> tuple[Path, dict[str, bytes], dict[str, Any]] | None:
    """The last intact entry, by name, whose name starts with prefix."""
    for root in store().read:
        with contextlib.suppress(OSError):
            for name in sorted((n for n in os.listdir(root) if n.startswith(prefix)), reverse=True):
                entry = _read(root, name)
                if entry is not None:
                    return root / name, *entry
    return None


def publish(name: str, files: Mapping[str, bytes], notes: Mapping[str, Any], *, replace: bool = False) -> Path | None:
    """Write an entry over one that is not intact, or over any. None: it could not be, and one warning said so."""
    where = store()
    if where.write is None:
        warn("memory", f"{where.why}; kernels are compiled into memory, again in each process")
        return None
    try:
        return _publish(where.write, name, files, notes, replace)
    except OSError as error:
        warn("memory", f"{where.write}: {_words(error)}; kernels are compiled into memory, again in each process")
        return None


@contextlib.contextmanager
def lock(name: str, done: Callable[[], bool]) -> Iterator[None]:
    """Hold the entry's lock, or go on without it: after PATIENCE seconds, when done(), or where there are no locks."""
    root = store().write
    handle = -1 if root is None or fcntl is None else _open_lock(root, name)
    try:
        if handle >= 0:
            _wait(handle, done)
        yield
    finally:
        if handle >= 0:
            with contextlib.suppress(OSError):
                os.close(handle)  # the file stays: removing it would let two processes hold "the" lock


def _open_lock(root: Path, name: str) -> int:
    shard = hashlib.sha256(name.encode()).hexdigest()[:2]
    try:
        os.makedirs(root / ".locks", exist_ok=True)
        return os.open(root / ".locks" / shard, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        return -1


def _wait(handle: int, done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    pause = 0.005
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.EINTR):
                return
        if time.monotonic() > deadline or done():
            return
        time.sleep(pause)
        pause = min(pause * 1.5, 0.1)


def _read(root: Path, name: str) -> tuple[dict[str, bytes], dict[str, Any]] | None:
    folder = root / name
    try:
        if not _entry_trusted(root, folder):
            return None
        notes = json.loads((folder / MANIFEST).read_bytes())
        if notes["name"] != name:
            return None
        files = {}
        for file, expected in notes["sha256"].items():
            files[file] = (folder / os.path.basename(file)).read_bytes()
            if hashlib.sha256(files[file]).hexdigest() != expected:
                return None
        return files, notes
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _publish(root: Path, name: str, files: Mapping[str, bytes], notes: Mapping[str, Any], replace: bool) -> Path:
    _sweep(root)
    final = root / name
    fresh = root / f".tmp-{os.getpid()}-{secrets.token_hex(6)}"
    os.mkdir(fresh)
    try:
        sums = {file: hashlib.sha256(data).hexdigest() for file, data in files.items()}
        record = json.dumps({**notes, "name": name, "sha256": sums}, indent=1).encode() + b"\n"
        for file, data in {**files, MANIFEST: record}.items():
            with open(fresh / file, "wb") as out:
                out.write(data)
                out.flush()
                os.fsync(out.fileno())
        for _ in range(3):
            try:
                os.rename(fresh, final)
                return final
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                    raise
            if not replace and _read(root, name) is not None:
                return final  # another process was first
            broken = root / f".tmp-{os.getpid()}-{secrets.token_hex(6)}"
            with contextlib.suppress(FileNotFoundError):
                os.rename(final, broken)
            _remove(broken)
        raise OSError(errno.EEXIST, "a damaged entry could not be replaced", str(final))
    finally:
        _remove(fresh)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _sweep(root: Path) -> None:
    """Remove what killed processes left, once a process."""
    if root in _swept:
        return
    _swept.add(root)
    with contextlib.suppress(OSError):
        for name in os.listdir(root):
            if name.startswith(".tmp-"):
                with contextlib.suppress(OSError):
                    if time.time() - os.stat(root / name).st_mtime > _STALE:
                        _remove(root / name)


def _resolve(explicit: str | None) -> Store:
    chosen = Path(explicit).expanduser().absolute() if explicit else _default()
    folder = None if chosen is None else chosen / "cuda"
    why = "there is no home directory for a cache" if folder is None else _fault(folder, explicit=bool(explicit))
    if folder is not None and not why:
        return Store((folder,), folder)
    readable = () if folder is None or not _readable(folder, explicit=bool(explicit)) else (folder,)
    if readable and explicit:
        return Store(readable, None, why)
    private = Path(tempfile.gettempdir()) / f"attnlib-{os.geteuid()}"
    also = _private_fault(private) or _fault(private / "cuda", explicit=False)
    if also:
        return Store(readable, None, f"{why}; {also}")
    warn("private", f"{why}; kernels are kept in {private}. ATTNLIB_CACHE_DIR names another folder")
    return Store((*readable, private / "cuda"), private / "cuda")


def _default() -> Path | None:
    base = os.environ.get("XDG_CACHE_HOME", "")
    if base and os.path.isabs(base):
        return Path(base) / "attnlib"
    home = os.environ.get("HOME", "")
    if not home:
        try:
            home = pwd.getpwuid(os.geteuid()).pw_dir
        except KeyError:
            return None
    return Path(home) / ".cache" / "attnlib"


def _fault(folder: Path, *, explicit: bool) -> str:
    """Why entries can't be written to folder; empty if they can. Creates it, but never a home directory."""
    try:
        if not explicit and not _home_exists(folder):
            return f"{folder.parent.parent.parent} does not exist"
        os.makedirs(folder, mode=0o755 if explicit else 0o700, exist_ok=True)
        if not _trusted(folder, explicit=explicit):
            return f"{folder} belongs to another user"
        probe = folder / f".tmp-{os.getpid()}-{secrets.token_hex(6)}"
        os.mkdir(probe)
        os.rmdir(probe)
        return ""
    except OSError as error:
        return f"{folder}: {_words(error)}"


def _home_exists(folder: Path) -> bool:
    """folder is base/attnlib/cuda: base (the XDG folder, or ~/.cache) or what it lies in must be there."""
    base = folder.parent.parent
    return base.is_dir() or base.parent.is_dir()


def _private_fault(private: Path) -> str:
    """Why the folder in the shared temporary directory is not safely ours; it is made if absent."""
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(private, 0o700)
        found = os.lstat(private)
    except OSError as error:
        return f"{private}: {_words(error)}"
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        return f"{private} is not a folder that only this user can write"
    return ""


def _readable(folder: Path, *, explicit: bool) -> bool:
    try:
        os.listdir(folder)
        return _trusted(folder, explicit=explicit)
    except OSError:
        return False


def _trusted(folder: Path, *, explicit: bool) -> bool:
    """A folder the user named, or one of this user or root: it decides what code runs on the GPU."""
    return explicit or os.stat(folder).st_uid in (os.geteuid(), 0)


def _entry_trusted(root: Path, folder: Path) -> bool:
    """In a folder anyone may write to, only entries of this user, root or the folder's owner count."""
    above = os.stat(root)
    if not above.st_mode & stat.S_IWOTH:
        return True
    return os.lstat(folder).st_uid in (os.geteuid(), 0, above.st_uid)


def _words(error: OSError) -> str:
    return error.strerror or str(error)


def warn(kind: str, text: str) -> None:
    with _guard:
        if kind in _warned:
            return
        _warned.add(kind)
    warnings.warn(f"attnlib's kernel cache: {text}", RuntimeWarning, stacklevel=3)
