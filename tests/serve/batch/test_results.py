from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path

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


def test_errors_are_known_in_both_shapes_and_to_the_next_run(tmp_path):
    target = tmp_path / "out.jsonl"
    refused = {"status_code": 400, "body": {"error": {"message": "no"}}}
    with open_results(target) as results:
        results.append(record(1), {"id": "r1", "line": 1, "error": {"message": "no"}})
        results.append(record(2), {"id": "r2", "line": 2, "choices": []})
        results.append(record(3), {"id": "x", "custom_id": "r3", "line": 3, "response": refused, "error": None})
        good = {"status_code": 200, "body": {}}
        results.append(record(4), {"id": "y", "custom_id": "r4", "line": 4, "response": good, "error": None})
        assert results.failed == {record(1).key, record(3).key}
    with open_results(target) as results:
        assert results.failed == {record(1).key, record(3).key}
        assert len(results.done) == 4


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
    answer = '{"id":"r1","line":1}\n'
    for content in ("hello\n", '{"a": 1}\n', "[]\n", "hello", '{"id":1,"a":2}', '{\n"a": 1}', "hello\n" + answer[:9]):
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


def test_a_full_disk_at_the_end_leaves_the_answers_as_they_came(tmp_path, monkeypatch):
    target = tmp_path / "out.jsonl"
    write(target, 2, 1)

    def fail(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with (
        pytest.raises(ConfigError, match=r"cannot be put into order: No space left on device"),
        open_results(target) as results,
    ):
        results.sort([record(1), record(2)])
    assert ids(target) == ["r2", "r1"]
    assert not list(tmp_path.glob(".*"))


def test_a_link_stays_a_link_and_a_device_is_refused(tmp_path):
    target, link = tmp_path / "out.jsonl", tmp_path / "link.jsonl"
    link.symlink_to(target)
    write(link, 2, 1)
    with open_results(link) as results:
        results.sort([record(1), record(2)])
    assert link.is_symlink()
    assert ids(target) == ["r1", "r2"]
    with pytest.raises(ConfigError, match="not a regular file"), open_results(Path(os.devnull)):
        pass


def test_a_file_that_was_replaced_before_it_was_locked_is_not_written(tmp_path, monkeypatch):
    target = tmp_path / "out.jsonl"
    write(target, 2, 1)
    real = fcntl.flock

    def another_run_ends_first(descriptor, how):
        (tmp_path / "new").write_bytes(target.read_bytes())
        (tmp_path / "new").replace(target)
        real(descriptor, how)

    monkeypatch.setattr("fcntl.flock", another_run_ends_first)
    with pytest.raises(ConfigError, match="another process has just written"), open_results(target):
        pass
