"""The pool of scored takes, and the pairs and labels made of it."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from swaralign.params.base import Count, Fraction, Positive, Section, Seed


class CandidatesParams(Section):
    seed: Seed
    prompts: Count | None
    temperatures: Annotated[list[Positive], Field(min_length=1)]
    per_temperature: Count
    top_k: Annotated[int, Field(ge=0)]
    top_p: Fraction
    save_every: Count

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        if len(set(self.temperatures)) < len(self.temperatures):
            raise ValueError(f"temperatures {self.temperatures} names one twice; raise per_temperature instead")
        if len(self.temperatures) * self.per_temperature < 2:
            raise ValueError("one take a prompt makes no preference; raise per_temperature or add a temperature")
        return self


class PairsParams(Section):
    strategy: Literal["max_margin", "top_k_vs_bottom_k"]
    k: Count
    min_margin: Annotated[float, Field(ge=0)]


class LabelsParams(Section):
    top: Annotated[float, Field(gt=0, lt=1)]
    bottom: Annotated[float, Field(gt=0, lt=1)]

    @model_validator(mode="after")
    def _disjoint(self) -> Self:
        if self.top + self.bottom > 1:
            raise ValueError(f"top {self.top} and bottom {self.bottom} overlap: together they may be at most 1")
        return self


class PreferencesParams(Section):
    pairs: PairsParams
    labels: LabelsParams
