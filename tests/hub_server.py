"""A hub on this machine: enough of its HTTP API for huggingface_hub, with faults on request."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from huggingface_hub import constants


@dataclass
class FakeHub:
    """Repositories by name: a folder each, as the one commit of its main branch."""

    repos: dict[str, Path] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    """those whose files are refused to anybody without ``token``"""
    token: str = "hf_right"
    cuts: dict[str, list[int]] = field(default_factory=dict)
    """file -> bytes after which the connection breaks, for as many answers as there are numbers"""
    requests: list[str] = field(default_factory=list)
    """METHOD path [range] of each, as they came"""
    down: bool = False
    endpoint: str = ""

    def commit(self, repo: str) -> str:
        """The hash of a repository's content."""
        digest = hashlib.sha1(repo.encode())
        for path in self.files(repo).values():
            digest.update(path.read_bytes())
        return digest.hexdigest()

    def files(self, repo: str) -> dict[str, Path]:
        """The files of a repository by name."""
        folder = self.repos[repo]
        return {p.relative_to(folder).as_posix(): p for p in sorted(folder.rglob("*")) if p.is_file()}

    def asked_for(self, file: str) -> list[str]:
        """The requests for one file."""
        return [request for request in self.requests if file in request]


@contextmanager
def serve(hub: FakeHub) -> Iterator[FakeHub]:
    """Serve the hub on a free port and set its ``endpoint``."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, hub))
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def use(endpoint: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Do what HF_ENDPOINT and HF_HOME do, which the library reads when it is imported; caches are in ``folder``."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "hf" / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, hub: FakeHub, *arguments: object) -> None:
        self.hub = hub
        super().__init__(*arguments)  # type: ignore[arg-type]

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        self.hub.requests.append(" ".join([self.command, path, self.headers.get("Range", "")]).rstrip())
        if self.hub.down:
            self._json({}, 503)
        elif path == "/api/models":
            wanted = parse_qs(url.query)["search"][0].lower()
            self._json([{"id": repo} for repo in self.hub.repos if wanted[:4] in repo.lower()])
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/refs", path):
            main = {"name": "main", "ref": "refs/heads/main", "targetCommit": self.hub.commit(match[1])}
            self._json({"branches": [main], "tags": [], "converts": []})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
            self._info(match[1], match[2] or "main")
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(*match.groups())
        else:
            self._json({}, 404)

    def _info(self, repo: str, revision: str) -> None:
        if self._found(repo, revision):
            siblings = [{"rfilename": name, "size": p.stat().st_size} for name, p in self.hub.files(repo).items()]
            self._json({"id": repo, "sha": self.hub.commit(repo), "siblings": siblings})

    def _found(self, repo: str, revision: str) -> bool:
        if repo not in self.hub.repos:
            self._json({}, 404, {"X-Error-Code": "RepoNotFound"})
        elif revision not in ("main", self.hub.commit(repo)):
            self._json({}, 404, {"X-Error-Code": "RevisionNotFound"})
        else:
            return True
        return False

    def _file(self, repo: str, revision: str, name: str) -> None:
        if not self._found(repo, revision):
            return
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if repo in self.hub.gated and token != self.hub.token:
            status = 403 if token else 401
            self._json({}, status, {"X-Error-Code": "GatedRepo"})
            return
        path = self.hub.files(repo).get(name)
        if path is None:
            self._json({}, 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": self.hub.commit(repo)})
            return
        content = path.read_bytes()
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": self.hub.commit(repo)}
        status, part = 200, content
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, end = int(match[1]), min(int(match[2] or len(content)) + 1, len(content))
            status, part = 206, content[start:end]
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
        cuts = self.hub.cuts.get(name)
        self._send(status, headers, part, cuts.pop(0) if cuts and self.command == "GET" else None)

    def _json(self, value: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(status, {"Content-Type": "application/json", **(headers or {})}, json.dumps(value).encode())

    def _send(self, status: int, headers: dict[str, str], body: bytes, cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            self.close_connection = True
