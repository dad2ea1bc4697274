"""The client of the audio scorer protocol: bounded concurrency, several URLs, retries, and no failure as a number.

A URL is asked again after a network error, a time-out, 408, 429 and 5xx, so often as `retries` says; then it is taken
out and its requests go to the others. Anything else, or no URL left, is a `ScorerError`, which stops the run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import httpx

from swaralign.params import HttpParams, check_url
from swaralign.scoring.messages import AudioTake, ScoreReply, encode_take, parse_json, parse_reply, read_token

log = logging.getLogger(__name__)
T = TypeVar("T")
_NETWORK = (httpx.NetworkError, httpx.TimeoutException, httpx.RemoteProtocolError)
_HEALTH = "GET /healthz"
_SHOWN = 300  # characters of what came back, in a message


class ScorerError(RuntimeError):
    """A take got no score: which URL, which take, what came back."""


class _Exhausted(Exception):
    """A URL gave no answer, however often it was asked."""


@dataclass(frozen=True)
class _Again:
    """An attempt that may be made again: what came back, and how long the server wants us to wait."""

    reason: str
    status: int | None = None
    wait_s: float = 0.0


class ScorerClient:
    """Asks scorers for replies; a URL that was taken out stays out for the life of the client."""

    def __init__(self, params: HttpParams, token: str | None = None) -> None:
        self._params = params
        self._headers = {b"Authorization": f"Bearer {token}".encode()} if token else {}
        self._busy = dict.fromkeys(params.urls, 0)  # requests in flight, by URL still in
        self._out: dict[str, str] = {}

    def score(self, takes: Sequence[AudioTake]) -> list[ScoreReply]:
        """The reply to each take, in order. Raises ScorerError, after which none of the others is waited for."""
        return _run(self._score_all(takes))

    def wait_ready(self) -> None:
        """Wait until each URL's scorer is loaded, `timeout_s` at most. Raises ScorerError if none of them answers."""
        _run(self._all_ready())

    async def _score_all(self, takes: Sequence[AudioTake]) -> list[ScoreReply]:
        gate = asyncio.Semaphore(self._params.concurrency)
        try:
            async with self._http() as http, asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._score_one(http, gate, take)) for take in takes]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _score_one(self, http: httpx.AsyncClient, gate: asyncio.Semaphore, take: AudioTake) -> ScoreReply:
        async with gate:
            body = encode_take(take)
            while True:
                url = self._least_busy(_name(take))
                self._busy[url] += 1
                try:
                    return await self._ask(http, url, take, body)
                except _Exhausted as exhausted:
                    self._take_out(url, str(exhausted))
                finally:
                    if url in self._busy:
                        self._busy[url] -= 1

    async def _ask(self, http: httpx.AsyncClient, url: str, take: AudioTake, body: bytes) -> ScoreReply:
        """One URL's reply, asked up to 1 + `retries` times; raises _Exhausted after that, ScorerError at once."""
        attempts, name, reason = 1 + self._params.retries, _name(take), ""
        for attempt in range(attempts):
            if url not in self._busy:
                raise _Exhausted("it was taken out")
            outcome = await self._attempt(http, name, "POST", f"{url}/score", body)
            if isinstance(outcome, httpx.Response):
                return self._reply(outcome, url, take)
            reason = outcome.reason
            if outcome.wait_s > self._params.timeout_s:
                raise _Exhausted(f"{name}: {reason}, and it asks to wait {outcome.wait_s:g} s")
            if attempt + 1 < attempts:
                await asyncio.sleep(max(outcome.wait_s, self._params.backoff_s * 2**attempt))
        raise _Exhausted(f"{name}: {reason}; attempts: {attempts}")

    def _reply(self, response: httpx.Response, url: str, take: AudioTake) -> ScoreReply:
        """The score in a response that is not to be retried; raises ScorerError if there is none, or another take's."""
        try:
            if response.status_code != 200:
                raise ValueError("no score")
            reply = parse_reply(parse_json(response.content))
            if reply.sample_id is not None and reply.sample_id != take.metadata.get("id"):
                raise ValueError(f"sample_id is {reply.sample_id!r}, another take's")
            if self._params.transcripts and reply.asr_text is None:
                raise ValueError("asr_text is missing; if the scorer has no recogniser, set transcripts to false")
        except ValueError as error:
            raise ScorerError(f"{url}/score, {_name(take)}: {error}; what came back: {_told(response)}") from None
        return reply

    async def _attempt(
        self, http: httpx.AsyncClient, name: str, method: str, url: str, body: bytes | None = None
    ) -> httpx.Response | _Again:
        try:
            async with asyncio.timeout(self._params.timeout_s):  # of the whole exchange; httpx's are of each read
                response = await http.request(method, url, content=body, headers={"Content-Type": "application/json"})
        except TimeoutError:
            return _Again(f"no reply within {self._params.timeout_s:g} s")
        except _NETWORK as error:
            return _Again(f"{type(error).__name__}: {error}")
        except httpx.HTTPError as error:
            raise ScorerError(f"{url}, {name}: {type(error).__name__}: {error}") from error
        if response.status_code in (408, 429) or response.status_code >= 500:
            return _Again(_told(response), response.status_code, _retry_after_s(response))
        return response

    async def _all_ready(self) -> None:
        async with self._http() as http:
            await asyncio.gather(*(self._ready(http, url) for url in list(self._busy)))
        self._least_busy(_HEALTH)

    async def _ready(self, http: httpx.AsyncClient, url: str) -> None:
        """Take a URL out unless somebody answers there; whether it can score, the first take will tell."""
        deadline, failures = time.monotonic() + self._params.timeout_s, 0
        while True:
            outcome = await self._attempt(http, _HEALTH, "GET", f"{url}/healthz")
            if isinstance(outcome, httpx.Response):
                return
            failures += outcome.status != 503  # which says that it is being loaded
            if failures > self._params.retries or time.monotonic() > deadline:
                self._take_out(url, f"{_HEALTH}: {outcome.reason}")
                return
            wait_s = max(outcome.wait_s, self._params.backoff_s * 2 ** max(0, failures - 1))
            await asyncio.sleep(max(0.0, min(wait_s, deadline - time.monotonic())))

    def _http(self) -> httpx.AsyncClient:
        # No proxy and no netrc of the environment: the params say who is asked, and with which token.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.AsyncClient(headers=self._headers, timeout=None, limits=limits, trust_env=False)

    def _least_busy(self, name: str) -> str:
        if not self._busy:
            out = "; ".join(f"{url}: {why}" for url, why in self._out.items())
            raise ScorerError(f"no scorer is left for {name}: {out}")
        return min(self._busy, key=self._busy.__getitem__)

    def _take_out(self, url: str, why: str) -> None:
        if self._busy.pop(url, None) is not None:
            self._out[url] = why
            log.warning("the scorer %s is taken out: %s", url, why)


