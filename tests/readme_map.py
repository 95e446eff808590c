"""The README's map of the tree. ``python tests/readme_map.py`` adds new modules and drops those that are gone."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOP = ("conf", "graph", "kernels", "passes", "runtime", "serve")
_LINE = re.compile(r"  ([\w/<>*.]+) +(\S.*)")


def modules(top: str) -> list[str]:
    """Return the modules of a top-level folder, as paths below it."""
    folder = ROOT / top
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.py") if path.name != "__init__.py")


def read_map(readme: str) -> dict[str, dict[str, str]]:
    """Return folder -> entry -> what it is, as the README says."""
    found: dict[str, dict[str, str]] = {}
    for line in readme.partition("## Map")[2].splitlines():
        if heading := re.match(r"(\w+)/ +\S", line):
            found[heading[1]] = {}
        elif (entry := _LINE.match(line)) and found:
            found[list(found)[-1]][entry[1]] = entry[2]
    return found


def update(readme: str) -> str:
    """Return the README with exactly the modules that exist; new ones say what their docstring's first line says."""
    lines: list[str] = []
    for top, listed in read_map(readme).items():
        heading = next(line for line in readme.splitlines() if re.match(rf"{top}/ +\S", line))
        there = modules(top)
        kept = {name: about for name, about in listed.items() if name in there or not name.endswith(".py")}
        new = {name: first_line(ROOT / top / name) for name in there if name not in listed}
        lines += [heading, *(f"  {name:<25} {about}" for name, about in (kept | new).items())]
    head, _, _ = readme.partition("## Map")
    return head + "## Map\n\n```\n" + "\n".join(lines) + "\n```\n"


def first_line(path: Path) -> str:
    """Return the first line of a module's docstring, without its subject."""
    text = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
    return re.sub(r"^[^:]{1,30}: ", "", text.replace("``", "")).rstrip(".")


if __name__ == "__main__":
    page = ROOT / "README.md"
    page.write_text(update(page.read_text()))
