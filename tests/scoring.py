"""What tests of the scoring share: the real server, in a process or a thread, and one that replies by a script."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from swaralign.params import HttpParams
from swaralign.scoring import AudioScorer, AudioTake
from swaralign.scoring.messages import encode_take
from swaralign.scoring.server import ScorerServer, ServerSettings, listen

ROOT = Path(__file__).resolve().parent.parent
OK = b'{"score": 1.25}'


def settings(*urls: str, **changes: Any) -> HttpParams:
    """The protocol's rules at a fast pace."""
    wanted: dict[str, Any] = {"urls": list(urls), "timeout_s": 20.0, "retries": 2, "backoff_s": 0.02, "concurrency": 4,
                              "token_env": None, "transcripts": False, "failed_score": 0.0}
    return HttpParams.model_validate(wanted | changes)


def take(prompt: str = "1", name: str = "take-1", samples: int = 240, rate_hz: int = 24000) -> AudioTake:
    return AudioTake(np.linspace(-0.5, 0.5, samples, dtype=np.float32), rate_hz, prompt, {"id": name})


def request(**changes: Any) -> dict[str, Any]:
    """A conforming request with some keys changed."""
    return json.loads(encode_take(take())) | changes


class Server:
    """`swaralign scorer serve` in a process."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url = process, url

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


def launch(*arguments: str, port: int = 0, **environment: str) -> Server:
    """Start a server and read from its first line where it listens."""
    command = [sys.executable, "-m", "swaralign.scoring", "serve", *arguments, "--port", str(port)]
    known = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), environment.pop("folder", "")])} | environment
    process = subprocess.Popen(command, cwd=ROOT, env=known, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if found := re.search(r" on (http://\S+)", line):
            threading.Thread(target=process.stderr.read, daemon=True).start()  # a full pipe would stop it
            return Server(process, found[1])
    raise AssertionError("".join(lines))


@contextlib.contextmanager
def process(*arguments: str, **options: Any) -> Iterator[Server]:
    """A server process that has loaded its scorer, for as long as the context lasts."""
    server = launch(*arguments, **options)
    try:
        wait_ready(server.url)
        yield server
    finally:
        server.process.kill()
        server.process.wait()


@contextlib.contextmanager
def serving(load: Callable[[], AudioScorer], **changes: Any) -> Iterator[str]:
    """The URL of a server in a thread, which starts sooner than a process; it may still be loading."""
    server = ScorerServer(load, ServerSettings(**changes))
    with listen("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, args=(listener,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.stop()
            thread.join()


@contextlib.contextmanager
def served(load: Callable[[], AudioScorer], **changes: Any) -> Iterator[str]:
    """As `serving`, its scorer loaded."""
    with serving(load, **changes) as url:
        wait_ready(url)
        yield url


def wait_ready(url: str, timeout_s: float = 300.0) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/healthz", trust_env=False).status_code == 200:
                return
        time.sleep(0.02)
    raise AssertionError(f"{url} was not ready within {timeout_s} s")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def http(status: int, body: bytes = OK, announced: int | None = None, **headers: str) -> bytes:
    """A response on the wire; `announced`: another Content-Length than the body has."""
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body) if announced is None else announced}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode() + body


class Scripted:
    """A server that answers each `POST /score` with the next part of its script, and the last one for ever.

    A part is a response on the wire, `None` to hang up without one, or seconds to sit and do nothing.
    """

    def __init__(self, *script: bytes | float | None) -> None:
        self.script = list(script)
        self.requests: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.times: list[float] = []
        self.health = http(200, b"{}")  # the answer to every GET
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            stream = connection.makefile("rb")
            head = b"".join(iter(stream.readline, b"\r\n")).decode()
            length = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
            body = stream.read(int(length[1])) if length else b""
            if head.startswith("GET"):
                connection.sendall(self.health)
                return
            self.times.append(time.monotonic())
            self.heads.append(head)
            self.requests.append(json.loads(body))
            part = self.script[min(len(self.requests), len(self.script)) - 1]
            if isinstance(part, bytes):
                connection.sendall(part)
            elif part is not None:
                time.sleep(part)


def metrics(url: str) -> str:
    return httpx.get(f"{url}/metrics", timeout=60, trust_env=False).text
