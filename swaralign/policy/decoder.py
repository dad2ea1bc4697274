"""A Qwen3-style decoder stack for sampling: fused projections, static key-value cache, as few operations as may be.

The talker and its code predictor share this block structure; every rotary position of a token is the same number, so
the talker's multimodal rotary embedding is the plain one. On a CPU a step of a small model is mostly the cost of
starting operations, hence the forms below: norm weights are folded into the matrices that follow them, the weights of
the query and key norms into the rotary tables, and residuals are added by the matrix products.
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
    """One block's weights, matrices transposed for `x @ W`: qkv (D, (H + 2 KV) d), gate_up (D, 2 M), and so on.

    `qkv` and `gate_up` hold the norm weights before them; `qk_norm` is (H + KV, d), the score's scale included.
    """

    qkv: Tensor
    qk_norm: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass
class Cache:
    """Keys and values (blocks, B KV, length, d), and of each block the rotary tables times its norm weights."""

    keys: Tensor
    values: Tensor
    cos: Tensor
    sin: Tensor


def _block_weights(layer: Any) -> BlockWeights:
    attention, mlp = layer.self_attn, layer.mlp
    heads, kv_heads = attention.config.num_attention_heads, attention.config.num_key_value_heads
    query_norm = attention.q_norm.weight.detach() * attention.scaling
    key_norm = attention.k_norm.weight.detach()
    input_norm, mlp_norm = (n.weight.detach() for n in (layer.input_layernorm, layer.post_attention_layernorm))
    qkv = torch.cat([effective_weight(p) for p in (attention.q_proj, attention.k_proj, attention.v_proj)])
    gate_up = torch.cat([effective_weight(mlp.gate_proj), effective_weight(mlp.up_proj)])
    return BlockWeights(
        qkv=(qkv * input_norm).T.contiguous(),
        qk_norm=torch.cat([query_norm.expand(heads, -1), key_norm.expand(kv_heads, -1)]),
        output=effective_weight(attention.o_proj).T.contiguous(),
        gate_up=(gate_up * mlp_norm).T.contiguous(),
        down=effective_weight(mlp.down_proj).T.contiguous(),
    )


class FusedDecoder:
    """The layers of a talker or code predictor model, ready to step.

    States come back normed but for the final norm's weights, which `fold_final_norm` puts into what reads them.

    Raises:
        ValueError: the attention projections carry biases, which no published Qwen3-TTS has.
    """

    def __init__(self, model: Any) -> None:
        config = model.config
        if config.attention_bias:
            raise ValueError("attention_bias is set in the checkpoint's config; the rollout engine knows no such model")
        self.blocks = [_block_weights(layer) for layer in model.layers]
        self.final_norm = model.norm.weight.detach()
        self.eps = torch.tensor(float(config.rms_norm_eps) ** 0.5, device=self.final_norm.device)
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = model.layers[0].self_attn.head_dim
        self.positions, self.rotary = config.max_position_embeddings, model.rotary_emb

    def fold_final_norm(self, weight: Tensor) -> Tensor:
        """(..., D) matrix of a linear layer that reads this decoder's states -> (D, ...), the final norm included."""
        return (weight.detach() * self.final_norm).T.contiguous()

    def new_cache(self, batch: int, length: int) -> Cache:
        """An empty cache for `batch` rows of `length` tokens.

        Raises:
            ValueError: `length` is beyond the positions that the model knows.
        """
        if length > self.positions:
            raise ValueError(f"a prompt and its frame budget need {length} positions; the model has {self.positions}")
        shape = (len(self.blocks), batch * self.kv_heads, length, self.head_dim)
        steps = torch.arange(length, device=self.final_norm.device).float()
        angles = torch.outer(steps, self.rotary.inv_freq.float())
        scale, norms = self.rotary.attention_scaling, torch.stack([block.qk_norm for block in self.blocks])
        cos = torch.cat([angles.cos(), angles.cos()], dim=-1) * scale
        sin = torch.cat([-angles.sin(), angles.sin()], dim=-1) * scale
        return Cache(
            keys=self.final_norm.new_zeros(shape),
            values=self.final_norm.new_zeros(shape),
            cos=norms[:, None] * cos[:, None],
            sin=norms[:, None].roll(self.head_dim // 2, -1) * sin[:, None],
        )

    def keep(self, cache: Cache, rows: Tensor) -> None:
        """Drops the cache of every row but these: `rows` (n,) indices."""
        shape = (len(self.blocks), -1, self.kv_heads, *cache.keys.shape[2:])
        cache.keys = cache.keys.view(shape)[:, rows].flatten(1, 2)
        cache.values = cache.values.view(shape)[:, rows].flatten(1, 2)

    def prefill(self, cache: Cache, x: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """Fills the cache from slot 0. `x` (B, T, D); positions (B or 1, T); mask (B, 1, T, T) bool, True where
        attended, or None for causal. Returns (B, T, D) states."""
        batch, length = x.shape[:2]
        groups = self.heads // self.kv_heads
        for index, block in enumerate(self.blocks):
            qk, value = self._project(block, x, cache.cos[index][positions], cache.sin[index][positions])
            query, key, value = (t.transpose(1, 2) for t in (*qk.split([self.heads, self.kv_heads], -2), value))
            cache.keys[index, :, :length] = key.reshape(batch * self.kv_heads, length, -1)
            cache.values[index, :, :length] = value.reshape(batch * self.kv_heads, length, -1)
            spread = [t.repeat_interleave(groups, dim=1) for t in (key, value)]
            mixed = F.scaled_dot_product_attention(
                query, spread[0], spread[1], attn_mask=mask, is_causal=mask is None, scale=1.0
            )
            flat = self._finish(block, x.flatten(0, 1), mixed.transpose(1, 2).reshape(batch * length, -1))
            x = flat.view(batch, length, -1)
        return self._normed(x)

    def step(self, cache: Cache, x: Tensor, slot: int, positions: Tensor | None, bias: Tensor | None) -> Tensor:
        """Appends one token a row at a cache slot. `x` (B, D); `positions` (B,), None if they all equal the slot;
        `bias` (B KV, 1, slot + 1), added to the scores. Returns (B, D) states."""
        batch, end = x.shape[0], slot + 1
        at = slot if positions is None else positions
        for index, block in enumerate(self.blocks):
            qk, value = self._project(block, x, cache.cos[index, at], cache.sin[index, at])
            cache.keys[index, :, slot] = qk[:, self.heads :].reshape(-1, self.head_dim)
            cache.values[index, :, slot] = value.reshape(-1, self.head_dim)
            query = qk[:, : self.heads].reshape(batch * self.kv_heads, -1, self.head_dim)
            keys = cache.keys[index, :, :end].transpose(1, 2)
            scores = torch.bmm(query, keys) if bias is None else torch.baddbmm(bias, query, keys)
            mixed = torch.bmm(torch.softmax(scores, dim=-1), cache.values[index, :, :end])
            x = self._finish(block, x, mixed.view(batch, -1))
        return self._normed(x)

    def _normed(self, x: Tensor) -> Tensor:
        """Root mean square norm over the last dimension, without weights: x / sqrt(mean(x^2) + eps)."""
        size = x.shape[-1] ** 0.5
        return x / torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True) / size, self.eps)

    def _project(self, block: BlockWeights, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys (..., H + KV, d), normed and rotated, and values (..., KV, d)."""
        qkv = (self._normed(x) @ block.qkv).unflatten(-1, (-1, self.head_dim))
        qk, value = qkv.split([self.heads + self.kv_heads, self.kv_heads], -2)
        qk = self._normed(qk)
        return torch.addcmul(qk * cos, qk.roll(self.head_dim // 2, -1), sin), value

    def _finish(self, block: BlockWeights, x: Tensor, mixed: Tensor) -> Tensor:
        """The block after attention, on (N, D) rows: output projection and MLP, each added to the residual."""
        x = torch.addmm(x, mixed, block.output)
        gate, up = (self._normed(x) @ block.gate_up).chunk(2, dim=-1)
        return torch.addmm(x, F.silu(gate) * up, block.down)
