"""The output of a batch: a line for each record, appended whole, so that whatever ends the program loses none."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from treadle.conf.errors import ConfigError, sibling
from treadle.serve.batch.records import Record, record_key


class Results:
    """The file of answers, held by one process at a time. Raises ConfigError if it holds anything else."""

    def __init__(self, target: Path, descriptor: int) -> None:
        self._target = target
        self._descriptor = descriptor
        self.done: set[str] = set()
        """the keys of the records that have their answer, or its error"""
        self.failed: set[str] = set()
        """the keys of those that have an error"""
        self._begin()

    def append(self, record: Record, content: Mapping[str, Any]) -> None:
        """Add the answer of a record, or its error: one write of one line at the end of the file."""
        line = memoryview(orjson.dumps(content) + b"\n")
        try:
            while line:  # a file system that is full takes a part; the next start cuts it off
                line = line[os.write(self._descriptor, line) :]
        except OSError as error:
            message = f"cannot be written: {error.strerror}"
            raise ConfigError(message, key="output", value=self._target, hint="the next start goes on") from error
        self._note(record.key, content)

    def sort(self, records: Iterable[Record]) -> None:
        """Put the lines into the order of ``records``, others behind them: at once, in place of the file."""
        places: dict[str, tuple[int, int]] = {}
        begin = 0
        for number, raw in enumerate(self._lines(), start=1):
            places[record_key(*_identify(raw, self._target, number))] = begin, len(raw)
            begin += len(raw)
        new = self._target.with_name(f".{self._target.name}.sorted")
        try:
            with self._target.open("rb") as old, new.open("wb") as file:
                for key in [*(record.key for record in records), *places]:
                    if key in places:
                        begin, length = places.pop(key)
                        old.seek(begin)
                        file.write(old.read(length))
                file.flush()
                os.fsync(file.fileno())
            new.replace(self._target)
        except OSError as error:
            new.unlink(missing_ok=True)
            message = f"has all answers, but cannot be put into order: {error.strerror}"
            raise ConfigError(message, key="output", value=self._target, hint="the next start tries again") from error

    def _begin(self) -> None:
        """Read what an earlier run wrote, and only if all of it is answers take away a line that does not end."""
        whole = 0
        for number, raw in enumerate(self._lines(), start=1):
            if raw.endswith(b"\n"):
                self._note(record_key(*_identify(raw, self._target, number)), orjson.loads(raw))
                whole += len(raw)
            elif not _is_part(raw):
                _identify(raw, self._target, number)
        os.ftruncate(self._descriptor, whole)

    def _note(self, key: str, content: Mapping[str, Any]) -> None:
        self.done.add(key)
        response = content.get("response")  # of a line in OpenAI's shape, whose own ``error`` is null then
        status = response.get("status_code") if isinstance(response, dict) else None
        if content.get("error") is not None or status not in (None, 200):
            self.failed.add(key)

    def _lines(self) -> Iterator[bytes]:
        with self._target.open("rb") as file:
            yield from file


@contextmanager
def open_results(target: Path) -> Iterator[Results]:
    """Yield the results in ``target``, a new file or one that an earlier run began.

    Raises ConfigError if it cannot be written, another process writes it, or it holds something else.
    """
    target = target.resolve()  # a link stays one when sorted answers take the place of what it leads to
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
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError("is not a regular file, which a run could go on with", key="output", value=target)
        if not os.path.samestat(found, target.stat()):  # another run put its sorted answers in place meanwhile
            raise ConfigError("another process has just written this file", key="output", value=target)
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


def _is_part(raw: bytes) -> bool:
    """Whether a line without end is the beginning of an answer, as a write that was interrupted leaves it."""
    head = b'{"id":'
    if not (raw.startswith(head) or head.startswith(raw)):
        return False
    try:
        orjson.loads(raw)
    except ValueError:
        return True
    return False  # complete: an answer that lacks its line break, or something else
