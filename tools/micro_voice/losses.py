"""The talker's and the code predictor's cross-entropies, each with exactly one shift, written out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swaralign.policy.prompt import SPEAKER
from tools.micro_voice.layout import IGNORE, Batch, Corpus, held_batch


@dataclass(frozen=True)
class Noise:
    """Augmentation: share of history codes replaced, and noise on the speaker vector in units of its own std."""

    corrupt: float = 0.06
    speaker: float = 0.3


def corrupt_codes(codes: Tensor, entries: int, share: float) -> Tensor:
    """Replace codes by random entries; the share is drawn per row, uniform up to twice `share`."""
    rate = 2 * share * torch.rand(len(codes), *[1] * (codes.ndim - 1), device=codes.device)
    return torch.where(torch.rand(codes.shape, device=codes.device) < rate, torch.randint_like(codes, entries), codes)


def residual_embedding(predictor: Any, codes: Tensor) -> Tensor:
    """Embeddings of the books from 1 on, (..., K) -> (..., K, hidden), by one look-up in the stacked tables."""
    tables = [table.weight for table in predictor.model.codec_embedding[: codes.shape[-1]]]
    shift = len(tables[0]) * torch.arange(len(tables), device=codes.device)
    return F.embedding(codes + shift, torch.cat(tables))


def embed(talker: Any, batch: Batch, speaker: Tensor) -> Tensor:
    """Input embeddings (B, L, hidden): projected text, plus codec id, speaker vector (B, hidden) or frame."""
    x = talker.text_projection(talker.model.text_embedding(batch.text))
    x = x + talker.model.codec_embedding(batch.codec.clamp(min=0)) * (batch.codec >= 0)[..., None]
    x = x + speaker[:, None] * (batch.codec == SPEAKER)[..., None]
    frame = talker.model.codec_embedding(batch.frames_in[..., 0])
    frame = frame + residual_embedding(talker.code_predictor, batch.frames_in[..., 1:]).sum(-2)
    return x + frame * batch.has_in[..., None]


def residual_loss(talker: Any, states: Tensor, codes: Tensor, heard: Tensor) -> Tensor:
    """Cross-entropy of each residual book, (Q-1,), from the states (M, hidden) that predicted the frames (M, Q)."""
    predictor = talker.code_predictor
    first = talker.model.codec_embedding(heard[:, :1])
    inputs = torch.cat([states[:, None], first, residual_embedding(predictor, heard[:, 1:-1])], 1)
    hidden = predictor.model(
        inputs_embeds=predictor.small_to_mtp_projection(inputs), use_cache=False
    ).last_hidden_state[:, 1:]
    heads = torch.stack([head.weight for head in predictor.lm_head])
    logits = torch.einsum("mqh,qvh->mqv", hidden, heads).float()
    each = F.cross_entropy(logits.flatten(0, 1), codes[:, 1:].flatten(), reduction="none")
    return each.view(len(codes), -1).mean(0)


def losses(talker: Any, batch: Batch, speaker: Tensor, noise: Noise | None) -> tuple[Tensor, Tensor]:
    """Codebook-0 cross-entropy (with EOS), and that of each residual book (Q-1,).

    speaker: (hidden,). noise=None is the plain teacher-forced loss, otherwise the training one.
    """
    entries = talker.code_predictor.vocab_size
    vector = speaker.expand(len(batch.text), -1)
    heard = batch.frames_out[batch.has_out]
    if noise is not None:
        scale = noise.speaker * speaker.std() * torch.rand(len(vector), 1, device=vector.device)
        vector = vector + scale * torch.randn_like(vector)
        batch = replace(batch, frames_in=corrupt_codes(batch.frames_in, entries, noise.corrupt))
        heard = corrupt_codes(heard, entries, noise.corrupt / 2)
    states = talker.model(inputs_embeds=embed(talker, batch, vector), use_cache=False).last_hidden_state
    logits = talker.codec_head(states).float()
    first = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE)
    codes = batch.frames_out[batch.has_out]
    return first, residual_loss(talker, states[batch.has_out], codes, heard)


@torch.no_grad()
def held_losses(talker: nn.Module, corpus: Corpus, speaker: Tensor) -> tuple[float, float]:
    """Codebook-0 and mean residual cross-entropy of the held-out sentences, in nats, dropout off."""
    was_training = talker.training
    talker.eval()
    first, residual = losses(talker, held_batch(corpus), speaker, None)
    talker.train(was_training)
    return first.item(), residual.mean().item()
