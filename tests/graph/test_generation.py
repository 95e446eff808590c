from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_model import write_model

from treadle.conf.check import SAMPLING
from treadle.conf.load import compose
from treadle.conf.lock import from_lock, to_lock
from treadle.graph.generation import RECOMMENDED, recommended
from treadle.graph.resolve import resolve
from treadle.graph.source import SourceError, open_source

WRITTEN = {
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.0,
    "repetition_penalty": 1.05,
    "max_new_tokens": 512,
    "do_sample": True,
    "eos_token_id": [1, 2],
}
TAKEN = {
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.0,
    "repetition_penalty": 1.05,
    "max_tokens": 512,
}


def write(folder: Path, config: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(config))
    return folder


def sampling(folder: Path, *overrides: str) -> dict[str, Any]:
    deployment = compose(["model=hf", f"model.path={folder}", "hardware=cpu", "hardware.memory=1GiB", *overrides])
    return resolve(deployment).deployment.model.sampling


def test_a_directory_recommends_what_its_file_says(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    assert recommended(open_source(folder)) == {}
    assert recommended(open_source(write(folder, WRITTEN))) == TAKEN
    assert recommended(open_source(write(folder, {"temperature": None}))) == {}


def test_a_gguf_file_recommends_by_its_keys() -> None:
    metadata = {"general.sampling.temp": 0.60000002384, "general.sampling.top_k": 20, "general.sampling.mirostat": 2}
    source: Any = SimpleNamespace(kind="gguf", path=Path("m.gguf"), metadata=metadata)
    assert recommended(source) == {"temperature": 0.6, "top_k": 20}


def test_the_configuration_takes_what_a_checkpoint_may_recommend() -> None:
    assert set(RECOMMENDED.values()) == set(SAMPLING)


@pytest.mark.parametrize("config", [[1], {"temperature": "0.6"}, {"top_k": True}])
def test_what_is_no_number_names_the_file(config: Any, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"generation_config\.json: "):
        recommended(open_source(write(write_model(tmp_path), config)))


def test_what_is_recommended_stands_in_the_lock_and_can_be_switched_off(tmp_path: Path) -> None:
    folder = write(write_model(tmp_path / "m"), WRITTEN)
    assert sampling(folder) == TAKEN
    assert sampling(folder, "model.generation_config=none") == {}
    assert sampling(folder, "+model.sampling.top_k=7") == {**TAKEN, "top_k": 7}
    deployment = compose(["model=hf", f"model.path={folder}", "hardware=cpu", "hardware.memory=1GiB"])
    lock = tmp_path / "lock.yaml"
    lock.write_text(to_lock(resolve(deployment).deployment))
    write(folder, {"temperature": 0.1, "min_p": 0.5})
    again = resolve(from_lock(lock)).deployment.model
    assert (again.sampling, again.generation_config) == (TAKEN, "none")
