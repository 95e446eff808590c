from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from treadle.conf.errors import ConfigError
from treadle.runtime.state.tiers import disk
from treadle.runtime.state.tiers.disk import DiskStore
from treadle.runtime.state.tiers.seal import SEAL_BYTES, check_seal, namespace, write_seal
from treadle.runtime.state.tiers.store import Scope, StoreError

SIZE = 8192
MODEL = namespace("m", "l")


def key(n: int) -> bytes:
    return n.to_bytes(16, "big")


def scope(model: bytes = MODEL) -> Scope:
    return Scope(
        namespace=model,
        memory=memoryview(b""),
        holds=lambda keys: [False] * len(keys),
        offer=lambda *_: nullcontext(None),
    )


def sealed(n: int, size: int = SIZE) -> memoryview:
    whole = memoryview(bytearray(random.Random(n).randbytes(size)))
    write_seal(whole[:SEAL_BYTES], whole[SEAL_BYTES:], key=key(n), scope=MODEL)
    return whole


def opened(folder: Path, budget: int = 1 << 30, model: bytes = MODEL) -> DiskStore:
    store = DiskStore(folder, budget)
    store.open(scope(model))
    return store


def load(store: DiskStore, n: int, size: int = SIZE) -> str:
    """Return what a load comes to: good, miss, or corrupt, which the seal tells."""
    buffer = memoryview(bytearray(size))
    if not store.load([key(n)], [buffer])[0]:
        return "miss"
    return "good" if check_seal(buffer, key=key(n), scope=MODEL) and buffer == sealed(n, size) else "corrupt"


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and len(path.name) == 32)


def test_objects_outlive_the_process_and_the_budget_keeps_the_last_used(tmp_path: Path) -> None:
    store = opened(tmp_path, 4 * SIZE)
    assert store.save([key(n) for n in range(3)], [sealed(n) for n in range(3)]) == [True] * 3
    for n in range(3):
        os.utime(files(tmp_path)[n], (n, n))
    assert load(store, 0) == "good"
    assert store.usage() == (3 * SIZE, 3)
    store.close()
    again = opened(tmp_path, 3 * SIZE)
    assert again.lookup([key(n) for n in range(4)]) == [True, True, True, False]
    assert again.save([key(3)], [sealed(3)]) == [True]
    # 1 was used before 2, and 0 last.
    assert [load(again, n) for n in range(4)] == ["good", "miss", "good", "good"]
    assert again.events() == [("removed", key(1)), ("stored", key(3))]
    assert again.save([key(9)], [sealed(9, 4 * SIZE)]) == [False]
    again.close()
    small = opened(tmp_path, 2 * SIZE)
    assert small.lookup([key(n) for n in (0, 2, 3)]) == [False, True, True]
    assert len(files(tmp_path)) == 2
    small.release([key(2)])
    assert (small.usage(), len(files(tmp_path))) == ((SIZE, 1), 1)
    small.close()


def test_models_share_a_folder_and_see_only_their_own(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.save([key(1)], [sealed(1)])
    store.close()
    other = opened(tmp_path, 2 * SIZE, model=namespace("another", "l"))
    assert other.lookup([key(1)]) == [False]
    assert load(other, 1) == "miss"
    assert other.usage() == (SIZE, 1)
    other.save([key(2), key(3)], [sealed(2), sealed(3)])
    assert other.usage() == (2 * SIZE, 2)
    other.close()
    assert opened(tmp_path).lookup([key(1)]) == [False]


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "longer", "swap", "foreign", "removed", "zeros"])
def test_a_damaged_file_is_never_taken_for_the_object(tmp_path: Path, damage: str) -> None:
    store = opened(tmp_path)
    store.save([key(1), key(2)], [sealed(1), sealed(2)])
    one, two = files(tmp_path)
    data = bytearray(one.read_bytes())
    draw = random.Random(damage)
    match damage:
        case "flip":
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        case "cut":
            del data[draw.randrange(1, len(data)) :]
        case "empty":
            data.clear()
        case "longer":
            data += b"\0"
        case "swap":
            data = bytearray(two.read_bytes())
        case "foreign":
            write_seal(memoryview(data)[:SEAL_BYTES], memoryview(data)[SEAL_BYTES:], key=key(1), scope=bytes(16))
        case "zeros":
            data[:] = bytes(len(data))
    one.unlink() if damage == "removed" else one.write_bytes(data)
    by_length = damage in ("cut", "empty", "longer", "removed")
    assert load(store, 1) == ("miss" if by_length else "corrupt")
    # The length gives it away before anybody looks at the seal, and it is not found again.
    assert store.lookup([key(1)]) == [not by_length]
    store.release([key(1)])
    assert not one.exists()
    assert load(store, 2) == "good"


