"""A row of the corpus -> the speaker embedding: the clip is chosen by rule among the training prompts."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from swaralign.artifacts import atomic_folder
from swaralign.audio import encode_flac
from swaralign.corpus import COLUMNS, SPEAKER, read_cell, read_rows
from swaralign.hub import HubFile
from swaralign.params import SpeakerParams
from swaralign.speaker import read_reference, write_embedding

CLIP = "reference.flac"


def build_speaker_of_row(
    corpus: Sequence[Path | HubFile], train: Path, checkpoint: Path, params: SpeakerParams, speaker_id: str | None,
    out: Path,
) -> None:
    """Write embedding.json, manifest.json, which names the row, and its clip as reference.flac, 16 bits, into `out`.

    The row: of all training prompts, or those that `speaker_id` spoke, the one of highest SNR; the first of equals.
    `train`: the split's train.parquet. Raises ValueError as `choose_row`, `read_reference` and `extract` do.
    """
    ids = [info["id"] for info in pq.read_table(train, columns=["extra_info"])["extra_info"].to_pylist()]
    chosen = choose_row(corpus, {int(prompt_id.rpartition("-")[2]) for prompt_id in ids}, speaker_id)
    audio = (read_cell(corpus, chosen["source_index"], "audio") or {}).get("bytes")
    if not audio:
        raise ValueError(f"row {chosen['source_index']} of the corpus holds no bytes of audio; use a copy with the "
                         "audio in it, or name a clip as assets.reference")
    wave, sample_rate_hz = read_reference(audio, params)
    about = {
        "rule": "highest snr of the training prompts" + (f" of speaker {speaker_id}" if speaker_id else ""),
        **chosen,
        "clip": CLIP,
        "source_clip_sha256": hashlib.sha256(audio).hexdigest(),
    }
    with atomic_folder(out) as folder:
        (folder / CLIP).write_bytes(encode_flac(wave, sample_rate_hz))
        write_embedding(wave, sample_rate_hz, checkpoint, about, folder)


def choose_row(corpus: Sequence[Path | HubFile], indices: set[int], speaker_id: str | None) -> dict[str, Any]:
    """source_index, speaker_id and snr_db of the row of highest SNR among `indices`; no row after them is read.

    Raises ValueError if none of them is of that speaker, naming those that most are of.
    """
    best: dict[str, Any] = {}
    spoken: Counter[str] = Counter()
    rows = read_rows(corpus, (*COLUMNS, SPEAKER))
    for index, row in zip(range(max(indices, default=-1) + 1), rows):  # noqa: B905 (the corpus is longer)
        if index not in indices:
            continue
        spoken[row[SPEAKER]] += 1
        if speaker_id in (None, row[SPEAKER]) and (not best or row["snr"] > best["snr_db"]):
            best = {"source_index": index, "speaker_id": row[SPEAKER], "snr_db": row["snr"]}
    if not best:
        most = ", ".join(f"{name} ({count})" for name, count in spoken.most_common(5))
        raise ValueError(f"speaker.dataset.speaker_id is {speaker_id!r}, who speaks none of the {len(indices)} "
                         f"training prompts; most are of {most}")
    return best
