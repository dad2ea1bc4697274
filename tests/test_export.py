"""`swaralign export verl`: a script that bash runs, with the published values in the launcher's own names."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from swaralign.cli import main
from swaralign.export import INPUTS, LAUNCHER

ROOT = Path(__file__).resolve().parent.parent
HINDI = {  # what the published Hindi launcher sets, but for the longest prompt, of which params.yaml has no key
    "data.train_batch_size=4", "data.train_max_samples=863", "data.val_max_samples=100",
    "data.max_response_length=240", "actor_rollout_ref.model.enable_gradient_checkpointing=false",
    "actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_alpha=16",
    "actor_rollout_ref.model.lora_dtype=float32", "actor_rollout_ref.model.lora.merge=true",
    "actor_rollout_ref.model.target_modules="
    "['q_proj','k_proj','v_proj','o_proj','gate_proj','up_proj','down_proj']",
    "actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_coef=0.08",
    "actor_rollout_ref.actor.kl_loss_type=k3", "actor_rollout_ref.actor.loss_agg_mode=token-mean",
    "actor_rollout_ref.actor.optim.lr=5e-06", "actor_rollout_ref.actor.optim.lr_warmup_steps=10",
    "actor_rollout_ref.actor.optim.weight_decay=0.01", "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.temperature=0.9", "actor_rollout_ref.rollout.top_p=0.95",
    "actor_rollout_ref.rollout.top_k=50", "actor_rollout_ref.rollout.val_kwargs.temperature=0.9",
    "actor_rollout_ref.rollout.val_kwargs.top_p=0.95", "actor_rollout_ref.rollout.val_kwargs.top_k=50",
    "trainer.max_actor_ckpt_to_keep=21",
}
FULL = {
    "data.train_batch_size=4", "data.max_response_length=360",
    "actor_rollout_ref.model.enable_gradient_checkpointing=true", "actor_rollout_ref.actor.kl_loss_coef=0.12",
    "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean", "actor_rollout_ref.actor.optim.lr=1e-06",
    "actor_rollout_ref.actor.optim.weight_decay=0.0", "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.rollout.top_k=-1", "actor_rollout_ref.rollout.temperature=1.0",
}


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone with the outs that are exported, and a checkout of verl-omni whose launcher tells what it was given."""
    root = tmp_path / "a clone"
    for path in INPUTS.values():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()
    launcher = tmp_path / "verl" / LAUNCHER
    launcher.parent.mkdir(parents=True)
    launcher.write_text('env\nprintf "%s\\n" "$@"\n')
    monkeypatch.chdir(root)
    return root


def launched(clone: Path, recipe: str, *arguments: str, smoke: bool = False) -> tuple[dict[str, str], list[str]]:
    """The environment and the overrides that the launcher gets from the script of a recipe."""
    shutil.copytree(ROOT / "recipes", clone / "recipes")
    assert main(["recipe", "use", recipe, *(["--smoke"] if smoke else [])]) == 0
    assert main(["export", "verl", *arguments]) == 0
    told = subprocess.run(["bash", "verl_launch.sh", "trainer.logger=none"], check=True, capture_output=True, text=True,
                          env={"PATH": os.environ["PATH"], "VERL_OMNI": str(clone.parent / "verl")}).stdout.splitlines()
    first = next(number for number, line in enumerate(told) if line.startswith("data."))
    return dict(line.split("=", 1) for line in told[:first]), told[first:]


def test_the_hindi_recipe_is_the_published_launch(clone: Path) -> None:
    environment, given = launched(clone, "qwen3-hindi-grpo")
    assert set(given) >= HINDI
    assert len({override.partition("=")[0] for override in given}) == len(given) and given[-1] == "trainer.logger=none"
    assert {name: environment[name] for name in INPUTS} == {name: str(clone / path) for name, path in INPUTS.items()}
    kept = {name: environment[name] for name in ("TOTAL_TRAINING_STEPS", "TEST_FREQ", "SAVE_FREQ", "SEED", "NUM_GPUS")}
    assert kept == {"TOTAL_TRAINING_STEPS": "400", "TEST_FREQ": "20", "SAVE_FREQ": "20", "SEED": "42", "NUM_GPUS": "1"}
    assert environment["SCORER_URL"] == "http://127.0.0.1:18080/score"


def test_the_recipe_of_all_parameters_has_no_lora(clone: Path) -> None:
    environment, given = launched(clone, "qwen3-grpo", "--scorer-url", "http://scorer:9/score")
    assert set(given) >= FULL and not any("lora" in override for override in given)
    assert (environment["NUM_GPUS"], environment["TOTAL_TRAINING_STEPS"]) == ("2", "500")
    assert environment["SCORER_URL"] == "http://scorer:9/score"


def test_the_smoke_form_is_the_published_smoke(clone: Path) -> None:
    environment, given = launched(clone, "qwen3-hindi-grpo", smoke=True)
    kept = {name: environment[name] for name in ("TOTAL_TRAINING_STEPS", "TEST_FREQ", "SAVE_FREQ")}
    assert kept == {"TOTAL_TRAINING_STEPS": "2", "TEST_FREQ": "-1", "SAVE_FREQ": "1"}
    assert set(given) >= {"trainer.val_before_train=false", "trainer.log_val_generations=0"}


def test_what_cannot_be_exported_is_told(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(ROOT / "recipes", clone / "recipes")
    main(["recipe", "use", "outetts-micro"])
    assert main(["export", "verl"]) == 1
    assert "for rollout.family qwen3_tts, found 'outetts'" in capsys.readouterr().err
    main(["recipe", "use", "demo"])
    params = clone / "params.yaml"
    params.write_text(params.read_text().replace('urls: ["http://127.0.0.1:18080"]', "urls: []"))
    assert main(["export", "verl"]) == 1
    assert "reward.http.urls is empty; name a scorer there, or by --scorer-url" in capsys.readouterr().err
    assert main(["export", "verl", "--scorer-url", "http://h/score", "-o", "given.sh"]) == 0
    (clone / INPUTS["SPK_EMBED_PATH"]).unlink()
    assert main(["export", "verl"]) == 1
    assert "data/speaker/embedding.json not found; `dvc repro speaker`" in capsys.readouterr().err
    assert not (clone / "verl_launch.sh").exists()
