"""Counts, when sequences come in, where the state that they go on from was, and why there is not more of it."""

from __future__ import annotations

from treadle.runtime.request import PREEMPTED, RECOMPUTE_CAUSES
from treadle.runtime.sequence import Sequence
from treadle.runtime.state.misses import Misses


class Accounts:
    """Tokens and preemptions by reason. ``misses`` counts those of new prompts."""

    def __init__(self, misses: Misses) -> None:
        self.misses = misses
        self.recomputed = dict.fromkeys(RECOMPUTE_CAUSES, 0)
        """tokens of preempted requests that were computed again: there was no room for their state anywhere, or a tier
        did not give it back"""
        self.preempted = dict.fromkeys(PREEMPTED, 0)
        self.external_queries = self.external_hits = 0
        """tokens of prompts that the device lacked while there were tiers, and those of them that tiers gave"""

    def admitted(self, sequence: Sequence, position: int, reasons: dict[str, int], *, has_tiers: bool) -> None:
        """Count a sequence that goes on from ``position``; ``reasons`` are why a new one computes the rest."""
        where = self._where(sequence, position)
        external = position - where.get("device", 0)
        if sequence.preemptions:
            lost = sequence.left - position
            if lost > 0:
                self.recomputed["failed" if sequence.wait.failed else "evicted"] += lost
            self.preempted["recomputed" if lost > 0 else "moved" if external else "kept"] += 1
            return
        self.misses.add(reasons)
        sequence.missed_tokens = {reason: count for reason, count in reasons.items() if count}
        sequence.cached_tokens = where
        if has_tiers:
            self.external_queries += sequence.prompt_len - where.get("device", 0)
            self.external_hits += external

    def arrived(self, sequence: Sequence, position: int, reasons: dict[str, int]) -> None:
        """Note where the ``position`` tokens were that are on the device now, and why the others are not.

        Nothing is computed, so no counter counts it.
        """
        sequence.num_cached, sequence.cached_tokens = position, self._where(sequence, position)
        sequence.missed_tokens = {reason: count for reason, count in reasons.items() if count}

    @staticmethod
    def _where(sequence: Sequence, position: int) -> dict[str, int]:
        """Return the tokens before ``position`` by the place where they were when the sequence came."""
        where, left = dict[str, int](), position
        for place, count in sequence.wait.restored.items():
            where[place] = min(count, left)
            left -= where[place]
        return {place: count for place, count in ({"device": left} | where).items() if count}
