"""A model in several files, and what may be wrong with them."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from oracle import tiny
from tiny_gguf import write

from treadle.graph.gguf_header import read_header, shards
from treadle.graph.source import SourceError, open_source


def split(whole: Path, count: int) -> list[Path]:
    """Write the shards that llama.cpp's gguf-split makes of a file: metadata in the first, tensors in turn."""
    reader = gguf.GGUFReader(whole)
    tensors = reader.tensors
    each = -(-len(tensors) // count)
    paths = [whole.with_name(f"m-{i + 1:05}-of-{count:05}.gguf") for i in range(count)]
    for i, path in enumerate(paths):
        writer = gguf.GGUFWriter(path, "llama")
        for name, field in reader.fields.items() if i == 0 else ():
            if not name.startswith("GGUF.") and name != "general.architecture":
                kind, *sub = field.types
                writer.add_key_value(name, field.contents(), kind, sub[0] if sub else None)
        writer.add_uint16("split.count", count)
        writer.add_uint16("split.no", i)
        writer.add_int32("split.tensors.count", len(tensors))
        for tensor in tensors[i * each : (i + 1) * each]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return write(tiny("llama"), tmp_path / "whole.gguf", "llama", "Q8_0")


@pytest.mark.parametrize("given", [0, 2])
def test_shards_are_the_whole_file(given: int, whole: Path) -> None:
    paths = split(whole, 3)
    one, many = open_source(whole), open_source(paths[given])
    assert many.path == paths[0]
    assert one.config == many.config
    assert one.tensors == many.tensors
    for name in one.tensors:
        assert torch.equal(one.read(name), many.read(name))
    before = many.fingerprint()
    paths[2].write_bytes(paths[2].read_bytes()[:-1] + b"\x7f")
    assert open_source(paths[0]).fingerprint() != before


def test_a_missing_shard_is_named(whole: Path) -> None:
    paths = split(whole, 3)
    paths[1].unlink()
    with pytest.raises(SourceError, match=r"m-00002-of-00003\.gguf: shard 2 of 3 is missing"):
        open_source(paths[0])


def test_a_truncated_shard_is_named(whole: Path) -> None:
    paths = split(whole, 2)
    paths[1].write_bytes(paths[1].read_bytes()[:-40])
    with pytest.raises(SourceError, match=r"m-00002-of-00002\.gguf: truncated: "):
        open_source(paths[0])


def test_a_file_of_another_kind_or_that_ends_early_is_said_so(tmp_path: Path, whole: Path) -> None:
    short = tmp_path / "short.gguf"
    short.write_bytes(b"hello")
    with pytest.raises(SourceError, match="not a GGUF file"):
        read_header([short])
    short.write_bytes(whole.read_bytes()[:40])
    with pytest.raises(SourceError, match="broken or truncated header: the file ends within it"):
        read_header([short])


def test_shards_of_other_models_are_refused(whole: Path) -> None:
    paths = split(whole, 3)
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(SourceError, match=r"m-00002-of-00003\.gguf: holds shard 3 of 3, not 2 of 3"):
        open_source(paths[0])
    paths[1].write_bytes(paths[0].read_bytes())
    with pytest.raises(SourceError, match=r"holds shard 1 of 3, not 2 of 3"):
        open_source(paths[0])
    renamed = paths[0].rename(whole.with_name("alone.gguf"))
    with pytest.raises(SourceError, match=r"alone\.gguf: is shard 1 of 3 under another name; shards are called NAME-"):
        open_source(renamed)


def test_names_of_shards() -> None:
    assert shards(Path("a/m.gguf")) == [Path("a/m.gguf")]
    assert shards(Path("a/m-00002-of-00002.gguf")) == [Path(f"a/m-0000{i}-of-00002.gguf") for i in (1, 2)]
    with pytest.raises(SourceError, match=r"model\.path=gone\.gguf: no such file"):
        read_header([Path("gone.gguf")])
