"""The server, as a process: what it replies, what it refuses and when, how it stops."""

from __future__ import annotations

import base64
import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from swaralign.cli import main
from swaralign.scoring.messages import MAX_BODY_BYTES, encode_take, parse_json, parse_take
from swaralign.scoring.plugins import find_factory
from tests.scorers import Held, Number, Seconds, Short
from tests.scoring import launch, metrics, process, request, served, serving, take, wait_ready

ROOT = Path(__file__).resolve().parent.parent
PATIENT: dict[str, Any] = {"timeout": 60, "trust_env": False}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served(Number) as url:
        yield url


@pytest.fixture(scope="module")
def web(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, **PATIENT) as web:
        yield web


def test_a_take_on_the_wire() -> None:
    sent = json.loads(encode_take(take("Hello.", "a-1", samples=2, rate_hz=16000)))
    assert sent == {"protocol_version": "1", "waveform_f32_base64": "AAAAvwAAAD8=", "num_samples": 2,
                    "sample_rate": 16000, "prompt": "Hello.", "metadata": {"id": "a-1"}}
    assert np.array_equal(parse_take(sent).wave, np.array([-0.5, 0.5], np.float32))


def test_the_reply_to_a_take(web: httpx.Client) -> None:
    response = web.post("/score", json=request(prompt="4.5"))
    assert response.status_code == 200
    assert response.json() == {"score": 4.5, "batch": 1, "seconds": 0.01, "sample_id": "take-1"}
    assert web.post("/score", json=request(prompt="bare", metadata={})).json() == {"score": 0.5}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"protocol_version": "2"}, "protocol_version: Input should be '1', found '2'"),
        ({"num_samples": 239}, "num_samples is 239, but the waveform holds 240 samples"),
        ({"num_samples": 0, "waveform_f32_base64": ""}, "num_samples: Input should be greater than or equal to 1"),
        ({"waveform_f32_base64": "AAA"}, "waveform_f32_base64 is not base64"),
        ({"waveform_f32_base64": "AAAA"}, "holds 3 bytes, which is no whole number of float32 samples"),
        ({"waveform_f32_base64": "AADAfw==", "num_samples": 1}, "waveform_f32_base64 holds NaN or infinity"),
        ({"waveform_f32_base64": "AACA/w==", "num_samples": 1}, "waveform_f32_base64 holds NaN or infinity"),
        ({"sample_rate": 0}, "sample_rate: Input should be greater than or equal to 1, found 0"),
        ({"sample_rate": 0.5}, "sample_rate: Input should be a valid integer, found 0.5"),
        ({"sample_rate": "16000"}, "sample_rate: Input should be a valid integer, found '16000'"),
        ({"sample_rate": True}, "sample_rate: Input should be a valid integer, found True"),
        ({"prompt": " \n"}, r"prompt: must not be empty, found ' \n'"),
        ({"metadata": None}, "metadata: must be an object, found None"),
        ({"metadata": {"of": {"a": 1}}}, "metadata: of: must be a string, a finite number, a boolean or null"),
        ({"prompt": "unscorable"}, "that cannot be scored"),
    ],
)
def test_a_faulty_take_gets_400_and_the_reason(web: httpx.Client, changes: dict[str, Any], told: str) -> None:
    response = web.post("/score", json=request(**changes))
    assert response.status_code == 400
    assert told in response.json()["error"]


def test_a_key_too_few_and_one_too_many(web: httpx.Client) -> None:
    short = request()
    del short["metadata"]
    assert web.post("/score", json=short).json() == {"error": "metadata: is missing"}
    assert web.post("/score", json=request(priority="high")).status_code == 200


def test_scorer_that_fails_is_a_500_with_its_reason(web: httpx.Client) -> None:
    for prompt, told in (("raises", "RuntimeError: this take breaks the model"),
                         ("nan", "ValueError: score: Input should be a finite number, found nan"),
                         ("a word", "ValueError: could not convert string to float: 'a word'"),
                         ("stops", "StopIteration: "),  # which no future of asyncio can hold
                         ("whose", "KeyError: 'speaker'"),
                         ("surrogate", "ValueError: note: 'utf-8' codec can't encode character '\\ud800' in position "
                                       "0: surrogates not allowed"),
                         ("said", "ValueError: asr_text: 'utf-8' codec can't encode character '\\ud800' in position "
                                  "0: surrogates not allowed"),
                         ("huge", "ValueError: note: must be a string, a finite number, a boolean or null, found a nu"
                                  "mber of 16610 bits")):
        response = web.post("/score", json=request(prompt=prompt))
        assert (response.status_code, response.json()) == (500, {"error": told})
    with served(Short) as short:
        response = httpx.post(f"{short}/score", json=request(), **PATIENT)
    assert response.json() == {"error": "RuntimeError: the scorer gave 0 scores for 1 takes"}


