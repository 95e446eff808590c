"""The chain below the device: pinned host memory, then disk and connectors, which are filled and read through it.

The step loop calls these methods and none of them blocks: copies run on side streams, stores are called by threads, and
``poll``, once a step, takes the outcomes. What sinks is written on to every store at once, not when it is evicted: so
it survives a kill of the process, and others find it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from treadle.runtime.state.tiers.disk import DiskStore
from treadle.runtime.state.tiers.host import Entry, HostPool
from treadle.runtime.state.tiers.known import Known
from treadle.runtime.state.tiers.lane import Lane, ignore
from treadle.runtime.state.tiers.loads import Loads, Source
from treadle.runtime.state.tiers.mover import Mover
from treadle.runtime.state.tiers.pace import Pace
from treadle.runtime.state.tiers.saves import Saves, Target
from treadle.runtime.state.tiers.seal import SEAL_BYTES, check_seal, namespace
from treadle.runtime.state.tiers.stats import TierStats
from treadle.runtime.state.tiers.store import Scope, Store
from treadle.runtime.state.tiers.ticket import Object, Ticket, Where

if TYPE_CHECKING:
    from torch import Tensor

    from treadle.kernels.backend.protocol import Backend, Event, Stream

PIN_SHARE = 0.5
"""The most of the pool that may be pinned."""
FLIGHT_SHARE = 0.5
"""The most of the pool that sinking objects, and loads, may be filling at once."""
LIFTED_TOGETHER = 64
"""Objects of a fetch that are copied at a time."""
POLL_S = 0.0002
"""How often a loop without a step looks for copies that are done."""
CLOSE_S = 5.0
CLEAR_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Link:
    """A store in the chain."""

    name: str
    store: Store
    where: Where
    limit_s: float
    """seconds that a call may take"""
    readers: int = 2
    """threads that load"""


class _Rising(NamedTuple):
    """An object of the host's that is to be copied to the arena."""

    entry: Entry
    offset_units: int
    ticket: Ticket
    number: int
    """of the object in the ticket"""
    mark: Event[None] | None
    """the end of what may still use the memory; None: of all that was launched when it is copied"""


