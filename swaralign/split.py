"""Prompts: the rows of an IndicVoices-R-shaped corpus, or lists of sentences -> training and held-out prompts.

Of a corpus, by the published rules: in dataset order, the first `window_rows` rows of one scenario are the training
window; the next `held_out` passing rows of that scenario are held out. A row passes if its duration and its SNR lie
within the bounds, both ends included, and its text can be spoken. Only five columns are read, no audio, and no row
after the last one that is held out. Of lists, every sentence.
"""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

import pyarrow as pa

from swaralign.artifacts import atomic_folder, content_sha256, sha256_file, write_json, write_parquet
from swaralign.corpus import read_rows
from swaralign.hub import HubFile
from swaralign.params import FileAsset, HubRowsAsset, SplitParams, TextSplitParams

SCENARIOS = ("Read", "Extempore")
REASONS = ("duration", "snr", "text")  # of a rejection; the first that applies is counted

_STRING = pa.string()
VERL_SCHEMA = pa.schema([
    ("data_source", _STRING),
    ("prompt", pa.list_(pa.struct([("role", _STRING), ("content", _STRING)]))),
    ("ability", _STRING),
    ("reward_model", pa.struct([("style", _STRING), ("ground_truth", _STRING)])),
    ("extra_info", pa.struct([("split", _STRING), ("id", _STRING), ("index", pa.int64()), ("text", _STRING)])),
])


@dataclass(frozen=True)
class Prompt:
    """A row that passed: its place in the corpus (from 0), the text to speak, and the `text` column, stripped."""

    source_index: int
    text: str
    raw_text: str


@dataclass(frozen=True)
class Side:
    """One side of the split: its prompts in corpus order, and how many rows were rejected for which reason."""

    prompts: list[Prompt] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)


def build_split(
    corpus: Sequence[Path | HubFile], dataset: FileAsset | HubRowsAsset, params: SplitParams | TextSplitParams,
    out: Path,
) -> None:
    """Write train.parquet, validation.parquet (rows in verl's format) and manifest.json into the folder `out`.

    `corpus`: parquet files, here or on the hub, whose rows follow one another, or text files here, as the params say.
    `dataset` gives the id and revision that are recorded.

    Raises:
        ValueError: a column is missing or of the wrong kind, a scenario is unknown, a duration or SNR is not a
            number, the counts are not those of the params, or a text stands on both sides; names row, value, remedy.
    """
    if isinstance(params, TextSplitParams):
        train, validation = collect_texts([source for source in corpus if isinstance(source, Path)], params)
    else:
        train, validation = collect(read_rows(corpus), params)
    check_leakage(train.prompts, validation.prompts, params.id_prefix)
    manifest: dict[str, Any] = {
        "dataset": dataset.id,
        "config": params.config,
        "revision": dataset.revision,
        "selection": describe(params),
        "files": {},
        "rejected": {},
    }
    with atomic_folder(out) as folder:
        for name, side in (("train", train), ("validation", validation)):
            rows = verl_rows(side.prompts, name, dataset.id, params.id_prefix)
            write_parquet(folder / f"{name}.parquet", pa.Table.from_pylist(rows, schema=VERL_SCHEMA))
            manifest["files"][name] = {
                "path": f"{name}.parquet",
                "rows": len(rows),
                "content_sha256": content_sha256(rows),
                "file_sha256": sha256_file(folder / f"{name}.parquet"),
            }
            manifest["rejected"][name] = {reason: side.rejected[reason] for reason in REASONS}
        write_json(folder / "manifest.json", manifest)


def describe(params: SplitParams | TextSplitParams) -> str:
    """The selection rule in words, for the manifest."""
    if isinstance(params, TextSplitParams):
        return f"every sentence of {', '.join(params.train_files)}; {', '.join(params.held_out_files)} held out"
    return (
        f"first {params.window_rows} {params.scenario} rows filtered to {params.min_duration_s} <= duration <= "
        f"{params.max_duration_s} s and snr >= {params.min_snr_db} dB; next {params.held_out} passing rows held out"
    )


def collect(rows: Iterable[Mapping[str, Any]], params: SplitParams) -> tuple[Side, Side]:
    """Judge rows in order; returns the training window's side and the held-out side. Raises ValueError (see above).

    Takes no row after the last one that is held out.
    """
    train, validation, seen = Side(), Side(), 0
    for index, row in enumerate(rows):
        if row["scenario"] not in SCENARIOS:
            raise ValueError(f"row {index}: scenario is {row['scenario']!r}, must be one of {', '.join(SCENARIOS)}")
        if row["scenario"] != params.scenario:
            continue
        seen += 1
        side = train if seen <= params.window_rows else validation
        reason = rejection(row, index, params)
        if reason:
            side.rejected[reason] += 1
        else:
            side.prompts.append(Prompt(index, _text(row), (row["text"] or "").strip()))
        if len(validation.prompts) == params.held_out:
            break
    _check_counts(train, validation, seen, params)
    return train, validation


