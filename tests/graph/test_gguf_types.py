"""The table of element types against the gguf package's, and every type read bit by bit as the package does."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy
import pytest
import torch

from treadle.graph.gguf import GGUFSource
from treadle.graph.gguf_types import BLOCK_NAMES, BLOCK_TYPES, FLOAT_TYPES, OTHER_TYPES, TYPES


def test_blocks_are_those_of_the_gguf_package() -> None:
    for type_id, kind in TYPES.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(type_id)] == (kind.block, kind.nbytes)
    for type_id, name in (BLOCK_TYPES | OTHER_TYPES).items():
        assert gguf.GGMLQuantizationType(type_id).name == (name if isinstance(name, str) else name.name)
    assert not set(TYPES) & set(OTHER_TYPES)
    assert len(BLOCK_NAMES) == len(BLOCK_TYPES)
    assert set(FLOAT_TYPES) == {0, 1, 30}


@pytest.mark.parametrize("type_id", BLOCK_TYPES)
def test_random_blocks_dequantise_as_in_the_gguf_package(type_id: int, tmp_path: Path) -> None:
    kind, rows = BLOCK_TYPES[type_id], 6
    raw = numpy.random.default_rng(type_id).integers(0, 256, (rows, 256 // kind.block * kind.nbytes), dtype=numpy.uint8)
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "qwen3")
    for name, value in (("embedding_length", 256), ("block_count", 1), ("feed_forward_length", 32)):
        writer.add_uint32(f"qwen3.{name}", value)
    writer.add_context_length(64)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    ggml = gguf.GGMLQuantizationType(type_id)
    writer.add_tensor("token_embd.weight", raw, raw_dtype=ggml)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = GGUFSource(path)
    info = source.tensors["model.embed_tokens.weight"]
    assert (info.shape, info.dtype, info.nbytes) == ((rows, 256), kind.name, raw.nbytes)
    with numpy.errstate(all="ignore"):  # random bytes hold scales that are infinite, or none
        read = source.read("model.embed_tokens.weight")
        expected = gguf.quants.dequantize(raw, ggml)
    assert read.dtype == torch.float32
    assert torch.equal(read.view(torch.int32), torch.from_numpy(expected.view(numpy.int32)))
