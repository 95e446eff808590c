from __future__ import annotations

import pytest
from tiny_model import write_model

from treadle.conf.recipe import Arrivals, Decode, Prefill, Rival, SharedPrefix, Throughput
from treadle.serve.bench.rivals import RivalError, RivalPlayer, plays

SIZES = {"threads": 1, "batch": 2, "context": 32}


def test_transformers_plays_a_directory(tmp_path):
    rival = Rival(engine="transformers", dtype="float32")
    with RivalPlayer(rival, write_model(tmp_path / "model"), **SIZES) as player:
        assert player.version.startswith("transformers 5.")
        traces = player.play([[1, 2, 3], [4, 5, 6]], 4)
        assert [len(trace.token_s) for trace in traces] == [4, 4]
        assert all(0 < trace.token_s[0] < trace.token_s[-1] for trace in traces)
        assert len(player.play([[7, 8]], 1)[0].token_s) == 1


def test_a_rival_that_cannot_start_says_why(tmp_path):
    absent = tmp_path / "absent"
    with pytest.raises(RivalError, match="absent"):
        RivalPlayer(Rival(engine="transformers"), absent, **SIZES)
    with pytest.raises(RivalError, match="No such file or directory"):
        RivalPlayer(Rival(engine="node-llama-cpp", folder=str(absent)), absent, **SIZES)


def test_rivals_take_part_where_all_requests_come_at_once():
    together = (Prefill(prompt=1), Decode(context=1), Throughput(requests=1, prompt=1, output=1))
    assert all(plays(row) for row in together)
    assert not plays(Arrivals(rate=1, requests=1, prompt=1, output=2))
    assert not plays(SharedPrefix(requests=1, shared=1, own=1, output=1))
