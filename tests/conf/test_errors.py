from __future__ import annotations

from pathlib import Path

from treadle.conf.errors import sibling


def test_a_path_that_exists_is_not_its_own_correction(tmp_path: Path) -> None:
    for name in ("answers", "answers2"):
        (tmp_path / name).mkdir()
    assert sibling(tmp_path / "answer") == (str(tmp_path / "answers"),)
    assert sibling(tmp_path / "answers") == ()
    assert sibling(tmp_path / "no" / "answers") == ()
