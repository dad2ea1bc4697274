"""The whole graph by the real dvc, on a tiny recipe in a copy of the repository: it runs, repeats and resumes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from ruamel.yaml import YAML
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
SCHEDULE = {"updates": 3, "save_every": 1, "keep_checkpoints": 3}
VALIDATION = {"every": 2, "prompts": 2}
TINY: dict[str, Any] = {
    "split": {"window_rows": 12, "expected_train": 11, "held_out": 3},
    "candidates": {"prompts": 4, "temperatures": [0.8, 1.2], "save_every": 4},
    "preferences": {"pairs": {"min_margin": 0.0}},
    "dpo": {"pairs_per_update": 2, "micro_batch": 2, "schedule": SCHEDULE, "validation": VALIDATION},
    "kto": {"takes_per_update": 2, "micro_batch": 2, "schedule": SCHEDULE, "validation": VALIDATION},
    "grpo": {
        "prompts_per_update": 2, "samples_per_prompt": 2, "micro_batch": 2,
        "schedule": SCHEDULE, "validation": VALIDATION,
    },
    "evaluate": {"prompts": 3, "samples_per_prompt": 1},
    "compare": {"resamples": 200},
    "report": {"prompts_with_audio": 2},
}
VOICES = ["base", "sft", "dpo", "kto", "grpo"]
STAGES = ["assets", "split", "merge", "speaker", "candidates", "preferences", "train_dpo", "train_kto", "train_grpo",
          *[f"evaluate@{voice}" for voice in VOICES], "compare", "report"]
yaml = YAML()


def merge(data: dict[str, Any], changes: dict[str, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, dict):
            merge(data[key], value)
        else:
            data[key] = value


def copy_repository(target: Path) -> Path:
    """A git repository of its own with the tracked and new files of this one, and the tiny recipe as params.yaml."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True)
    for name in listed.stdout.decode().splitlines():
        if (ROOT / name).is_file() and name != "dvc.lock":
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target / name)
    edit_params(target, TINY, source=ROOT / "recipes" / "demo.yaml")
    subprocess.run(["git", "init", "-q"], cwd=target, check=True)
    return target


def edit_params(repository: Path, changes: dict[str, Any], source: Path | None = None) -> None:
    data = yaml.load(source or repository / "params.yaml")
    merge(data, changes)
    yaml.dump(data, repository / "params.yaml")


def environment() -> dict[str, str]:
    here = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": here, "PYTHONPATH": ""}


def dvc(repository: Path, *args: str) -> str:
    command = [sys.executable, "-m", "dvc", *args]
    done = subprocess.run(command, cwd=repository, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def stages_run(output: str) -> list[str]:
    return [line.split("'")[1] for line in output.splitlines() if line.startswith("Running stage")]


def lock(repository: Path) -> dict[str, list[Any]]:
    """The outs of every stage in dvc.lock, with their hashes."""
    stages = YAML(typ="safe").load((repository / "dvc.lock").read_text())["stages"]
    return {name: stage["outs"] for name, stage in stages.items()}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The tiny recipe's repository after a full repro from an empty cache."""
    path = copy_repository(tmp_path_factory.mktemp("repository"))
    assert sorted(stages_run(dvc(path, "repro"))) == sorted(STAGES)
    yield path


def test_repro_ends_with_a_comparison(repository: Path) -> None:
    text = (repository / "results" / "comparison.md").read_text()
    assert "grpo" in text and "3 held-out prompts, 1 takes each" in text
    takes = pq.read_table(repository / "data" / "evaluate" / "grpo" / "scores.parquet")
    assert len(takes) == 3 and takes.column("audio").to_pylist()[0]["bytes"][:4] == b"fLaC"
    assert "grpo.composite" in dvc(repository, "metrics", "show", "--md")
    assert (repository / "results" / "report.html").read_text().startswith("<!doctype html>")


def test_the_curves_can_be_plotted(repository: Path) -> None:
    command = [sys.executable, "-m", "dvc", "plots", "show", "-o", "plots"]
    done = subprocess.run(command, cwd=repository, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0 and "could not find" not in done.stdout + done.stderr
    page = (repository / "plots" / "index.html").read_text()
    for title in ("Fixed validation, composite", "Fixed validation, WER", "DPO, training pairs", "KTO, training takes",
                  "GRPO, training takes", "Differences to the start policy"):
        assert title in page
    assert '"wer_corpus"' in page and '"margin"' in page and '"kl"' in page
    shutil.rmtree(repository / "plots")


def test_a_second_repro_runs_nothing(repository: Path) -> None:
    output = dvc(repository, "repro")
    assert stages_run(output) == [] and "up to date" in output


def test_an_edit_reruns_what_reads_it_and_nothing_else(repository: Path) -> None:
    edit_params(repository, {"compare": {"seed": 8}})
    assert stages_run(dvc(repository, "repro")) == ["compare", "report"]
    edit_params(repository, {"compare": {"seed": 7}})
    assert stages_run(dvc(repository, "repro")) == []  # the run cache has it


def test_empty_caches_give_the_same_hashes_and_what_was_killed_resumes(repository: Path, tmp_path: Path) -> None:
    """A second repository, whose pool and training are killed on their way, ends with every hash of the first."""
    other = copy_repository(tmp_path / "other")
    dvc(other, "repro", "split", "speaker")
    kill_once_there_is(other, "candidates", "candidates/*/chunk-00000.parquet")
    kill_once_there_is(other, "train_grpo", "train_grpo/*/checkpoint-1/complete.json")
    assert not (other / "data" / "candidates").exists() and not (other / "data" / "train_grpo").exists()
    output = dvc(other, "repro")
    assert {"candidates", "train_grpo"} < set(stages_run(output))
    runs = list((other / "runs" / "train_grpo").iterdir())
    assert len(runs) == 1 and (runs[0] / "checkpoint-3").is_dir()
    mine, theirs = (load_file(p / "data" / "train_grpo" / "adapter" / "adapter_model.safetensors")
                    for p in (repository, other))
    assert max((mine[name] - theirs[name]).abs().max().item() for name in mine) < 1e-6
    assert lock(other) == lock(repository)


def kill_once_there_is(repository: Path, stage: str, file: str) -> None:
    """Runs a stage as dvc does, and kills it with SIGKILL once a file of its run folder is there."""
    process = subprocess.Popen([sys.executable, "-m", f"stages.{stage}"], cwd=repository, env=environment(),
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 300
    while not list((repository / "runs").glob(file)):
        assert process.poll() is None, process.stderr.read().decode() if process.stderr else ""
        assert time.monotonic() < deadline, f"no {file} within five minutes"
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
