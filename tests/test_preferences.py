"""Pairs and labels from small pools: which takes meet, which are dropped, and for what reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from swaralign.params import LabelsParams, PairsParams, Params, parse_params
from swaralign.preferences import POOL_COLUMNS, Candidate, make_labels, make_pairs, read_candidates, write_preferences

BEST_WORST = PairsParams(strategy="max_margin", k=2, min_margin=0.1)
TWO_BY_TWO = PairsParams(strategy="top_k_vs_bottom_k", k=2, min_margin=0.1)


def pool(**prompts: list[float | str]) -> pa.Table:
    """Each prompt's takes by their composites; "truncated" is a failed take, "none" one without a token."""
    rows = []
    for name, takes in prompts.items():
        for number, take in enumerate(takes):
            failed = [take] if take == "truncated" else ["empty"] if take == "none" else ["repeats"]
            ids = [] if take == "none" else [ord(name), number]
            rows.append({"id": name, "text": f"say {name}", "temperature": 0.5 + number, "flags": failed,
                         "composite": take if isinstance(take, float) else 0.0, "completion_ids": ids})
    return pa.Table.from_pylist(rows).select(POOL_COLUMNS)


def takes(**prompts: list[float | str]) -> list[Candidate]:
    return read_candidates(pool(**prompts))


