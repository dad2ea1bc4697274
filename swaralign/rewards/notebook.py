"""One take scored in one call, with the engines and weights of a params file: for notebooks."""

from __future__ import annotations

import json
from functools import lru_cache
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from swaralign.params import RewardParams, load_params, parse_params
from swaralign.rewards.scorer import Engines, Scorer, TakeScorer, load_engines, load_scorer
from swaralign.rewards.similarity import SpeakerSimilarity

FULL_SCALE = 2.0  # a peak above it is no overshoot of resampling, but another unit


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

    Raises ValueError for audio that is not one channel of floats, a rate that is not above 0, a reference without a
    voice, a text with nothing to compare with, or a faulty setting.
    """
    reference_hz = sample_rate if reference_sr is None else reference_sr
    _check("audio", audio, "sample_rate", sample_rate)
    if reference_audio is not None:
        _check("reference_audio", reference_audio, "reference_sr", reference_hz)
    reference = None if reference_audio is None else np.asarray(reference_audio, np.float32)
    scorer = _scorer(params, checkpoint, root, reference, reference_hz)
    return vars(scorer.score([np.asarray(audio, np.float32)], [target_text], [False], sample_rate)[0])


def _check(name: str, wave: np.ndarray, rate_name: str, rate_hz: float) -> None:
    wave = np.asarray(wave)
    if wave.ndim != 1:
        raise ValueError(f"{name} must be one channel of samples, shape (samples,), found {wave.shape}; average its "
                         "channels first")
    if not np.issubdtype(wave.dtype, np.floating):
        raise ValueError(f"{name} holds {wave.dtype}, not samples in [-1, 1]; divide it by its full scale, 32768 for "
                         "int16")
    peak = float(np.max(np.abs(wave), initial=0.0))
    if FULL_SCALE < peak < np.inf:
        raise ValueError(f"{name} has a peak of {peak:g}, not samples in [-1, 1]; divide it by its full scale, 32768 "
                         "for what was int16")
    if not isinstance(rate_hz, Real) or not 0 < rate_hz < np.inf:
        raise ValueError(f"{rate_name} is {rate_hz!r}, not a rate in Hz")


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
