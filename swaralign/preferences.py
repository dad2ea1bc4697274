"""Preference sets from a pool of scored takes: pairs of one prompt for DPO, labelled takes for KTO.

A failed take may be rejected or undesirable, never chosen or desirable; one without tokens teaches nothing and is left
out. Every prompt, pair and take that is dropped is counted by its reason.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from swaralign.artifacts import atomic_folder, sha256_file, sha256_tree, write_json, write_parquet
from swaralign.flags import is_failed
from swaralign.params import LabelsParams, PairsParams, PreferencesParams

log = logging.getLogger(__name__)
PAIRS, LABELS = "pairs.parquet", "labels.parquet"
POOL_COLUMNS = ("id", "text", "temperature", "composite", "flags", "completion_ids")
_IDS = pa.list_(pa.int32())
PAIR_SCHEMA = pa.schema([
    ("id", pa.string()), ("text", pa.string()), ("chosen_ids", _IDS), ("rejected_ids", _IDS),
    ("chosen_composite", pa.float64()), ("rejected_composite", pa.float64()), ("margin", pa.float64()),
    ("chosen_row", pa.int64()), ("rejected_row", pa.int64()),
    ("chosen_temperature", pa.float64()), ("rejected_temperature", pa.float64()),
])
LABEL_SCHEMA = pa.schema([
    ("id", pa.string()), ("text", pa.string()), ("completion_ids", _IDS), ("label", pa.bool_()),
    ("composite", pa.float64()), ("row", pa.int64()), ("temperature", pa.float64()),
])


@dataclass(frozen=True)
class Candidate:
    """A take of the pool; `row` is its place there."""

    row: int
    id: str
    text: str
    temperature: float
    composite: float
    failed: bool
    completion_ids: list[int]


def read_candidates(pool: pa.Table) -> list[Candidate]:
    """The takes of a pool, in its order; the columns `POOL_COLUMNS` are read, the audio is not."""
    return [
        Candidate(row=index, failed=is_failed(take.pop("flags")), **take)
        for index, take in enumerate(pool.select(POOL_COLUMNS).to_pylist())
    ]


def make_pairs(takes: Sequence[Candidate], params: PairsParams) -> tuple[list[dict[str, Any]], dict[str, Counter[str]]]:
    """DPO pairs, and what was dropped: `prompts`, `pairs` and `takes` by reason.

    `max_margin` pairs the best take of a prompt with its worst, `top_k_vs_bottom_k` each of the k best with each of the
    k worst. Of equal takes, a failed one is the worse, then the later one in the pool.
    """
    k = 1 if params.strategy == "max_margin" else params.k
    rows: list[dict[str, Any]] = []
    dropped: dict[str, Counter[str]] = {"prompts": Counter(), "pairs": Counter(), "takes": Counter()}
    dropped["takes"].update("no_tokens" for take in takes if not take.completion_ids)
    for candidates in _by_prompt(takes):
        best_first = sorted(candidates, key=lambda take: (take.failed, -take.composite, take.row))
        top = [take for take in best_first[:k] if not take.failed]
        if len(best_first) < 2 * k:
            dropped["prompts"]["too_few_takes"] += 1
        elif not top:
            dropped["prompts"]["all_failed"] += 1
        else:
            if len(top) < k:
                dropped["pairs"]["failed"] += (k - len(top)) * k  # those that would have chosen a failed take
            pairs = [(chosen, rejected) for chosen in top for rejected in best_first[-k:]]
            reasons = [_why_dropped(chosen.composite - rejected.composite, params) for chosen, rejected in pairs]
            dropped["pairs"].update(reason for reason in reasons if reason)
            rows += [_pair(*pair) for pair, reason in zip(pairs, reasons, strict=True) if not reason]
    return rows, dropped


def make_labels(
    takes: Sequence[Candidate], params: LabelsParams
) -> tuple[list[dict[str, Any]], dict[str, Counter[str]]]:
    """KTO labels in the pool's order, and the `takes` that were dropped, by reason.

    Thresholds are quantiles of the composite over all takes that have tokens: at or above the upper is desirable, at
    or below the lower undesirable. Takes of equal composite share a fate, so ties at a threshold may exceed its share.
    """
    dropped = Counter("no_tokens" for take in takes if not take.completion_ids)
    usable = [take for take in takes if take.completion_ids]
    rows: list[dict[str, Any]] = []
    if usable:
        lower, upper = np.quantile([take.composite for take in usable], [params.bottom, 1 - params.top]).tolist()
        for take in usable:
            label, reason = _label(take, lower, upper)
            if reason:
                dropped[reason] += 1
            else:
                rows.append({**_identity(take), "completion_ids": take.completion_ids, "label": label,
                             "composite": take.composite, "row": take.row, "temperature": take.temperature})
    return rows, {"takes": dropped}


def write_preferences(out: Path, pool: Path, params: PreferencesParams) -> None:
    """Write pairs.parquet, labels.parquet and manifest.json, made from the pool's parquet, into `out`, atomically."""
    takes = read_candidates(pq.read_table(pool, columns=list(POOL_COLUMNS)))
    pairs, no_pairs = make_pairs(takes, params.pairs)
    labels, no_labels = make_labels(takes, params.labels)
    desirable = sum(row["label"] for row in labels)
    manifest = {
        "pool": {"prompts": len({take.id for take in takes}), "takes": len(takes),
                 "failed": sum(take.failed for take in takes), "sha256": sha256_file(pool)},
        "pairs": {"rows": len(pairs), "prompts": len({row["id"] for row in pairs}), "dropped": no_pairs,
                  "margin_mean": float(np.mean([row["margin"] for row in pairs])) if pairs else None},
        "labels": {"rows": len(labels), "desirable": desirable, "undesirable": len(labels) - desirable,
                   "dropped": no_labels},
        "settings": params.model_dump(),
    }
    log.info("%d pairs of %d prompts; %d desirable and %d undesirable takes of %d", len(pairs),
             manifest["pairs"]["prompts"], desirable, len(labels) - desirable, len(takes))
    with atomic_folder(out) as folder:
        write_parquet(folder / PAIRS, pa.Table.from_pylist(pairs, schema=PAIR_SCHEMA))
        write_parquet(folder / LABELS, pa.Table.from_pylist(labels, schema=LABEL_SCHEMA))
        write_json(folder / "manifest.json", manifest | {"files": sha256_tree(folder)})