def numbers(rows: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    """Prompt, chosen and rejected row of every pair."""
    return [(row["id"], row["chosen_row"], row["rejected_row"]) for row in rows]


def test_max_margin_pairs_the_best_take_with_the_worst() -> None:
    rows, dropped = make_pairs(takes(a=[0.5, 0.875, 0.25], b=[0.125, 0.5]), BEST_WORST)
    assert numbers(rows) == [("a", 1, 2), ("b", 4, 3)]
    assert rows[0] == {
        "id": "a", "text": "say a", "margin": 0.625,
        "chosen_ids": [97, 1], "chosen_composite": 0.875, "chosen_row": 1, "chosen_temperature": 1.5,
        "rejected_ids": [97, 2], "rejected_composite": 0.25, "rejected_row": 2, "rejected_temperature": 2.5,
    }
    assert dropped == {"prompts": {}, "pairs": {}, "takes": {}}


def test_the_two_best_meet_the_two_worst() -> None:
    rows, dropped = make_pairs(takes(a=[0.5, 0.9, 0.2, 0.7, 0.6], b=[0.9, 0.1, 0.8]), TWO_BY_TWO)
    assert numbers(rows) == [("a", 1, 0), ("a", 1, 2), ("a", 3, 0), ("a", 3, 2)]
    assert dropped["prompts"] == {"too_few_takes": 1}


def test_small_margins_and_ties_are_dropped_by_reason() -> None:
    rows, dropped = make_pairs(takes(a=[0.5, 0.5], b=[0.5, 0.4375], c=[0.5, 0.375]), BEST_WORST)
    assert numbers(rows) == [("c", 4, 5)]
    assert dropped["pairs"] == {"tie": 1, "below_min_margin": 1}
    without_minimum = BEST_WORST.model_copy(update={"min_margin": 0.0})
    assert make_pairs(takes(a=[0.5, 0.5]), without_minimum)[1]["pairs"] == {"tie": 1}


def test_pairs_that_a_failed_take_would_head_are_counted() -> None:
    rows, dropped = make_pairs(takes(a=[0.9, "truncated", "truncated", "truncated"]), TWO_BY_TWO)
    assert numbers(rows) == [("a", 0, 2), ("a", 0, 3)]
    assert dropped["pairs"] == {"failed": 2}


def test_failed_takes_may_only_be_rejected() -> None:
    rows, dropped = make_pairs(takes(a=["truncated", 0.5], b=["truncated", "truncated"], c=[0.0, "truncated"]),
                               BEST_WORST)
    assert numbers(rows) == [("a", 1, 0)]
    assert dropped == {"prompts": {"all_failed": 1}, "pairs": {"tie": 1}, "takes": {}}
    rows, _ = make_pairs(takes(a=["truncated", 0.5, "truncated", "truncated"]), TWO_BY_TWO)
    assert numbers(rows) == [("a", 1, 2), ("a", 1, 3)]


def test_a_take_without_tokens_is_not_used_at_all() -> None:
    prompts: dict[str, list[float | str]] = {"a": [0.9, "none", 0.5], "b": [0.9, "none"]}
    rows, dropped = make_pairs(takes(**prompts), BEST_WORST)
    assert numbers(rows) == [("a", 0, 2)]
    assert dropped == {"prompts": {"too_few_takes": 1}, "pairs": {}, "takes": {"no_tokens": 2}}
    labels, dropped = make_labels(takes(**prompts), LabelsParams(top=0.5, bottom=0.5))
    assert all(row["completion_ids"] for row in labels) and dropped["takes"]["no_tokens"] == 2


def test_of_equal_takes_the_first_is_the_better() -> None:
    rows, _ = make_pairs(takes(a=[0.25, 0.5, 0.5, 0.25]), BEST_WORST)
    assert numbers(rows) == [("a", 1, 3)]


def test_labels_are_the_ends_of_the_whole_pool() -> None:
    rows, dropped = make_labels(takes(a=[0.1, 0.9, 0.5], b=[0.2, 0.6], c=["truncated", 0.7]),
                                LabelsParams(top=0.34, bottom=0.34))
    assert [(row["row"], row["label"]) for row in rows] == [(0, False), (1, True), (3, False), (4, True), (5, False),
                                                            (6, True)]
    assert dropped["takes"] == {"middle": 1}
    assert rows[1] == {"id": "a", "text": "say a", "completion_ids": [97, 1], "label": True, "composite": 0.9, "row": 1,
                       "temperature": 1.5}


def test_takes_at_a_threshold_share_a_fate() -> None:
    half = LabelsParams(top=0.25, bottom=0.25)
    rows, _ = make_labels(takes(a=[1.0, 1.0, 1.0, 0.5], b=[0.25, 0.75, 0.75, 0.75]), half)
    assert [row["row"] for row in rows if row["label"]] == [0, 1, 2]
    rows, dropped = make_labels(takes(a=[0.5, 0.5], b=[0.5, "truncated"]), LabelsParams(top=0.5, bottom=0.25))
    assert [(row["row"], row["label"]) for row in rows] == [(0, True), (1, True), (2, True), (3, False)]
    rows, dropped = make_labels(takes(a=[0.5, 0.5], b=[0.5]), half)
    assert rows == [] and dropped["takes"] == {"tie": 3}


def test_an_empty_pool_gives_empty_sets() -> None:
    none = read_candidates(pool(a=[0.5, 0.1]).slice(0, 0))
    assert make_pairs(none, BEST_WORST)[0] == [] and make_labels(none, LabelsParams(top=0.3, bottom=0.3))[0] == []


@pytest.fixture
def params(demo: dict[str, Any]) -> Params:
    return parse_params(demo)


def test_what_is_written(params: Params, tmp_path: Path) -> None:
    table = pool(a=[0.1, 0.9, 0.5], b=[0.5, 0.49], c=["truncated", 0.7], d=["none", 0.3])
    pq.write_table(table.append_column("audio", pa.array([b"flac"] * len(table))), tmp_path / "pool.parquet")
    for name in ("one", "two"):
        write_preferences(tmp_path / name, tmp_path / "pool.parquet", params.preferences)
    for file in ("pairs.parquet", "labels.parquet", "manifest.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    manifest = json.loads((tmp_path / "one" / "manifest.json").read_text())
    assert manifest["pool"] | {"sha256": ""} == {"prompts": 4, "takes": 9, "failed": 2, "sha256": ""}
    assert manifest["pairs"] | {"margin_mean": 0} == {
        "rows": 2, "prompts": 2, "margin_mean": 0,
        "dropped": {"prompts": {"too_few_takes": 1}, "pairs": {"below_min_margin": 1}, "takes": {"no_tokens": 1}},
    }
    labels = manifest["labels"]
    assert labels["desirable"] + labels["undesirable"] == labels["rows"]
    assert labels["rows"] + sum(labels["dropped"]["takes"].values()) == 9
    written = pq.read_table(tmp_path / "one" / "pairs.parquet")
    assert written.schema.field("chosen_ids").type == pa.list_(pa.int32())
    assert written.column("chosen_ids").to_pylist() == [[97, 1], [99, 1]]
