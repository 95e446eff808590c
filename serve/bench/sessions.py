"""Conversations that go on: what an engine computes again of what it has computed, and how soon it answers."""

from __future__ import annotations

import random
from dataclasses import dataclass

from treadle.conf.recipe import Returning, Sessions
from treadle.serve.bench.play import CountingPlayer, Trace
from treadle.serve.bench.quantiles import quantile


@dataclass
class Conversation:
    """All tokens so far, and how many of them the program has been fed."""

    tokens: list[int]
    fed: int = 0


class _Count:
    """Adds up prompt tokens, and those that were fed to the program although it had been fed them before."""

    def __init__(self, player: CountingPlayer, shared: int = 0) -> None:
        """``shared``: tokens that conversations begin with, all the same, and that are fed once."""
        self._player = player
        self._before = player.computed_tokens()
        self._prompts, self._needed, self._answers = 0, shared, 0

    def note(self, conversation: Conversation, trace: Trace) -> None:
        """Take in a turn: its prompt, and its answer, whose last token was not fed."""
        self._prompts += len(conversation.tokens)
        self._needed += len(conversation.tokens) - conversation.fed
        self._answers += len(trace.tokens) - 1
        conversation.fed = len(conversation.tokens) + len(trace.tokens) - 1
        conversation.tokens += trace.tokens

    @property
    def recomputed_pct(self) -> float:
        """Tokens fed beyond those that were new, of all prompt tokens."""
        fed = self._player.computed_tokens() - self._before
        return 100 * (fed - self._needed - self._answers) / self._prompts


def measure_sessions(row: Sessions, player: CountingPlayer, vocab: int, draw: random.Random) -> dict[str, float]:
    """Return the figures of one trial."""

    def some(count: int) -> list[int]:
        return draw.choices(range(vocab), k=count)

    system = some(row.system)
    conversations = [Conversation([*system], fed=row.system) for _ in range(row.sessions)]
    count, first, later = _Count(player, row.system), list[float](), list[float]()
    begin_s = end_s = None
    for turn in range(row.turns):
        order = draw.sample(conversations, len(conversations))
        for at in range(0, len(order), row.parallel):
            together = order[at : at + row.parallel]
            for each in together:
                each.tokens += some(row.user)
            traces = player.play([each.tokens for each in together], row.output)
            for each, trace in zip(together, traces):
                count.note(each, trace)
                (later if turn else first).append(trace.ttft_s * 1e3)
            begin_s = traces[0].arrival_s if begin_s is None else begin_s
            end_s = max(trace.token_s[-1] for trace in traces)
    assert begin_s is not None
    assert end_s is not None
    return {
        "recomputed_pct": count.recomputed_pct,
        "first_ttft_p50_ms": quantile(first, 0.5),
        "ttft_p50_ms": quantile(later, 0.5),
        "ttft_p99_ms": quantile(later, 0.99),
        "total_s": end_s - begin_s,
    }


def measure_return(row: Returning, player: CountingPlayer, vocab: int, draw: random.Random) -> dict[str, float]:
    """Return the figures of one trial."""

    def some(count: int) -> list[int]:
        return draw.choices(range(vocab), k=count)

    fresh = player.play([some(row.context + row.user)], 2)[0]
    conversation = Conversation(some(row.context))
    count = _Count(player)
    count.note(conversation, player.play([conversation.tokens], 2)[0])
    for _ in range(row.others):
        other = Conversation(some(row.context))
        count.note(other, player.play([other.tokens], 2)[0])
    conversation.tokens += some(row.user)
    back = player.play([conversation.tokens], 2)[0]
    count.note(conversation, back)
    return {
        "ttft_ms": back.ttft_s * 1e3, "fresh_ttft_ms": fresh.ttft_s * 1e3, "recomputed_pct": count.recomputed_pct,
    }  # fmt: skip
