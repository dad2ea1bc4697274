"""The flow on the real graph with the tiny recipe: a cancelled training goes on, and what is done is `Cached`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from flow_lab import Lab, alive, until
from prefect.states import Cancelling
from test_pipeline import copy_repository, edit_params

GRAPH_S = 900.0


@pytest.fixture(scope="module")
def repository(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of this repository with the tiny recipe, deployed, with a worker in it."""
    path = copy_repository(tmp_path_factory.mktemp("repository"))
    longer = {"schedule": {"updates": 12, "keep_checkpoints": 12}}  # than it takes to cancel it after the first
    edit_params(path, {"flow": {"grace_s": 5.0}, "grpo": longer})
    lab.deploy(path)
    with lab.worker(path):
        yield path


def test_the_tiny_recipe_from_nothing_through_a_cancelled_training_to_cached(lab: Lab, repository: Path) -> None:
    run = lab.trigger(targets=["train_grpo"])
    until(lambda: bool(list(repository.glob("runs/train_grpo/*/checkpoint-1/complete.json"))), GRAPH_S)
    lab.client.set_flow_run_state(run.id, Cancelling())
    until(lambda: alive(repository) == [], 90)
    assert lab.finish(run).state_name == "Cancelled"
    done = ["assets", "split", "merge", "speaker"]
    expected = {**dict.fromkeys(done, "Completed"), "train_grpo": "Cancelled"}
    assert lab.states(run, expected) == expected
    until(lambda: any(line == "> python -m stages.train_grpo" for line in lab.logs(run)))
    (checkpoint,) = repository.glob("runs/train_grpo/*/checkpoint-1/complete.json")
    written = checkpoint.stat().st_mtime_ns

    run = lab.finish(lab.trigger(targets=["train_grpo"]), GRAPH_S)
    assert run.state_name == "Completed", run.state
    expected = {**dict.fromkeys(done, "Cached"), "train_grpo": "Completed"}
    assert lab.states(run, expected) == expected
    assert checkpoint.stat().st_mtime_ns == written  # the training went on from there
    assert (repository / "data/train_grpo/adapter/adapter_model.safetensors").is_file()
    found = lab.artifacts(run)
    assert {row["stage"] for row in json.loads(found["stages"])} == {*done, "train_grpo"}
    assert "split.expected_train" in {row["key"] for row in json.loads(found["params"])}

    again = lab.run(targets=["train_grpo"])
    assert lab.states(again, expected) == dict.fromkeys(expected, "Cached")
    assert not any(line.startswith("Running stage") for line in lab.logs(again))
