from __future__ import annotations

import re
from pathlib import Path

from readme_map import TOP, modules, read_map, update

from treadle.serve.arguments import parse

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_the_map_lists_every_module_once():
    listed = {top: sorted(name for name in names if name.endswith(".py")) for top, names in read_map(README).items()}
    assert listed == {top: modules(top) for top in TOP}, "make golden brings it up to date"


def test_the_map_is_kept_by_hand_and_completed_from_docstrings():
    assert update(README) == README
    line = next(line for line in README.splitlines() if line.startswith("  schema.py "))
    without = README.replace(line + "\n", "")
    assert "  schema.py                 Every choice of a deployment, typed and frozen" in update(without)
    assert "gone.py" not in update(README.replace(line, line + "\n  gone.py                   what was here"))


def test_its_command_lines_parse():
    lines = re.findall(r"^    \.venv/bin/treadle (.*?)(?:  +#.*)?$", README, re.MULTILINE)
    assert len(lines) > 6
    for line in lines:
        words = [word.strip('"') for word in re.findall(r'"[^"]*"|\S+', line)]
        assert parse(words).command is not None


def test_its_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target
