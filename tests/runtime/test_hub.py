from pathlib import Path

import pytest
from hub_server import FakeHub, serve, use
from tiny_model import write_model
from tiny_text import write_directory

from treadle.runtime.llm import LLM
from treadle.runtime.request import SamplingParams

SMALL = ["hardware=cpu", "hardware.memory=1GiB", "passes=reference", "model.max_len=64"]


def test_a_name_of_the_hub_is_a_model_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_directory(write_model(tmp_path / "repo"))
    (folder / "generation_config.json").write_text('{"temperature": 0.0, "max_new_tokens": 5}')
    with serve(FakeHub({"org/tiny": folder})) as hub:
        use(hub.endpoint, tmp_path, monkeypatch)
        with LLM("org/tiny", SMALL) as llm:
            answer = llm.generate([[3, 4, 5]], use_tqdm=False)[0].outputs[0].token_ids
        with LLM(folder, SMALL) as local:
            assert (
                local.generate([[3, 4, 5]], SamplingParams(temperature=0, max_tokens=5))[0].outputs[0].token_ids
                == answer
            )
    assert len(answer) == 5
