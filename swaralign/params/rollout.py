"""How the voice families speak, and how their tokens are sampled."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from swaralign.params.base import Count, Fraction, Positive, Section


class PredictorParams(Section):
    temperature: Annotated[float, Field(ge=0)]
    top_k: Annotated[int, Field(ge=0)]
    top_p: Fraction


class RolloutParams(Section):
    """What every voice family has.

    `speaker_kind`: what it speaks as; `penalises`: it knows a repetition penalty; `shards`: FSDP knows its layers.
    """

    speaker_kind: ClassVar[str]
    penalises: ClassVar[bool]
    shards: ClassVar[bool]
    family: str
    batch_size: Count

    def check_window(self, key: str, window_s: float) -> None:
        """Raise ValueError if a take could be longer than what the ASR of section `key` hears at once."""
        raise NotImplementedError


class Qwen3TtsRolloutParams(RolloutParams):
    speaker_kind, penalises, shards = "x_vector", False, True
    frames_per_second: ClassVar[float] = 12.5
    family: Literal["qwen3_tts"]
    language: str
    predictor: PredictorParams
    base_frames: Annotated[int, Field(ge=2)]
    frames_per_token: Positive
    max_frames: Annotated[int, Field(ge=2)]

    def check_window(self, key: str, window_s: float) -> None:
        longest_s = self.max_frames / self.frames_per_second
        if longest_s > window_s:
            raise ValueError(f"rollout.max_frames {self.max_frames} is {longest_s:.2f} s of speech, longer than "
                             f"{key}.window_s {window_s}: such takes could not be scored; "
                             f"{int(window_s * self.frames_per_second)} frames would do")


class OuteTtsRolloutParams(RolloutParams):
    speaker_kind, penalises, shards = "profile", True, False
    codes_per_second: ClassVar[int] = 150  # of the 24 kHz codec: 75 frames of two codes
    family: Literal["outetts"]
    base_tokens: Count
    tokens_per_text_token: Positive
    max_tokens: Count

    def check_window(self, key: str, window_s: float) -> None:
        longest_s = self.max_tokens / self.codes_per_second
        if longest_s > window_s:
            raise ValueError(f"rollout.max_tokens {self.max_tokens} can hold {longest_s:.2f} s of speech, longer than "
                             f"{key}.window_s {window_s}: such takes could not be scored; "
                             f"{int(window_s * self.codes_per_second)} tokens would do")


class SamplingParams(Section):
    temperature: Positive
    top_k: Annotated[int, Field(ge=0)]
    top_p: Fraction
    repetition_penalty: Annotated[float, Field(ge=1)] = 1.0  # 1 is off; a key of its own only where it is wanted
