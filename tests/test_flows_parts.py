"""The parts of the flow that need no server: the graph read from DVC, params and overrides, worktrees, processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from flow_lab import alive, dvc, git, make_repository, two_free_ports, until
from ruamel.yaml import YAML
from toy import STUBBORN

from flows import serve
from flows import workspace as workspaces
from flows.graph import Stage, changes, read_graph
from flows.pipeline import as_many_as_fit
from flows.processes import Processes
from flows.recipe import nearest_recipe, params_text
from flows.workspace import workspace

ROOT = Path(__file__).resolve().parent.parent
TRAININGS = {"train_dpo", "train_kto", "train_grpo"}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small repository after a `dvc repro`."""
    path = make_repository(tmp_path_factory.mktemp("parts") / "repository")
    dvc(path, "repro")
    return path


def test_graph_is_dvcs_own() -> None:
    stages = read_graph(ROOT)
    names = list(stages)
    assert marked(stages, "gpu") == TRAININGS and marked(stages, "outside") == {"assets", "split", "speaker"}
    assert {"assets", "speaker"} <= stages["train_grpo"].upstream and "data/train_grpo" in stages["train_grpo"].outs
    for name, stage in stages.items():
        assert all(names.index(above) < names.index(name) for above in stage.upstream)


def marked(stages: dict[str, Stage], mark: str) -> set[str]:
    return {name for name, stage in stages.items() if getattr(stage, mark)}


def test_as_many_stages_side_by_side_as_have_cores() -> None:
    cores = os.cpu_count() or 1
    assert [as_many_as_fit(threads) for threads in (1, cores, 2 * cores)] == [cores, 1, 1]


def test_marks_may_hold_for_some_params_only(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / ".dvc").mkdir()
    shutil.copyfile(ROOT / "dvc.yaml", tmp_path / "dvc.yaml")
    text = params_text(ROOT, "demo", {"runtime.device": "cuda", "reward.kind": "http"})
    (tmp_path / "params.yaml").write_text(text)
    stages = read_graph(tmp_path)
    scored = {*TRAININGS, "candidates", *(name for name in stages if name.startswith("evaluate@"))}
    assert marked(stages, "gpu") == scored and marked(stages, "outside") == {"assets", "split", "speaker", *scored}

    graph = (tmp_path / "dvc.yaml").read_text()
    (tmp_path / "dvc.yaml").write_text(graph.replace("runtime.device=cuda", "runtime.devise=cuda"))
    with pytest.raises(ValueError, match=r"meta of candidates has 'runtime.devise=cuda'; write true, or KEY=VALUE"):
        read_graph(tmp_path)


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
    assert changes(repository, "train") == ["param grpo.beta", "out data/train.txt deleted"]
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


def test_a_params_file_that_is_no_yaml_is_named(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("grpo: [1, 2\n")
    with pytest.raises(ValueError, match=r"params\.yaml is not valid YAML: "):
        params_text(tmp_path, None, {})


def test_nearest_recipe_names_the_keys_that_differ(repository: Path) -> None:
    text = params_text(repository, None, {"compare.seed": 9})
    expected = ("demo", [{"key": "compare.seed", "recipe": "7", "this run": "9"}])
    assert nearest_recipe(repository, text) == expected
    (repository / "recipes/draft.yaml").write_text("# nothing yet\n")
    assert nearest_recipe(repository, text) == expected
    (repository / "recipes/draft.yaml").unlink()


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
        assert changes(path, "train") == [] and changes(path, "compare") == ["param compare.seed"]
        assert dvc(path, "remote", "list").split()[:2] == ["shared", str(tmp_path / "remote")]
    assert (git(repository, "status", "--short"), (repository / "params.yaml").read_bytes()) == before
    with workspace(repository, text) as again:
        assert again == path and (again / "data/train.txt").exists()
    git(repository, "checkout", "-q", "toy.py")
    with workspace(repository, text) as other:
        assert other != path


def test_a_worktree_has_the_assets_that_git_does_not_hold(repository: Path) -> None:
    text = params_text(repository, "outetts-english", {})
    weights = repository / "models/utmos/utmos_state_dict.pt"
    weights.parent.mkdir(parents=True)
    weights.write_text("weights")
    with workspace(repository, text) as path:
        assert (path / "models/utmos/utmos_state_dict.pt").read_text() == "weights"
        assert not (path / "models/reference.wav").exists()
    (repository / "models/reference.wav").write_text("clip")
    with workspace(repository, text) as again:  # what has come since is there too
        assert again == path and (path / "models/reference.wav").read_text() == "clip"
    shutil.rmtree(repository / "models")


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


def test_a_worktree_whose_making_was_killed_is_made_anew(repository: Path) -> None:
    """git still has an entry of it, locked."""
    text = params_text(repository, None, {"compare.seed": 12})
    with workspace(repository, text) as path:
        git(repository, "worktree", "lock", str(path))
    shutil.rmtree(path)
    with workspace(repository, text) as again:
        assert again == path and (path / "toy.py").exists()


def test_a_worktree_needs_neither_the_clones_index_nor_its_hooks(repository: Path) -> None:
    """Somebody commits, or another run begins, at this moment; DVC's hooks would check out before there is a cache."""
    hook = repository / ".git/hooks/post-checkout"
    hook.write_text("#!/bin/sh\nexit 1\n")
    hook.chmod(0o755)
    os.utime(repository / "toy.py")  # so that git wants to refresh its index
    index = (repository / ".git/index").read_bytes()
    (repository / ".git/index.lock").touch()
    try:
        with workspace(repository, params_text(repository, None, {"compare.seed": 13})) as path:
            assert (path / "toy.py").exists()
    finally:
        (repository / ".git/index.lock").unlink()
        hook.unlink()
    assert (repository / ".git/index").read_bytes() == index


def test_a_file_edited_in_the_second_of_a_commit_is_taken_as_it_is(tmp_path: Path) -> None:
    """git knows it from the committed one, equally long, by the time of the index alone."""
    git(tmp_path, "init", "-q")
    git(tmp_path, "config", "core.trustctime", "false")  # which no test can set
    file, then = tmp_path / "x.py", (10**9, 10**9)
    file.write_text("x = 1\n")
    os.utime(file, then)
    git(tmp_path, "add", "x.py")
    git(tmp_path, "-c", "user.name=x", "-c", "user.email=x@x", "commit", "-qm", "one")
    file.write_text("x = 2\n")
    for path in (file, tmp_path / ".git/index"):
        os.utime(path, then)
    commit = workspaces._snapshot(tmp_path)
    assert git(tmp_path, "show", f"{commit}:x.py") == "x = 2\n"


def test_a_port_needs_another_one_after_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for port in ("65535", "0", "x"):
        monkeypatch.setattr(sys, "argv", ["serve", "--port", port])
        with pytest.raises(SystemExit):
            serve.main()
        assert f"'{port}' is not a port from 1 to 65534" in capsys.readouterr().err


def timed(script: str, folder: Path) -> tuple[int, list[tuple[str, float]]]:
    """The exit status of a Python program, and its lines with when they came."""
    seen: list[tuple[str, float]] = []
    status = Processes(1.0).run([sys.executable, "-c", script], folder,
                                lambda line: seen.append((line, time.monotonic())))
    return status, seen


def test_output_comes_as_it_appears(tmp_path: Path) -> None:
    script = ("import time\nfor i in range(3): print(i); time.sleep(2)\n"
              "for state in (1, 1, 50, 99): print(f'\\r{state} %', end=''); time.sleep(2)\n"
              "print('\\r    \\rdone\\n\\ndone')\nraise SystemExit(3)")
    status, seen = timed(script, tmp_path)
    assert status == 3 and [line for line, _ in seen] == ["0", "1", "2", "1 %", "50 %", "99 %", "done"]
    at = dict(seen)
    assert at["2"] - at["0"] > 2 and at["50 %"] - at["1 %"] > 2 and at["99 %"] - at["50 %"] > 1


def test_a_progress_bar_does_not_flood_the_log(tmp_path: Path) -> None:
    status, seen = timed("import time, tqdm\nfor _ in tqdm.tqdm(range(20)): time.sleep(0.05)", tmp_path)
    assert status == 0 and ["0/20" in seen[0][0], "20/20" in seen[-1][0], len(seen)] == [True, True, 2]


PARENT = f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {STUBBORN!r}])\ntime.sleep(600)"


