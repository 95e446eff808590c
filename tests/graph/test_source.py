"""Directories of safetensors: single and sharded files, and every way in which they can be broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from treadle.graph.source import DirectorySource, DummySource, SourceError, TensorInfo, open_source

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.arange(4, dtype=torch.bfloat16),
    "c": torch.arange(2, dtype=torch.float16),
}


@pytest.fixture
def single(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    files = {"model-00001-of-00002.safetensors": ["a"], "model-00002-of-00002.safetensors": ["b", "c"]}
    for file, names in files.items():
        save_file({name: TENSORS[name] for name in names}, tmp_path / file)
    index = {"weight_map": {name: file for file, names in files.items() for name in names}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_reads_what_was_saved(kind: str, request: pytest.FixtureRequest) -> None:
    source = open_source(request.getfixturevalue(kind))
    assert (source.kind, source.config) == ("hf", {"model_type": "llama"})
    assert source.tensors["a"] == TensorInfo((2, 3), "float32", 24)
    assert {name: info.dtype for name, info in source.tensors.items()} == {
        "a": "float32",
        "b": "bfloat16",
        "c": "float16",
    }
    for name, tensor in TENSORS.items():
        assert torch.equal(source.read(name), tensor)
    source.close()
    assert torch.equal(source.read("b"), TENSORS["b"]), "reading goes on after close"


def test_tensors_are_listed_in_file_order(single: Path) -> None:
    save_file({f"t{i}": torch.zeros(i) for i in (5, 3, 9)}, single / "model.safetensors")
    header = json.loads((single / "model.safetensors").read_bytes()[8:].split(b"}}")[0] + b"}}")
    offsets = sorted((entry["data_offsets"][0], name) for name, entry in header.items())
    assert list(open_source(single).tensors) == [name for _, name in offsets]


def test_other_safetensors_beside_the_index_are_not_read(sharded: Path) -> None:
    save_file({"a": torch.zeros(9), "d": torch.zeros(1)}, sharded / "consolidated.safetensors")
    assert set(open_source(sharded).tensors) == set(TENSORS)


def test_fingerprint_follows_config_and_content(single: Path) -> None:
    first = open_source(single).fingerprint()
    assert open_source(single).fingerprint() == first
    save_file({**TENSORS, "a": TENSORS["a"] + 1}, single / "model.safetensors")
    second = open_source(single).fingerprint()
    (single / "config.json").write_text('{"model_type": "qwen3"}')
    assert len({first, second, open_source(single).fingerprint()}) == 3
    assert DummySource({"a": 1}).fingerprint() != DummySource({"a": 2}).fingerprint()


def test_missing_path_names_the_nearest(single: Path) -> None:
    single.rename(single.parent / "smollm2")
    with pytest.raises(SourceError, match=r"no such file or directory; did you mean .*smollm2"):
        open_source(single.parent / "smolm2")


@pytest.mark.parametrize("cut", [4, 40, -1])
def test_truncated_file_is_named(sharded: Path, cut: int) -> None:
    file = sharded / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(SourceError, match=r"model-00002-of-00002\.safetensors: .*truncated"):
        open_source(sharded)


def rewritten(file: Path, old: bytes, new: bytes) -> None:
    assert len(old) == len(new)
    content = file.read_bytes()
    assert old in content
    file.write_bytes(content.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"shape":[2,3]', b'"shape":[2,9]', "a: 24 bytes do not hold"),
        (b'"shape"', b'"shap3"', "broken header"),
        (b'{"', b'!"', "broken header"),
    ],
)
def test_broken_header_is_named(single: Path, old: bytes, new: bytes, message: str) -> None:
    rewritten(single / "model.safetensors", old, new)
    with pytest.raises(SourceError, match=rf"model\.safetensors: {message}"):
        open_source(single)


def test_numbers_that_json_cannot_say(single: Path) -> None:
    config = json.loads((single / "config.json").read_text())
    limits = [0.0, {"__float__": "Infinity"}]
    (single / "config.json").write_text(json.dumps({**config, "time_step_limit": limits, "other": {"__int__": 1}}))
    read = open_source(single).config
    assert (read["time_step_limit"], read["other"]) == ([0.0, float("inf")], {"__int__": 1})
    (single / "config.json").write_text(json.dumps({"time_step_limit": {"__float__": ["many"]}}))
    with pytest.raises(SourceError, match="not JSON"):
        open_source(single)


def test_a_directory_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"no config\.json"):
        open_source(tmp_path)
    (tmp_path / "x.gguf").touch()
    with pytest.raises(SourceError, match=r"it holds x\.gguf"):
        open_source(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SourceError, match=r"config\.json: not JSON"):
        open_source(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(SourceError, match="not a JSON object"):
        open_source(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SourceError, match=r"no \*\.safetensors"):
        open_source(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(SourceError, match=r"convert pytorch_model\.bin"):
        open_source(tmp_path)
    with pytest.raises(SourceError, match=r"not a model.*\.gguf"):
        open_source(tmp_path / "config.json")


def test_index_and_files_that_disagree(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    index.write_text(json.dumps({"weight_map": {**good["weight_map"], "z": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(SourceError, match="names 1 tensors that the files lack: z"):
        open_source(sharded)
    index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(SourceError, match=r"not there: gone\.safetensors"):
        open_source(sharded)
    index.write_text("{}")
    with pytest.raises(SourceError, match=r"index\.json: broken index"):
        open_source(sharded)


def test_tables_of_ids_are_read_and_other_integers_refused(single: Path) -> None:
    save_file({"ids": torch.arange(3), "n": torch.arange(3, dtype=torch.int16)}, single / "model.safetensors")
    source = DirectorySource(single)
    assert source.tensors["n"].dtype == "int16"
    assert source.read("ids").tolist() == [0, 1, 2]
    with pytest.raises(SourceError, match="n is int16"):
        source.read("n")