def _by_prompt(takes: Sequence[Candidate]) -> Iterator[list[Candidate]]:
    """The takes that have tokens, prompt by prompt, in the order that the prompts first appear."""
    prompts: dict[str, list[Candidate]] = {}
    for take in takes:
        prompts.setdefault(take.id, []).extend([take] if take.completion_ids else [])
    yield from prompts.values()


def _why_dropped(margin: float, params: PairsParams) -> str | None:
    if margin <= 0:
        return "tie"
    return "below_min_margin" if margin < params.min_margin else None


def _label(take: Candidate, lower: float, upper: float) -> tuple[bool, str | None]:
    """Whether the take is desirable, and why it is dropped instead."""
    low, high = take.composite <= lower, take.composite >= upper
    if low and high:
        return False, "tie"
    if high and take.failed:
        return False, "failed"
    return high, None if low or high else "middle"


def _pair(chosen: Candidate, rejected: Candidate) -> dict[str, Any]:
    row: dict[str, Any] = {**_identity(chosen), "margin": chosen.composite - rejected.composite}
    for role, take in (("chosen", chosen), ("rejected", rejected)):
        row |= {f"{role}_ids": take.completion_ids, f"{role}_composite": take.composite, f"{role}_row": take.row,
                f"{role}_temperature": take.temperature}
    return row


def _identity(take: Candidate) -> Mapping[str, str]:
    return {"id": take.id, "text": take.text}
