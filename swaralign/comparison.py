"""Voices compared on the same prompts with the same draws: each difference to the start policy with its interval.

Every metric is a ratio of sums over prompts: composite over takes, or edits over words. The paired bootstrap draws
whole prompts, not takes, with replacement (Efron & Tibshirani 1993, chapter 13), the same ones for both voices, and
takes the percentiles of the difference: draws of one prompt are not independent evidence.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from swaralign.params import CompareParams

KEY = ("id", "draw", "seed", "text")  # what makes two takes comparable
DECIMALS = 6  # of the JSON: beyond them lies the order of sums


@dataclass(frozen=True)
class Metric:
    """A metric as it is told: `better` is higher, lower or neither; `kind` is share, points or seconds."""

    label: str
    better: str
    kind: str


METRICS = {
    "composite": Metric("composite, mean", "higher", "points"),
    "cer_corpus": Metric("CER, corpus", "lower", "share"),
    "wer_corpus": Metric("WER, corpus", "lower", "share"),
    "cer_mean": Metric("CER, mean of takes", "lower", "share"),
    "wer_mean": Metric("WER, mean of takes", "lower", "share"),
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
        scores = folder / voice / "scores.parquet"
        if not scores.is_file():
            raise ValueError(f"{scores} does not exist; `dvc repro evaluate@{voice}` makes it")
        columns = [name for name in pq.read_schema(scores).names if name != "audio"]
        summary = json.loads((folder / voice / "summary.json").read_text(encoding="utf-8"))
        evaluations[voice] = Evaluation(pq.read_table(scores, columns=columns), summary)
    for one, other in pairwise(voices):
        check_comparable(one, evaluations[one], other, evaluations[other])
    return evaluations


def check_comparable(one: str, first: Evaluation, other: str, second: Evaluation) -> None:
    """Raise ValueError, naming the first mismatch, unless both have the same settings, prompts, draws and seeds."""
    mine, theirs = (dict(_leaves(evaluation.summary["settings"])) for evaluation in (first, second))
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
    """Metrics of each voice, and for each but `start` the difference to it with its percentile interval.

    Returns {"prompts", "draws", "confidence", VOICE: {metric: value}, VOICE_minus_START: {metric: {"difference",
    "low", "high"}}}. The resamples come from `params.seed` alone and are the same for every metric and voice.
    """
    sums = {voice: prompt_sums(evaluation.takes) for voice, evaluation in evaluations.items()}
    takes = evaluations[start].takes
    prompts = len(takes.column("id").unique())
    weights = resample_prompts(prompts, params.resamples, params.seed)
    result: dict[str, Any] = {"prompts": prompts, "draws": len(takes) // prompts, "confidence": params.confidence}
    for voice, metrics in sums.items():
        result[voice] = {name: _round(ratio.sum(0)[0] / ratio.sum(0)[1]) for name, ratio in metrics.items()}
    for voice in (voice for voice in sums if voice != start):
        result[f"{voice}_minus_{start}"] = {
            name: paired_interval(sums[voice][name], sums[start][name], weights, params.confidence) for name in METRICS
        }
    return result


def prompt_sums(takes: pa.Table) -> dict[str, np.ndarray]:
    """Of each metric, the (prompts, 2) numerators and denominators: summed over a prompt's takes."""
    ids = takes.column("id").to_numpy()
    _, prompt = np.unique(ids, return_inverse=True)
    failed = np.array([transcript is None for transcript in takes.column("transcript").to_pylist()], dtype=float)

    def ratio(numerator: str | np.ndarray, denominator: str | None = None) -> np.ndarray:
        above = takes.column(numerator).to_numpy() if isinstance(numerator, str) else numerator
        below = takes.column(denominator).to_numpy() if denominator else np.ones(len(takes))
        return np.stack([np.bincount(prompt, above), np.bincount(prompt, below)], axis=1)

    return {
        "composite": ratio("composite"),
        "cer_corpus": ratio("cer_edits", "cer_length"),
        "wer_corpus": ratio("wer_edits", "wer_length"),
        "cer_mean": ratio("cer"),
        "wer_mean": ratio("wer"),
        "failure_rate": ratio(failed),
        "duration_s": ratio("duration_s"),
    }


def resample_prompts(prompts: int, resamples: int, seed: int) -> np.ndarray:
    """(resamples, prompts) float64: how often each prompt stands in a draw of as many prompts with replacement."""
    shares = np.full(prompts, 1 / prompts)
    return np.random.default_rng(seed).multinomial(prompts, shares, size=resamples).astype(np.float64)


def paired_interval(
    voice: np.ndarray, start: np.ndarray, weights: np.ndarray, confidence: float
) -> dict[str, float]:
    """The difference of two ratios of sums over the same prompts, and its percentile interval.

    `voice`, `start`: (prompts, 2) numerators and denominators; `weights`: (resamples, prompts).
    """
    difference = voice.sum(0)[0] / voice.sum(0)[1] - start.sum(0)[0] / start.sum(0)[1]
    (above, below), (start_above, start_below) = (weights @ voice).T, (weights @ start).T
    tail = (1 - confidence) / 2
    low, high = np.quantile(above / below - start_above / start_below, [tail, 1 - tail])
    return {"difference": _round(difference), "low": _round(low), "high": _round(high)}


