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
    """One block's weights, matrices transposed for `x @ W`; the norms before them are folded in.

    `qkv` (D, KV (G + 2) d): of each key-value head its G query heads, its key and its value stand side by side.
    `qk_norm` (KV, G + 1, d): weights of the query and key norms, the score's scale included.
    """

    qkv: Tensor
    qk_norm: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass
class Cache:
    """Of each block: keys and values (B KV, length, d), and rotary tables times norm weights (length, KV, G + 1, d)."""

    keys: list[Tensor]
    values: list[Tensor]
    cos: list[Tensor]
    sin: list[Tensor]


def _block_weights(layer: Any) -> BlockWeights:
    attention, mlp = layer.self_attn, layer.mlp
    kv_heads, head_dim = attention.config.num_key_value_heads, attention.head_dim
    groups = attention.num_key_value_groups
    input_norm, mlp_norm = (_scaled(n.weight) for n in (layer.input_layernorm, layer.post_attention_layernorm))
    heads = [effective_weight(p) for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
    qkv = torch.cat([weight.view(kv_heads, -1, head_dim, weight.shape[1]) for weight in heads], dim=1).flatten(0, 2)
    query_norm, key_norm = _scaled(attention.q_norm.weight) * attention.scaling, _scaled(attention.k_norm.weight)
    gate_up = torch.cat([effective_weight(mlp.gate_proj), effective_weight(mlp.up_proj)])
    return BlockWeights(
        qkv=(qkv * input_norm).T.contiguous(),
        qk_norm=torch.cat([query_norm.expand(kv_heads, groups, -1), key_norm.expand(kv_heads, 1, -1)], dim=1),
        output=effective_weight(attention.o_proj).T.contiguous(),
        gate_up=(gate_up * mlp_norm).T.contiguous(),
        down=effective_weight(mlp.down_proj).T.contiguous(),
    )


def _scaled(norm: Tensor) -> Tensor:
    """A norm's weights times the root of their number, which `_unit` leaves out."""
    return norm.detach() * norm.shape[-1] ** 0.5


def _unit(x: Tensor, floor: Tensor) -> Tensor:
    """`x` over its length: RMS norm less its weights and a factor; `floor` is the root of eps times the size."""
    return x / torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), floor)


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
        self.final_norm = _scaled(model.norm.weight)
        self.kv_heads, self.head_dim = config.num_key_value_heads, model.layers[0].self_attn.head_dim
        eps, device = float(config.rms_norm_eps), self.final_norm.device
        self.floor = torch.tensor((eps * config.hidden_size) ** 0.5, device=device)
        self.head_floor = torch.tensor((eps * self.head_dim) ** 0.5, device=device)
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
        shape = (2, len(self.blocks), batch * self.kv_heads, length, self.head_dim)
        keys, values = self.final_norm.new_zeros(shape)
        steps = torch.arange(length, device=self.final_norm.device).float()
        angles = torch.outer(steps, self.rotary.inv_freq.float())
        scale = self.rotary.attention_scaling
        cos = (torch.cat([angles.cos(), angles.cos()], dim=-1) * scale)[:, None, None]
        sin = (torch.cat([-angles.sin(), angles.sin()], dim=-1) * scale)[:, None, None]
        return Cache(
            keys=list(keys),
            values=list(values),
            cos=[block.qk_norm * cos for block in self.blocks],
            sin=[block.qk_norm.roll(self.head_dim // 2, -1) * sin for block in self.blocks],
        )

    def keep(self, cache: Cache, rows: Tensor) -> None:
        """Drops the cache of every row but these: `rows` (n,) indices."""
        for kept in (cache.keys, cache.values):
            kept[:] = [t.view(-1, self.kv_heads, *t.shape[1:])[rows].flatten(0, 1) for t in kept]

    def prefill(self, cache: Cache, x: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """Fills the cache from slot 0. `x` (B, T, D); positions (B or 1, T); mask (B, 1, T, T) bool, True where
        attended, or None for causal. Returns (B, T, D) states."""
        batch, length = x.shape[:2]
        for index, block in enumerate(self.blocks):
            qk, value = self._project(block, x, cache.cos[index][positions], cache.sin[index][positions])
            query = qk[..., :-1, :].flatten(2, 3).transpose(1, 2)
            key, value = qk[..., -1, :].transpose(1, 2), value.transpose(1, 2)
            cache.keys[index][:, :length] = key.flatten(0, 1)
            cache.values[index][:, :length] = value.flatten(0, 1)
            spread = [t.repeat_interleave(query.shape[1] // self.kv_heads, dim=1) for t in (key, value)]
            mixed = F.scaled_dot_product_attention(
                query, spread[0], spread[1], attn_mask=mask, is_causal=mask is None, scale=1.0
            )
            flat = self._finish(block, x.flatten(0, 1), mixed.transpose(1, 2).reshape(batch * length, -1))
            x = flat.view(batch, length, -1)
        return _unit(x, self.floor)

    def step(self, cache: Cache, x: Tensor, slot: int, positions: Tensor | None, bias: Tensor | None) -> Tensor:
        """Appends one token a row at a cache slot. `x` (B, D); `positions` (B,), None if they all equal the slot;
        `bias` (B KV, 1, slot + 1), added to the scores. Returns (B, D) states."""
        batch, end = x.shape[0], slot + 1
        at = slot if positions is None else positions
        for index, block in enumerate(self.blocks):
            qk, value = self._project(block, x, cache.cos[index][at], cache.sin[index][at])
            qk = qk.flatten(0, 1)
            keys, values = cache.keys[index], cache.values[index]
            keys[:, slot] = qk[:, -1]
            values[:, slot] = value.flatten(0, 1)
            query, seen = qk[:, :-1], keys[:, :end].transpose(1, 2)
            scores = torch.bmm(query, seen) if bias is None else torch.baddbmm(bias, query, seen)
            mixed = torch.bmm(torch.softmax(scores, dim=-1), values[:, :end])
            x = self._finish(block, x, mixed.view(batch, -1))
        return _unit(x, self.floor)

    def _project(self, block: BlockWeights, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Of each key-value head its queries and key (..., KV, G + 1, d), normed and rotated, and its value."""
        qkv = _unit(x, self.floor) @ block.qkv
        qkv = qkv.view(*x.shape[:-1], self.kv_heads, -1, self.head_dim)
        qk = _unit(qkv[..., :-1, :], self.head_floor)
        return torch.addcmul(qk * cos, qk.roll(self.head_dim // 2, -1), sin), qkv[..., -1, :]

    def _finish(self, block: BlockWeights, x: Tensor, mixed: Tensor) -> Tensor:
        """The block after attention, on (N, D) rows: output projection and MLP, each added to the residual."""
        x = torch.addmm(x, mixed, block.output)
        gate, up = (_unit(x, self.floor) @ block.gate_up).chunk(2, dim=-1)
        return torch.addmm(x, F.silu(gate) * up, block.down)
