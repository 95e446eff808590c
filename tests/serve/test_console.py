from __future__ import annotations

import io
import signal

import pytest
from history_model import Bench
from letters import expected, letters_llm, text
from rich.console import Console

from treadle.serve.console import Conversation


class Interrupting(io.StringIO):
    """A terminal at which somebody presses Ctrl-C once ``letters`` of an answer are there."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.letters = letters

    def write(self, piece):
        if piece.isalpha() and len(piece) == 1 and self.letters:
            self.letters -= 1
            if not self.letters:
                signal.raise_signal(signal.SIGINT)
        return super().write(piece)


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    bench.engine.close()


def converse(bench, *lines, file=None, **options):
    """Return the messages and what the terminal showed."""
    console = Console(file=file or io.StringIO(), width=200)
    remaining = iter(lines)

    def read():
        try:
            return next(remaining)
        except StopIteration:
            raise EOFError from None

    conversation = Conversation(letters_llm(bench), console, temperature=0, read=read, **options)
    conversation.run("letters")
    return conversation.messages, console.file.getvalue()


def test_an_answer_is_printed_and_remembered(bench):
    messages, shown = converse(bench, " cd ", "/exit", "never read")
    answer = text(expected("acdb", 60))
    assert messages == [{"role": "user", "content": "cd"}, {"role": "assistant", "content": answer}]
    assert answer in shown
    assert "60 tokens" in shown


def test_ctrl_c_stops_the_answer_and_the_next_turn_sees_what_there_was(bench):
    messages, _ = converse(bench, "cd", "ef", file=Interrupting(5))
    assert messages[1]["content"] == text(expected("acdb", 5))
    assert messages[3]["content"] == text(expected("acd" + messages[1]["content"] + "efb", 53))
    assert not bench.engine.has_work


def test_a_conversation_that_outgrows_the_context_says_so_and_can_begin_anew(bench):
    messages, shown = converse(bench, "cd", "ef", "/clear", "gh", system="k")
    assert "the context holds 64" in shown
    assert "/clear begins anew" in shown
    assert messages[0] == {"role": "system", "content": "k"}
    assert messages[2]["content"] == text(expected("akghb", 59))


def test_an_unknown_command_shows_the_known_ones(bench):
    messages, shown = converse(bench, "/quit", "")
    assert messages == []
    assert shown.count("/exit ends") == 2
