"""Models of the hub, from a server on this machine: what is asked of it when, and how each failure reads."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import huggingface_hub.constants
import pytest
import torch
from hub_server import FakeHub, serve, use
from oracle import tiny
from tiny_gguf import write
from tiny_model import write_model
from tiny_text import write_directory

from treadle.conf.errors import ConfigError
from treadle.conf.load import compose
from treadle.conf.lock import from_lock, to_lock
from treadle.graph import hub_download
from treadle.graph.hub import open_hub
from treadle.graph.hub_name import HubName
from treadle.graph.resolve import resolve
from treadle.graph.source import Source, open_source

REPO = "some-org/Tiny-0.1B"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with one model in one repository, and an empty cache."""
    folder = write_directory(write_model(tmp_path / "repo"))
    (folder / "README.md").write_text("not needed")
    (folder / "pytorch_model.bin").write_bytes(b"not needed")
    with serve(FakeHub({REPO: folder})) as running:
        use(running.endpoint, tmp_path, monkeypatch)
        yield running


def deployment(path: str = REPO, *more: str):
    return compose(["model=hf", f"model.path={path}", "hardware=cpu", "hardware.memory=1GiB", *more])


def same_weights(a: Source, b: Source) -> bool:
    return set(a.tensors) == set(b.tensors) and all(torch.equal(a.read(name), b.read(name)) for name in a.tensors)


def test_a_plan_reads_headers_and_the_weights_come_later(hub: FakeHub) -> None:
    resolved = resolve(deployment())
    assert [request for request in hub.asked_for("model.safetensors") if "bytes=0-" not in request] == []
    assert hub.asked_for("README") == hub.asked_for("pytorch_model") == []
    assert resolved.deployment.model.name == "Tiny-0.1B"
    phases: list[tuple[str, int, int]] = []
    resolved.source.fetch(lambda phase, done=0, total=0: phases.append((phase, done, total)))
    assert same_weights(resolved.source, open_source(hub.repos[REPO]))
    assert resolved.plan == resolve(deployment(str(hub.repos[REPO]))).plan
    assert {phase for phase, _, _ in phases} == {f"fetch {REPO}"}
    assert all(done <= total == (hub.repos[REPO] / "model.safetensors").stat().st_size for _, done, total in phases)
    asked = len(hub.requests)
    resolved.source.fetch()
    assert len(hub.requests) == asked, "what is there is not asked for again"


