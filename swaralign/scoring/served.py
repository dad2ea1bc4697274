"""Our rewards as scorers that can be served, by name, with the engines and settings of a params file.

`composite` is the reward as it is, with every metric that has an engine; the others are one part of it each, mapped to
[0, 1] as there. A take that fails the guard is worth 0 and reaches no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from swaralign.params import RewardParams, load_params
from swaralign.rewards.scorer import Scorer, TakeScore, load_local
from swaralign.rewards.text import normalise, reference_text
from swaralign.scoring.messages import AudioTake, Scalar
from swaralign.scoring.plugins import REWARDS, AudioScorer

_RATES_HZ = (4_000, 384_000)
_LONGEST_TEXT = 2_000  # characters; beyond any transcript, and normalising takes quadratic time
_PEAK = 16.0  # full scale is 1: this is no wave in [-1, 1], but integers


class RewardScorer(AudioScorer):
    """A reward of ours."""

    def __init__(self, scorer: Scorer, params: RewardParams) -> None:
        self._scorer, self._rule = scorer, params.text_rule

    def check(self, take: AudioTake) -> None:
        """Raises ValueError for a text that is too long or empty as compared, an odd rate, or samples out of scale."""
        if len(take.prompt) > _LONGEST_TEXT:
            raise ValueError(f"the prompt has {len(take.prompt)} characters, {_LONGEST_TEXT} are the most")
        reference_text(take.prompt, self._rule)
        low, high = _RATES_HZ
        if not low <= take.sample_rate_hz <= high:
            raise ValueError(f"sample_rate is {take.sample_rate_hz} Hz, outside {low} to {high}")
        if (peak := float(np.abs(take.wave).max())) > _PEAK:
            raise ValueError(f"the waveform peaks at {peak:g}; it must be in [-1, 1], so divide integers by 32768")

    def score(self, takes: Sequence[AudioTake]) -> list[dict[str, Scalar]]:
        """The composite, and all that it is made of: the fields of `TakeScore`, and the texts as they are compared."""
        replies: dict[int, dict[str, Scalar]] = {}
        for rate_hz in {take.sample_rate_hz for take in takes}:
            at = [index for index, take in enumerate(takes) if take.sample_rate_hz == rate_hz]
            waves, texts = [takes[index].wave for index in at], [takes[index].prompt for index in at]
            scores = self._scorer.score(waves, texts, [False] * len(at), rate_hz)
            replies |= {index: self._reply(text, score) for index, text, score in zip(at, texts, scores, strict=True)}
        return [replies[index] for index in range(len(takes))]

    def _reply(self, text: str, score: TakeScore) -> dict[str, Scalar]:
        fields = dict(vars(score))
        value, transcript, flags = (fields.pop(name) for name in ("composite", "transcript", "flags"))
        reply = {"score": value, **fields, "flags": ",".join(flags)}
        if transcript is not None:
            reply |= {"asr_text": transcript, "normalized_target": normalise(text, self._rule),
                      "normalized_hypothesis": normalise(transcript, self._rule)}
        return reply


def load_reward(name: str, params: Path, checkpoint: Path | None = None, root: Path = Path()) -> RewardScorer:
    """The reward of that name in `REWARDS`, as the params file's section `reward` has it; assets are under `root`.

    `checkpoint`: the voice, for the similarity engine `policy`. Raises ValueError for a setting or file that does not
    fit, or a reward whose engine is none.
    """
    whole = load_params(params)
    reward = whole.reward
    if {"mos": reward.mos.engine, "speaker_similarity": reward.similarity.engine}.get(name) == "none":
        raise ValueError(f"the engine of {name} is none in {params}: choose one under reward")
    reward = reward.model_copy(update=REWARDS[name])
    scorer = load_local(whole.model_copy(update={"reward": reward}), checkpoint, every_metric=name == "composite",
                        root=root, asr=name not in ("mos", "speaker_similarity"))
    return RewardScorer(scorer, reward)
