from __future__ import annotations

import re
from pathlib import Path

from treadle.serve.arguments import parse

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
TOP = ("conf", "graph", "kernels", "passes", "runtime", "serve")


def mapped() -> list[str]:
    """Return the modules that the map lists, as paths from the root."""
    found, folder = [], ""
    for line in README.partition("## Map")[2].splitlines():
        if match := re.match(r"(\w+)/ ", line):
            folder = match[1]
        elif match := re.match(r"  ([\w/]+\.py) +\S", line):
            found.append(f"{folder}/{match[1]}")
    return found


def test_the_map_lists_every_module_once():
    modules = [str(p.relative_to(ROOT)) for top in TOP for p in (ROOT / top).rglob("*.py") if p.name != "__init__.py"]
    assert sorted(mapped()) == sorted(modules)


def test_its_command_lines_parse():
    lines = re.findall(r"^    \.venv/bin/treadle (.*?)(?:  +#.*)?$", README, re.MULTILINE)
    assert len(lines) > 6
    for line in lines:
        words = [word.strip('"') for word in re.findall(r'"[^"]*"|\S+', line)]
        assert parse(words).command is not None


def test_its_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target
