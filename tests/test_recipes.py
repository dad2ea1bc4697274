"""The shipped recipes: params.yaml is the demo, and choosing one never loses edits."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from swaralign.cli import main
from swaralign.params import Params, load_params
from swaralign.recipes import smoke

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.fixture
def clone(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the recipes and the demo as params.yaml, as a clone has them."""
    shutil.copytree(root / "recipes", tmp_path / "recipes")
    shutil.copy(root / "recipes" / "demo.yaml", tmp_path / "params.yaml")
    demo = (tmp_path / "params.yaml").read_text(encoding="utf-8")
    (tmp_path / "recipes" / "other.yaml").write_text(demo + "# other\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_params_as_shipped_are_the_demo(root: Path) -> None:
    """In the last commit, so that edits of params.yaml do not fail it."""
    shipped = [
        subprocess.run(["git", "show", f"HEAD:{path}"], cwd=root, check=True, capture_output=True).stdout
        for path in ("params.yaml", "recipes/demo.yaml")
    ]
    assert shipped[0] == shipped[1]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_smoke_form_differs_in_four_values(path: Path, tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text(smoke(path), encoding="utf-8")
    full, short = load_params(path), load_params(tmp_path / "params.yaml")
    schedule, validation = short.grpo.schedule, short.grpo.validation
    assert (schedule.updates, schedule.save_every, schedule.warmup_updates, validation.prompts) == (2, 1, 0, 0)
    lines = zip(path.read_text(encoding="utf-8").splitlines(), smoke(path).splitlines(), strict=True)
    already = full.grpo.schedule.warmup_updates == 0
    assert len([pair for pair in lines if pair[0] != pair[1]]) == 4 - already
    restored = short.grpo.model_copy(update={"schedule": full.grpo.schedule, "validation": full.grpo.validation})
    assert short.model_copy(update={"grpo": restored}) == full


def value(params: Params, key: str) -> Any:
    found: Any = params
    for name in key.split("/"):
        found = found[name] if isinstance(found, dict) else getattr(found, name)
    return found


PINNED = {
    "assets/base/id": "Qwen/Qwen3-TTS-12Hz-0.6B-Base",
    "assets/base/revision": "5d83992436eae1d760afd27aff78a71d676296fc",
    "assets/base/files/model.safetensors": "180b3b10eb1c9f1b4db7806d5475bae3071c0243c299d49926bab1da3b6946f6",
    "assets/base/files/speech_tokenizer/model.safetensors":
        "836b7b357f5ea43e889936a3709af68dfe3751881acefe4ecf0dbd30ba571258",
    "assets/asr/id": "openai/whisper-large-v3-turbo",
    "assets/asr/revision": "41f01f3fe87f28c78e2fbf8b568835947dd65ed9",
}
SAME = {"rollout/language": "auto", "reward/kind": "local", "reward/metric": "cer", "reward/weights/error_rate": 1.0,
        "reward/weights/mos": 0.0, "reward/weights/speaker_similarity": 0.0, "grpo/seed": 42, "grpo/iterations": 1,
        "grpo/epsilon": 0.2, "grpo/scale_by_std": True, "grpo/schedule/max_grad_norm": 1.0,
        "grpo/schedule/warmup_updates": 10, "grpo/schedule/save_every": 20, "grpo/validation/every": 20,
        "grpo/validation/prompts": 100, "grpo/prompts_per_update": 4}
PUBLISHED = {
    "qwen3-hindi-grpo": PINNED | SAME | {
        "assets/adapter/id": "akashicmarga/qwen3-tts-hindi-lora",
        "assets/adapter/revision": "a8718cac15b5a40bd4926b47d0854162ff32010a",
        "assets/prompts/id": "ai4bharat/indicvoices_r",
        "assets/prompts/revision": "5f4495c91d500742a58d1be2ab07d77f73c0acf8",
        "split/config": "Hindi", "split/id_prefix": "indicvoices-hi", "split/scenario": "Read",
        "split/window_rows": 1000, "split/min_duration_s": 1.0, "split/max_duration_s": 14.0, "split/min_snr_db": 20.0,
        "split/expected_train": 863, "split/held_out": 100,
        "merge/orientation": "peft", "merge/scale": 2.0, "merge/expected_modules": 231,
        "rollout/max_frames": 240, "rollout/base_frames": 240, "reward/text_rule": "indic", "reward/asr/language": "hi",
        "grpo/samples_per_prompt": 4, "grpo/trainable": "lora", "grpo/lora/r": 8, "grpo/lora/alpha": 16,
        "grpo/schedule/updates": 400, "grpo/schedule/learning_rate": 5e-6, "grpo/schedule/weight_decay": 0.01,
        "grpo/beta": 0.08, "grpo/loss_aggregation": "token",
        **{f"grpo/{of}sampling/{key}": sampled for of in ("", "validation/")
           for key, sampled in {"temperature": 0.9, "top_k": 50, "top_p": 0.95}.items()},
    },
    "qwen3-grpo": PINNED | SAME | {
        "rollout/max_frames": 360, "rollout/base_frames": 360, "grpo/samples_per_prompt": 8, "grpo/trainable": "full",
        "grpo/num_processes": 2, "grpo/schedule/updates": 500, "grpo/schedule/learning_rate": 1e-6,
        "grpo/schedule/weight_decay": 0.0, "grpo/beta": 0.12, "grpo/loss_aggregation": "sequence",
        **{f"grpo/{of}sampling/{key}": sampled for of in ("", "validation/")
           for key, sampled in {"temperature": 1.0, "top_k": 0, "top_p": 1.0}.items()},
    },
}


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in PUBLISHED.items() for key in keys])
def test_a_published_value_stands_in_its_recipe(name: str, key: str) -> None:
    params = load_params(ROOT / "recipes" / f"{name}.yaml")
    if "/files/" in key:
        asset, _, file = key.partition("/files/")
        assert value(params, asset).files[file] == PUBLISHED[name][key]
    else:
        assert value(params, key) == PUBLISHED[name][key]


