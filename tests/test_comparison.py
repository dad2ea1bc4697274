"""The comparison, against numbers worked out by hand, jiwer and scipy's bootstrap."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import jiwer
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.stats import bootstrap

from swaralign.comparison import (
    METRICS,
    Evaluation,
    compare,
    paired_interval,
    prompt_sums,
    read_evaluations,
    render,
    resample_prompts,
)
from swaralign.params import CompareParams
from swaralign.rewards.text import character_errors, word_errors

PARAMS = CompareParams(confidence=0.95, resamples=10_000, seed=7, catastrophic_wer=0.5)
SETTINGS = {"evaluate": {"seed": 1, "prompts": 4}, "reward": {"asr": {"compute_type": "int8", "window_s": 10.0}}}
WORDS = ["red", "cat", "sat", "blue", "hat", "dog"]


def take(prompt: int, draw: int, text: str, transcript: str | None) -> dict[str, Any]:
    words = word_errors(text, transcript or "", "indic")
    characters = character_errors(text, transcript or "", "indic")
    return {
        "id": f"p-{prompt}", "draw": draw, "seed": 100 * prompt + draw, "text": text, "transcript": transcript,
        "composite": 1 - min(1.0, characters.rate), "wer": words.rate, "cer": characters.rate,
        "wer_edits": words.edits, "wer_length": words.length,
        "cer_edits": characters.edits, "cer_length": characters.length,
        "duration_s": 1.0 + prompt, "flags": ["silent"] if transcript is None else [],
    }


def evaluation(rows: list[dict[str, Any]], settings: dict[str, Any] = SETTINGS) -> Evaluation:
    return Evaluation(pa.Table.from_pylist(rows), {"settings": settings})


def tiny() -> dict[str, Evaluation]:
    """Two prompts with two draws: four words each at the start, the second voice says one of them wrong."""
    texts = ["a b c d", "a b"]
    start = [take(p, d, texts[p], texts[p]) for p in range(2) for d in range(2)]
    other = [take(0, 0, "a b c d", "a b c x"), take(0, 1, "a b c d", "a b c d"),
             take(1, 0, "a b", None), take(1, 1, "a b", "a b")]
    return {"base": evaluation(other), "sft": evaluation(start)}


def random_voices(prompts: int = 60, draws: int = 3) -> dict[str, Evaluation]:
    """Two voices that spoil words at random, one more often; texts of several lengths."""
    rng = np.random.default_rng(0)
    voices: dict[str, list[dict[str, Any]]] = {"sft": [], "grpo": []}
    for prompt in range(prompts):
        text = rng.choice(WORDS, size=rng.integers(1, 9))
        for draw in range(draws):
            for voice, rate in (("sft", 0.4), ("grpo", 0.3)):
                spoilt = np.where(rng.random(len(text)) < rate, rng.choice(WORDS, size=len(text)), text)
                voices[voice].append(take(prompt, draw, " ".join(text), " ".join(spoilt)))
    return {voice: evaluation(rows) for voice, rows in voices.items()}


def test_values_of_a_tiny_case() -> None:
    result = compare(tiny(), "sft", PARAMS)
    assert (result["prompts"], result["draws"], result["confidence"]) == (2, 2, 0.95)
    assert result["sft"] == {
        "composite": 1.0, "cer_corpus": 0.0, "wer_corpus": 0.0, "cer_mean": 0.0, "wer_mean": 0.0,
        "failure_rate": 0.0, "duration_s": 1.5,
    }
    assert result["base"] == pytest.approx({
        "composite": (6 / 7 + 1 + 0 + 1) / 4, "cer_corpus": (1 + 3) / 20, "wer_corpus": (1 + 2) / 12,
        "cer_mean": (1 / 7 + 1) / 4, "wer_mean": (1 / 4 + 1) / 4, "failure_rate": 0.25, "duration_s": 1.5,
    }, abs=1e-6)


def test_interval_of_a_tiny_case() -> None:
    """Resampling two prompts gives the first twice, one each, or the second twice: the ends are the extremes."""
    difference = compare(tiny(), "sft", PARAMS)["base_minus_sft"]
    assert difference["wer_corpus"] == {"difference": 0.25, "low": 0.125, "high": 0.5}
    assert difference["wer_mean"] == {"difference": 0.3125, "low": 0.125, "high": 0.5}
    assert difference["failure_rate"] == {"difference": 0.25, "low": 0.0, "high": 0.5}
    assert difference["duration_s"] == {"difference": 0.0, "low": 0.0, "high": 0.0}


def test_corpus_rates_agree_with_jiwer() -> None:
    voices = random_voices()
    result = compare(voices, "sft", PARAMS)
    for voice, evaluated in voices.items():
        texts, heard = (evaluated.takes.column(name).to_pylist() for name in ("text", "transcript"))
        assert result[voice]["wer_corpus"] == pytest.approx(jiwer.wer(texts, heard), abs=1e-6)
        assert result[voice]["cer_corpus"] == pytest.approx(jiwer.cer(texts, heard), abs=1e-6)


def per_prompt(voice: Evaluation, column: str) -> np.ndarray:
    """(prompts,) sums of a column, by a plain loop."""
    sums: dict[str, float] = {}
    for row in voice.takes.to_pylist():
        sums[row["id"]] = sums.get(row["id"], 0.0) + row[column]
    return np.array([sums[prompt] for prompt in sorted(sums)])


@pytest.mark.parametrize("metric", ["composite", "wer_mean", "cer_mean"])
def test_interval_of_a_mean_agrees_with_scipy(metric: str) -> None:
    voices = random_voices()
    column = metric.removesuffix("_mean")
    gains = (per_prompt(voices["grpo"], column) - per_prompt(voices["sft"], column)) / 3
    expected = bootstrap((gains,), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(1))
    agrees(compare(voices, "sft", PARAMS)["grpo_minus_sft"][metric], gains.mean(), expected.confidence_interval)


@pytest.mark.parametrize("metric", ["wer", "cer"])
def test_interval_of_a_corpus_rate_agrees_with_scipy(metric: str) -> None:
    voices = random_voices()
    columns = [per_prompt(voices[voice], f"{metric}_{part}")
               for voice in ("grpo", "sft") for part in ("edits", "length")]

    def statistic(*columns: np.ndarray, axis: int) -> Any:
        edits, length, start_edits, start_length = (column.sum(axis) for column in columns)
        return edits / length - start_edits / start_length

    expected = bootstrap(columns, statistic, n_resamples=20_000, method="percentile", paired=True,
                         vectorized=True, rng=np.random.default_rng(1))
    found = compare(voices, "sft", PARAMS)["grpo_minus_sft"][f"{metric}_corpus"]
    agrees(found, statistic(*columns, axis=0), expected.confidence_interval)


def agrees(found: dict[str, float], difference: float, interval: Any) -> None:
    """Equal difference; ends within the Monte-Carlo error, a few hundredths of the interval's width."""
    assert found["difference"] == pytest.approx(difference, abs=1e-6)
    tolerance = 0.04 * (interval.high - interval.low)
    assert found["low"] == pytest.approx(interval.low, abs=tolerance)
    assert found["high"] == pytest.approx(interval.high, abs=tolerance)


