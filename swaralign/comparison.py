"""Voices compared on the same prompts with the same draws: every metric, and each difference to the start policy.

Every metric is a ratio of sums over prompts: composite over takes, or edits over words; `paired` makes intervals and
p-values of them.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from swaralign.flags import is_failed
from swaralign.paired import bootstrap_interval, difference, resample_prompts, sign_flip_p, swap_prompts
from swaralign.params import CompareParams

VOICES, START = ("base", "sft", "dpo", "kto", "grpo"), "sft"  # everywhere in this order; what the others started from
KEY = ("id", "draw", "seed", "text")  # what makes two takes comparable
SCORES, SUMMARY = "scores.parquet", "summary.json"  # what `evaluate` writes of a voice
DECIMALS = 6  # of the JSON: beyond them lies the order of sums


@dataclass(frozen=True)
class Metric:
    """A metric as it is told: `better` is higher, lower or neither; `kind` is share, points or seconds."""

    label: str
    better: str
    kind: str


METRICS = {
    "composite": Metric("composite", "higher", "points"),
    "cer_corpus": Metric("CER, corpus", "lower", "share"),
    "wer_corpus": Metric("WER, corpus", "lower", "share"),
    "second_wer_corpus": Metric("WER by the second ASR, corpus", "lower", "share"),
    "cer_mean": Metric("CER, mean of takes", "lower", "share"),
    "wer_mean": Metric("WER, mean of takes", "lower", "share"),
    "mos": Metric("MOS, predicted", "higher", "points"),
    "speaker_similarity": Metric("speaker similarity", "higher", "points"),
    "catastrophic_rate": Metric("catastrophic failures", "lower", "share"),
    "failure_rate": Metric("failed takes", "lower", "share"),
    "duration_s": Metric("seconds a take", "neither", "seconds"),
}


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` wrote about a voice: its takes (scores.parquet without audio) and its summary."""

    takes: pa.Table
    summary: Mapping[str, Any]


def read_evaluations(folder: Path, voices: Sequence[str]) -> dict[str, Evaluation]:
    """The evaluation of each voice, in that order. Raises ValueError if they cannot be compared."""
    evaluations = {}
    for voice in voices:
        scores = folder / voice / SCORES
        if not scores.is_file():
            raise ValueError(f"{scores} does not exist; `dvc repro evaluate@{voice}` makes it")
        columns = [name for name in pq.read_schema(scores).names if name != "audio"]
        summary = json.loads((folder / voice / SUMMARY).read_text(encoding="utf-8"))
        evaluations[voice] = Evaluation(pq.read_table(scores, columns=columns), summary)
    for one, other in pairwise(voices):
        check_comparable(one, evaluations[one], other, evaluations[other])
    return evaluations


def evaluated(folder: Path) -> list[str]:
    """Those of VOICES that have an evaluation in the folder, in that order."""
    return [voice for voice in VOICES if (folder / voice / SCORES).is_file()]


def check_comparable(one: str, first: Evaluation, other: str, second: Evaluation) -> None:
    """Raise ValueError, naming the first mismatch, unless both have the same settings, speaker, prompts and draws."""
    mine, theirs = (dict(_leaves({**each.summary["settings"], "the speaker": each.summary["inputs"]["speaker"]}))
                    for each in (first, second))
    for key in sorted(mine | theirs):
        if mine.get(key) != theirs.get(key):
            raise _mismatch(one, other, f"{key} is {mine.get(key)!r} and {theirs.get(key)!r}")
    if len(first.takes) != len(second.takes):
        raise _mismatch(one, other, f"they have {len(first.takes)} and {len(second.takes)} takes")
    keys = (evaluation.takes.select(KEY).to_pylist() for evaluation in (first, second))
    for row, (left, right) in enumerate(zip(*keys, strict=True)):
        for column in KEY:
            if left[column] != right[column]:
                raise _mismatch(one, other, f"{column} of row {row} is {left[column]!r} and {right[column]!r}")


def compare(evaluations: Mapping[str, Evaluation], start: str, params: CompareParams) -> dict[str, Any]:
    """Metrics of each voice, and for each but `start` the difference to it with its percentile interval and p-value.

    Returns {"prompts", "draws", "confidence", "catastrophic_wer", VOICE: {metric: value}, VOICE_minus_START: {metric:
    {"difference", "low", "high", "p"}}}. A metric that was not measured of any take of a voice is left out there.
    Resamples and swaps come from `params.seed` alone and are the same for every metric and voice. Raises ValueError if
    there is nothing to compare with `start`.
    """
    others = [voice for voice in evaluations if voice != start]
    if start not in evaluations or not others:
        raise ValueError(f"{start} and one more voice are needed to compare, there is {', '.join(evaluations)}")
    sums = {name: prompt_sums(each.takes, params.catastrophic_wer) for name, each in evaluations.items()}
    takes = evaluations[start].takes
    prompts = len(takes.column("id").unique())
    weights = resample_prompts(prompts, params.resamples, params.seed)
    swaps = swap_prompts(prompts, params.resamples, params.seed)
    result: dict[str, Any] = {"prompts": prompts, "draws": len(takes) // prompts, "confidence": params.confidence,
                              "catastrophic_wer": params.catastrophic_wer}
    for voice, metrics in sums.items():
        result[voice] = {name: _round(each[:, 0].sum() / each[:, 1].sum()) for name, each in metrics.items()}
    for voice in others:
        result[minus(voice, start)] = {
            name: _paired(sums[voice][name], sums[start][name], weights, swaps, params.confidence)
            for name in METRICS if name in sums[voice] and name in sums[start]
        }
    return result


