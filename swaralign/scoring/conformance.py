"""Whether a server keeps the rules of the audio scorer protocol: for people who write their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from swaralign.scoring.client import check_usable
from swaralign.scoring.messages import MAX_BODY_BYTES, AudioTake, encode_take, parse_json, parse_reply

RATE_HZ = 24_000
TIMEOUT_S = 120.0  # the protocol's own


@dataclass(frozen=True)
class Finding:
    """One rule, whether the server held it, and what came back."""

    rule: str
    held: bool
    found: str


def findings(url: str, token: str | None = None) -> Iterator[Finding]:
    """Ask the server at `url` (what comes before /score) for everything that the protocol promises, rule by rule."""
    check_usable(url)
    with httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False) as http:
        http.headers["Content-Type"] = "application/json"
        body = json.dumps(good_take()).encode()
        if token:
            yield _expect(http, "a request without the token gets 401", 401, body)
            http.headers["Authorization"] = f"Bearer {token}"
        yield _health(http)
        yield _scores(http, "a conforming take gets a finite score", body)
        for name, malformed in malformed_bodies().items():
            yield _expect(http, f"{name} gets 400 and a reason", 400, malformed)
        yield _scores(http, "a conforming take gets a finite score after all that", body)


def good_take() -> dict[str, Any]:
    """The request of a conforming take: a second of a tone."""
    wave = 0.3 * np.sin(2 * np.pi * 220 * np.arange(RATE_HZ) / RATE_HZ)
    take = AudioTake(wave.astype(np.float32), RATE_HZ, "The weather is sunny today.", {"id": "conformance"})
    request: dict[str, Any] = json.loads(encode_take(take))
    return request


def malformed_bodies() -> dict[str, bytes]:
    """What a server must refuse, by name."""
    good = good_take()
    broken = {name: _with_sample(value) for name, value in (("NaN", np.nan), ("infinity", np.inf))}
    changed: dict[str, Any] = {
        "a list": [good],
        "no metadata": {key: value for key, value in good.items() if key != "metadata"},
        "metadata that is a list": good | {"metadata": []},
        "metadata that is nested": good | {"metadata": {"id": {"of": "take"}}},
        "an empty prompt": good | {"prompt": ""},
        "a num_samples that does not match": good | {"num_samples": good["num_samples"] + 1},
        "a sample rate of 0": good | {"sample_rate": 0},
        "a negative sample rate": good | {"sample_rate": -RATE_HZ},
        "a sample rate of 24000.5": good | {"sample_rate": 24000.5},
        "NaN in the waveform": good | {"waveform_f32_base64": broken["NaN"]},
        "infinity in the waveform": good | {"waveform_f32_base64": broken["infinity"]},
        "a waveform that is not base64": good | {"waveform_f32_base64": "***"},
        "no waveform": {key: value for key, value in good.items() if key != "waveform_f32_base64"},
        "protocol version 2": good | {"protocol_version": "2"},
        "a body over 8 MiB": good | {"metadata": {"id": "x" * MAX_BODY_BYTES}},
    }
    return {"a body that is not JSON": b"{", **{name: json.dumps(each).encode() for name, each in changed.items()}}


def _with_sample(value: float) -> str:
    wave = np.full(RATE_HZ, 0.1, np.float32)
    wave[7] = value
    text: str = json.loads(encode_take(AudioTake(wave, RATE_HZ, "x", {})))["waveform_f32_base64"]
    return text


def _health(http: httpx.Client) -> Finding:
    status, text = _ask(http, "GET", "/healthz", None)
    return Finding("GET /healthz gets 200", status == 200, f"{status} {text}")


def _scores(http: httpx.Client, rule: str, body: bytes) -> Finding:
    status, text = _ask(http, "POST", "/score", body)
    try:
        if status == 200:
            parse_reply(parse_json(text.encode()))
    except ValueError as error:
        return Finding(rule, False, f"{error}: {text}")
    return Finding(rule, status == 200, f"{status} {text}")


def _expect(http: httpx.Client, rule: str, wanted: int, body: bytes) -> Finding:
    status, text = _ask(http, "POST", "/score", body)
    return Finding(rule, status == wanted and bool(text), f"{status} {text or '(no reason)'}")


def _ask(http: httpx.Client, method: str, path: str, body: bytes | None) -> tuple[int, str]:
    try:
        response = http.request(method, path, content=body)
    except httpx.HTTPError as error:
        return 0, f"{type(error).__name__}: {error}"
    return response.status_code, response.text
