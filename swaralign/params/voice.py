"""The voice that training starts from: how its adapter is merged, and whom it speaks as."""

from __future__ import annotations

from typing import Literal

from swaralign.params.base import Count, Positive, Section


class MergeParams(Section):
    orientation: Literal["mlx_lm", "peft"]
    scale: Positive | None
    expected_modules: Count


class DatasetSpeakerParams(Section):
    speaker_id: str | None


class SpeakerParams(Section):
    kind: Literal["x_vector"] = "x_vector"
    min_duration_s: Positive
    dataset: DatasetSpeakerParams | None = None  # a key of its own only where there is no assets.reference


class ProfileParams(Section):
    kind: Literal["profile"]
    min_duration_s: Positive
    transcript: str | None
    language: str
    compute_type: Literal["int8", "int8_float32", "float32"]  # word times are found on the CPU, whatever the device
    beam_size: Count
