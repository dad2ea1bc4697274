"""Micro-batches: takes that arrive one by one go through the model together.

The model lives in one thread. While it works on a batch, the next takes wait; when it is free, it gets all that wait,
up to `max_batch`. How many takes the server holds at all is bounded by places, which are taken before a body is read.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from swaralign.scoring.messages import AudioTake, ScoreReply, parse_reply
from swaralign.scoring.plugins import AudioScorer

log = logging.getLogger(__name__)
T = TypeVar("T")


class Refused(Exception):
    """No score, and why: an HTTP status, a `kind` for the metrics, a reason for people."""

    def __init__(self, status: int, kind: str, reason: str, retry_after_s: int | None = None) -> None:
        super().__init__(reason)
        self.status, self.kind, self.reason, self.retry_after_s = status, kind, reason, retry_after_s


@dataclass(frozen=True)
class _Job:
    take: AudioTake
    reply: asyncio.Future[ScoreReply]


class MicroBatcher:
    """Takes in, replies out, for one event loop. `run` loads the scorer and serves until it is cancelled."""

    def __init__(self, load: Callable[[], AudioScorer], max_batch: int, places: int, linger_s: float) -> None:
        self.places, self.taken = places, 0
        self.scorer: AudioScorer | None = None
        self._load, self._max_batch, self._linger_s = load, max_batch, linger_s
        self._queue: asyncio.Queue[_Job] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, "scorer")
        self._take_s = 0.1  # seconds a take, as of late

    @contextmanager
    def place(self, takes: int = 1) -> Iterator[None]:
        """Room for so many takes while the context lasts; raises Refused, 429, if there is none."""
        if self.taken + takes > self.places:
            wait_s = max(1, math.ceil(self.taken * self._take_s))
            raise Refused(429, "queue_full", f"{self.taken} of {self.places} places are taken", wait_s)
        self.taken += takes
        try:
            yield
        finally:
            self.taken -= takes

    async def score(self, take: AudioTake) -> ScoreReply:
        """The reply to one take; raises Refused if the scorer finds a fault in it or fails on it."""
        _check(self.loaded(), take)
        job = _Job(take, asyncio.get_running_loop().create_future())
        self._queue.put_nowait(job)
        return await job.reply

    def loaded(self) -> AudioScorer:
        """The scorer; raises Refused while it is being loaded."""
        if self.scorer is None:
            raise Refused(503, "loading", "the scorer is still being loaded", 1)
        return self.scorer

    async def run(self) -> None:
        """Load the scorer, then serve. Raises what the load raised."""
        self.scorer = scorer = (await self._in_thread(self._load)).result()
        log.info("the scorer is loaded")
        while True:
            await self._serve(scorer, await self._next_batch())

    def close(self) -> None:
        """Let go of the model's thread; a load that is under way is not waited for."""
        self._thread.shutdown(wait=self.scorer is not None, cancel_futures=True)

    async def _next_batch(self) -> list[_Job]:
        """All that wait; while takes keep arriving within `linger_s` of each other, those too, up to `max_batch`."""
        batch = [await self._queue.get()]
        with suppress(TimeoutError):
            while len(batch) < self._max_batch:
                async with asyncio.timeout(self._linger_s):
                    batch.append(await self._queue.get())
        while len(batch) < self._max_batch and not self._queue.empty():  # came while the loop was busy reading others
            batch.append(self._queue.get_nowait())
        return batch

    async def _serve(self, scorer: AudioScorer, batch: list[_Job]) -> None:
        began = time.perf_counter()
        scored = await self._in_thread(lambda: _score(scorer, [job.take for job in batch]))
        error = scored.exception()
        if error is not None:
            await self._fail(scorer, batch, error)
            return
        self._take_s += 0.2 * ((time.perf_counter() - began) / len(batch) - self._take_s)
        for job, reply in zip(batch, scored.result(), strict=True):
            if not job.reply.done():  # nobody waits for it any more
                job.reply.set_result(reply)

    async def _in_thread(self, work: Callable[[], T]) -> Future[T]:
        """What the model's thread made of it, done. Not awaited itself: asyncio's futures cannot hold StopIteration."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def tell(_: Future[T]) -> None:
            if not loop.is_closed():  # it may have been stopped while the scorer was being loaded
                loop.call_soon_threadsafe(done.set)

        future = self._thread.submit(work)
        future.add_done_callback(tell)
        await done.wait()
        return future

    async def _fail(self, scorer: AudioScorer, batch: list[_Job], error: BaseException) -> None:
        """One take may have failed the others: each is asked alone, and a failure is then its own."""
        if len(batch) > 1:
            for job in batch:
                await self._serve(scorer, [job])
            return
        failed = _failed(batch[0].take, error)
        if not batch[0].reply.done():
            batch[0].reply.set_exception(failed)


def _check(scorer: AudioScorer, take: AudioTake) -> None:
    try:
        scorer.check(take)
    except ValueError as error:
        raise Refused(400, "unscorable", str(error)) from error
    except Exception as error:  # a scorer is anybody's code
        raise _failed(take, error) from error


def _failed(take: AudioTake, error: BaseException) -> Refused:
    log.error("the scorer failed on take %r", take.metadata.get("id"), exc_info=error)
    return Refused(500, "scorer", f"{type(error).__name__}: {error}")


def _score(scorer: AudioScorer, takes: Sequence[AudioTake]) -> list[ScoreReply]:
    """The replies to a batch, each one checked: what is not a finite score must not leave as one."""
    scores = scorer.score(takes)
    if len(scores) != len(takes):
        raise RuntimeError(f"the scorer gave {len(scores)} scores for {len(takes)} takes")
    return [_reply(score).named(take) for score, take in zip(scores, takes, strict=True)]


def _reply(score: Any) -> ScoreReply:
    fields = score if isinstance(score, Mapping) else {"score": score}
    return parse_reply({name: value.item() if hasattr(value, "item") else value for name, value in fields.items()})
