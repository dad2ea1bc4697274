"""One take scored in one call, with the engines and weights of a params file: for notebooks."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from swaralign.params import RewardParams, load_params, parse_params
from swaralign.rewards.scorer import Engines, Scorer, TakeScorer, load_engines, load_scorer
from swaralign.rewards.similarity import SpeakerSimilarity


def score(
    audio: np.ndarray,
    target_text: str,
    sample_rate: int,
    reference_audio: np.ndarray | None = None,
    reference_sr: int | None = None,
    params: str | Path = "params.yaml",
    checkpoint: str | Path | None = None,
    root: str | Path = ".",
) -> dict[str, Any]:
    """Score one take as the pipeline does: {"cer", "wer", ..., "mos", "speaker_similarity", "composite", "flags"}.

    `audio`: (samples,) float32 in [-1, 1] at `sample_rate` Hz. `reference_audio`: a clip of the speaker, at
    `reference_sr` Hz (`sample_rate` if None); without one the similarity is None and its weight is left out of the
    composite. `params`: the file whose `reward` section says how; a scorer of kind http is asked as it is, without a
    reference. `checkpoint`: the voice, for the engine `policy`. `root`: the folder that relative paths in `params`
    start from.

    Raises ValueError for audio that is not one channel of floats, a text with nothing to compare with, or a faulty
    setting.
    """
    if np.ndim(audio) != 1 or (reference_audio is not None and np.ndim(reference_audio) != 1):
        raise ValueError("audio must be one channel of samples, shape (samples,); average its channels first")
    for name, wave in (("audio", audio), ("reference_audio", reference_audio)):
        if wave is not None and not np.issubdtype(np.asarray(wave).dtype, np.floating):
            raise ValueError(f"{name} holds {np.asarray(wave).dtype}, not samples in [-1, 1]; divide it by its full "
                             "scale, 32768 for int16")
    reference = None if reference_audio is None else np.asarray(reference_audio, np.float32)
    scorer = _scorer(params, checkpoint, root, reference, reference_sr or sample_rate)
    return vars(scorer.score([np.asarray(audio, np.float32)], [target_text], [False], sample_rate)[0])


def _scorer(
    path: str | Path, checkpoint: str | Path | None, root: str | Path, reference: np.ndarray | None, reference_hz: int
) -> TakeScorer:
    params = load_params(path)
    reward, similarity = params.reward, None
    if reward.kind == "http":
        if reference is not None:
            raise ValueError(f"{path} names a scorer of kind http, which has a reference of its own; leave "
                             "reference_audio out, or set reward.kind to local")
        return load_scorer(params)
    engines = _engines(params.model_dump_json(), Path(checkpoint) if checkpoint else None, Path(root),
                       reference is not None)
    if engines.encoder is not None and reference is not None:
        similarity = SpeakerSimilarity(engines.encoder, reference, reference_hz)
    else:
        reward = _without_similarity(reward)
    return Scorer(reward, engines.recogniser, engines.mos, similarity)


@lru_cache(maxsize=2)
def _engines(params: str, checkpoint: Path | None, root: Path, similarity: bool) -> Engines:
    """The engines of params, given as JSON, kept loaded between calls."""
    return load_engines(parse_params(json.loads(params)), True, similarity, checkpoint, root)


def _without_similarity(reward: RewardParams) -> RewardParams:
    weights = reward.weights.model_copy(update={"speaker_similarity": 0.0})
    if not any(weights.model_dump().values()):
        raise ValueError("reward.weights has speaker_similarity alone, so reference_audio is needed")
    return reward.model_copy(update={"weights": weights})
