"""A decoder stack as the rollout engines hold it: fused projections, folded norms, static caches.

The talker of Qwen3-TTS, its code predictor, Llama and Qwen3 share this block structure, but that Llama does not norm
its heads. Every rotary position of a token of the talker is the same number, so that its multimodal rotary embedding is
the plain one. Norm weights are folded into the matrices that follow them. Prompts are prefilled here; single tokens are
stepped by `frame_cpu.py` and `steps_cuda.py`, on these weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
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
    """One block's weights, each a matrix for `x @ W` with the norm before it folded in.

    `qkv` (D, KV (G + 2) d): of each key-value head its G query heads, its key and its value stand side by side.
    `qk_norm` (G + 1, d): weights of the query and key norms, ones without them; float32, the score's scale included.
    """

    qkv: Tensor
    qk_norm: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass
class Cache:
    """Keys and values (layers, B, KV, length, d) of B slots; a slot's token of position p stands at p."""

    keys: Tensor
    values: Tensor


def scaled(norm: Tensor) -> Tensor:
    """A norm's weights times the root of their number, which `unit` leaves out."""
    return norm.detach().float() * norm.shape[-1] ** 0.5


def unit(x: Tensor, floor: float) -> Tensor:
    """`x` over its length: RMS norm less its weights and a factor; `floor` is the root of eps times the size."""
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + floor**2)


class FusedDecoder:
    """The layers of a decoder model, in the rollout's precision; the residual stream is float32.

    `by_column`: how a matrix's memory is laid out, by output column for `steps_cuda`, by input row for the CPU's loops.
    `norms_heads`: whether queries and keys are normed, by `head_floor`.

    Raises:
        ValueError: the projections carry biases, which no published voice has.
    """

    def __init__(self, model: Any, dtype: torch.dtype, by_column: bool) -> None:
        config, self.by_column = model.config, by_column
        for bias in ("attention_bias", "mlp_bias"):
            if getattr(config, bias, False):
                raise ValueError(f"{bias} is set in the checkpoint's config; the rollout engine knows no such model")
        self.dtype, self.device = dtype, model.norm.weight.device
        self.norms_heads = hasattr(model.layers[0].self_attn, "q_norm")
        self.blocks = [self._block(layer) for layer in model.layers]
        self.final_norm = scaled(model.norm.weight)
        self.kv_heads, self.head_dim = config.num_key_value_heads, model.layers[0].self_attn.head_dim
        eps = float(config.rms_norm_eps)
        self.floor, self.head_floor = (eps * config.hidden_size) ** 0.5, (eps * self.head_dim) ** 0.5
        self.positions, self.rotary = config.max_position_embeddings, model.rotary_emb

    def _block(self, layer: Any) -> BlockWeights:
        attention, mlp = layer.self_attn, layer.mlp
        kv_heads, head_dim = attention.config.num_key_value_heads, attention.head_dim
        input_norm, mlp_norm = (scaled(n.weight) for n in (layer.input_layernorm, layer.post_attention_layernorm))
        heads = [effective_weight(p).float() for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
        qkv = torch.cat([w.view(kv_heads, -1, head_dim, w.shape[1]) for w in heads], dim=1).flatten(0, 2)
        key_norm = query_norm = torch.ones(head_dim, device=qkv.device)
        if self.norms_heads:
            query_norm, key_norm = scaled(attention.q_norm.weight), scaled(attention.k_norm.weight)
        gate_up = torch.cat([effective_weight(mlp.gate_proj), effective_weight(mlp.up_proj)]).float()
        return BlockWeights(
            qkv=self.matrix(qkv * input_norm),
            qk_norm=torch.stack([*[query_norm * attention.scaling] * attention.num_key_value_groups, key_norm]),
            output=self.matrix(effective_weight(attention.o_proj)),
            gate_up=self.matrix(gate_up * mlp_norm),
            down=self.matrix(effective_weight(mlp.down_proj)),
        )

    @cached_property
    def stacked(self) -> BlockWeights:
        """A copy of all blocks' weights, each with the layers first."""
        blocks = [vars(block) for block in self.blocks]
        return BlockWeights(**{name: torch.stack([block[name] for block in blocks]) for name in blocks[0]})

    def matrix(self, weight: Tensor) -> Tensor:
        """A linear layer's weight (N, K) as a matrix (K, N) of the rollout's precision."""
        weight = weight.to(self.dtype)
        return weight.contiguous().T if self.by_column else weight.T.contiguous()

    def reader(self, weight: Tensor) -> Tensor:
        """(N, D) weight of a linear layer that reads this decoder's states -> (D, N), the final norm folded in."""
        return self.matrix(weight.detach().float() * self.final_norm)

    def new_cache(self, batch: int, length: int) -> Cache:
        """An empty cache for `batch` slots of `length` tokens.

        Raises:
            ValueError: `length` is beyond the positions that the model knows.
        """
        if length > self.positions:
            raise ValueError(f"a prompt and its budget need {length} positions; the model has {self.positions}")
        shape = (2, len(self.blocks), batch, self.kv_heads, length, self.head_dim)
        keys, values = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return Cache(keys, values)

    def rotary_tables(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines (length, d / 2), float32, of positions 0 to length - 1."""
        steps = torch.arange(length, device=self.device).float()
        angles = torch.outer(steps, self.rotary.inv_freq.float())
        return angles.cos() * self.rotary.attention_scaling, angles.sin() * self.rotary.attention_scaling

    def prefill(self, cache: Cache, slots: Tensor, rows: Tensor, x: Tensor) -> Tensor:
        """Fills slots (m,) from position 0, each with its row (m,) of `x` (n, T, D), which is padded at the end.

        Returns the residual (n, T, D).
        """
        count, length = x.shape[:2]
        cos, sin = self.rotary_tables(length)
        for index, block in enumerate(self.blocks):
            qkv = self._times(unit(x, self.floor), block.qkv).view(count, length, self.kv_heads, -1, self.head_dim)
            qk = qkv[..., :-1, :].float()
            qk = (unit(qk, self.head_floor) if self.norms_heads else qk) * block.qk_norm
            qk = _rotate(qk, cos[:, None, None], sin[:, None, None]).to(self.dtype)
            query = qk[..., :-1, :].flatten(2, 3).transpose(1, 2)
            key, value = qk[..., -1, :].transpose(1, 2), qkv[..., -1, :].transpose(1, 2)
            cache.keys[index, slots, :, :length] = key[rows]
            cache.values[index, slots, :, :length] = value[rows]
            spread = [t.repeat_interleave(query.shape[1] // self.kv_heads, dim=1) for t in (key, value)]
            mixed = F.scaled_dot_product_attention(query, spread[0], spread[1], is_causal=True, scale=1.0)
            x = x + self._times(mixed.transpose(1, 2).flatten(2), block.output)
            gate, up = self._times(unit(x, self.floor), block.gate_up).chunk(2, dim=-1)
            x = x + self._times(F.silu(gate) * up, block.down)
        return x

    def _times(self, x: Tensor, matrix: Tensor) -> Tensor:
        return x.to(self.dtype) @ matrix


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
