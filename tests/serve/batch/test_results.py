from __future__ import annotations

import errno
import json
import os

import pytest

from treadle.conf.errors import ConfigError
from treadle.serve.batch.records import Record
from treadle.serve.batch.results import open_results


def record(i: int, **options) -> Record:
    return Record(line=i, id=f"r{i}", **options)


def write(target, *lines: int):
    with open_results(target) as results:
        for i in lines:
            results.append(record(i), {"id": f"r{i}", "line": i, "text": "é" * i})


def ids(target):
    return [json.loads(line)["id"] for line in target.read_text().splitlines()]


def test_what_was_written_is_known_to_the_next_run(tmp_path):
    target = tmp_path / "out.jsonl"
    write(target, 3, 1)
    with open_results(target) as results:
        assert results.done == {record(1).key, record(3).key}
        results.append(record(2), {"id": "r2", "line": 2})
        results.append(Record(line=4), {"id": None, "line": 4, "error": {}})
        assert ids(target) == ["r3", "r1", "r2", None]
        results.sort([record(1), record(2), record(3), Record(line=4)])
    assert ids(target) == ["r1", "r2", "r3", None]
    assert not list(tmp_path.glob(".*"))


def test_a_line_cut_off_anywhere_is_written_again(tmp_path):
    target = tmp_path / "out.jsonl"
    write(target, 1, 2, 3)
    whole = target.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for length in range(len(whole) + 1):
        target.write_bytes(whole[:length])
        with open_results(target) as results:
            assert len(results.done) == sum(end <= length for end in ends)
            assert target.read_bytes() == whole[: max((end for end in ends if end <= length), default=0)]


def test_another_process_and_other_files_are_left_alone(tmp_path):
    target = tmp_path / "out.jsonl"
    write(target, 1)
    with open_results(target), pytest.raises(ConfigError, match="another process"), open_results(target):
        pass
    for content in ("hello\n", '{"a": 1}\n', "[]\n"):
        target.write_text(content)
        with pytest.raises(ConfigError, match="line 1 is no answer of a batch"), open_results(target):
            pass
        assert target.read_text() == content
    with pytest.raises(ConfigError, match="cannot be written"), open_results(tmp_path / "no" / "out.jsonl"):
        pass


def test_lines_of_records_that_are_gone_stay(tmp_path):
    target = tmp_path / "out.jsonl"
    write(target, 3, 2, 1)
    with open_results(target) as results:
        results.sort([record(1)])
    assert ids(target) == ["r1", "r3", "r2"]


def test_a_full_disk_says_that_the_next_start_goes_on(tmp_path, monkeypatch):
    target = tmp_path / "out.jsonl"
    write(target, 1)
    real = os.write

    def write_a_part(descriptor, data):
        if len(data) < 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data[:10])

    monkeypatch.setattr("os.write", write_a_part)
    with pytest.raises(ConfigError, match=r"No space left on device; the next start goes on"):
        write(target, 2)
    monkeypatch.undo()
    write(target, 2)
    assert ids(target) == ["r1", "r2"]
