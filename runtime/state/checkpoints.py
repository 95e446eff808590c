"""Where in a prompt checkpoints are made, for models that cannot go on behind any page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CheckpointPolicy:
    """Chunks of prompts are cut so that they end where a checkpoint is wanted."""

    page_tokens: int
    least_tokens: int = 64
    """a checkpoint must spare so many tokens more than the one before it"""
    first_spaced: int = 2048
    """in long prompts there is one here, at twice as many tokens, at four times ...: half of any is found again"""

    def stops(self, position: int, end: int, known: int = 0, boundaries: Iterable[int] = ()) -> list[int]:
        """Return the positions of checkpoints in a prompt, descending.

        Its tokens from ``position`` to ``end`` are to be computed; ``known`` were computed before, by somebody whose
        prompt goes on differently; messages begin and end at ``boundaries``. One that is close to the prompt's end is
        better than that end: what stands behind it opens the answer, and may differ when the answer is history.
        """
        inside = sorted((each for each in boundaries if each < end - 1), reverse=True)
        near = inside[:1] if inside and end - 1 - inside[0] < self.least_tokens else [end - 1]
        spaced = [self.first_spaced << power for power in range((end // self.first_spaced).bit_length())]
        # Those that serve most come first, others keep their distance from them: where prompts were seen to part, many
        # may go on; where this one ends, one will.
        stops = list[int]()
        for wanted in (known, *near, *inside, *spaced):
            stop = self._floor(wanted)
            if position + self.least_tokens <= stop < end and all(abs(stop - e) >= self.least_tokens for e in stops):
                stops.append(stop)
        return sorted(stops, reverse=True)

    def _floor(self, position: int) -> int:
        return position // self.page_tokens * self.page_tokens