def test_interval_narrows_as_confidence_falls_and_pairs_prompts() -> None:
    sums = {voice: prompt_sums(evaluated.takes)["composite"] for voice, evaluated in random_voices().items()}
    weights = resample_prompts(60, 10_000, seed=7)
    wide, narrow = (paired_interval(sums["grpo"], sums["sft"], weights, level) for level in (0.95, 0.8))
    assert wide["low"] < narrow["low"] < narrow["difference"] < narrow["high"] < wide["high"]
    same = paired_interval(sums["sft"], sums["sft"], weights, 0.95)
    assert same == {"difference": 0.0, "low": 0.0, "high": 0.0}


def test_resamples_draw_as_many_prompts_from_their_seed() -> None:
    weights = resample_prompts(9, 200, seed=3)
    assert weights.shape == (200, 9)
    assert set(weights.sum(axis=1)) == {9.0}
    assert np.array_equal(weights, resample_prompts(9, 200, seed=3))
    assert not np.array_equal(weights, resample_prompts(9, 200, seed=4))


def test_comparison_tells_what_is_certain() -> None:
    voices = random_voices()
    result = compare(voices, "sft", PARAMS)
    text = render(voices, "sft", result)
    composite = result["grpo_minus_sft"]["composite"]
    assert composite["low"] > 0
    assert "**grpo has a higher composite than sft**" in text
    assert f"**+{composite['difference']:.3f} [+{composite['low']:.3f}, +{composite['high']:.3f}]**" in text
    assert "60 held-out prompts, 3 takes each" in text
    assert "`swaralign listen grpo p-" in text
    turned = {"grpo": voices["sft"], "sft": voices["grpo"]}
    assert "**grpo has a lower composite than sft**" in render(turned, "sft", compare(turned, "sft", PARAMS))


