"""Voice families behind one interface: see `base.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from swaralign.params import RolloutParams, RuntimeParams
from swaralign.policy.base import TrainableVoice
from swaralign.policy.qwen3_tts import load_voice

FAMILIES = {"qwen3_tts": load_voice}


def load_policy(
    checkpoint: Path,
    speaker: Sequence[float],
    rollout: RolloutParams,
    runtime: RuntimeParams,
    adapter: Path | None = None,
) -> TrainableVoice:
    """Loads the voice of `rollout.family`; see `qwen3_tts.load_voice` for what it takes and raises."""
    return FAMILIES[rollout.family](checkpoint, speaker, rollout, runtime.device, adapter)
