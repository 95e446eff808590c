"""A hybrid model's arena under pressure: long and short requests together, and what of the bytes nobody can use.

Only sizes are simulated: pages of layers that see everything, pages of windowed layers, one block of some MB a request,
and checkpoints (a block, and the pages of the last window) that stay until their memory is needed.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass, field

import pytest
import torch

from treadle.kernels.backend.cpu import CpuBackend
from treadle.runtime.state.arena import Arena, Kind
from treadle.runtime.state.pool import Handle

GIB, MIB = 1 << 30, 1 << 20
PAGE_TOKENS, WINDOW_PAGES = 16, 65
FULL, WINDOW, BLOCK = 0, 1, 2


class Nothing(CpuBackend):
    """A device whose memory is only counted."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="meta")


@dataclass(eq=False)
class Running:
    length: int
    end: int
    held: dict[int, list[Handle]] = field(default_factory=dict)


class Load:
    """Requests that come as fast as there is room. What ended stays in a cache; the oldest goes first."""

    def __init__(self, arena: Arena, seed: int) -> None:
        self.arena, self.rng = arena, random.Random(seed)
        self.running: list[Running] = []
        self.cache: OrderedDict[int, dict[int, list[Handle]]] = OrderedDict()
        self.count = self.taken_bytes = 0
        self.stranded: list[float] = []
        self.unreachable: list[float] = []

    def step(self) -> None:
        while self.admit(self.request()):
            pass
        for each in list(self.running):
            self.grow(each)
            if each.length >= each.end:
                self.finish(each)

    def request(self) -> Running:
        long = self.rng.random() < 0.2
        prompt = int(self.rng.uniform(16e3, 128e3) if long else 100 * 40 ** self.rng.random())
        return Running(prompt, prompt + self.rng.randrange(16, 1600))

    def admit(self, request: Running) -> bool:
        pages = -(-request.length // PAGE_TOKENS)
        need = {FULL: pages, WINDOW: min(pages, WINDOW_PAGES), BLOCK: 1}
        self.look()
        if len(self.running) >= 64 or not self.make_room(need):
            return False
        request.held = {kind: self.take(kind, count) for kind, count in need.items()}
        self.running.append(request)
        return True

    def grow(self, each: Running) -> None:
        """Go on by a page; the window gives its oldest one back."""
        if each.length + PAGE_TOKENS < each.end:
            windows = each.held[WINDOW]
            if len(windows) == WINDOW_PAGES:
                self.arena.pool(WINDOW).release([windows.pop(0)])
            need = {FULL: 1, WINDOW: 1}
            if not self.make_room(need):
                self.finish(each)
                return
            for kind, count in need.items():
                each.held[kind] += self.take(kind, count)
        each.length += PAGE_TOKENS

    def finish(self, each: Running) -> None:
        """Leave a checkpoint behind."""
        if each in self.running:
            self.running.remove(each)
            self.cache[self.count] = each.held
            self.count += 1

    def make_room(self, need: dict[int, int]) -> bool:
        while not self.arena.can_take(need):
            if not self.cache:
                return False
            _, oldest = self.cache.popitem(last=False)
            for kind, handles in oldest.items():
                self.arena.pool(kind).release(handles)
        return True

    def take(self, kind: int, count: int) -> list[Handle]:
        self.taken_bytes += count * self.arena.pool(kind).item_bytes
        return self.arena.pool(kind).take(count, "request")

    def look(self) -> None:
        usage = self.arena.usage()
        total = self.arena.bytes.numel()
        if usage.unused_bytes < total * 0.2:
            self.stranded.append(usage.stranded_bytes / total)
            worst = max(usage.unused_bytes - kind.available_bytes for kind in usage.kinds)
            self.unreachable.append(worst / total)


@pytest.mark.parametrize(
    ("kinds", "num_bytes"),
    [
        ((Kind("full", 12 * 32768), Kind("window 1024", 12 * 65536), Kind("block", 19 * MIB + 768)), 40 * GIB),
        ((Kind("full", 6 * 16384), Kind("window 1024", 18 * 16384), Kind("block", 19 * MIB)), 6 * GIB),
        ((Kind("full", 10 * 16384), Kind("window 1024", 52 * 16384), Kind("block", 75 * MIB)), 80 * GIB),
    ],
)
def test_little_is_stranded(kinds: tuple[Kind, ...], num_bytes: int) -> None:
    arena = Arena(Nothing(threads=1), num_bytes, kinds, scratch_bytes=kinds[BLOCK].item_bytes)
    load = Load(arena, seed=3)
    for _ in range(1000):
        load.step()
        arena.moves.clear()
        arena.moved.clear()
    assert load.count > 1000
    assert len(load.stranded) > 1000, "there was pressure"
    assert max(load.stranded) < 0.01
    assert max(load.unreachable) < 0.03, "whatever is free, even the kind that is worst off gets it"
    assert 0 < arena.evacuated_bytes < 0.1 * load.taken_bytes, "and moving is rare"
