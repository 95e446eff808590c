"""``treadle lock``: every choice written down, so that ``--lock FILE`` starts the same server again."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.conf.errors import ConfigError
from treadle.conf.lock import to_lock

if TYPE_CHECKING:
    from rich.console import Console

    from treadle.graph.resolve import Resolved


def run(resolved: Resolved, console: Console, output: str | None = None) -> int:
    """Write the lock file to ``output``, or to the terminal. Raises ConfigError if it cannot be written. Returns 0."""
    text = to_lock(resolved.deployment, facts(resolved), output or "FILE")
    if output is None:
        console.out(text, end="", highlight=False)
        return 0
    try:
        Path(output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", key="--output", value=output) from None
    console.print(f"{output}: {resolved.fingerprint}")
    return 0


def facts(resolved: Resolved) -> dict[str, object]:
    """Return what the choices came to, for the reader of a lock file."""
    plan = resolved.plan
    return {
        "python": platform.python_version(),
        "weights_bytes": sum(row.nbytes for row in plan.rows if row.kind == "weights"),
        "arena_bytes": plan.arena_bytes,
        "total_bytes": plan.total_bytes,
        "num_pages": plan.num_pages,
        "full_sequences": plan.full_sequences,
    }
