"""Batched sampling from a causal language model: a cache of fixed size, one uniform number a token, own draws a row.

What a row draws depends on its own seed alone. Here rows stand side by side, left-padded, and leave the batch when they
end, by the model's own code; a GPU has an engine of its own, `outetts_cuda.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import init_empty_weights
from torch import Tensor
from transformers import DynamicCache

from swaralign.params import SamplingParams
from swaralign.policy.decoder import effective_weight
from swaralign.policy.sampling import draw, uniforms

PENALTY_WINDOW = 64  # tokens, of prompt and completion, that the repetition penalty looks back


@dataclass(frozen=True)
class Prompt:
    """One row to roll out: its token ids, the most tokens it may have, the seed of its draws."""

    ids: Sequence[int]
    budget: int
    seed: int


@dataclass(frozen=True)
class Completion:
    """Sampled ids (n,) int64, the end token included where the row ended, and whether it did."""

    ids: np.ndarray
    ended: bool


def snapshot(model: Any, dtype: torch.dtype) -> Any:
    """A frozen copy of a causal language model that PEFT may have wrapped, its live adapters added to the weights.

    In eval mode and on the model's device; weights that need no change are shared, so the copy is for now only.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    with init_empty_weights(include_buffers=False):
        copy = type(base)(base.config)
    state = {}
    for name in copy.state_dict():
        owner, _, leaf = name.rpartition(".")
        module = base.get_submodule(owner)
        weight = effective_weight(module) if leaf == "weight" else getattr(module, leaf)
        state[name] = weight.detach().to(dtype)
    copy.load_state_dict(state, assign=True)
    return copy.to(base.device).eval()


def rollout(model: Any, prompts: Sequence[Prompt], eos: int, sampling: SamplingParams, batch: int) -> list[Completion]:
    """Samples every prompt, `batch` side by side, those of like budgets together, from a snapshot of the weights."""
    frozen = snapshot(model, torch.bfloat16 if model.device.type == "cuda" else torch.float32)
    order = sorted(range(len(prompts)), key=lambda index: (prompts[index].budget, len(prompts[index].ids)))
    done: dict[int, Completion] = {}
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        done |= zip(chosen, rollout_batch(frozen, [prompts[index] for index in chosen], eos, sampling), strict=True)
    return [done[index] for index in range(len(prompts))]


@torch.inference_mode()
def rollout_batch(model: Any, prompts: Sequence[Prompt], eos: int, sampling: SamplingParams) -> list[Completion]:
    """Samples prompts side by side from `model` itself, until each has drawn `eos` or has spent its budget."""
    batch = _Batch(model, prompts, sampling)
    for step in range(max(prompt.budget for prompt in prompts)):
        batch.advance(step, eos)
        if not len(batch.rows):
            break
    return batch.results()


def penalised(logits: Tensor, window: Tensor, penalty: float) -> Tensor:
    """(B, V) logits, float32: those of tokens in the window (B, n), each counted once, over the penalty if positive,
    else times it."""
    logits = logits.float()
    recent = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, window, True)
    return torch.where(recent, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


class _Cache:
    """Keys and values of every layer, (B, heads, slots, size), allocated once; attention sees the filled slots alone.

    Unlike transformers' StaticCache it hands out views: no step pays for slots that nothing stands in yet.
    """

    def __init__(self, prompts: Any, slots: int) -> None:
        """Takes over the prompts' cache, in which every layer is equally long."""
        self.filled = prompts.get_seq_length()
        pad = (0, 0, 0, slots - self.filled)
        self.keys = [torch.nn.functional.pad(layer.keys, pad) for layer in prompts.layers]
        self.values = [torch.nn.functional.pad(layer.values, pad) for layer in prompts.layers]

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any) -> tuple[Tensor, Tensor]:
        """Writes one token (B, heads, 1, size) into the last filled slot; called by the model's attention."""
        views = self.keys[layer][:, :, : self.filled], self.values[layer][:, :, : self.filled]
        for view, new in zip(views, (key, value), strict=True):
            view[:, :, -1:] = new
        return views

    def keep(self, index: Tensor) -> None:
        """Drops the rows that are not in `index`."""
        self.keys, self.values = ([each[index] for each in group] for group in (self.keys, self.values))


