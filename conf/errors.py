"""The one error of configuration: what is wrong, where, and the nearest thing that works."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


class ConfigError(ValueError):
    """A configuration that cannot be served. Its text is complete: a program prints it and ends, without a traceback.

    ``key`` is the dotted key (or group) at fault, ``value`` what was given, ``nearest`` the closest valid choices and
    ``hint`` a sentence on what works.
    """

    def __init__(
        self, problem: str, *, key: str | None = None, value: object = None, nearest: Iterable[str] = (), hint: str = ""
    ) -> None:
        self.problem = problem
        self.key = key
        self.value = value
        self.nearest = tuple(nearest)
        self.hint = hint
        where = "" if key is None else key if value is None else f"{key}={value}"
        parts = [f"{where}: {problem}" if where else problem]
        if self.nearest:
            parts.append(f"did you mean {' or '.join(self.nearest)}?")
        if hint:
            parts.append(hint)
        super().__init__("; ".join(parts))

    def saying(self, more: str) -> ConfigError:
        """Return the same error with one more hint."""
        hint = "; ".join(part for part in (self.hint, more) if part)
        return ConfigError(self.problem, key=self.key, value=self.value, nearest=self.nearest, hint=hint)

    def within(self, file: Path) -> ConfigError:
        """Return the same error, saying which file holds the mistake."""
        return self.saying(f"in {file}")


def nearest(word: str, choices: Iterable[str], count: int = 1, likeness: float = 0.5) -> tuple[str, ...]:
    """Return up to ``count`` of ``choices`` that look like ``word``, best first; empty if none does.

    ``likeness``: from 0, nothing in common, to 1, equal; where ``choices`` are many short words, half is by chance.
    """
    return tuple(difflib.get_close_matches(word, list(choices), n=count, cutoff=likeness))


def sibling(path: Path) -> tuple[str, ...]:
    """Return the entry of ``path``'s folder that looks like it, for messages about paths that do not exist.

    Nothing for one that does, whatever is wrong with it, or whose folder does not.
    """
    parent = path.absolute().parent
    if path.exists() or not parent.is_dir():
        return ()
    return tuple(str(path.parent / name) for name in nearest(path.name, [entry.name for entry in parent.iterdir()]))