def minus(voice: str, start: str) -> str:
    """The key of a result under which the differences of a voice to the start stand."""
    return f"{voice}_minus_{start}"


def measured(result: Mapping[str, Any], voices: Sequence[str]) -> dict[str, Metric]:
    """The metrics, in order, that at least one of the voices has in a result of `compare`."""
    return {name: metric for name, metric in METRICS.items() if any(name in result[voice] for voice in voices)}


def prompt_sums(takes: pa.Table, catastrophic_wer: float) -> dict[str, np.ndarray]:
    """Of each metric that was measured at all, in the order of METRICS: (prompts, 2) sums over a prompt's takes.

    Prompts stand in the order of their ids. A take where a metric is null adds to neither sum.
    """
    _, prompt = np.unique(takes.column("id").to_numpy(), return_inverse=True)
    metrics = {}
    for name in METRICS:
        above, below = _ratio(takes, name, catastrophic_wer)
        null = np.isnan(above) | np.isnan(below)
        sums = [np.bincount(prompt, np.where(null, 0.0, part)) for part in (above, below)]
        if not null.all():
            metrics[name] = np.stack(sums, axis=1)
    return metrics


def per_prompt(takes: pa.Table, column: str) -> dict[str, float]:
    """The mean of a column over each prompt's takes, by prompt id, in order of ids."""
    ids, prompt = np.unique(takes.column("id").to_numpy(), return_inverse=True)
    means = np.bincount(prompt, _numbers(takes, column)) / np.bincount(prompt)
    return dict(zip(map(str, ids), means.tolist(), strict=True))


def all_takes(evaluations: Mapping[str, Evaluation]) -> pa.Table:
    """The takes of all voices, one voice after the other, the first column its name in `voice`."""
    tables = [each.takes.add_column(0, "voice", pa.array([voice] * len(each.takes), pa.string()))
              for voice, each in evaluations.items()]
    return pa.concat_tables(tables).replace_schema_metadata(None)  # it tells of the audio column, which is not there


def differences_csv(result: Mapping[str, Any], voices: Sequence[str], start: str) -> str:
    """The differences of a result as CSV: voice, metric, difference, low, high, p."""
    rows = [{"voice": voice, "metric": name, **found}
            for voice in voices if voice != start for name, found in result[minus(voice, start)].items()]
    text = io.StringIO()
    writer = csv.DictWriter(text, ("voice", "metric", "difference", "low", "high", "p"), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def is_certain(found: Mapping[str, float], confidence: float) -> bool:
    """Whether a difference's interval excludes 0 and its p-value agrees: the bootstrap of few prompts is too narrow."""
    return (found["low"] > 0 or found["high"] < 0) and found["p"] <= 1 - confidence + 1e-9


def _paired(
    voice: np.ndarray, start: np.ndarray, weights: np.ndarray, swaps: np.ndarray, confidence: float
) -> dict[str, float]:
    low, high = bootstrap_interval(voice, start, weights, confidence)
    found = {"difference": difference(voice, start), "low": low, "high": high, "p": sign_flip_p(voice, start, swaps)}
    return {name: _round(value) for name, value in found.items()}


def _ratio(takes: pa.Table, name: str, catastrophic_wer: float) -> tuple[np.ndarray, np.ndarray]:
    """What each take adds to a metric's numerator and denominator."""
    ones = np.ones(len(takes))
    failed = np.array([is_failed(flags) for flags in takes.column("flags").to_pylist()])
    if name == "failure_rate":
        return failed.astype(float), ones
    if name == "catastrophic_rate":
        wer = _numbers(takes, "wer")
        bad = (failed | (wer >= catastrophic_wer)).astype(float)
        return np.where(np.isnan(wer), np.nan, bad), ones
    if name.endswith("_corpus"):
        units = name.removesuffix("_corpus")
        return _numbers(takes, f"{units}_edits"), _numbers(takes, f"{units}_length")
    return _numbers(takes, name.removesuffix("_mean")), ones


def _numbers(takes: pa.Table, column: str) -> np.ndarray:
    """A column as float64, nulls as not a number; all of them if there is no such column."""
    if column not in takes.column_names:
        return np.full(len(takes), np.nan)
    return takes.column(column).cast(pa.float64()).to_numpy()


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _mismatch(one: str, other: str, what: str) -> ValueError:
    return ValueError(
        f"the evaluations of {one} and {other} cannot be compared: {what}; run both again with the same params "
        f"(`dvc repro --force evaluate@{one} evaluate@{other}`)"
    )


def _round(value: float) -> float:
    return round(float(value), DECIMALS)
