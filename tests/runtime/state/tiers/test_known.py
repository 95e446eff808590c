from __future__ import annotations

from contextlib import nullcontext

import pytest
from tiers_engine import Clock, DictStore, key

from treadle.runtime.state.tiers import known as module
from treadle.runtime.state.tiers.known import HOLDS_S, LACKS_S, Known
from treadle.runtime.state.tiers.lane import Lane
from treadle.runtime.state.tiers.store import Scope


def test_answers_are_believed_for_a_while_and_nothing_is_asked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    store, clock = DictStore(), Clock()
    store.kept[key(1)] = b""
    scope = Scope(namespace=bytes(16), memory=memoryview(b""), holds=lambda _: (), offer=lambda *_: nullcontext(None))
    lane = Lane("test", store, scope, clock=clock)
    known = Known(lane, clock, limit_s=5.0)

    def answer() -> None:
        while lane.waiting:
            lane.poll()

    known.ask([key(1), key(2), key(1)])
    known.ask([key(1), key(2)])
    assert known.is_asked(key(1))
    assert known.asking
    answer()
    assert (known.holds(key(1)), known.holds(key(2)), known.holds(key(3))) == (True, False, None)
    assert store.calls == [("open", 0), ("lookup", 2)]
    clock.now += LACKS_S
    assert (known.holds(key(1)), known.holds(key(2))) == (True, None)
    known.ask([key(1), key(2)])
    answer()
    assert store.calls[2:] == [("lookup", 1)]
    clock.now += HOLDS_S
    assert known.holds(key(1)) is None
    known.note([key(7)], True)
    assert known.holds(key(7))
    monkeypatch.setattr(module, "MAX_KEYS", 2)
    known.note([key(8), key(9)], True)
    assert [known.holds(key(n)) for n in (7, 8, 9)] == [None, True, True]
    assert not known.asking
    lane.close(5.0)
