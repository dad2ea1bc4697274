"""`swaralign scorer check`: our server keeps every rule, a wrong one breaks those that it breaks, by name."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from swaralign.cli import main
from swaralign.scoring.conformance import findings
from tests.scorers import Seconds
from tests.scoring import free_port, served


class Lenient(BaseHTTPRequestHandler):
    """Scores whatever is JSON and has a prompt, as a scorer that trusts its clients would; 422 for the rest."""

    reply: dict[str, Any] = {"score": 0.5}

    def do_GET(self) -> None:
        self._send(200, {})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        try:
            json.loads(body)["prompt"]
        except (ValueError, KeyError, TypeError):
            self._send(422, {"detail": "unprocessable"})
            return
        self._send(200, self.reply)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def _send(self, status: int, reply: dict[str, Any]) -> None:
        body = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def lenient() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Lenient)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_our_server_keeps_every_rule(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "s3cret")
    with served(Seconds, token="s3cret") as url:
        assert main(["scorer", "check", f"{url}/score", "--token-env", "TOKEN"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 20 and all(line.startswith("held   ") for line in lines)


def test_a_wrong_server_is_told_which_rules_it_breaks(lenient: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scorer", "check", lenient]) == 1
    out, err = capsys.readouterr()
    broken = [line[7:].partition(" gets ")[0] for line in out.splitlines() if line.startswith("BROKEN ")]
    assert broken == [
        "a body that is not JSON", "a list", "no metadata", "metadata that is a list", "metadata that is nested",
        "an empty prompt", "a num_samples that does not match", "a sample rate of 0", "a negative sample rate",
        "a sample rate of 24000.5", "NaN in the waveform", "infinity in the waveform",
        "a waveform that is not base64", "no waveform", "protocol version 2", "a body over 8 MiB"]
    assert "422" in next(line for line in out.splitlines() if "not JSON" in line)
    assert err == "16 rules broken\n"


@pytest.mark.parametrize(
    ("reply", "told"),
    [({"score": float("nan")}, "not JSON"), ({"score": "0.5"}, "should be a valid number"),
     ({"score": 0.5, "error": None}, "carries error"), ({"value": 0.5}, "score: is missing")],
)
def test_a_reply_that_is_no_score(
    lenient: str, reply: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lenient, "reply", reply)
    found = {finding.rule: finding for finding in findings(lenient)}["a conforming take gets a finite score"]
    assert not found.held and told in found.found


def test_nobody_there() -> None:
    found = list(findings(f"http://127.0.0.1:{free_port()}"))
    assert not any(finding.held for finding in found)
    assert "ConnectError" in found[0].found


@pytest.mark.parametrize("url", ["http://[::1", "http://127.0.0.1:99999", "127.0.0.1:80", "http://127.0.0.256:80",
                                 "http://b\u00fccher.example"])
def test_what_is_no_url_is_told(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scorer", "check", url]) == 1
    assert capsys.readouterr().err.startswith(f"swaralign: {url} is not ")
