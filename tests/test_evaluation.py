"""Evaluation, with a voice that plays clips of the demo corpus back and the demo's Whisper."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Audio, load_dataset

from swaralign.artifacts import sha256_file
from swaralign.audio import read_audio
from swaralign.evaluation import evaluate_takes, read_prompts, summarise, write_evaluation
from swaralign.flags import FLAGS
from swaralign.params import SamplingParams, WeightsParams
from swaralign.policy.base import Take
from swaralign.rewards.scorer import Scorer, TakeScore
from swaralign.scoring.client import ScorerError
from swaralign.seeds import take_seed
from tests.speech import RATE_HZ, Playback, clips, demo_params, transcriber

ERRORS_ALONE = WeightsParams(error_rate=1.0, mos=0.0, speaker_similarity=0.0)
SAMPLING = SamplingParams(temperature=1.0, top_k=0, top_p=1.0)
FAILING = {
    "a quiet mouse": np.zeros(RATE_HZ, np.float32),
    "a broken mouse": np.full(RATE_HZ, np.nan, np.float32),
    "no mouse": np.zeros(0, np.float32),
}


def voice() -> Playback:
    """Three clips, the last of them cut off, and three takes that fail."""
    waves = dict(clips(3)) | FAILING
    return Playback(waves, truncated=[clips(3)[2][0]])


def prompts() -> list[dict[str, str]]:
    return [{"id": f"p-{index}", "text": text} for index, text in enumerate(voice().waves)]


@pytest.fixture(scope="module")
def scorer() -> Scorer:
    return Scorer(demo_params().reward.model_copy(update={"weights": ERRORS_ALONE}), transcriber())


def evaluate(scorer: Scorer, playback: Playback, **changes: Any) -> pa.Table:
    wanted: dict[str, Any] = {"prompts": prompts(), "draws": 2, "seed": 5, "sampling": SAMPLING,
                              "batch_size": 64} | changes
    return evaluate_takes(playback, scorer=scorer, **wanted)


@pytest.fixture(scope="module")
def table(scorer: Scorer) -> pa.Table:
    return evaluate(scorer, voice())


def test_rows_are_prompt_by_prompt_with_the_seed_of_each_draw(table: pa.Table) -> None:
    rows = table.to_pylist()
    assert [(row["id"], row["draw"]) for row in rows] == [(f"p-{i}", draw) for i in range(6) for draw in range(2)]
    assert [row["seed"] for row in rows] == [take_seed(5, f"p-{i}", draw) for i in range(6) for draw in range(2)]
    assert [row["text"] for row in rows[::2]] == list(voice().waves)


def test_the_voice_is_asked_for_those_draws(scorer: Scorer) -> None:
    playback = voice()
    rows = evaluate(scorer, playback, batch_size=5).to_pylist()
    assert playback.asked == [(row["text"], row["seed"]) for row in rows]


class Elsewhere(Scorer):
    """A scorer that takes no processor of this machine; it answers once `ready` is set."""

    elsewhere = True
    ready = threading.Event()

    def score(self, *takes: Any) -> list[TakeScore]:
        if not self.ready.wait(60):
            raise TimeoutError("nothing was sampled meanwhile")
        return super().score(*takes)


def test_the_next_batch_is_sampled_while_a_scorer_elsewhere_is_asked(table: pa.Table) -> None:
    class Ahead(Playback):
        def rollout(self, *wanted: Any) -> list[Take]:
            if self.asked:
                Elsewhere.ready.set()
            return super().rollout(*wanted)

    scorer = Elsewhere(demo_params().reward.model_copy(update={"weights": ERRORS_ALONE}), transcriber())
    ahead = Ahead(voice().waves, voice().truncated)
    assert evaluate(scorer, ahead, batch_size=5).equals(table)


def test_what_stops_a_scorer_elsewhere_stops_the_evaluation() -> None:
    class Down(Elsewhere):
        def score(self, *takes: Any) -> list[TakeScore]:
            raise ScorerError("no scorer is left")

    with pytest.raises(ScorerError, match="no scorer is left"):
        evaluate(Down(demo_params().reward, transcriber()), voice(), batch_size=5)


def test_spoken_takes_are_scored(table: pa.Table) -> None:
    row = table.to_pylist()[0]
    wave = clips(1)[0][1]
    assert row["wer"] == row["wer_edits"] / row["wer_length"] < 0.5
    assert row["cer"] == row["cer_edits"] / row["cer_length"]
    assert row["composite"] == pytest.approx(1 - row["cer_capped"])
    assert row["transcript"]
    assert row["flags"] == []
    assert row["duration_s"] == len(wave) / RATE_HZ
    assert row["frames"] == len(wave) // 1920
    decoded, sample_rate_hz = read_audio(row["audio"]["bytes"])
    assert sample_rate_hz == RATE_HZ
    np.testing.assert_allclose(decoded, wave, atol=1 / 32000)
    assert row["audio"]["path"] == "p-0-0.flac"


def test_failed_takes_are_kept_and_flagged(table: pa.Table) -> None:
    rows = table.to_pylist()[4::2]
    assert [row["flags"] for row in rows] == [["truncated"], ["silent"], ["nonfinite"], ["empty"]]
    for row in rows:
        assert (row["composite"], row["wer"], row["cer"], row["transcript"]) == (0.0, 1.0, 1.0, None)
        assert row["wer_edits"] == row["wer_length"]
    assert [row["audio"] is None for row in rows] == [False, False, True, True]


def test_table_does_not_depend_on_the_batch(scorer: Scorer, table: pa.Table) -> None:
    assert evaluate(scorer, voice(), batch_size=5).equals(table, check_metadata=True)


def test_seed_reaches_every_take(scorer: Scorer, table: pa.Table) -> None:
    other = evaluate(scorer, voice(), prompts=prompts()[3:], seed=6)
    assert not set(other.column("seed").to_pylist()) & set(table.column("seed").to_pylist())


def test_summary_counts(table: pa.Table) -> None:
    summary = summarise(table)
    rows = table.to_pylist()
    assert (summary["takes"], summary["prompts"], summary["failed"]) == (12, 6, 8)
    assert summary["flags"] == dict.fromkeys(FLAGS, 0) | {"truncated": 2, "silent": 2, "nonfinite": 2, "empty": 2}
    edits, words = (sum(row[f"wer_{part}"] for row in rows) for part in ("edits", "length"))
    assert summary["wer_corpus"] == edits / words
    assert summary["wer_mean"] == pytest.approx(np.mean([row["wer"] for row in rows]))
    assert summary["wer_corpus"] != pytest.approx(summary["wer_mean"])
    assert summary["composite"] == pytest.approx(np.mean([row["composite"] for row in rows]))
    assert summary["duration_s"] == pytest.approx(np.mean([row["duration_s"] for row in rows]))


def write(out: Path, table: pa.Table, tmp_path: Path) -> dict[str, Any]:
    folder = tmp_path / "checkpoint"
    folder.mkdir(exist_ok=True)
    (folder / "weights").write_bytes(b"w")
    inputs = {"checkpoint": folder, "adapter": None, "prompts": folder / "weights"}
    assets = {"base": {"files": {"weights": "0"}}, "asr": {"source": "package", "files": {"model.bin": "1"}}}
    write_evaluation(out, table, demo_params(), assets, inputs)
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


def test_summary_holds_what_the_scores_depend_on(table: pa.Table, tmp_path: Path) -> None:
    summary = write(tmp_path / "out", table, tmp_path)
    sha = hashlib.sha256(b"w").hexdigest()
    assert summary["inputs"] == {"checkpoint": {"weights": sha}, "adapter": None, "prompts": sha}
    assert summary["settings"]["reward"]["asr"]["compute_type"] == "int8"
    assert summary["settings"]["evaluate"]["seed"] == demo_params().evaluate.seed
    assert summary["settings"]["assets"] == {"asr": {"model.bin": "1"}}
    rows = [{key: value for key, value in row.items() if key != "audio"} for row in table.to_pylist()]
    text = json.dumps(rows, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert summary["scores_sha256"] == hashlib.sha256(text.encode()).hexdigest()


def test_two_evaluations_give_equal_bytes(scorer: Scorer, table: pa.Table, tmp_path: Path) -> None:
    write(tmp_path / "one", table, tmp_path)
    write(tmp_path / "two", evaluate(scorer, voice()), tmp_path)
    for name in ("scores.parquet", "summary.json"):
        assert sha256_file(tmp_path / "one" / name) == sha256_file(tmp_path / "two" / name)


def test_scores_load_as_a_dataset_with_audio(table: pa.Table, tmp_path: Path) -> None:
    write(tmp_path / "out", table, tmp_path)
    scores = str(tmp_path / "out" / "scores.parquet")
    dataset = load_dataset("parquet", data_files=scores, split="train", cache_dir=str(tmp_path / "cache"))
    assert dataset.features["audio"] == Audio(sampling_rate=RATE_HZ)
    row = dataset.cast_column("audio", Audio(decode=False))[0]
    assert row["audio"]["bytes"] == table.to_pylist()[0]["audio"]["bytes"]
    assert dataset[11]["flags"] == ["empty"]
    assert dataset[11]["audio"] is None


def write_split(path: Path, count: int) -> Path:
    rows = [{"extra_info": {"id": f"p-{i}", "text": f"text {i}", "index": i}} for i in range(count)]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_first_prompts_are_read_in_order(tmp_path: Path) -> None:
    split = write_split(tmp_path / "validation.parquet", 3)
    assert read_prompts(split, 2) == [{"id": "p-0", "text": "text 0"}, {"id": "p-1", "text": "text 1"}]
    assert len(read_prompts(split)) == 3


def test_too_few_prompts_are_refused(tmp_path: Path) -> None:
    split = write_split(tmp_path / "validation.parquet", 3)
    with pytest.raises(ValueError, match=r"validation\.parquet holds 3 prompts, but 4 are wanted; ask for fewer"):
        read_prompts(split, 4)
