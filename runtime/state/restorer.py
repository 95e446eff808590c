"""State on its way back to the device: what tiers hold of a waiting sequence is put into the prefix tree.

Memory is taken while a step is planned, and filled once that is launched: what it moves out of the way is gone then.
"""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import repeat
from typing import NamedTuple

from treadle.graph.state import State
from treadle.runtime.sequence import Sequence
from treadle.runtime.state.arena import Arena
from treadle.runtime.state.cache import PrefixCache
from treadle.runtime.state.digest import chain
from treadle.runtime.state.holders import Holders
from treadle.runtime.state.node import TOKEN_BYTES, Node
from treadle.runtime.state.pool import Handle
from treadle.runtime.state.room import Counts, Others
from treadle.runtime.state.sinker import Sinker
from treadle.runtime.state.snapshots import NEVER, Snapshot
from treadle.runtime.state.tiers.ticket import Object, Ticket, Where
from treadle.runtime.state.tiers.tiers import Tiers

ASKED_PAGES = 64
"""Pages that tiers are asked for first, then twice as many each time, until they have one not: most of a new prompt is
never asked for, and a connector that answers slowly is waited for a few times only."""


@dataclass
class _Job:
    """What a sequence could have back, and from when on it is on its way."""

    tokens: array[int]
    base: Node
    """where the pages end that are there"""
    digests: list[bytes]
    """of no page, one page, ..."""
    position: int
    """tokens to go on from"""
    pages: list[bytes]
    """keys of the pages behind ``base``"""
    items: list[list[bytes]] | None
    """keys of a snapshot's items"""
    places: list[Where | None]
    """where the pages are"""
    taken: list[list[Handle]] = field(default_factory=list)
    """by kind; of the first, pages and then what is the snapshot's"""
    ticket: Ticket | None = None

    def brings(self, other: _Job) -> bool:
        """Whether the first item that ``other`` lacks is among this one's.

        It may lack none: where a chunk begins, a window reaches back to nothing.
        """
        first = next(iter([*other.pages, *itertools.chain.from_iterable(other.items or ())]), None)
        return first is not None and (first in self.pages or any(first in keys for keys in self.items or ()))

    def need(self) -> Counts:
        need = {kind: len(keys) for kind, keys in enumerate(self.items or [])}
        return need | {0: need.get(0, 0) + len(self.pages)}


class _End(NamedTuple):
    """A position that one could go on from."""

    position: int
    items: list[list[bytes]] | None
    """keys of a snapshot's items, by kind"""
    places: list[Where | None]
    """where they are"""


