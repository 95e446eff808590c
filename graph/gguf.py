"""GGUF files: metadata, tensor table, and their translation to config.json keys and hub tensor names.

The header is parsed here, without torch and quicker than by the gguf package, whose dequantisation is used on read.
Source: the GGUF specification, and the conversions that llama.cpp applies (undone here): q and k rows of the llama
architecture are permuted for interleaved rope, and gemma's norm weights have their 1 added.
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from treadle.conf.errors import nearest
from treadle.graph.source import SourceError, TensorInfo, sample

if TYPE_CHECKING:
    from torch import Tensor

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
# type id -> name, elements and bytes of a block
_TYPES = {
    0: ("float32", 1, 4),
    1: ("float16", 1, 2),
    30: ("bfloat16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
}
_OTHER_TYPES = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
}
"""general.architecture -> model_type."""

_NAMES = {
    r"token_embd\.weight": "model.embed_tokens.weight",
    r"output_norm\.weight": "model.norm.weight",
    r"output\.weight": "lm_head.weight",
    r"blk\.(\d+)\.attn_norm\.weight": r"model.layers.\1.input_layernorm.weight",
    r"blk\.(\d+)\.attn_output\.(weight|bias)": r"model.layers.\1.self_attn.o_proj.\2",
    r"blk\.(\d+)\.attn_([qkv])\.(weight|bias)": r"model.layers.\1.self_attn.\2_proj.\3",
    r"blk\.(\d+)\.attn_([qk])_norm\.weight": r"model.layers.\1.self_attn.\2_norm.weight",
    r"blk\.(\d+)\.ffn_(gate|up|down)\.(weight|bias)": r"model.layers.\1.mlp.\2_proj.\3",
}
_PLAIN_NAMES = {r"blk\.(\d+)\.ffn_norm\.weight": r"model.layers.\1.post_attention_layernorm.weight"}
_SANDWICH_NAMES = {
    r"blk\.(\d+)\.post_attention_norm\.weight": r"model.layers.\1.post_attention_layernorm.weight",
    r"blk\.(\d+)\.ffn_norm\.weight": r"model.layers.\1.pre_feedforward_layernorm.weight",
    r"blk\.(\d+)\.post_ffw_norm\.weight": r"model.layers.\1.post_feedforward_layernorm.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"


class GGUFSource:
    """A GGUF file, presented with hub names and a config.json."""

    kind = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata, table, data_start = _read_file(path)
        architecture = self.metadata.get("general.architecture")
        if architecture not in MODEL_TYPES:
            raise SourceError(
                "no family reads this architecture",
                key=str(path),
                value=architecture,
                nearest=nearest(str(architecture), MODEL_TYPES),
                hint=f"architectures: {', '.join(MODEL_TYPES)}",
            )
        self._architecture = str(architecture)
        self._types: dict[str, int] = {}
        self._offsets: dict[str, int] = {}
        self.tensors: Mapping[str, TensorInfo] = self._map_tensors(table, data_start)
        self._factors = self._rope_factors(table, data_start)
        self.config = self._make_config()
        self._map: Any = None

    def read(self, name: str) -> Tensor:
        """Return one tensor in the layout of the hub: float16 and bfloat16 as they are, others as float32."""
        import numpy
        import torch

        info, type_id, offset = self.tensors[name], self._types[name], self._offsets[name]
        if self._map is None:
            # copy on write: torch wants writable memory, the file stays as it is
            self._map = numpy.memmap(self.path, mode="c", dtype=numpy.uint8)
        raw = self._map[offset : offset + info.nbytes]
        _, block, block_bytes = _TYPES[type_id]
        if block == 1:
            tensor = torch.frombuffer(raw, dtype=getattr(torch, info.dtype)).reshape(info.shape)
        else:
            from gguf import GGMLQuantizationType
            from gguf.quants import dequantize

            rows = raw.reshape(-1, info.shape[-1] // block * block_bytes)
            tensor = torch.from_numpy(dequantize(rows, GGMLQuantizationType(type_id))).reshape(info.shape)
        undo = self._undo(name)
        return undo(tensor) if undo else tensor

    def close(self) -> None:
        """Unmap the file; the next ``read`` maps it again."""
        self._map = None

    def fingerprint(self) -> str:
        """Return a hash of the size, beginning (metadata) and end of the file."""
        digest = hashlib.sha256()
        sample(digest, self.path)
        return digest.hexdigest()

    def _undo(self, name: str) -> Callable[[Tensor], Tensor] | None:
        """Return what reverses llama.cpp's change of this tensor, None if it made none."""
        if self._architecture.startswith("gemma") and name.endswith("norm.weight"):
            return lambda tensor: tensor.float() - 1.0
        if self._architecture == "llama" and (
            match := re.fullmatch(r".*\.self_attn\.([qk])_proj\.(?:weight|bias)", name)
        ):
            heads = self.config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]
            return lambda tensor: unpermute(tensor, heads)
        return None

    def _map_tensors(self, table: Mapping[str, tuple[tuple[int, ...], int, int]], start: int) -> dict[str, TensorInfo]:
        names = _NAMES | (_SANDWICH_NAMES if self._architecture in ("gemma2", "gemma3") else _PLAIN_NAMES)
        rules = [(re.compile(pattern), target) for pattern, target in names.items()]
        size = self.path.stat().st_size
        tensors: dict[str, TensorInfo] = {}
        for name, (shape, type_id, offset) in table.items():
            if name == _ROPE_FACTORS:
                continue
            if type_id not in _TYPES:
                raise SourceError(
                    f"{name} is {_OTHER_TYPES.get(type_id, f'of type {type_id}')}",
                    key=str(self.path),
                    hint="types that can be read: F32, F16, BF16, Q8_0, Q4_0, Q4_1",
                )
            dtype, block, block_bytes = _TYPES[type_id]
            if shape[-1] % block:
                raise SourceError(f"{name}: rows of {shape[-1]} are not whole {dtype} blocks", key=str(self.path))
            nbytes = math.prod(shape) // block * block_bytes
            if start + offset + nbytes > size:
                raise SourceError(
                    f"truncated: {name} ends at byte {start + offset + nbytes} of {size}", key=str(self.path)
                )
            # a name no rule knows stays as it is, and is reported as unused
            hub = next((match.expand(to) for pattern, to in rules if (match := pattern.fullmatch(name))), name)
            tensors[hub] = TensorInfo(shape, dtype, nbytes)
            self._types[hub], self._offsets[hub] = type_id, start + offset
        return tensors

    def _rope_factors(self, table: Mapping[str, tuple[tuple[int, ...], int, int]], start: int) -> list[float] | None:
        """Return the divisors of the rotary frequencies (llama 3.1 and later), small enough to read at once."""
        if _ROPE_FACTORS not in table:
            return None
        (count,), type_id, offset = table[_ROPE_FACTORS]
        if type_id != 0:
            raise SourceError(f"{_ROPE_FACTORS} must be F32", key=str(self.path))
        with self.path.open("rb") as stream:
            stream.seek(start + offset)
            return list(struct.unpack(f"<{count}f", stream.read(4 * count)))

    def _get(self, key: str, default: Any = None) -> Any:
        value = self.metadata.get(f"{self._architecture}.{key}", default)
        # float32 in the file: give back the decimal that was meant, 1e-05 and not 9.999999747378752e-06
        return float(f"{value:.7g}") if isinstance(value, float) else value

    def _require(self, key: str) -> Any:
        value = self._get(key)
        if value is None:
            raise SourceError(f"no {self._architecture}.{key} in the metadata", key=str(self.path))
        return value

    def _make_config(self) -> dict[str, Any]:
        heads, hidden = self._require("attention.head_count"), self._require("embedding_length")
        head_dim = self._get("attention.key_length", hidden // heads)
        embedding = self.tensors.get("model.embed_tokens.weight")
        if embedding is None:
            raise SourceError("no token_embd.weight", key=str(self.path))
        matrices = {info.dtype for info in self.tensors.values() if len(info.shape) == 2}
        config: dict[str, Any] = {
            "model_type": MODEL_TYPES[self._architecture],
            "torch_dtype": "float32" if "float32" in matrices else "float16" if matrices == {"float16"} else "bfloat16",
            "vocab_size": embedding.shape[0],
            "hidden_size": hidden,
            "intermediate_size": self._require("feed_forward_length"),
            "num_hidden_layers": self._require("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._get("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": self._require("context_length"),
            "rms_norm_eps": self._require("attention.layer_norm_rms_epsilon"),
            "tie_word_embeddings": "lm_head.weight" not in self.tensors,
            "attention_bias": False,
        }
        for key, name in (("bos", "bos_token_id"), ("eos", "eos_token_id"), ("padding", "pad_token_id")):
            if (value := self.metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
                config[name] = value
        config |= self._rope(head_dim)
        if self._architecture in ("gemma2", "gemma3"):
            # the 27B models scale by the mean head width of the stream, the others by the head's own
            wide = config["num_hidden_layers"] == {"gemma2": 46, "gemma3": 62}[self._architecture]
            config["query_pre_attn_scalar"] = hidden // heads if wide else head_dim
            config["sliding_window"] = self._require("attention.sliding_window")
            config["final_logit_softcapping"] = self._get("final_logit_softcapping")
            config["attn_logit_softcapping"] = self._get("attn_logit_softcapping")
        return config

    def _rope(self, head_dim: int) -> dict[str, Any]:
        rope: dict[str, Any] = {"rope_theta": self._get("rope.freq_base", 10000.0)}
        rotated = self._get("rope.dimension_count", head_dim)
        if rotated != head_dim:
            rope["partial_rotary_factor"] = rotated / head_dim
        if self._architecture == "gemma3":
            rope["rope_local_base_freq"] = self._get("rope.freq_base_swa", 10000.0)
        kind, original = self._get("rope.scaling.type", "none"), self._get("rope.scaling.original_context_length")
        if self._factors is not None:
            # frequencies divided one by one, at every length: longrope with equal lists
            factors = {"short_factor": self._factors, "long_factor": self._factors, "attention_factor": 1.0}
            context = self._require("context_length")
            rope["rope_scaling"] = {"rope_type": "longrope", "original_max_position_embeddings": context, **factors}
        elif kind in ("linear", "yarn"):
            rope["rope_scaling"] = {
                "rope_type": kind,
                "factor": self._get("rope.scaling.factor", 1.0),
                "original_max_position_embeddings": original,
            }
        elif kind != "none":
            raise SourceError("this rope scaling is not read from GGUF files", key=str(self.path), value=kind)
        return rope


def unpermute(tensor: Tensor, heads: int) -> Tensor:
    """Return rows in the order of the hub, rope pairs half a head apart, from rows with rope pairs side by side."""
    rows = tensor.shape[0]
    return tensor.reshape(heads, rows // heads // 2, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _read_file(path: Path) -> tuple[dict[str, Any], dict[str, tuple[tuple[int, ...], int, int]], int]:
    """Return metadata, the tensor table (name -> shape, type id, offset) and where tensor data starts."""
    try:
        with path.open("rb") as stream:
            magic, version, num_tensors, num_pairs = struct.unpack("<4sIQQ", stream.read(24))
            if magic != b"GGUF" or version not in (2, 3):
                raise SourceError("not a GGUF file of version 2 or 3", key=str(path))
            reader = _Reader(stream, path.stat().st_size)
            metadata = {reader.string(): reader.value(reader.number("<I")) for _ in range(num_pairs)}
            table = {}
            for _ in range(num_tensors):
                name, dims = reader.string(), reader.number("<I")
                shape = tuple(reversed([reader.number("<Q") for _ in range(dims)]))
                table[name] = (shape, int(reader.number("<I")), int(reader.number("<Q")))
            alignment = int(metadata.get("general.alignment", 32))
            return metadata, table, -(-stream.tell() // alignment) * alignment
    except (struct.error, UnicodeDecodeError, EOFError, KeyError, OverflowError, MemoryError) as error:
        raise SourceError(f"broken or truncated header: {error}", key=str(path)) from None
    except OSError as error:
        raise SourceError(f"cannot be read: {error.strerror}", key=str(path)) from None


class _Reader:
    def __init__(self, stream: BinaryIO, size: int) -> None:
        self._stream, self._size = stream, size

    def number(self, form: str) -> Any:
        return struct.unpack(form, self._stream.read(struct.calcsize(form)))[0]

    def string(self) -> str:
        length = self.number("<Q")
        if length > self._size:
            raise EOFError("a string is longer than the file")
        return self._stream.read(length).decode("utf-8", errors="surrogateescape")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.number(_SCALARS[kind])
        inner, count = self.number("<I"), self.number("<Q")
        if count > self._size:
            raise EOFError("an array is longer than the file")
        if inner in (_STRING, _ARRAY):
            return [self.value(inner) for _ in range(count)]
        form = _SCALARS[inner][1:]
        return list(struct.unpack(f"<{count}{form}", self._stream.read(count * struct.calcsize(f"<{form}"))))
