"""Cheap scorers that a server process of a test serves; what a take is worth stands in its prompt."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from swaralign.scoring import AudioScorer, AudioTake, Scalar

NOT_CALLABLE = 3
UNSENDABLE: dict[str, Scalar] = {"surrogate": "\ud800", "huge": 10**5000}  # by prompt
BIG = 190_000  # bytes; two seconds at 24 kHz are 192,000, and as base64 more


class Number(AudioScorer):
    """The number in the prompt, after `delay_s` a batch; some prompts are not numbers and do something else."""

    def __init__(self, delay_s: float = 0.0, load_s: float = 0.0) -> None:
        time.sleep(load_s)
        self.delay_s = delay_s

    def check(self, take: AudioTake) -> None:
        if take.prompt == "unscorable":
            raise ValueError("that cannot be scored")
        if take.prompt == "whose":
            str(take.metadata["speaker"])

    def score(self, takes: Sequence[AudioTake]) -> list[float | Mapping[str, Scalar]]:
        time.sleep(self.delay_s)
        return [self._one(take, len(takes)) for take in takes]

    def _one(self, take: AudioTake, batch: int) -> float | Mapping[str, Scalar]:
        if take.prompt == "raises":
            raise RuntimeError("this take breaks the model")
        if take.prompt == "stops":
            return next(iter(()))
        if take.prompt == "bare":
            return np.float32(0.5)  # type: ignore[return-value]  # as a model hands it out
        if take.prompt == "said":
            return {"score": 1.0, "asr_text": UNSENDABLE["surrogate"]}
        if take.prompt in UNSENDABLE:
            return {"score": 1.0, "note": UNSENDABLE[take.prompt]}
        return {"score": float(take.prompt), "batch": batch, "seconds": len(take.wave) / take.sample_rate_hz}


class Held(Number):
    """As `Number`, as soon as a file is gone."""

    def __init__(self, hold: str) -> None:
        super().__init__()
        self.hold = Path(hold)

    def score(self, takes: Sequence[AudioTake]) -> list[float | Mapping[str, Scalar]]:
        while self.hold.exists():
            time.sleep(0.02)
        return super().score(takes)


class Weighed(Number):
    """As `Number`; the prompt "memory" is told how many objects as big as a take Python holds, and the bytes of all.

    Needs PYTHONTRACEMALLOC. Unlike the size of the process it does not depend on what malloc keeps.
    """

    def _one(self, take: AudioTake, batch: int) -> float | Mapping[str, Scalar]:
        if take.prompt != "memory":
            return super()._one(take, batch)
        gc.collect()
        held, peak = tracemalloc.get_traced_memory()
        big = sum(trace.size >= BIG for trace in tracemalloc.take_snapshot().traces)
        return {"score": 0.0, "big": big, "held": held, "peak": peak}


class Seconds(AudioScorer):
    """The longer the better: a score that only the audio decides, and that no recogniser stands behind."""

    def score(self, takes: Sequence[AudioTake]) -> list[float]:
        return [len(take.wave) / take.sample_rate_hz - 3.0 for take in takes]


class Short(AudioScorer):
    """Forgets a take."""

    def score(self, takes: Sequence[AudioTake]) -> list[float]:
        return [1.0] * (len(takes) - 1)


class Unwritten(AudioScorer):
    """Has no `score`."""


def nothing(name: str = "") -> None:
    """Returns no scorer."""


def unloadable() -> AudioScorer:
    raise ValueError("its weights are missing; fetch them")
