"""A worker of the process work pool, for the clone that it is started in.

    PREFECT_API_URL=http://SERVER:4200/api python -m flows.worker [--pool swaralign] [--name NAME] [--limit 2]

It differs from `prefect worker start` in two things. That one gives up when the server stays away for some minutes, and
takes the running stages with it; this one goes on with them and waits for the server. That one, told to end, kills its
flow runs, which then stay `Running` in the UI; this one lets them stop their stages and report first.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import time
import warnings
from typing import Any

import httpx
import psutil
from prefect.settings import PREFECT_WORKER_HEARTBEAT_SECONDS
from prefect.workers.process import ProcessWorker

from flows.patience import is_away

POOL = "swaralign"
STOP_S = 60.0  # that flow runs may take to stop, the grace time of their stages included


with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)  # that it takes the place of Prefect's own worker of its type

    class PatientWorker(ProcessWorker):
        """A process worker whose loops outlast a server that cannot be reached, and whose runs outlast its loops."""

        stopping = False

        async def get_and_submit_flow_runs(self) -> list[Any]:
            if self.stopping:
                return []
            try:
                return await super().get_and_submit_flow_runs()
            except httpx.HTTPError as error:
                self._wait_for_server(error)
                return []

        async def sync_with_backend(self) -> None:
            try:
                await super().sync_with_backend()
            except httpx.HTTPError as error:
                self._wait_for_server(error)

        def _wait_for_server(self, error: httpx.HTTPError) -> None:
            """Raises the error again unless it says that the server is away, rather than that it refuses."""
            if not is_away(error):
                raise error
            self._logger.warning("the Prefect server cannot be reached; running stages go on: %r", error)


async def work(worker: PatientWorker) -> None:
    """Run a worker until SIGTERM or SIGINT, then stop its flow runs, then the worker."""
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    loops = asyncio.create_task(worker.start())
    await asyncio.wait({loops, asyncio.create_task(told.wait())}, return_when=asyncio.FIRST_COMPLETED)
    worker.stopping = True
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            process.terminate()
    deadline = time.monotonic() + STOP_S
    while psutil.Process().children() and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    loops.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await loops


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pool", default=POOL)
    parser.add_argument("--name", help="as the UI shows it (default: a made-up one)")
    parser.add_argument("--limit", type=int, help="flow runs at a time (default: no limit)")
    args = parser.parse_args()
    worker = PatientWorker(args.pool, name=args.name, limit=args.limit,
                           heartbeat_interval_seconds=int(PREFECT_WORKER_HEARTBEAT_SECONDS.value()))
    asyncio.run(work(worker))


if __name__ == "__main__":
    main()
