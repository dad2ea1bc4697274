"""What the flow costs: its wall time over that of plain `dvc repro`, each in a fresh clone with an empty cache.

    python -m benchmarks.flow_overhead [--params FILE] [--max-parallel 1 2]

Clones HEAD; takes as often the graph's time as it has lines to print (the demo: minutes each, on a quiet machine). A
flow's time is that between its first and its last state; the wait for a worker's next look for work is told apart.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from prefect.client.orchestration import SyncPrefectClient

from flows import serve
from flows.processes import environment

POLL_S = 1.0  # each look costs the server, which shares the machine with the stages


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--params", type=Path, default=Path("params.yaml"), help="the params file of every run")
    parser.add_argument("--max-parallel", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--port", type=int, default=4400)
    args = parser.parse_args()
    ports = range(args.port, args.port + 2 * len(args.max_parallel))  # a server's own, and that of its reports
    if taken := [port for port in ports if not serve.free(port)]:
        parser.error(f"ports {taken} are taken; try --port {args.port + 100}")
    with tempfile.TemporaryDirectory() as folder:
        plain_s = repro(clone(Path(folder, "plain"), args.params))
        print("| run | seconds | over dvc repro | waited for the worker, s |\n|---|---|---|---|")
        print(f"| dvc repro | {plain_s:.1f} | | |", flush=True)
        os.environ["PREFECT_HOME"] = str(Path(folder, "prefect"))
        rows = []
        for number, port in zip(args.max_parallel, ports[::2], strict=True):
            here = clone(Path(folder, f"flow-{number}"), args.params)
            flow_s, wait_s = flow(here, port, number)
            over = flow_s / plain_s - 1
            print(f"| flow, max_parallel {number} | {flow_s:.1f} | {over:+.1%} | {wait_s:.1f} |", flush=True)
            rows.append({"max_parallel": number, "seconds": flow_s, "ratio": flow_s / plain_s, "waited_s": wait_s})
    print(json.dumps({"dvc_repro_s": plain_s, "rows": rows}))


def clone(target: Path, params: Path) -> Path:
    """A clone of HEAD with a params file and an empty DVC cache."""
    subprocess.run(["git", "clone", "-q", ".", str(target)], check=True)
    shutil.copyfile(params, target / "params.yaml")
    return target


def repro(repository: Path) -> float:
    """Seconds of a `dvc repro`; its output goes to stderr."""
    began = time.monotonic()
    command = [sys.executable, "-m", "dvc", "repro"]
    subprocess.run(command, cwd=repository, env=environment(), stdout=sys.stderr, check=True)
    return time.monotonic() - began


def flow(repository: Path, port: int, max_parallel: int) -> tuple[float, float]:
    """Seconds of an `on-demand` run by a server and a worker of its own, and seconds before it began.

    Raises:
        RuntimeError: the run did not complete.
    """
    command = [sys.executable, "-m", "flows.serve", "--port", str(port)]
    served = subprocess.Popen(command, cwd=repository, env=environment(), stdout=sys.stderr)
    try:
        with SyncPrefectClient(serve.server_environment(port)["PREFECT_API_URL"]) as client:
            wait_for_worker(client, served)
            deployment = client.read_deployment_by_name("align/on-demand")
            run = client.create_flow_run_from_deployment(deployment.id, parameters={"max_parallel": max_parallel})
            while not (run.state and run.state.is_final()):
                time.sleep(POLL_S)
                run = client.read_flow_run(run.id)
    finally:
        serve.stop(served)
    if run.state_name != "Completed" or run.start_time is None or run.end_time is None or run.created is None:
        raise RuntimeError(f"the flow run ended as {run.state_name}: {run.state.message if run.state else ''}")
    return (run.end_time - run.start_time).total_seconds(), (run.start_time - run.created).total_seconds()


def wait_for_worker(client: SyncPrefectClient, served: subprocess.Popen[bytes]) -> None:
    """Raises RuntimeError when the server ends by itself."""
    while client.api_healthcheck() is not None or not client.read_work_pools() or not client.read_deployments():
        if served.poll() is not None:
            raise RuntimeError("the server has ended, see above")
        time.sleep(POLL_S)


if __name__ == "__main__":
    main()
