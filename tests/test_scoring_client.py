"""The client against what can go wrong: for each fault whether it asks again, how often, and what it says."""

from __future__ import annotations

import asyncio
import email.utils
import logging
import re
import threading
import time

import pytest

from swaralign.scoring.client import ScorerClient, ScorerError, connect
from tests.scorers import Number
from tests.scoring import (
    OK,
    Scripted,
    free_port,
    http,
    launch,
    metrics,
    request,
    served,
    serving,
    settings,
    take,
    wait_ready,
)

SITS = 30.0  # seconds, beyond the time limit of the tests that have it
CUT = http(200, b'{"sco', announced=100)


@pytest.mark.parametrize(
    ("script", "attempts"),
    [
        ([http(200)], 1),
        ([http(408), http(200)], 2),
        ([http(429), http(200)], 2),
        ([http(500), http(200)], 2),
        ([http(502), http(200)], 2),
        ([http(503), http(503), http(200)], 3),
        ([None, http(200)], 2),
        ([SITS, http(200)], 2),
        ([CUT, http(200)], 2),
        ([http(500), None, http(200)], 3),
    ],
    ids=["at once", "408", "429", "500", "502", "503 twice", "hung up", "time-out", "cut body", "two kinds"],
)
def test_fault_that_passes_is_asked_again(script: list[bytes | float | None], attempts: int) -> None:
    with Scripted(*script) as server:
        reply, = ScorerClient(settings(server.url, timeout_s=2.0 if SITS in script else 20.0)).score([take()])
    assert reply.score == 1.25
    assert len(server.requests) == attempts
    assert server.requests == [request()] * attempts


@pytest.mark.parametrize(
    ("part", "told"),
    [
        (http(408, b"slow"), "408 slow"),
        (http(429, b"full"), "429 full"),
        (http(500, b"oops"), "500 oops"),
        (http(502, b"proxy"), "502 proxy"),
        (http(503, b"loading"), "503 loading"),
        (None, "RemoteProtocolError: Server disconnected without sending a response"),
        (CUT, "RemoteProtocolError: peer closed connection without sending complete message body"),
        (SITS, "no reply within 2 s"),
    ],
    ids=["408", "429", "500", "502", "503", "hung up", "cut body", "time-out"],
)
def test_fault_that_stays_stops_the_run_after_the_retries(part: bytes | float | None, told: str) -> None:
    with Scripted(part) as server, pytest.raises(ScorerError) as caught:
        ScorerClient(settings(server.url, timeout_s=2.0 if part == SITS else 20.0)).score([take()])
    assert len(server.requests) == 3
    assert str(caught.value).startswith(f"no scorer is left for take 'take-1': {server.url}: take 'take-1': {told}")
    assert str(caught.value).endswith("; attempts: 3")


def test_refused_connection_stops_the_run_after_the_retries() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ScorerError, match=rf"'take-1': {url}: take 'take-1': ConnectError: .*; attempts: 3$"):
        ScorerClient(settings(url)).score([take()])


@pytest.mark.parametrize(
    ("part", "told"),
    [
        (http(400, b'{"error": "an empty prompt"}'), 'no score; what came back: 400 {"error": "an empty prompt"}'),
        (http(401, b"who?"), "no score; what came back: 401 who?"),
        (http(404, b"not here"), "no score; what came back: 404 not here"),
        (http(301, b"", Location="/other"), "no score; what came back: 301"),
        (http(204, b""), "no score; what came back: 204"),
        (http(200, b'{"score": 1.2'), "the body is not JSON: EOF while parsing"),
        (http(200, b""), "the body is not JSON: EOF while parsing"),
        (http(200, b"\xff\xfe"), "the body is not JSON"),
        (http(200, b"[" * 10_000), "the body is not JSON: recursion limit exceeded"),
        (http(200, b"[1.25]"), "must be an object, found a list of 1"),
        (http(200, b'{"cer": 0.1}'), "score: is missing"),
        (http(200, b'{"score": "1.25"}'), "score: Input should be a valid number, found '1.25'"),
        (http(200, b'{"score": null}'), "score: Input should be a valid number, found None"),
        (http(200, b'{"score": true}'), "score: Input should be a valid number, found True"),
        (http(200, b'{"score": NaN}'), "the body is not JSON: expected value"),
        (http(200, b'{"score": Infinity}'), "the body is not JSON: expected value"),
        (http(200, b'{"score": 1e999}'), "score: Input should be a finite number, found inf"),
        (http(200, b'{"score": 1, "cer": -1e999}'), "cer: must be a string, a finite number"),
        (http(200, b'{"score": 1, "words": ["a"]}'), "words: must be a string, a finite number, a boolean or null"),
        (http(200, b'{"score": 1, "mos": "good"}'), "mos: Input should be a valid number, found 'good'"),
        (http(200, b'{"score": 1, "error": "no audio"}'), "carries error: 'no audio'"),
        (http(200, b'{"score": 1, "error": null}'), "carries error: None"),
        (http(200, b'{"score": 1, "sample_id": "take-2"}'), "sample_id is 'take-2', another take's"),
        (http(200, OK, Content_Encoding="gzip"), "DecodingError"),
    ],
    ids=["400", "401", "404", "301", "204", "malformed", "empty", "not UTF-8", "deep", "a list", "no score", "string",
         "null", "boolean", "NaN", "infinity", "overflow", "diagnostic not finite", "diagnostic not scalar",
         "MOS a string", "error", "error null", "another take's", "not gzip"],
)
def test_anything_else_stops_the_run_at_once(part: bytes, told: str) -> None:
    with Scripted(part) as server, pytest.raises(ScorerError) as caught:
        ScorerClient(settings(server.url)).score([take()])
    assert len(server.requests) == 1
    assert str(caught.value).startswith(f"{server.url}/score, take 'take-1': {told}"), str(caught.value)


