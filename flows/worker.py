"""A worker of the process work pool, for the clone that it is started in.

    PREFECT_API_URL=http://SERVER:4200/api python -m flows.worker [--pool swaralign] [--name NAME] [--limit 2]

It differs from `prefect worker start` in one thing: that one gives up when the server stays away for some minutes, and
takes the running stages with it; this one goes on with them and waits for the server. SIGTERM and Ctrl-C stop both the
worker and its stages.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
from typing import Any

import httpx
from prefect.settings import PREFECT_WORKER_HEARTBEAT_SECONDS
from prefect.workers.process import ProcessWorker

POOL = "swaralign"


class PatientWorker(ProcessWorker):
    """A process worker whose loops outlast a server that cannot be reached."""

    async def get_and_submit_flow_runs(self) -> list[Any]:
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
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500:
            raise error
        self._logger.warning("the Prefect server cannot be reached; running stages go on: %r", error)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pool", default=POOL)
    parser.add_argument("--name", help="as the UI shows it (default: a made-up one)")
    parser.add_argument("--limit", type=int, help="flow runs at a time (default: no limit)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    worker = PatientWorker(args.pool, name=args.name, limit=args.limit,
                           heartbeat_interval_seconds=int(PREFECT_WORKER_HEARTBEAT_SECONDS.value()))
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(worker.start())


if __name__ == "__main__":
    main()
