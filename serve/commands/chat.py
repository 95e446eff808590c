"""``treadle chat``: talk to the model in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.runtime.llm import LLM
from treadle.runtime.request import SamplingParams
from treadle.runtime.text.load import load_tokenizer
from treadle.runtime.text.template import chat_template
from treadle.serve.console import Conversation

if TYPE_CHECKING:
    from rich.console import Console

    from treadle.graph.resolve import Resolved


def run(resolved: Resolved, console: Console, *, system: str | None = None, temperature: float = 0.7) -> int:
    """Talk until /exit or the end of input. Returns 0.

    Raises: RequestError for a model without chat template or an option outside its range, TokenizerError.
    """
    tokenizer = load_tokenizer(resolved.source, resolved.deployment.model.sampling)
    # What cannot run is refused before weights are loaded.
    chat_template(tokenizer.facts.chat_templates, tokenizer.facts.template_tokens)
    SamplingParams(temperature=temperature).check(resolved.spec.vocab)
    with LLM.from_resolved(resolved, tokenizer) as llm:
        Conversation(llm, console, system=system, temperature=temperature).run(resolved.deployment.model.name)
    return 0
