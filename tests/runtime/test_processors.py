"""Installed processors: found by name, made with a request's arguments, and confined to its row."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

from treadle.graph.processors import GROUP, installed_processors
from treadle.runtime.processors import RowProcessors, check_processors, make_processors
from treadle.runtime.request import RequestError


def halved(by: float = 2.0) -> object:
    return lambda token_ids, logits: logits / by


@pytest.fixture(autouse=True)
def entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    points = {"halved": EntryPoint("halved", "fractions:Fraction", GROUP), "gone": EntryPoint("gone", "no.such", GROUP)}
    monkeypatch.setattr("treadle.runtime.processors.installed_processors", lambda: points)
    monkeypatch.setattr(
        EntryPoint, "load", lambda self: {"halved": halved}[self.name] if self.name != "gone" else __import__("no.such")
    )


def test_what_is_installed_is_asked_of_the_package_metadata() -> None:
    assert installed_processors() == {}


def test_nothing_is_made_where_nothing_is_asked() -> None:
    assert make_processors(None) is None
    assert make_processors({}) is None


def test_in_the_order_of_the_request_each_sees_what_the_last_one_left() -> None:
    made = make_processors({"halved": {"by": 4.0}})
    assert made is not None
    logits = torch.tensor([1.0, -8.0])
    made.apply(torch.tensor([0]), logits)
    assert logits.tolist() == [0.25, -2.0]
    two = RowProcessors({"shift": lambda ids, row: row.add_(ids[-1]), "twice": lambda ids, row: row * 2})
    two.apply(torch.tensor([7, 3]), logits)
    assert logits.tolist() == [6.5, 2.0]
    assert two.failure is None


def test_a_failure_is_kept_and_leaves_nothing_to_draw() -> None:
    logits = torch.zeros(3)
    broken = RowProcessors({"bad": lambda ids, row: row[:2], "never": lambda ids, row: row.fill_(1)})
    broken.apply(torch.tensor([1]), logits)
    assert logits.isnan().all()
    assert broken.failure == "logits processor bad failed: ValueError: returned logits of shape [2], not [3]"


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no message")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (Mute(), "Mute: its message cannot be read"),
        (SystemExit(3), "SystemExit: 3"),
        (ValueError("\ud800"), "ValueError: \\ud800"),
        (ValueError("x" * 5000), f"ValueError: {'x' * 1000} ..."),
    ],
)
def test_whatever_foreign_code_raises_becomes_a_message_that_can_be_sent(error: BaseException, words: str) -> None:
    def fail(*_values: Any, **_options: Any) -> None:
        raise error

    broken = RowProcessors({"bad": fail})
    broken.apply(torch.tensor([1]), torch.zeros(3))
    assert broken.failure == f"logits processor bad failed: {words}"
    assert broken.failure.encode()


def test_a_processor_that_leaves_the_program_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave() -> None:
        raise SystemExit(3)

    monkeypatch.setattr(EntryPoint, "load", lambda self: leave)
    with pytest.raises(RequestError, match=r"halved refuses \{\}: SystemExit: 3"):
        make_processors({"halved": {}})


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"halve": {}}, "no entry point of treadle.logits_processors is called 'halve'; did you mean halved"),
        ({"zzz": {}}, "called 'zzz'; installed: halved, gone"),
        ({"halved": {"of": 3}}, "halved refuses {'of': 3}: TypeError"),
        ({"gone": {}}, "gone refuses {}: ModuleNotFoundError"),
    ],
)
def test_refusals_name_the_processor(wanted: dict[str, dict[str, object]], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        make_processors(wanted)
    assert caught.value.field == "logits_processors"


def test_names_alone_are_checked_without_importing() -> None:
    check_processors({"gone": {}})
    with pytest.raises(RequestError, match="'x'"):
        check_processors({"x": {}})


def test_the_documents_example_works_as_it_says() -> None:
    text = (Path(__file__).parents[2] / "docs" / "sampling.md").read_text()
    names: dict[str, Any] = {}
    exec(text.partition("```python\n")[2].partition("```")[0], names)
    processor = names["NoRepeat"](size=3)
    found = processor(torch.tensor([4, 5, 6, 4, 5, 1, 4, 5]), torch.zeros(8))
    assert found.isinf().nonzero().flatten().tolist() == [1, 6]
    found = processor(torch.tensor([5, 7, 7, 7]), torch.zeros(8))
    assert found.isinf().nonzero().flatten().tolist() == [7]
    assert processor(torch.tensor([4]), torch.zeros(8)).isfinite().all()
