"""The published rules of the split, at their boundaries and for every kind of bad input."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from swaralign.corpus import read_rows
from swaralign.params import LocalAsset, SplitParams, load_params
from swaralign.split import (
    Prompt,
    build_split,
    check_leakage,
    collect,
    rejection,
    verl_rows,
)

DATASET = LocalAsset(source="local", path=".", id="house/corpus", revision="r3", files={"corpus.parquet": "0" * 64})


def split_params(**changes: Any) -> SplitParams:
    values: dict[str, Any] = {
        "config": "Hindi", "id_prefix": "hi", "scenario": "Read", "window_rows": 3, "min_duration_s": 1.0,
        "max_duration_s": 14.0, "min_snr_db": 20.0, "expected_train": 3, "held_out": 1,
    }
    return SplitParams(**(values | changes))


def row(text: str | None = "some words", **changes: Any) -> dict[str, Any]:
    values = {"text": text, "normalized": None, "scenario": "Read", "duration": 2.0, "snr": 25.0}
    return values | changes


def rows(count: int) -> list[dict[str, Any]]:
    return [row(f"sentence {index}") for index in range(count)]


def write_corpus(path: Path, table_rows: list[dict[str, Any]], schema: pa.Schema | None = None) -> Path:
    pq.write_table(pa.Table.from_pylist(table_rows, schema=schema), path)
    return path


# Which rows pass


@pytest.mark.parametrize(("duration", "passes"), [
    (1.0, True), (14.0, True), (math.nextafter(1.0, 0), False), (math.nextafter(14.0, 15), False), (2, True),
    (None, False), (math.nan, False), (math.inf, False), (-math.inf, False),
])
def test_duration_bounds_are_included(duration: float | None, passes: bool) -> None:
    assert rejection(row(duration=duration), 0, split_params()) == (None if passes else "duration")


@pytest.mark.parametrize(("snr", "passes"), [
    (20.0, True), (math.nextafter(20.0, 0), False), (99.0, True), (20, True),
    (None, False), (math.nan, False), (math.inf, False),
])
def test_snr_bound_is_included(snr: float | None, passes: bool) -> None:
    assert rejection(row(snr=snr), 0, split_params()) == (None if passes else "snr")


@pytest.mark.parametrize(("text", "normalized", "spoken"), [
    ("raw words", "normal words", "normal words"),
    ("raw words", "", "raw words"),
    ("raw words", None, "raw words"),
    ("  raw words \n", None, "raw words"),
    ("raw", " normal ", "normal"),
    (None, "normal", "normal"),
])
def test_text_is_normalized_when_that_is_not_empty_and_stripped(
    text: str | None, normalized: str | None, spoken: str
) -> None:
    train, _ = collect([row(text, normalized=normalized), row("held")], split_params(window_rows=1, expected_train=1))
    assert [prompt.text for prompt in train.prompts] == [spoken]


@pytest.mark.parametrize(("text", "normalized"), [
    ("", ""), (None, None), ("  ", None), ("raw", "   "), ("।", None), ("?! — …", ""),
])
def test_a_text_without_anything_to_speak_is_rejected(text: str | None, normalized: str | None) -> None:
    assert rejection(row(text, normalized=normalized), 0, split_params()) == "text"


@pytest.mark.parametrize(("bad", "reason"), [
    ({"duration": None, "snr": None, "text": ""}, "duration"),
    ({"snr": None, "text": ""}, "snr"),
    ({"text": ""}, "text"),
])
def test_the_first_reason_is_counted(bad: dict[str, Any], reason: str) -> None:
    assert rejection(row() | bad, 0, split_params()) == reason


# Window and held-out rows


def test_the_window_counts_rows_of_the_scenario_and_the_held_out_are_the_next_passing_ones() -> None:
    corpus = [
        row("e0", scenario="Extempore"), row("r1"), row("r2", snr=None), row("e3", scenario="Extempore"), row("r4"),
        row("r5", duration=0.5), row(""), row("r7"), row("r8"), row("r9"),
    ]
    train, validation = collect(corpus, split_params(expected_train=2, held_out=2))
    assert [prompt.source_index for prompt in train.prompts] == [1, 4]
    assert [prompt.source_index for prompt in validation.prompts] == [7, 8]
    assert dict(train.rejected) == {"snr": 1}
    assert dict(validation.rejected) == {"duration": 1, "text": 1}


def test_the_other_scenario_can_be_chosen() -> None:
    corpus = [row("r0"), row("e1", scenario="Extempore"), row("e2", scenario="Extempore")]
    train, validation = collect(corpus, split_params(scenario="Extempore", window_rows=1, expected_train=1))
    assert [prompt.text for prompt in (*train.prompts, *validation.prompts)] == ["e1", "e2"]


def test_a_count_that_does_not_come_out_names_both_numbers_and_the_reasons() -> None:
    corpus = [row(f"sentence {index}", snr=20.0 if index < 861 else 19.9) for index in range(1_100)]
    corpus[3]["duration"] = None
    with pytest.raises(ValueError) as caught:
        collect(corpus, split_params(window_rows=1_000, expected_train=863, held_out=100))
    message = str(caught.value)
    assert "split.expected_train: expected 863, found 860" in message
    assert "first 1000 Read rows (rejected: duration 1, snr 139, text 0)" in message


def test_too_few_rows_for_the_window() -> None:
    with pytest.raises(ValueError, match=r"split\.window_rows: expected 3 Read rows, found 2"):
        collect(rows(2), split_params())


def test_too_few_held_out_rows() -> None:
    corpus = [*rows(4), row("too short", duration=0.1)]
    with pytest.raises(ValueError, match=r"split\.held_out: expected 2, found 1 .*duration 1, snr 0, text 0"):
        collect(corpus, split_params(held_out=2))


# Bad rows


@pytest.mark.parametrize("scenario", ["Conversation", "read", None, ""])
def test_an_unknown_scenario_is_an_error_that_names_the_row(scenario: str | None) -> None:
    corpus = [*rows(3), row("odd", scenario=scenario), row("held")]
    with pytest.raises(ValueError, match=rf"row 3: scenario is {scenario!r}, must be one of Read, Extempore"):
        collect(corpus, split_params())


@pytest.mark.parametrize("column", ["duration", "snr"])
@pytest.mark.parametrize("value", ["2.0", "abc", True, [2.0]])
def test_what_is_not_a_number_is_an_error_that_names_row_and_value(column: str, value: object) -> None:
    corpus = rows(4)
    corpus[2] |= {column: value, "text": "", "duration" if column == "snr" else "snr": None}
    with pytest.raises(ValueError) as caught:
        collect(corpus, split_params())
    assert f"row 2: {column} is {value!r}, not a number" in str(caught.value)


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    table_rows = [{name: value for name, value in row().items() if name != "snr"}]
    with pytest.raises(ValueError, match=r"corpus\.parquet lacks the columns snr; it has text, normalized"):
        list(read_rows([write_corpus(tmp_path / "corpus.parquet", table_rows)]))


def test_a_file_that_is_not_parquet_is_named(tmp_path: Path) -> None:
    (tmp_path / "corpus.parquet").write_text("text,normalized\n")
    with pytest.raises(ValueError, match=r"corpus\.parquet is not a parquet file"):
        list(read_rows([tmp_path / "corpus.parquet"]))


# Class labels


def labelled(tmp_path: Path, labels: list[int | None], names: list[str] | None) -> Path:
    features = {"text": {"names": names, "_type": "ClassLabel"}}
    metadata = {b"huggingface": json.dumps({"info": {"features": features}}).encode()} if names else None
    fields = [("text", pa.int64()), ("normalized", pa.string()), ("scenario", pa.string()), ("duration", pa.float64()),
              ("snr", pa.float32())]
    table_rows = [row() | {"text": label} for label in labels]
    return write_corpus(tmp_path / "corpus.parquet", table_rows, pa.schema(fields, metadata=metadata))


def test_class_labels_are_decoded_by_their_names(tmp_path: Path) -> None:
    decoded = read_rows([labelled(tmp_path, [1, None, 0], ["first", "second"])])
    assert [values["text"] for values in decoded] == ["second", None, "first"]


def test_class_labels_without_names_are_an_error_that_names_the_column(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="column text holds int64, not strings, and the file records no label names"):
        list(read_rows([labelled(tmp_path, [1, 0], None)]))


def test_a_label_without_a_name_is_an_error_that_names_the_row(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="row 1 of column text is label -1, but it has 2 names"):
        list(read_rows([labelled(tmp_path, [0, -1], ["first", "second"])]))


# Leakage


@pytest.mark.parametrize(("trained", "held", "text"), [
    (Prompt(3, "same", "raw a"), Prompt(8, "same", "raw b"), "same"),
    (Prompt(3, "normal a", "same raw"), Prompt(8, "normal b", "same raw"), "same raw"),
    (Prompt(3, "crossed", "raw a"), Prompt(8, "normal b", "crossed"), "crossed"),
    (Prompt(3, "normal a", "crossed"), Prompt(8, "crossed", "raw b"), "crossed"),
])
def test_a_leaked_prompt_names_the_text_and_both_ids(trained: Prompt, held: Prompt, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        check_leakage([Prompt(1, "other", "one"), trained], [Prompt(7, "more", "words"), held], "hi")
    message = str(caught.value)
    assert f"the text {text!r} stands in both splits" in message
    assert "hi-00000003 is trained on and hi-00000008 is held out" in message


def test_a_source_row_on_both_sides_is_an_error() -> None:
    with pytest.raises(ValueError, match="source row 3 stands in both splits"):
        check_leakage([Prompt(3, "a", "b")], [Prompt(3, "c", "d")], "hi")


def test_two_rows_without_raw_text_do_not_leak() -> None:
    check_leakage([Prompt(1, "a", "")], [Prompt(2, "b", "")], "hi")


# What is written


def test_verl_rows() -> None:
    assert verl_rows([Prompt(41, "बोलो", "raw")], "validation", "house/corpus", "indicvoices-hi") == [{
        "data_source": "house/corpus",
        "prompt": [{"role": "user", "content": "बोलो"}],
        "ability": "text_to_speech",
        "reward_model": {"style": "model", "ground_truth": "बोलो"},
        "extra_info": {"split": "validation", "id": "indicvoices-hi-00000041", "index": 0, "text": "बोलो"},
    }]


def test_the_manifest_describes_the_files(tmp_path: Path) -> None:
    corpus = [*rows(2), row("noisy", snr=3.0), row("बोलो"), row(""), row("held")]
    params = split_params(expected_train=2, held_out=2)
    build_split([write_corpus(tmp_path / "corpus.parquet", corpus)], DATASET, params, tmp_path / "split")
    manifest = json.loads((tmp_path / "split" / "manifest.json").read_text(encoding="utf-8"))
    held = pq.read_table(tmp_path / "split" / "validation.parquet").to_pylist()
    by_hand = json.dumps(held, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    assert [kept["extra_info"]["id"] for kept in held] == ["hi-00000003", "hi-00000005"]
    assert manifest["files"]["validation"] == {
        "path": "validation.parquet",
        "rows": 2,
        "content_sha256": hashlib.sha256(by_hand).hexdigest(),
        "file_sha256": hashlib.sha256((tmp_path / "split" / "validation.parquet").read_bytes()).hexdigest(),
    }
    assert manifest["rejected"] == {
        "train": {"duration": 0, "snr": 1, "text": 0},
        "validation": {"duration": 0, "snr": 0, "text": 1},
    }
    assert (manifest["dataset"], manifest["config"], manifest["revision"]) == ("house/corpus", "Hindi", "r3")
    assert manifest["selection"] == (
        "first 3 Read rows filtered to 1.0 <= duration <= 14.0 s and snr >= 20.0 dB; next 2 passing rows held out"
    )


def test_rows_are_numbered_across_files_and_two_builds_are_equal(tmp_path: Path) -> None:
    corpus = [write_corpus(tmp_path / f"{part}.parquet", rows(4)[part * 2 : part * 2 + 2]) for part in range(2)]
    for name in ("one", "two"):
        build_split(corpus, DATASET, split_params(), tmp_path / name)
    held = pq.read_table(tmp_path / "one" / "validation.parquet").to_pylist()
    assert held[0]["extra_info"]["id"] == "hi-00000003"
    for file in ("train.parquet", "validation.parquet", "manifest.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_a_failed_build_leaves_the_old_one(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.parquet", rows(4))
    build_split([corpus], DATASET, split_params(), tmp_path / "split")
    with pytest.raises(ValueError, match="expected 2, found 3"):
        build_split([corpus], DATASET, split_params(expected_train=2), tmp_path / "split")
    assert pq.read_table(tmp_path / "split" / "train.parquet").num_rows == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.parquet", "split"]


def test_the_audio_column_is_not_read(tmp_path: Path) -> None:
    """A corpus whose audio bytes are overwritten on disk still splits: only the five columns' bytes are touched."""
    noise = hashlib.shake_256(b"audio").digest(200_000)
    table = pa.Table.from_pylist([values | {"audio": noise} for values in rows(4)])
    path = tmp_path / "corpus.parquet"
    pq.write_table(table, path, compression="none", use_dictionary=False)
    stored = path.read_bytes()
    assert stored.count(noise) == 4
    audio = pq.ParquetFile(path).metadata.row_group(0).column(5)
    assert audio.path_in_schema == "audio"
    start, end = audio.data_page_offset, audio.data_page_offset + audio.total_compressed_size
    path.write_bytes(stored[:start] + b"\xff" * (end - start) + stored[end:])
    with pytest.raises(OSError):
        pq.read_table(path)
    build_split([path], DATASET, split_params(), tmp_path / "split")
    assert pq.read_table(tmp_path / "split" / "train.parquet").num_rows == 3


def test_the_demo_corpus_gives_the_counts_of_the_demo_recipe(tmp_path: Path, root: Path) -> None:
    params = load_params(root / "recipes" / "demo.yaml")
    build_split([root / "data/demo/corpus.parquet"], params.assets.prompts, params.split, tmp_path / "split")
    manifest = json.loads((tmp_path / "split" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["files"]["train"]["rows"] == params.split.expected_train
    assert manifest["files"]["validation"]["rows"] == params.split.held_out
    assert sum(manifest["rejected"]["train"].values()) == params.split.window_rows - params.split.expected_train
    assert all(manifest["rejected"]["train"].values()), "the demo shows every reason of a rejection"
