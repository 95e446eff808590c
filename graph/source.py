"""Where weights come from: a Hugging Face-layout directory, a GGUF file, or nowhere (random weights).

Opening reads headers only and needs no torch; ``read`` gives one tensor at a time, backed by the mapped file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from treadle.conf.errors import ConfigError, nearest
from treadle.conf.phase import OnPhase

if TYPE_CHECKING:
    from torch import Tensor

_DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
READABLE = ("float32", "bfloat16", "float16")
"""Element types of plain tensors that the engine computes with."""
PACKED = "uint8"
"""The element type of bytes that a rule of the family unpacks."""
_HEADER_LIMIT = 100 << 20
_SAMPLE = 1 << 16


class SourceError(ConfigError):
    """A model directory or file that cannot be read: which file, and what is wrong with it."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as the file stores it. ``dtype`` is torch's name, or the quantised type's (``Q4_0``)."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int


class Source(Protocol):
    """Named tensors and the config.json they belong to."""

    @property
    def kind(self) -> str:
        """``hf``, ``gguf`` or ``dummy``."""

    @property
    def path(self) -> Path | None:
        """The directory or file."""

    @property
    def revision(self) -> str | None:
        """The commit on the hub that it is from; None for what is of this machine."""

    @property
    def config(self) -> dict[str, Any]:
        """The parsed config.json, or one made from a GGUF file's metadata."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """A GGUF file's key-value pairs; empty for others."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Tensors by their hub name, in the order in which the files store them."""

    def read(self, name: str) -> Tensor:
        """Return one tensor in a float dtype, dequantised; bytes that a rule unpacks as they are.

        Raises: KeyError for an unknown name, SourceError.
        """

    def fingerprint(self) -> str:
        """Return a hash of the headers and of samples of the content; reads about 128 KiB a file."""

    def fetch(self, on_phase: OnPhase | None = None) -> None:
        """Bring what ``read`` needs to this machine, if it is elsewhere. Raises ConfigError."""

    def close(self) -> None:
        """Unmap the files; the next ``read`` maps them again."""


class Remote(Protocol):
    """Weight files that may not be on this machine yet, by their name in the model's folder."""

    @property
    def commit(self) -> str:
        """What exactly these files are: a version that never changes."""

    @property
    def names(self) -> Sequence[str]:
        """All weight files of the model's folder."""

    def open(self, path: Path) -> tuple[BinaryIO, int]:
        """Return the file that belongs at ``path``, here or from afar, and its size. Raises OSError, ConfigError."""

    def fetch(self, paths: Sequence[Path], on_phase: OnPhase | None) -> None:
        """Bring whole files to where they belong. Raises ConfigError."""

    def fingerprint(self, paths: Sequence[Path]) -> str:
        """Return a hash of the content that was asked for."""


