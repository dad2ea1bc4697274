"""What tests of training share: small models of each kind, prompts, and a reward that costs nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from swaralign.params import OuteTtsRolloutParams, Params
from swaralign.policy import load_policy
from swaralign.policy.base import TrainableVoice
from swaralign.rewards.scorer import TakeScore
from swaralign.training import common

ROOT = Path(__file__).resolve().parent.parent
BASE = ROOT / "data" / "demo" / "base"
TEXTS = ["Do you like red cars?", "The weather in London is sunny today.", "My brother bought a blue book.",
         "We need two apples and five tickets."]
PROMPTS = [{"id": f"p{index}", "text": text} for index, text in enumerate(TEXTS)]
# The shape of a Whisper that hears nothing, for `benchmarks.full_size_whisper.write_whisper`.
TINY_WHISPER = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
                "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_mel_bins": 80}


class LengthScorer:
    """A reward that is easy to learn and costs nothing: the longer the take, the better, up to `full_s` seconds."""

    elsewhere = False

    def __init__(self, full_s: float = 4.0) -> None:
        self.full_s = full_s

    def score(
        self, waves: Sequence[np.ndarray], texts: Sequence[str], truncated: Sequence[bool], sample_rate_hz: int
    ) -> list[TakeScore]:
        return [self._one(len(wave) / sample_rate_hz) for wave in waves]

    def check(self, prompts: Sequence[dict[str, str]]) -> None:
        """Any text will do: only its length is heard."""

    def _one(self, seconds: float) -> TakeScore:
        missing = 1 - min(1.0, seconds / self.full_s)
        return TakeScore(1 - missing, missing, missing, missing, missing, 0, 1, 0, 1, None, None, "", ())


def qwen3_tts(params: Params, max_frames: int = 96) -> TrainableVoice:
    """The demo's base voice with a speaker of its own."""
    torch.set_num_threads(1)
    speaker = torch.randn(256, generator=torch.Generator().manual_seed(5)) * 0.15
    rollout = params.rollout.model_copy(update={"max_frames": max_frames})
    return load_policy(BASE, speaker.tolist(), rollout, params.runtime)


def outetts(params: Params, max_frames: int = 96) -> TrainableVoice:
    """The micro OuteTTS with a speaker of its own; for a frame of the other family's it may have 16 tokens."""
    torch.set_num_threads(1)
    speaker = json.loads((ROOT / "tests" / "data" / "outetts" / "speaker.json").read_text(encoding="utf-8"))
    rollout = OuteTtsRolloutParams(family="outetts", base_tokens=16 * max_frames, tokens_per_text_token=1.0,
                                   max_tokens=16 * max_frames, batch_size=64)
    return load_policy(ROOT / "data" / "outetts-micro" / "base", speaker, rollout, params.runtime)


FAMILIES: dict[str, Callable[[Params, int], TrainableVoice]] = {"qwen3_tts": qwen3_tts, "outetts": outetts}


def adapter(result: common.Training) -> dict[str, torch.Tensor]:
    """The trained adapter's tensors."""
    return {name: value.detach().clone() for name, value in result.trainer.model.named_parameters() if "lora_" in name}


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest difference between two adapters of the same shape."""
    assert a.keys() == b.keys() and a
    return max((a[name] - b[name]).abs().max().item() for name in a)
