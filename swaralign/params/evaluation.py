"""How voices are evaluated and compared, and what the report shows."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from swaralign.params.base import Count, Positive, Section, Seed
from swaralign.params.reward import AsrParams
from swaralign.params.rollout import SamplingParams


class EvaluateParams(Section):
    seed: Seed
    samples_per_prompt: Count
    prompts: Count
    sampling: SamplingParams
    second_asr: AsrParams | None


class CompareParams(Section):
    confidence: Annotated[float, Field(gt=0.5, lt=1)]
    resamples: Annotated[int, Field(ge=100)]
    seed: Seed
    catastrophic_wer: Positive


class ReportParams(Section):
    prompts_with_audio: Count
