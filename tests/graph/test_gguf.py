"""GGUF files of every type and architecture, written with the gguf package, equal the directories they came from."""

from __future__ import annotations

import time
from pathlib import Path

import gguf
import numpy
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from oracle import tiny
from tiny_gguf import TYPES, permuted, write

from treadle.graph.checkpoint import Checkpoint
from treadle.graph.family import family_for, load_spec
from treadle.graph.gguf import GGUFSource, unpermute
from treadle.graph.source import SourceError, open_source
from treadle.graph.spec import Attention


@pytest.mark.parametrize("kind", TYPES)
def test_types_dequantise_as_gguf_does(kind: str, tmp_path: Path) -> None:
    model = tiny("llama")
    file, original = open_source(write(model, tmp_path / "m.gguf", "llama", kind)), open_source(model.path)
    assert set(file.tensors) == set(original.tensors)
    assert file.tensors["lm_head.weight"].dtype in ("float32", "float16", "bfloat16", kind)
    for name in original.tensors:
        exact = original.read(name)
        stored = TYPES[kind] if exact.ndim == 2 else Type.F32
        heads = {"q": 4, "k": 2}.get(name.split("_proj")[0][-1], 0) if "_proj" in name else 0
        twisted = (permuted(exact, heads) if heads else exact).contiguous().numpy()
        expected = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(twisted, stored), stored).copy())
        expected = unpermute(expected, heads) if heads else expected
        made = file.read(name)
        assert torch.equal(made.float(), expected), name
        assert float((made.float() - exact).abs().max()) <= (0.0 if kind == "F32" else 0.8)
    file.close()
    assert torch.equal(file.read("lm_head.weight"), file.read("lm_head.weight"))


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("llama", "llama"),
        ("llama-bias", "llama"),
        ("llama-tied", "llama"),
        ("llama-wide-heads", "llama"),
        ("qwen2", "qwen2"),
        ("qwen3-tied", "qwen3"),
        ("gemma", "gemma"),
        ("gemma2", "gemma2"),
        ("gemma3-untied-capped", "gemma3"),
    ],
)
def test_architectures_give_the_model_of_the_directory(name: str, architecture: str, tmp_path: Path) -> None:
    model = tiny(name)
    file, original = open_source(write(model, tmp_path / "m.gguf", architecture)), open_source(model.path)
    assert family_for(file.config) == family_for(original.config)
    made, wanted = (load_spec(family_for(source.config), source.config) for source in (file, original))
    assert (made.hidden, made.vocab, made.max_positions, made.head) == (wanted.hidden, wanted.vocab, 128, wanted.head)
    assert made.embed == wanted.embed
    for layer, other in zip(made.layers, wanted.layers, strict=True):
        ours, theirs = layer.subs[0].op, other.subs[0].op
        assert isinstance(ours, Attention)
        assert isinstance(theirs, Attention)
        skipped = ("rope", "scale", "bias", "o_bias")
        fields = [field for field in ours.__struct_fields__ if field not in skipped]
        assert {field: getattr(ours, field) for field in fields} == {field: getattr(theirs, field) for field in fields}
        assert layer.subs[0].pre == other.subs[0].pre
    a, b = Checkpoint(file, made), Checkpoint(original, wanted)
    assert set(a.weights) == set(b.weights)
    for weight in a.weights:
        torch.testing.assert_close(a.read(weight), b.read(weight), rtol=0, atol=1e-6)


def test_metadata_becomes_config(tmp_path: Path) -> None:
    source = open_source(write(tiny("llama"), tmp_path / "m.gguf", "llama", "Q8_0"))
    assert source.kind == "gguf"
    assert source.config["rms_norm_eps"] == 0.01, "the decimal that was meant, not the nearest float32"
    assert source.config["torch_dtype"] == "bfloat16"
    assert source.config["eos_token_id"] == 2
    assert source.metadata["tokenizer.ggml.tokens"][:2] == ["<0>", "<1>"]
    assert source.fingerprint() != open_source(write(tiny("qwen3"), tmp_path / "n.gguf", "qwen3")).fingerprint()


def test_rope_factors_divide_the_frequencies(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in (
        ("context_length", 64),
        ("embedding_length", 64),
        ("block_count", 1),
        ("feed_forward_length", 32),
    ):
        writer.add_uint32(f"llama.{name}", value)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    factors = numpy.arange(1, 9, dtype=numpy.float32)
    writer.add_tensor("rope_freqs.weight", factors)
    writer.add_tensor("token_embd.weight", numpy.zeros((3, 64), dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = open_source(path)
    assert "rope_freqs.weight" not in source.tensors
    op = load_spec("llama", {**source.config, "hidden_act": "silu"}).layers[0].subs[0].op
    assert isinstance(op, Attention)
    assert op.rope is not None
    assert op.rope.scaling.short_factor == op.rope.scaling.long_factor == tuple(range(1, 9))
    assert op.rope.scaling.attention_factor == 1.0


@pytest.mark.parametrize(("kind", "factor"), [("linear", 4.0), ("yarn", 4.0)])
def test_rope_scaling(kind: str, factor: float, tmp_path: Path) -> None:
    more = {"llama__rope__scaling__type": kind, "llama__rope__scaling__factor": factor}
    source = open_source(write(tiny("llama"), tmp_path / "m.gguf", "llama", **more))
    op = load_spec("llama", source.config).layers[0].subs[0].op
    assert isinstance(op, Attention)
    assert op.rope is not None
    assert (op.rope.scaling.rope_type, op.rope.scaling.factor, op.rope.theta) == (kind, factor, 4321.0)
    unknown = {"llama__rope__scaling__type": "spiral"}
    with pytest.raises(SourceError, match="=spiral: this rope scaling"):
        open_source(write(tiny("llama"), tmp_path / "n.gguf", "llama", **unknown))


def test_types_and_architectures_that_are_not_read_are_named(tmp_path: Path) -> None:
    path = write(tiny("llama"), tmp_path / "m.gguf", "llama")
    path.write_bytes(
        path.read_bytes().replace(
            b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0llama",
            b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0lamma",
        )
    )
    with pytest.raises(SourceError, match=r"=lamma: no family reads this architecture; did you mean llama"):
        open_source(path)
    content = bytearray(write(tiny("llama"), path, "llama").read_bytes())
    place = content.index(b"blk.1.ffn_up.weight") + len(b"blk.1.ffn_up.weight") + 4 + 2 * 8
    content[place] = 40
    path.write_bytes(content)
    with pytest.raises(SourceError, match=r"m\.gguf: blk\.1\.ffn_up\.weight is NVFP4; types that can be read: F32"):
        open_source(path)


@pytest.mark.parametrize("cut", [3, 30, 2000, -1])
def test_truncated_file_is_named(cut: int, tmp_path: Path) -> None:
    path = write(tiny("llama"), tmp_path / "m.gguf", "llama")
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(SourceError, match=r"m\.gguf: .*truncated"):
        open_source(path)
    path.write_bytes(b"GGML" + b"\0" * 100)
    with pytest.raises(SourceError, match="not a GGUF file"):
        open_source(path)


def test_a_long_vocabulary_opens_quickly(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list([f"token{i}" for i in range(100_000)])
    writer.add_tensor("x", numpy.zeros((2, 2), dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    started = time.perf_counter()
    with pytest.raises(SourceError, match=r"no llama\.embedding_length in the metadata"):
        GGUFSource(path)
    assert time.perf_counter() - started < 2.0
