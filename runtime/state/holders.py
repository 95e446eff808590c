"""What sequences hold of one pool, apart from what the prefix tree holds: how much could be evicted follows from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from treadle.runtime.state.pool import Handle, Pool


class Holders:
    """Counts the sequences that use each item. Pool references and these counts change together."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._counts: dict[Handle, int] = {}

    @property
    def num_held(self) -> int:
        """Items in use by any sequence."""
        return len(self._counts)

    @property
    def evictable(self) -> int:
        """Items that only the tree holds."""
        return self.pool.used - len(self._counts)

    def take(self, count: int, owner: str) -> list[Handle]:
        """Return ``count`` items for a sequence."""
        handles = self.pool.take(count, owner)
        self.hold(handles)
        return handles

    def share(self, handles: Sequence[Handle]) -> None:
        """Let one more sequence use items."""
        self.pool.share(handles)
        self.hold(handles)

    def release(self, handles: Sequence[Handle]) -> None:
        """Let a sequence go of items."""
        self.let_go(handles)
        self.pool.release(handles)

    def hold(self, handles: Iterable[Handle]) -> None:
        """Count a user that brings its reference along, or that needs none."""
        counts = self._counts
        for handle in handles:
            counts[handle] = counts.get(handle, 0) + 1

    def let_go(self, handles: Iterable[Handle]) -> None:
        """Undo one ``hold``; the reference stays."""
        counts = self._counts
        for handle in handles:
            left = counts[handle] - 1
            if left:
                counts[handle] = left
            else:
                del counts[handle]

    def clear(self) -> None:
        """Forget all users; for when they are known to be gone."""
        self._counts = {}