def test_further_scalars_are_kept() -> None:
    body = b'{"score": -3, "asr_text": "hello", "mos": 4, "sample_id": "take-1", "flags": "", "n": 7, "x": null}'
    with Scripted(http(200, body)) as server:
        reply, = ScorerClient(settings(server.url)).score([take()])
    assert (reply.score, reply.asr_text, reply.mos, reply.speaker_similarity) == (-3.0, "hello", 4.0, None)
    assert reply.model_extra == {"flags": "", "n": 7, "x": None}


def test_transcript_that_is_wanted_must_come() -> None:
    with Scripted(http(200)) as server, pytest.raises(ScorerError, match="asr_text is missing; if the scorer has"):
        ScorerClient(settings(server.url, transcripts=True)).score([take()])


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the client asks its event loop to wait, which it then does not."""
    waits: list[float] = []
    sleep = asyncio.sleep

    async def at_once(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr("swaralign.scoring.client.asyncio.sleep", at_once)
    return waits


def test_back_off_doubles(waits: list[float]) -> None:
    with Scripted(http(500), http(500), http(500), http(200)) as server:
        ScorerClient(settings(server.url, retries=3, backoff_s=0.5)).score([take()])
    assert waits == [0.5, 1.0, 2.0]


def test_retry_after_is_honoured(waits: list[float]) -> None:
    soon = email.utils.formatdate(time.time() + 3600, usegmt=True)
    with Scripted(http(429, Retry_After="7"), http(503, Retry_After=soon), http(200)) as server:
        ScorerClient(settings(server.url, timeout_s=3700.0)).score([take()])
    assert waits[0] == 7.0
    assert 3400 < waits[1] <= 3600


def test_a_wait_takes_its_time() -> None:
    with Scripted(http(429, Retry_After="1"), http(200)) as server:
        ScorerClient(settings(server.url)).score([take()])
    first, second = server.times
    assert second - first >= 1.0


def test_retry_after_beyond_the_time_limit_is_not_waited_for() -> None:
    with Scripted(http(429, b"full", Retry_After="3600")) as server, pytest.raises(ScorerError, match=r"wait 3600 s$"):
        ScorerClient(settings(server.url)).score([take()])
    assert len(server.requests) == 1


def test_url_that_dies_is_taken_out_and_its_requests_go_to_the_others(caplog: pytest.LogCaptureFixture) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    with served(Number) as good, Scripted(http(500)) as sick, caplog.at_level(logging.WARNING):
        client = ScorerClient(settings(dead, sick.url, good, concurrency=8))
        replies = client.score([take(str(n), f"take-{n}") for n in range(24)])
        asked = len(sick.requests)
        assert [reply.score for reply in replies] == list(range(24))
        assert [reply.score for reply in client.score([take("7")])] == [7.0]
    assert 3 <= asked == len(sick.requests)
    assert sorted(record.args[0] for record in caplog.records) == sorted([dead, sick.url])  # type: ignore[index]


def test_no_url_left_names_them_all() -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    with Scripted(http(500, b"oops")) as sick, pytest.raises(ScorerError) as caught:
        ScorerClient(settings(dead, sick.url)).score([take()])
    assert f"{dead}: take 'take-1': ConnectError" in str(caught.value)
    assert f"{sick.url}: take 'take-1': 500 oops; attempts: 3" in str(caught.value)


def test_the_least_busy_url_is_asked_and_concurrency_is_bounded() -> None:
    with served(lambda: Number(delay_s=0.5), places=2) as slow, served(Number) as quick:
        params = settings(slow, quick, concurrency=2, retries=0)
        replies = ScorerClient(params).score([take(str(n), f"take-{n}") for n in range(40)])  # a third would get 429
        asked = {url: float(re.findall(r'total{endpoint="/score",status="200"} (.*)', metrics(url))[0])
                 for url in (slow, quick)}
    assert [reply.score for reply in replies] == list(range(40))
    assert 1 <= asked[slow] < 20 < asked[quick] < 40


def test_killed_with_requests_in_flight_and_started_again() -> None:
    first = launch("tests.scorers:Number", "--set", "delay_s=30")
    wait_ready(first.url)
    client = ScorerClient(settings(first.url, retries=8, backoff_s=1.0))
    second = []

    def restart() -> None:
        time.sleep(0.5)
        first.process.kill()
        first.process.wait()
        second.append(launch("tests.scorers:Number", port=int(first.url.rpartition(":")[2])))

    restarting = threading.Thread(target=restart)
    restarting.start()
    replies = client.score([take(str(n), f"take-{n}") for n in range(6)])
    restarting.join()
    second[0].stop()
    assert [(reply.score, reply.sample_id) for reply in replies] == [(n, f"take-{n}") for n in range(6)]


def test_killed_for_good_stops_the_run() -> None:
    server = launch("tests.scorers:Number", "--set", "delay_s=30")
    wait_ready(server.url)
    threading.Timer(0.5, server.process.kill).start()
    with pytest.raises(ScorerError, match=rf"no scorer is left for take 'take-\d': {server.url}: .*attempts: 3$"):
        ScorerClient(settings(server.url)).score([take(str(n), f"take-{n}") for n in range(6)])


def test_scorer_that_is_being_loaded_is_waited_for() -> None:
    with serving(lambda: Number(load_s=0.5)) as url:
        client = ScorerClient(settings(url))
        client.wait_ready()
        assert client.score([take("5")])[0].score == 5.0


def test_nobody_there_is_told_before_the_first_take() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ScorerError, match=rf"no scorer is left for GET /healthz: {url}: GET /healthz: ConnectError"):
        ScorerClient(settings(url)).wait_ready()


def test_waiting_ends_in_time_whatever_the_scorer_asks_for() -> None:
    with Scripted(http(200)) as server:
        server.health = http(503, Retry_After="86400")
        with pytest.raises(ScorerError, match=r"no scorer is left for GET /healthz: .*: 503"):
            ScorerClient(settings(server.url, timeout_s=0.5)).wait_ready()


def test_inside_a_running_loop_as_in_a_notebook() -> None:
    async def cell(client: ScorerClient) -> float:
        return client.score([take()])[0].score

    with Scripted(http(200)) as server:
        assert asyncio.run(cell(ScorerClient(settings(server.url)))) == 1.25


def test_a_url_or_a_token_that_cannot_be_used_is_told_before_anything_is_asked() -> None:
    with pytest.raises(ValueError, match=r"http://127\.0\.0\.256:1 is not a URL: Invalid IPv4"):
        connect(settings("http://127.0.0.256:1"))
    with pytest.raises(ValueError, match=r"reward\.http\.token_env is , but that environment variable is not set"):
        connect(settings("http://127.0.0.1:1", token_env=""))


def test_no_message_tells_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCORER_TOKEN", "s3c\nret")
    with pytest.raises(ValueError, match="SCORER_TOKEN, whose value has spaces or control") as caught:
        connect(settings("http://127.0.0.1:1", token_env="SCORER_TOKEN"))
    assert "s3c" not in str(caught.value)


def test_token_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with Scripted(http(200)) as server:
        params = settings(server.url, token_env="SCORER_TOKEN")
        with pytest.raises(ValueError, match=r"reward\.http\.token_env is SCORER_TOKEN, but that environment variable"):
            connect(params)
        monkeypatch.setenv("SCORER_TOKEN", "s3cret\n")  # as a file ends
        connect(params).score([take()])
    assert "Authorization: Bearer s3cret\r\n" in server.heads[0]
