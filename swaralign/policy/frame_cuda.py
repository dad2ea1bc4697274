"""Frames of all slots on a GPU: one CUDA graph holds a whole frame, so that nothing waits for Python.

A slot whose take has ended goes on with numbers that nobody reads, until the engine fills it anew.
"""

from __future__ import annotations

import torch
from torch import Tensor

from swaralign.params import PredictorParams, SamplingParams
from swaralign.policy.decoder import FusedDecoder
from swaralign.policy.kernels import draw
from swaralign.policy.slots import MIN_FRAMES, Slots, Tables
from swaralign.policy.steps_cuda import Steps, capture

FRAMES_A_POLL = 8  # frames between two looks at which takes have ended


class CudaFrames:
    """Advances the slots of one rollout; built while they are all empty."""

    def __init__(
        self, trunk: FusedDecoder, answerer: FusedDecoder, tables: Tables, slots: Slots, sampling: SamplingParams,
        predictor: PredictorParams,
    ) -> None:
        batch, books = len(slots.alive), slots.codes.shape[2]
        self.tables, self.slots, self.sampling, self.predictor = tables, slots, sampling, predictor
        self.trunk = Steps(trunk, slots.cache)
        self.answerer = Steps(answerer, answerer.new_cache(batch, books))
        device = slots.x.device
        self.batch, self.places = torch.arange(batch, device=device), torch.arange(books, device=device)
        self.codes = torch.zeros(batch, books, dtype=torch.int64, device=device)
        self.log_prob = torch.zeros(batch, device=device)
        self.first_logits = torch.zeros(batch, tables.head.shape[1], device=device)
        self.logits = torch.zeros(batch, tables.heads[0].shape[1], device=device)
        self.state = torch.zeros(batch, tables.state.shape[1], device=device)
        self.replay = capture(self.frame, device)

    def advance(self) -> None:
        """Samples some frames for every slot."""
        for _ in range(FRAMES_A_POLL):
            self.replay()

    def frame(self) -> None:
        """Chooses codebook 0, has it answered, and steps the talker."""
        slots, tables, stream = self.slots, self.tables, self.trunk.stream
        stream.set(slots.x, self.batch)
        self._draw(stream.read(tables.head, self.first_logits), 0)
        told = torch.where(slots.alive, self.log_prob, slots.log_probs[self.batch, slots.step])
        slots.log_probs[self.batch, slots.step] = told
        ends = slots.alive & (self.codes[:, 0] == tables.eos)
        slots.ended.logical_or_(ends)
        slots.alive.logical_and_(~ends)
        self._answer()
        slots.codes[self.batch, slots.step] = self.codes
        slots.step.add_(slots.alive)
        slots.alive.logical_and_(slots.step < slots.budget)
        residual = tables.embeddings[self.places[:-1], self.codes[:, 1:]].float().sum(dim=1)
        spoken = tables.first_embedding[self.codes[:, 0]] + tables.pad + residual
        self.trunk.step(spoken, self.batch, slots.position)
        slots.x.copy_(stream.total)
        slots.position.add_(slots.alive)

    def _answer(self) -> None:
        """Draws the residual codes of all slots, one book after another."""
        tables, steps = self.tables, self.answerer
        state = self.trunk.stream.read(tables.state, self.state) + tables.state_bias
        steps.step(state, self.batch, self.places[:1])
        for book in range(1, len(self.places)):
            table = tables.first_input if book == 1 else tables.inputs[book - 2]
            steps.step(table, self.codes[:, book - 1], self.places[book : book + 1])
            self._draw(steps.stream.read(tables.heads[book - 1], self.logits), book)

    def _draw(self, logits: Tensor, book: int) -> None:
        rule = self.predictor if book else self.sampling
        draw(
            logits, self.tables.bias, self.slots.step, self.slots.uniform, self.codes, self.log_prob, book,
            rule.temperature, rule.top_k, rule.top_p, MIN_FRAMES,
        )
