import io
import re

import pytest
from history_model import Bench
from letters import expected, letters_llm, text
from rich.console import Console

from treadle.runtime.request import RequestError, SamplingParams
from treadle.serve.commands.generate import print_answer


@pytest.fixture
def llm():
    with letters_llm(Bench()) as llm:
        yield llm


def test_prints_the_answer_as_it_is_and_its_speed(llm):
    console = Console(file=io.StringIO(), width=10)
    print_answer(llm, console, "abc", SamplingParams(temperature=0, max_tokens=30))
    printed = console.file.getvalue()
    # Longer than the console is wide: no line break but the model's own.
    assert printed.startswith("abc" + text(expected("abc", 30)) + "\n")
    told = " ".join(printed.partition("\n")[2].split())
    assert re.fullmatch(r"30 tokens \(length\), first token after \d+ ms, [\d.]+ tok/s", told)


def test_one_token_has_no_rate(llm):
    console = Console(file=io.StringIO())
    print_answer(llm, console, "abc", SamplingParams(temperature=0, max_tokens=1))
    assert re.search(r"1 tokens \(length\), first token after \d+ ms\n$", console.file.getvalue())


def test_a_bad_prompt_prints_nothing(llm):
    console = Console(file=io.StringIO())
    with pytest.raises(RequestError, match="prompt has 64 tokens"):
        print_answer(llm, console, "a" * 64, SamplingParams())
    assert console.file.getvalue() == ""
