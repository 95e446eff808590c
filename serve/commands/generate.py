"""``treadle generate``: continue one prompt in the terminal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from treadle.runtime.llm import LLM, limits_of
from treadle.runtime.request import SamplingParams
from treadle.runtime.text.load import load_tokenizer
from treadle.runtime.text.prompt import prepare

if TYPE_CHECKING:
    from rich.console import Console

    from treadle.graph.resolve import Resolved


def run(
    resolved: Resolved,
    console: Console,
    *,
    prompt: str,
    max_tokens: int = 128,
    temperature: float = 0.0,
    seed: int | None = None,
) -> int:
    """Print the continuation of ``prompt`` as it comes, then how fast it came. Returns 0.

    Raises: RequestError for a prompt that does not fit or an option outside its range, TokenizerError.
    """
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    tokenizer = load_tokenizer(resolved.source, resolved.deployment.model.sampling)
    # What cannot run is refused before weights are loaded.
    prepare(tokenizer, prompt, params, limits_of(resolved), request_id="", clamp=True)
    with LLM.from_resolved(resolved, tokenizer) as llm:
        print_answer(llm, console, prompt, params)
    return 0


def print_answer(llm: LLM, console: Console, prompt: str, params: SamplingParams) -> None:
    """Print one answer of ``llm`` and its speed: the time to the first token, and tokens a second after it."""
    started_s = first_s = last_s = time.perf_counter()
    deltas = llm.stream(prompt, params)
    num_tokens, reason = 0, None
    # Straight to the file: no markup, and no line break but the model's own.
    console.out(prompt, end="", highlight=False, style="dim")
    for delta in deltas:
        last_s = time.perf_counter()
        if not num_tokens:
            first_s = last_s
        num_tokens += len(delta.token_ids)
        reason = delta.finish_reason
        console.out(delta.text, end="", highlight=False)
        console.file.flush()
    rate = f", {(num_tokens - 1) / (last_s - first_s):.1f} tok/s" if num_tokens > 1 else ""
    first = f"first token after {(first_s - started_s) * 1e3:.0f} ms"
    console.print(f"\n\n[dim]{num_tokens} tokens ({reason}), {first}{rate}[/]")
