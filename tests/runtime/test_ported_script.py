"""A script written for vLLM's offline API runs here once its import is changed, and means the same."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_text
from tiny_model import CONFIG

from treadle.runtime import RequestOutput

SCRIPT = Path(__file__).parents[1] / "vllm_script.py"


def run(folder: Path) -> SimpleNamespace:
    source = SCRIPT.read_text()
    ported = source.replace("from vllm import", "from treadle.runtime import")
    assert ported != source
    names: dict[str, Any] = {}
    exec(compile(ported, SCRIPT, "exec"), names)
    made: SimpleNamespace = names["main"](str(folder))
    return made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_text.write_directory(tmp_path_factory.mktemp("model"))
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 400}))
    return folder


@pytest.fixture(scope="module")
def results(model: Path) -> SimpleNamespace:
    return run(model)


def test_generate(results: SimpleNamespace) -> None:
    found = results.generate
    assert [output.prompt for output in found.outputs][1] == "def f(x):"
    assert all(isinstance(output, RequestOutput) and output.finished for output in found.outputs)
    assert all(1 <= len(output.outputs[0].token_ids) <= 12 for output in found.outputs)
    best_of = found.best_of
    assert [each.index for each in best_of.outputs] == [0, 1, 2, 3]
    assert len({tuple(each.token_ids) for each in best_of.outputs}) > 1
    for each in best_of.outputs:
        assert len(each.logprobs) == len(each.token_ids)
        assert each.finished()
        total = sum(entry[token].logprob for token, entry in zip(each.token_ids, each.logprobs))
        assert each.cumulative_logprob == pytest.approx(total)
        assert all(3 <= len(entry) <= 4 for entry in each.logprobs)
    assert found.perplexity > 1
    assert len(best_of.prompt_logprobs) == len(best_of.prompt_token_ids)
    assert best_of.prompt_logprobs[0] is None
    for token, entry in zip(best_of.prompt_token_ids[1:], best_of.prompt_logprobs[1:]):
        assert entry[token].logprob <= 0
        assert min(each.rank for each in entry.values()) == 1


def test_control(results: SimpleNamespace) -> None:
    found = results.control
    whole = found.free.outputs[0].text
    stopped, kept = found.stopped.outputs[0], found.kept.outputs[0]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", found.stop)
    assert stopped.text == whole[: whole.index(found.stop)]
    assert kept.text == stopped.text + found.stop
    assert found.biased.outputs[0].token_ids[0] != found.first
    assert found.chosen.outputs[0].token_ids[0] in found.yes_no
    varied = found.varied.outputs[0]
    assert len(varied.token_ids) == 24
    assert "the" not in varied.text
    assert len(set(varied.token_ids)) > len(set(found.free.outputs[0].token_ids))
    tokenizer = found.tokenizer
    assert tokenizer.decode(varied.token_ids) == varied.text
    assert tokenizer.eos_token == "<|im_end|>"


def test_chat(results: SimpleNamespace) -> None:
    found = results.chat
    assert found.by_hand.outputs[0].token_ids == found.by_chat.outputs[0].token_ids
    assert found.by_hand.prompt == found.by_chat.prompt
    assert "Write about dogs" in found.many[0].prompt
    assert found.many[1].outputs[0].token_ids == found.by_chat.outputs[0].token_ids
    assert found.continued.prompt.endswith("<|im_start|>assistant\nDogs are")


def test_the_engines_seed_makes_a_run_repeat(results: SimpleNamespace, model: Path) -> None:
    assert len(set(results.unseeded)) > 1
    assert run(model).unseeded == results.unseeded