class Tiers:
    """Objects outside the device, by their keys. Not safe for several threads."""

    def __init__(
        self, backend: Backend, arena: Tensor, stream: Stream, *, host_bytes: int, sizes: Sequence[int], model: str,
        layout: str, links: Sequence[Link] = (), clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """``arena`` [bytes] uint8, computed on ``stream``; ``sizes``: bytes of the kinds of objects.

        ``model`` is the checkpoint's hash, ``layout`` says everything else that the bytes' meaning depends on.
        """
        self._scope = namespace(model, layout)
        self._pool = HostPool(backend.host(host_bytes), sizes, scope=self._scope)
        self.pace = Pace(clock)
        self._mover = Mover(backend, arena, self._pool.memory, stream, self.pace)
        self._woken = threading.Event()
        opened = Scope(namespace=self._scope, memory=self._pool.view, holds=self._hold_any, offer=self._offer)
        self._links = {link.name: link for link in links}
        limit = int(self._pool.capacity * FLIGHT_SHARE)
        # A call that hangs keeps the room of an object at least: all readers of a store together leave others some.
        most = max(1, limit // (max(sizes, default=0) + SEAL_BYTES) // max(1, len(links)))
        # Others may ask for what is here as soon as a lane is made.
        self._lanes: dict[str, Lane] = {}
        for link in links:
            wake, readers = self._woken.set, min(link.readers, most)
            self._lanes[link.name] = Lane(link.name, link.store, opened, clock=clock, readers=readers, wake=wake)
        self._known = {
            link.name: Known(self._lanes[link.name], clock, limit_s=link.limit_s)
            for link in links
            if not link.store.instant
        }
        sources = [
            Source(
                lane=self._lanes[link.name],
                limit_s=link.limit_s,
                holds=partial(self._holds, link.name),
                lacks=partial(self._note, link.name, False),
            )
            for link in links
        ]
        self._loads = Loads(self._pool, sources, clock, limit_bytes=limit)
        targets = [
            Target(
                lane=self._lanes[link.name],
                limit_s=link.limit_s,
                holds=partial(self._holds, link.name),
                note=partial(self._note, link.name, True),
            )
            for link in links
        ]
        self._saves = Saves(self._pool, targets)
        self._sinking: dict[bytes, list[tuple[Ticket, int]]] = {}
        self._sink_bytes, self._sink_limit = 0, limit
        self._rising: deque[_Rising] = deque()
        self._marked: Event[None] | None = None
        self._closed = False
        self._stats = TierStats()

    def sink(self, objects: Sequence[Object]) -> Ticket:
        """Copy objects out of the arena, behind all that was launched; the sources must stay until it is done.

        Nothing waits for room: an object for which there is none has failed when this returns.
        """
        ticket, moves = Ticket(len(objects)), list[tuple[Entry, int]]()
        for index, each in enumerate(objects):
            if each.key in self._sinking:
                self._sinking[each.key].append((ticket, index))
            elif (entry := self._pool.acquire(each.key)) is not None:
                self._pool.release(entry)
                ticket.settle(index, True)
            elif (entry := self._reserve(each)) is not None:
                self._sinking[each.key] = [(ticket, index)]
                moves.append((entry, each.offset_units))
            else:
                ticket.settle(index, False)
                self._stats.sinks_refused += 1
        if moves:
            self._mover.sink(moves, partial(self._sunk, [entry for entry, _ in moves]))
        return ticket

    def find(self, keys: Sequence[bytes]) -> list[Where | None]:
        """Return the nearest place of each object, None if no tier is known to hold it."""
        found: list[Where | None] = [Where.HOST if key in self._pool else None for key in keys]
        for name in self._links:
            missing = [index for index, where in enumerate(found) if where in (None, Where.PENDING)]
            if not missing:
                break
            self._find_below(name, keys, missing, found)
        return found

    def count(self, found: Sequence[Where | None]) -> None:
        """Count answers of ``find`` that something was done about: the same is asked again while one is awaited."""
        self._stats.count_queries(found)

    def fetch(self, objects: Iterable[Object]) -> Ticket:
        """Copy objects into the arena, behind all that was launched, which may use the memory; from a store through
        the host. Each fails by itself if no tier gives it in time. The targets must stay until it is done."""
        ticket, mark = Ticket(), self._mark()
        for each in objects:
            index = ticket.expect()
            entry = self._pool.acquire(each.key, each.num_bytes)
            if entry is not None:
                self._stats.host_hits += 1
                self._rising.append(_Rising(entry, each.offset_units, ticket, index, mark))
                if index % LIFTED_TOGETHER == LIFTED_TOGETHER - 1:
                    # The first are on their way while the others are looked up.
                    self._lift()
            else:
                self._loads.want(each, partial(self._arrived, each, ticket, index))
        self._loads.start()
        self._lift()
        return ticket

    def prefetch(self, objects: Sequence[Object]) -> Ticket:
        """Bring objects from stores into host memory; their offsets are not used."""
        ticket = Ticket(len(objects))
        for index, each in enumerate(objects):
            if each.key in self._pool:
                ticket.settle(index, True)
            else:
                self._loads.want(each, partial(_note_arrival, ticket, index))
        self._loads.start()
        return ticket

    def poll(self, *, steps: bool = False) -> None:
        """Take the outcomes of transfers, settle tickets, and begin what there is room for now.

        Before each step is planned; ``steps``: whether others run, whose inputs and results must not wait for copies.
        """
        self._woken.clear()
        self.pace.tick(steps)
        self._marked = None
        self._mover.poll()
        for lane in self._lanes.values():
            lane.poll()
        if self._loads.busy:
            self._loads.start()
        self._lift()

    @property
    def busy(self) -> bool:
        """Whether a ticket is not done yet."""
        return self._mover.busy or self._loads.busy or bool(self._rising)

    @property
    def asking(self) -> bool:
        """Whether a connector's answer to ``find`` is awaited."""
        return any(known.asking for known in self._known.values())

    def wait(self, limit_s: float) -> None:
        """Block until there is something to ``poll``, for ``limit_s`` seconds at most: for a loop without a step."""
        end = time.monotonic() + limit_s
        while not (self._mover.ready or self._woken.is_set()) and (left := end - time.monotonic()) > 0:
            # The device does not wake anybody.
            self._woken.wait(min(left, POLL_S) if self._mover.busy else left)

    def demote(self, keys: Sequence[bytes]) -> None:
        """Make objects the first to leave host memory; stores keep them."""
        for key in keys:
            self._pool.demote(key)

    def pin(self, keys: Sequence[bytes], pinned: bool = True) -> list[bool]:
        """Keep objects in host memory, or no longer; whether that was done: not of what is not there, nor of more than
        half of it."""
        limit = int(self._pool.capacity * PIN_SHARE)
        return [self._pool.pin(key, pinned, limit=limit) for key in keys]

    def drop(self, keys: Sequence[bytes]) -> None:
        """Forget objects in all tiers, as soon as nobody uses them."""
        for key in keys:
            self._pool.drop(key)
        for name, lane in self._lanes.items():
            lane.submit("release", list(keys), ignore, limit_s=self._links[name].limit_s)
            if name in self._known:
                self._known[name].note(keys, False)

    def clear(self) -> None:
        """Forget all that this machine holds of the model, on host and disk; what others share stays."""
        here = self._pool.keys()
        for key in here:
            self._pool.drop(key)
        for name, link in self._links.items():
            if isinstance(link.store, DiskStore):
                self._lanes[name].submit("release", link.store.keys(), ignore, limit_s=CLEAR_S)

    def stats(self) -> TierStats:
        """Return what was done so far, and what is held now."""
        return self._stats.complete(self._pool, self._lanes, self._loads, self._sink_bytes)

    def events(self) -> dict[str, list[tuple[str, bytes]]]:
        """Return by tier what was stored and removed since the last call, the oldest left out if it is very much."""
        return {"host": self._pool.events(), **{name: lane.events() for name, lane in self._lanes.items()}}

    def close(self, limit_s: float = CLOSE_S) -> None:
        """Finish copies and, within about ``limit_s`` seconds, what is being saved. Nothing is called afterwards."""
        self._closed = True
        self._mover.close()
        rising, self._rising = [*self._rising], deque()
        self._lifted(rising, False)
        end = time.monotonic() + limit_s
        for lane in self._lanes.values():
            lane.close(max(0.0, end - time.monotonic()))
            lane.poll()
        # What waits for room has failed: no store is asked any more.
        self._loads.start()

    def _reserve(self, each: Object) -> Entry | None:
        if self._sink_bytes and self._sink_bytes + each.num_bytes > self._sink_limit:
            return None
        entry = self._pool.reserve(each.key, each.num_bytes)
        if entry is not None:
            self._sink_bytes += each.num_bytes
        return entry

    def _sunk(self, entries: list[Entry], ok: bool) -> None:
        for entry in entries:
            self._sink_bytes -= entry.num_bytes
            if ok:
                self._pool.commit(entry)
                self._stats.sunk_bytes += entry.num_bytes
                self._stats.sunk += 1
            else:
                self._pool.forget(entry)
            for ticket, index in self._sinking.pop(entry.key):
                ticket.settle(index, ok)
            self._pool.release(entry)
        if ok:
            self._saves.save(entries)

    def _note(self, name: str, holds: bool, keys: Sequence[bytes]) -> None:
        if name in self._known:
            self._known[name].note(keys, holds)

    def _arrived(self, each: Object, ticket: Ticket, index: int, entry: Entry | None) -> None:
        """Send on to the arena what a store gave; in ``poll``, with one mark for all."""
        if entry is None or self._closed or (held := self._pool.acquire(each.key)) is None:
            ticket.settle(index, False)
            return
        if self._marked is None:
            self._marked = self._mark()
        self._rising.append(_Rising(held, each.offset_units, ticket, index, self._marked))

    def _mark(self) -> Event[None] | None:
        """Return the end of what was launched, for copies that do not begin with it but as steps leave them room."""
        return self._mover.mark() if self.pace.steps else None

    def _lift(self) -> None:
        """Copy to the arena what is to go there, as far as it may be on its way now."""
        while self._rising and (not self._mover.lifting_bytes or self._mover.lifting_bytes < self.pace.num_bytes):
            room, batch = self.pace.num_bytes - self._mover.lifting_bytes, list[_Rising]()
            while self._rising and len(batch) < LIFTED_TOGETHER and (room > 0 or not batch):
                mark = self._rising[0].mark
                if mark is not None and not mark.done:
                    break
                batch.append(self._rising.popleft())
                room -= batch[-1].entry.num_bytes
            if not batch:
                return
            moves = [(each.entry, each.offset_units) for each in batch]
            self._mover.lift(moves, partial(self._lifted, batch), follow=any(each.mark is None for each in batch))

    def _lifted(self, batch: list[_Rising], ok: bool) -> None:
        self._pool.release(*(each.entry for each in batch))
        for each in batch:
            each.ticket.settle(each.number, ok)
        if ok:
            self._stats.lifted_bytes += sum(each.entry.num_bytes for each in batch)
            self._stats.lifted += len(batch)

    def _holds(self, name: str, key: bytes) -> bool | None:
        """Whether a store has an object; None: not known."""
        if name in self._known:
            return self._known[name].holds(key)
        return self._lanes[name].peek([key])[0]

    def _find_below(self, name: str, keys: Sequence[bytes], missing: list[int], found: list[Where | None]) -> None:
        """Look for the missing keys in one store."""
        if name not in self._known:
            held = self._lanes[name].peek([keys[index] for index in missing])
            for index in itertools.compress(missing, held):
                found[index] = self._links[name].where
            return
        known = self._known[name]
        known.ask(keys[index] for index in missing)
        for index in missing:
            if known.holds(keys[index]):
                found[index] = self._links[name].where
            elif known.is_asked(keys[index]):
                found[index] = Where.PENDING

    def _local(self) -> list[Lane]:
        return [lane for name, lane in list(self._lanes.items()) if self._links[name].where is Where.DISK]

    def _hold_any(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether the host or the disk has objects; called on threads of connectors."""
        held = [key in self._pool for key in keys]
        for lane in self._local():
            held = [a or b for a, b in zip(held, lane.peek(keys), strict=True)]
        return held

    @contextmanager
    def _offer(self, key: bytes, num_bytes: int) -> Iterator[memoryview | None]:
        """Give another engine an object of the host's or the disk's; called on threads of connectors."""
        entry = self._pool.acquire(key, num_bytes - SEAL_BYTES)
        if entry is not None:
            try:
                yield self._pool.sealed(entry)
            finally:
                self._pool.release(entry)
            return
        for lane in self._local():
            if lane.peek([key])[0]:
                buffer = memoryview(bytearray(num_bytes))
                whole = lane.store.load([key], [buffer])[0] and check_seal(buffer, key=key, scope=self._scope)
                if not whole:
                    lane.store.release([key])
                yield buffer if whole else None
                return
        yield None


def _note_arrival(ticket: Ticket, index: int, entry: Entry | None) -> None:
    ticket.settle(index, entry is not None)
