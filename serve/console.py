"""A conversation in the terminal. Each turn sends the whole of it; the prefix cache makes the earlier ones cheap."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from types import FrameType

from rich.console import Console

from treadle.runtime.llm import LLM
from treadle.runtime.request import RequestError, SamplingParams
from treadle.runtime.text.template import chat_template

HELP = "/clear begins anew, /exit ends, Ctrl-C stops an answer"


class Conversation:
    """The messages so far, and the loop that adds to them. Raises RequestError if the model has no chat template."""

    def __init__(
        self,
        llm: LLM,
        console: Console,
        *,
        system: str | None = None,
        temperature: float = 0.7,
        read: Callable[[], str] | None = None,
    ) -> None:
        facts = llm.get_tokenizer().facts
        self._template = chat_template(facts.chat_templates, facts.template_tokens)
        self._llm = llm
        self._console = console
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._params = SamplingParams(temperature=temperature, max_tokens=None)
        self._read = read or self._ask
        self.messages: list[dict[str, str]] = list(self._system)

    def run(self, name: str) -> None:
        """Talk until /exit, the end of input, or Ctrl-C at the prompt."""
        # Importing it gives `input` history and line editing.
        with suppress(ImportError):
            import readline  # noqa: F401
        self._say(f"{name}: {HELP}\n")
        with suppress(EOFError, KeyboardInterrupt):
            while (line := self._read().strip()) != "/exit":
                if line == "/clear":
                    self.messages = list(self._system)
                elif line.startswith("/"):
                    self._say(f"{HELP}\n")
                elif line:
                    self._turn(line)
        self._console.print()

    def _turn(self, line: str) -> None:
        self.messages.append({"role": "user", "content": line})
        try:
            answer = self._answer()
        except RequestError as error:
            self.messages.pop()
            self._say(f"{error}; /clear begins anew\n")
            return
        self.messages.append({"role": "assistant", "content": answer})

    def _answer(self) -> str:
        """Print the answer as it comes and return it, cut short by Ctrl-C."""
        began_s, first_s, count = time.monotonic(), 0.0, 0
        pieces: list[str] = []
        # Not by KeyboardInterrupt, which could strike in the middle of a step.
        with _stop_flag() as stopped:
            deltas = self._llm.stream(self._template.render(self.messages), self._params, add_special_tokens=False)
            with closing(deltas) as stream:  # type: ignore[type-var]  # a generator behind Iterator
                for delta in stream:
                    first_s = first_s or time.monotonic()
                    count += len(delta.token_ids)
                    pieces.append(delta.text)
                    self._console.print(delta.text, end="", markup=False, highlight=False, soft_wrap=True)
                    if stopped():
                        break
        end_s = time.monotonic()
        rate = f", {(count - 1) / (end_s - first_s):.1f} tokens/s" if count > 1 else ""
        self._console.print()
        self._say(f"{count} tokens{rate}, the first after {first_s - began_s:.2f} s\n")
        return "".join(pieces)

    def _ask(self) -> str:
        return self._console.input("[bold]> [/bold]")

    def _say(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False, highlight=False)


@contextmanager
def _stop_flag() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether Ctrl-C was pressed inside the block."""
    pressed: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        pressed.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)
