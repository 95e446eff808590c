from __future__ import annotations

import pytest

from treadle.runtime.state.checkpoints import CheckpointPolicy

FINE = CheckpointPolicy(page_tokens=4, least_tokens=4, first_spaced=32)


@pytest.mark.parametrize(
    ("position", "end", "known", "boundaries", "stops"),
    [
        # The last page's end before the last token.
        (0, 11, 0, (), [8]),
        (0, 12, 0, (), [8]),
        (0, 13, 0, (), [12]),
        (8, 11, 0, (), []),
        (0, 4, 0, (), []),
        # Where somebody else's prompt parted, and where messages begin and end.
        (0, 30, 18, (), [28, 16]),
        (0, 30, 0, (7, 21, 29), [28, 20, 4]),
        # What opens the answer is left out.
        (0, 30, 0, (7, 21, 27), [24, 20, 4]),
        # One in every half of a long prompt.
        (0, 200, 0, (), [196, 128, 64, 32]),
        (40, 200, 0, (), [196, 128, 64]),
    ],
)
def test_where_chunks_end(position: int, end: int, known: int, boundaries: tuple[int, ...], stops: list[int]) -> None:
    assert FINE.stops(position, end, known, boundaries) == stops


def test_checkpoints_keep_their_distance_and_where_prompts_part_comes_first() -> None:
    policy = CheckpointPolicy(page_tokens=4, least_tokens=16, first_spaced=32)
    assert policy.stops(0, 45, known=36) == [36]
    assert policy.stops(36, 45, known=36) == []
    assert policy.stops(0, 61, known=24) == [60, 24]
    assert policy.stops(40, 50) == []
