"""What tests of the reward and the evaluation share: clips of the demo corpus, its ASR, a voice that plays them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from swaralign.assets import resolve
from swaralign.audio import read_audio, resample
from swaralign.params import Params, SamplingParams, load_params
from swaralign.policy.base import Take
from swaralign.rewards.asr import Transcriber

ROOT = Path(__file__).resolve().parent.parent
RATE_HZ = 24000
FRAME_SAMPLES = 1920  # 12.5 frames a second


@cache
def demo_params() -> Params:
    """The demo recipe."""
    return load_params(ROOT / "recipes" / "demo.yaml")


@cache
def clips(count: int) -> list[tuple[str, np.ndarray]]:
    """Text and 24 kHz wave of the first rows of the demo corpus whose text is unambiguous."""
    table = pq.read_table(ROOT / "data" / "demo" / "corpus.parquet", columns=["text", "normalized", "audio"])
    rows = [row for row in table.slice(0, 2 * count).to_pylist() if row["normalized"]][:count]
    return [(row["normalized"], _wave(row["audio"]["bytes"])) for row in rows]


def transcriber(threads: int = 2, **changes: Any) -> Transcriber:
    """The demo's ASR with some of its params changed."""
    params = demo_params()
    return Transcriber(asr_folder(), params.reward.asr.model_copy(update=changes), threads, "cpu")


@cache
def asr_folder() -> Path:
    """The demo's Whisper, joined and verified."""
    return resolve("asr", demo_params().assets, ROOT)


class Playback:
    """A voice that plays given waves back, one a text; its takes record what they were asked for."""

    sample_rate_hz = RATE_HZ

    def __init__(self, waves: dict[str, np.ndarray], truncated: Sequence[str] = ()) -> None:
        self.waves, self.truncated = waves, truncated
        self.asked: list[tuple[str, int]] = []

    def encode(self, text: str) -> list[int]:
        return [list(self.waves).index(text)]

    def rollout(self, texts: Sequence[str], seeds: Sequence[int], sampling: SamplingParams) -> list[Take]:
        self.asked += zip(texts, seeds, strict=True)
        return [
            Take(
                completion_ids=np.array(self.encode(text)),
                policy_mask=np.array([True]),
                frames=len(self.waves[text]) // FRAME_SAMPLES,
                truncated=text in self.truncated,
                seed=seed,
            )
            for text, seed in zip(texts, seeds, strict=True)
        ]

    def decode(self, takes: Sequence[Take]) -> list[np.ndarray]:
        waves = list(self.waves.values())
        return [waves[take.completion_ids[0]] for take in takes]


def _wave(audio: bytes) -> np.ndarray:
    wave, sample_rate_hz = read_audio(audio)
    return resample(wave, sample_rate_hz, RATE_HZ)
