"""The server of the audio scorer protocol: `POST /score`, `POST /score/batch`, `GET /healthz`, `GET /metrics`.

Fail-closed: a reply is a finite score or a status with a reason. What a request may cost is known before it is read:
the token, a place in the queue and the announced length come first, the body after them.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from swaralign.scoring.batching import MicroBatcher, Refused
from swaralign.scoring.messages import MAX_BODY_BYTES, Scalar, parse_json, parse_take
from swaralign.scoring.metrics import Metrics
from swaralign.scoring.plugins import AudioScorer

Endpoint = Callable[[Request], Awaitable[Response]]
READ_BYTES = 16 * 1024


@dataclass(frozen=True)
class ServerSettings:
    """How a scorer is served. `places`: takes that the server holds at once; `token`: None lets everyone in."""

    max_batch: int = 16
    places: int = 64
    linger_s: float = 0.01
    token: str | None = None
    max_body_bytes: int = MAX_BODY_BYTES
    body_timeout_s: float = 60.0


class ScorerServer:
    """One scorer and the application around it."""

    def __init__(self, load: Callable[[], AudioScorer], settings: ServerSettings) -> None:
        self.settings = settings
        self.batcher = MicroBatcher(load, settings.max_batch, settings.places, settings.linger_s)
        self.metrics = Metrics(lambda: self.batcher.taken)
        app = Starlette(
            routes=[
                Route("/score", self._measured(self.score), methods=["POST"]),
                Route("/score/batch", self._measured(self.score_batch), methods=["POST"]),
                Route("/healthz", self.healthz),
                Route("/metrics", self._measured(self.tell_metrics)),
            ],
            lifespan=self._lifespan,
        )
        self._web = uvicorn.Server(uvicorn.Config(
            app, http=_SmallReads, loop="asyncio", ws="none", lifespan="on", log_config=None, log_level="warning",
            access_log=False))
        self._fault: BaseException | None = None

    def run(self, listener: socket.socket) -> None:
        """Serve until `stop`, SIGTERM or SIGINT, then finish what is in flight. Raises what `load` raised."""
        self._web.run(sockets=[listener])
        if self._fault is not None:
            raise self._fault

    def stop(self) -> None:
        """Take no new request; `run` returns when those in flight have their replies."""
        self._web.should_exit = True

    async def score(self, request: Request) -> Response:
        """One take, one reply."""
        with self.batcher.place():
            data = await self._read(request)
            return _json(200, await self._score(data))

    async def score_batch(self, request: Request) -> Response:
        """A list of takes, the list of their replies in order; a bad take has {"error": reason} in its place."""
        with self.batcher.place():
            self.batcher.loaded()
            data = await self._read(request)
            if not isinstance(data, list):
                raise Refused(400, "malformed", "the body must be a list of takes")
            if len(data) > self.settings.places:
                raise Refused(400, "malformed", f"{len(data)} takes are more than the {self.settings.places} that "
                                                "this server holds at once; send fewer")
            with self.batcher.place(max(0, len(data) - 1)):
                return _json(200, await asyncio.gather(*(self._score_or_error(take) for take in data)))

    async def healthz(self, request: Request) -> Response:
        """200 once the scorer is loaded, 503 until then; needs no token."""
        ready = self.batcher.scorer is not None
        return _json(200 if ready else 503, {"status": "ok" if ready else "loading"})

    async def tell_metrics(self, request: Request) -> Response:
        """Prometheus' text format."""
        return Response(self.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def _score(self, data: Any) -> dict[str, Scalar]:
        try:
            take = parse_take(data)
        except ValueError as error:
            raise Refused(400, "malformed", str(error)) from error
        reply = await self.batcher.score(take)
        self.metrics.audio_s.inc(len(take.wave) / take.sample_rate_hz)
        return reply.told()

    async def _score_or_error(self, data: Any) -> dict[str, Scalar]:
        try:
            return await self._score(data)
        except Refused as refused:
            self.metrics.failures.labels(refused.kind).inc()
            return {"error": refused.reason}

    async def _read(self, request: Request) -> Any:
        """The parsed body, never more of it than the limit."""
        request.state.read = True
        limit, body = self.settings.max_body_bytes, bytearray()
        too_large = Refused(400, "too_large", f"the body is larger than {limit} bytes")
        if _announced(request) > limit:
            raise too_large
        try:
            async with asyncio.timeout(self.settings.body_timeout_s):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > limit:
                        raise too_large
            return parse_json(body)
        except TimeoutError:
            raise Refused(408, "slow", f"no whole body within {self.settings.body_timeout_s:g} s") from None
        except ClientDisconnect:
            raise Refused(400, "disconnected", "the client went away") from None
        except ValueError as error:
            raise Refused(400, "malformed", str(error)) from error

    async def _discard(self, request: Request) -> None:
        """Let the body of a request that was refused unread arrive, and drop it: its sender would miss the reply.

        Not so a body over the limit, which may be endless.
        """
        left = self.settings.max_body_bytes
        if request.method != "POST" or _announced(request) > left:
            return
        with suppress(TimeoutError, ClientDisconnect):
            async with asyncio.timeout(self.settings.body_timeout_s):
                async for chunk in request.stream():
                    left -= len(chunk)
                    if left < 0:
                        return

    def _measured(self, endpoint: Endpoint) -> Endpoint:
        """The endpoint behind the token, its refusals as replies, its latency and status in the metrics."""

        async def answer(request: Request) -> Response:
            began, path = time.perf_counter(), request.url.path
            try:
                self._authorise(request)
                response = await endpoint(request)
            except Refused as refused:
                self.metrics.failures.labels(refused.kind).inc()
                if not hasattr(request.state, "read"):
                    await self._discard(request)
                response = _refusal(refused)
            self.metrics.requests.labels(path, response.status_code).inc()
            if response.status_code == 200:
                self.metrics.latency_s.labels(path).observe(time.perf_counter() - began)
            return response

        return answer

    def _authorise(self, request: Request) -> None:
        if self.settings.token is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(given.encode("latin-1"), self.settings.token.encode())
        if scheme.lower() != "bearer" or not same:
            raise Refused(401, "unauthorized", "a bearer token is needed, and this is not it")

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(self.batcher.run())
        task.add_done_callback(self._batcher_ended)
        yield
        task.cancel()
        await asyncio.wait([task])
        self.batcher.close()

    def _batcher_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._fault = task.exception()
            self.stop()


class _SmallReads(H11Protocol):
    """uvicorn's protocol, its connections read in small pieces.

    asyncio reads up to 256 KiB from every connection that has something before any request is looked at: of a thousand
    takes that come at once, nearly all of each would lie in memory, though most are about to be refused.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]  # of asyncio's own loop; not in its types
        super().connection_made(transport)


def listen(host: str, port: int) -> socket.socket:
    """A socket on which to serve; port 0 takes a free one. Raises ValueError if the address cannot be had."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"cannot listen on {host}, port {port}: {reason}; choose another --port") from error


def _announced(request: Request) -> int:
    return int(request.headers.get("content-length", 0))


def _json(status: int, content: Any) -> Response:
    return Response(json.dumps(content, allow_nan=False), status, media_type="application/json")


def _refusal(refused: Refused) -> Response:
    response = _json(refused.status, {"error": refused.reason})
    if refused.retry_after_s is not None:
        response.headers["Retry-After"] = str(refused.retry_after_s)
    if refused.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response
