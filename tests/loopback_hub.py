"""A hub on the loopback interface: the few endpoints that huggingface_hub asks, counting what it sends."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_accepted"
LARGE = 1000  # bytes from which on a file is stored by its SHA-256, as by LFS


@cache
def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@cache
def git_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Hub:
    """Repositories at COMMIT: {"datasets/owner/name" or "owner/name": {path: content}}, and what was asked of them."""

    repos: dict[str, dict[str, bytes]]
    gated: set[str] = field(default_factory=set)
    expired: set[str] = field(default_factory=set)  # tokens that are refused wherever they are shown
    cut: list[int] = field(default_factory=list)  # of the next answers, after how many bytes the line breaks
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, Range
    sent: int = 0  # bytes of files
    url: str = ""

    def entry(self, path: str, data: bytes) -> dict[str, Any]:
        entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": git_id(data)}
        if len(data) >= LARGE:
            entry["lfs"] = {"oid": sha256(data), "size": len(data), "pointerSize": 130}
        return entry


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append((self.command, path, self.headers.get("Range")))
        if (self.headers.get("Authorization") or "").removeprefix("Bearer ") in self.hub.expired:
            return self._fault(401, "")
        if found := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/([a-z-]+))?(?:/(\w+))?(?:/(.*))?", path):
            kind, repo, action, revision, folder = found.groups()
            return self._api(repo if kind == "models" else f"datasets/{repo}", action, revision, folder)
        found = re.fullmatch(r"/((?:datasets/)?[^/]+/[^/]+)/resolve/(\w+)/(.*)", path)
        if found is None:
            return self._fault(404, "")
        repo, revision, file = found.groups()
        if self._may_read(repo) and self._has(repo, revision):
            data = self.hub.repos[repo].get(file)
            self._fault(404, "EntryNotFound") if data is None else self._file(data)

    def _api(self, repo: str, action: str | None, revision: str | None, folder: str | None) -> None:
        if repo not in self.hub.repos:
            return self._fault(404, "RepoNotFound")
        if action == "auth-check":
            return self._json({}) if self._may_read(repo) else None
        if not self._has(repo, revision or COMMIT):
            return None
        entries = [self.hub.entry(path, data) for path, data in self.hub.repos[repo].items()]
        if action == "tree":
            inside = [entry for entry in entries if entry["path"].startswith(f"{folder}/")]
            return self._json(inside) if inside else self._fault(404, "EntryNotFound")
        if action == "paths-info":
            return self._json([entry for entry in entries if entry["path"] in self.body.decode()])
        return self._json({"id": repo.removeprefix("datasets/"), "sha": COMMIT, "siblings": []})

    def _may_read(self, repo: str) -> bool:
        if repo not in self.hub.repos:
            self._fault(401, "RepoNotFound")
        elif repo in self.hub.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._fault(403 if self.headers.get("Authorization") else 401, "GatedRepo")
        else:
            return True
        return False

    def _has(self, repo: str, revision: str) -> bool:
        if revision != COMMIT:
            self._fault(404, "RevisionNotFound")
        return revision == COMMIT

    def _fault(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, answer: Any) -> None:
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _file(self, data: bytes) -> None:
        ranged = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        first, last = (int(ranged[1]), int(ranged[2] or len(data) - 1)) if ranged else (0, len(data) - 1)
        part = data[first : last + 1]
        self.send_response(206 if ranged else 200)
        if ranged:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{sha256(data) if len(data) >= LARGE else git_id(data)}"')
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.hub.cut:
            part = part[: self.hub.cut.pop(0)]
            self.close_connection = True
        self.hub.sent += len(part)
        self.wfile.write(part)


def connect(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str | None = None) -> None:
    """Point huggingface_hub, and our cache, at a hub and at empty folders; its waiting between tries is cut out."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
    monkeypatch.setenv("SWARALIGN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    else:
        monkeypatch.delenv("HF_TOKEN", raising=False)
