from __future__ import annotations

import threading

from tiers_engine import DictStore, engine, link, until


def test_stores_that_hang_while_they_save_leave_most_of_a_small_pool_to_others() -> None:
    first, second, gate = DictStore(), DictStore(), threading.Event()
    with engine(link(first, "first"), link(second, "second"), host=16) as e:
        first.gates["save"] = gate
        assert e.sink(*range(8)) == [True] * 8
        until(lambda: len(second.kept) == 8 and any(call == "save" for call, _ in first.calls), e.tiers)
        second.calls.clear()
        second.gates["save"] = gate
        assert e.sink(*range(8, 16)) == [True] * 8
        until(lambda: any(call == "save" for call, _ in second.calls), e.tiers)
        assert e.sink(*range(16, 24)) == [True] * 8
        gate.set()