class _Batch:
    """The rows that are still speaking; slots, the columns of cache and history, are shared: all prompts end at one."""

    def __init__(self, model: Any, prompts: Sequence[Prompt], sampling: SamplingParams) -> None:
        self.model, self.sampling, device = model, sampling, model.device
        self.width = max(len(prompt.ids) for prompt in prompts)
        budgets = [prompt.budget for prompt in prompts]
        self.slots = self.width + max(budgets)
        self.uniform = uniforms([p.seed for p in prompts], max(budgets), 1).to(device)
        self.budget = torch.tensor(budgets, device=device)
        self.rows = torch.arange(len(prompts), device=device)
        self.pads = torch.tensor([self.width - len(prompt.ids) for prompt in prompts], device=device)
        padded = [[p.ids[0]] * (self.width - len(p.ids)) + list(p.ids) for p in prompts]
        self.history = torch.nn.functional.pad(torch.tensor(padded, device=device), (0, max(budgets)))
        self.drawn: list[list[int]] = [[] for _ in prompts]
        self.ended = [False] * len(prompts)
        self.logits = self._prefill()

    def _prefill(self) -> Tensor:
        """Runs the prompts with a cache of their own length, which the static one then takes over."""
        slots = torch.arange(self.width, device=self.pads.device)
        short: Any = DynamicCache(config=self.model.config)
        logits = self.model(
            input_ids=self.history[:, : self.width], attention_mask=(slots >= self.pads[:, None]).long(),
            position_ids=(slots - self.pads[:, None]).clamp(min=0), past_key_values=short, logits_to_keep=1,
        ).logits[:, 0]
        self.cache = _Cache(short, self.slots)
        self.bias = logits.new_zeros(len(self.rows), 1, 1, self.slots)
        padding = torch.arange(self.slots, device=self.pads.device) < self.pads[:, None]
        self.bias.masked_fill_(padding[:, None, None], torch.finfo(logits.dtype).min)
        return logits

    def advance(self, step: int, eos: int) -> None:
        """Draws one token for every row, then drops the rows that ended or have spent their budget."""
        s, slot = self.sampling, self.width + step
        logits = self.logits
        if s.repetition_penalty > 1:
            # A row that is shorter than the window is padded with its own first token, which it then holds anyhow.
            logits = penalised(logits, self.history[:, max(0, slot - PENALTY_WINDOW) : slot], s.repetition_penalty)
        token = draw(logits, self.uniform[self.rows, step, 0], s.temperature, s.top_k, s.top_p)
        for row, drawn in zip(self.rows.tolist(), token.tolist(), strict=True):
            self.drawn[row].append(drawn)
            self.ended[row] = drawn == eos
        speaking = (token != eos) & (self.budget[self.rows] > step + 1)
        self.history[:, slot] = token
        self._keep(speaking)
        if len(self.rows):
            self.logits = self._step(slot)

    def _keep(self, chosen: Tensor) -> None:
        if bool(chosen.all()):
            return
        index = chosen.nonzero()[:, 0]
        self.rows, self.pads, self.history, self.bias = (
            each[index] for each in (self.rows, self.pads, self.history, self.bias)
        )
        self.cache.keep(index)

    def _step(self, slot: int) -> Tensor:
        self.cache.filled = slot + 1
        return self.model(
            input_ids=self.history[:, slot, None], attention_mask=self.bias[..., : slot + 1],
            position_ids=(slot - self.pads)[:, None], past_key_values=self.cache,
        ).logits[:, 0]

    def results(self) -> list[Completion]:
        pairs = zip(self.drawn, self.ended, strict=True)
        return [Completion(np.array(ids, dtype=np.int64), ended) for ids, ended in pairs]
