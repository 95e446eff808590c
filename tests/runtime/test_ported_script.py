"""A script written for vLLM's offline API runs here once its import is changed, and means the same."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_text
from tiny_model import CONFIG

from treadle.graph.processors import installed_processors
from treadle.runtime import LLM, RequestError, RequestOutput, SamplingParams

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


def test_an_installed_processor_is_found_and_its_memory_planned(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package with the entry point that docs/sampling.md describes, as an installer leaves it."""
    (tmp_path / "only_even.py").write_text(PROCESSOR)
    info = tmp_path / "only_even-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: only-even\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[treadle.logits_processors]\nonly-even = only_even:OnlyEven\n")
    monkeypatch.syspath_prepend(tmp_path)
    installed_processors.cache_clear()
    try:
        options = {"load_format": "dummy", "dtype": "float32", "max_model_len": 64, "max_num_seqs": 4}
        with LLM(model=model, enforce_eager=True, **options) as llm:
            params = SamplingParams(
                temperature=1.0, seed=1, max_tokens=20, logits_processors={"only-even": {"rest": 1}}
            )
            plain = SamplingParams(temperature=1.0, seed=1, max_tokens=20)
            odd, usual = llm.generate(["the dog"] * 2, [params, plain])
            assert all(token % 2 == 1 for token in odd.outputs[0].token_ids)
            assert any(token % 2 == 0 for token in usual.outputs[0].token_ids)
            with pytest.raises(RequestError, match=r"only-even refuses .*rest is 0 or 1"):
                llm.generate("a", SamplingParams(logits_processors={"only-even": {"rest": 2}}))
            assert len(llm.generate("a", plain)[0].outputs[0].token_ids) > 0
    finally:
        installed_processors.cache_clear()


PROCESSOR = """
import torch

class OnlyEven:
    def __init__(self, rest: int = 0):
        if rest not in (0, 1):
            raise ValueError("rest is 0 or 1")
        self.rest = rest

    def __call__(self, token_ids: torch.Tensor, logits: torch.Tensor) -> None:
        logits[1 - self.rest :: 2] = -torch.inf
"""