def test_the_published_base_has_its_eleven_files() -> None:
    files = load_params(ROOT / "recipes" / "qwen3-hindi-grpo.yaml").assets.base.files
    assert len(files) == 11 and all(files.values())
    assert load_params(ROOT / "recipes" / "qwen3-grpo.yaml").assets.base.files == files


def test_list_marks_the_current_one(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "* demo" in lines
    assert "  other" in lines
    assert len(lines) == len(list(clone.glob("recipes/*.yaml")))


def test_use_copies_the_recipe(clone: Path) -> None:
    assert main(["recipe", "use", "other"]) == 0
    assert (clone / "params.yaml").read_bytes() == (clone / "recipes" / "other.yaml").read_bytes()


def test_use_of_the_smoke_form_and_back(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "use", "other", "--smoke"]) == 0
    assert load_params().grpo.schedule.updates == 2
    main(["recipe", "list"])
    assert "* other (smoke)" in capsys.readouterr().out.splitlines()
    assert main(["recipe", "use", "other"]) == 0
    assert (clone / "params.yaml").read_bytes() == (clone / "recipes" / "other.yaml").read_bytes()


def test_use_without_params(clone: Path) -> None:
    (clone / "params.yaml").unlink()
    assert main(["recipe", "use", "demo"]) == 0
    assert (clone / "params.yaml").read_bytes() == (clone / "recipes" / "demo.yaml").read_bytes()


def test_use_keeps_edits_unless_forced(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edited = (clone / "params.yaml").read_text(encoding="utf-8") + "# mine\n"
    (clone / "params.yaml").write_text(edited, encoding="utf-8")
    assert main(["recipe", "use", "other"]) == 1
    assert "params.yaml has edits that no recipe holds" in capsys.readouterr().err
    assert (clone / "params.yaml").read_text(encoding="utf-8") == edited
    assert main(["recipe", "use", "other", "--force"]) == 0
    assert (clone / "params.yaml").read_text(encoding="utf-8").endswith("# other\n")


def test_use_of_an_unknown_recipe(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (clone / "params.yaml").read_bytes()
    assert main(["recipe", "use", "dmo"]) == 1
    assert "no recipe 'dmo'; there is demo" in capsys.readouterr().err
    assert (clone / "params.yaml").read_bytes() == before


def test_use_of_a_broken_recipe(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (clone / "params.yaml").read_bytes()
    (clone / "recipes" / "broken.yaml").write_text("grpo: {}\n", encoding="utf-8")
    assert main(["recipe", "use", "broken"]) == 1
    assert "broken.yaml is not valid" in capsys.readouterr().err
    assert (clone / "params.yaml").read_bytes() == before


def test_outside_a_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["recipe", "list"]) == 1
    assert "no recipes in recipes/; run this in the root of a clone" in capsys.readouterr().err