def collect_texts(corpus: Sequence[Path], params: TextSplitParams) -> tuple[Side, Side]:
    """The sentences of the training lists and of the held-out ones; a source index counts through all of them.

    A list has one sentence a line; empty lines and those that begin with # are notes. Raises ValueError if a list is
    not among the files of the corpus, a sentence stands twice on one side, or a count is not that of the params.
    """
    train, validation, index = Side(), Side(), 0
    for side, names in ((train, params.train_files), (validation, params.held_out_files)):
        seen: set[str] = set()
        for name in names:
            for text in read_sentences(_list_named(name, corpus)):
                if text in seen:
                    raise ValueError(f"{name}: {text!r} stands twice among one side's lists; take one of them out")
                seen.add(text)
                if _speakable(text):
                    side.prompts.append(Prompt(index, text, text))
                else:
                    side.rejected["text"] += 1
                index += 1
    wanted_counts = (("expected_train", params.expected_train, train), ("held_out", params.held_out, validation))
    for key, wanted, side in wanted_counts:
        if len(side.prompts) != wanted:
            raise ValueError(f"split.{key}: expected {wanted}, found {len(side.prompts)} sentences in the lists "
                             f"(rejected: {_by_reason(side)}); correct the number, or the lists")
    return train, validation


def _list_named(name: str, corpus: Sequence[Path]) -> Path:
    parts = Path(name).parts
    found = [path for path in corpus if path.parts[-len(parts):] == parts]
    if not found:
        raise ValueError(f"split names the list {name}, but assets.prompts has "
                         f"{', '.join(sorted(path.name for path in corpus))}")
    if len(found) > 1:
        raise ValueError(f"split names the list {name}, but assets.prompts has {len(found)} of that name; name it "
                         f"with its folder, as {'/'.join(found[0].parts[-len(parts) - 1:])}")
    return found[0]


def read_sentences(path: Path) -> list[str]:
    """The lines of a UTF-8 text file, stripped, without empty ones and notes. Raises ValueError if it is not UTF-8."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a mark of the encoding
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}); save it as UTF-8") from error
    lines = [line.strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def rejection(row: Mapping[str, Any], index: int, params: SplitParams) -> str | None:
    """Why a row does not pass: `duration`, else `snr`, else `text`; None if it passes.

    A null or non-finite number is rejected. Raises ValueError if a value is not a number at all.
    """
    duration_s, snr_db = (_number(row, index, column) for column in ("duration", "snr"))
    if duration_s is None or not params.min_duration_s <= duration_s <= params.max_duration_s:
        return "duration"
    if snr_db is None or snr_db < params.min_snr_db:
        return "snr"
    return None if _speakable(_text(row)) else "text"


def _number(row: Mapping[str, Any], index: int, column: str) -> float | None:
    value = row[column]
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"row {index}: {column} is {value!r}, not a number; correct it, or make it null")
    return float(value) if math.isfinite(value) else None


def _text(row: Mapping[str, Any]) -> str:
    return (row["normalized"] or row["text"] or "").strip()


def _speakable(text: str) -> bool:
    """A text without a letter or digit is empty once its punctuation is gone: no error rate exists for it."""
    return any(unicodedata.category(character)[0] in "LN" for character in text)


def _check_counts(train: Side, validation: Side, seen: int, params: SplitParams) -> None:
    if seen < params.window_rows:
        raise ValueError(f"split.window_rows: expected {params.window_rows} {params.scenario} rows, found {seen}")
    if len(train.prompts) != params.expected_train:
        raise ValueError(
            f"split.expected_train: expected {params.expected_train}, found {len(train.prompts)} prompts in the first "
            f"{params.window_rows} {params.scenario} rows (rejected: {_by_reason(train)}); "
            "the corpus or the rules are not those that the count was made with"
        )
    if len(validation.prompts) < params.held_out:
        raise ValueError(
            f"split.held_out: expected {params.held_out}, found {len(validation.prompts)} passing rows after the "
            f"window (rejected: {_by_reason(validation)}); lower held_out, or use a longer corpus"
        )


def _by_reason(side: Side) -> str:
    return ", ".join(f"{reason} {side.rejected[reason]}" for reason in REASONS)


def check_leakage(train: Iterable[Prompt], validation: Iterable[Prompt], id_prefix: str) -> None:
    """Raise ValueError if a source row, or a text in either spelling, stands on both sides."""
    trained: dict[int | str, int] = {}
    for prompt in train:
        for key in _keys(prompt):
            trained.setdefault(key, prompt.source_index)
    for prompt in validation:
        for key in _keys(prompt):
            if key in trained:
                what = f"the text {key!r}" if isinstance(key, str) else f"source row {key}"
                raise ValueError(
                    f"{what} stands in both splits: {prompt_id(id_prefix, trained[key])} is trained on and "
                    f"{prompt_id(id_prefix, prompt.source_index)} is held out; remove one of the two from the corpus"
                )


def _keys(prompt: Prompt) -> list[int | str]:
    return [prompt.source_index, *(text for text in (prompt.text, prompt.raw_text) if text)]


def prompt_id(id_prefix: str, source_index: int) -> str:
    """The stable id of a prompt: the prefix and the row's place in the corpus."""
    return f"{id_prefix}-{source_index:08d}"


def verl_rows(prompts: Iterable[Prompt], split: str, dataset_id: str, id_prefix: str) -> list[dict[str, Any]]:
    """Prompts as rows of verl's data format; `extra_info.index` counts within the split."""
    return [
        {
            "data_source": dataset_id,
            "prompt": [{"role": "user", "content": prompt.text}],
            "ability": "text_to_speech",
            "reward_model": {"style": "model", "ground_truth": prompt.text},
            "extra_info": {
                "split": split,
                "id": prompt_id(id_prefix, prompt.source_index),
                "index": index,
                "text": prompt.text,
            },
        }
        for index, prompt in enumerate(prompts)
    ]