def test_stop_ends_the_whole_group_even_one_that_does_not_heed_sigterm(tmp_path: Path) -> None:
    processes, up = Processes(grace_s=0.5), threading.Event()
    run = threading.Thread(target=processes.run, args=([sys.executable, "-c", PARENT], tmp_path, lambda line: up.set()))
    run.start()
    assert up.wait(60)
    until(lambda: len(alive(tmp_path)) == 3)  # supervisor, parent, stubborn child
    began = time.monotonic()
    processes.stop()
    run.join(60)
    assert not run.is_alive() and alive(tmp_path) == [] and time.monotonic() - began > 0.4
    assert processes.run([sys.executable, "-c", "print('no')"], tmp_path, print) != 0  # none starts any more


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_caller_that_is_killed(tmp_path: Path, number: int) -> None:
    script = (f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom flows.processes import *\n"
              f"Processes(0.5).run([sys.executable, '-c', {PARENT!r}], Path({str(tmp_path)!r}), print)")
    caller = subprocess.Popen([sys.executable, "-c", script])
    until(lambda: len(alive(tmp_path)) == 3)
    caller.send_signal(number)
    caller.wait()
    until(lambda: alive(tmp_path) == [], 60)


def test_a_background_process_does_not_outlive_its_command(tmp_path: Path) -> None:
    script = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    began = time.monotonic()
    assert Processes(300.0).run([sys.executable, "-c", script], tmp_path, print) == 0
    assert alive(tmp_path) == [] and time.monotonic() - began < 60


class Recovers(BaseHTTPRequestHandler):
    """A server that is broken for two requests, and then has no limit of any name."""

    left = 2

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        Recovers.left -= 1
        self.send_response(500 if Recovers.left >= 0 else 200)
        self.end_headers()
        self.wfile.write(b'{"lease_id": "00000000-0000-0000-0000-000000000000", "limits": []}')


def test_a_slot_is_asked_for_until_the_server_answers(tmp_path: Path) -> None:
    port = two_free_ports()
    script = ("import time\nfrom flows import run\nrun.RETRY_S, began = 0.1, time.monotonic()\n"
              "with run.gpu_slot(lambda: time.monotonic() > began + 60, print): print('in')")
    env = {**os.environ, "PREFECT_API_URL": f"http://{serve.HOST}:{port}/api", "PREFECT_HOME": str(tmp_path),
           "PREFECT_CLIENT_CSRF_SUPPORT_ENABLED": "false"}
    command = [sys.executable, "-u", "-c", script]
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert "ConnectError" in process.stdout.readline()
        with HTTPServer((serve.HOST, port), Recovers) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            lines = [line for line in process.stdout if "ConnectError" not in line]
            server.shutdown()
    finally:
        serve.stop(process)
    broken, still_broken, last = lines
    assert "500" in broken and "500" in still_broken and last == "in\n"
