from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.conf.size import body_bytes, format_bytes, parse_bytes, parse_share, spell_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        (4096, 4096),
        ("2GiB", 2 << 30),
        ("2 gib", 2 << 30),
        ("2g", 2 << 30),
        ("2GB", 2 * 10**9),
        ("1.5k", 1536),
        ("512MiB", 512 << 20),
        ("1TiB", 1 << 40),
        ("7b", 7),
    ],
)
def test_reads_what_people_write(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2QiB", "1e9", "two", "1..2GiB", "auto"])
def test_refuses_the_rest(text):
    with pytest.raises(ValueError, match="2GiB"):
        parse_bytes(text)


@given(st.integers(0, 1 << 50))
def test_what_it_writes_it_reads_back_within_rounding(count):
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.006)


@given(st.integers(0, 1 << 50))
def test_a_suggestion_reads_back_to_no_more_and_with_up_to_no_less(count):
    below, above = parse_bytes(spell_bytes(count)), parse_bytes(spell_bytes(count, up=True))
    assert below <= count <= above
    assert (below, above) == (pytest.approx(count, rel=0.011), pytest.approx(count, rel=0.011))


@given(st.integers(0, 1 << 50))
def test_what_is_needed_is_never_written_as_less(count):
    assert parse_bytes(format_bytes(count, up=True)) >= count


def test_round_suggestions_are_short():
    assert (spell_bytes(2 << 30), spell_bytes(1536), spell_bytes(100)) == ("2GiB", "1.5KiB", "100")


@pytest.mark.parametrize(("text", "share"), [("90%", 0.9), (" 12.5 %", 0.125), ("100%", 1.0)])
def test_a_share(text, share):
    assert parse_share(text) == share


@pytest.mark.parametrize("text", ["0%", "101%", "-1%", "90", "%", "auto"])
def test_no_share(text):
    assert parse_share(text) is None


def test_a_body_has_room_for_a_context_of_ids():
    assert body_bytes(100_000) > len(str(list(range(100_000, 200_000))))
