"""results/comparison.md: what is certain, the numbers, how to read them, and three prompts to hear."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from swaralign.comparison import METRICS, Evaluation, is_certain, measured, minus, per_prompt
from swaralign.report.words import best_voice, caveats, claims, interval, level, number, p_value, reading


def render(
    evaluations: Mapping[str, Evaluation], start: str, result: Mapping[str, Any], missing: Sequence[str] = ()
) -> str:
    """A result of `compare` as Markdown; `missing` are voices that were not evaluated."""
    voices = list(evaluations)
    settings = evaluations[start].summary["settings"]
    lines = ["# Comparison", ""]
    lines += [f"- **{claim.head}**: {claim.numbers}. {claim.rest}" for claim in claims(result, voices, start)]
    lines += ["", f"{result['prompts']} held-out prompts, {result['draws']} takes each by every voice; in brackets "
                  f"{level(result)} intervals." + (f" Not evaluated: {', '.join(missing)}." if missing else ""), ""]
    lines += _values(result, voices)
    for voice in reversed(voices):
        if voice != start:
            lines += ["", f"## {voice} less {start}", "", *_differences(result, minus(voice, start))]
    lines += ["", "## How the numbers are made", "", *(f"- {note}" for note in reading(result, start, settings))]
    lines += ["", "## What they do not show", "",
              *(f"- {note}" for note in caveats(result, voices, start))]
    lines += ["", *_examples(evaluations, start, best_voice(result, voices, start))]
    return "\n".join(lines) + "\n"


def _values(result: Mapping[str, Any], voices: Sequence[str]) -> list[str]:
    return _table(["", *voices], [
        [metric.label, *(number(result[voice][name], metric) if name in result[voice] else "" for voice in voices)]
        for name, metric in measured(result, voices).items()
    ])


def _differences(result: Mapping[str, Any], pair: str) -> list[str]:
    rows = []
    for name, each in result[pair].items():
        metric = METRICS[name]
        shown = number(each["difference"], metric, "+")
        shown = f"**{shown}**" if is_certain(each, result["confidence"]) else shown
        rows.append([metric.label, shown, interval(each, metric), p_value(each["p"]).removeprefix("= "), metric.better])
    return _table(["", "difference", f"{level(result)} interval", "p", "better is"], rows)


def _examples(evaluations: Mapping[str, Evaluation], start: str, voice: str) -> list[str]:
    """The prompts whose composite rose most, moved as the median does, and fell most; each voice's first draw."""
    mine, theirs = (per_prompt(evaluations[name].takes, "composite") for name in (voice, start))
    ids, gains = list(mine), np.array(list(mine.values())) - np.array(list(theirs.values()))
    order = np.argsort(gains, kind="stable")
    chosen = {"most gained": order[-1], "median": order[len(order) // 2], "most lost": order[0]}
    rows = []
    for label, index in chosen.items():
        pair = [first_draw(evaluations[name].takes, ids[index]) for name in (start, voice)]
        rows.append([label, ids[index], pair[0]["text"], *map(heard, pair), f"{gains[index]:+.2f}"])
    return [
        f"## Three prompts to hear, by composite of {voice} less that of {start}",
        "",
        *_table(["", "prompt", "text", f"{start} is heard as", f"{voice} is heard as", "composite"], rows),
        "",
        "The transcripts are of draw 0, the composite is the mean of all draws. To hear a take: "
        f"`swaralign listen {voice} {ids[order[-1]]}`.",
    ]


def first_draw(takes: pa.Table, prompt_id: str) -> dict[str, Any]:
    """The row of a prompt's first take."""
    row: dict[str, Any] = takes.filter(pc.equal(takes.column("id"), prompt_id)).slice(0, 1).to_pylist()[0]
    return row


def heard(take: Mapping[str, Any]) -> str:
    """A take's transcript, or in brackets why it has none."""
    if take["transcript"] is None:
        return f"({', '.join(take['flags']) or 'not transcribed'})"
    return take["transcript"] or "(nothing)"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in cells]


def _cell(text: str) -> str:
    """A text as one cell of a table, itself and no markup."""
    return re.sub(r"([\\|]|<(?=[a-zA-Z/!?]))", r"\\\1", " ".join(text.split()))
