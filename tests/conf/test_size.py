from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.conf.size import format_bytes, parse_bytes


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
