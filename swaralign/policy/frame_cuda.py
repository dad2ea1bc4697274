"""Frames of all slots on a GPU: one CUDA graph holds a whole frame, so that nothing waits for Python.

A slot whose take has ended goes on with numbers that nobody reads, until the engine fills it anew.
"""

from __future__ import annotations

import torch
from torch import Tensor

from swaralign.params import PredictorParams, SamplingParams
from swaralign.policy.decoder import BlockWeights, Cache, FusedDecoder
from swaralign.policy.kernels import Residual, attend, draw
from swaralign.policy.slots import MIN_FRAMES, Slots, Tables

FRAMES_A_POLL = 8  # frames between two looks at which takes have ended


class CudaFrames:
    """Advances the slots of one rollout; built while they are all empty."""

    def __init__(
        self, trunk: FusedDecoder, answerer: FusedDecoder, tables: Tables, slots: Slots, sampling: SamplingParams,
        predictor: PredictorParams,
    ) -> None:
        batch, books = len(slots.alive), slots.codes.shape[2]
        self.tables, self.slots, self.sampling, self.predictor = tables, slots, sampling, predictor
        self.trunk = _Steps(trunk, slots.cache)
        self.answerer = _Steps(answerer, answerer.new_cache(batch, books))
        device = slots.x.device
        self.batch, self.places = torch.arange(batch, device=device), torch.arange(books, device=device)
        self.codes = torch.zeros(batch, books, dtype=torch.int64, device=device)
        self.log_prob = torch.zeros(batch, device=device)
        self.first_logits = torch.zeros(batch, tables.head.shape[1], device=device)
        self.logits = torch.zeros(batch, tables.heads[0].shape[1], device=device)
        self.state = torch.zeros(batch, tables.state.shape[1], device=device)
        self.graph = self._capture() if device.type == "cuda" else None

    def _capture(self) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # kernels are compiled here
            self.frame()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.frame()
        return graph

    def advance(self) -> None:
        """Samples some frames for every slot."""
        for _ in range(FRAMES_A_POLL):
            if self.graph is None:
                self.frame()
            else:
                self.graph.replay()

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


class _Steps:
    """A decoder with its cache, its residual stream and the buffers between its kernels."""

    def __init__(self, decoder: FusedDecoder, cache: Cache) -> None:
        self.decoder, self.cache = decoder, cache
        batch, first = cache.keys.shape[1], decoder.blocks[0]
        self.tables = decoder.rotary_tables(cache.keys.shape[3])
        self.stream = Residual(batch, first.qkv.shape[0], decoder.dtype, decoder.device, decoder.floor)
        sizes = (first.qkv.shape[1], first.output.shape[0], first.down.shape[0])
        self.qkv, self.mixed, self.gated = (
            torch.zeros(batch, size, dtype=decoder.dtype, device=decoder.device) for size in sizes
        )

    def step(self, table: Tensor, index: Tensor, position: Tensor) -> None:
        """Appends a token to every slot, up to the residual stream after the last layer.

        Its embedding is the row of `table` (n, D) that `index` (B,) names; `position` (B,), or (1,) for all.
        """
        self.stream.set(table, index)
        for layer, block in enumerate(self.decoder.blocks):
            self._block(block, position, self.cache.keys[layer], self.cache.values[layer])

    def _block(self, block: BlockWeights, position: Tensor, keys: Tensor, values: Tensor) -> None:
        self.stream.read(block.qkv, self.qkv)
        attend(
            self.qkv, block.qk_norm, self.tables, position, keys, values, self.mixed, self.decoder.head_floor
        )
        self.stream.add(self.mixed, block.output)
        self.stream.read(block.gate_up, self.gated, gate=True)
        self.stream.add(self.gated, block.down)
