"""The header of a GGUF file: metadata and tensor table, over one file or several shards.

Parsed here, without torch and quicker than by the gguf package. Source: the GGUF specification.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from treadle.graph.source import SourceError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_BROKEN = (struct.error, UnicodeDecodeError, EOFError, KeyError, ArithmeticError, MemoryError)
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class Entry(NamedTuple):
    """A tensor as the table lists it: which file holds it, and where."""

    shape: tuple[int, ...]
    type_id: int
    file: int
    offset: int
    """bytes from the beginning of the file"""


@dataclass(frozen=True)
class Header:
    """What the files of one model say before their data."""

    metadata: dict[str, Any]
    table: dict[str, Entry]
    sizes: tuple[int, ...]
    """bytes of each file"""


Opener = Callable[[Path], tuple[BinaryIO, int]]
"""Opens a file for reading and tells its size."""


def shards(path: Path) -> list[Path]:
    """Return the files of the model that ``path`` belongs to, in order: NAME-00001-of-0000N.gguf, or itself alone."""
    match = _SHARD.fullmatch(path.name)
    if match is None:
        return [path]
    return [path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf") for number in range(1, int(match[3]) + 1)]


def open_local(path: Path) -> tuple[BinaryIO, int]:
    """Open a file of this machine. Raises OSError."""
    stream = path.open("rb")
    return stream, path.stat().st_size


def read_header(paths: list[Path], opener: Opener = open_local) -> Header:
    """Return the header of the model that lies in ``paths``.

    Raises: SourceError naming the file that is missing, broken, truncated, or no shard of this model.
    """
    whole: dict[str, Any] = {}
    table: dict[str, Entry] = {}
    sizes = []
    for index, path in enumerate(paths):
        metadata, entries, size = _read_file(path, index, opener, len(paths))
        if index == 0:
            whole = metadata
        count, number = metadata.get("split.count", 1), metadata.get("split.no", 0)
        if len(paths) > 1 and (count, number) != (len(paths), index):
            raise SourceError(f"holds shard {number + 1} of {count}, not {index + 1} of {len(paths)}", key=str(path))
        if len(paths) == 1 and count > 1:
            raise SourceError(
                f"is shard {number + 1} of {count} under another name",
                key=str(path),
                hint=f"shards are called NAME-00001-of-{count:05}.gguf",
            )
        if twice := sorted(set(table) & set(entries)):
            raise SourceError(f"{twice[0]} stands in an earlier shard too", key=str(path))
        table |= entries
        sizes.append(size)
    promised = whole.get("split.tensors.count")
    if promised is not None and len(paths) > 1 and promised != len(table):
        raise SourceError(f"the shards hold {len(table)} tensors, the first one promises {promised}", key=str(paths[0]))
    return Header(whole, table, tuple(sizes))


def _read_file(path: Path, index: int, opener: Opener, count: int) -> tuple[dict[str, Any], dict[str, Entry], int]:
    """Return metadata, tensor table and size of one file."""
    try:
        stream, size = opener(path)
    except FileNotFoundError:
        which = f"shard {index + 1} of {count} is missing" if count > 1 else "no such file"
        raise SourceError(which, key="model.path", value=path) from None
    except OSError as error:
        raise SourceError(f"cannot be read: {error.strerror}", key=str(path)) from None
    try:
        with stream:
            magic = stream.read(4)
            if not magic or not b"GGUF".startswith(magic):
                raise SourceError("not a GGUF file", key=str(path))
            version, num_tensors, num_pairs = struct.unpack("<IQQ", stream.read(20))
            if version not in (2, 3):
                raise SourceError("not a GGUF file of version 2 or 3", key=str(path))
            reader = _Reader(stream, size)
            metadata = {reader.string(): reader.value(reader.number("<I")) for _ in range(num_pairs)}
            relative = {}
            for _ in range(num_tensors):
                name, dims = reader.string(), reader.number("<I")
                shape = tuple(reversed([int(reader.number("<Q")) for _ in range(dims)]))
                relative[name] = (shape, int(reader.number("<I")), int(reader.number("<Q")))
            alignment = int(metadata.get("general.alignment", 32))
            start = -(-stream.tell() // alignment) * alignment
    except _BROKEN as error:
        why = "the file ends within it" if isinstance(error, struct.error) else error
        raise SourceError(f"broken or truncated header: {why}", key=str(path)) from None
    except OSError as error:
        raise SourceError(f"cannot be read: {error.strerror or error}", key=str(path)) from None
    entries = {name: Entry(shape, kind, index, start + offset) for name, (shape, kind, offset) in relative.items()}
    return metadata, entries, size


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
