"""The candidate pool: takes of the training prompts at several temperatures, kept as sampled, with scores and audio.

The plan of draws is cut into chunks of one temperature. A chunk is saved once it is scored; a pool that was stopped
goes on with the chunks that are missing, and ends with the bytes of one that was not.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Features, List, Value
from tqdm import tqdm

from swaralign.artifacts import atomic_folder, content_sha256, sha256_tree, write_json, write_parquet
from swaralign.evaluation import Draw, Scored, features, score_batches
from swaralign.flags import count_flags
from swaralign.params import CandidatesParams, SamplingParams
from swaralign.policy.base import VoicePolicy
from swaralign.rewards.scorer import TakeScorer
from swaralign.seeds import take_seed

log = logging.getLogger(__name__)
POOL = "candidates.parquet"
Chunk = tuple[float, list[Draw]]  # a temperature and the draws at it


def plan_chunks(prompts: Sequence[Mapping[str, str]], params: CandidatesParams) -> list[Chunk]:
    """Every draw of the pool, temperature by temperature, `save_every` at a time; a draw has its own recorded seed."""
    chunks: list[Chunk] = []
    for temperature in params.temperatures:
        draws = [Draw(row["id"], row["text"], draw, take_seed(params.seed, row["id"], str(temperature), draw))
                 for row in prompts for draw in range(params.per_temperature)]
        chunks += [(temperature, draws[at : at + params.save_every]) for at in range(0, len(draws), params.save_every)]
    return chunks


def build_pool(
    policy: VoicePolicy,
    prompts: Sequence[Mapping[str, str]],
    scorer: TakeScorer,
    params: CandidatesParams,
    folder: Path,
) -> pa.Table:
    """The pool of the prompts {"id", "text"}, prompt by prompt; its columns are `pool_features`.

    Chunks that `folder` holds already are not sampled again. Raises ValueError, before anything is sampled, if a text
    cannot be scored.
    """
    scorer.check(prompts)
    chunks = plan_chunks(prompts, params)
    paths = [folder / f"chunk-{index:05d}.parquet" for index in range(len(chunks))]
    missing = {path: chunk for path, chunk in zip(paths, chunks, strict=True) if not path.is_file()}
    total, left = (sum(len(draws) for _, draws in each) for each in (chunks, missing.values()))
    if left < total:
        log.info("resuming: %d takes are there already", total - left)
    batches = [(draws, SamplingParams(temperature=temperature, top_k=params.top_k, top_p=params.top_p))
               for temperature, draws in missing.values()]
    with tqdm(total=total, initial=total - left, desc="candidates", unit="take") as bar:
        for path, scored in zip(missing, score_batches(policy, batches, scorer), strict=True):
            write_parquet(path, _table(scored, missing[path][0], policy.sample_rate_hz))
            bar.update(len(scored))
    order = {prompt["id"]: index for index, prompt in enumerate(prompts)}
    pool = pa.concat_tables([pq.read_table(path) for path in paths])
    positions = [order[prompt_id] for prompt_id in pool.column("id").to_pylist()]
    return pool.take(np.argsort(positions, kind="stable"))


def pool_features(sample_rate_hz: int) -> Features:
    """The columns of a pool: those of an evaluated take, its temperature, and its flat token ids just as sampled."""
    sampled = {"temperature": Value("float64"), "completion_ids": List(Value("int32"))}
    return Features({**features(sample_rate_hz), **sampled})


def write_pool(out: Path, pool: pa.Table, inputs: Mapping[str, Any]) -> None:
    """Write candidates.parquet and manifest.json into the folder `out`, atomically."""
    with atomic_folder(out) as folder:
        write_parquet(folder / POOL, pool)
        manifest = describe(pool) | {"inputs": inputs, "files": sha256_tree(folder)}
        write_json(folder / "manifest.json", manifest)


def describe(pool: pa.Table) -> dict[str, Any]:
    """Counts and means of a pool: takes, prompts, failed takes and takes by flag, composite by temperature."""
    composite, temperature = (pool.column(name).to_numpy() for name in ("composite", "temperature"))
    means = {str(each): float(composite[temperature == each].mean()) for each in np.unique(temperature)}
    return {
        "takes": len(pool),
        "prompts": len(pool.column("id").unique()),
        **count_flags(pool.column("flags").to_pylist()),
        "composite_mean": means,
        "content_sha256": content_sha256(pool.drop_columns(["audio"]).to_pylist()),
    }


def _table(scored: Sequence[Scored], temperature: float, sample_rate_hz: int) -> pa.Table:
    rows = [row | {"temperature": temperature, "completion_ids": take.completion_ids.tolist()} for row, take in scored]
    return pa.Table.from_pylist(rows, schema=pool_features(sample_rate_hz).arrow_schema)
