"""The disk tier: a folder with one file for each object, least recently used evicted to a budget that restarts keep.

An object is written under a temporary name and renamed, so a process killed at any point leaves whole objects and
perhaps temporary files, which the next start removes. Nothing is synced: after a loss of power the newest objects may
be missing or torn. A torn, cut, foreign or flipped file is found by its seal when it is loaded, and is a miss.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from treadle.conf.errors import ConfigError
from treadle.runtime.state.tiers.store import Scope, StoreError

MAX_EVENTS = 1 << 16
_BLOCK = 4096
"""What a file takes is a multiple of this."""
_LAYOUT = "treadle-state-1"
_DAMAGED = (errno.EIO, errno.EBADMSG, errno.EUCLEAN)
"""What a file system says of a file that it cannot give back as it was written."""


class DiskStore:
    """Objects in ``folder``, of all models together at most ``budget`` bytes. One process at a time uses a folder."""

    instant = True
    saves = True

    def __init__(self, folder: Path, budget: int) -> None:
        """Raises ConfigError if the folder cannot be made or written, or another process uses it."""
        self._folder = folder / _LAYOUT
        self._budget = budget
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[bytes, bytes], int] = OrderedDict()
        """(namespace, key) -> length of the file; the one used longest ago first"""
        self._used = 0
        self._scope = b""
        self._names = itertools.count()
        self._events: deque[tuple[str, bytes]] = deque(maxlen=MAX_EVENTS)
        self._guard = _claim(folder, self._folder)

    def open(self, scope: Scope) -> None:
        """Remove what a killed process left unfinished, and learn what is there."""
        for name in os.listdir(self._folder / "unfinished"):
            # What nobody here made may be no file.
            with contextlib.suppress(OSError):
                (self._folder / "unfinished" / name).unlink(missing_ok=True)
        found = sorted(self._scan(), key=lambda item: item[2])
        with self._lock:
            self._scope = scope.namespace
            self._known = OrderedDict(((name, key), size) for name, key, _, size in found)
            self._used = sum(map(_taken, self._known.values()))
        self._evict(0)

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether there is a file of it."""
        with self._lock:
            return [(self._scope, key) in self._known for key in keys]

    def load(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Read files of just the buffers' lengths; ones of another length, or that cannot be read, are removed."""
        return [self._read(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]

    def save(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Write files. Raises StoreError if the file system is full, or does not take them for another reason."""
        return [self._write(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]

    def keys(self) -> list[bytes]:
        """Return the keys of this model's files."""
        with self._lock:
            return [key for scope, key in self._known if scope == self._scope]

    def release(self, keys: Sequence[bytes]) -> None:
        """Remove files."""
        for key in keys:
            self._remove((self._scope, key))

    def events(self) -> list[tuple[str, bytes]]:
        """Return what was written and removed since the last call."""
        with self._lock:
            events = list(self._events)
            self._events.clear()
            return events

    def close(self) -> None:
        """Let another process use the folder."""
        os.close(self._guard)

    def usage(self) -> tuple[int, int]:
        """Return bytes and files, those of other models included."""
        return self._used, len(self._known)

    def _read(self, key: bytes, buffer: memoryview) -> bool:
        name = (self._scope, key)
        with self._lock:
            if name not in self._known:
                return False
            self._known.move_to_end(name)
        path = self._path(name)
        try:
            file = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            # Somebody cleaned up.
            self._forget(name)
            return False
        try:
            whole = os.fstat(file).st_size == len(buffer) and _fill(file, buffer)
            # The order of use outlives the process as the order of these times.
            os.utime(file)
        except OSError as error:
            if error.errno not in _DAMAGED:
                raise
            whole = False
        finally:
            os.close(file)
        if not whole:
            self._remove(name)
        return whole

    def _write(self, key: bytes, buffer: memoryview) -> bool:
        name = (self._scope, key)
        with self._lock:
            if name in self._known:
                return True
        if _taken(len(buffer)) > self._budget:
            return False
        self._evict(_taken(len(buffer)))
        temporary = self._folder / "unfinished" / f"{next(self._names)}"
        try:
            file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                written = 0
                while written < len(buffer):
                    written += os.write(file, buffer[written:])
            finally:
                os.close(file)
            path = self._path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            os.rename(temporary, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise StoreError(f"{self._folder}: {error.strerror}") from error
        with self._lock:
            self._used += _taken(len(buffer)) - _taken(self._known.get(name, 0))
            self._known[name] = len(buffer)
            self._events.append(("stored", key))
        return True

    def _evict(self, wanted: int) -> None:
        """Remove what was used longest ago until ``wanted`` more bytes are within the budget."""
        while True:
            with self._lock:
                if self._used + wanted <= self._budget or not self._known:
                    return
                name = next(iter(self._known))
            self._remove(name)

    def _remove(self, name: tuple[bytes, bytes]) -> None:
        self._forget(name)
        with contextlib.suppress(OSError):
            self._path(name).unlink(missing_ok=True)

    def _forget(self, name: tuple[bytes, bytes]) -> None:
        with self._lock:
            size = self._known.pop(name, None)
            if size is not None:
                self._used -= _taken(size)
                self._events.append(("removed", name[1]))

    def _path(self, name: tuple[bytes, bytes]) -> Path:
        scope, key = (part.hex() for part in name)
        return self._folder / scope / key[:2] / key

    def _scan(self) -> Iterator[tuple[bytes, bytes, int, int]]:
        """Yield namespace, key, time of last use and length of every object's file."""
        for scope in os.listdir(self._folder):
            if (name := _unhex(scope)) is None or not (self._folder / scope).is_dir():
                continue
            for part in os.listdir(self._folder / scope):
                if not (self._folder / scope / part).is_dir():
                    continue
                with os.scandir(self._folder / scope / part) as entries:
                    for entry in entries:
                        key = _unhex(entry.name)
                        if key is not None and entry.is_file(follow_symlinks=False):
                            facts = entry.stat()
                            yield name, key, facts.st_mtime_ns, facts.st_size


def _claim(folder: Path, inner: Path) -> int:
    """Make the folders and lock them for this process; return the lock's file."""
    try:
        (inner / "unfinished").mkdir(parents=True, exist_ok=True)
        guard = os.open(inner / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"cannot be written: {error.strerror}", key="kv.disk.path", value=folder, hint="kv.disk.path=null: no disk"
        ) from error
    try:
        fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(guard)
        raise ConfigError(
            "another engine uses this folder", key="kv.disk.path", value=folder, hint="each engine needs one of its own"
        ) from None
    return guard


def _fill(file: int, buffer: memoryview) -> bool:
    """Read until the buffer is full; whether it is."""
    read = 0
    while read < len(buffer):
        count = os.readv(file, [buffer[read:]])
        if count == 0:
            return False
        read += count
    return True


def _taken(length: int) -> int:
    return -(-length // _BLOCK) * _BLOCK


def _unhex(name: str) -> bytes | None:
    """Return the 16 bytes that a name spells, None if it does not."""
    try:
        value = bytes.fromhex(name)
    except ValueError:
        return None
    return value if len(value) == 16 else None
