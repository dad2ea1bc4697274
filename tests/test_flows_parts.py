"""The parts of the flow that need no server: the graph read from DVC, params and overrides, worktrees, processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from flow_lab import alive, dvc, git, make_repository, until
from ruamel.yaml import YAML
from toy import STUBBORN

from flows import workspace as workspaces
from flows.graph import changes, read_graph
from flows.processes import Processes
from flows.recipe import nearest_recipe, params_text
from flows.workspace import workspace

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small repository after a `dvc repro`."""
    path = make_repository(tmp_path_factory.mktemp("parts") / "repository")
    dvc(path, "repro")
    return path


def test_graph_is_dvcs_own() -> None:
    stages = read_graph(ROOT)
    names = list(stages)
    assert stages["train_grpo"].gpu and not stages["split"].gpu
    assert {"assets", "speaker"} <= stages["train_grpo"].upstream and "data/train_grpo" in stages["train_grpo"].outs
    for name, stage in stages.items():
        assert all(names.index(above) < names.index(name) for above in stage.upstream)


def test_targets_bring_what_they_need(repository: Path) -> None:
    assert list(read_graph(repository, ["train"])) == ["source", "train"]
    assert {"evaluate@base", "evaluate@grpo", "train_grpo"} <= set(read_graph(ROOT, ["evaluate"]))
    with pytest.raises(ValueError, match=r"targets: no stage 'trian'; there is compare, right, source, train"):
        read_graph(repository, ["trian"])


def test_changes_are_told_by_name(repository: Path) -> None:
    assert [changes(repository, name) for name in ("source", "train", "compare")] == [[], [], []]
    params = repository / "params.yaml"
    before = params.read_text()
    params.write_text(before.replace("beta: 0.04", "beta: 0.05"))
    (repository / "data/train.txt").unlink()
    assert changes(repository, "train") == ["param grpo", "out data/train.txt deleted"]
    assert changes(repository, "right") == []
    params.write_text(before)
    dvc(repository, "checkout")
    assert changes(repository, "train") == []


def test_overrides_keep_comments_and_are_checked(repository: Path) -> None:
    text = params_text(repository, None, {"grpo.schedule.learning_rate": 1e-6, "compare.seed": 9})
    data = YAML(typ="safe").load(text)
    assert data["grpo"]["schedule"]["learning_rate"] == 1e-6 and data["compare"]["seed"] == 9
    assert "# of AdamW, after the warm-up" in text
    assert params_text(repository, "demo", {}) == params_text(repository, "demo.yaml", {})


@pytest.mark.parametrize(
    ("recipe", "overrides", "message"),
    [
        (None, {"grpo.learning_rate": 1e-6}, r"grpo\.learning_rate: unknown key; .*valid keys here: seed, prompts_per"),
        (None, {"gropo.beta": 1.0}, r"gropo: unknown key; did you mean 'grpo'\?"),
        (None, {"grpo.beta": "high"}, r"grpo\.beta: .*number.*found 'high'"),
        (None, {"grpo.seed.x": 1}, r"grpo\.seed\.x: seed is the value 42, not a section"),
        (None, {"grpo.micro_batch": 7}, r"micro_batch 7 does not divide"),
        ("dmo", {}, r"recipe: no 'dmo' in recipes/; there is .*demo"),
    ],
)
def test_wrong_params_are_refused(repository: Path, recipe: str | None, overrides: dict[str, object],
                                  message: str) -> None:
    with pytest.raises(ValueError, match=message):
        params_text(repository, recipe, overrides)


def test_nearest_recipe_names_the_keys_that_differ(repository: Path) -> None:
    text = params_text(repository, None, {"compare.seed": 9})
    assert nearest_recipe(repository, text) == ("demo", [{"key": "compare.seed", "recipe": "7", "this run": "9"}])


def test_params_at_hand_run_in_the_clone(repository: Path) -> None:
    with workspace(repository, (repository / "params.yaml").read_text()) as path:
        assert path == repository


