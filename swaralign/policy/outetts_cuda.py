"""The OuteTTS rollout on a GPU: one CUDA graph holds a whole token of every row, and a row that ends makes room.

A slot whose take has ended goes on with numbers that nobody reads, until it is filled anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from swaralign.params import SamplingParams
from swaralign.policy.decoder import FusedDecoder, effective_weight
from swaralign.policy.outetts_rollout import PENALTY_WINDOW, Completion, Prompt, penalised
from swaralign.policy.sampling import draw
from swaralign.policy.slots import Slots, distinct, serve
from swaralign.policy.steps_cuda import Steps, capture

TOKENS_A_POLL = 16  # tokens between two looks at which takes have ended
FULL = "full_attention"
ROPES = ("default", "linear", "llama3", "yarn")  # whose angles do not depend on the length
PREFILL_TOKENS = 32_768  # of all prompts that are read side by side


def fits(config: Any) -> bool:
    """Whether the kernels know a model of this configuration: a Llama or Qwen3 without biases or sliding windows, its
    rotary angles fixed, its widths multiples of 16, with heads of a power of two from 32, at most 15 for each key."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    widths = (config.hidden_size, config.intermediate_size, config.num_attention_heads * size)
    return (
        config.model_type in ("llama", "qwen3") and config.hidden_act == "silu"
        and not getattr(config, "attention_bias", False) and not getattr(config, "mlp_bias", False)
        and set(getattr(config, "layer_types", None) or [FULL]) == {FULL}
        and (config.rope_parameters or {}).get("rope_type", "default") in ROPES
        and not any(width % 16 for width in widths) and size >= 32 and size & (size - 1) == 0
        and config.num_attention_heads // config.num_key_value_heads <= 15
    )


class TokenEngine:
    """A snapshot of a causal language model's weights, adapters included, that samples completions.

    `model`: a Llama or Qwen3, or a PEFT model around one. `dtype`: of the snapshot.
    """

    @torch.no_grad()
    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.decoder = FusedDecoder(base.model, dtype, by_column=True)
        self.embedding = base.get_input_embeddings().weight.detach().to(dtype)
        self.head = self.decoder.reader(effective_weight(base.get_output_embeddings()))

    @torch.inference_mode()
    def rollout(self, prompts: Sequence[Prompt], eos: int, sampling: SamplingParams, batch: int) -> list[Completion]:
        """Samples every prompt, `batch` side by side: a take that ends makes room for the next, long budgets first.

        Raises:
            ValueError: a prompt and its budget are longer than the positions that the model knows.
        """
        order = sorted(range(len(prompts)), key=lambda index: -prompts[index].budget)
        length = max(len(prompt.ids) + prompt.budget for prompt in prompts)
        cache = self.decoder.new_cache(min(batch, len(prompts)), length)
        slots = Slots.new(cache, self.embedding.shape[1], max(prompt.budget for prompt in prompts), books=1)
        tokens = _Tokens(self, slots, eos, sampling)

        def fill(free: list[int], chosen: list[int]) -> None:
            tokens.fill(free, [prompts[order[index]] for index in chosen])

        done = dict(zip(order, serve(len(prompts), slots, fill, tokens.advance, tokens.take), strict=True))
        return [done[index] for index in range(len(prompts))]


class _Tokens:
    """Advances the slots of one rollout; built while they are all empty."""

    def __init__(self, engine: TokenEngine, slots: Slots, eos: int, sampling: SamplingParams) -> None:
        self.engine, self.slots, self.eos, self.sampling = engine, slots, eos, sampling
        self.steps = Steps(engine.decoder, slots.cache)
        batch, device = len(slots.alive), slots.x.device
        self.batch = torch.arange(batch, device=device)
        self.recent = torch.zeros(batch, PENALTY_WINDOW, dtype=torch.int64, device=device)  # by position, in a ring
        self.logits = torch.zeros(batch, engine.head.shape[1], device=device)
        self.replay = capture(self.token, device)

    def advance(self) -> None:
        """Samples some tokens for every slot."""
        for _ in range(TOKENS_A_POLL):
            self.replay()

    def token(self) -> None:
        """Draws a token from every slot's state, and steps the model over it."""
        slots, stream, rule = self.slots, self.steps.stream, self.sampling
        stream.set(slots.x, self.batch)
        logits = stream.read(self.engine.head, self.logits)
        if rule.repetition_penalty > 1:
            logits = penalised(logits, self.recent, rule.repetition_penalty)
        uniform = slots.uniform[self.batch, slots.step, 0]
        token = draw(logits, uniform, rule.temperature, rule.top_k, rule.top_p)
        slots.codes[self.batch, slots.step, 0] = token
        self.recent[self.batch, slots.position % PENALTY_WINDOW] = token
        ends = slots.alive & (token == self.eos)
        slots.ended.logical_or_(ends)
        slots.alive.logical_and_(~ends)
        slots.step.add_(slots.alive)
        slots.alive.logical_and_(slots.step < slots.budget)
        self.steps.step(self.engine.embedding, token, slots.position)
        slots.x.copy_(stream.total)
        slots.position.add_(slots.alive)

    def fill(self, free: Sequence[int], prompts: Sequence[Prompt]) -> None:
        """Puts prompts into free slots; alike ones among them, such as a group's, are read once."""
        size = max(1, PREFILL_TOKENS // max(len(prompt.ids) for prompt in prompts))
        for rows, row, where in distinct([tuple(prompt.ids) for prompt in prompts], free, size, self.batch.device):
            self._read(rows, row, where)
        self.slots.begin(free, [prompt.budget for prompt in prompts], [prompt.seed for prompt in prompts])

    def _read(self, prompts: Sequence[tuple[int, ...]], row: Tensor, where: Tensor) -> None:
        """Prefills prompts, the one of each row (m,) into a slot (m,)."""
        slots, device = self.slots, row.device
        ids = pad_sequence([torch.tensor(ids) for ids in prompts], batch_first=True).to(device)
        states = self.engine.decoder.prefill(slots.cache, where, row, self.engine.embedding[ids].float())
        length = torch.tensor([len(ids) for ids in prompts], device=device)[row]
        slots.x[where], slots.position[where] = states[row, length - 1], length
        self.recent[where] = torch.stack([_ring(ids) for ids in prompts]).to(device)[row]

    def take(self, slot: int) -> Completion:
        """The finished completion of a slot."""
        count, ended = int(self.slots.step[slot]), bool(self.slots.ended[slot])
        drawn = self.slots.codes[slot, :count, 0].cpu().numpy()
        return Completion(np.append(drawn, self.eos) if ended else drawn.copy(), ended)


def _ring(ids: Sequence[int]) -> Tensor:
    """The last tokens of a prompt, each at its position in the ring; a short one is filled up with its first token."""
    ring = torch.full((PENALTY_WINDOW,), ids[0])
    last = torch.arange(max(0, len(ids) - PENALTY_WINDOW), len(ids))
    ring[last % PENALTY_WINDOW] = torch.tensor(ids)[last]
    return ring