def render(evaluations: Mapping[str, Evaluation], start: str, result: Mapping[str, Any]) -> str:
    """The comparison as Markdown: what is certain, the numbers, how to read them, and three prompts to hear."""
    voices = list(evaluations)
    others = [voice for voice in voices if voice != start]
    level = f"{100 * result['confidence']:g} %"
    lines = ["# Comparison", ""]
    lines += [_headline(voice, start, result, level) for voice in reversed(others)]
    lines += ["", f"{result['prompts']} held-out prompts, {result['draws']} takes each by every voice.", ""]
    lines += _table(["", *voices], [[metric.label, *(_value(result[voice][name], metric) for voice in voices)]
                                    for name, metric in METRICS.items()])
    lines += ["", f"## Differences to {start}, with {level} intervals", ""]
    lines += _table(["", *others, "better is"], [
        [metric.label, *(_cell(result[f"{voice}_minus_{start}"][name], metric) for voice in others), metric.better]
        for name, metric in METRICS.items()])
    lines += ["", *_reading(start, level), "", *_examples(evaluations, start, others[-1])]
    return "\n".join(lines) + "\n"


def excludes_zero(interval: Mapping[str, float]) -> bool:
    """Whether both ends of an interval lie on one side of 0."""
    return interval["low"] > 0 or interval["high"] < 0


def _headline(voice: str, start: str, result: Mapping[str, Any], level: str) -> str:
    intervals = result[f"{voice}_minus_{start}"]
    composite = intervals["composite"]
    certain = [metric.label for name, metric in METRICS.items()
               if excludes_zero(intervals[name]) and name != "composite"]
    if not excludes_zero(composite):
        claim = f"{voice} and {start} cannot be told apart by composite"
    else:
        claim = f"{voice} has a {'higher' if composite['low'] > 0 else 'lower'} composite than {start}"
    return (
        f"- **{claim}**: {result[voice]['composite']:.3f} against {result[start]['composite']:.3f}, a difference of "
        f"{_cell(composite, METRICS['composite'])} ({level} interval). Other differences whose interval excludes 0: "
        f"{'; '.join(certain) or 'none'}."
    )


def _reading(start: str, level: str) -> list[str]:
    return [
        f"An interval is the middle {level} of the difference when the prompts are drawn again, with replacement, for "
        f"both voices alike; where it excludes 0 it stands in **bold**. Differences of rates are in percentage points. "
        "A corpus rate is the edits of all takes over the words or characters of all texts, and a mean is over takes; "
        "a failed take (silent, cut off, ...) has composite 0 and an error rate of 100 %.",
    ]


def _examples(evaluations: Mapping[str, Evaluation], start: str, voice: str) -> list[str]:
    """The prompts whose composite rose most, moved as the median does, and fell most; each voice's first draw."""
    ids, gains = _gains(evaluations[voice].takes, evaluations[start].takes)
    order = np.argsort(gains, kind="stable")
    chosen = {"most gained": order[-1], "median": order[len(order) // 2], "most lost": order[0]}
    rows = []
    for label, index in chosen.items():
        pair = [_first_draw(evaluations[name].takes, ids[index]) for name in (start, voice)]
        heard = [take["transcript"] or f"({', '.join(take['flags']) or 'nothing'})" for take in pair]
        rows.append([label, ids[index], pair[0]["text"], *heard, f"{gains[index]:+.2f}"])
    return [
        f"## Three prompts to hear, by composite of {voice} less that of {start}",
        "",
        *_table(["", "prompt", "text", f"{start} is heard as", f"{voice} is heard as", "composite"], rows),
        "",
        "The transcripts are of draw 0, the composite is the mean of all draws. To hear a take: "
        f"`swaralign listen {voice} {ids[order[-1]]}`.",
    ]


def _gains(voice: pa.Table, start: pa.Table) -> tuple[list[str], np.ndarray]:
    """Prompt ids, sorted, and how much higher the voice's mean composite is on each."""
    ids = sorted(voice.column("id").unique().to_pylist())
    means = [(sums := prompt_sums(takes)["composite"])[:, 0] / sums[:, 1] for takes in (voice, start)]
    return ids, means[0] - means[1]


def _first_draw(takes: pa.Table, prompt_id: str) -> dict[str, Any]:
    return takes.filter(pc.equal(takes.column("id"), prompt_id)).to_pylist()[0]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]


def _value(value: float, metric: Metric, sign: str = "") -> str:
    if metric.kind == "share":
        return f"{100 * value:{sign}.1f}" + ("" if sign else " %")
    return f"{value:{sign}.3f}" if metric.kind == "points" else f"{value:{sign}.2f} s"


def _cell(interval: Mapping[str, float], metric: Metric) -> str:
    difference, low, high = (_value(interval[key], metric, "+") for key in ("difference", "low", "high"))
    text = f"{difference} [{low}, {high}]"
    return f"**{text}**" if excludes_zero(interval) else text


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
