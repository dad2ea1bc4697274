"""GRPO on the micro base voice: what users rely on, with rewards that need no ASR."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Audio, load_dataset
from peft import PeftModel
from safetensors.torch import load_file

from swaralign import artifacts
from swaralign.official import Qwen3TTSForConditionalGeneration
from swaralign.params import GrpoParams, Params, load_params
from swaralign.training import common
from swaralign.training.common import StartsAtReference, write_training
from swaralign.training.curves import GRPO_COLUMNS, curve_rows
from swaralign.training.grpo import plan_prompts, train_grpo
from tests.voices import BASE, FAMILIES, PROMPTS, ROOT, LengthScorer, adapter, difference


@pytest.fixture(scope="module")
def params() -> Params:
    return load_params(ROOT / "recipes" / "demo.yaml")


def settings(params: Params, **changes: Any) -> GrpoParams:
    """Two prompts x four takes an update, two updates, unless changed; `schedule` and `validation` merge in."""
    data = params.grpo.model_dump()
    data |= {"prompts_per_update": 2, "samples_per_prompt": 4, "micro_batch": 8, "iterations": 1, "beta": 0.05}
    data["schedule"] |= {"updates": 2, "warmup_updates": 0, "save_every": 1, "learning_rate": 3e-3}
    data["schedule"] |= changes.pop("schedule", {})
    data["validation"] |= {"every": 2, "prompts": 2} | changes.pop("validation", {})
    return GrpoParams.model_validate(data | changes)


def train(params: Params, folder: Path, **changes: Any) -> common.Training:
    voice = FAMILIES[changes.pop("family", "qwen3_tts")](params, changes.pop("max_frames", 96))
    scorer: Any = LengthScorer()
    return train_grpo(voice, PROMPTS, PROMPTS, scorer, settings(params, **changes), params.runtime, folder)


@pytest.fixture(scope="module")
def trained(params: Params, tmp_path_factory: pytest.TempPathFactory) -> common.Training:
    return train(params, tmp_path_factory.mktemp("run"))


def rows(result: common.Training) -> list[dict[str, Any]]:
    return curve_rows(result.trainer.state.log_history, GRPO_COLUMNS)


def test_the_policy_is_its_reference_before_the_first_update(trained: common.Training) -> None:
    first, second = rows(trained)
    assert first["kl"] == pytest.approx(0, abs=1e-7) and first["clip_fraction"] == 0
    assert second["kl"] > 0


def test_a_policy_that_starts_elsewhere_stops_the_run() -> None:
    class State:
        global_step = 1

    check = StartsAtReference({"kl": 1e-5, "rewards/chosen": 1e-4})
    for key, value in (("kl", 0.2), ("rewards/chosen", -0.2), ("kl", float("nan"))):
        with pytest.raises(RuntimeError, match=rf"{key} is {value} before the first update, and must be 0"):
            check.on_log(None, State(), None, {key: value})
    check.on_log(None, State(), None, {"kl": 0.0, "rewards/chosen": 0.0})
    State.global_step = 2
    check.on_log(None, State(), None, {"kl": 0.2})


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_accumulation_is_exact(params: Params, tmp_path: Path, aggregation: str) -> None:
    """Eight takes in one forward pass or in four of two make the same update."""
    whole = train(params, tmp_path / "a", micro_batch=8, loss_aggregation=aggregation, schedule={"updates": 1})
    parts = train(params, tmp_path / "b", micro_batch=2, loss_aggregation=aggregation, schedule={"updates": 1})
    assert rows(whole)[0]["grad_norm"] == pytest.approx(rows(parts)[0]["grad_norm"], rel=1e-4)
    # Adam's first step has the size of the learning rate whatever the gradient's; a tiny gradient may flip its sign.
    same = [(adapter(whole)[n] - value).abs() < 1e-6 for n, value in adapter(parts).items()]
    assert torch.cat([s.flatten() for s in same]).float().mean() > 0.99


def test_validation_leaves_training_bit_equal(params: Params, trained: common.Training, tmp_path: Path) -> None:
    other = train(params, tmp_path, validation={"every": 1, "prompts": 4})
    assert difference(adapter(trained), adapter(other)) == 0
    assert rows(trained) == rows(other)


def test_validation_draws_the_same_takes_at_every_step(trained: common.Training) -> None:
    table = trained.validation.table()
    keys = {step: [] for step in (0, 2)}
    for row in table.select(["step", "id", "seed", "frames"]).to_pylist():
        keys[row["step"]].append((row["id"], row["seed"]))
    assert keys[0] == keys[2] and [key for key, _ in keys[0]] == ["p0", "p1"]


def test_resumed_equals_uninterrupted(params: Params, trained: common.Training, tmp_path: Path) -> None:
    """A run cut while it wrote its second checkpoint, and resumed, ends where the uninterrupted one did."""
    source = Path(trained.trainer.args.output_dir)
    shutil.copytree(source, tmp_path / "run")
    weights = tmp_path / "run" / "checkpoint-2" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    (tmp_path / "run" / "validation" / "step-000002.parquet").unlink()
    resumed = train(params, tmp_path / "run")
    assert resumed.trainer.state.global_step == 2
    assert common.newest_checkpoint(tmp_path / "run") == tmp_path / "run" / "checkpoint-2"  # written over, and whole
    assert difference(adapter(trained), adapter(resumed)) < 1e-6
    assert [row["reward"] for row in rows(resumed)] == pytest.approx([row["reward"] for row in rows(trained)])
    assert resumed.validation.table().equals(trained.validation.table())


def test_the_newest_whole_checkpoint_is_chosen(trained: common.Training, tmp_path: Path) -> None:
    shutil.copytree(trained.trainer.args.output_dir, tmp_path / "run")
    assert common.newest_checkpoint(tmp_path / "run") == tmp_path / "run" / "checkpoint-2"
    weights = tmp_path / "run" / "checkpoint-2" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    assert common.newest_checkpoint(tmp_path / "run") == tmp_path / "run" / "checkpoint-1"
    (tmp_path / "run" / "checkpoint-1" / common.COMPLETE).unlink()
    assert common.newest_checkpoint(tmp_path / "run") is None


def test_the_exported_adapter_loads_onto_the_official_class(trained: common.Training, tmp_path: Path) -> None:
    write_training(tmp_path / "out", trained, {"params": {}, "deps": {}})
    official = Qwen3TTSForConditionalGeneration.from_pretrained(str(BASE), dtype=torch.float32).eval()
    x = torch.randn(2, 9, 256, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = official.talker.codec_head(official.talker.model(inputs_embeds=x).last_hidden_state)
        loaded = PeftModel.from_pretrained(official, str(tmp_path / "out" / "adapter")).eval()
        theirs = loaded.talker.codec_head(loaded.talker.model(inputs_embeds=x).last_hidden_state)
        ours = trained.trainer.model.eval()
        expected = ours.talker.codec_head(ours.talker.model(inputs_embeds=x).last_hidden_state)
    torch.testing.assert_close(theirs, expected, atol=1e-6, rtol=0)
    assert (theirs - plain).abs().max() > 1e-3


def test_what_a_training_writes(trained: common.Training, tmp_path: Path) -> None:
    inputs = {"params": {"grpo": {"seed": 1}}, "deps": {}}
    write_training(tmp_path / "out", trained, inputs)
    names = ["adapter/adapter_config.json", "adapter/adapter_model.safetensors", "curves.csv", "manifest.json",
             "validation.csv", "validation_samples.parquet"]
    assert sorted(artifacts.sha256_tree(tmp_path / "out")) == names
    curves = (tmp_path / "out" / "curves.csv").read_text().splitlines()
    assert curves[0].split(",") == list(GRPO_COLUMNS) and len(curves) == 3
    assert [line.split(",")[0] for line in (tmp_path / "out" / "validation.csv").read_text().splitlines()] == [
        "step", "0", "2"]
    assert str(BASE.parent) not in (tmp_path / "out" / "manifest.json").read_text()
    assert len(load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")) == 70
    takes = load_dataset("parquet", data_files=str(tmp_path / "out" / "validation_samples.parquet"), split="train",
                         cache_dir=str(tmp_path / "cache")).cast_column("audio", Audio(decode=False))
    assert takes["step"] == [0, 0, 2, 2] and takes[0]["audio"]["bytes"][:4] == b"fLaC"


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_learnable_reward_goes_up(params: Params, tmp_path: Path, family: str) -> None:
    """Sixteen takes an update, eight updates: takes get longer, since that is what is rewarded."""
    result = train(params, tmp_path, family=family, samples_per_prompt=8, micro_batch=16, beta=0.0, max_frames=40,
                   schedule={"updates": 8, "save_every": 8, "learning_rate": 5e-3}, validation={"every": 8})
    reward = [row["reward"] for row in rows(result)]
    assert np.mean(reward[-3:]) > np.mean(reward[:3]) + 0.03
    assert np.isfinite([row["grad_norm"] for row in rows(result)]).all()


def test_two_updates_from_one_rollout_may_clip(params: Params, tmp_path: Path) -> None:
    result = train(params, tmp_path, iterations=2, schedule={"updates": 2, "save_every": 2, "learning_rate": 5e-2})
    first, second = rows(result)
    assert first["clip_fraction"] == 0 and second["clip_fraction"] > 0 and second["reward"] is None


def test_the_plan_lasts_the_run_and_never_repeats_a_prompt_in_a_batch(params: Params) -> None:
    prompts = [{"id": str(i), "text": str(i)} for i in range(7)]
    grpo = settings(params, schedule={"updates": 5})
    plan = plan_prompts(prompts, grpo)
    assert len(plan) == 10 and plan == plan_prompts(prompts, grpo)
    assert len({row["id"] for row in plan[:6]}) == 6
    batches = [plan[i : i + 2] for i in range(0, 10, 2)]
    assert all(a["id"] != b["id"] for a, b in batches)
    longer = plan_prompts(prompts, settings(params, schedule={"updates": 6}))
    assert longer[:10] == plan


def test_a_split_smaller_than_a_batch_is_refused(params: Params) -> None:
    with pytest.raises(ValueError, match="prompts_per_update is 2, the split has 1 prompts"):
        plan_prompts(PROMPTS[:1], settings(params))
