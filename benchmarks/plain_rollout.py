"""A plain rollout over the official modules, one call a token: what the engine must equal, and is measured against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from swaralign.params import PredictorParams, SamplingParams
from swaralign.policy.prompt import embed_frames, embed_prefill, embed_text_pad
from swaralign.policy.sampling import draw, uniforms
from swaralign.policy.slots import MIN_FRAMES, Frames, Prompt, suppressed_ids


@torch.inference_mode()
def plain_rollout(
    model: Any, speaker: Tensor, prompt: Prompt, sampling: SamplingParams, predictor: PredictorParams
) -> Frames:
    """Samples one take through the official talker and code predictor, with the same draws as the engine."""
    talker, eos = model.talker, model.config.talker_config.codec_eos_token_id
    hidden_ids = suppressed_ids(model.config.talker_config.vocab_size, eos)
    books = model.config.talker_config.num_code_groups
    numbers = uniforms([prompt.seed], prompt.budget, books)[0]
    x = embed_prefill(talker, torch.tensor(prompt.text), torch.tensor(prompt.codec), speaker)[None]
    cache = DynamicCache()
    frames: list[np.ndarray] = []
    for step in range(prompt.budget):
        hidden = talker.model(inputs_embeds=x, past_key_values=cache, use_cache=True).last_hidden_state[:, -1]
        logits = talker.codec_head(hidden)
        logits[:, hidden_ids] = -torch.inf
        if step < MIN_FRAMES:
            logits[:, eos] = -torch.inf
        first = draw(logits, numbers[step, :1], sampling.temperature, sampling.top_k, sampling.top_p)
        if first.item() == eos:
            return Frames(_stack(frames, books), True, np.zeros(0))
        codes = _plain_answer(talker, hidden, first, numbers[step, 1:], predictor)
        frames.append(codes[0].numpy())
        x = embed_frames(talker, codes, embed_text_pad(talker, model.config))[:, None]
    return Frames(_stack(frames, books), False, np.zeros(0))


def _plain_answer(talker: Any, hidden: Tensor, first: Tensor, numbers: Tensor, settings: PredictorParams) -> Tensor:
    predictor, cache = talker.code_predictor, DynamicCache()
    opening = torch.stack([hidden, talker.model.codec_embedding(first)], dim=1)
    output = predictor(inputs_embeds=opening, past_key_values=cache, use_cache=True)
    codes = [first]
    for book in range(len(numbers)):
        logits = output.logits[:, -1]
        code = draw(logits, numbers[book : book + 1], settings.temperature, settings.top_k, settings.top_p)
        codes.append(code)
        if book < len(numbers) - 1:
            output = predictor(
                input_ids=code[:, None], generation_steps=book + 1, past_key_values=cache, use_cache=True
            )
    return torch.stack(codes, dim=1)


def _stack(frames: Sequence[np.ndarray], books: int) -> np.ndarray:
    return np.stack(frames) if frames else np.zeros((0, books), dtype=np.int64)
