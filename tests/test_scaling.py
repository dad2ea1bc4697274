"""GRPO in several processes, on the policy's own parameters, and with checkpoints kept by rule."""

from __future__ import annotations

import csv
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from swaralign.params import GrpoParams, RuntimeParams, ScheduleParams, load_params
from swaralign.policy import load_policy
from swaralign.training import common
from swaralign.training.launch import launch, refuse_several
from tests import ranks
from tests.voices import BASE, PROMPTS, ROOT, LengthScorer, difference, qwen3_tts

PARAMS = load_params(ROOT / "recipes" / "demo.yaml")
FREED = 60  # seconds within which the death of one process must end the others


def settings(**changes: Any) -> GrpoParams:
    """Three groups of two takes an update: over two processes, the second group lies across both."""
    data = PARAMS.grpo.model_dump()
    data |= {"prompts_per_update": 3, "samples_per_prompt": 2, "micro_batch": 3, "beta": 0.05, **changes}
    data["schedule"] |= {"updates": 2, "warmup_updates": 0, "save_every": 1, "learning_rate": 1e-4}
    data["validation"] |= {"every": 2, "prompts": 3}
    return GrpoParams.model_validate(data)


FULL = settings(micro_batch=3, trainable="full", gradient_checkpointing=True)


def start(folder: Path, grpo: GrpoParams) -> subprocess.Popen[str]:
    (folder / "grpo.json").write_text(grpo.model_dump_json())
    return subprocess.Popen([sys.executable, "-m", "tests.ranks", str(folder)], cwd=ROOT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def processes_of(launcher: subprocess.Popen[str]) -> dict[int, psutil.Process]:
    """The launched processes by their rank."""
    return {int(child.environ()["RANK"]): child for child in psutil.Process(launcher.pid).children()
            if "RANK" in child.environ()}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float, str, list[psutil.Process]]:
    """A run whose second process was killed after the first update: its folder, the seconds until the whole command
    had ended, what it said, and the processes that there were."""
    folder = tmp_path_factory.mktemp("killed")
    (folder / "slow").touch()
    with start(folder, settings(num_processes=2)) as command:
        while not (folder / "run" / "checkpoint-1" / common.COMPLETE).exists():
            assert command.poll() is None, command.communicate()[0]
            time.sleep(0.05)
        found = processes_of(command)
        found[1].send_signal(signal.SIGKILL)
        began = time.monotonic()
        said, _ = command.communicate(timeout=2 * FREED)
    assert command.returncode == 1
    return folder, time.monotonic() - began, said, list(found.values())


@pytest.fixture(scope="module")
def resumed(killed: tuple[Path, float, str, list[psutil.Process]]) -> tuple[Path, str]:
    """The folder of the same run, continued to its end by the same command, and what that said."""
    folder = killed[0]
    (folder / "slow").unlink()
    return folder, finish(folder, settings(num_processes=2))


def finish(folder: Path, grpo: GrpoParams) -> str:
    """Runs the command to its end; what it said."""
    with start(folder, grpo) as command:
        said, _ = command.communicate()
    assert command.returncode == 0, said
    return said


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the same run in one process."""
    return train(tmp_path_factory.mktemp("alone"), settings(micro_batch=6))


def train(folder: Path, grpo: GrpoParams) -> Path:
    from swaralign.training.grpo import train_grpo

    voice = qwen3_tts(PARAMS, ranks.MAX_FRAMES)
    scorer: Any = LengthScorer()
    result = train_grpo(voice, PROMPTS, PROMPTS, scorer, grpo, PARAMS.runtime, folder / "run")
    common.write_training(folder / "out", result, {})
    return folder


def table(folder: Path, name: str) -> list[dict[str, float]]:
    with (folder / "out" / name).open() as file:
        return [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]


def test_more_processes_than_gpus_are_refused() -> None:
    many = settings().model_copy(update={"num_processes": 999})
    with pytest.raises(ValueError, match="num_processes is 999, but this machine shows"):
        launch("tests.ranks", many, RuntimeParams(device="cuda", threads=1))


def test_another_number_of_processes_than_the_params_say_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ValueError, match=r"4 processes were launched, but grpo\.num_processes is 1; start"):
        launch("tests.ranks", settings().model_copy(update={"num_processes": 1}), PARAMS.runtime)
    with pytest.raises(ValueError, match="4 processes were launched, but this stage trains in one"):
        refuse_several()


def test_a_killed_process_ends_the_others(killed: tuple[Path, float, str, list[psutil.Process]]) -> None:
    _, seconds, said, processes = killed
    assert "error: process 1 of 2 was killed by SIGKILL" in said
    assert seconds < FREED
    assert not any(process.is_running() for process in processes)


def test_the_same_command_resumes(resumed: tuple[Path, str]) -> None:
    folder, said = resumed
    assert said.count("resuming from") == 1 and str(folder / "run" / "checkpoint-1") in said


def test_two_processes_make_the_update_of_one(alone: Path, resumed: tuple[Path, str]) -> None:
    mine, theirs = (load_file(folder / "out" / "adapter" / "adapter_model.safetensors")
                    for folder in (alone, resumed[0]))
    assert max(value.abs().max() for name, value in mine.items() if "lora_B" in name) > 1e-4
    assert difference(mine, theirs) < 1e-5
    for one, two in zip(table(alone, "curves.csv"), table(resumed[0], "curves.csv"), strict=True):
        assert one["reward_std"] and one["grad_norm"]
        assert two == pytest.approx(one, abs=1e-5, rel=1e-4)


def test_validation_over_two_processes_is_that_of_one(alone: Path, resumed: tuple[Path, str]) -> None:
    mine, theirs = (pq.read_table(folder / "out" / "validation_samples.parquet").drop_columns(["audio"]).to_pylist()
                    for folder in (alone, resumed[0]))
    assert [row["id"] for row in mine] == ["p0", "p1", "p2"] * 2
    assert theirs == mine


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that trained the policy's own parameters."""
    return train(tmp_path_factory.mktemp("full"), FULL)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "out" / "checkpoint" / "model.safetensors")


