"""Batched sampling of codec frames: the talker chooses codebook 0, the code predictor answers with the other 15."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swaralign.params import PredictorParams, SamplingParams
from swaralign.policy.decoder import FusedDecoder
from swaralign.policy.prompt import NONE, embed_prefill, embed_text_pad
from swaralign.policy.sampling import draw, uniforms

MIN_FRAMES = 2  # the official sampler never ends a take before two frames
SPECIAL_IDS = 1024  # the talker's last ids: control tokens, none of them a code


def suppressed_ids(vocab_size: int, eos_id: int) -> list[int]:
    """Codec ids that the official sampler never draws: the special ones but for the end of speech."""
    return [i for i in range(vocab_size - SPECIAL_IDS, vocab_size) if i != eos_id]


@dataclass(frozen=True)
class Prompt:
    """One row to roll out: prefill ids, the frame budget and the draw's seed."""

    text: Sequence[int]
    codec: Sequence[int]
    budget: int
    seed: int


@dataclass(frozen=True)
class Frames:
    """Sampled frames (n, 16) int64 and whether the policy ended the take itself."""

    codes: np.ndarray
    ended: bool


class RolloutEngine:
    """A snapshot of a model's weights, adapters included, that samples takes; batches may run in threads of their own.

    `model`: a Qwen3TTSForConditionalGeneration or a PEFT model around one. `speaker`: (D,) embedding.
    """

    @torch.no_grad()
    def __init__(self, model: Any, speaker: Tensor, predictor: PredictorParams) -> None:
        self.talker, self.config = model.talker, model.config
        self.speaker, self.predictor = speaker, predictor
        self.eos = self.config.talker_config.codec_eos_token_id
        self.books = self.config.talker_config.num_code_groups
        self.trunk = FusedDecoder(self.talker.model)
        self.answerer = FusedDecoder(self.talker.code_predictor.model)
        self.head = self.trunk.fold_final_norm(self.talker.codec_head.weight)
        self.pad_text = embed_text_pad(self.talker, self.config)
        self._fold_predictor()
        bias = torch.zeros(2, self.head.shape[1], device=self.head.device)
        bias[:, suppressed_ids(self.head.shape[1], self.eos)] = -torch.inf
        bias[0, self.eos] = -torch.inf
        self.early_bias, self.late_bias = bias

    def _fold_predictor(self) -> None:
        """Projects every code's embedding to the predictor's width once, instead of at each step."""
        predictor = self.talker.code_predictor
        project = predictor.small_to_mtp_projection
        books = [self.talker.model.codec_embedding, *predictor.model.codec_embedding]
        self.embeddings = [book.weight.detach() for book in books]
        self.answer_inputs = [project(table) for table in self.embeddings[:-1]]
        self.answer_heads = [self.answerer.fold_final_norm(head.weight) for head in predictor.lm_head]
        # Where talker and predictor are equally wide, the projection is an identity without weights.
        identity = torch.eye(len(self.trunk.final_norm), device=self.head.device)
        self.state_matrix = self.trunk.fold_final_norm(getattr(project, "weight", identity))
        self.state_bias = getattr(project, "bias", torch.zeros(1, device=self.head.device))

    @torch.inference_mode()
    def rollout(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Frames]:
        """Samples every prompt side by side; rows that have ended leave the batch."""
        batch = _Batch(self, prompts, sampling)
        for step in range(max(prompt.budget for prompt in prompts)):
            batch.advance(step)
            if not len(batch.rows):
                break
        return batch.results()

    def answer(self, hidden: Tensor, first: Tensor, uniform: Tensor) -> Tensor:
        """The residual codes of one frame. `hidden` (B, D) the state that chose codebook 0, `first` (B,) its code,
        `uniform` (B, 15). Returns (B, 16) codes, codebook 0 included."""
        decoder, settings = self.answerer, self.predictor
        cache = decoder.new_cache(len(first), self.books)
        state = hidden @ self.state_matrix + self.state_bias
        opening = torch.stack([state, self.answer_inputs[0][first]], dim=1)
        state = decoder.prefill(cache, opening, torch.arange(2, device=first.device)[None], None)[:, 1]
        codes = [first]
        for book in range(1, self.books):
            logits = state @ self.answer_heads[book - 1]
            code = draw(logits, uniform[:, book - 1], settings.temperature, settings.top_k, settings.top_p)
            codes.append(code)
            if book < self.books - 1:
                state = decoder.step(cache, self.answer_inputs[book][code], book + 1, None, None)
        return torch.stack(codes, dim=1)

    def embed(self, codes: Tensor) -> Tensor:
        """(B, 16) codes -> (B, D) input of the talker's next step."""
        total = self.pad_text + self.embeddings[0][codes[:, 0]]
        for book in range(1, self.books):
            total = total + self.embeddings[book][codes[:, book]]
        return total