def test_a_batch_keeps_its_order_and_a_bad_take_fails_alone(web: httpx.Client) -> None:
    prompts = ["3", "raises", "1", "", "unscorable", "nan", "2", "whose", "stops"]
    response = web.post("/score/batch", json=[request(prompt=each, metadata={"id": each}) for each in prompts])
    replies = response.json()
    assert response.status_code == 200
    assert [(reply.get("score"), reply.get("sample_id")) for reply in replies] == [
        (3.0, "3"), (None, None), (1.0, "1"), (None, None), (None, None), (None, None), (2.0, "2"),
        (None, None), (None, None)]
    assert [reply["error"] for reply in replies if "error" in reply] == [
        "RuntimeError: this take breaks the model", "prompt: must not be empty, found ''", "that cannot be scored",
        "ValueError: score: Input should be a finite number, found nan", "KeyError: 'speaker'", "StopIteration: "]
    assert web.post("/score/batch", json=[]).json() == []


def test_a_batch_goes_through_the_model_together(web: httpx.Client) -> None:
    replies = web.post("/score/batch", json=[request(prompt=str(n)) for n in range(16)]).json()
    assert [reply["batch"] for reply in replies] == [16] * 16


def test_takes_that_come_one_by_one_go_through_the_model_together(hold: Path) -> None:
    """While it is at work on the first, the others come, each by a request of its own; then it takes them all."""
    client = httpx.Client(**PATIENT)
    with served(lambda: Held(str(hold))) as url, client, ThreadPoolExecutor(8) as pool:
        first = pool.submit(client.post, f"{url}/score", json=request(prompt="0"))
        wait_for(lambda: "scorer_queue_length 1.0" in metrics(url))
        time.sleep(0.5)  # more than it waits for company
        others = [pool.submit(client.post, f"{url}/score", json=request(prompt=str(n))) for n in range(1, 8)]
        wait_for(lambda: "scorer_queue_length 8.0" in metrics(url))
        time.sleep(0.5)
        hold.unlink()
        replies = [future.result().json() for future in [first, *others]]
    assert [(reply["score"], reply["batch"]) for reply in replies] == [(0, 1), *((n, 7) for n in range(1, 8))]


def test_a_batch_that_is_none_or_too_long(web: httpx.Client) -> None:
    assert web.post("/score/batch", json=request()).json() == {"error": "the body must be a list of takes"}
    response = web.post("/score/batch", json=[1] * 65)
    assert (response.status_code, "65 takes are more than the 64" in response.text) == (400, True)


def test_other_paths_and_methods(web: httpx.Client) -> None:
    assert web.get("/").status_code == 404
    assert web.get("/score").status_code == 405


def test_metrics_count_what_happened() -> None:
    with served(Number) as url, httpx.Client(base_url=url, trust_env=False) as web:
        web.post("/score", json=request())
        web.post("/score", json=request(prompt="raises"))
        web.post("/score", json=request(prompt=""))
        web.post("/score/batch", json=[request(), request(prompt="unscorable")])
        told = metrics(url)
    for line in ('scorer_requests_total{endpoint="/score",status="200"} 1.0',
                 'scorer_requests_total{endpoint="/score",status="500"} 1.0',
                 'scorer_requests_total{endpoint="/score",status="400"} 1.0',
                 'scorer_requests_total{endpoint="/score/batch",status="200"} 1.0',
                 'scorer_failures_total{kind="scorer"} 1.0',
                 'scorer_failures_total{kind="malformed"} 1.0',
                 'scorer_failures_total{kind="unscorable"} 1.0',
                 'scorer_latency_seconds_count{endpoint="/score"} 1.0',
                 "scorer_audio_seconds_total 0.02",
                 "scorer_queue_length 0.0"):
        assert f"{line}\n" in told, told


def test_not_ready_until_the_scorer_is_loaded() -> None:
    load = threading.Event()

    def loaded() -> Number:
        load.wait()
        return Number()

    with serving(loaded) as url:
        try:
            health = httpx.get(f"{url}/healthz", **PATIENT)
            score = httpx.post(f"{url}/score", json=request(), **PATIENT)
            batch = httpx.post(f"{url}/score/batch", json=[request()], **PATIENT)
        finally:
            load.set()
        wait_ready(url)
        assert (health.status_code, health.json()) == (503, {"status": "loading"})
        for each in (score, batch):
            assert (each.status_code, each.headers["retry-after"]) == (503, "1")


def test_a_server_that_is_still_loading_ends_at_once() -> None:
    server = launch("tests.scorers:Number", "--set", "load_s=600")
    try:
        assert server.stop() == 0
    finally:
        server.process.kill()


