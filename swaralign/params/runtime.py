"""What a run works on, where its curves go, and how the flow retries and stops it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Literal

from pydantic import Field

from swaralign.params.base import Count, Section


class RuntimeParams(Section):
    device: Literal["cpu", "cuda"]
    threads: Count


class TrackingParams(Section):
    tracker: Literal["none", "tensorboard", "trackio", "wandb"]
    project: str

    def check_installed(self) -> None:
        """Raises ValueError if the tracker's package is not installed."""
        # A folder of that name, as a tracker leaves one, has no origin.
        if self.tracker != "none" and getattr(find_spec(self.tracker), "origin", None) is None:
            raise ValueError(f"tracking.tracker is {self.tracker!r}, but its package is not installed: "
                             f"`pip install -c constraints.txt -e '.[{self.tracker}]'`, or set it to none")


class FlowParams(Section):
    retries: Annotated[int, Field(ge=0)]
    retry_delay_s: Annotated[float, Field(ge=0)]
    grace_s: Annotated[float, Field(ge=0)]
