"""What every voice family offers to training, the candidate pool and evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from swaralign.params import SamplingParams


@dataclass(frozen=True)
class Take:
    """One sampled completion, kept as token ids; audio is derived from it.

    `completion_ids`: (n,) int64 flat ids as sampled. `policy_mask`: (n,) bool, True on the tokens that the policy
    chose (the others came from the environment). `frames`: codec frames. `truncated`: the frame budget ran out
    before the policy ended the take. `seed`: the draw's own seed.
    """

    completion_ids: np.ndarray
    policy_mask: np.ndarray
    frames: int
    truncated: bool
    seed: int


class VoicePolicy(Protocol):
    """A loaded voice: encodes prompts, rolls out, decodes."""

    sample_rate_hz: int

    def encode(self, text: str) -> list[int]:
        """Flat prompt ids of a text."""
        ...

    def rollout(self, texts: Sequence[str], seeds: Sequence[int], sampling: SamplingParams) -> list[Take]:
        """One take for each text, drawn from the seed beside it; a take depends on nothing else in the batch."""
        ...

    def decode(self, takes: Sequence[Take]) -> list[np.ndarray]:
        """(samples,) float32 waveform of each take at `sample_rate_hz`; an empty take decodes to an empty array."""
        ...