def test_a_million_faults_cost_no_more_than_one() -> None:
    """Each would otherwise be an object with a text of its own, though the first eight are told."""
    many = request(metadata={hex(n): [] for n in range(200_000)})
    tracemalloc.start()
    try:
        for told, data in (("holds 200000 keys, more than 1000", many),
                           ("0x0: must be a string", request(metadata={hex(n): [] for n in range(1000)}))):
            with pytest.raises(ValueError, match=told):
                parse_take(data)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    """A file that `Held` waits for the end of."""
    file = tmp_path / "hold"
    file.touch()
    return file


def refuses(url: str) -> bool:
    try:
        connect(url).close()
    except ConnectionRefusedError:
        return True
    return False


def connect(url: str) -> socket.socket:
    host, _, port = url.removeprefix("http://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def test_a_body_over_the_limit_is_refused_before_it_is_read(url: str, web: httpx.Client) -> None:
    """The head alone is sent: who waits for the body would never answer."""
    with connect(url) as connection:
        connection.sendall(f"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: {MAX_BODY_BYTES + 1}\r\n\r\n".encode())
        assert connection.makefile("rb").readline() == b"HTTP/1.1 400 Bad Request\r\n"
    assert web.post("/score", content=b" " * MAX_BODY_BYTES + b"x").status_code == 400
    exactly = json.dumps(request()).encode().ljust(MAX_BODY_BYTES)
    assert web.post("/score", content=exactly).status_code == 200


def test_a_body_of_unknown_length_is_cut_off_at_the_limit(url: str) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * 2**20

    response = httpx.post(f"{url}/score", content=chunks(), **PATIENT)
    assert (response.status_code, "larger than 8388608 bytes" in response.text) == (400, True)


def test_a_body_that_never_comes_is_given_up() -> None:
    with served(Number, body_timeout_s=0.2) as url, connect(url) as connection:
        connection.sendall(b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert connection.makefile("rb").readline() == b"HTTP/1.1 408 Request Timeout\r\n"


def test_a_full_queue_says_when_to_come_back() -> None:
    """Places are taken before bodies are read: two heads whose bodies never come fill a queue of two."""
    with served(Number, places=2) as url, contextlib.ExitStack() as stack:
        for _ in range(2):
            connection = stack.enter_context(connect(url))
            connection.sendall(b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        wait_for(lambda: "scorer_queue_length 2.0" in metrics(url))
        response = httpx.post(f"{url}/score", json=request(), **PATIENT)
        assert (response.status_code, response.json()) == (429, {"error": "2 of 2 places are taken"})
        assert int(response.headers["retry-after"]) >= 1
        stack.close()  # the two go away, and their places are free again
        wait_for(lambda: httpx.post(f"{url}/score", json=request(), **PATIENT).status_code == 200)


def test_token() -> None:
    with served(Number, token="s3crét") as url:
        for header in ({}, {"Authorization": "Bearer s3cret"}, {"Authorization": "Basic s3crét".encode()},
                       {"Authorization": "Bearer"}):
            response = httpx.post(f"{url}/score", json=request(), headers=header, **PATIENT)
            assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
        assert httpx.get(f"{url}/metrics", **PATIENT).status_code == 401
        right = {"Authorization": "bearer s3crét".encode()}
        assert httpx.post(f"{url}/score", json=request(), headers=right, **PATIENT).status_code == 200


def test_shutdown_finishes_what_is_in_flight(hold: Path) -> None:
    with process("tests.scorers:Held", "--set", f"hold={hold}") as server, httpx.Client(**PATIENT) as client, \
            ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(client.post, f"{server.url}/score", json=request(prompt=str(n))) for n in range(6)]
        wait_for(lambda: "scorer_queue_length 6.0" in metrics(server.url))
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: refuses(server.url))  # it takes no more
        assert not any(future.done() for future in futures)
        hold.unlink()
        assert server.process.wait(60) == 0
        replies = [future.result() for future in futures]
    assert [(reply.status_code, reply.json()["score"]) for reply in replies] == [(200, n) for n in range(6)]


def test_what_cannot_be_served_is_told_at_once(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    port = url.rpartition(":")[2]
    for arguments, told in (
        (["tests.scorers:Number", "--port", port], f"swaralign: cannot listen on 127.0.0.1, port {port}"),
        (["tests.scorers:Nothing"], "swaralign: no scorer 'tests.scorers:Nothing': module 'tests.scorers' has no attr"),
        (["tests.scorers:NOT_CALLABLE"], "swaralign: the scorer 'tests.scorers:NOT_CALLABLE' is a int; it must be a c"),
        (["tests.scorers:Number", "--port", "99999"], "swaralign: cannot listen on 127.0.0.1, port 99999: bind(): "),
        (["tests.scorers:Number", "--set", "delay=1"], "swaralign: the settings of --set do not fit: got an unexp"),
        (["tests.scorers:Number", "--set", "delay_s=[1"], "swaralign: --set delay_s: '[1' is not a YAML value; quo"),
        (["tests.scorers:Unwritten"], "swaralign: Unwritten is an abstract class; its `score` is not written"),
        ([".scorers:Number"], "swaralign: no scorer '.scorers:Number'"),
        (["whisper_cr"], "swaralign: no scorer 'whisper_cr'"),
        (["whisper_cer", "--set", "a=1"], "swaralign: --set is for scorers of yours"),
        (["whisper_cer", "--token-env", ""], "swaralign: --token-env is , but that environment variable is not set"),
        (["whisper_cer", "--token-env", "NO_SUCH"], "swaralign: --token-env is NO_SUCH, but that environment variable"),
    ):
        assert main(["scorer", "serve", *arguments]) == 1
        assert capsys.readouterr().err.startswith(told)


@pytest.mark.parametrize(("name", "told"), [
    ("unloadable", "its weights are missing; fetch them"),
    ("nothing", "the scorer 'tests.scorers:nothing' gave a NoneType; it must be a class, or a function that returns an "
                "instance, of swaralign.scoring.AudioScorer"),
])
def test_a_load_that_fails_ends_the_server_and_another_address_warns(name: str, told: str) -> None:
    command = [sys.executable, "-m", "swaralign.cli", "scorer", "serve", f"tests.scorers:{name}", "--port", "0",
               "--host", "0.0.0.0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"swaralign: {told}"
    assert "0.0.0.0 is not loopback: others can reach it, and nothing is encrypted; no token" in done.stderr


def test_scorer_of_an_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[swaralign.scorers]\nheadline = tests.scorers:Number\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_factory("headline") is Number
    with pytest.raises(ValueError, match="no scorer 'headlines'; installed: headline; name one of your own as module:"):
        find_factory("headlines")


def test_the_example_of_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own code, with a pipeline that gives the length of the file it is handed."""
    text = (ROOT / "docs" / "scorer.md").read_text(encoding="utf-8")
    (tmp_path / "btrm.py").write_text(text.partition("```python\n")[2].partition("```")[0])
    (tmp_path / "btrm_pipeline.py").write_text(
        "import soundfile as sf\nclass RewardModelInferencePipeline:\n"
        "    def __init__(self, base, checkpoint):\n        self.offset = len(base + checkpoint)\n"
        "    def get_pointwise_reward(self, text, path):\n"
        "        return self.offset + sf.info(path).frames + len(text)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with served(lambda: find_factory("btrm:Btrm")(base="ab", checkpoint="c")) as url:
        assert httpx.post(f"{url}/score", json=request(prompt="four"), **PATIENT).json()["score"] == 3 + 240 + 4


def test_the_scoring_alone_needs_few_packages() -> None:
    """A scorer's environment may hold another torch, or none, and nothing of ours but this."""
    heavy = "{'torch', 'transformers', 'pyarrow', 'soundfile', 'soxr', 'swaralign.rewards'}"
    loaded = f"import sys, swaralign.scoring.__main__; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", loaded], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner,
                                                                                      max_size=3), max_leaves=8)
