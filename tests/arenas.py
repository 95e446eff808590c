"""Arenas for tests, of as many items as asked for."""

from __future__ import annotations

from collections.abc import Mapping

from treadle.graph.slabs import least_bytes
from treadle.graph.state import State
from treadle.kernels.backend.cpu import CpuBackend
from treadle.kernels.backend.protocol import Backend
from treadle.runtime.state.arena import Arena
from treadle.runtime.state.memory import arena_kinds


def make_arena(state: State, counts: Mapping[int, int], backend: Backend | None = None) -> Arena:
    """Return an arena that just holds so many items of each kind at once."""
    kinds = arena_kinds(state)
    items = [kind.item_bytes for kind in kinds]
    wanted = [counts.get(kind, 0) for kind in range(len(kinds))]
    num_bytes = least_bytes(items, wanted, state.scratch_bytes)
    return Arena(backend or CpuBackend(threads=1), num_bytes, kinds, scratch_bytes=state.scratch_bytes)
