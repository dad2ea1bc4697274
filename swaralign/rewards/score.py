"""The reward of a take: 1 - min(1, CER or WER) of what the ASR hears, 0 for a take that failed.

Training, fixed validation and evaluation all ask the same `Scorer`, so that they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from swaralign.params import RewardParams
from swaralign.rewards.asr import repeats
from swaralign.rewards.guard import GUARD_REASONS, guard
from swaralign.rewards.text import Errors, character_errors, reference_text, word_errors

FAILURES = (*GUARD_REASONS, "truncated")  # flags of a failed take: worth 0, not transcribed
FLAGS = (*FAILURES, "repeats")


class Recogniser(Protocol):
    """What the scorer needs of an ASR: `asr.Transcriber`."""

    window_s: float

    def transcribe(self, waves: Sequence[np.ndarray], sample_rate_hz: int) -> list[str]: ...


@dataclass(frozen=True)
class TakeScore:
    """What became of one take.

    `reward` in [0, 1], higher better. `cer` and `wer` are raw and may pass 1; `cer_capped` and `wer_capped` may not.
    Edits and lengths are in characters and in words of the normalised text. A failed take counts every unit as
    deleted and has no transcript. `flags`: members of `FLAGS`; `repeats` marks a looping transcript, scored as any.
    """

    reward: float
    cer: float
    cer_capped: float
    wer: float
    wer_capped: float
    cer_edits: int
    cer_length: int
    wer_edits: int
    wer_length: int
    transcript: str | None
    flags: tuple[str, ...]

    @property
    def failed(self) -> bool:
        return any(flag in FAILURES for flag in self.flags)


class Scorer:
    """Scores takes: guard first, then the ASR for those that pass, then the error rates."""

    def __init__(self, params: RewardParams, recogniser: Recogniser) -> None:
        self._params = params
        self._recogniser = recogniser

    def check(self, prompts: Iterable[Mapping[str, str]]) -> None:
        """Raises ValueError for the first prompt {"id", "text"} whose text has nothing to compare with, by its id."""
        for prompt in prompts:
            try:
                reference_text(prompt["text"], self._params.text_rule)
            except ValueError as error:
                raise ValueError(f"prompt {prompt['id']}: {error}") from None

    def score(
        self,
        waves: Sequence[np.ndarray],
        texts: Sequence[str],
        truncated: Sequence[bool],
        sample_rate_hz: int,
    ) -> list[TakeScore]:
        """The score of each take: its (samples,) float32 wave, the text to be spoken, whether its budget ran out.

        Raises ValueError if a text has nothing to compare with, before anything is transcribed.
        """
        for text in texts:
            reference_text(text, self._params.text_rule)
        failures = [
            self._failures(wave, cut, sample_rate_hz) for wave, cut in zip(waves, truncated, strict=True)
        ]
        passed = [wave for wave, flags in zip(waves, failures, strict=True) if not flags]
        transcripts = iter(self._recogniser.transcribe(passed, sample_rate_hz))
        return [
            self._judge(text, None if flags else next(transcripts), flags)
            for text, flags in zip(texts, failures, strict=True)
        ]

    def _failures(self, wave: np.ndarray, truncated: bool, sample_rate_hz: int) -> tuple[str, ...]:
        reason = guard(wave, sample_rate_hz, self._params.guard, self._recogniser.window_s)
        return tuple(flag for flag in (reason, "truncated" if truncated else None) if flag)

    def _judge(self, text: str, transcript: str | None, failures: tuple[str, ...]) -> TakeScore:
        characters = character_errors(text, transcript or "", self._params.text_rule)
        words = word_errors(text, transcript or "", self._params.text_rule)
        metric = characters if self._params.metric == "cer" else words
        looping = transcript is not None and repeats(transcript)
        return TakeScore(
            reward=reward_of(metric),
            cer=characters.rate,
            cer_capped=min(1.0, characters.rate),
            wer=words.rate,
            wer_capped=min(1.0, words.rate),
            cer_edits=characters.edits,
            cer_length=characters.length,
            wer_edits=words.edits,
            wer_length=words.length,
            transcript=transcript,
            flags=(*failures, "repeats") if looping else failures,
        )


def reward_of(errors: Errors) -> float:
    """1 - min(1, error rate)."""
    return 1.0 - min(1.0, errors.rate)
