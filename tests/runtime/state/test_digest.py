from __future__ import annotations

from treadle.runtime.state.digest import SIZE, chain, item_key, seed


def test_pages_are_named_by_all_that_comes_before() -> None:
    whole = chain(seed(None), b"abcdefgh", 4)
    assert [len(each) for each in whole] == [SIZE, SIZE]
    assert chain(whole[0], b"efgh", 4) == whole[1:]
    assert chain(seed(None), b"efgh", 4) != whole[1:]
    # The same in every process.
    assert whole[1].hex() == "76e9d4939585123e7c607ac443a5639e"


def test_salts_and_kinds_share_no_name() -> None:
    seeds = {seed(None), seed("a"), seed("b"), seed(("alone", "a"))}
    assert len(seeds) == 4
    digest = chain(seed(None), b"abcd", 4)[0]
    assert item_key(digest, 0) == digest
    assert len({item_key(digest, kind, tail) for kind in range(3) for tail in (b"", b"x")}) == 6
