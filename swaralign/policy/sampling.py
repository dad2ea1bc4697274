"""Draws from logits by inverse transform sampling: one uniform number decides a token, so a take owns its draws."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 1024  # numbers that are summed in one go


def uniforms(seeds: Sequence[int], steps: int, draws: int) -> Tensor:
    """(len(seeds), steps, draws) float32 numbers in [0, 1), each row from its own seed alone."""
    rows = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        rows.append(torch.rand(steps, draws, generator=generator))
    return torch.stack(rows)


def probabilities(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """(..., V) sampling distribution: temperature, then top-k, then top-p (nucleus), as in transformers' warpers.

    `top_k` 0 and `top_p` 1.0 are off.
    """
    logits = logits.float() / temperature
    if 0 < top_k < logits.shape[-1]:
        floor = torch.topk(logits, top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < floor, -torch.inf)
    if top_p < 1.0:
        logits = _nucleus(logits, top_p)
    return torch.softmax(logits, dim=-1)


def _nucleus(logits: Tensor, top_p: float) -> Tensor:
    ascending, order = torch.sort(logits, dim=-1)
    tail = torch.softmax(ascending, dim=-1).cumsum(dim=-1) <= 1 - top_p
    tail[..., -1] = False  # the likeliest token always stays
    return logits.masked_fill(tail.scatter(-1, order, tail), -torch.inf)


def _running_sum(x: Tensor) -> Tensor:
    """(B, V) cumulative sums along V: in blocks, since a GPU adds up a row in one go, but rows side by side, and in
    float64, so that no order of the sums decides a token."""
    blocks = F.pad(x.double(), (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK)).cumsum(dim=-1)
    before = F.pad(blocks[..., -1].cumsum(dim=-1), (1, -1))
    return (blocks + before.unsqueeze(-1)).flatten(-2)[..., : x.shape[-1]]


def draw(logits: Tensor, uniform: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Draws one token a row: `logits` (B, V), `uniform` (B,) in [0, 1) -> (B,) ids. Temperature 0 is greedy."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    cumulative = _running_sum(probabilities(logits, temperature, top_k, top_p))
    # Scaling by the sum keeps a rounding error in the last place from stepping past the last possible token.
    threshold = uniform.unsqueeze(-1) * cumulative[..., -1:]
    return (cumulative <= threshold).sum(dim=-1)