class _Batch:
    """The rows of one rollout that are still speaking, left-padded so that all share a cache slot."""

    def __init__(self, engine: RolloutEngine, prompts: Sequence[Prompt], sampling: SamplingParams) -> None:
        self.engine, self.prompts, self.sampling = engine, prompts, sampling
        self.width = max(len(prompt.text) for prompt in prompts)
        budgets = [prompt.budget for prompt in prompts]
        device = engine.head.device
        self.uniform = uniforms([p.seed for p in prompts], max(budgets), engine.books).to(device)
        self.budget = torch.tensor(budgets, device=device)
        self.rows = torch.arange(len(prompts), device=device)
        self.pads = torch.tensor([self.width - len(prompt.text) for prompt in prompts], device=device)
        self.codes: list[list[np.ndarray]] = [[] for _ in prompts]
        self.ended = [False] * len(prompts)
        self.hidden = self._prefill()

    def _prefill(self) -> Tensor:
        engine, trunk = self.engine, self.engine.trunk
        text = [[NONE] * (self.width - len(p.text)) + list(p.text) for p in self.prompts]
        codec = [[NONE] * (self.width - len(p.codec)) + list(p.codec) for p in self.prompts]
        device = engine.head.device
        x = embed_prefill(
            engine.talker, torch.tensor(text, device=device), torch.tensor(codec, device=device), engine.speaker
        )
        slots = torch.arange(self.width, device=device)
        positions = (slots - self.pads[:, None]).clamp(min=0)
        seen = slots >= self.pads[:, None]
        mask = (slots[:, None] >= slots) & seen[:, None, :]
        mask = mask | torch.eye(self.width, dtype=torch.bool, device=device)  # a padding row must attend somewhere
        self.cache = trunk.new_cache(len(self.prompts), self.width + int(self.budget.max()))
        return trunk.prefill(self.cache, x, positions, mask[:, None])[:, -1]

    def advance(self, step: int) -> None:
        """Samples one frame for every row, then drops the rows that ended."""
        engine = self.engine
        logits = self.hidden @ engine.head + (engine.early_bias if step < MIN_FRAMES else engine.late_bias)
        uniform = self.uniform[self.rows, step]
        s = self.sampling
        first = draw(logits, uniform[:, 0], s.temperature, s.top_k, s.top_p)
        spoken = first != engine.eos
        for row in self.rows[~spoken].tolist():
            self.ended[row] = True
        self._keep(spoken)
        if not len(self.rows):
            return
        codes = engine.answer(self.hidden, first[spoken], uniform[spoken, 1:])
        for row, frame in zip(self.rows.tolist(), codes.cpu().numpy(), strict=True):
            self.codes[row].append(frame)
        within = self.budget[self.rows] > step + 1
        self._keep(within)
        if len(self.rows):
            self.hidden = self._speak(codes[within], step)

    def _keep(self, chosen: Tensor) -> None:
        if bool(chosen.all()):
            return
        self.rows, self.pads, self.hidden = self.rows[chosen], self.pads[chosen], self.hidden[chosen]
        self.engine.trunk.keep(self.cache, chosen.nonzero()[:, 0])

    def _speak(self, codes: Tensor, step: int) -> Tensor:
        trunk, slot = self.engine.trunk, self.width + step
        padding = torch.arange(slot + 1, device=self.pads.device) < self.pads[:, None]
        bias = torch.zeros(padding.shape, device=self.pads.device).masked_fill_(padding, -torch.inf)
        bias = bias.repeat_interleave(trunk.kv_heads, dim=0).unsqueeze(1)
        return trunk.step(self.cache, self.engine.embed(codes), slot, slot - self.pads, bias)

    def results(self) -> list[Frames]:
        empty = np.zeros((0, self.engine.books), dtype=np.int64)
        stacked = [np.stack(rows) if rows else empty for rows in self.codes]
        return [Frames(codes, ended) for codes, ended in zip(stacked, self.ended, strict=True)]
