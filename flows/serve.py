"""A Prefect server on this machine with the deployments of prefect.yaml served, until Ctrl-C: what `make ui` runs.

    python -m flows.serve [--port 4200]

The server listens on the loopback interface and keeps its SQLite database in PREFECT_HOME (~/.prefect). Report pages
are served on the port after it. Nothing is sent elsewhere: Prefect's telemetry is off.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import socket
import subprocess
import sys
import time

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate, WorkPoolCreate
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound

from flows.artifacts import REPORTS, REPORTS_URL
from flows.processes import environment
from flows.run import GPU_LIMIT
from flows.worker import POOL, PatientWorker

HOST = "127.0.0.1"
START_S = 120  # seconds that the server may take to answer
STOP_S = 60  # seconds that a stopped process may take, the grace time of a stage included
QUERY_S = 2  # seconds between two looks for work


def main() -> int:
    """Serve until SIGINT, SIGTERM or the end of one of the processes; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=_port, default=4200, help="that of the UI; the next one is of the reports")
    args = parser.parse_args()
    for port in (args.port, args.port + 1):
        if not free(port):
            print(f"port {port} is taken, by another server perhaps; try --port {args.port + 100}", file=sys.stderr)
            return 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also where SIGINT is ignored, as in a background job
    running: list[subprocess.Popen[bytes]] = []
    try:
        serve(args.port, running)
        while all(process.poll() is None for process in running):
            time.sleep(0.5)
        return 1  # one has ended by itself, its own words above
    except KeyboardInterrupt:
        return 0
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C would leave the rest running
        for process in reversed(running):  # the worker reports to the server, which therefore goes last
            stop(process)


def serve(port: int, running: list[subprocess.Popen[bytes]]) -> None:
    """Start the server, the pages of reports and a worker, each put into `running`, and deploy prefect.yaml.

    Raises:
        RuntimeError: the server does not answer, or the deployments are refused.
    """
    url = f"http://{HOST}:{port}"
    env = server_environment(port)
    running.append(start(["prefect", "server", "start", "--host", HOST, "--port", str(port)], env))
    with SyncPrefectClient(f"{url}/api") as client:
        wait_until_healthy(client, running[0])
        prepare(client)
    if subprocess.run([sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"], env=env).returncode:
        raise RuntimeError("prefect.yaml could not be deployed, see above")
    REPORTS.mkdir(parents=True, exist_ok=True)
    pages = ["http.server", "--bind", HOST, "--directory", str(REPORTS), str(port + 1)]
    running.append(start(pages, env))
    running.append(start(["flows.worker"], env))
    print(f"\nThe pipeline is at {url} (deployments: {url}/deployments). Ctrl-C stops it.\n", flush=True)


def prepare(client: SyncPrefectClient) -> None:
    """The work pool and the limit of training stages, where they are not there yet; a changed limit stays."""
    template = PatientWorker.get_default_base_job_template()
    with contextlib.suppress(ObjectAlreadyExists):
        client.create_work_pool(WorkPoolCreate(name=POOL, type=PatientWorker.type, base_job_template=template))
    try:
        client.read_global_concurrency_limit_by_name(GPU_LIMIT)
    except ObjectNotFound:
        client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=GPU_LIMIT, limit=1))


def server_environment(port: int) -> dict[str, str]:
    """Of the server and of what talks to it: where it is, no telemetry, where report pages are.

    Leases of concurrency slots are kept on disk: those in memory, the default, would be lost with the server, and the
    slots of the stages that ran then would never come free.
    """
    return {
        **environment(),
        "PREFECT_API_URL": f"http://{HOST}:{port}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "PREFECT_WORKER_QUERY_SECONDS": str(QUERY_S),
        REPORTS_URL: f"http://{HOST}:{port + 1}",
    }


def start(module: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Run a module in a session of its own, so that Ctrl-C reaches this process alone."""
    return subprocess.Popen([sys.executable, "-m", *module], env=env, stdin=subprocess.DEVNULL, start_new_session=True)


def stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and SIGKILL when that does not end it."""
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_until_healthy(client: SyncPrefectClient, server: subprocess.Popen[bytes]) -> None:
    """Raises RuntimeError when the server has ended or takes too long."""
    deadline = time.monotonic() + START_S
    while client.api_healthcheck() is not None:
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("the Prefect server does not answer, see above")
        time.sleep(0.2)


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) < 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 1 to 65534")
    return int(text)


def free(port: int) -> bool:
    """Whether nothing listens on a port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


if __name__ == "__main__":
    sys.exit(main())
