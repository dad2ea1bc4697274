"""What a take is worth: guard first, then the metrics of those that pass, then the composite.

The candidate pool, GRPO, fixed validation and evaluation all ask a `TakeScorer`, so that they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from swaralign.assets import resolve, resolve_file
from swaralign.audio import read_audio
from swaralign.params import Params, RewardParams
from swaralign.rewards.asr import Transcriber, repeats
from swaralign.rewards.composite import WORST, composite
from swaralign.rewards.guard import FAILURES as FAILURES
from swaralign.rewards.guard import guard
from swaralign.rewards.mos import MosPredictor, load_mos
from swaralign.rewards.similarity import Encoder, SpeakerSimilarity, load_encoder
from swaralign.rewards.text import character_errors, reference_text, word_errors

FLAGS = (*FAILURES, "repeats")
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

    `composite` in [0, 1], higher better: what training maximises. `cer` and `wer` are raw and may pass 1; `cer_capped`
    and `wer_capped` may not. Edits and lengths are in characters and in words of the normalised text. `mos` in [1, 5]
    and `speaker_similarity` in [-1, 1] are None where they were not measured. A failed take counts every unit as
    deleted, and has neither transcript nor MOS nor similarity. `flags`: members of `FLAGS`; `repeats` marks a looping
    transcript, scored as any.
    """

    composite: float
    cer: float
    cer_capped: float
    wer: float
    wer_capped: float
    cer_edits: int
    cer_length: int
    wer_edits: int
    wer_length: int
    mos: float | None
    speaker_similarity: float | None
    transcript: str | None
    flags: tuple[str, ...]

    @property
    def failed(self) -> bool:
        return any(flag in FAILURES for flag in self.flags)


class TakeScorer(Protocol):
    """Whoever decides what takes are worth."""

    def check(self, prompts: Iterable[Mapping[str, str]]) -> None:
        """Raises ValueError for the first prompt {"id", "text"} that cannot be scored, by its id."""
        ...

    def score(
        self, waves: Sequence[np.ndarray], texts: Sequence[str], truncated: Sequence[bool], sample_rate_hz: int
    ) -> list[TakeScore]:
        """The score of each take: its (samples,) float32 wave, the text to be spoken, whether its budget ran out."""
        ...


class Scorer:
    """Scores takes with models of this machine; a score depends on its take alone."""

    def __init__(
        self,
        params: RewardParams,
        recogniser: Recogniser,
        mos: MosPredictor | None = None,
        similarity: SimilarityModel | None = None,
    ) -> None:
        self._params = params
        self._recogniser = recogniser
        self._mos = mos
        self._similarity = similarity

    def check(self, prompts: Iterable[Mapping[str, str]]) -> None:
        """Raises ValueError for the first prompt {"id", "text"} whose text has nothing to compare with, by its id."""
        for prompt in prompts:
            try:
                reference_text(prompt["text"], self._params.text_rule)
            except ValueError as error:
                raise ValueError(f"prompt {prompt['id']}: {error}") from None

    def score(
        self, waves: Sequence[np.ndarray], texts: Sequence[str], truncated: Sequence[bool], sample_rate_hz: int
    ) -> list[TakeScore]:
        """As `TakeScorer.score`. Raises ValueError if a text has nothing to compare with, before any model is asked."""
        for text in texts:
            reference_text(text, self._params.text_rule)
        failures = [
            self._failures(wave, cut, sample_rate_hz) for wave, cut in zip(waves, truncated, strict=True)
        ]
        passed = [wave for wave, flags in zip(waves, failures, strict=True) if not flags]
        heard = iter(self._measure(passed, sample_rate_hz))
        return [
            self._judge(text, UNHEARD if flags else next(heard), flags)
            for text, flags in zip(texts, failures, strict=True)
        ]

    def _failures(self, wave: np.ndarray, truncated: bool, sample_rate_hz: int) -> tuple[str, ...]:
        reason = guard(wave, sample_rate_hz, self._params.guard, self._recogniser.window_s)
        return tuple(flag for flag in (reason, "truncated" if truncated else None) if flag)

    def _measure(self, waves: Sequence[np.ndarray], sample_rate_hz: int) -> list[Measured]:
        nothing = [None] * len(waves)
        return list(zip(
            self._recogniser.transcribe(waves, sample_rate_hz),
            self._mos.predict(waves, sample_rate_hz) if self._mos else nothing,
            self._similarity.compare(waves, sample_rate_hz) if self._similarity else nothing,
            strict=True,
        ))

    def _judge(self, text: str, measured: Measured, failures: tuple[str, ...]) -> TakeScore:
        transcript, mos, similarity = measured
        characters = character_errors(text, transcript or "", self._params.text_rule)
        words = word_errors(text, transcript or "", self._params.text_rule)
        rate = (characters if self._params.metric == "cer" else words).rate
        looping = transcript is not None and repeats(transcript)
        return TakeScore(
            composite=WORST if failures else composite(rate, mos, similarity, self._params.weights),
            cer=characters.rate,
            cer_capped=min(1.0, characters.rate),
            wer=words.rate,
            wer_capped=min(1.0, words.rate),
            cer_edits=characters.edits,
            cer_length=characters.length,
            wer_edits=words.edits,
            wer_length=words.length,
            mos=mos,
            speaker_similarity=similarity,
            transcript=transcript,
            flags=(*failures, "repeats") if looping else failures,
        )


@dataclass(frozen=True)
class Engines:
    """The loaded models of a reward; None where the params name none, or none was wanted."""

    recogniser: Recogniser
    mos: MosPredictor | None
    encoder: Encoder | None


def load_engines(
    params: Params, mos: bool, similarity: bool, checkpoint: Path | None = None, root: Path = Path()
) -> Engines:
    """The ASR, and the MOS and speaker models if they are wanted and `params.reward` names them; files verified.

    `checkpoint`: the voice, for the similarity engine `policy`. Raises ValueError for a file, package or setting that
    does not fit.
    """
    reward, runtime, assets = params.reward, params.runtime, params.assets
    recogniser = Transcriber(resolve("asr", assets, root), reward.asr, runtime.threads, runtime.device)
    predictor = encoder = None
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

    `every_metric`: measure also what weighs 0 in the composite, if an engine is named for it.
    """
    weights = params.reward.weights
    engines = load_engines(params, every_metric or weights.mos > 0, every_metric or weights.speaker_similarity > 0,
                           checkpoint, root)
    similarity = None
    if engines.encoder is not None:
        reference = read_audio(resolve_file("reference", params.assets, root))
        similarity = SpeakerSimilarity(engines.encoder, *reference)
    return Scorer(params.reward, engines.recogniser, engines.mos, similarity)
