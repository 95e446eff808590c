"""``treadle generate``: continue one prompt in the terminal, or answer a file of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.conf.errors import ConfigError
from treadle.runtime.driver import Driver
from treadle.runtime.llm import LLM, limits_of
from treadle.runtime.progress import AnswerBar, PhaseBars
from treadle.runtime.request import SamplingParams
from treadle.runtime.text.load import load_tokenizer
from treadle.runtime.text.prompt import prepare
from treadle.runtime.text.template import ChatTemplate, chat_template

if TYPE_CHECKING:
    from rich.console import Console

    from treadle.graph.resolve import Resolved
    from treadle.serve.batch.results import Results
    from treadle.serve.served import Served

MAX_TOKENS = 128
"""of an answer, where nothing else is said"""


def run(
    resolved: Resolved,
    console: Console,
    *,
    prompt: str = "",
    input: str | None = None,
    output: str | None = None,
    max_tokens: int = MAX_TOKENS,
    temperature: float = 0.0,
    seed: int | None = None,
) -> int:
    """Print the continuation of ``prompt`` as it comes, then how fast it came; or answer the lines of ``input``.

    Returns 0, or 1 if a line of ``input`` got an error. Raises: RequestError for a prompt that does not fit or an
    option outside its range, TokenizerError, ConfigError for files that cannot be read or written.
    """
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    if input is not None or output is not None:
        if prompt or input is None or output is None:
            hint = "treadle generate input=prompts.jsonl output=answers.jsonl"
            raise ConfigError("a file of prompts needs input and output, and no prompt", key="generate", hint=hint)
        params.check(resolved.spec.vocab)
        return answer_file(resolved, console, Path(input), Path(output), params)
    tokenizer = load_tokenizer(resolved.source, resolved.deployment.model.sampling)
    # What cannot run is refused before weights are loaded.
    prepare(tokenizer, prompt, params, limits_of(resolved), request_id="", clamp=True)
    with LLM.from_resolved(resolved, tokenizer) as llm:
        print_answer(llm, console, prompt, params)
    return 0


def answer_file(resolved: Resolved, console: Console, source: Path, target: Path, params: SamplingParams) -> int:
    """Answer each line of ``source`` in a line of ``target``, those left out that have their answer or error.

    Returns 1 if a line of ``target`` is an error, of this run or of one before, else 0: a script knows by it alone.
    Lines of our own shape take from ``params`` what they do not say. Raises ConfigError, TokenizerError.
    """
    from treadle.serve.batch.records import count_records, read_records
    from treadle.serve.batch.results import open_results

    defaults = {"max_tokens": params.max_tokens, "temperature": params.temperature, "seed": params.seed}
    total = count_records(source)
    if target.exists() and target.samefile(source):
        raise ConfigError("is the input too", key="output", value=target)
    served = _served(resolved)
    with open_results(target) as results:
        # Errors need no model, and a run that is complete loads none.
        if any(record.key not in results.done for record in read_records(source, defaults)):
            _answer(resolved, served, console, results, source, defaults, total)
        else:
            # A path is no markup, nor cut.
            console.out(f"{target} has all {_count(total, 'answer')}{_of_them(results)}", highlight=False)
        results.sort(read_records(source, defaults))
    return 1 if results.failed else 0


def _answer(
    resolved: Resolved,
    served: Served,
    console: Console,
    results: Results,
    source: Path,
    defaults: Mapping[str, object],
    total: int,
) -> None:
    from treadle.runtime.build import build_engine
    from treadle.serve.batch.records import read_records
    from treadle.serve.batch.run import Batch

    with PhaseBars() as bars:
        driver = Driver(build_engine(resolved, bars), served.tokenizer)
    began = len(results.done)
    before = f", {began} before{_of_them(results)}" if began else ""
    with AnswerBar(total) as bar:
        bar.advance(0, began)
        batch = Batch(served, driver, results, bar)
        try:
            batch.run(read_records(source, defaults))
        finally:
            driver.close()
    answers, errors = _count(batch.answered, "answer"), _count(batch.errors, "error")
    console.print(f"{answers} and {errors} of {_count(total, 'line')}{before}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _of_them(results: Results) -> str:
    """Return how many of all results are errors, as the end of a sentence."""
    failed = len(results.failed)
    return f", {failed} of them {'an error' if failed == 1 else 'errors'}" if failed else ""


def _served(resolved: Resolved) -> Served:
    from treadle.conf.lock import fingerprint
    from treadle.serve.served import Served

    deployment = resolved.deployment
    tokenizer = load_tokenizer(resolved.source, resolved.deployment.model.sampling)

    @cache
    def template() -> ChatTemplate:
        return chat_template(tokenizer.facts.chat_templates, tokenizer.facts.template_tokens)

    return Served(
        name=deployment.serve.served_name or deployment.model.name,
        fingerprint=fingerprint(deployment),
        created=int(time.time()),
        tokenizer=tokenizer,
        template=template,
        limits=limits_of(resolved),
        config=deployment.serve,
    )


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
