"""What the tests of the flow share: a small repository, a Prefect server of its own, a worker, and runs of the flow."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowRunFilter,
    FlowRunFilterId,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.objects import FlowRun
from ruamel.yaml import YAML

from flows import serve

ROOT = Path(__file__).resolve().parent.parent
STAGES = {
    "source": {"params": ["split"], "outs": ["data/source.txt"], "meta": {"outside": True}},
    "right": {"params": ["speaker"], "deps": ["data/source.txt"], "outs": ["data/right.txt"]},
    "train": {"params": ["grpo"], "deps": ["data/source.txt"], "outs": ["data/train.txt"], "meta": {"gpu": True}},
    "compare": {
        "params": ["compare"], "deps": ["data/train.txt", "data/right.txt"],
        "outs": ["results/comparison.md", "results/report.html"], "metrics": ["results/comparison.json"],
    },
}
WAIT_S = 240.0


def make_repository(path: Path) -> Path:
    """A git and DVC repository with the flow, the demo recipe and the small graph of toy.py, all committed."""
    path.mkdir(parents=True)
    for folder in ("flows", "swaralign", "recipes"):
        shutil.copytree(ROOT / folder, path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("prefect.yaml", "pyproject.toml", ".gitignore"):
        shutil.copyfile(ROOT / name, path / name)
    shutil.copyfile(ROOT / "tests/toy.py", path / "toy.py")
    shutil.copyfile(path / "recipes/demo.yaml", path / "params.yaml")
    graph = {"stages": {name: {"cmd": f"python toy.py {name}", **stage} for name, stage in STAGES.items()}}
    YAML().dump(graph, path / "dvc.yaml")
    shutil.copytree(ROOT / ".dvc", path / ".dvc", ignore=shutil.ignore_patterns("cache", "tmp", "config.local"))
    git(path, "init", "-q")
    git(path, "add", "-A")
    git(path, "-c", "user.name=t", "-c", "user.email=t@localhost", "commit", "-q", "-m", "all")
    return path


def git(path: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=path, check=True, capture_output=True, text=True).stdout


def dvc(path: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "dvc", *arguments]
    return subprocess.run(command, cwd=path, check=True, capture_output=True, text=True).stdout


def executed(path: Path) -> list[str]:
    """The stages whose command ran in a repository, in order."""
    log = path / "runs/executed.log"
    return log.read_text().split() if log.exists() else []


def step_of(path: Path) -> int:
    """The last checkpoint of the training that goes on in a repository; 0 before the first."""
    step = path / "runs/step"
    return int(step.read_text()) if step.exists() else 0


def two_free_ports() -> int:
    """The first of two neighbouring ports that nothing listens on."""
    while True:
        with socket.socket() as probe:
            probe.bind((serve.HOST, 0))
            port = int(probe.getsockname()[1])
        if serve.free(port) and serve.free(port + 1):
            return port


class Lab:
    """A Prefect server process on a port and in a home of its own, with no deployment yet."""

    def __init__(self, home: Path) -> None:
        self.port = two_free_ports()
        self.env = {**serve.server_environment(self.port), "PREFECT_HOME": str(home)}
        self.client = SyncPrefectClient(self.env["PREFECT_API_URL"])
        self.start()

    def start(self) -> None:
        command = ["prefect", "server", "start", "--host", serve.HOST, "--port", str(self.port)]
        self.server = serve.start(command, self.env)
        serve.wait_until_healthy(self.client, self.server)
        serve.prepare(self.client)

    def deploy(self, repository: Path) -> None:
        command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
        subprocess.run(command, cwd=repository, env=self.env, check=True, capture_output=True)
        for deployment in self.client.read_deployments():  # a test may pass the hour of one
            for schedule in deployment.schedules:
                self.client.update_deployment_schedule(deployment.id, schedule.id, active=False)

    @contextmanager
    def worker(self, repository: Path, **env: str) -> Iterator[subprocess.Popen[bytes]]:
        """A worker in a repository."""
        process = subprocess.Popen([sys.executable, "-m", "flows.worker"], cwd=repository, env={**self.env, **env},
                                   start_new_session=True)
        try:
            yield process
        finally:
            serve.stop(process)

    def trigger(self, **parameters: Any) -> FlowRun:
        """A run of `on-demand`, scheduled; two stages side by side, however many cores there are."""
        deployment = self.client.read_deployment_by_name("align/on-demand")
        return self.client.create_flow_run_from_deployment(deployment.id, parameters={"max_parallel": 2, **parameters})

    def finish(self, run: FlowRun, seconds: float = WAIT_S) -> FlowRun:
        """The run when it has ended, however it has."""
        until(lambda: self.state(run).is_final(), seconds)
        return self.client.read_flow_run(run.id)

    def run(self, **parameters: Any) -> FlowRun:
        return self.finish(self.trigger(**parameters))

    def state(self, run: FlowRun) -> Any:
        return self.client.read_flow_run(run.id).state

    def states(self, run: FlowRun, stages: Collection[str] = tuple(STAGES)) -> dict[str, str | None]:
        """The state's name of each task run, when there is one of each of `stages` and all have ended.

        They reach the database by a way of their own, a moment after the state of the flow.
        """
        wanted = FlowRunFilter(id=FlowRunFilterId(any_=[run.id]))
        found: dict[str, Any] = {}

        def ended() -> bool:
            found.update((task.name, task.state) for task in self.client.read_task_runs(flow_run_filter=wanted))
            return set(stages) <= found.keys() and all(state and state.is_final() for state in found.values())

        until(ended)
        return {name: state.name for name, state in found.items()}

    def logs(self, run: FlowRun) -> list[str]:
        wanted = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run.id]))
        found: list[str] = []
        while page := self.client.read_logs(wanted, limit=200, offset=len(found)):
            found += [log.message for log in page]
        return found

    def artifacts(self, run: FlowRun) -> dict[str, Any]:
        wanted = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run.id]))
        return {found.key: found.data for found in self.client.read_artifacts(artifact_filter=wanted) if found.key}


def until(condition: Callable[[], bool], seconds: float = WAIT_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s"
        time.sleep(0.1)


def alive(folder: Path) -> list[str]:
    """Command lines of the processes whose working directory is a folder, workers left out.

    So are those that are ending, which have no command line any more: zombies, and the moment before.
    """
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder):
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return [line for line in found if line and "flows.worker" not in line]
