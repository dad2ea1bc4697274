"""A Qwen3-style decoder stack for sampling: fused projections, static key-value cache, no per-step Python objects.

The talker and its code predictor share this block structure; every rotary position of a token is the same number, so
the talker's multimodal rotary embedding is the plain one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def effective_weight(linear: Any) -> Tensor:
    """The weight that a linear layer applies: its own, plus the deltas of its live LoRA adapters."""
    if not hasattr(linear, "base_layer"):
        return linear.weight.detach()
    weight = linear.base_layer.weight.detach()
    if linear.merged or linear.disable_adapters:
        return weight
    for name in linear.active_adapters:
        if name in linear.lora_A:
            weight = weight + linear.get_delta_weight(name).detach()
    return weight


@dataclass(frozen=True)
class BlockWeights:
    """One block's weights, matrices transposed for `x @ W`: qkv (D, (H + 2 KV) d), gate_up (D, 2 M), and so on."""

    input_norm: Tensor
    qkv: Tensor
    qk_norm: Tensor
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


def _block_weights(layer: Any) -> BlockWeights:
    attention, mlp = layer.self_attn, layer.mlp
    heads = attention.config.num_attention_heads
    # Scaling the query's norm by 1/sqrt(d) scales the attention scores, one multiplication less a step.
    query_norm = attention.q_norm.weight.detach() * attention.scaling
    key_norm = attention.k_norm.weight.detach()
    qk_norm = torch.cat([query_norm.expand(heads, -1), key_norm.expand(attention.config.num_key_value_heads, -1)])
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    return BlockWeights(
        input_norm=layer.input_layernorm.weight.detach(),
        qkv=torch.cat([effective_weight(p) for p in projections]).T.contiguous(),
        qk_norm=qk_norm,
        output=effective_weight(attention.o_proj).T.contiguous(),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=torch.cat([effective_weight(mlp.gate_proj), effective_weight(mlp.up_proj)]).T.contiguous(),
        down=effective_weight(mlp.down_proj).T.contiguous(),
    )


class FusedDecoder:
    """The layers of a talker or code predictor model, ready to step.

    Raises:
        ValueError: the attention projections carry biases, which no published Qwen3-TTS has.
    """

    def __init__(self, model: Any) -> None:
        config = model.config
        if config.attention_bias:
            raise ValueError("attention_bias is set in the checkpoint's config; the rollout engine knows no such model")
        self.blocks = [_block_weights(layer) for layer in model.layers]
        self.final_norm = model.norm.weight.detach()
        self.eps = config.rms_norm_eps
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = model.layers[0].self_attn.head_dim
        rotary = model.rotary_emb
        positions = torch.arange(config.max_position_embeddings, device=self.final_norm.device)
        angles = torch.outer(positions.float(), rotary.inv_freq.float())
        half = torch.cat([angles.cos(), angles.cos()], dim=-1), torch.cat([-angles.sin(), angles.sin()], dim=-1)
        self.cos, self.sin = (table * rotary.attention_scaling for table in half)
        self.keys = self.values = torch.empty(0)

    def reset(self, batch: int, length: int) -> None:
        """Allocates an empty cache for `batch` rows of `length` tokens.

        Raises:
            ValueError: `length` is beyond the positions that the model knows.
        """
        if length > len(self.cos):
            raise ValueError(f"a prompt and its frame budget need {length} positions; the model has {len(self.cos)}")
        shape = (len(self.blocks), batch, self.kv_heads, length, self.head_dim)
        self.keys = self.final_norm.new_zeros(shape)
        self.values = self.final_norm.new_zeros(shape)

    def keep(self, rows: Tensor) -> None:
        """Drops the cache of every row but these: `rows` (n,) indices."""
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]

    def prefill(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """Fills the cache from position 0. `x` (B, T, D); cos, sin (B or 1, T, 1, d); mask (B, 1, T, T) bool, True
        where attended, or None for causal. Returns (B, T, D) after the final norm."""
        groups = self.heads // self.kv_heads
        for index, block in enumerate(self.blocks):
            query, key, value = self._project(block, x, cos, sin)
            self.keys[index, :, :, : x.shape[1]] = key.transpose(1, 2)
            self.values[index, :, :, : x.shape[1]] = value.transpose(1, 2)
            keys, values = (t.transpose(1, 2).repeat_interleave(groups, dim=1) for t in (key, value))
            mixed = F.scaled_dot_product_attention(
                query.transpose(1, 2), keys, values, attn_mask=mask, is_causal=mask is None, scale=1.0
            )
            x = self._finish(block, x, mixed.transpose(1, 2).flatten(2))
        return F.rms_norm(x, x.shape[-1:], self.final_norm, self.eps)

    def step(self, x: Tensor, position: int, cos: Tensor, sin: Tensor, bias: Tensor | None) -> Tensor:
        """Appends one token a row at cache slot `position`. `x` (B, D); cos, sin (B or 1, 1, d); bias
        (B, 1, 1, position + 1), added to the scores. Returns (B, D) after the final norm."""
        batch, end = x.shape[0], position + 1
        for index, block in enumerate(self.blocks):
            query, key, value = self._project(block, x, cos, sin)
            self.keys[index, :, :, position] = key
            self.values[index, :, :, position] = value
            grouped = query.view(batch, self.kv_heads, -1, self.head_dim)
            scores = grouped @ self.keys[index, :, :, :end].transpose(-1, -2)
            if bias is not None:
                scores = scores + bias
            mixed = torch.softmax(scores, dim=-1) @ self.values[index, :, :, :end]
            x = self._finish(block, x, mixed.view(batch, -1))
        return F.rms_norm(x, x.shape[-1:], self.final_norm, self.eps)

    def _project(self, block: BlockWeights, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys (normed and rotated) and values, each (..., heads, d)."""
        normed = F.rms_norm(x, x.shape[-1:], block.input_norm, self.eps)
        qkv = (normed @ block.qkv).unflatten(-1, (-1, self.head_dim))
        qk = qkv[..., : self.heads + self.kv_heads, :]
        qk = F.rms_norm(qk, qk.shape[-1:], None, self.eps) * block.qk_norm
        qk = qk * cos + qk.roll(self.head_dim // 2, -1) * sin
        return qk[..., : self.heads, :], qk[..., self.heads :, :], qkv[..., self.heads + self.kv_heads :, :]

    def _finish(self, block: BlockWeights, x: Tensor, mixed: Tensor) -> Tensor:
        """The block after attention: output projection and MLP, each added to the residual."""
        x = x + mixed @ block.output
        normed = F.rms_norm(x, x.shape[-1:], block.mlp_norm, self.eps)
        gate, up = (normed @ block.gate_up).chunk(2, dim=-1)
        return x + (F.silu(gate) * up) @ block.down
