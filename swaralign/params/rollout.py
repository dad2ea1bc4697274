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

    `speaker_kind`: what it speaks as; `penalises`: it knows a repetition penalty; `shards`: FSDP knows its layers;
    `longest_key`: the key that bounds a take, in units of which a second of speech has `units_per_second`.
    """

    speaker_kind: ClassVar[str]
    penalises: ClassVar[bool]
    shards: ClassVar[bool]
    longest_key: ClassVar[str]
    units_per_second: ClassVar[float]
    family: str
    batch_size: Count

    @property
    def longest(self) -> int:
        """The longest take, counted as `longest_key` counts: in frames or in tokens."""
        return int(getattr(self, self.longest_key))

    def check_window(self, key: str, window_s: float) -> None:
        """Raise ValueError if a take could be longer than what the ASR of section `key` hears at once."""
        longest_s = self.longest / self.units_per_second
        if longest_s > window_s:
            raise ValueError(f"rollout.{self.longest_key} {self.longest} can hold {longest_s:.2f} s of speech, longer "
                             f"than {key}.window_s {window_s}: such takes could not be scored; "
                             f"{int(window_s * self.units_per_second)} would do")


class Qwen3TtsRolloutParams(RolloutParams):
    speaker_kind, penalises, shards = "x_vector", False, True
    longest_key, units_per_second = "max_frames", 12.5
    family: Literal["qwen3_tts"]
    language: str
    predictor: PredictorParams
    base_frames: Annotated[int, Field(ge=2)]
    frames_per_token: Positive
    max_frames: Annotated[int, Field(ge=2)]


class OuteTtsRolloutParams(RolloutParams):
    speaker_kind, penalises, shards = "profile", True, False
    longest_key, units_per_second = "max_tokens", 150.0  # of the 24 kHz codec: 75 frames of two codes
    family: Literal["outetts"]
    base_tokens: Count
    tokens_per_text_token: Positive
    max_tokens: Count


class SamplingParams(Section):
    temperature: Positive
    top_k: Annotated[int, Field(ge=0)]
    top_p: Fraction
    repetition_penalty: Annotated[float, Field(ge=1)] = 1.0  # 1 is off; a key of its own only where it is wanted
