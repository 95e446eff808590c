"""GGUF files presented as a checkpoint of the hub: config.json keys and tensor names, weights dequantised on read."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.conf.errors import nearest
from treadle.conf.phase import OnPhase
from treadle.graph.gguf_architecture import ARCHITECTURES, KEYS_OF_ALL, Architecture, architecture
from treadle.graph.gguf_header import Entry, Header, open_local, read_header, shards
from treadle.graph.gguf_types import BLOCK_TYPES, FLOAT_TYPES, OTHER_TYPES, TYPES
from treadle.graph.source import Remote, SourceError, TensorInfo, sample

if TYPE_CHECKING:
    from torch import Tensor

_ROPE_FACTORS = {
    "rope_freqs.weight": "all",
    "rope_factors_short.weight": "short",
    "rope_factors_long.weight": "long",
}
"""Small tensors that belong to config.json: divisors of the rotary frequencies."""


@dataclass(frozen=True)
class _Place:
    """Where the bytes of a hub tensor lie."""

    type_id: int
    file: int
    offset: int


class GGUFSource:
    """A GGUF file, or the shards of one, presented with hub names and a config.json.

    ``remote``: where the files are, when they are not here yet; then only headers are read until ``fetch``.
    """

    kind = "gguf"

    def __init__(self, path: Path, remote: Remote | None = None) -> None:
        self.files = shards(path)
        self.path = self.files[0]
        self._remote = remote
        header = read_header(self.files, open_local if remote is None else remote.open)
        self.metadata = header.metadata
        self._row = self._architecture()
        self._places: dict[str, _Place] = {}
        self.tensors: Mapping[str, TensorInfo] = self._map_tensors(header)
        self._factors = {what: self._read_floats(header, name) for name, what in _ROPE_FACTORS.items()}
        self.config = self._make_config()
        self._maps: dict[int, Any] = {}

    @property
    def revision(self) -> str | None:
        """The commit that the files are from."""
        return None if self._remote is None else self._remote.commit

    def read(self, name: str) -> Tensor:
        """Return one tensor in the layout of the hub: float16 and bfloat16 as they are, others as float32."""
        import numpy
        import torch

        info, place = self.tensors[name], self._places[name]
        if place.file not in self._maps:
            # copy on write: torch wants writable memory, the file stays as it is
            self._maps[place.file] = numpy.memmap(self.files[place.file], mode="c", dtype=numpy.uint8)
        raw = self._maps[place.file][place.offset : place.offset + info.nbytes]
        if place.type_id in FLOAT_TYPES:
            tensor = torch.frombuffer(raw, dtype=getattr(torch, info.dtype)).reshape(info.shape)
        else:
            from gguf import GGMLQuantizationType
            from gguf.quants import dequantize

            kind = BLOCK_TYPES[place.type_id]
            rows = raw.reshape(-1, info.shape[-1] // kind.block * kind.nbytes)
            tensor = torch.from_numpy(dequantize(rows, GGMLQuantizationType(place.type_id))).reshape(info.shape)
        match self._row.change(name):
            case "raised":
                return tensor.float() - 1.0
            case "q":
                return unpermute(tensor, self.config["num_attention_heads"])
            case "k":
                return unpermute(tensor, self.config["num_key_value_heads"])
            case _:
                return tensor

    def fetch(self, on_phase: OnPhase | None = None) -> None:
        """Bring what ``read`` needs to this machine, if it is elsewhere."""
        if self._remote is not None:
            self._remote.fetch(self.files, on_phase)

    def close(self) -> None:
        """Unmap the files; the next ``read`` maps them again."""
        self._maps.clear()

    def fingerprint(self) -> str:
        """Return a hash of size, beginning (metadata) and end of each file, or of the commit that they are from."""
        if self._remote is not None:
            return self._remote.fingerprint(self.files)
        digest = hashlib.sha256()
        for file in self.files:
            sample(digest, file)
        return digest.hexdigest()

    def _architecture(self) -> Architecture:
        row = architecture(self.metadata)
        if row is None:
            name = self.metadata.get("general.architecture")
            raise SourceError(
                "no family reads this architecture",
                key=str(self.path),
                value=name,
                nearest=nearest(str(name), ARCHITECTURES),
                hint=f"architectures: {', '.join(ARCHITECTURES)}",
            )
        return row

    def _map_tensors(self, header: Header) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        for name, entry in header.table.items():
            nbytes = self._check(name, entry, header)
            if name in _ROPE_FACTORS:
                continue
            hub, shape, dtype = self._row.hub_name(name), entry.shape, TYPES[entry.type_id].name
            if self._row.change(hub) == "row":
                shape = (1, *shape)
            if "{expert}" not in hub:
                tensors[hub] = TensorInfo(shape, dtype, nbytes)
                self._places[hub] = _Place(entry.type_id, entry.file, entry.offset)
                continue
            for expert in range(shape[0]):
                single = hub.replace("{expert}", str(expert))
                each = nbytes // shape[0]
                tensors[single] = TensorInfo(shape[1:], dtype, each)
                self._places[single] = _Place(entry.type_id, entry.file, entry.offset + expert * each)
        return tensors

    def _check(self, name: str, entry: Entry, header: Header) -> int:
        """Return the bytes of a tensor. Raises SourceError for a type that is not read and for a truncated file."""
        where = str(self.files[entry.file])
        if entry.type_id not in TYPES:
            raise SourceError(
                f"{name} is {OTHER_TYPES.get(entry.type_id, f'of type {entry.type_id}')}",
                key=where,
                hint=f"types that can be read: F32, F16, BF16, {', '.join(kind.name for kind in BLOCK_TYPES.values())}",
            )
        kind = TYPES[entry.type_id]
        if not entry.shape or entry.shape[-1] % kind.block:
            raise SourceError(f"{name}: rows of {entry.shape[-1:]} are not whole {kind.name} blocks", key=where)
        nbytes = math.prod(entry.shape) // kind.block * kind.nbytes
        end, size = entry.offset + nbytes, header.sizes[entry.file]
        if end > size:
            raise SourceError(f"truncated: {name} ends at byte {end} of {size}", key=where)
        return nbytes

    def _read_floats(self, header: Header, name: str) -> list[float] | None:
        """Return a small float32 tensor, None if there is none of that name."""
        entry = header.table.get(name)
        if entry is None:
            return None
        path = self.files[entry.file]
        if entry.type_id != 0:
            raise SourceError(f"{name} must be F32", key=str(path))
        count = math.prod(entry.shape)
        stream, _ = (open_local if self._remote is None else self._remote.open)(path)
        with stream:
            stream.seek(entry.offset)
            return list(struct.unpack(f"<{count}f", stream.read(4 * count)))

    def _get(self, key: str, default: Any = None) -> Any:
        value = self.metadata.get(f"{self.metadata['general.architecture']}.{key}", default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]  # one number for each layer, all the same
        # float32 in the file: give back the decimal that was meant, 1e-05 and not 9.999999747378752e-06
        return float(f"{value:.7g}") if isinstance(value, float) else value

    def _require(self, key: str) -> Any:
        value = self._get(key)
        if value is None:
            name = self.metadata["general.architecture"]
            raise SourceError(f"no {name}.{key} in the metadata", key=str(self.path))
        return value

    def _make_config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            name: self._require(key) for name, key in {**KEYS_OF_ALL, **self._row.required}.items()
        }
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        embedding = self.tensors.get("model.embed_tokens.weight")
        if embedding is None:
            raise SourceError("no token_embd.weight", key=str(self.path))
        matrices = {info.dtype for info in self.tensors.values() if len(info.shape) == 2}
        config |= {
            "model_type": self._row.model_type,
            "torch_dtype": "float32" if "float32" in matrices else "float16" if matrices == {"float16"} else "bfloat16",
            "vocab_size": embedding.shape[0],
            "num_key_value_heads": self._get("attention.head_count_kv", heads),
            "head_dim": self._get("attention.key_length", hidden // heads),
            "tie_word_embeddings": "lm_head.weight" not in self.tensors,
            "attention_bias": False,
        }
        for key, name in (("bos", "bos_token_id"), ("eos", "eos_token_id"), ("padding", "pad_token_id")):
            if (value := self.metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
                config[name] = value
        config |= self._rope(config["head_dim"])
        config |= self._row.constants
        config |= {name: value for name, key in self._row.optional.items() if (value := self._get(key)) is not None}
        return config | (self._row.derive(self._get, config) if self._row.derive is not None else {})

    def _rope(self, head_dim: int) -> dict[str, Any]:
        rope: dict[str, Any] = {"rope_theta": self._get("rope.freq_base", 10000.0)}
        rotated = self._get("rope.dimension_count", head_dim)
        if rotated != head_dim:
            rope["partial_rotary_factor"] = rotated / head_dim
        kind, original = self._get("rope.scaling.type", "none"), self._get("rope.scaling.original_context_length")
        short, long, every = (self._factors[what] for what in ("short", "long", "all"))
        if every is not None:
            # frequencies divided one by one, at every length: longrope with equal lists
            short, long, original = every, every, self._require("context_length")
        if short is not None and long is not None:
            scaling: dict[str, Any] = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
            attention = 1.0 if every is not None else self._get("rope.scaling.attn_factor")
            scaling |= {} if attention is None else {"attention_factor": attention}
            rope |= {"rope_scaling": scaling | {"original_max_position_embeddings": original}}
            rope |= {} if every is not None else {"original_max_position_embeddings": original}
        elif kind in ("linear", "yarn"):
            more = {name: self._get(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
            rope["rope_scaling"] = {
                "rope_type": kind,
                "factor": self._get("rope.scaling.factor", 1.0),
                "original_max_position_embeddings": original,
                **{name: value for name, value in more.items() if value is not None and kind == "yarn"},
            }
        elif kind not in ("none", "longrope"):
            raise SourceError("this rope scaling is not read from GGUF files", key=str(self.path), value=kind)
        return rope


def unpermute(tensor: Tensor, heads: int) -> Tensor:
    """Return rows in the order of the hub, rope pairs half a head apart, from rows with rope pairs side by side."""
    rows = tensor.shape[0]
    return tensor.reshape(heads, rows // heads // 2, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
