"""Trackers: the curves, the seed and the resolved params reach one, and keys reach no file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ruamel.yaml import YAML
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from swaralign.artifacts import fingerprint
from swaralign.params import DpoParams, Params, parse_params, runtime
from swaralign.runs import stage_inputs
from swaralign.training.dpo import train_dpo
from swaralign.training.tracking import load_tracker
from tests.voices import PROMPTS, LengthScorer, qwen3_tts


def with_tracker(demo: dict[str, Any], tracker: str) -> Params:
    demo["tracking"] |= {"tracker": tracker, "project": "voices"}
    demo["dpo"] |= {"pairs_per_update": 2, "micro_batch": 2}
    demo["dpo"]["schedule"] |= {"updates": 2, "save_every": 2}
    demo["dpo"]["validation"] |= {"every": 2, "prompts": 1}
    return parse_params(demo)


def pairs() -> list[dict[str, Any]]:
    """Two pairs of two frames a take."""
    codes = np.random.default_rng(0).integers(0, 100, (2, 2, 32)).tolist()
    return [{"text": prompt["text"], "chosen_ids": chosen, "rejected_ids": rejected}
            for prompt, (chosen, rejected) in zip(PROMPTS[:2], codes, strict=True)]


def test_tensorboard_gets_curves_seed_and_params(
    demo: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "key-of-the-environment")
    params, scorer = with_tracker(demo, "tensorboard"), LengthScorer()
    run = tmp_path / "train_dpo" / "0123"
    assert isinstance(params.dpo, DpoParams)
    train_dpo(qwen3_tts(params, max_frames=4), pairs(), PROMPTS[:1], scorer, params.dpo, params.runtime, run,
              load_tracker(params, "train_dpo"))
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    margins = events.Scalars("train/rewards/margins")
    assert [event.step for event in margins] == [1, 2] and margins[0].value == pytest.approx(0, abs=1e-6)
    assert [event.step for event in events.Scalars("eval/composite")] == [0, 2]
    texts = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
    assert texts["seed/text_summary"] == "42" and '"pairs_per_update": 2' in texts["params/text_summary"]
    assert parse_params(YAML(typ="safe").load((run / "params.json").read_text())) == params
    files = [path for path in run.rglob("*") if path.is_file()]
    assert len(files) > 5 and not any(b"key-of-the-environment" in path.read_bytes() for path in files)


def test_a_tracker_that_is_not_installed_is_refused(demo: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"tracker is 'wandb', but its package is not installed: `pip inst.*\[wandb"):
        load_tracker(with_tracker(demo, "wandb"), "train_kto")
    assert load_tracker(with_tracker(demo, "none"), "train_kto").arguments(Path("runs/a/b"))["report_to"] == "none"


@pytest.mark.parametrize("stage", ["train_dpo", "train_kto", "train_grpo"])
def test_whoever_listens_the_run_is_the_same(demo: dict[str, Any], root: Path, tmp_path: Path, stage: str) -> None:
    """The run folder is named by what goes into a stage, and the tracker does not."""
    entry = YAML(typ="safe").load((root / "dvc.yaml").read_text())["stages"][stage]
    graph = tmp_path / "dvc.yaml"
    YAML().dump({"stages": {stage: {"params": entry["params"], "deps": []}}}, graph)
    alone = parse_params(demo)
    heard = alone.model_copy(update={"tracking": with_tracker(demo, "tensorboard").tracking})
    assert alone != heard and fingerprint(stage_inputs(stage, alone, graph)) == fingerprint(
        stage_inputs(stage, heard, graph))