def connect(params: HttpParams) -> ScorerClient:
    """A client with the token that the environment holds. Raises ValueError if it holds none and should, or for a URL
    that cannot be used."""
    for url in params.urls:
        check_usable(url)
    if params.token_env is None:
        return ScorerClient(params)
    return ScorerClient(params, read_token(params.token_env, "reward.http.token_env"))


def check_usable(url: str) -> None:
    """Raises ValueError for a URL that the params refuse, or that httpx does not take, as one with 127.0.0.256."""
    check_url(url)
    try:
        httpx.URL(url).host  # noqa: B018 (which decodes it)
    except (httpx.InvalidURL, ValueError) as error:
        raise ValueError(f"{url} is not a URL: {error}") from error


def _run(work: Coroutine[Any, Any, T]) -> T:
    """asyncio.run, in a thread of its own where a loop is running already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def _name(take: AudioTake) -> str:
    return f"take {take.metadata.get('id')!r}"


def _told(response: httpx.Response) -> str:
    text = response.text
    return f"{response.status_code} {text[:_SHOWN]}{'...' if len(text) > _SHOWN else ''}"


def _retry_after_s(response: httpx.Response) -> float:
    """Seconds that a Retry-After header asks for, as a number or a date (RFC 9110, 10.2.3); 0 without a valid one."""
    text = response.headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0
