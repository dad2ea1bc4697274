"""What a take is worth: guard first, then the metrics of those that pass, then the composite.

The candidate pool, GRPO, fixed validation and evaluation all ask a `TakeScorer`, so that they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from swaralign.assets import resolve, resolve_file
from swaralign.audio import read_audio
from swaralign.flags import is_failed
from swaralign.params import Params, RewardParams
from swaralign.rewards.asr import Transcriber, repeats
from swaralign.rewards.composite import WORST, composite
from swaralign.rewards.guard import guard
from swaralign.rewards.mos import MosPredictor, load_mos
from swaralign.rewards.similarity import Encoder, SpeakerSimilarity, load_encoder
from swaralign.rewards.text import Errors, TextRule, character_errors, reference_text, word_errors

Measured = tuple[str | None, float | None, float | None]  # transcript, MOS, similarity of a take
UNHEARD: Measured = (None, None, None)


class Recogniser(Protocol):
    """What the scorer needs of an ASR: `asr.Transcriber`."""

    window_s: float

    def transcribe(self, waves: Sequence[np.ndarray], sample_rate_hz: int) -> list[str]: ...


class SimilarityModel(Protocol):
    """What the scorer needs of a speaker model: `similarity.SpeakerSimilarity`."""

    def compare(self, waves: Sequence[np.ndarray], sample_rate_hz: int) -> list[float]: ...


@dataclass(frozen=True)
class TakeScore:
    """What became of one take.

    `composite`, higher better: what training maximises; in [0, 1] but for scorers of other people. `cer` and `wer` are
    raw and may pass 1; `cer_capped` and `wer_capped` may not. Edits and lengths are in characters and in words of the
    normalised text. `mos` is in [1, 5], `speaker_similarity` in [-1, 1]. What was not measured is None. A failed take
    counts every unit as deleted, and has neither transcript nor MOS nor similarity. `flags`: members of `FLAGS`;
    `repeats` marks a looping transcript, scored as any.
    """

    composite: float
    cer: float | None
    cer_capped: float | None
    wer: float | None
    wer_capped: float | None
    cer_edits: int | None
    cer_length: int | None
    wer_edits: int | None
    wer_length: int | None
    mos: float | None
    speaker_similarity: float | None
    transcript: str | None
    flags: tuple[str, ...]

    @property
    def failed(self) -> bool:
        return is_failed(self.flags)


class TakeScorer(Protocol):
    """Whoever decides what takes are worth.

    `elsewhere`: scoring does not take this machine's processors, so the next takes may be sampled meanwhile.
    """

    elsewhere: bool

    def check(self, prompts: Iterable[Mapping[str, str]]) -> None:
        """Raises ValueError for the first prompt {"id", "text"} that cannot be scored, by its id."""
        ...

    def score(
        self, waves: Sequence[np.ndarray], texts: Sequence[str], truncated: Sequence[bool], sample_rate_hz: int
    ) -> list[TakeScore]:
        """The score of each take: its (samples,) float32 wave, the text to be spoken, whether its budget ran out."""
        ...


class Scorer:
    """Scores takes with models of this machine; a score depends on its take alone.

    Without a recogniser there are no error rates, which must then weigh 0.
    """

    elsewhere = False

    def __init__(
        self,
        params: RewardParams,
        recogniser: Recogniser | None,
        mos: MosPredictor | None = None,
        similarity: SimilarityModel | None = None,
    ) -> None:
        self._params = params
        self._recogniser = recogniser
        self._mos = mos
        self._similarity = similarity

    def check(self, prompts: Iterable[Mapping[str, str]]) -> None:
        """Raises ValueError for the first prompt {"id", "text"} whose text has nothing to compare with, by its id."""
        check_prompts(prompts, self._params.text_rule)

    def score(
        self, waves: Sequence[np.ndarray], texts: Sequence[str], truncated: Sequence[bool], sample_rate_hz: int
    ) -> list[TakeScore]:
        """As `TakeScorer.score`. Raises ValueError if a text has nothing to compare with, before any model is asked."""
        for text in texts:
            reference_text(text, self._params.text_rule)
        window_s = self._recogniser.window_s if self._recogniser else self._params.asr.window_s
        flags = failures(waves, truncated, sample_rate_hz, self._params, window_s)
        passed = [wave for wave, failed in zip(waves, flags, strict=True) if not failed]
        heard = iter(self._measure(passed, sample_rate_hz))
        return [self._judge(text, UNHEARD if failed else next(heard), failed)
                for text, failed in zip(texts, flags, strict=True)]

    def _measure(self, waves: Sequence[np.ndarray], sample_rate_hz: int) -> list[Measured]:
        nothing = [None] * len(waves)
        return list(zip(
            self._recogniser.transcribe(waves, sample_rate_hz) if self._recogniser else nothing,
            self._mos.predict(waves, sample_rate_hz) if self._mos else nothing,
            self._similarity.compare(waves, sample_rate_hz) if self._similarity else nothing,
            strict=True,
        ))

    def _judge(self, text: str, measured: Measured, failed: tuple[str, ...]) -> TakeScore:
        transcript, mos, similarity = measured
        errors = count_errors(text, transcript, self._params.text_rule) if self._recogniser else None
        rate = errors[0 if self._params.metric == "cer" else 1].rate if errors else None
        value = WORST if failed else composite(rate, mos, similarity, self._params.weights)
        return take_score(value, errors, measured, failed)


def check_prompts(prompts: Iterable[Mapping[str, str]], rule: TextRule) -> None:
    """Raises ValueError for the first prompt {"id", "text"} whose text has nothing to compare with, by its id."""
    for prompt in prompts:
        try:
            reference_text(prompt["text"], rule)
        except ValueError as error:
            raise ValueError(f"prompt {prompt['id']}: {error}") from None


def failures(
    waves: Sequence[np.ndarray], truncated: Sequence[bool], sample_rate_hz: int, params: RewardParams, window_s: float
) -> list[tuple[str, ...]]:
    """Of each take the flags that fail it; none if it may be scored."""
    reasons = [guard(wave, sample_rate_hz, params.guard, window_s) for wave in waves]
    return [tuple(flag for flag in (reason, "truncated" if cut else None) if flag)
            for reason, cut in zip(reasons, truncated, strict=True)]


def count_errors(text: str, transcript: str | None, rule: TextRule) -> tuple[Errors, Errors]:
    """Errors in characters and in words; every one is deleted if there is no transcript."""
    return character_errors(text, transcript or "", rule), word_errors(text, transcript or "", rule)


def take_score(
    value: float, errors: tuple[Errors, Errors] | None, measured: Measured, failed: tuple[str, ...]
) -> TakeScore:
    """What became of a take of this composite; `errors`: as `count_errors` gives them, None if nobody listens."""
    transcript, mos, similarity = measured
    looping = transcript is not None and repeats(transcript)
    rates: dict[str, Any] = {}
    for name, each in zip(("cer", "wer"), errors or (None, None), strict=True):
        rates |= {name: each and each.rate, f"{name}_capped": each and min(1.0, each.rate),
                  f"{name}_edits": each and each.edits, f"{name}_length": each and each.length}
    return TakeScore(composite=value, **rates, mos=mos, speaker_similarity=similarity, transcript=transcript,
                     flags=(*failed, "repeats") if looping else failed)


@dataclass(frozen=True)
class Engines:
    """The loaded models of a reward; None where the params name none, or none was wanted."""

    recogniser: Recogniser | None
    mos: MosPredictor | None
    encoder: Encoder | None


def load_engines(
    params: Params, mos: bool, similarity: bool, checkpoint: Path | None = None, root: Path = Path(), asr: bool = True
) -> Engines:
    """The ASR, MOS and speaker models that are wanted and that `params.reward` names; files verified.

    `checkpoint`: the voice, for the similarity engine `policy`. Raises ValueError for a file, package or setting that
    does not fit.
    """
    reward, runtime, assets = params.reward, params.runtime, params.assets
    recogniser = predictor = encoder = None
    if asr:
        recogniser = Transcriber(resolve("asr", assets, root), reward.asr, runtime.threads, runtime.device)
    if mos and reward.mos.engine != "none":
        weights = resolve("mos", assets, root) if reward.mos.engine == "utmos" else None
        predictor = load_mos(reward.mos, weights, runtime.device)
    if similarity and reward.similarity.engine != "none":
        weights = resolve("speaker_encoder", assets, root) if reward.similarity.engine == "ecapa" else None
        encoder = load_encoder(reward.similarity, weights, checkpoint, runtime.device)
    torch.set_num_threads(runtime.threads)  # CTranslate2 leaves torch with one
    return Engines(recogniser, predictor, encoder)


def load_scorer(
    params: Params, checkpoint: Path | None = None, every_metric: bool = False, root: Path = Path()
) -> TakeScorer:
    """The scorer that `params.reward` describes; raises as `load_engines`.

    `every_metric`: measure also what weighs 0 in the composite, if an engine is named for it. A scorer of kind http
    decides that itself.
    """
    if params.reward.kind == "http":
        from swaralign.scoring.remote import load_remote

        return load_remote(params.reward)
    return load_local(params, checkpoint, every_metric, root)


def load_local(
    params: Params, checkpoint: Path | None, every_metric: bool, root: Path = Path(), asr: bool = True
) -> Scorer:
    """The scorer of this machine's engines, whatever kind the params name; as `load_scorer`."""
    weights = params.reward.weights
    engines = load_engines(params, every_metric or weights.mos > 0, every_metric or weights.speaker_similarity > 0,
                           checkpoint, root, asr)
    similarity = None
    if engines.encoder is not None:
        reference = read_audio(resolve_file("reference", params.assets, root))
        similarity = SpeakerSimilarity(engines.encoder, *reference)
    return Scorer(params.reward, engines.recogniser, engines.mos, similarity)
