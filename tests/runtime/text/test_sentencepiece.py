from dataclasses import replace

import pytest
from tiny_text import PIECE_SCORES, PIECE_TYPES, PIECES

from treadle.runtime.text.sentencepiece import SentencePieces

VOCABULARY = SentencePieces(pieces=PIECES, scores=PIECE_SCORES, types=PIECE_TYPES, add_space=False)


def pieces(core, text):
    return [PIECES[i] for i in core.encode(text).ids]


def by_merges(**changes):
    vocabulary = replace(VOCABULARY, **changes)
    core = vocabulary.by_merges()
    vocabulary.add_tokens(core)
    return core


def test_the_best_score_merges_first():
    assert pieces(by_merges(), "abb ab  a") == ["ab", "b", "▁ab", "▁▁", "a"]


def test_the_best_sum_of_scores_wins():
    scores = dict(zip(PIECES, PIECE_SCORES)) | {"ab": -5.0, "b": -1.0, "bb": -2.5, "a": -1.0}
    core = replace(VOCABULARY, scores=[scores[piece] for piece in PIECES]).by_likelihood()
    assert pieces(core, "abb") == ["a", "b", "b"]
    assert pieces(core, "ab\x01") == ["a", "b", "<0x01>"]


def test_bytes_spell_what_no_piece_does():
    assert pieces(by_merges(), "ab日é") == ["ab", "<0xE6>", "<0x97>", "<0xA5>", "é"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["ab", "<tool>", "ab"]),
        ({"add_space": True}, ["▁ab", "<tool>", "▁ab"]),
        ({"add_space": True, "space_after_tokens": False}, ["▁ab", "<tool>", "ab"]),
    ],
)
def test_where_a_space_is_put_before_a_text(changes, expected):
    assert pieces(by_merges(**changes), "ab<tool>ab") == expected


def test_spaces_may_be_joined():
    assert pieces(by_merges(join_spaces=True), "  ab   ab ") == ["ab", "▁ab"]
