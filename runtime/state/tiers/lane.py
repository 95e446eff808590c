"""The way to one store: threads that call it, time limits, and a breaker for each kind of call.

The step loop hands in work and takes outcomes; it waits for nothing. Work that is late is given up at its limit: its
outcome is failure at once. If its turn had come, its thread and the memory that it fills stay out of use until the
store returns; else it is over.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from treadle.runtime.state.tiers.breaker import Breaker
from treadle.runtime.state.tiers.seal import check_seal
from treadle.runtime.state.tiers.store import Scope, Store

Call = Literal["lookup", "load", "save", "release"]
CALLS: tuple[Call, ...] = ("lookup", "load", "save", "release")
Buffers = tuple[Sequence[bytes], Sequence[memoryview]]

MAX_WAITING = 1024
"""Pieces of work that may wait for the same threads; more fail at once."""
PATIENCE = 4
"""So many times its limit a read waits for its turn while others are answered."""
OPEN_LIMIT_S = 60.0
"""Seconds for the first call, which opens the store."""


@dataclass(eq=False, slots=True)
class Work:
    """One call of a store."""

    call: Call
    keys: Sequence[bytes]
    prepare: Callable[[], Buffers] | None
    """gives the buffers, and the keys that there are some for; called on the lane's thread"""
    settle: Callable[[Work], None]
    """called by ``poll`` once the outcome is known"""
    release: Callable[[Work], None] | None
    """called by ``poll`` once the store uses no memory of the work any more"""
    limit_s: float
    queued: float
    begun: float = math.inf
    outcome: dict[bytes, bool] = field(default_factory=dict)
    settled: bool = False
    late: bool = False
    """whether it took too long and is not over: its memory may still be used"""
    turn: threading.Lock = field(default_factory=threading.Lock)
    """taken once: by the thread that begins it, or by ``poll``, after which it never begins"""

    def end(self, answered: float) -> float:
        """Return when it is late. Nobody waits for a write that has not begun, and a read that has not is patient for
        as long as the store answers others, ``answered`` last, up to PATIENCE times its limit."""
        if self.begun < math.inf or self.call not in ("lookup", "load"):
            return self.begun + self.limit_s
        return min(max(self.queued, answered) + self.limit_s, self.queued + PATIENCE * self.limit_s)


@dataclass(slots=True)
class CallStats:
    """What happened to one kind of call of a store."""

    calls: int = 0
    keys: int = 0
    done: int = 0
    """keys that were found, loaded or saved"""
    num_bytes: int = 0
    """bytes loaded or saved"""
    errors: int = 0
    """calls that raised"""
    timeouts: int = 0
    corrupt: int = 0
    """objects whose bytes were not those that were saved"""
    failed: int = 0
    """keys whose call has ended without them"""
    held_off: int = 0
    """keys not asked about because the breaker was open or too much waited"""
    seconds: float = 0.0
    """sum over calls of the time in the store"""


@dataclass(slots=True)
class _Outcome:
    done: dict[bytes, bool]
    seconds: float
    error: str = ""
    late: bool = False
    raised: bool = False
    num_bytes: int = 0
    corrupt: int = 0


