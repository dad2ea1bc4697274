"""A voice on held-out prompts: every take rolled out from its own recorded seed, decoded, scored, kept with its audio.

Fixed validation during training and the evaluation of finished voices are the same function, `evaluate_takes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Audio, Features, List, Value
from tqdm import tqdm

from swaralign.artifacts import atomic_folder, content_sha256, sha256_path, write_json, write_parquet
from swaralign.audio import encode_flac, read_audio
from swaralign.flags import count_flags, is_failed
from swaralign.params import Params, SamplingParams
from swaralign.policy.base import Take, VoicePolicy
from swaralign.rewards.scorer import Recogniser, TakeScore, TakeScorer
from swaralign.rewards.text import Errors, TextRule, corpus_rate, mean_rate, word_errors
from swaralign.seeds import take_seed

SCORES, SUMMARY = "scores.parquet", "summary.json"
SETTINGS = ("rollout", "reward", "evaluate")  # sections of the params that a score depends on
JUDGES = ("asr", "second_asr", "mos", "speaker_encoder", "reference")  # and the files
_REAL, _COUNT, _STRING = Value("float64"), Value("int64"), Value("string")
SECOND = {"second_transcript": _STRING, "second_wer": _REAL, "second_wer_edits": _COUNT, "second_wer_length": _COUNT}


def read_prompts(path: Path, count: int | None = None) -> list[dict[str, str]]:
    """The first `count` prompts (all if None) of a split's parquet, as {"id", "text"}, in its order.

    Raises ValueError if the file holds fewer.
    """
    rows = pq.read_table(path, columns=["extra_info"]).column("extra_info").to_pylist()
    if count is not None and len(rows) < count:
        raise ValueError(f"{path} holds {len(rows)} prompts, but {count} are wanted; ask for fewer, or have the split "
                         "keep more")
    return [{"id": row["id"], "text": row["text"]} for row in rows[:count]]


def evaluate_takes(
    policy: VoicePolicy,
    prompts: Sequence[Mapping[str, str]],
    draws: int,
    seed: int,
    sampling: SamplingParams,
    scorer: TakeScorer,
    batch_size: int,
) -> pa.Table:
    """`draws` takes of each prompt {"id", "text"}, one row a take, prompt by prompt; the schema is `features`'.

    A take is seeded by (seed, prompt id, draw) and nothing else. Raises ValueError, before anything is sampled, if a
    text cannot be scored.
    """
    scorer.check(prompts)
    plan = [Draw(prompt["id"], prompt["text"], draw, take_seed(seed, prompt["id"], draw))
            for prompt in prompts for draw in range(draws)]
    rows: list[dict[str, Any]] = []
    with tqdm(total=len(plan), desc="evaluate", unit="take", leave=False) as bar:
        batches = [(plan[start : start + batch_size], sampling) for start in range(0, len(plan), batch_size)]
        for scored in score_batches(policy, batches, scorer):
            rows += [row for row, _ in scored]
            bar.set_postfix(composite=f"{np.mean([row['composite'] for row in rows]):.3f}", refresh=False)
            bar.update(len(scored))
    return pa.Table.from_pylist(rows, schema=features(policy.sample_rate_hz).arrow_schema)


@dataclass(frozen=True)
class Draw:
    """One take to be sampled: the prompt, which of its draws it is, and that draw's own seed."""

    id: str
    text: str
    draw: int
    seed: int


Sampled = tuple[Sequence[Draw], Sequence[Take], Sequence[np.ndarray]]  # draws, their takes, those as waves
Scored = tuple[dict[str, Any], Take]  # a take's row in the columns of `features`, and the take


def score_batches(
    policy: VoicePolicy, batches: Iterable[tuple[Sequence[Draw], SamplingParams]], scorer: TakeScorer
) -> Iterator[list[Scored]]:
    """Samples, decodes and scores batches of draws, in order: of each draw its row and its take.

    Where the scoring costs this machine nothing, the next batch is sampled meanwhile.
    """
    def score(sampled: Sampled) -> list[Scored]:
        draws, takes, waves = sampled
        scores = scorer.score(
            waves, [draw.text for draw in draws], [take.truncated for take in takes], policy.sample_rate_hz
        )
        return [(_row(draw, take, wave, policy.sample_rate_hz, score), take)
                for draw, take, wave, score in zip(draws, takes, waves, scores, strict=True)]

    sampled = (_sample(policy, draws, sampling) for draws, sampling in batches)
    return (_map_ahead if scorer.elsewhere else map)(score, sampled)


def _sample(policy: VoicePolicy, draws: Sequence[Draw], sampling: SamplingParams) -> Sampled:
    takes = policy.rollout([draw.text for draw in draws], [draw.seed for draw in draws], sampling)
    return draws, takes, policy.decode(takes)


def _map_ahead(function: Callable[[Sampled], list[Scored]], items: Iterable[Sampled]) -> Iterator[list[Scored]]:
    """Like `map`, but `function` runs in a thread while the next item is being made."""
    with ThreadPoolExecutor(1) as thread:
        waiting: Future[list[Scored]] | None = None
        for item in items:
            following = thread.submit(function, item)
            if waiting:
                yield waiting.result()
            waiting = following
        if waiting:
            yield waiting.result()


