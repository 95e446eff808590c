from __future__ import annotations

from pathlib import Path

from treadle.conf.document import render
from treadle.conf.override import schema_keys

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"


def test_the_page_is_what_the_schema_says():
    assert PAGE.read_text() == render(), "make golden writes it"


def test_every_key_and_choice_stands_on_it():
    page = render()
    for key in schema_keys():
        if not key.endswith("*") and key not in ("model.package", "kv.disk"):
            assert f"| `{key}` |" in page
    for choice in ("model=smollm2", "hardware=h200", "passes=reference", "preset=laptop"):
        assert f"| `{choice}` |" in page