class Restorer:
    """Finds out what tiers have, and fetches it."""

    def __init__(
        self, arena: Arena, cache: PrefixCache, holders: dict[int, Holders], tiers: Tiers, sinker: Sinker,
        state: State,
    ) -> None:  # fmt: skip
        self._arena, self._cache, self._holders, self._tiers, self._sinker = arena, cache, holders, tiers, sinker
        self._page_tokens, self._needs_snapshots = state.page_tokens, state.needs_checkpoints
        self._windows = range(1, len(state.groups))
        self._jobs: dict[Sequence, _Job] = {}
        self.restored_tokens = 0
        """tokens that did not have to be computed again"""
        self.failed_tokens = 0
        """tokens that a tier did not give although it had them"""

    @property
    def busy(self) -> bool:
        """Whether something is on its way."""
        return bool(self._jobs)

    @property
    def begins(self) -> bool:
        """Whether the next ``poll`` sends for something."""
        return any(job.ticket is None for job in self._jobs.values())

    def holds(self, sequence: Sequence, others: Others) -> bool:
        """Whether a waiting sequence should wait on: something is on its way to it, or may be soon."""
        if sequence in self._jobs or sequence.wait.joined in self._jobs:
            return True
        if sequence.wait.asked or not self._has_room(sequence, others):
            return False
        job, found = self._look(sequence)
        if job is not None and not job.position:
            return True
        # What is on its way for another one, say a system prompt that they share, is not fetched twice.
        sequence.wait.joined = self._who_brings(job)
        if sequence.wait.joined is not None:
            return True
        if job is not None and not self._make_room(job):
            if any(others):
                # Some of them will leave.
                sequence.wait.lacks = job.need()
                return False
            job = None
        self._tiers.count(found)
        sequence.wait.asked, sequence.wait.failed = True, self._lost_ahead(sequence, job)
        if job is None:
            return False
        self._take(sequence, job)
        return True

    def _make_room(self, job: _Job) -> bool:
        """Make room for what a job brings, and lock what that is behind."""
        self._cache.tree.lock(job.base)
        if self._cache.room.fits(job.need()) and self._cache.room.make(job.need()):
            return True
        self._cache.tree.unlock(job.base)
        return False

    def _who_brings(self, wanted: _Job | None) -> Sequence | None:
        return next((each for each, job in self._jobs.items() if wanted is not None and job.brings(wanted)), None)

    def _has_room(self, sequence: Sequence, others: Others) -> bool:
        """Whether a sequence could come in, with what is known of it or what tiers have; else what is fetched for it
        would only be in the way."""
        room = self._cache.room
        if any(others) and not room.fits(sequence.wait.lacks):
            return False
        match = self._cache.tree.match(sequence.readable, self._cache.salt(sequence))
        beside = room.beside(sequence, others)
        if room.fits(room.needs(sequence, match, False), beside):
            return True
        free = match.snapshot is not None and not match.snapshot.locks
        return free and room.fits(room.needs(sequence, match, True), beside)

    def look_ahead(self, sequence: Sequence) -> None:
        """Bring what a sequence further back in the queue will want into host memory, unless it was asked for."""
        if sequence.wait.looked or sequence.wait.asked or sequence in self._jobs:
            return
        job, _ = self._look(sequence)
        if job is not None and not job.position:
            return
        sequence.wait.looked = True
        if job is not None:
            sequence.wait.sent = self._gain(job), self._tiers.prefetch([*self._objects(job)])

    def _gain(self, job: _Job) -> int:
        return job.position - job.base.end * self._page_tokens

    def _lost_ahead(self, sequence: Sequence, job: _Job | None) -> int:
        """Return the tokens that were found when the sequence stood further back, and that no tier gave then."""
        if sequence.wait.sent is None:
            return 0
        (gain, ticket), sequence.wait.sent = sequence.wait.sent, None
        if not ticket.done or all(ticket.ok):
            return 0
        lost = max(gain - (0 if job is None else self._gain(job)), 0)
        self.failed_tokens += lost
        return lost

    def poll(self) -> None:
        """Begin what was planned, and take in what has arrived. Before a step is planned."""
        for sequence, job in list(self._jobs.items()):
            if job.ticket is None:
                job.ticket = self._tiers.fetch(self._objects(job))
                assert len(job.ticket.ok) == sum(job.need().values()), "not all that was taken is fetched"
            if job.ticket is not None and job.ticket.done:
                del self._jobs[sequence]
                sequence.wait.asked, sequence.wait.coming = True, {}
                self._finish(sequence, job)

    def _look(self, sequence: Sequence) -> tuple[_Job | None, list[Where | None]]:
        """Return what can be fetched; with position 0 if that is not known yet; None if there is nothing. And answers.

        Connectors answer or are late: nothing is unknown for long.
        """
        # A copy, since a stop string may cut the sequence's own meanwhile.
        tokens, salt = sequence.readable[:], self._cache.salt(sequence)
        match = self._cache.tree.match(tokens, salt)
        most = max(len(tokens) - 1, 0)
        tree, base, size = self._cache.tree, match.deepest, self._page_tokens
        unknown = _Job(tokens, base, [], 0, [], None, [])
        digests = [*tree.digests(base.root)]
        for node in reversed([*base.path()]):
            digests += tree.digests(node)
        new: list[bytes] = []
        places: list[Where | None] = []
        begin, count = base.end * size, ASKED_PAGES * size
        while begin < most // size * size and None not in places:
            behind = tokens[begin : min(begin + count, most // size * size)].tobytes()
            names = chain(new[-1] if new else digests[-1], behind, size * TOKEN_BYTES)
            found = self._ask(sequence, names)
            if Where.PENDING in found:
                return unknown, []
            new += [name for name, _ in itertools.takewhile(lambda each: each[1] is not None, zip(names, found))]
            places += found
            begin, count = begin + count, 2 * count
        digests += new
        end, job = self._find_end(sequence, tokens, digests, match.position), None
        if end is not None:
            if Where.PENDING in end.places:
                return unknown, []
            pages = new[: max(end.position // size - base.end, 0)]
            job = _Job(tokens, base, digests, end.position, pages, end.items, places[: len(pages)])
            places += end.places
        sequence.wait.heard.clear()
        return job, places

    def _ask(self, sequence: Sequence, keys: list[bytes]) -> list[Where | None]:
        """Return where objects are. What connectors have said stays true for a sequence until it has heard all, since
        the answers of a slow one are old before the last is there."""
        heard = sequence.wait.heard
        new = [key for key in keys if key not in heard] if heard else keys
        answers = self._tiers.find(new)
        heard.update(pair for pair in zip(new, answers) if pair[1] is None or pair[1] is Where.CONNECTOR)
        if new is keys:
            return answers
        found = dict(zip(new, answers))
        return [found[key] if key in found else heard[key] for key in keys]

    def _find_end(self, sequence: Sequence, tokens: array[int], digests: list[bytes], known: int) -> _End | None:
        """Return the furthest position beyond ``known`` of which all is there, or where that is not known yet.

        First one position is asked about, then twice as many each time: few waits for connectors, little work for few.
        """
        candidates, count = self._candidates(tokens, digests, known, max(len(tokens) - 1, 0)), 1
        while group := [*itertools.islice(candidates, count)]:
            items = [
                self._cache.snapshot_keys(position, tail, digests) if tail or self._needs_snapshots else None
                for position, tail in group
            ]
            keys = [[*itertools.chain.from_iterable(each or ())] for each in items]
            answers = iter(self._ask(sequence, [*itertools.chain.from_iterable(keys)]))
            for (position, _), each, names in zip(group, items, keys):
                found = [*itertools.islice(answers, len(names))]
                if all(found):
                    return _End(position, each, found)
            count *= 2
        return None

    def _candidates(
        self, tokens: array[int], digests: list[bytes], known: int, most: int
    ) -> Iterator[tuple[int, bytes]]:
        """Yield positions beyond ``known`` where one might go on, the furthest first, and the tokens behind a page."""
        size = self._page_tokens
        for page in range(len(digests) - 1, -1, -1):
            for tail in sorted(self._sinker.tails.get(digests[page], ()), key=len, reverse=True):
                position = page * size + len(tail) // TOKEN_BYTES
                if known < position <= most and tokens[page * size : position].tobytes() == tail:
                    yield position, tail
            if page * size <= known:
                return
            yield page * size, b""

    def _take(self, sequence: Sequence, job: _Job) -> None:
        job.taken = [[] for _ in self._arena.pools]
        for kind, count in job.need().items():
            holders = self._holders.get(kind)
            take = self._arena.pool(kind).take if holders is None else holders.take
            job.taken[kind] = take(count, sequence.id)
        # Not before all are there: what is pinned cannot make way for items of another kind.
        for pool, handles in zip(self._arena.pools, job.taken):
            pool.pin(handles)
        # Of a snapshot it will want copies, but for whole pages.
        windows = {kind: len(job.taken[kind]) - (job.position % self._page_tokens > 0) for kind in self._windows}
        sequence.wait.coming = {0: job.base.end + len(job.pages)} | (windows if job.items is not None else {})
        self._jobs[sequence] = job

    def _objects(self, job: _Job) -> Iterator[Object]:
        """Yield all that a job wants, in the order in which it is taken; offsets are 0 where nothing is yet."""
        keys = [job.pages] if job.items is None else [[*job.pages, *job.items[0]], *job.items[1:]]
        for kind, names in enumerate(keys):
            pool, name = self._arena.pool(kind), "page" if kind == 0 else "checkpoint"
            offsets = map(pool.offset, job.taken[kind]) if job.taken else repeat(0)
            yield from map(Object, names, repeat(name), offsets, repeat(pool.item_bytes))

    def _finish(self, sequence: Sequence, job: _Job) -> None:
        """Put what has arrived into the tree."""
        assert job.ticket is not None
        tree, ok, salt = self._cache.tree, job.ticket.ok, self._cache.salt(sequence)
        for pool, handles in zip(self._arena.pools, job.taken):
            pool.unpin(handles)
        whole = next((index for index, each in enumerate(ok[: len(job.pages)]) if not each), len(job.pages))
        pages = job.taken[0][:whole]
        if pages:
            end = job.base.end + whole
            node = tree.insert(job.tokens, [*[0] * job.base.end, *pages], salt)
            assert node.end == end
            if node.digests is None:
                node.digests = job.digests[node.start + 1 : end + 1]
            kept = [page for page in pages if self._arena.pool(0).refs(page) > 1]
            self._sinker.note_sunk(kept)
        restored = (job.base.end + whole) * self._page_tokens
        rest = [job.taken[0][len(job.pages) :], *job.taken[1:]]
        behind = ok[len(job.pages) :]
        node_at = tree.find(job.tokens, job.position // self._page_tokens, salt) if job.items is not None else None
        self._arena.pool(0).release(job.taken[0][: len(job.pages)])
        for kind, holders in self._holders.items():
            holders.let_go(rest[kind])
        if node_at is not None and all(behind):
            size = self._page_tokens
            tail = job.tokens[job.position // size * size : job.position].tobytes()
            if all(each.tail != tail for each in node_at.snapshots):
                items = tuple(tuple(handles) for handles in rest)
                owner = sequence.id if sequence.preemptions else ""
                tree.keep(node_at, Snapshot(job.position, tail, items, NEVER, sunk=True, owner=owner))
                rest = []
            restored = job.position
        elif self._needs_snapshots:
            restored = 0
        for pool, handles in zip(self._arena.pools, rest):
            pool.release(handles)
        tree.unlock(job.base)
        sequence.wait.near = max(sequence.wait.near, min(restored, job.position))
        self.restored_tokens += min(restored, job.position)
        self._note_places(sequence, job, min(restored, job.position))
        failed = max(job.position - restored, 0)
        sequence.wait.failed += failed
        self.failed_tokens += failed

    def _note_places(self, sequence: Sequence, job: _Job, restored: int) -> None:
        """Note where the tokens up to ``restored`` came from; those behind the last page from where that was."""
        size, places = self._page_tokens, [place or Where.HOST for place in job.places] or [Where.HOST]
        left = max(restored - job.base.end * size, 0)
        pages = -(-left // size)
        places = [*places, *[places[-1]] * (pages - len(places))][:pages]
        for place, count in Counter(places).items():
            tokens = count * size - (pages * size - left if place is places[-1] else 0)
            sequence.wait.restored[place.value] = sequence.wait.restored.get(place.value, 0) + tokens
