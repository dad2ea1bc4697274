"""Batched sampling of codec frames: the talker chooses codebook 0, the code predictor answers with the other 15."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from swaralign.params import PredictorParams, SamplingParams
from swaralign.policy.decoder import FusedDecoder
from swaralign.policy.frame_cpu import CpuFrames
from swaralign.policy.prompt import NONE, embed_prefill, embed_text_pad
from swaralign.policy.slots import Frames, Prompt, Slots, Tables, distinct, serve, suppressed_ids

Ids = tuple[tuple[int, ...], tuple[int, ...]]  # of a prompt: text ids, codec ids


class Stepper(Protocol):
    """Samples frames of all slots on one kind of device."""

    def advance(self) -> None:
        """Samples frames for slots that are alive, until one has ended or for a few frames; a slot stops by itself."""
        ...


class RolloutEngine:
    """A snapshot of a model's weights, adapters included, that samples takes.

    `model`: a Qwen3TTSForConditionalGeneration or a PEFT model around one. `speaker`: (D,) embedding. `predictor`: how
    residual codes are drawn. `dtype`: of the snapshot; bfloat16 on a GPU, if None, and float32, always, on a CPU.
    """

    @torch.no_grad()
    def __init__(
        self, model: Any, speaker: Tensor, predictor: PredictorParams, dtype: torch.dtype | None = None
    ) -> None:
        self.talker, self.config = model.talker, model.config
        self.speaker, self.predictor = speaker, predictor
        dtype = dtype or (torch.float32 if speaker.device.type == "cpu" else torch.bfloat16)
        by_column = speaker.device.type != "cpu"
        self.trunk = FusedDecoder(self.talker.model, dtype, by_column)
        self.answerer = FusedDecoder(self.talker.code_predictor.model, dtype, by_column)
        self.tables = self._tables(dtype)

    def _tables(self, dtype: torch.dtype) -> Tables:
        """Every code's embedding is projected to the predictor's width once, instead of at each step."""
        predictor, eos = self.talker.code_predictor, self.config.talker_config.codec_eos_token_id
        project = predictor.small_to_mtp_projection
        first = self.talker.model.codec_embedding.weight
        books = torch.stack([book.weight for book in predictor.model.codec_embedding])
        bias = torch.zeros(2, len(first), device=first.device)
        bias[:, suppressed_ids(len(first), eos)] = -torch.inf
        bias[0, eos] = -torch.inf
        # Where talker and predictor are equally wide, the projection is an identity without weights.
        width = self.speaker.shape[0]
        state = getattr(project, "weight", torch.eye(width, device=first.device))
        return Tables(
            head=self.trunk.reader(self.talker.codec_head.weight), bias=bias,
            state=self.trunk.reader(state),
            state_bias=getattr(project, "bias", torch.zeros(width, device=first.device)).float(),
            first_input=project(first).to(dtype), inputs=project(books[:-1]).to(dtype),
            heads=[self.answerer.reader(head.weight) for head in predictor.lm_head],
            first_embedding=first.to(dtype), embeddings=books.to(dtype),
            pad=embed_text_pad(self.talker, self.config).float(), eos=eos,
        )

    @torch.inference_mode()
    def rollout(self, prompts: Sequence[Prompt], sampling: SamplingParams, batch: int | None = None) -> list[Frames]:
        """Samples every prompt, `batch` side by side (all, if None): a take that ends makes room for the next.

        A take's draws depend on its seed alone; on a CPU so does the whole take, given its prompt, whatever stands
        beside it.

        Raises:
            ValueError: a prompt and its frame budget need more positions than the model has; on a CPU, a layer has
                inputs that are no multiple of 8.
        """
        slots = self._new_slots(prompts, min(batch or len(prompts), len(prompts)))

        def fill(free: list[int], chosen: list[int]) -> None:
            self._fill(slots, free, [prompts[index] for index in chosen])

        return serve(len(prompts), slots, fill, self._stepper(slots, sampling).advance, slots.take)

    def _new_slots(self, prompts: Sequence[Prompt], batch: int) -> Slots:
        longest = max(len(prompt.text) + prompt.budget for prompt in prompts)
        frames = max(prompt.budget for prompt in prompts)
        return Slots.new(
            self.trunk.new_cache(batch, longest), len(self.speaker), frames,
            self.config.talker_config.num_code_groups,
        )

    def _stepper(self, slots: Slots, sampling: SamplingParams) -> Stepper:
        if self.speaker.device.type == "cpu":
            return CpuFrames(self.trunk, self.answerer, self.tables, slots, sampling, self.predictor)
        from swaralign.policy.frame_cuda import CudaFrames

        return CudaFrames(self.trunk, self.answerer, self.tables, slots, sampling, self.predictor)

    def _fill(self, slots: Slots, free: Sequence[int], prompts: Sequence[Prompt]) -> None:
        """Puts prompts into free slots; alike ones, such as a group's, are read once."""
        # A CPU reads one prompt at a time: no rounding depends on what else there is to read.
        size = 1 if self.speaker.device.type == "cpu" else len(prompts)
        ids = [(tuple(prompt.text), tuple(prompt.codec)) for prompt in prompts]
        for rows, row, where in distinct(ids, free, size, self.speaker.device):
            self._read(slots, rows, row, where)
        slots.begin(free, [prompt.budget for prompt in prompts], [prompt.seed for prompt in prompts])

    def _read(self, slots: Slots, prompts: Sequence[Ids], row: Tensor, where: Tensor) -> None:
        """Prefills prompts, the one of each row (m,) into a slot (m,)."""
        text, codec = (
            pad_sequence([torch.tensor(ids) for ids in rows], batch_first=True, padding_value=NONE).to(row.device)
            for rows in zip(*prompts, strict=True)
        )
        x = embed_prefill(self.talker, text, codec, self.speaker).float()
        states = self.trunk.prefill(slots.cache, where, row, x)
        length = (text != NONE).sum(dim=1)[row]
        slots.x[where], slots.position[where] = states[row, length - 1], length
