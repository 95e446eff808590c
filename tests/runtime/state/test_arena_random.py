"""Random lives of an arena: what is taken, shared, copied, pinned, moved, forgotten and given back is never lost.

Bytes are really moved and written, as a stream does it: what was planned is done at the next step, moves first.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from treadle.kernels.backend.cpu import CpuBackend
from treadle.runtime.state.arena import Arena, Kind

Item = tuple[int, int]
"""kind and handle"""


@dataclass
class Known:
    """What the test knows of an item."""

    owner: str
    refs: int = 1
    pins: int = 0
    content: int | None = None
    """None until the next step writes it"""
    pinned_at: int = field(default=-1)


class Lives(RuleBasedStateMachine):
    """One arena and a model of what is in it."""

    @initialize(
        units=st.lists(st.integers(1, 9), min_size=2, max_size=4),
        spare=st.integers(0, 400),
    )
    def begin(self, units: list[int], spare: int) -> None:
        items = [unit * 256 for unit in units]
        self.kinds = tuple(Kind(f"kind {index}", item) for index, item in enumerate(items))
        # Scratch, a slab for each kind, and some more.
        num_bytes = (1 + len(items)) * max(items) + spare * 256
        self.arena = Arena(CpuBackend(threads=1), num_bytes, self.kinds, scratch_bytes=max(items))
        self.items: dict[Item, Known] = {}
        self.copies: list[tuple[Item, Item]] = []
        self.written = 0

    def pick(self, data: st.DataObject, suitable: list[Item]) -> Item | None:
        return data.draw(st.sampled_from(suitable)) if suitable else None

    def took(self, kind: int, count: int, owner: str) -> list[Item]:
        items = [(kind, handle) for handle in self.arena.pool(kind).take(count, owner)]
        assert not self.items.keys() & set(items), "an item was given out while it was held"
        self.items |= {item: Known(owner) for item in items}
        return items

    def drop(self, item: Item) -> None:
        self.arena.pool(item[0]).release([item[1]])
        known = self.items[item]
        known.refs -= 1
        if not known.refs and not known.pins:
            del self.items[item]

    @rule(counts=st.lists(st.integers(0, 40), min_size=4, max_size=4), order=st.permutations(range(4)))
    def take(self, counts: list[int], order: list[int]) -> None:
        wanted = {kind: counts[kind] for kind in order if kind < len(self.kinds)}
        fits = self.arena.can_take(wanted)
        for kind, count in wanted.items():
            fits_alone = count <= self.arena.available(kind)
            assert fits_alone == self.arena.can_take({kind: count})
            assert fits_alone or not fits
            if fits_alone:
                self.took(kind, count, f"request {self.written % 7}")
            else:
                return
        assert fits, "all of it fitted though the arena said no"

    @rule(kind=st.integers(0, 3))
    def take_all(self, kind: int) -> None:
        kind %= len(self.kinds)
        self.took(kind, self.arena.available(kind), "greedy")
        assert not self.arena.can_take({kind: 1})

    @rule(kind=st.integers(0, 3), keep=st.integers(2, 9), pins=st.integers(0, 3))
    def scatter(self, kind: int, keep: int, pins: int) -> None:
        """Fill everything with one kind, free most of it here and there, and let the others have the room."""
        kind %= len(self.kinds)
        self.take_all(kind)
        self.step()
        mine = [item for item, known in self.items.items() if item[0] == kind and known.refs]
        for item in mine[::keep][:pins]:
            self.pin_item(item)
        for place, item in enumerate(mine):
            if place % keep:
                for _ in range(self.items[item].refs):
                    self.drop(item)
        for other in range(len(self.kinds)):
            if other != kind:
                self.took(other, self.arena.available(other) // 2, "neighbour")
        self.step()

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        item = self.pick(data, [item for item, known in self.items.items() if known.refs])
        if item:
            self.arena.pool(item[0]).share([item[1]])
            self.items[item].refs += 1

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        item = self.pick(data, [item for item, known in self.items.items() if known.refs])
        if item and self.arena.can_take({item[0]: 1}):
            self.arena.pool(item[0]).share([item[1]])
            self.items[item].refs += 1
            self.copies.append((item, *self.took(item[0], 1, "fork")))

    @rule(data=st.data(), count=st.integers(1, 30))
    def free(self, data: st.DataObject, count: int) -> None:
        busy = {item for pair in self.copies for item in pair}
        for item in data.draw(st.permutations([item for item in self.items if item not in busy]))[:count]:
            if self.items[item].refs:
                self.drop(item)

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        written = [item for item, known in self.items.items() if known.refs and known.content is not None]
        if item := self.pick(data, written):
            self.pin_item(item)

    def pin_item(self, item: Item) -> None:
        self.arena.pool(item[0]).pin([item[1]])
        self.items[item].pins += 1
        self.items[item].pinned_at = self.arena.pool(item[0]).offset(item[1])

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        item = self.pick(data, [item for item, known in self.items.items() if known.pins])
        if item:
            known = self.items[item]
            assert self.arena.pool(item[0]).offset(item[1]) == known.pinned_at
            assert self.arena.moves or self.read(item) == {known.content}
            known.pins -= 1
            self.arena.pool(item[0]).unpin([item[1]])
            if not known.refs and not known.pins:
                del self.items[item]

    @rule()
    def step(self) -> None:
        """Do what was planned, in the order of the stream."""
        for source, target, num_bytes in self.arena.moves:
            assert abs(source - target) * 256 >= num_bytes
            part = self.arena.bytes[source * 256 : source * 256 + num_bytes].clone()
            self.arena.bytes[target * 256 : target * 256 + num_bytes].copy_(part)
        moved = Counter(self.arena.moved)
        self.arena.moves.clear()
        self.arena.moved.clear()
        assert not any(self.items[item].pins for item in moved if item in self.items)
        targets = {target for _, target in self.copies}
        for item, known in self.items.items():
            if known.content is None and item not in targets:
                self.written += 1
                known.content = self.written % 251 + 1
                self.span(item).fill_(known.content)
        for source, target in self.copies:
            self.span(target).copy_(self.span(source))
            self.items[target].content = self.items[source].content
        for source, _ in self.copies:
            self.drop(source)
        self.copies.clear()
        for item, known in self.items.items():
            assert self.read(item) == {known.content}, f"{item} lost its content"
        assert not self.arena.bytes[: self.arena.slabs.scratch_bytes].any(), "the scratch item is nobody's"

    @precondition(lambda self: not self.copies)
    @rule(data=st.data(), count=st.integers(1, 10))
    def reclaim(self, data: st.DataObject, count: int) -> None:
        forgotten = data.draw(st.permutations([item for item, known in self.items.items() if known.refs]))[:count]
        expected = Counter(self.items[item].owner for item in forgotten)
        for item in forgotten:
            self.items[item].refs = 0
        leaked: Counter[str] = Counter()
        for kind in range(len(self.kinds)):
            held = [handle for (of, handle), known in self.items.items() if of == kind for _ in range(known.refs)]
            leaked.update(self.arena.pool(kind).reclaim(held))
        assert leaked == expected
        self.items = {item: known for item, known in self.items.items() if known.refs or known.pins}

    @invariant()
    def live_items_do_not_overlap(self) -> None:
        end = self.arena.slabs.scratch_bytes
        for offset, size in sorted(
            (self.arena.pool(kind).offset(handle) * 256, self.kinds[kind].item_bytes) for kind, handle in self.items
        ):
            assert offset >= end
            end = offset + size
        assert end <= self.arena.bytes.numel()

    @invariant()
    def counts_agree(self) -> None:
        for kind, pool in enumerate(self.arena.pools):
            known = {handle: known for (of, handle), known in self.items.items() if of == kind}
            assert pool.used == len(known)
            assert pool.num_refs == sum(each.refs for each in known.values())
            assert {handle: refs for handle, _, refs in pool.held()} == {h: each.refs for h, each in known.items()}
        assert self.arena.free_slabs + sum(pool.num_slabs for pool in self.arena.pools) == self.arena.slabs.num_slabs
        usage = self.arena.usage()
        assert usage.used_bytes + usage.unused_bytes + self.arena.slabs.scratch_bytes == self.arena.bytes.numel()
        assert usage.stranded_bytes >= 0

    def span(self, item: Item):  # type: ignore[no-untyped-def]
        at = self.arena.pool(item[0]).offset(item[1]) * 256
        return self.arena.bytes[at : at + self.kinds[item[0]].item_bytes]

    def read(self, item: Item) -> set[int | None]:
        return set(self.span(item).unique().tolist())

    def teardown(self) -> None:
        if not hasattr(self, "items"):
            return
        self.copies.clear()
        for item, known in list(self.items.items()):
            pool = self.arena.pool(item[0])
            pool.release([item[1]] * known.refs)
            pool.unpin([item[1]] * known.pins)
        assert self.arena.free_slabs == self.arena.slabs.num_slabs
        assert all(pool.used == pool.num_refs == pool.pinned_slabs == 0 for pool in self.arena.pools)
        usage = self.arena.usage()
        assert usage.unused_bytes == self.arena.bytes.numel() - self.arena.slabs.scratch_bytes


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
