"""The prompts: how rows of a corpus, or lists of texts, become training and held-out prompts."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from swaralign.params.base import Count, Positive, Section


class SplitParams(Section):
    source: Literal["corpus"] = "corpus"
    config: str
    id_prefix: str
    scenario: Literal["Read", "Extempore"]
    window_rows: Count
    min_duration_s: Positive
    max_duration_s: Positive
    min_snr_db: float
    expected_train: Count
    held_out: Count

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.min_duration_s > self.max_duration_s:
            raise ValueError(f"min_duration_s {self.min_duration_s} is above max_duration_s {self.max_duration_s}")
        if self.expected_train > self.window_rows:
            raise ValueError(f"expected_train {self.expected_train} is above window_rows {self.window_rows}")
        return self


class TextSplitParams(Section):
    source: Literal["text"]
    config: str
    id_prefix: str
    train_files: list[str] = Field(min_length=1)
    held_out_files: list[str] = Field(min_length=1)
    expected_train: Count
    held_out: Count