def test_comparison_tells_what_is_not_certain() -> None:
    voices = {"sft": random_voices()["sft"], "grpo": random_voices()["sft"]}
    text = render(voices, "sft", compare(voices, "sft", PARAMS))
    assert "**grpo and sft cannot be told apart by composite**" in text
    assert "whose interval excludes 0: none." in text


def test_every_metric_stands_in_both_tables() -> None:
    result = compare(tiny(), "sft", PARAMS)
    assert set(result["base"]) == set(result["base_minus_sft"]) == set(METRICS)
    text = render(tiny(), "sft", result)
    assert all(text.count(f"| {metric.label} |") == 2 for metric in METRICS.values())
    assert "| failed takes | 25.0 % | 0.0 % |" in text


def test_a_failed_take_and_a_bar_in_a_transcript_are_told() -> None:
    voices = tiny()
    rows = voices["base"].takes.to_pylist()
    rows[0]["transcript"] = "a | b"
    voices["base"] = evaluation(rows)
    text = render(voices, "sft", compare(voices, "sft", PARAMS))
    assert "| (silent) |" in text
    assert "a \\| b" in text


def write(folder: Path, voices: dict[str, Evaluation]) -> None:
    for voice, evaluated in voices.items():
        (folder / voice).mkdir(parents=True)
        audio = pa.array([b"flac"] * len(evaluated.takes))
        pq.write_table(evaluated.takes.append_column("audio", audio), folder / voice / "scores.parquet")
        (folder / voice / "summary.json").write_text(json.dumps(evaluated.summary))


def test_evaluations_are_read_without_their_audio(tmp_path: Path) -> None:
    write(tmp_path, tiny())
    voices = read_evaluations(tmp_path, ["base", "sft"])
    assert list(voices) == ["base", "sft"]
    assert "audio" not in voices["base"].takes.column_names
    assert compare(voices, "sft", PARAMS) == compare(tiny(), "sft", PARAMS)


def spoil(change: dict[str, Any]) -> Evaluation:
    rows = tiny()["sft"].takes.to_pylist()
    rows[2] |= change
    return evaluation(rows)


def with_setting(value: str) -> Evaluation:
    settings: dict[str, Any] = deepcopy(SETTINGS)
    settings["reward"]["asr"]["compute_type"] = value
    return evaluation(tiny()["sft"].takes.to_pylist(), settings)


MISMATCHES = [
    (spoil({"id": "p-9"}), "id of row 2 is 'p-1' and 'p-9'"),
    (spoil({"draw": 1}), "draw of row 2 is 0 and 1"),
    (spoil({"seed": 8}), "seed of row 2 is 100 and 8"),
    (spoil({"text": "a c"}), "text of row 2 is 'a b' and 'a c'"),
    (evaluation(tiny()["sft"].takes.to_pylist()[:3]), "they have 4 and 3 takes"),
    (with_setting("float32"), "reward.asr.compute_type is 'int8' and 'float32'"),
    (evaluation(tiny()["sft"].takes.to_pylist(), {}), "evaluate.prompts is 4 and None"),
]


@pytest.mark.parametrize(("other", "message"), MISMATCHES, ids=[message for _, message in MISMATCHES])
def test_voices_that_cannot_be_compared_are_refused(tmp_path: Path, other: Evaluation, message: str) -> None:
    write(tmp_path, {"base": tiny()["base"], "sft": other})
    with pytest.raises(ValueError, match="base and sft cannot be compared") as error:
        read_evaluations(tmp_path, ["base", "sft"])
    assert message in str(error.value)


def test_missing_evaluation_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"base/scores\.parquet does not exist; `dvc repro evaluate@base` makes it"):
        read_evaluations(tmp_path, ["base", "sft"])
