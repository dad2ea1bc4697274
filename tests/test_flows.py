"""The flow by a real Prefect server and a real worker, over a small graph that the real dvc runs."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from flow_lab import STAGES, Lab, alive, executed, git, make_repository, step_of, until
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.states import Cancelling
from toy import STEPS

from flows import serve


@pytest.fixture(scope="module")
def repository(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The small repository, deployed, with a worker in it."""
    path = make_repository(tmp_path_factory.mktemp("clone") / "repository")
    lab.deploy(path)
    with lab.worker(path):
        yield path


def table(data: str) -> dict[str, dict[str, str]]:
    return {row["stage"]: row for row in json.loads(data)}


def test_every_stage_runs_then_every_stage_is_cached(lab: Lab, repository: Path) -> None:
    run = lab.run()
    assert run.state_name == "Completed"
    assert lab.states(run) == dict.fromkeys(["source", "right", "train", "compare"], "Completed")
    assert sorted(executed(repository)) == ["compare", "right", "source", "train"]
    until(lambda: {"source: says toy.py", "train step 1", f"train step {STEPS}"} <= set(lab.logs(run)))

    found = lab.artifacts(run)
    assert found["comparison"] == (repository / "results/comparison.md").read_text()
    rows = table(found["stages"])
    assert rows["train"]["state"] == "Completed" and rows["train"]["changed"] == "no run in dvc.lock"
    assert all(float(row["seconds"]) > 0 for row in rows.values())
    assert json.loads(found["params"]) == []
    assert f"http://{serve.HOST}:{lab.port + 1}/{run.name}/report.html" in found["report"]
    assert (repository / f"runs/reports/{run.name}/report.html").read_text().startswith("<!doctype html>")

    again = lab.run()
    assert lab.states(again) == dict.fromkeys(["source", "right", "train", "compare"], "Cached")
    assert len(executed(repository)) == 4
    assert {"comparison", "report", "stages", "params"} <= set(lab.artifacts(again))


def test_overrides_rerun_what_reads_them_and_leave_the_clone_alone(lab: Lab, repository: Path) -> None:
    before, ran = (repository / "params.yaml").read_bytes(), executed(repository)
    status = git(repository, "status", "--short")
    run = lab.run(set_params={"grpo.beta": 0.08})
    expected = {"source": "Cached", "right": "Cached", "train": "Completed", "compare": "Completed"}
    assert run.state_name == "Completed" and lab.states(run, expected) == expected
    assert executed(repository)[len(ran):] == ["train", "compare"]  # runs/ is shared
    assert (repository / "params.yaml").read_bytes() == before and git(repository, "status", "--short") == status
    found = lab.artifacts(run)
    assert table(found["stages"])["train"]["changed"] == "param grpo.beta"
    assert json.loads(found["params"]) == [{"key": "grpo.beta", "recipe": "0.04", "this run": "0.08"}]


def test_an_unknown_key_is_refused_before_any_stage(lab: Lab, repository: Path) -> None:
    run = lab.run(set_params={"grpo.betta": 1.0})
    assert run.state_name == "Failed" and lab.states(run, []) == {}
    assert run.state and "grpo.betta: unknown key; did you mean 'beta'? valid keys here:" in str(run.state.message)


def test_a_failed_stage_fails_the_flow_and_other_branches_go_on(lab: Lab, repository: Path) -> None:
    (repository / "runs/fail").touch()
    run = lab.run(set_params={"speaker.min_duration_s": 1.5, "grpo.beta": 0.09})
    (repository / "runs/fail").unlink()
    assert run.state_name == "Failed"
    expected = {"source": "Cached", "right": "Failed", "train": "Completed"}
    assert lab.states(run, expected) == expected
    assert table(lab.artifacts(run)["stages"])["compare"]["state"] == "NotRun"
    message = str(run.state.message) if run.state else ""
    assert "right: no such luck" in message and "train" not in message
    command = next(line for line in message.splitlines() if line.startswith("By hand: ")).removeprefix("By hand: ")
    elsewhere = {**os.environ, "PATH": os.defpath}  # a shell where the environment is not activated
    by_hand = subprocess.run(command, shell=True, capture_output=True, text=True, env=elsewhere)
    assert by_hand.returncode == 0 and "Running stage 'right'" in by_hand.stdout


def test_a_stage_that_talks_to_the_outside_is_tried_again(lab: Lab, repository: Path) -> None:
    ran = len(executed(repository))
    (repository / "runs/flaky").touch()
    run = lab.run(targets=["source"], set_params={"split.min_snr_db": 22.0, "flow.retry_delay_s": 0.0})
    assert run.state_name == "Completed" and lab.states(run, ["source"]) == {"source": "Completed"}
    assert executed(repository)[ran:] == ["source", "source"]
    until(lambda: "source: not this time" in lab.logs(run))


