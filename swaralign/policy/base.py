"""What every voice family offers to training, the candidate pool and evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from swaralign.params import RolloutParams, SamplingParams


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


class TrainableVoice(VoicePolicy, Protocol):
    """A voice as the trainers take it: the model that TRL trains, over the same ids that `encode` and takes hold."""

    model: Any  # a causal language model; the trainer's PEFT model around it once training has begun
    lora_targets: str  # regular expression over module names
    policy_parameters: str  # regular expression over the names of the parameters that are the policy's own

    @property
    def settings(self) -> RolloutParams: ...

    def policy_mask(self, completion_ids: np.ndarray) -> np.ndarray:
        """(n,) bool: which of a completion's (n,) ids the policy chose; the others came from the environment."""
        ...

    def trl_tokenizer(self) -> Any:
        """A tokenizer whose ids are the policy's, with its end of sequence, a padding that is no code, left padding."""
        ...
