"""The candidate pool, with a voice that plays clips of the demo corpus back and the demo's Whisper."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from datasets import Audio, load_dataset

from swaralign.artifacts import sha256_file
from swaralign.audio import read_audio
from swaralign.candidates import build_pool, plan_chunks, write_pool
from swaralign.params import CandidatesParams, WeightsParams
from swaralign.rewards.scorer import Scorer
from swaralign.seeds import take_seed
from tests.speech import RATE_HZ, Playback, clips, demo_params, transcriber

PROMPTS = [{"id": f"p-{index}", "text": text} for index, (text, _) in enumerate(clips(3))]


@pytest.fixture(scope="module")
def scorer() -> Scorer:
    weights = WeightsParams(error_rate=1.0, mos=0.0, speaker_similarity=0.0)
    return Scorer(demo_params().reward.model_copy(update={"weights": weights}), transcriber())


def params(**changes: Any) -> CandidatesParams:
    wanted = {"temperatures": [0.7, 1.2], "per_temperature": 2, "save_every": 4} | changes
    return demo_params().candidates.model_copy(update=wanted)


def voice() -> Playback:
    return Playback({**dict(clips(3)), "a quiet mouse": np.zeros(RATE_HZ, np.float32)})


class Stopped(Exception):
    """What stops a pool in its tests."""


class StopsAt(Playback):
    """A voice that is stopped when it is asked for its n-th batch."""

    def __init__(self, batches: int) -> None:
        super().__init__(voice().waves)
        self.left = batches

    def rollout(self, *args: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise Stopped
        return super().rollout(*args)


def test_plan_has_every_draw_once_with_its_own_seed() -> None:
    chunks = plan_chunks(PROMPTS, params())
    assert [(temperature, len(draws)) for temperature, draws in chunks] == [(0.7, 4), (0.7, 2), (1.2, 4), (1.2, 2)]
    draws = [(temperature, draw.id, draw.draw, draw.seed) for temperature, draws in chunks for draw in draws]
    seed = params().seed
    assert draws == [(t, row["id"], n, take_seed(seed, row["id"], str(t), n))
                     for t in (0.7, 1.2) for row in PROMPTS for n in (0, 1)]
    assert len({seed for *_, seed in draws}) == 12


def test_rows_of_a_pool(tmp_path: Path, scorer: Scorer) -> None:
    prompts = [*PROMPTS, {"id": "quiet", "text": "a quiet mouse"}]
    pool = build_pool(voice(), prompts, scorer, params(), tmp_path)
    assert pool.column("id").to_pylist() == [row["id"] for row in prompts for _ in range(4)]
    assert pool.column("temperature").to_pylist() == [0.7, 0.7, 1.2, 1.2] * 4
    assert pool.column("draw").to_pylist() == [0, 1] * 8
    assert pool.column("completion_ids").to_pylist() == [[index] for index in (0, 1, 2, 3) for _ in range(4)]
    first, last = pool.slice(0, 1).to_pylist()[0], pool.slice(15, 1).to_pylist()[0]
    assert first["composite"] == pytest.approx(1 - first["cer_capped"]) and first["frames"] > 10
    wave, rate = read_audio(first["audio"]["bytes"])
    assert rate == RATE_HZ and np.abs(wave - voice().waves[PROMPTS[0]["text"]]).max() < 1e-4
    assert (last["composite"], last["flags"], last["transcript"]) == (0.0, ["silent"], None)


def test_a_stopped_pool_scores_what_is_missing_and_ends_with_the_same_bytes(tmp_path: Path, scorer: Scorer) -> None:
    whole = build_pool(voice(), PROMPTS, scorer, params(), tmp_path / "whole")
    with pytest.raises(Stopped):
        build_pool(StopsAt(2), PROMPTS, scorer, params(), tmp_path / "stopped")
    again = voice()
    resumed = build_pool(again, PROMPTS, scorer, params(), tmp_path / "stopped")
    assert len(again.asked) == 6  # of 12: the first two chunks were there
    for name, pool in (("a", whole), ("b", resumed)):
        write_pool(tmp_path / name, pool, {"params": {}})
    for file in ("candidates.parquet", "manifest.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_written_pool(tmp_path: Path, scorer: Scorer) -> None:
    prompts = [PROMPTS[0], {"id": "quiet", "text": "a quiet mouse"}]
    write_pool(tmp_path / "out", build_pool(voice(), prompts, scorer, params(), tmp_path / "run"), {"deps": {"x": "y"}})
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (manifest["takes"], manifest["prompts"], manifest["failed"], manifest["flags"]["silent"]) == (8, 2, 4, 4)
    table = pq.read_table(tmp_path / "out" / "candidates.parquet").drop_columns(["audio"]).to_pandas()
    assert manifest["composite_mean"] == pytest.approx(
        {str(t): rows["composite"].mean() for t, rows in table.groupby("temperature")})
    assert manifest["files"] == {"candidates.parquet": sha256_file(tmp_path / "out" / "candidates.parquet")}
    assert manifest["inputs"] == {"deps": {"x": "y"}}
    data = load_dataset("parquet", data_files=str(tmp_path / "out" / "candidates.parquet"), split="train",
                        cache_dir=str(tmp_path / "cache"))
    assert isinstance(data.features["audio"], Audio) and data.features["audio"].sampling_rate == RATE_HZ


def test_a_text_that_cannot_be_scored_is_refused_before_any_take(tmp_path: Path, scorer: Scorer) -> None:
    asked = voice()
    with pytest.raises(ValueError, match=r"prompt bad: the text 'Hmm\.' is empty"):
        build_pool(asked, [*PROMPTS, {"id": "bad", "text": "Hmm."}], scorer, params(), tmp_path)
    assert asked.asked == []