def open_source(path: str | Path) -> Source:
    """Return the model at ``path``: a directory with config.json and *.safetensors, or a .gguf file.

    Raises: SourceError naming the file at fault.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        return DirectorySource(path)
    if path.is_file():
        from treadle.graph.gguf import GGUFSource

        if path.suffix != ".gguf":
            raise SourceError("not a model", key="model.path", value=path, hint="give a directory or a .gguf file")
        return GGUFSource(path)
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    close = [str(path.parent / name) for name in nearest(path.name, siblings)]
    raise SourceError("no such file or directory", key="model.path", value=path, nearest=close)


class DirectorySource:
    """A directory with config.json and one or several safetensors files.

    ``remote``: where the latter are, when they are not here yet; then only headers are read until ``fetch``.
    """

    kind = "hf"

    def __init__(self, path: Path, remote: Remote | None = None) -> None:
        self.path = path
        self._remote = remote
        self.config = read_config(path)
        self.metadata: Mapping[str, Any] = {}
        self._files: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        tensors: dict[str, TensorInfo] = {}
        index = _read_index(path)
        for file in _weight_files(path, index, None if remote is None else remote.names):
            for name, info in read_header(file, remote).items():
                if index is None or index.get(name) == file.name:
                    tensors[name], self._files[name] = info, file
        absent = [name for name in index or {} if name not in tensors]
        if absent:
            raise SourceError(
                f"the index names {len(absent)} tensors that the files lack: {_some(absent)}",
                key=str(path / "model.safetensors.index.json"),
            )
        self.tensors: Mapping[str, TensorInfo] = tensors

    def read(self, name: str) -> Tensor:
        """Return one tensor, backed by the mapped file."""
        from safetensors import SafetensorError, safe_open

        info, file = self.tensors[name], self._files[name]
        if info.dtype not in (*READABLE, PACKED):
            raise SourceError(
                f"{name} is {info.dtype}", key=str(file), hint=f"element types that can be read: {', '.join(READABLE)}"
            )
        try:
            if file not in self._open:
                self._open[file] = safe_open(file, framework="pt")
            return self._open[file].get_tensor(name)  # type: ignore[no-any-return]
        except (SafetensorError, OSError) as error:
            raise SourceError(f"cannot read {name}: {error}", key=str(file)) from None

    def fetch(self, on_phase: OnPhase | None = None) -> None:
        """Bring what ``read`` needs to this machine, if it is elsewhere."""
        if self._remote is not None:
            self._remote.fetch(self._weights, on_phase)

    def close(self) -> None:
        """Unmap the files; the next ``read`` maps them again."""
        self._open.clear()

    @property
    def revision(self) -> str | None:
        """The commit that the files are from."""
        return None if self._remote is None else self._remote.commit

    @property
    def _weights(self) -> list[Path]:
        return sorted(set(self._files.values()))

    def fingerprint(self) -> str:
        """Return a hash of config.json, and of header, size and ends of every file, or of the commit they are from."""
        if self._remote is not None:
            return self._remote.fingerprint(self._weights)
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for file in self._weights:
            sample(digest, file)
        return digest.hexdigest()


class DummySource:
    """No tensors: weights are random, for planning and for speed."""

    kind = "dummy"

    def __init__(self, config: Mapping[str, Any], path: Path | None = None, revision: str | None = None) -> None:
        """``path``: the directory that the configuration came from; it may hold a tokenizer."""
        self.path = path
        self.revision = revision
        self.config = dict(config)
        self.metadata: Mapping[str, Any] = {}
        self.tensors: Mapping[str, TensorInfo] = {}

    def read(self, name: str) -> Tensor:
        """Raise KeyError: there are none."""
        raise KeyError(name)

    def fetch(self, on_phase: OnPhase | None = None) -> None:
        """Do nothing: there is no file."""

    def close(self) -> None:
        """Do nothing: there is no file."""

    def fingerprint(self) -> str:
        """Return a hash of the configuration."""
        return hashlib.sha256(json.dumps(self.config, sort_keys=True).encode()).hexdigest()


def read_header(file: Path, remote: Remote | None = None) -> dict[str, TensorInfo]:
    """Return the tensors that a safetensors file lists, in file order.

    Raises: SourceError if the header is broken or promises more bytes than the file has.
    """
    try:
        stream, size = (file.open("rb"), file.stat().st_size) if remote is None else remote.open(file)
        with stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(size - 8, _HEADER_LIMIT):
                raise SourceError("not a safetensors file, or a truncated one", key=str(file))
            header = json.loads(stream.read(length))
        entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
        entries.sort(key=lambda item: item[1]["data_offsets"][0])
        tensors = {}
        for name, entry in entries:
            begin, end = entry["data_offsets"]
            dtype, item = _DTYPES.get(entry["dtype"], (str(entry["dtype"]), 0))
            shape = tuple(int(dim) for dim in entry["shape"])
            count = 1
            for dim in shape:
                count *= dim
            if begin < 0 or (item and count * item != end - begin):
                raise SourceError(f"{name}: {end - begin} bytes do not hold {dtype} {list(shape)}", key=str(file))
            if 8 + length + end > size:
                raise SourceError(f"truncated: {name} ends at byte {8 + length + end} of {size}", key=str(file))
            tensors[name] = TensorInfo(shape, dtype, end - begin)
    except OSError as error:
        raise SourceError(f"cannot be read: {error.strerror}", key=str(file)) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise SourceError(f"broken header: {error}", key=str(file)) from None
    return tensors


def sample(digest: Any, file: Path) -> None:
    """Feed a hash with a file's size, beginning and end."""
    size = file.stat().st_size
    digest.update(f"{file.name}:{size}".encode())
    with file.open("rb") as stream:
        digest.update(stream.read(_SAMPLE))
        stream.seek(max(0, size - _SAMPLE))
        digest.update(stream.read(_SAMPLE))


def read_config(path: Path) -> dict[str, Any]:
    """Return the config.json of a model directory. Raises: SourceError."""
    file = path / "config.json"
    if not file.is_file():
        inside = sorted(entry.name for entry in path.glob("*.gguf"))
        hint = f"it holds {inside[0]}: give that file" if inside else "config.json and *.safetensors are needed"
        raise SourceError("not a model directory: no config.json", key="model.path", value=path, hint=hint)
    try:
        config = json.loads(file.read_text(encoding="utf-8"), object_hook=_number)
    except (OSError, ValueError) as error:
        raise SourceError(f"not JSON: {error}", key=str(file)) from None
    if not isinstance(config, dict):
        raise SourceError("not a JSON object", key=str(file))
    return config


def _number(entry: dict[str, Any]) -> Any:
    """Return the number that transformers writes as an object, {"__float__": "Infinity"}; others stay as they are."""
    return float(str(entry["__float__"])) if entry.keys() == {"__float__"} else entry


def _read_index(path: Path) -> dict[str, str] | None:
    file = path / "model.safetensors.index.json"
    if not file.is_file():
        return None
    try:
        return {
            str(name): str(target)
            for name, target in json.loads(file.read_text(encoding="utf-8"))["weight_map"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SourceError(f"broken index: {error}", key=str(file)) from None


def _weight_files(path: Path, index: Mapping[str, str] | None, remote: Sequence[str] | None) -> list[Path]:
    there = {entry.name for entry in path.iterdir()} if remote is None else set(remote)
    if index is not None:
        files = [path / name for name in sorted(set(index.values()))]
        absent = [file.name for file in files if file.name not in there]
        if absent:
            raise SourceError(f"the index names files that are not there: {_some(absent)}", key=str(path))
        return files
    whole = "model.safetensors"
    files = [path / name for name in ([whole] if whole in there else sorted(there)) if name.endswith(".safetensors")]
    if not files:
        others = sorted(name for name in there if name.endswith((".bin", ".pt", ".pth")))
        hint = f"convert {others[0]} to safetensors" if others else "model.weights=dummy runs with random weights"
        raise SourceError("no *.safetensors in the model directory", key="model.path", value=path, hint=hint)
    return files


def _some(names: list[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
