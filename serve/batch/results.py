"""The output of a batch: a line for each record, appended whole, so that whatever ends the program loses none."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from treadle.conf.errors import ConfigError, sibling
from treadle.serve.batch.records import Record, record_key


class Results:
    """The file of answers, held by one process at a time. ``done`` are the keys of the records that it answers."""

    def __init__(self, target: Path, descriptor: int) -> None:
        self._target = target
        self._descriptor = descriptor
        self._cut()
        self.done = {record_key(*_identify(raw, target, i)) for i, raw in enumerate(self._lines(), start=1)}

    def append(self, record: Record, content: Mapping[str, Any]) -> None:
        """Add the answer of a record, or its error: one write of one line at the end of the file."""
        line = memoryview(orjson.dumps(content) + b"\n")
        try:
            while line:  # a file system that is full takes a part; the next start cuts it off
                line = line[os.write(self._descriptor, line) :]
        except OSError as error:
            message = f"cannot be written: {error.strerror}"
            raise ConfigError(message, key="output", value=self._target, hint="the next start goes on") from error
        self.done.add(record.key)

    def sort(self, records: Iterable[Record]) -> None:
        """Put the lines into the order of ``records``, others behind them: at once, in place of the file."""
        places: dict[str, tuple[int, int]] = {}
        begin = 0
        for number, raw in enumerate(self._lines(), start=1):
            places[record_key(*_identify(raw, self._target, number))] = begin, len(raw)
            begin += len(raw)
        new = self._target.with_name(f".{self._target.name}.sorted")
        with self._target.open("rb") as old, new.open("wb") as file:
            for key in [*(record.key for record in records), *places]:
                if key in places:
                    begin, length = places.pop(key)
                    old.seek(begin)
                    file.write(old.read(length))
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._target)

    def _cut(self) -> None:
        """Take away a line whose writing was interrupted: it does not end."""
        whole = 0
        for raw in self._lines():
            whole += len(raw) if raw.endswith(b"\n") else 0
        os.ftruncate(self._descriptor, whole)

    def _lines(self) -> Iterator[bytes]:
        with self._target.open("rb") as file:
            yield from file


@contextmanager
def open_results(target: Path) -> Iterator[Results]:
    """Yield the results in ``target``, a new file or one that an earlier run began.

    Raises ConfigError if it cannot be written, another process writes it, or it holds something else.
    """
    try:
        descriptor = os.open(target, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise ConfigError(
            f"cannot be written: {error.strerror}", key="output", value=target, nearest=sibling(target)
        ) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError("another process writes this file", key="output", value=target) from None
        yield Results(target, descriptor)
    finally:
        os.close(descriptor)


def _identify(raw: bytes, target: Path, number: int) -> tuple[object, object]:
    """Return id and line of an answer. Raises ConfigError if the line is none."""
    try:
        found = orjson.loads(raw)
        if "custom_id" in found:
            return found["custom_id"], found.get("line")
        return found["id"], found["line"]
    except (ValueError, KeyError, TypeError):
        hint = "an earlier run's output goes on; anything else stays as it is"
        raise ConfigError(f"line {number} is no answer of a batch", key="output", value=target, hint=hint) from None