def test_two_runs_at_once_in_one_place_run_each_stage_once(lab: Lab, repository: Path) -> None:
    """Whichever is second waits for DVC's locks, then finds the stage done."""
    ran = len(executed(repository))
    changed = {"split.min_snr_db": 21.0, "speaker.min_duration_s": 1.2, "grpo.beta": 0.11}
    runs = [lab.finish(run) for run in [lab.trigger(set_params=changed), lab.trigger(set_params=changed)]]
    assert [run.state_name for run in runs] == ["Completed", "Completed"]
    assert Counter(executed(repository)[ran:]) == Counter(list(STAGES))
    first, second = (lab.states(run) for run in runs)
    assert all({first[name], second[name]} == {"Cached", "Completed"} for name in STAGES)


@pytest.fixture
def slow(repository: Path) -> Iterator[Path]:
    """While this file is there, `train` takes a second a step and has a child that does not heed SIGTERM."""
    (repository / "runs/step").unlink(missing_ok=True)
    slow = repository / "runs/slow"
    slow.parent.mkdir(exist_ok=True)
    slow.touch()
    yield slow
    slow.unlink(missing_ok=True)


def training(repository: Path) -> None:
    """Wait for the second checkpoint."""
    until(lambda: step_of(repository) >= 2)


def stage_processes(repository: Path) -> list[str]:
    """Of the worktrees as well as of the clone."""
    folders = [repository, *(repository / ".dvc/tmp/flows").glob("*")]
    return [line for folder in folders for line in alive(folder) if "prefect" not in line]


def test_a_cancelled_training_leaves_no_process_and_is_resumed(lab: Lab, repository: Path, slow: Path) -> None:
    parameters = {"set_params": {"grpo.beta": 0.1, "flow.grace_s": 1.0}}
    run = lab.trigger(**parameters)
    training(repository)
    for kind in ["supervisor.py", "-m dvc", "python toy.py train", '"deaf"']:
        until(lambda kind=kind: any(kind in line for line in stage_processes(repository)))  # type: ignore[misc]
    lab.client.set_flow_run_state(run.id, Cancelling())
    until(lambda: stage_processes(repository) == [], 90)  # by itself the training would go on for longer
    assert lab.finish(run).state_name == "Cancelled" and lab.states(run, ["train"])["train"] == "Cancelled"
    done = step_of(repository)

    slow.unlink()
    again = lab.run(**parameters)
    assert again.state_name == "Completed" and lab.states(again)["train"] == "Completed"
    until(lambda: f"train begins at step {done + 1}" in lab.logs(again))


def test_a_scheduled_run_fires(lab: Lab, repository: Path) -> None:
    deployment = lab.client.read_deployment_by_name("align/nightly")
    (schedule,) = lab.client.create_deployment_schedules(
        deployment.id, [(IntervalSchedule(interval=timedelta(seconds=10)), True)], parameters={"targets": ["source"]}
    )
    mine = DeploymentFilter(id=DeploymentFilterId(any_=[deployment.id]))

    def completed() -> list[FlowRun]:
        runs = lab.client.read_flow_runs(deployment_filter=mine)
        return [run for run in runs if run.state_name == "Completed"]

    until(lambda: bool(completed()))
    lab.client.delete_deployment_schedule(deployment.id, schedule.id)
    run = completed()[0]
    assert run.auto_scheduled and run.parameters["recipe"] == "demo"
    assert lab.states(run, ["source"]) == {"source": "Cached"}


def test_nothing_is_sent_elsewhere(lab: Lab) -> None:
    settings = httpx.get(f"{lab.env['PREFECT_API_URL']}/admin/settings", timeout=60).json()
    assert settings["server"]["analytics_enabled"] is False and lab.env["DO_NOT_TRACK"] == "1"


def test_deployments_are_those_of_prefect_yaml(lab: Lab, repository: Path) -> None:
    found = {deployment.name: deployment for deployment in lab.client.read_deployments()}
    assert {name: [str(each.schedule.cron) for each in deployment.schedules] for name, deployment in found.items()} == {
        "on-demand": [], "nightly": ["0 2 * * *"], "weekly-full": ["0 4 * * 0"]}
    assert found["weekly-full"].parameters == {"recipe": "demo", "force": True}
    assert {deployment.work_pool_name for deployment in found.values()} == {serve.POOL}
    assert lab.client.read_global_concurrency_limit_by_name("gpu").limit == 1
