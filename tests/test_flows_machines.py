"""The flow where machines fail or work together: a worker that ends, a server that goes, clones with one remote."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import httpx
import pytest
from flow_lab import STAGES, Lab, alive, dvc, executed, make_repository, step_of, two_free_ports, until

from flows import serve


@pytest.fixture
def slow(lab: Lab, tmp_path: Path) -> Path:
    """A repository whose `train` takes a second a step and has a child that does not heed SIGTERM."""
    path = make_repository(tmp_path / "repository")
    lab.deploy(path)
    (path / "runs").mkdir()
    (path / "runs/slow").touch()
    return path


def training(repository: Path) -> None:
    """Wait for the second checkpoint."""
    until(lambda: step_of(repository) >= 2)


def test_sigterm_to_the_worker_stops_its_stages_and_the_run_says_so(lab: Lab, slow: Path) -> None:
    params = slow / "params.yaml"
    params.write_text(params.read_text().replace("grace_s: 20.0", "grace_s: 1.0"))
    with lab.worker(slow) as worker:
        run = lab.trigger()
        training(slow)
        worker.terminate()
        assert worker.wait(90) == 0 and alive(slow) == []
        assert lab.finish(run).state_name == "Crashed"
    (slow / "runs/slow").unlink()
    with lab.worker(slow):
        again = lab.run()
    assert lab.states(again) == {"source": "Cached", "right": "Cached", "train": "Completed", "compare": "Completed"}


def two_clones_share(lab: Lab, tmp_path: Path, configure: list[tuple[str, ...]]) -> None:
    """The same flow in two clones: what the first has run and pushed, the second pulls."""
    clones = [make_repository(tmp_path / name) for name in ("one", "two")]
    for clone in clones:
        for arguments in configure:
            dvc(clone, *arguments)
    lab.deploy(clones[0])
    for clone, state in zip(clones, ("Completed", "Cached"), strict=True):
        with lab.worker(clone):
            run = lab.run(pull=True, push=True)
        assert run.state_name == "Completed" and lab.states(run) == dict.fromkeys(STAGES, state)
        assert (clone / "results/comparison.md").exists()
    assert Counter(executed(clones[0])) == Counter(list(STAGES)) and executed(clones[1]) == []


def test_two_clones_share_a_local_remote(lab: Lab, tmp_path: Path) -> None:
    two_clones_share(lab, tmp_path, [("remote", "add", "--local", "-d", "shared", str(tmp_path / "remote"))])


def test_two_clones_share_an_s3_remote(lab: Lab, tmp_path: Path) -> None:
    port = two_free_ports()
    server = subprocess.Popen([sys.executable, "-m", "moto.server", "-H", serve.HOST, "-p", str(port)],
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://{serve.HOST}:{port}"
    try:
        until(lambda: not serve.free(port))
        httpx.put(f"{url}/bucket", timeout=60).raise_for_status()
        settings = {"endpointurl": url, "access_key_id": "any", "secret_access_key": "any", "region": "us-east-1"}
        two_clones_share(lab, tmp_path, [
            ("remote", "add", "--local", "-d", "shared", "s3://bucket/dvc"),
            *(("remote", "modify", "--local", "shared", *item) for item in settings.items()),
        ])
    finally:
        serve.stop(server)


@pytest.mark.parametrize(("handled", "sent"), [(signal.SIG_DFL, signal.SIGINT), (signal.SIG_IGN, signal.SIGTERM)],
                         ids=["ctrl-c", "sigterm in the background, which ignores ctrl-c"])
def test_one_command_serves_and_a_signal_stops_it_all(
    tmp_path: Path, handled: signal.Handlers, sent: signal.Signals
) -> None:
    repository, port = make_repository(tmp_path / "repository"), two_free_ports()
    command = [sys.executable, "-m", "flows.serve", "--port", str(port)]
    env = {**os.environ, "PREFECT_HOME": str(tmp_path / "home")}
    # What these tests themselves do with Ctrl-C depends on whether a shell runs them in the background.
    handles = partial(signal.signal, signal.SIGINT, handled)
    process = subprocess.Popen(command, cwd=repository, env=env, stdout=subprocess.PIPE, text=True, preexec_fn=handles)
    assert process.stdout is not None
    try:
        assert any(f"The pipeline is at http://{serve.HOST}:{port} " in line for line in process.stdout)
        found = httpx.post(f"http://{serve.HOST}:{port}/api/deployments/filter", json={}, timeout=60).json()
        assert {deployment["name"] for deployment in found} == {"on-demand", "nightly", "weekly-full"}
        assert httpx.get(f"http://{serve.HOST}:{port}/", timeout=60).status_code == 200
        taken = subprocess.run(command, cwd=repository, env=env, capture_output=True, text=True)
        assert taken.returncode == 1 and f"port {port} is taken" in taken.stderr
    finally:
        process.send_signal(sent)
        process.stdout.close()
        status = process.wait(90)
    assert status == 0 and serve.free(port) and serve.free(port + 1) and alive(repository) == []


def test_a_stage_outlives_a_worker_that_gives_up_no_server(lab: Lab, slow: Path) -> None:
    """Prefect's own worker would have given up after 12 failed looks for work, and killed the run."""
    with lab.worker(slow, PREFECT_WORKER_QUERY_SECONDS="0.2"):
        run = lab.trigger()
        training(slow)
        serve.stop(lab.server)
        before = step_of(slow)
        time.sleep(15)  # longer than Prefect's own worker waits
        until(lambda: step_of(slow) >= before + 10)
        (slow / "runs/slow").unlink()
        until(lambda: (slow / "data/train.txt").exists())
        lab.start()
        assert lab.finish(run).state_name == "Completed"
        rows = json.loads(lab.artifacts(run)["stages"])
        assert {row["stage"]: row["state"] for row in rows} == dict.fromkeys(STAGES, "Completed")
        assert Counter(executed(slow)) == Counter(list(STAGES))


def test_a_training_waits_for_a_server_that_is_away(lab: Lab, slow: Path) -> None:
    """It asks for its slot in a process that had none before, whose client Prefect lets fail at once."""
    hold = (slow / "runs/slow").rename(slow / "runs/hold")
    with lab.worker(slow):
        run = lab.trigger()
        until(lambda: executed(slow) == ["source"])
        serve.stop(lab.server)
        hold.unlink()
        until(lambda: (slow / "data/right.txt").exists())
        time.sleep(3)
        assert executed(slow) == ["source", "right"]
        lab.start()
        assert lab.finish(run).state_name == "Completed"
        assert Counter(executed(slow)) == Counter(list(STAGES))
