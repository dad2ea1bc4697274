"""What the rollout benchmark speaks with: a checkpoint, or the official 0.6B shapes with random weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.full_size import full_config
from swaralign.params import PredictorParams, SamplingParams
from swaralign.policy.codec_model import CodecPolicy
from swaralign.policy.prompt import chat_text, language_prefix, prefill_rows
from swaralign.policy.slots import Prompt

TEXT = "The weather in London is sunny today."
TEXT_TOKENS = 30  # of a random prompt
HEAD_SCALE = 4.0  # makes random distributions about as peaked as a trained voice's


@dataclass(frozen=True)
class Voice:
    """A model in float32, the text ids that all prompts share, and how it samples."""

    model: Any
    text_ids: Sequence[int]
    sampling: SamplingParams
    predictor: PredictorParams

    def prompt(self, seed: int, frames: int) -> Prompt:
        config = self.model.config
        text, codec = prefill_rows(config, self.text_ids, language_prefix(config, "auto"))
        return Prompt(text, codec, frames, seed)


def checkpoint_voice(folder: Path, device: str, sampling: SamplingParams, predictor: PredictorParams) -> Voice:
    """A voice from a checkpoint folder, with a speaker vector of zeros."""
    from transformers import AutoTokenizer

    hidden = json.loads((folder / "config.json").read_text(encoding="utf-8"))["talker_config"]["hidden_size"]
    model = CodecPolicy.from_pretrained(str(folder), dtype=torch.float32).to(device).eval()
    model.set_speaker([0.0] * hidden)
    ids = AutoTokenizer.from_pretrained(str(folder))(chat_text(TEXT))["input_ids"]
    return Voice(model, ids, sampling, predictor)


def random_voice(device: str, sampling: SamplingParams, predictor: PredictorParams) -> Voice:
    """The official 0.6B shapes with random weights, made on the device."""
    from qwen_tts.core.models import Qwen3TTSConfig

    torch.manual_seed(0)
    with torch.device(device):
        model = CodecPolicy(Qwen3TTSConfig(**full_config())).eval()
        model.speaker = torch.randn(len(model.speaker)) * 0.02
    with torch.no_grad():
        for head in (model.talker.codec_head, *model.talker.code_predictor.lm_head):
            head.weight *= HEAD_SCALE
    return Voice(model, list(range(100, 100 + TEXT_TOKENS)), sampling, predictor)