def hear_again(table: pa.Table, recogniser: Recogniser, rule: TextRule) -> pa.Table:
    """A table of takes with what another recogniser makes of them: the columns `SECOND`.

    It hears the audio as it is kept. A failed take is not heard: no transcript, every word deleted.
    """
    rows = table.select(["text", "flags", "audio"]).to_pylist()
    heard = [row["audio"] is not None and not is_failed(row["flags"]) for row in rows]
    clips = [read_audio(row["audio"]["bytes"]) for row, wanted in zip(rows, heard, strict=True) if wanted]
    rates = {rate for _, rate in clips}
    texts = iter(recogniser.transcribe([wave for wave, _ in clips], rates.pop()) if clips else [])
    transcripts = [next(texts) if wanted else None for wanted in heard]
    pairs = zip(rows, transcripts, strict=True)
    errors = [word_errors(row["text"], transcript or "", rule) for row, transcript in pairs]
    columns = dict(zip(table.column_names, table.columns, strict=True)) | dict(zip(SECOND, (
        pa.array(transcripts, pa.string()), pa.array([each.rate for each in errors], pa.float64()),
        pa.array([each.edits for each in errors], pa.int64()), pa.array([each.length for each in errors], pa.int64()),
    ), strict=True))
    known = Features.from_arrow_schema(table.schema)
    return pa.table(columns).cast(Features({**known, **SECOND}).arrow_schema)


def features(sample_rate_hz: int) -> Features:
    """The columns of a take's row; `load_dataset` reads them back from the parquet file and plays `audio`.

    `transcript`, `mos` and `speaker_similarity` are null for a failed take, they and the error rates where they were
    not measured, `audio` for a take that FLAC cannot hold (empty or not finite).
    """
    return Features({
        "id": _STRING,
        "text": _STRING,
        "draw": _COUNT,
        "seed": _COUNT,
        "transcript": _STRING,
        "composite": _REAL,
        "wer": _REAL,
        "wer_capped": _REAL,
        "wer_edits": _COUNT,
        "wer_length": _COUNT,
        "cer": _REAL,
        "cer_capped": _REAL,
        "cer_edits": _COUNT,
        "cer_length": _COUNT,
        "mos": _REAL,
        "speaker_similarity": _REAL,
        "duration_s": _REAL,
        "frames": _COUNT,
        "flags": List(_STRING),
        "audio": Audio(sampling_rate=sample_rate_hz),
    })


def summarise(table: pa.Table) -> dict[str, Any]:
    """Means, corpus rates and counts of a table of takes; rates are fractions, raw (a failed take counts as 1).

    `wer_corpus` is edits over words of all takes, `wer_mean` the mean of the takes' rates; both are None if takes have
    no error rates, `mos` and `speaker_similarity` if no take has one. `flags` counts takes.
    """
    columns = {name: table.column(name).to_pylist() for name in table.column_names if name != "audio"}
    return {
        "takes": len(table),
        "prompts": len(set(columns["id"])),
        "composite": float(np.mean(columns["composite"])),
        **_rates(columns, "wer"),
        **_rates(columns, "cer"),
        "mos": _mean(columns["mos"]),
        "speaker_similarity": _mean(columns["speaker_similarity"]),
        **count_flags(columns["flags"]),
        "duration_s": float(np.mean(columns["duration_s"])),
    }


def write_evaluation(
    out: Path, table: pa.Table, params: Params, assets: Mapping[str, Any], inputs: Mapping[str, Path | None]
) -> None:
    """Write scores.parquet and summary.json into the folder `out`, atomically.

    The summary holds what scores depend on, params and the pinned files of `assets` that judge (voices evaluated under
    others cannot be compared), and the hashes of `inputs`, the files and folders that made the takes (None where a
    voice has none).
    """
    judges = {name: assets[name]["files"] for name in JUDGES if name in assets}
    summary = summarise(table) | {
        "scores_sha256": content_sha256(table.drop_columns(["audio"]).to_pylist()),
        "settings": {**{name: getattr(params, name).model_dump() for name in SETTINGS}, "assets": judges},
        "inputs": {name: sha256_path(path) if path else None for name, path in inputs.items()},
    }
    with atomic_folder(out) as folder:
        write_parquet(folder / SCORES, table)
        write_json(folder / SUMMARY, summary)


def _row(draw: Draw, take: Take, wave: np.ndarray, sample_rate_hz: int, score: TakeScore) -> dict[str, Any]:
    return {
        **vars(score),
        **vars(draw),
        "duration_s": len(wave) / sample_rate_hz,
        "frames": take.frames,
        "flags": list(score.flags),
        "audio": _audio(wave, sample_rate_hz, f"{draw.id}-{draw.draw}.flac"),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean of those that were measured; None if none was."""
    measured = [value for value in values if value is not None]
    return float(np.mean(measured)) if measured else None


def _audio(wave: np.ndarray, sample_rate_hz: int, name: str) -> dict[str, Any] | None:
    if not len(wave) or not np.isfinite(wave).all():
        return None
    return {"bytes": encode_flac(wave, sample_rate_hz), "path": name}


def _rates(columns: Mapping[str, list[Any]], metric: str) -> dict[str, float | None]:
    counts = list(zip(columns[f"{metric}_edits"], columns[f"{metric}_length"], strict=True))
    if any(length is None for _, length in counts):
        return {f"{metric}_corpus": None, f"{metric}_mean": None}
    errors = [Errors(edits, length) for edits, length in counts]
    return {f"{metric}_corpus": corpus_rate(errors), f"{metric}_mean": mean_rate(errors)}
