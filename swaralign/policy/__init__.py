"""Voice families behind one interface: see `base.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from swaralign.params import RolloutParams, RuntimeParams
from swaralign.policy.base import TrainableVoice
from swaralign.policy.outetts import load_voice as load_outetts
from swaralign.policy.qwen3_tts import load_voice as load_qwen3_tts

FAMILIES: dict[str, Callable[..., TrainableVoice]] = {"qwen3_tts": load_qwen3_tts, "outetts": load_outetts}


def load_policy(
    checkpoint: Path,
    speaker: Any,
    rollout: RolloutParams,
    runtime: RuntimeParams,
    adapter: Path | None = None,
) -> TrainableVoice:
    """Loads the voice of `rollout.family`; `speaker` is what the speaker stage wrote for it, as its JSON reads.

    Raises ValueError as the family's own `load_voice` does.
    """
    return FAMILIES[rollout.family](checkpoint, speaker, rollout, runtime.device, adapter)
