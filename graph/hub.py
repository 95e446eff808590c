"""Models of the Hugging Face hub, by way of huggingface_hub: its cache, its tokens, its environment variables.

Opening brings config.json and the tokenizer; of weight files it reads the headers, by ranges of bytes, so that a plan
needs no download. ``fetch`` brings the weights, when somebody computes with them.
"""

from __future__ import annotations

import hashlib
import io
import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from treadle.conf.errors import ConfigError, sibling
from treadle.conf.phase import OnPhase
from treadle.graph.hub_download import download
from treadle.graph.hub_errors import is_away, refuse
from treadle.graph.hub_listing import Listing, recall, remember
from treadle.graph.hub_name import HubName, choose_gguf
from treadle.graph.source import DirectorySource, DummySource, Source, read_config

if TYPE_CHECKING:
    from types import ModuleType

_TEXT = (
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""What a model directory may hold beside weights"""
_VOCABULARY = ("tokenizer.model", "vocab.json", "merges.txt", "tekken.json")
"""other forms of a vocabulary, of no use beside tokenizer.json"""
_TEMPLATES = re.compile(r"additional_chat_templates/[^/]+\.jinja")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_BLOCK = 1 << 20
_THREADS = 4
_POLL_S = 0.2
_TIMEOUT_S = 10.0


def open_hub(name: HubName, revision: str | None = None, on_phase: OnPhase | None = None) -> Source:
    """Return the model that ``name`` means at a branch, tag or commit (None: main), its weights still on the hub.

    Raises: ConfigError if huggingface_hub is not installed, the hub cannot be reached and the cache has nothing, or
    the hub has no such model, file or revision, or does not give it to this token.
    """
    remote = HubFiles(name, revision, on_phase)
    file = remote.gguf()
    if file is None:
        remote.bring(remote.text_files)
        return DirectorySource(remote.folder, remote)
    from treadle.graph.gguf import GGUFSource

    return GGUFSource(file, remote)


def dummy_hub(name: HubName, revision: str | None = None, on_phase: OnPhase | None = None) -> Source:
    """Return a model of the hub's shape and with its tokenizer, with random weights. Raises ConfigError."""
    remote = HubFiles(name, revision, on_phase)
    if remote.gguf() is not None:
        return DummySource(open_hub(name, remote.commit, on_phase).config, revision=remote.commit)
    remote.bring(remote.text_files)
    return DummySource(read_config(remote.folder), remote.folder, remote.commit)


class HubFiles:
    """The files of one commit of a repository, here or on the hub."""

    def __init__(self, name: HubName, revision: str | None, on_phase: OnPhase | None) -> None:
        self._name, self._revision, self._on_phase = name, revision, on_phase
        self._hub = _library(name)
        self.listing = self._list()
        cache = Path(self._hub.constants.HF_HUB_CACHE)
        self.folder = cache / f"models--{name.repo.replace('/', '--')}" / "snapshots" / self.commit

    @property
    def commit(self) -> str:
        """The hash of the commit."""
        return self.listing.commit

    @property
    def _blobs(self) -> Path:
        return self.folder.parents[1] / "blobs"

    @property
    def names(self) -> Sequence[str]:
        """The safetensors files beside config.json, and what may be there in their place."""
        ends = (".safetensors", ".bin", ".pt", ".pth")
        return [file for file in self.listing.files if "/" not in file and file.endswith(ends)]

    def gguf(self) -> Path | None:
        """Return where the GGUF file that is meant belongs; None for a model of safetensors. Raises ConfigError."""
        name = self._name
        if self.names and not name.quant and not name.file:
            return None
        file = choose_gguf(name, self.listing.files)
        return None if file is None else self.folder / file

    @property
    def text_files(self) -> list[str]:
        """What is needed beside the weights."""
        there = self.listing.files
        wanted = [*_TEXT, *([] if "tokenizer.json" in there else _VOCABULARY)]
        return [file for file in there if file in wanted or _TEMPLATES.fullmatch(file)]

    def open(self, path: Path) -> tuple[BinaryIO, int]:
        """Return a file and its size: the cached one, or one that is read by ranges. Raises ConfigError, OSError."""
        if path.exists():
            return path.open("rb"), path.stat().st_size
        file = path.relative_to(self.folder).as_posix()
        if file not in self.listing.files:
            raise FileNotFoundError(file)
        if self._on_phase is not None:
            self._on_phase(f"read header of {path.name}")
        url = self._hub.hf_hub_url(self._name.repo, file, revision=self.commit)
        ranges = _RangeFile(lambda start, end: self._range(url, start, end))
        return cast(BinaryIO, io.BufferedReader(ranges, _BLOCK)), ranges.size

    def fetch(self, paths: Sequence[Path], on_phase: OnPhase | None) -> None:
        """Bring whole files into the cache, several at a time. Raises ConfigError."""
        self.bring([path.relative_to(self.folder).as_posix() for path in paths], on_phase or self._on_phase)

    def fingerprint(self, paths: Sequence[Path]) -> str:
        """Return a hash of the files' names and the commit, which is itself a hash of all content."""
        files = [path.relative_to(self.folder).as_posix() for path in paths]
        return hashlib.sha256("\n".join([self._name.repo, self.commit, *files]).encode()).hexdigest()

    def bring(self, files: Sequence[str], on_phase: OnPhase | None = None) -> None:
        """Bring files of the repository into the cache. Raises ConfigError."""
        missing = [file for file in files if not (self.folder / file).exists()]
        if not missing:
            return
        sizes = [self.listing.files[file] for file in missing]
        total = sum(size for size in sizes if size) if all(sizes) else 0
        jobs: queue.SimpleQueue[str] = queue.SimpleQueue()
        for file in missing:
            jobs.put(file)
        failed: list[Exception] = []
        # Daemons: somebody who interrupts the program does not wait for gigabytes.
        threads = [
            threading.Thread(target=self._work, args=(jobs, failed), daemon=True)
            for _ in range(min(_THREADS, len(missing)))
        ]
        with _silent(self._hub):
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                if on_phase is not None and total:
                    on_phase(f"fetch {self._name.repo}", min(self._here(missing), total), total)
                time.sleep(_POLL_S if total > _BLOCK else 0.01)
        if failed:
            refuse(failed[0], self._name, self._revision, self._hub)

    def _work(self, jobs: queue.SimpleQueue[str], failed: list[Exception]) -> None:
        while not failed:
            try:
                file = jobs.get_nowait()
            except queue.Empty:
                return
            try:
                size = self.listing.files[file]
                download(self._hub, self._name.repo, self.commit, file, size, self._blobs)
            except Exception as error:  # told by the thread that waits
                failed.append(error)

    def _here(self, files: Sequence[str]) -> int:
        """Return how many bytes of ``files`` have come, those of unfinished ones too."""
        paths = [self.folder / file for file in files]
        paths += self._blobs.glob("*.incomplete")
        total = 0
        for path in paths:
            try:
                total += path.stat().st_size
            except OSError:  # not there yet, or just renamed
                continue
        return total

    def _range(self, url: str, start: int, end: int) -> tuple[bytes, int]:
        """Return bytes [start, end) of a file on the hub, and its size."""
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        headers = build_hf_headers() | {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        try:
            response = get_session().get(url, headers=headers, timeout=_TIMEOUT_S, follow_redirects=True)
            hf_raise_for_status(response)
        except Exception as error:
            refuse(error, self._name, self._revision, self._hub)
        match = re.fullmatch(r"bytes \d+-\d+/(\d+)", response.headers.get("content-range", ""))
        if match is None:
            raise ConfigError("the hub does not answer ranges of bytes", key="HF_ENDPOINT", value=url)
        return response.content, int(match[1])

    def _list(self) -> Listing:
        """Return the commit and files of the revision: as the hub says, or as the cache remembers."""
        repo, revision = self._name.repo, self._revision
        known = recall(repo, revision, self._hub)
        if known is not None and _COMMIT.fullmatch(revision or ""):
            return known  # a commit never changes
        if self._on_phase is not None:
            self._on_phase(f"look up {repo}")
        try:
            info = self._hub.HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=_TIMEOUT_S)
        except Exception as error:
            if known is not None and is_away(error, self._hub):
                return known
            refuse(error, self._name, self._revision, self._hub)
        files = {entry.rfilename: entry.size for entry in info.siblings or ()}
        return remember(repo, revision, Listing(str(info.sha), files))


class _RangeFile(io.RawIOBase):
    """A file that is read by ranges of bytes."""

    def __init__(self, read: Callable[[int, int], tuple[bytes, int]]) -> None:
        super().__init__()
        self._read, self._at = read, 0
        # The first range tells the size; it is the one that will be asked for first.
        self._first, self.size = read(0, _BLOCK)

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position and return it."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer from the position on; return how many bytes that were."""
        end = min(self._at + len(buffer), self.size)
        if end <= self._at:
            return 0
        part = self._first[self._at : end] or self._read(self._at, end)[0][: end - self._at]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)


class _silent:
    """Keeps the library's own progress bars out of the terminal."""

    def __init__(self, hub: ModuleType) -> None:
        self._hub = hub

    def __enter__(self) -> None:
        self._were_off = self._hub.utils.are_progress_bars_disabled()
        if not self._were_off:
            self._hub.utils.disable_progress_bars()

    def __exit__(self, *_: object) -> None:
        if not self._were_off:
            self._hub.utils.enable_progress_bars()


def _library(name: HubName) -> ModuleType:
    """Return huggingface_hub. Raises ConfigError if it is not installed."""
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError:
        raise ConfigError(
            "no such directory; models of the hub need a package that is not installed",
            key="model.path",
            value=name,
            nearest=[f"model.path={path}" for path in sibling(Path(str(name)))],
            hint="pip install 'treadle[hub]'",
        ) from None
    return huggingface_hub
