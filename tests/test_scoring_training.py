"""A training whose scorer dies stops, and goes on from its last checkpoint once the scorer is back."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from swaralign.params import GrpoParams, load_params, parse_params
from swaralign.rewards.scorer import load_scorer
from swaralign.scoring.client import ScorerError
from swaralign.training import common
from swaralign.training.curves import curve_rows
from swaralign.training.grpo import train_grpo
from tests.scoring import Server, launch, process, settings, wait_ready
from tests.voices import PROMPTS, ROOT, qwen3_tts

SCORER = "tests.scorers:Seconds"


def train(url: str, folder: Path) -> common.Training:
    """Two updates of two prompts x two takes, a checkpoint after each."""
    demo = load_params(ROOT / "recipes" / "demo.yaml").model_dump()
    demo["reward"] |= {"kind": "http", "http": settings(url).model_dump()}
    params = parse_params(demo)
    data: dict[str, Any] = params.grpo.model_dump()
    data |= {"prompts_per_update": 2, "samples_per_prompt": 2, "micro_batch": 4, "iterations": 1}
    data["schedule"] |= {"updates": 2, "warmup_updates": 0, "save_every": 1}
    data["validation"] |= {"every": 2, "prompts": 1}
    grpo = GrpoParams.model_validate(data)
    return train_grpo(qwen3_tts(params), PROMPTS, PROMPTS, load_scorer(params), grpo, params.runtime, folder)


def kill_after_first_checkpoint(server: Server, folder: Path) -> None:
    while not (folder / "checkpoint-1" / common.COMPLETE).is_file():
        time.sleep(0.005)
    server.process.kill()


def test_a_training_stopped_by_a_dead_scorer_resumes_from_its_last_checkpoint(tmp_path: Path) -> None:
    first = launch(SCORER)
    wait_ready(first.url)
    threading.Thread(target=kill_after_first_checkpoint, args=(first, tmp_path), daemon=True).start()
    with pytest.raises(ScorerError, match=rf"no scorer is left for take '.*': {first.url}: .*attempts: 3"):
        train(first.url, tmp_path)
    first.process.wait()
    before = common.newest_checkpoint(tmp_path)
    assert before == tmp_path / "checkpoint-1"
    with process(SCORER, port=int(first.url.rpartition(":")[2])) as second:
        assert second.url == first.url
        resumed = train(second.url, tmp_path)
    rows = curve_rows(resumed.trainer.state.log_history, resumed.columns)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["reward"] < 0.5 and row["wer"] is None for row in rows)  # seconds less 3, and nobody listened
