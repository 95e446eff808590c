"""``treadle chat``: talk to the model in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.runtime.llm import LLM
from treadle.serve.console import Conversation

if TYPE_CHECKING:
    from rich.console import Console

    from treadle.graph.resolve import Resolved


def run(resolved: Resolved, console: Console, *, system: str | None = None, temperature: float = 0.7) -> int:
    """Talk until /exit or the end of input. Returns 0. Raises RequestError if the model has no chat template."""
    with LLM.from_resolved(resolved) as llm:
        Conversation(llm, console, system=system, temperature=temperature).run(resolved.deployment.model.name)
    return 0