@pytest.mark.parametrize(("code", "forgotten"), [(errno.EIO, True), (errno.EBADMSG, True), (errno.ENOMEM, False)])
def test_a_file_that_cannot_be_read_is_forgotten_if_it_is_the_files_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, forgotten: bool
) -> None:
    store = opened(tmp_path)
    store.save([key(1), key(2)], [sealed(1), sealed(2)])

    def fail(file: int, buffers: list[memoryview]) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(disk.os, "readv", fail)
        if forgotten:
            assert load(store, 1) == "miss"
        else:
            with pytest.raises(OSError, match="allocate memory"):
                load(store, 1)
    assert store.lookup([key(1), key(2)]) == [not forgotten, True]
    assert len(files(tmp_path)) == 2 - forgotten
    assert load(store, 2) == "good"


def test_every_flipped_bit_of_a_seal_is_noticed() -> None:
    whole = sealed(5, SEAL_BYTES + 64)
    for bit in range(8 * len(whole)):
        whole[bit // 8] ^= 1 << bit % 8
        assert not check_seal(whole, key=key(5), scope=MODEL)
        whole[bit // 8] ^= 1 << bit % 8
    assert check_seal(whole, key=key(5), scope=MODEL)
    assert not check_seal(whole, key=key(6), scope=MODEL)
    assert not check_seal(whole[:-1], key=key(5), scope=MODEL)


def test_a_full_disk_is_an_error_of_the_call_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    store.save([key(1)], [sealed(1)])
    room = [SIZE // 2]
    real = os.write

    def write(file: int, data: memoryview) -> int:
        if room[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part, room[0] = min(room[0], len(data)), max(0, room[0] - len(data))
        return real(file, data[:part])

    monkeypatch.setattr(disk.os, "write", write)
    with pytest.raises(StoreError, match="No space left"):
        store.save([key(2)], [sealed(2)])
    assert list(tmp_path.rglob("unfinished/*")) == []
    assert store.lookup([key(1), key(2)]) == [True, False]
    room[0] = 10 * SIZE
    assert store.save([key(2)], [sealed(2)]) == [True]
    assert [load(store, n) for n in (1, 2)] == ["good", "good"]


def test_one_process_uses_a_folder_and_one_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    store = opened(tmp_path / "a" / "b")
    with pytest.raises(ConfigError, match="another engine") as refusal:
        DiskStore(tmp_path / "a" / "b", 1 << 20)
    assert "kv.disk.path" in str(refusal.value)
    store.close()
    opened(tmp_path / "a" / "b").close()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        DiskStore(tmp_path / "file", 1 << 20)


def test_strange_files_are_left_alone(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.save([key(1)], [sealed(1)])
    folder = files(tmp_path)[0].parent
    (folder / "README").write_text("not ours")
    (folder / ("zz" * 16)).write_text("no key")
    (folder.parent / "README").write_text("no folder")
    (tmp_path / disk._LAYOUT / "notes").mkdir()
    (tmp_path / disk._LAYOUT / ("ab" * 16)).write_text("no model")
    (tmp_path / disk._LAYOUT / "unfinished" / "kept").mkdir()
    store.close()
    again = opened(tmp_path)
    assert again.usage() == (SIZE, 1)
    assert load(again, 1) == "good"
    assert (folder / "README").exists()


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_disk import key, opened, sealed
store, size = opened(Path(sys.argv[1])), 1 << 18
print("ready", flush=True)
for n in range(int(sys.argv[3]), 1 << 20):
    whole = sealed(n, size)
    assert store.save([key(n)], [whole]) == [True]
    print(n, flush=True)
"""


def test_a_writer_killed_at_any_point_loses_nothing_that_it_acknowledged(tmp_path: Path) -> None:
    draw, first = random.Random(0), 0
    for _ in range(4):
        command = [sys.executable, "-P", "-c", WRITER, str(tmp_path), str(Path(__file__).parent), str(first)]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        acknowledged = [int(writer.stdout.readline())]
        time.sleep(0.08 * draw.random())
        os.kill(writer.pid, signal.SIGKILL)
        acknowledged += [int(line) for line in writer.stdout.read().split("\n")[:-1]]
        assert writer.wait() == -signal.SIGKILL
        writer.stdout.close()
        (tmp_path / disk._LAYOUT / "unfinished" / "stale").write_bytes(b"half")
        store = opened(tmp_path, 1 << 40)
        assert list(tmp_path.rglob("unfinished/*")) == []
        last = acknowledged[-1]
        assert all(store.lookup([key(n) for n in range(last + 1)]))
        assert {load(store, n, 1 << 18) for n in range(first, last + 1)} == {"good"}
        # The one that was being written is whole or not there.
        assert load(store, last + 1, 1 << 18) in ("good", "miss")
        assert store.usage()[1] <= last + 2
        store.close()
        first = last + 1
