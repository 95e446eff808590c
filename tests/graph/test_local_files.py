from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from treadle.conf.errors import ConfigError
from treadle.conf.load import compose
from treadle.conf.schema import DiskConfig, KVConfig
from treadle.graph import machine
from treadle.graph.local_files import refuse_unusable_files
from treadle.graph.resolve import refuse_elsewhere, resolve


def disk(path: object) -> KVConfig:
    return KVConfig(disk=DiskConfig(path=str(path)))


def peer(**options: Any) -> KVConfig:
    return KVConfig(connectors=({"name": "mooncake"}, {"name": "peer", **options}))


def refused(kv: KVConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        refuse_unusable_files(kv)
    return str(caught.value)


def test_a_folder_that_can_be_made_is_not_made(tmp_path: Path) -> None:
    refuse_unusable_files(disk(tmp_path / "new" / "one"))
    refuse_unusable_files(disk(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.touch()
    link.symlink_to(tmp_path / "nowhere")
    assert refused(disk(file)).startswith(f"kv.disk.path={file}: not a folder")
    assert refused(disk(file / "x")).startswith(f"kv.disk.path={file}/x: {file} is not a folder")
    assert refused(disk(link)).startswith(f"kv.disk.path={link}: not a folder")
    if Path("/proc").is_dir():
        assert refused(disk("/proc/x")).startswith("kv.disk.path=/proc/x: cannot be made: ")


def test_a_secret_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    where = "kv.connectors[1].secret_file="
    assert refused(peer(secret_file=str(file))) == f"{where}{file}: cannot be read: No such file or directory"
    file.write_text(" \n")
    assert refused(peer(secret_file=str(file))).startswith(f"{where}{file}: empty")
    file.write_text("s\n")
    refuse_unusable_files(peer(secret_file=str(file)))
    refuse_unusable_files(peer())


def test_who_computes_asks_for_them_and_who_plans_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_bytes", lambda: 8 << 30)
    monkeypatch.setattr(machine, "available_bytes", lambda: 8 << 30)
    file = tmp_path / "file"
    file.touch()
    overrides = ["model=qwen3-0.6b", "model.max_len=64", "kv.memory=64MiB", "hardware=cpu", "hardware.memory=8GiB"]
    found = resolve(compose([*overrides, "kv.host_memory=64MiB", f"kv.disk.path={file}", "model.weights=dummy"]))
    with pytest.raises(ConfigError, match=r"kv\.disk\.path=.*not a folder"):
        refuse_elsewhere(found)