class Lane:
    """A store behind queues. ``submit``, ``poll`` and ``close`` are the step loop's alone."""

    def __init__(
        self, name: str, store: Store, scope: Scope, *, clock: Callable[[], float] = time.monotonic, readers: int = 2,
        wake: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """``wake`` is called on a lane's thread when there is something to ``poll``."""
        self.name, self.store = name, store
        self._scope, self._clock, self._wake = scope, clock, wake
        self._opening = threading.Lock()
        self._opened = self._closed = False
        self.stats = {call: CallStats() for call in CALLS}
        self.last_error = ""
        self._breakers = {call: Breaker(clock) for call in CALLS}
        self._answered = dict.fromkeys(CALLS, -math.inf)
        self._queues: dict[Call, queue.SimpleQueue[Work | None]] = {}
        self._finished: queue.SimpleQueue[tuple[Work, _Outcome]] = queue.SimpleQueue()
        self._under_way: dict[Work, None] = {}
        self._threads: list[tuple[threading.Thread, queue.SimpleQueue[Work | None]]] = []
        for calls, count in (("lookup",), 1), (("load",), readers), (("save", "release"), 1):
            self._start(calls, count)  # type: ignore[arg-type]
        self.submit("lookup", (), ignore, limit_s=OPEN_LIMIT_S)

    @property
    def is_open(self) -> bool:
        """Whether the store is ready."""
        return self._opened

    @property
    def waiting(self) -> int:
        """Pieces of work that are not over."""
        return len(self._under_way)

    @property
    def opened(self) -> int:
        """How often a breaker opened."""
        return sum(breaker.opened for breaker in self._breakers.values())

    def held_off(self, call: Call) -> bool:
        """Whether the store is left alone with this kind of call, for what it did before; a probe may be due."""
        return self._breakers[call].is_open

    def refuses(self, call: Call) -> bool:
        """Whether no call of this kind would be made now."""
        return self._closed or self._queues[call].qsize() >= MAX_WAITING or self._breakers[call].pauses

    def peek(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Ask an instant store at once; it has nothing while it is not open."""
        assert self.store.instant, "a store that may take long is asked by submit"
        none = [False] * len(keys)
        if not self._opened:
            return none
        try:
            return _checked(keys, self.store.lookup(keys))
        except Exception as problem:
            self.last_error = f"{type(problem).__name__}: {problem}"
            self.stats["lookup"].errors += 1
            return none

    def usage(self) -> tuple[int, int] | None:
        """Return the bytes and objects of the store, None if it does not tell."""
        try:
            usage = self.store.usage() if self._opened else None
            return None if usage is None else (int(usage[0]), int(usage[1]))
        except Exception:
            return None

    def events(self) -> list[tuple[str, bytes]]:
        """Return what the store says has happened since the last call."""
        try:
            return list(self.store.events()) if self._opened else []
        except Exception:
            return []

    def submit(
        self, call: Call, keys: Sequence[bytes], settle: Callable[[Work], None], *, limit_s: float,
        prepare: Callable[[], Buffers] | None = None, release: Callable[[Work], None] | None = None,
    ) -> bool:  # fmt: skip
        """Queue a call and return whether it will be made; if so ``settle``, then ``release`` is called, each once."""
        stats, waiting = self.stats[call], self._queues[call]
        if self.refuses(call) or not self._breakers[call].allows():
            stats.held_off += len(keys)
            return False
        stats.calls += 1
        stats.keys += len(keys)
        work = Work(call, keys, prepare, settle, release, limit_s, self._clock())
        self._under_way[work] = None
        waiting.put(work)
        return True

    def poll(self) -> None:
        """Hand out outcomes, and give up what is late."""
        while not self._finished.empty():
            work, outcome = self._finished.get()
            self._answered[work.call] = self._clock()
            if not work.settled:
                self._settle(work, outcome)
            self._over(work)
        if not self._under_way:
            return
        now = self._clock()
        for work in [each for each in self._under_way if not each.settled]:
            if work.end(self._answered[work.call]) <= now:
                self._give_up(work, now)

    def _give_up(self, work: Work, now: float) -> None:
        """Settle what is late. A store that answered others meanwhile has too much to do, and is not to blame."""
        work.late, stats = not work.turn.acquire(blocking=False), self.stats[work.call]
        none, seconds = dict.fromkeys(work.keys, False), now - work.queued
        if not work.late and self._answered[work.call] > work.queued:
            stats.held_off += len(work.keys)
            self._settle(work, _Outcome(none, 0.0))
        else:
            stats.timeouts += 1
            self._settle(work, _Outcome(none, seconds, f"{work.call} takes more than {work.limit_s:g} s", late=True))
        if not work.late:
            self._over(work)

    def _over(self, work: Work) -> None:
        del self._under_way[work]
        if work.release is not None:
            work.release(work)

    def close(self, limit_s: float) -> None:
        """End the threads, after what was submitted, and close the store; what takes longer is left behind."""
        self._closed = True
        for _, waiting in self._threads:
            waiting.put(None)
        closing = threading.Thread(target=self._close_store, name=f"{self.name} close", daemon=True)
        closing.start()
        closing.join(limit_s)

    def _start(self, calls: tuple[Call, ...], count: int) -> None:
        """Make threads that share a queue of these calls."""
        waiting: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        for call in calls:
            self._queues[call] = waiting
        for _ in range(count):
            name = f"{self.name} {calls[0]}"
            thread = threading.Thread(target=self._serve, args=(waiting,), name=name, daemon=True)
            thread.start()
            self._threads.append((thread, waiting))

    def _settle(self, work: Work, outcome: _Outcome) -> None:
        stats, breaker = self.stats[work.call], self._breakers[work.call]
        work.settled, work.outcome = True, outcome.done
        stats.done += sum(outcome.done.values())
        stats.failed += len(work.keys) - sum(outcome.done.values())
        stats.num_bytes += outcome.num_bytes
        stats.seconds += outcome.seconds
        stats.errors += outcome.raised
        stats.corrupt += outcome.corrupt
        if outcome.error:
            self.last_error = outcome.error
        # A store that answers from memory has forgotten what was wrong; another one may offer it again and again.
        if outcome.error and not (outcome.corrupt and self.store.instant):
            breaker.fail(late=outcome.late)
        else:
            breaker.succeed()
        work.settle(work)

    def _serve(self, waiting: queue.SimpleQueue[Work | None]) -> None:
        """Do the work of a queue until it ends; runs on the lane's threads."""
        while (work := waiting.get()) is not None:
            if work.turn.acquire(blocking=False):
                self._finished.put((work, self._call(work)))
                self._wake()
            # While the queue is empty, nothing of the last work is kept alive.
            del work

    def _call(self, work: Work) -> _Outcome:
        begin = self._clock()
        try:
            outcome = self._do(work)
        # Stores are foreign code: whatever they raise costs this call alone.
        except BaseException as problem:
            none = dict.fromkeys(work.keys, False)
            outcome = _Outcome(none, 0.0, f"{type(problem).__name__}: {problem}", raised=True)
        outcome.seconds = self._clock() - begin
        return outcome

    def _do(self, work: Work) -> _Outcome:
        self._open()
        # Opening has a limit of its own.
        work.begun = self._clock()
        if work.call == "release":
            self.store.release(work.keys)
            return _Outcome(dict.fromkeys(work.keys, True), 0.0)
        if work.call == "lookup":
            found = self.store.lookup(work.keys) if work.keys else ()
            return _Outcome(_by_key(work.keys, found), 0.0)
        assert work.prepare is not None
        keys, buffers = work.prepare()
        done = _by_key(keys, (self.store.load if work.call == "load" else self.store.save)(keys, buffers))
        num_bytes = sum(len(buffer) for key, buffer in zip(keys, buffers, strict=True) if done[key])
        outcome = _Outcome(done, 0.0, num_bytes=num_bytes)
        if work.call == "load":
            self._verify(outcome, dict(zip(keys, buffers, strict=True)))
        return outcome

    def _verify(self, outcome: _Outcome, buffers: dict[bytes, memoryview]) -> None:
        """Make misses of the objects whose bytes are not those that were saved, and have the store forget them."""
        wrong = [
            key
            for key, found in outcome.done.items()
            if found and not check_seal(buffers[key], key=key, scope=self._scope.namespace)
        ]
        if wrong:
            outcome.done.update(dict.fromkeys(wrong, False))
            outcome.num_bytes -= sum(len(buffers[key]) for key in wrong)
            outcome.corrupt, outcome.error = len(wrong), f"{len(wrong)} objects were not what had been saved"
            self.store.release(wrong)

    def _open(self) -> None:
        with self._opening:
            if not self._opened:
                self.store.open(self._scope)
                self._opened = True

    def _close_store(self) -> None:
        """Close the store once no call of it is running: native code does not survive otherwise."""
        for thread, _ in self._threads:
            thread.join()
        # Also a store that failed to open may hold something.
        self.store.close()


def ignore(work: Work) -> None:
    """Take note of nothing."""


def _by_key(keys: Sequence[bytes], outcome: Sequence[bool]) -> dict[bytes, bool]:
    return dict(zip(keys, _checked(keys, outcome), strict=True))


def _checked(keys: Sequence[bytes], outcome: Sequence[bool]) -> list[bool]:
    if len(outcome) != len(keys):
        raise ValueError(f"{len(outcome)} outcomes for {len(keys)} keys")
    return [bool(each) for each in outcome]
