"""What a run works on, where its curves go, and how the flow retries and stops it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from swaralign.params.base import Count, Section


class RuntimeParams(Section):
    device: Literal["cpu", "cuda"]
    threads: Count


class TrackingParams(Section):
    tracker: Literal["none", "tensorboard", "trackio", "wandb"]
    project: str


class FlowParams(Section):
    retries: Annotated[int, Field(ge=0)]
    retry_delay_s: Annotated[float, Field(ge=0)]
    grace_s: Annotated[float, Field(ge=0)]
