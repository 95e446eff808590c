"""docs/configuration.md, written from the schema: ``python -P -m treadle.conf.document > docs/configuration.md``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib import resources
from typing import Any, get_args, get_type_hints

from treadle.conf.override import describe
from treadle.conf.schema import GROUPS

_HEAD = """\
# Configuration

<!-- Written from conf/schema.py by `make golden`; a test compares. -->

A deployment is composed by [Hydra](https://hydra.cc) from one YAML file of each group, then from a preset, then from
the command line; later ones win.

    treadle serve model=hf model.path=DIR kv.page_tokens=32     # a group's choice, and single keys
    treadle serve preset=laptop                                 # a whole deployment
    treadle serve --config-dir DIR preset=mine                  # groups of yours: DIR/preset/mine.yaml, DIR/model/...
    treadle bench bench=cpu '~bench.rows.NAME'                  # less one entry of a mapping; '~bench.rivals.NAME' too
    treadle serve --cfg job                                     # print what it comes to
    treadle memory -m kv.page_tokens=8,16,32                    # once for each value
    treadle lock --output server.lock.yaml                      # every choice resolved, to start the same server again:
    treadle serve --lock server.lock.yaml

A key that no group has, a value of the wrong type or outside its limits, and combinations that cannot work end the
command with exit code 2 and one line that names the key, the value and the nearest thing that works.

`null` and `auto` mean: chosen for you. `treadle lock` shows what was chosen, `treadle memory` what it takes. A value
with spaces, commas or brackets is quoted twice, for the shell and for Hydra: `'serve.api_key="a,b"'`.
"""


def render() -> str:
    """Return the page as Markdown."""
    parts = [_HEAD]
    for group, schema in GROUPS.items():
        parts.append(f"\n## {group}\n\n{schema.__doc__}\n\n| choice | what it is |\n|---|---|\n")
        parts += [f"| `{group}={name}` | {about} |\n" for name, about in choices(group)]
        parts.append("\n| key | takes | default | meaning |\n|---|---|---|---|\n")
        parts += [_row(*row) for row in _rows(group, schema)]
    parts.append("\n## preset\n\nWhole deployments.\n\n| choice | what it is |\n|---|---|\n")
    parts += [f"| `preset={name}` | {about} |\n" for name, about in choices("preset")]
    return "".join(parts)


def choices(group: str) -> list[tuple[str, str]]:
    """Return the YAML files of a group: their names, sorted, and the first sentence of the comment at their top."""
    found = []
    for entry in (resources.files("treadle.conf") / group).iterdir():
        if entry.name.endswith(".yaml"):
            lines = entry.read_text(encoding="utf-8").splitlines()
            about = next((line[2:] for line in lines if line.startswith("# ") and not line.startswith("# @")), "")
            found.append((entry.name.removesuffix(".yaml"), about))
    return sorted(found)


def _rows(prefix: str, schema: type) -> Iterator[tuple[str, Any, Any]]:
    hints = get_type_hints(schema)
    for spec in fields(schema):
        key, hint = f"{prefix}.{spec.name}", hints[spec.name]
        inner = next((one for one in (hint, *get_args(hint)) if is_dataclass(one)), None)
        if isinstance(inner, type):
            yield from _rows(key, inner)
        else:
            yield key, hint, spec


def _row(key: str, hint: Any, spec: Any) -> str:
    limits = spec.metadata
    takes = ", ".join(f"`{choice}`" for choice in limits["choices"]) or ("a size" if limits["size"] else describe(hint))
    if limits["low"] is not None:
        takes += f", at least {limits['low']:g}"
    if limits["high"] is not None:
        takes += f", at most {limits['high']:g}"
    default = spec.default_factory() if callable(spec.default_factory) else spec.default
    return f"| `{key}` | {takes} | {_spell(default)} | {limits['doc'].replace('|', chr(92) + '|')} |\n"


def _spell(value: Any) -> str:
    if value == "???" or value == "":
        return ""
    if value is None or isinstance(value, bool):
        return f"`{str(value).lower().replace('none', 'null')}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(value)}]`"
    return f"`{value}`"


if __name__ == "__main__":
    sys.stdout.write(render())
