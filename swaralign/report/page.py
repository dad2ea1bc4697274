"""results/report.html: the comparison as one file that needs no network, with curves, takes to hear and provenance."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from swaralign.comparison import METRICS, SCORES, Evaluation, is_certain, measured, minus, per_prompt
from swaralign.report import words
from swaralign.report.charts import Point, interval_chart, line_chart
from swaralign.report.markdown import heard

PACKAGES = ("torch", "transformers", "trl", "peft", "qwen-tts-hf", "ctranslate2", "faster-whisper", "jiwer",
            "distillmos", "resemblyzer", "numpy", "pyarrow", "datasets", "dvc")  # whose versions results depend on
Curves = dict[str, list[Point]]


@dataclass(frozen=True)
class Inputs:
    """What the page shows: `result` is comparison.json's content, `curves` and `validations` are by voice and column,
    `manifests` the content of JSON artifacts by the path they are shown under, `params` sections of the params."""

    evaluations: Mapping[str, Evaluation]
    start: str
    result: Mapping[str, Any]
    clips: Mapping[str, Mapping[str, bytes]]  # FLAC bytes of draw 0, by prompt id and voice
    curves: Mapping[str, Curves]
    validations: Mapping[str, Curves]
    manifests: Mapping[str, Any]
    params: Mapping[str, Any]


def render_page(inputs: Inputs) -> str:
    """The page. Equal inputs and package versions give equal bytes."""
    voices, result, start = list(inputs.evaluations), inputs.result, inputs.start
    settings = inputs.evaluations[start].summary["settings"]
    prompts = _prompts(inputs)
    style, script = (resources.files(__package__).joinpath(name).read_text("utf-8") for name in ("page.css", "page.js"))
    environment = Environment(loader=PackageLoader("swaralign", "report"), autoescape=True, undefined=StrictUndefined,
                              trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"code": _code, "pretty": _pretty}
    return environment.get_template("page.html").render(
        style=Markup(style), script=Markup(script), hashes={"style": _csp_hash(style), "script": _csp_hash(script)},
        voices=voices, start=start, result=result, level=words.level(result),
        language=settings["reward"]["asr"]["language"],
        claims=words.claims(result, voices, start),
        table=_table(result, voices, start),
        differences=_differences(result, voices, start),
        reading=words.reading(result, start, settings),
        caveats=words.caveats(result, voices, start),
        clips=[prompts[prompt_id] for prompt_id in inputs.clips],
        prompts=list(prompts.values()),
        validations=_shared_charts(inputs.validations),
        curves={voice: _charts(voice, columns) for voice, columns in inputs.curves.items()},
        assets=inputs.manifests.get("data/assets.json", {}),
        manifests=inputs.manifests, params=inputs.params, settings=settings, versions=_versions(),
    )


def widest(evaluations: Mapping[str, Evaluation], count: int) -> list[str]:
    """The ids of the `count` prompts on which the voices' mean composites lie furthest apart, the widest first.

    The base voice counts only if there are no two others: what it cannot read at all would be all that is shown.
    """
    trained = [voice for voice in evaluations if voice != "base"]
    voices = trained if len(trained) > 1 else list(evaluations)
    means = [per_prompt(evaluations[voice].takes, "composite") for voice in voices]
    spread = {prompt_id: max(each[prompt_id] for each in means) - min(each[prompt_id] for each in means)
              for prompt_id in means[0]}
    return sorted(spread, key=lambda prompt_id: (-spread[prompt_id], prompt_id))[:count]


def read_clips(folder: Path, voices: Sequence[str], ids: Sequence[str]) -> dict[str, dict[str, bytes]]:
    """FLAC bytes of draw 0 of the prompts, by prompt id and voice; a take without audio is left out."""
    clips: dict[str, dict[str, bytes]] = {prompt_id: {} for prompt_id in ids}
    for voice in voices:
        wanted = pc.field("id").isin(list(ids)) & (pc.field("draw") == 0)
        for row in pq.read_table(folder / voice / SCORES, columns=["id", "audio"], filters=wanted).to_pylist():
            if row["audio"] is not None:
                clips[row["id"]][voice] = row["audio"]["bytes"]
    return clips


def read_curves(path: Path) -> Curves:
    """Each column of a CSV file of numbers against its column `step`; what is empty or not finite is left out."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    columns = {name: [(float(row["step"]), value) for row in rows if math.isfinite(value := float(row[name] or "nan"))]
               for name in (rows[0] if rows else ()) if name != "step"}
    return {name: points for name, points in columns.items() if points}