def test_a_worktree_has_the_edited_files_the_cache_and_the_checkpoints(repository: Path, tmp_path: Path) -> None:
    dvc(repository, "remote", "add", "-f", "--local", "-d", "shared", str(tmp_path / "remote"))
    (repository / "toy.py").write_text((repository / "toy.py").read_text() + "# edited, not committed\n")
    before = git(repository, "status", "--short"), (repository / "params.yaml").read_bytes()
    text = params_text(repository, None, {"compare.seed": 9})
    with workspace(repository, text) as path:
        assert path != repository and (path / "params.yaml").read_text() == text
        assert (path / "toy.py").read_text().endswith("# edited, not committed\n")
        assert (path / "runs").resolve() == repository / "runs"
        assert changes(path, "train") == [] and changes(path, "compare") == ["param compare"]
        assert dvc(path, "remote", "list").split()[:2] == ["shared", str(tmp_path / "remote")]
    assert (git(repository, "status", "--short"), (repository / "params.yaml").read_bytes()) == before
    with workspace(repository, text) as again:
        assert again == path and (again / "data/train.txt").exists()
    git(repository, "checkout", "-q", "toy.py")
    with workspace(repository, text) as other:
        assert other != path


def test_a_half_made_worktree_is_made_anew_and_an_old_one_goes(repository: Path) -> None:
    text = params_text(repository, None, {"compare.seed": 10})
    with workspace(repository, text) as path:
        (path / ".dvc/config.local").unlink()
        (path / "toy.py").unlink()
    with workspace(repository, text) as path:
        assert (path / "toy.py").exists()
    os.utime(path.with_suffix(".use"), (0, time.time() - workspaces.KEEP_S - 60))
    with workspace(repository, params_text(repository, None, {"compare.seed": 11})) as other:
        assert other.exists() and not path.exists()
        assert str(path) not in git(repository, "worktree", "list")


def test_output_comes_as_it_appears(tmp_path: Path) -> None:
    script = "import time\nfor i in range(3): print(i); time.sleep(0.5)\nprint('a 1%\\ra 99%')\nraise SystemExit(3)"
    seen: dict[str, float] = {}
    status = Processes(1.0).run([sys.executable, "-c", script], tmp_path,
                                lambda line: seen.setdefault(line, time.monotonic()))
    assert status == 3 and list(seen) == ["0", "1", "2", "a 99%"]
    assert seen["2"] - seen["0"] > 0.8


PARENT = f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {STUBBORN!r}])\ntime.sleep(600)"


def test_stop_ends_the_whole_group_even_one_that_does_not_heed_sigterm(tmp_path: Path) -> None:
    processes, up = Processes(grace_s=0.5), threading.Event()
    run = threading.Thread(target=processes.run, args=([sys.executable, "-c", PARENT], tmp_path, lambda line: up.set()))
    run.start()
    assert up.wait(20)
    until(lambda: len(alive(tmp_path)) == 3)  # supervisor, parent, stubborn child
    began = time.monotonic()
    processes.stop()
    run.join(20)
    assert not run.is_alive() and alive(tmp_path) == [] and 0.4 < time.monotonic() - began < 5
    assert processes.run([sys.executable, "-c", "print('no')"], tmp_path, print) != 0  # none starts any more


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_caller_that_is_killed(tmp_path: Path, number: int) -> None:
    script = (f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom flows.processes import *\n"
              f"Processes(0.5).run([sys.executable, '-c', {PARENT!r}], Path({str(tmp_path)!r}), print)")
    caller = subprocess.Popen([sys.executable, "-c", script])
    until(lambda: len(alive(tmp_path)) == 3)
    caller.send_signal(number)
    caller.wait()
    until(lambda: alive(tmp_path) == [], 10)


def test_a_background_process_does_not_outlive_its_command(tmp_path: Path) -> None:
    script = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    began = time.monotonic()
    assert Processes(5.0).run([sys.executable, "-c", script], tmp_path, print) == 0
    assert alive(tmp_path) == [] and time.monotonic() - began < 4
