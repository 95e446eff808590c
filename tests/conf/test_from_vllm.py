from __future__ import annotations

import re
from pathlib import Path

import pytest

from treadle.conf.document import choices
from treadle.conf.load import compose
from treadle.conf.override import PRESET, schema_keys
from treadle.conf.schema import GROUPS
from treadle.runtime.keywords import KEYWORDS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "from-vllm.md").read_text()
KEY = re.compile(rf"\b({'|'.join(GROUPS)})\.([a-z_]\w*)")


def rows(title: str) -> list[list[str]]:
    """Return the rows of a section's table: flags, key, note."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_key_that_the_page_names_exists():
    named = {match[0] for match in KEY.finditer(PAGE)}
    assert len(named) > 20
    assert named <= schema_keys().keys()


def test_every_choice_that_the_page_names_exists():
    for group, choice in re.findall(rf"\b({'|'.join([*GROUPS, PRESET])})=([a-z][\w-]*)", PAGE):
        assert choice in dict(choices(group)), (group, choice)


@pytest.mark.parametrize(("title", "count"), [("vLLM", 60), ("SGLang", 60)])
def test_a_flag_is_a_key_or_automatic_or_honestly_none(title, count):
    flags = []
    for names, key, _ in rows(title):
        flags += re.findall(r"`(--[\w-]+)", names)
        assert (
            KEY.search(key)
            or key in ("automatic", "none", "none yet")
            or key.startswith(("`model=", "`--", "`treadle"))
        ), key
    assert len(flags) == len(set(flags)) >= count


def test_the_page_agrees_with_the_keywords_of_python():
    """A keyword of LLM and the flag of the same name mean the same key."""
    found = {flag: key for names, key, _ in rows("vLLM") for flag in re.findall(r"`--([\w-]+)", names)}
    for keyword, key in KEYWORDS.items():
        cell = found.get(keyword.replace("_", "-"))
        # What load_format says the files say themselves.
        assert cell is None or key in cell or (keyword, cell) == ("load_format", "automatic"), (keyword, cell)


def test_the_command_line_of_the_page_composes():
    (line,) = re.findall(r"^    treadle serve (model=hf .*)$", PAGE, re.MULTILINE)
    deployment = compose(line.split())
    assert (deployment.serve.port, deployment.model.max_len, deployment.scheduler.max_num_seqs) == (8080, 8192, 64)