WAVES = st.binary(max_size=64).map(lambda data: base64.b64encode(data).decode()) | st.text(max_size=12)
NEARLY = st.fixed_dictionaries({}, optional={
    "protocol_version": st.just("1") | JSON, "waveform_f32_base64": st.just("AAAAvwAAAD8=") | WAVES | JSON,
    "num_samples": st.just(2) | JSON, "sample_rate": st.just(16000) | JSON, "prompt": st.just("2") | JSON,
    "metadata": st.just({}) | JSON})
BODIES = st.binary(max_size=200) | (JSON | NEARLY | st.lists(NEARLY, max_size=4)).map(
    lambda data: json.dumps(data).encode())


@pytest.fixture(scope="module")
def listener() -> Iterator[httpx.Client]:
    """A client of a scorer that can score whatever is a take."""
    with served(Seconds) as url, httpx.Client(base_url=url, timeout=20) as listener:
        yield listener


@given(body=BODIES, path=st.sampled_from(["/score", "/score/batch"]))
@hypothesis_settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_fuzzed_bodies_get_a_score_or_a_reason(listener: httpx.Client, body: bytes, path: str) -> None:
    """Within the client's 20 s."""
    response = listener.post(path, content=body)
    assert response.status_code in (200, 400)
    if response.status_code == 400:
        assert response.json()["error"]
    elif path == "/score":
        wave = parse_take(parse_json(body)).wave
        assert response.json()["score"] == len(wave) / parse_take(parse_json(body)).sample_rate_hz - 3.0