def _table(result: Mapping[str, Any], voices: Sequence[str], start: str) -> list[dict[str, Any]]:
    """A row for each metric, with a cell for each voice: its value, and its difference unless it is the start."""
    rows = []
    for name, metric in measured(result, voices).items():
        cells = []
        for voice in voices:
            cell = {"value": words.number(result[voice][name], metric) if name in result[voice] else "not measured"}
            found = None if voice == start else result[minus(voice, start)].get(name)
            if found:
                cell |= {"difference": words.number(found["difference"], metric, "+"),
                         "verdict": _verdict(name, found, result["confidence"]),
                         "interval": words.interval(found, metric), "p": words.p_value(found["p"])}
            cells.append(cell)
        rows.append({"label": metric.label, "better": metric.better, "cells": cells})
    return rows


def _verdict(name: str, found: Mapping[str, float], confidence: float) -> str:
    """better, worse, differs (of a metric that is neither) or, where the difference is not certain, open."""
    if not is_certain(found, confidence):
        return "open"
    if METRICS[name].better == "neither":
        return "differs"
    return "better" if (found["difference"] > 0) == (METRICS[name].better == "higher") else "worse"


def _differences(result: Mapping[str, Any], voices: Sequence[str], start: str) -> list[dict[str, Any]]:
    """A chart for each metric: the differences of all voices with their intervals."""
    charts = []
    for name, metric in measured(result, voices).items():
        scale = 100 if metric.kind == "share" else 1
        rows = {voice: (scale * each["low"], scale * each["difference"], scale * each["high"])
                for voice in voices if voice != start and (each := result[minus(voice, start)].get(name))}
        if rows:
            unit = {"share": "percentage points", "points": "", "seconds": "seconds"}[metric.kind]
            charts.append({"label": metric.label, "unit": unit, "better": metric.better,
                           "svg": interval_chart(f"{metric.label}, difference to {start}", rows)})
    return charts


def _prompts(inputs: Inputs) -> dict[str, dict[str, Any]]:
    """Every prompt by its id, with what each voice made of it: draw 0, and the mean composite of all draws."""
    prompts: dict[str, dict[str, Any]] = {}
    for voice, evaluation in inputs.evaluations.items():
        firsts = {row["id"]: row for row in evaluation.takes.filter(pc.field("draw") == 0).to_pylist()}
        for prompt_id, mean in per_prompt(evaluation.takes, "composite").items():
            take = firsts[prompt_id]
            clip = inputs.clips.get(prompt_id, {}).get(voice)
            prompt = prompts.setdefault(prompt_id, {"id": prompt_id, "text": take["text"], "takes": []})
            prompt["takes"].append({
                "voice": voice, "heard": heard(take), "failed": not take["transcript"],
                "composite": take["composite"], "mean": mean,
                "audio": base64.b64encode(clip).decode() if clip else None,
            })
    return prompts


def _shared_charts(validations: Mapping[str, Curves]) -> list[dict[str, Any]]:
    """A chart for each column, with the lines of all voices that have it."""
    columns = dict.fromkeys(name for curves in validations.values() for name in curves)
    return [{"label": name, "svg": line_chart(f"Fixed validation, {name}", lines)} for name in columns
            if (lines := {voice: curves[name] for voice, curves in validations.items() if name in curves})]


def _charts(voice: str, curves: Curves) -> list[dict[str, Any]]:
    return [{"label": name, "svg": line_chart(f"Training of {voice}, {name}", {voice: points})}
            for name, points in curves.items()]


def _versions() -> dict[str, str]:
    installed = {found.name.lower().replace("_", "-"): found.version for found in metadata.distributions()}
    return {"python": platform.python_version()} | {name: installed.get(name, "not installed") for name in PACKAGES}


def _csp_hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _code(text: str) -> Markup:
    """Text with what stands between back-ticks as code."""
    parts = [escape(part) for part in text.split("`")]
    return Markup("").join(Markup("<code>{}</code>").format(part) if index % 2 else part
                           for index, part in enumerate(parts))


def _pretty(content: Any) -> str:
    return json.dumps(content, indent=1, ensure_ascii=False, sort_keys=True)
