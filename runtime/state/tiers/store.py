"""What a tier below host memory must do: keep objects by their key. Connectors implement this.

A store is called from threads of its own, never from the step loop: its methods may block. Each call is waited for only
so long; what comes later is ignored, and a store that fails or hangs several times is left alone for a while. An object
that is not there, or no longer, is a miss and no error; so is one of another length than the buffer. What is loaded is
checked against a hash that was saved with it, so a store need not check again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol


class StoreError(Exception):
    """A store that cannot do its work now; says why."""


@dataclass(frozen=True, kw_only=True)
class Scope:
    """What a store is opened with."""

    namespace: bytes
    """16 bytes: which model computed the objects, and how they are laid out. Objects of another one are misses."""
    memory: memoryview
    """the host memory that all buffers are parts of, for stores that register it"""
    holds: Callable[[Sequence[bytes]], Sequence[bool]]
    """tells of each key whether this engine has its object on its host or disk, for others to take"""
    offer: Callable[[bytes, int], AbstractContextManager[memoryview | None]]
    """gives the sealed object of a key, of so many bytes; None: it has none. It stays until the context is left."""


class Store(Protocol):
    """Objects by their keys of 16 bytes. All methods but ``open`` may be called by several threads at once."""

    @property
    def instant(self) -> bool:
        """Whether ``lookup`` answers from memory: it is then called in the step loop too."""
        ...

    @property
    def saves(self) -> bool:
        """Whether ``save`` is to be called at all."""
        ...

    def open(self, scope: Scope) -> None:
        """Get ready; called again later if it raises."""
        ...

    def lookup(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Return for each key whether ``load`` would find it."""
        ...

    def load(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> Sequence[bool]:
        """Fill each buffer with the object of its key; return for each whether that was done."""
        ...

    def save(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> Sequence[bool]:
        """Keep a copy of each buffer; return for each whether it is kept, as it is if its key was known before."""
        ...

    def release(self, keys: Sequence[bytes]) -> None:
        """Forget objects: they are wrong, or nobody wants them."""
        ...

    def events(self) -> Sequence[tuple[str, bytes]]:
        """Return what happened since the last call: (``stored`` or ``removed``, key). Stores that cannot tell: none."""
        ...

    def close(self) -> None:
        """Let go of everything; what was saved stays. No other call is running, and none comes afterwards."""
        ...

    def usage(self) -> tuple[int, int] | None:
        """Return the bytes taken and the number of objects; None if that is not known."""
        ...