def test_the_lock_pins_the_commit_and_starts_without_the_hub(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = resolve(deployment())
    resolved.source.fetch()
    model = resolved.deployment.model
    assert (model.path, model.revision) == (REPO, hub.commit(REPO))
    lock = tmp_path / "lock.yaml"
    lock.write_text(to_lock(resolved.deployment))
    write_model(hub.repos[REPO], seed=1)
    again = from_lock(lock)
    assert again.model.revision != hub.commit(REPO), "main has moved on"
    hub.down = True
    asked = len(hub.requests)
    pinned = resolve(again)
    assert len(hub.requests) == asked
    assert pinned.fingerprint == resolved.fingerprint
    assert same_weights(pinned.source, resolved.source)
    hub.down = False
    assert resolve(deployment()).deployment.model.revision == hub.commit(REPO)
    assert resolve(deployment()).fingerprint != pinned.fingerprint


def test_a_download_that_is_cut_goes_on_where_it_stopped(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    monkeypatch.setattr(hub_download, "_RESUMED_FROM", 1000)
    source = open_hub(HubName(REPO))
    hub.cuts["model.safetensors"] = [10_000]
    before = len(hub.requests)
    source.fetch()
    gets = [request for request in hub.requests[before:] if request.startswith("GET")]
    assert [request.partition(" bytes=")[2] for request in gets] == ["", "10000-"]
    assert same_weights(source, open_source(hub.repos[REPO]))


def test_a_download_that_was_given_up_goes_on_at_the_next_start(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    monkeypatch.setattr(hub_download, "_RESUMED_FROM", 1000)
    monkeypatch.setattr(time, "sleep", lambda _: None)  # the library's pause between trials
    source = open_hub(HubName(REPO))
    hub.cuts["model.safetensors"] = [20_000, *[0] * 60]
    with pytest.raises(ConfigError, match=rf"model\.path={REPO}: cannot be fetched: .*files that are whole are kept"):
        source.fetch()
    hub.cuts.clear()
    before = len(hub.requests)
    again = open_hub(HubName(REPO))
    again.fetch()
    gets = [request for request in hub.requests[before:] if request.startswith("GET") and "model.safe" in request]
    assert [request.partition(" bytes=")[2] for request in gets] == ["0-1048575", "20000-"], "the header, the rest"
    assert same_weights(again, open_source(hub.repos[REPO]))
    assert list(Path(huggingface_hub.constants.HF_HUB_CACHE).rglob("*.incomplete")) == []


def test_a_part_that_was_damaged_is_not_kept(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_download, "_RESUMED_FROM", 1000)
    content = (hub.repos[REPO] / "model.safetensors").read_bytes()
    source = open_hub(HubName(REPO))
    blobs = next(Path(huggingface_hub.constants.HF_HUB_CACHE).glob("*/blobs"))
    (blobs / f"{hashlib.sha256(content).hexdigest()}.treadle.incomplete").write_bytes(bytes(5000))
    with pytest.raises(ConfigError, match=r"model\.safetensors was resumed and is not what the hub has"):
        source.fetch()
    source.fetch()
    assert same_weights(source, open_source(hub.repos[REPO]))


@pytest.mark.parametrize("name", ["org/model-gguf", "org/model-gguf:q8_0", "org/model-gguf/sub/m-Q8_0.gguf"])
def test_gguf_files_by_quantisation_or_name(name: str, hub: FakeHub, tmp_path: Path) -> None:
    folder = tmp_path / "gguf"
    (folder / "sub").mkdir(parents=True)
    file = write(tiny("llama"), folder / "sub" / "m-Q8_0.gguf", "llama", "Q8_0")
    if name != "org/model-gguf":
        write(tiny("llama"), folder / "m-Q4_0.gguf", "llama", "Q4_0")
    hub.repos["org/model-gguf"] = folder
    resolved = resolve(deployment(name))
    assert resolved.source.kind == "gguf"
    assert resolved.deployment.model.name in ("model-gguf", "m-Q8_0")
    assert all("bytes=" in request for request in hub.asked_for("m-Q8_0"))
    resolved.source.fetch()
    assert same_weights(resolved.source, open_source(file))
    assert hub.asked_for("m-Q4_0") == []


def test_gguf_files_that_are_not_there_are_told_beside_those_that_are(hub: FakeHub, tmp_path: Path) -> None:
    folder = tmp_path / "gguf"
    folder.mkdir()
    for kind in ("Q4_0", "Q8_0"):
        write(tiny("llama"), folder / f"m-{kind}.gguf", "llama", kind)
    hub.repos["org/g"] = folder
    for wanted, message in {
        "org/g:Q4_K_M": r"model\.path=org/g:Q4_K_M: no GGUF file has this name; .*org/g:Q4_0.*has Q4_0, Q8_0",
        "org/g": r"model\.path=org/g: 2 GGUF files have this name; did you mean model\.path=org/g:Q4_0",
        "org/g/m-Q4.gguf": r"no such file; did you mean model\.path=org/g/m-Q4_0\.gguf",
    }.items():
        with pytest.raises(ConfigError, match=message):
            resolve(deployment(wanted))


def test_a_missing_repository(hub: FakeHub) -> None:
    with pytest.raises(ConfigError, match=r"model\.path=some-org/Tiny-0\.2B: .*no such model.*path=some-org/Tiny-0\.1"):
        resolve(deployment("some-org/Tiny-0.2B"))


def test_a_missing_revision(hub: FakeHub) -> None:
    with pytest.raises(ConfigError, match=r"model\.revision=mian: .*Tiny-0\.1B has no such.*model\.revision=main"):
        resolve(deployment(REPO, "model.revision=mian"))
    with pytest.raises(ConfigError, match=r"model\.revision=v2: .* has no revisions; did you mean .*null"):
        resolve(deployment(str(hub.repos[REPO]), "model.revision=v2"))


@pytest.mark.parametrize("token", [None, "hf_wrong"])
def test_a_gated_repository(token: str | None, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated.add(REPO)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(ConfigError, match=rf"model\.path={REPO}: .*granted.*/{REPO}, then let HF_TOKEN"):
        resolve(deployment())
    monkeypatch.setenv("HF_TOKEN", hub.token)
    resolve(deployment()).source.fetch()


def test_offline_with_and_without_the_cache(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=rf"model\.path={REPO}: .*HF_HUB_OFFLINE.*HF_HOME"):
        resolve(deployment())
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    planned = resolve(deployment())
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"HF_HUB_OFFLINE, and the cache does not have all"):
        resolve(deployment())
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    planned.source.fetch()
    asked = len(hub.requests)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert resolve(deployment()).fingerprint == planned.fingerprint
    assert len(hub.requests) == asked


def test_a_cache_that_another_tool_filled_serves_offline(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in hub.files(REPO):
        huggingface_hub.hf_hub_download(REPO, file)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    resolved = resolve(deployment())
    assert resolved.deployment.model.revision == hub.commit(REPO)
    assert same_weights(resolved.source, open_source(hub.repos[REPO]))


@pytest.mark.parametrize("how", ["503", "closed port"])
def test_a_hub_that_does_not_answer(how: str, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reached = resolve(deployment())
    reached.source.fetch()
    if how == "503":
        hub.down = True
    else:
        use("http://127.0.0.1:9", tmp_path, monkeypatch)
    assert resolve(deployment()).fingerprint == reached.fingerprint, "the cache serves"
    with pytest.raises(ConfigError, match=r"model\.path=some-org/Other: cannot be fetched: .*HF_ENDPOINT"):
        resolve(deployment("some-org/Other"))


def test_without_the_package_its_extra_is_named(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"model\.path=.*pip install 'treadle\[hub\]'"):
        resolve(deployment())


def test_dummy_weights_ask_for_the_shape_only(hub: FakeHub) -> None:
    resolved = resolve(deployment(REPO, "model.weights=dummy"))
    assert hub.asked_for("model.safetensors") == []
    assert resolved.deployment.model.revision == hub.commit(REPO)
    replace(resolved.deployment)


def test_the_command_line_honours_the_librarys_variables(hub: FakeHub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    variables = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "HF_TOKEN": hub.token, "COLUMNS": "200"}
    hub.gated.add(REPO)
    hub.requests.clear()
    command = [sys.executable, "-P", "-m", "treadle.serve", "memory", "model=hf", f"model.path={REPO}"]
    done = subprocess.run(
        [*command, "hardware=cpu", "hardware.memory=1GiB"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Tiny-0.1B" in done.stdout
    assert all("bytes=" in request for request in hub.asked_for("model.safetensors"))
    assert re.search(
        r"models--some-org--Tiny-0.1B/snapshots/[0-9a-f]{40}/config.json", "\n".join(map(str, home.rglob("*")))
    )