def test_the_policys_own_parameters_are_trained_and_no_others(full: Path) -> None:
    before, after = load_file(BASE / "model.safetensors"), weights(full)
    assert before.keys() == after.keys()
    moved = {name for name, value in before.items() if not torch.equal(value.float(), after[name].float())}
    own = {name for name in before if name.startswith(("talker.model.", "talker.codec_head."))}
    assert moved and moved <= own
    assert {name for name in own if "layers" in name} <= moved
    assert all(after[name].dtype == torch.float32 for name in own)
    assert all(torch.equal(before[name], after[name]) for name in before.keys() - own)


def test_a_full_training_starts_at_its_reference(full: Path) -> None:
    first, second = table(full, "curves.csv")
    assert first["kl"] == pytest.approx(0, abs=1e-7) and second["kl"] > 0


def test_a_full_checkpoint_is_a_voice(full: Path) -> None:
    speaker = torch.randn(256, generator=torch.Generator().manual_seed(5)) * 0.15
    voice = load_policy(full / "out" / "checkpoint", speaker.tolist(), PARAMS.rollout, PARAMS.runtime)
    loaded = dict(voice.model.named_parameters())
    assert all(torch.equal(loaded[name], value.float()) for name, value in weights(full).items())
    assert voice.decode(voice.rollout(["A red bus."], [1], PARAMS.grpo.sampling))[0].any()


def test_a_sharded_training_makes_the_update_of_one_process_and_resumes(full: Path, tmp_path: Path) -> None:
    """FSDP by the shipped configuration; over CPUs, since PyTorch's FSDP is the same there."""
    sharded = settings(trainable="full", gradient_checkpointing=True, num_processes=2, sharding="fsdp")
    finish(tmp_path, sharded)
    made = weights(tmp_path)
    assert difference(weights(full), made) < 1e-5
    for one, two in zip(table(full, "curves.csv"), table(tmp_path, "curves.csv"), strict=True):
        assert two == pytest.approx(one | {"entropy": two["entropy"]}, abs=1e-5, rel=1e-4)  # of each micro-batch alone
    shutil.rmtree(tmp_path / "run" / "checkpoint-2")
    said = finish(tmp_path, sharded)
    assert said.count("resuming from") == 1 and difference(made, weights(tmp_path)) < 1e-6


def test_a_full_training_resumes(full: Path, tmp_path: Path) -> None:
    shutil.copytree(full / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint-2")
    train(tmp_path, FULL)
    assert difference(weights(full), weights(tmp_path)) < 1e-6


def schedule(**changes: Any) -> ScheduleParams:
    return ScheduleParams.model_validate(PARAMS.grpo.schedule.model_dump() | {"save_every": 5} | changes)


@pytest.mark.parametrize(("changes", "kept"), [
    ({"keep_checkpoints": 2, "keep_best": False, "keep_every": None}, {35, 40}),
    ({"keep_checkpoints": 2, "keep_best": True, "keep_every": None}, {10, 35, 40}),
    ({"keep_checkpoints": 3, "keep_best": True, "keep_every": 20}, {10, 20, 30, 35, 40}),
])
def test_which_checkpoints_are_kept(changes: dict[str, Any], kept: set[int]) -> None:
    composites = {0: 0.99, 10: 0.8, 20: 0.5, 25: 0.9, 30: 0.6}  # 0 and 25 have no checkpoint
    steps = [5, 10, 15, 20, 30, 35, 40]
    assert common.kept_checkpoints(steps, schedule(**changes), composites) == kept


def test_of_equally_good_checkpoints_the_newest_is_the_best() -> None:
    rules = schedule(keep_checkpoints=2, keep_best=True)
    assert common.kept_checkpoints([5, 10, 15, 20], rules, {5: 0.8, 10: 0.8}) == {10, 15, 20}
