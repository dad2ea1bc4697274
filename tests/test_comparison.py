"""The comparison, against numbers worked out by hand, jiwer and scipy's bootstrap."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import jiwer
import numpy as np
import pytest
from evaluations import PARAMS, evaluation, random_voices, settings, take, tiny, write
from scipy.stats import bootstrap, permutation_test

from swaralign.comparison import (
    METRICS,
    Evaluation,
    all_takes,
    compare,
    differences_csv,
    is_certain,
    prompt_sums,
    read_evaluations,
)
from swaralign.paired import bootstrap_interval, resample_prompts, sign_flip_p, swap_prompts
from swaralign.report.markdown import render


def test_values_of_a_tiny_case() -> None:
    result = compare(tiny(), "sft", PARAMS)
    assert (result["prompts"], result["draws"], result["confidence"]) == (2, 2, 0.95)
    assert result["sft"] == {
        "composite": 1.0, "cer_corpus": 0.0, "wer_corpus": 0.0, "second_wer_corpus": 0.0, "cer_mean": 0.0,
        "wer_mean": 0.0, "mos": 2.5, "speaker_similarity": 0.55, "catastrophic_rate": 0.0, "failure_rate": 0.0,
        "duration_s": 1.5,
    }
    assert result["base"] == pytest.approx({
        "composite": (6 / 7 + 1 + 0 + 1) / 4, "cer_corpus": (1 + 3) / 20, "wer_corpus": (1 + 2) / 12,
        "second_wer_corpus": (1 + 2) / 12, "cer_mean": (1 / 7 + 1) / 4, "wer_mean": (1 / 4 + 1) / 4,
        "mos": (2 + 2 + 3) / 3, "speaker_similarity": (0.5 + 0.6 + 0.6) / 3, "catastrophic_rate": 0.25,
        "failure_rate": 0.25, "duration_s": 1.5,
    }, abs=1e-6)


def test_differences_of_a_tiny_case() -> None:
    """Resampling two prompts gives the first twice, one each, or the second twice: the ends are the extremes.

    Of the four ways to swap two prompts, two give the observed difference of the rate, either way.
    """
    found = compare(tiny(), "sft", PARAMS)["base_minus_sft"]
    assert found["wer_corpus"] == {"difference": 0.25, "low": 0.125, "high": 0.5, "p": 0.5}
    assert found["wer_mean"] == {"difference": 0.3125, "low": 0.125, "high": 0.5, "p": 0.5}
    assert found["failure_rate"] == {"difference": 0.25, "low": 0.0, "high": 0.5, "p": 1.0}
    assert found["duration_s"] == {"difference": 0.0, "low": 0.0, "high": 0.0, "p": 1.0}


def test_a_take_is_a_catastrophe_from_the_set_wer_on_or_when_it_failed() -> None:
    heard = ["a b c d", "a b c x", "a b x x", None]  # WER 0, 0.25, 0.5, failed
    takes = evaluation([take(0, draw, "a b c d", each) for draw, each in enumerate(heard)]).takes
    for wer, expected in ((0.25, 3), (0.5, 2), (0.51, 1), (2.0, 1)):
        assert prompt_sums(takes, wer)["catastrophic_rate"].tolist() == [[expected, 4]]


def test_a_metric_that_nothing_measured_is_left_out() -> None:
    voices = {name: evaluation([row | {"mos": None} for row in each.takes.to_pylist()])
              for name, each in tiny().items()}
    without = {name: Evaluation(each.takes.drop_columns(
        [column for column in each.takes.column_names if column.startswith("second_")]), each.summary)
        for name, each in voices.items()}
    result = compare(without, "sft", PARAMS)
    gone = {"mos", "second_wer_corpus"}
    assert set(result["base"]) == set(result["sft"]) == set(result["base_minus_sft"]) == set(METRICS) - gone
    text = render(without, "sft", result)
    assert "| MOS, predicted |" not in text and "second ASR, corpus" not in text
    assert "No second ASR was set" in text


def test_takes_that_nothing_transcribed_have_no_rates_and_no_catastrophes() -> None:
    """As from scorers that answer with a score alone."""
    unheard = {"transcript": None, "flags": [], "second_transcript": None}
    rates = [name for name in tiny()["sft"].takes.column_names if "wer" in name or "cer" in name]
    voices = {name: evaluation([row | unheard | dict.fromkeys(rates) for row in each.takes.to_pylist()])
              for name, each in tiny().items()}
    result = compare(voices, "sft", PARAMS)
    assert set(result["base"]) == {"composite", "mos", "speaker_similarity", "failure_rate", "duration_s"}
    assert result["base"]["failure_rate"] == 0.0
    assert "(not transcribed)" in render(voices, "sft", result)


def test_a_voice_whose_takes_all_failed_has_no_similarity() -> None:
    voices = tiny()
    voices["base"] = evaluation([take(p, d, text, None) for p, text in enumerate(["a b c d", "a b"]) for d in range(2)])
    result = compare(voices, "sft", PARAMS)
    assert "speaker_similarity" in result["sft"] and "speaker_similarity" not in result["base"]
    assert "speaker_similarity" not in result["base_minus_sft"]
    assert "| speaker similarity |  | 0.550 |" in render(voices, "sft", result)


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
    found = compare(voices, "sft", PARAMS)["grpo_minus_sft"][metric]
    agrees(found, gains.mean(), expected.confidence_interval)
    test = permutation_test((gains,), np.mean, permutation_type="samples", n_resamples=20_000,
                            rng=np.random.default_rng(1))
    assert found["p"] == pytest.approx(test.pvalue, abs=0.01)


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


@pytest.mark.parametrize(("prompts", "start"), [(8, "sft"), (40, "dpo")])
def test_p_value_of_a_corpus_rate_agrees_with_scipy(prompts: int, start: str) -> None:
    """8 prompts: every swap, in both; 40: at random, in both. Voices that are close, so that p is neither 0 nor 1."""
    voices = random_voices(prompts, draws=2, voices=(start, "kto"))
    mine, theirs = (prompt_sums(each.takes, 0.5)["wer_corpus"] for each in voices.values())
    both = np.concatenate([mine, theirs])

    def statistic(first: np.ndarray, second: np.ndarray, axis: int) -> Any:
        rates = (sums[..., 0] / sums[..., 1] for sums in (both[first].sum(axis - 1), both[second].sum(axis - 1)))
        return next(rates) - next(rates)

    pairs = np.arange(prompts), np.arange(prompts) + prompts
    expected = permutation_test(pairs, statistic, permutation_type="samples", n_resamples=20_000, vectorized=True,
                                rng=np.random.default_rng(1))
    found = sign_flip_p(mine, theirs, swap_prompts(prompts, 20_000, seed=7))
    assert 0.02 < expected.pvalue < 0.98
    assert found == pytest.approx(expected.pvalue, abs=1e-12 if prompts == 8 else 0.015)


def test_interval_narrows_as_confidence_falls_and_pairs_prompts() -> None:
    sums = {voice: prompt_sums(each.takes, 0.5)["composite"] for voice, each in random_voices().items()}
    weights = resample_prompts(60, 10_000, seed=7)
    (low, high), (lower, higher) = (bootstrap_interval(sums["grpo"], sums["sft"], weights, at) for at in (0.8, 0.95))
    assert lower < low < high < higher
    assert bootstrap_interval(sums["sft"], sums["sft"], weights, 0.95) == (0.0, 0.0)
    assert sign_flip_p(sums["sft"], sums["sft"], swap_prompts(60, 100, seed=7)) == 1.0


def test_resamples_without_a_measured_take_are_left_out() -> None:
    voice, start = np.array([[3.0, 1.0], [0.0, 0.0]]), np.array([[2.0, 1.0], [2.0, 1.0]])
    weights = np.array([[2.0, 0.0], [1.0, 1.0], [0.0, 2.0]])
    assert bootstrap_interval(voice, start, weights, 0.95) == (1.0, 1.0)


def test_swaps_are_all_ways_or_the_observed_one_and_random_ones() -> None:
    assert swap_prompts(2, 4, seed=1).tolist() == [[0, 0], [1, 0], [0, 1], [1, 1]]
    swaps = swap_prompts(30, 200, seed=3)
    assert swaps.shape == (201, 30) and not swaps[0].any() and set(swaps.flat) == {0.0, 1.0}
    assert np.array_equal(swaps, swap_prompts(30, 200, seed=3))
    assert not np.array_equal(swaps, swap_prompts(30, 200, seed=4))


def test_resamples_draw_as_many_prompts_from_their_seed() -> None:
    weights = resample_prompts(9, 200, seed=3)
    assert weights.shape == (200, 9)
    assert set(weights.sum(axis=1)) == {9.0}
    assert np.array_equal(weights, resample_prompts(9, 200, seed=3))
    assert not np.array_equal(weights, resample_prompts(9, 200, seed=4))


def test_comparison_tells_what_is_certain() -> None:
    voices = random_voices()
    result = compare(voices, "sft", PARAMS)
    text = render(voices, "sft", result, missing=["dpo"])
    found = result["grpo_minus_sft"]["composite"]
    assert found["low"] > 0 and found["p"] == pytest.approx(1 / 10_001, abs=1e-6)
    assert text.splitlines()[2].startswith("- **grpo has a higher composite than sft**: ")
    assert f"+{found['difference']:.3f} [+{found['low']:.3f}, +{found['high']:.3f}], p < 0.001" in text
    assert "Other metrics better: CER, corpus; WER, corpus; WER by the second ASR, corpus;" in text
    assert "60 held-out prompts, 3 takes each" in text and "Not evaluated: dpo." in text
    assert "`swaralign listen grpo p-" in text
    turned = {"grpo": voices["sft"], "sft": voices["grpo"]}
    worse = render(turned, "sft", compare(turned, "sft", PARAMS))
    assert "**grpo has a lower composite than sft**" in worse
    assert "Other metrics better: none. Worse: CER, corpus;" in worse


def test_comparison_tells_what_is_not_certain() -> None:
    voices = {"sft": random_voices()["sft"], "grpo": random_voices()["sft"]}
    text = render(voices, "sft", compare(voices, "sft", PARAMS))
    assert "**grpo and sft cannot be told apart by composite**" in text
    assert "Other metrics better: none. Worse: none." in text
    assert not any(line.startswith("|") and "**" in line for line in text.splitlines())


def test_of_few_prompts_nothing_is_certain() -> None:
    """The interval of prompts that all moved alike is a point, but their signs may well be chance."""
    voices = {name: evaluation(voice.takes.to_pylist()[:3]) for name, voice in random_voices().items()}
    result = compare(voices, "sft", PARAMS)
    found = result["grpo_minus_sft"]["composite"]
    assert found["low"] == found["difference"] == found["high"] != 0 and found["p"] == 1
    assert not is_certain(found, PARAMS.confidence)
    text = render(voices, "sft", result)
    assert "**grpo and sft cannot be told apart by composite**" in text and "better: none. Worse: none." in text
    assert [is_certain({"low": 0.1, "high": 0.2, "p": p}, 0.95) for p in (0.05, 0.051)] == [True, False]


def test_every_metric_stands_in_each_table() -> None:
    voices = random_voices(prompts=12, voices=("base", "sft", "dpo", "kto", "grpo"))
    result = compare(voices, "sft", PARAMS)
    assert list(result)[4:] == [*voices, *(f"{voice}_minus_sft" for voice in voices if voice != "sft")]
    text = render(voices, "sft", result)
    assert all(text.count(f"\n| {metric.label} |") == 5 for metric in METRICS.values())
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert max(line.count("|") for line in tables) == 7 and max(map(len, tables)) < 160


def test_tables_and_files_hold_the_same_numbers() -> None:
    voices = tiny()
    result = compare(voices, "sft", PARAMS)
    assert "| failed takes | 25.0 % | 0.0 % |" in render(voices, "sft", result)
    rows = list(csv.DictReader(differences_csv(result, list(voices), "sft").splitlines()))
    assert [row["metric"] for row in rows] == list(METRICS) and {row["voice"] for row in rows} == {"base"}
    for row in rows:
        values = {name: float(row[name]) for name in ("difference", "low", "high", "p")}
        assert values == result["base_minus_sft"][row["metric"]]
    takes = all_takes(voices)
    assert takes.column("voice").to_pylist() == ["base"] * 4 + ["sft"] * 4
    assert takes.drop_columns("voice").slice(4).to_pylist() == voices["sft"].takes.to_pylist()


def test_the_start_and_another_voice_are_needed() -> None:
    for names in (["base"], ["sft"]):
        with pytest.raises(ValueError, match=f"sft and one more voice are needed to compare, there is {names[0]}"):
            compare({name: tiny()[name] for name in names}, "sft", PARAMS)


def test_a_failed_take_and_a_bar_in_a_transcript_are_told() -> None:
    voices = tiny()
    rows = voices["base"].takes.to_pylist()
    rows[0]["transcript"] = "a | b\\c\n<b>"
    voices["base"] = evaluation(rows)
    text = render(voices, "sft", compare(voices, "sft", PARAMS))
    assert "| (silent) |" in text
    assert "a \\| b\\\\c \\<b>" in text


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
    changed = settings()
    changed["reward"]["asr"]["compute_type"] = value
    return evaluation(tiny()["sft"].takes.to_pylist(), changed)


MISMATCHES = [
    (spoil({"id": "p-9"}), "id of row 2 is 'p-1' and 'p-9'"),
    (spoil({"draw": 1}), "draw of row 2 is 0 and 1"),
    (spoil({"seed": 8}), "seed of row 2 is 100 and 8"),
    (spoil({"text": "a c"}), "text of row 2 is 'a b' and 'a c'"),
    (evaluation(tiny()["sft"].takes.to_pylist()[:3]), "they have 4 and 3 takes"),
    (with_setting("float32"), "reward.asr.compute_type is 'int8' and 'float32'"),
    (evaluation(tiny()["sft"].takes.to_pylist(), settings() | {"assets": {"asr": {"model.bin": "cd34"}}}),
     "assets.asr.model.bin is 'ab12' and 'cd34'"),
    (evaluation(tiny()["sft"].takes.to_pylist(), speaker="other"), "the speaker is '5eed' and 'other'"),
    (evaluation(tiny()["sft"].takes.to_pylist(), settings() | {"evaluate": {}}), "evaluate.prompts is 50 and None"),
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


def test_the_plot_of_differences_has_a_row_for_every_metric(root: Path) -> None:
    template = json.loads((root / ".dvc" / "plots" / "intervals.json").read_text(encoding="utf-8"))
    assert template["facet"]["row"]["sort"] == list(METRICS)
