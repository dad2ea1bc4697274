"""The one builder of Qwen3-TTS talker inputs, used by rollout and replay alike.

Layout: non-streaming, x-vector only. A position is a text embedding (projected) plus a codec embedding; a frame's
position is the text pad plus the sum of its codebooks' embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

NONE, SPEAKER = -1, -2  # entries of a codec row that stand for no codec embedding and for the speaker vector
ROLE_TOKENS, TAIL_TOKENS = 3, 5  # "<|im_start|>assistant\n" and "<|im_end|>\n<|im_start|>assistant\n"


def chat_text(text: str) -> str:
    """The text around which the official processor tokenises a prompt."""
    return f"<|im_start|>assistant\n{text}<|im_end|>\n<|im_start|>assistant\n"


def language_prefix(config: Any, language: str) -> list[int]:
    """Codec ids of the language tag: `auto`, or a name that the model knows.

    Raises:
        ValueError: the model has no such language; never a silent default.
    """
    talker = config.talker_config
    if language == "auto":
        return [talker.codec_nothink_id, talker.codec_think_bos_id, talker.codec_think_eos_id]
    known = talker.codec_language_id
    if language not in known:
        raise ValueError(f"rollout.language is {language!r}, but the model knows auto, {', '.join(sorted(known))}")
    return [talker.codec_think_id, talker.codec_think_bos_id, known[language], talker.codec_think_eos_id]


def prefill_rows(config: Any, text_ids: Sequence[int], prefix: Sequence[int]) -> tuple[list[int], list[int]]:
    """Text ids and codec ids of every prefill position.

    `text_ids`: the N tokens of `chat_text`. Returns two rows of N + 2 ids (for the three-id prefix of `auto`).
    """
    talker = config.talker_config
    ids = list(text_ids)
    words = [*ids[ROLE_TOKENS:-TAIL_TOKENS], config.tts_eos_token_id]
    pads = [config.tts_pad_token_id] * (len(prefix) + 1)
    text = [*ids[:ROLE_TOKENS], *pads, config.tts_bos_token_id, *words, config.tts_pad_token_id]
    codec = [NONE] * ROLE_TOKENS + [*prefix, SPEAKER, talker.codec_pad_id]
    codec += [talker.codec_pad_id] * len(words) + [talker.codec_bos_id]
    return text, codec


def embed_prefill(talker: Any, text: Tensor, codec: Tensor, speaker: Tensor) -> Tensor:
    """Embeds prefill positions.

    `text`: (..., P) text ids, NONE where a row is padding. `codec`: (..., P) codec ids, NONE or SPEAKER.
    `speaker`: (D,). Returns (..., P, D).
    """
    words = talker.text_projection(talker.model.text_embedding(text.clamp(min=0)))
    codes = talker.model.codec_embedding(codec.clamp(min=0)) * (codec >= 0).unsqueeze(-1)
    return words * (text >= 0).unsqueeze(-1) + codes + speaker * (codec == SPEAKER).unsqueeze(-1)


def embed_frames(talker: Any, frames: Tensor, pad_text: Tensor) -> Tensor:
    """Embeds frames of all codebooks: `frames` (..., 16) codes, `pad_text` (D,) the projected text pad -> (..., D)."""
    total = talker.model.codec_embedding(frames[..., 0])
    for book, table in enumerate(talker.code_predictor.model.codec_embedding, start=1):
        total = total + table(frames[..., book])
    return total + pad_text


def embed_text_pad(talker: Any, config: Any) -> Tensor:
    """(D,) the projected embedding of the text pad token."""
    table = talker.model.text_embedding
    token = torch.tensor([config.tts_pad_token_id], device=table.weight.device)
    return talker.text_projection(table(token))[0]
