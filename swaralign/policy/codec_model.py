"""The codec-0 policy as a causal language model over flat ids, which TRL's trainers take unmodified.

Flat ids: codec ids stand in [0, V), V being the talker's vocabulary; text ids are shifted by V. A prompt is shifted
text ids; a completion is c0..c15 of every frame, then the codec's end of speech when the take ended. The policy chooses
codebook 0 and the end; the other 15 codes are the environment's answer. The model rebuilds the short sequence (prefill
and frames), runs the talker once, and scatters its states to the flat positions that predict a policy token; every
other flat position holds a zero state.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import SAFE_WEIGHTS_NAME

from swaralign.official import Qwen3TTSForConditionalGeneration
from swaralign.policy.prompt import NONE, embed_frames, embed_prefill, embed_text_pad, language_prefix, prefill_rows
from swaralign.policy.slots import MIN_FRAMES, suppressed_ids

MASKED = -1e9  # finite, so that a masked logit's gradient is zero and not NaN
EXTRA_COLUMNS = 8  # head columns beside the hidden ones: the first carries the minimum of frames, the rest pad to 8

LORA_TARGETS = r".*talker\.model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"


class CodecPolicy(Qwen3TTSForConditionalGeneration):
    """The official model with a `forward` over flat ids; parameter names stay official."""

    base_model_prefix = ""
    _keys_to_ignore_on_load_missing = ["speaker"]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        hidden = config.talker_config.hidden_size
        self.register_buffer("speaker", torch.zeros(hidden), persistent=False)
        self.set_language("auto")

    def set_speaker(self, vector: Sequence[float]) -> None:
        """Fixes the speaker embedding of every prompt. Raises ValueError for a vector of the wrong length."""
        width = self.config.talker_config.hidden_size
        if len(vector) != width:
            raise ValueError(f"the speaker embedding has {len(vector)} numbers, the talker takes {width}")
        self.speaker = torch.tensor(vector, dtype=torch.float32, device=self.device)

    def set_language(self, language: str) -> None:
        """Fixes the language tag of every prompt, the same that rollout uses. Raises ValueError for an unknown one."""
        self.codec_prefix = language_prefix(self.config, language)  # PEFT models have a `prefix` of their own

    def save_pretrained(self, save_directory: Any, state_dict: dict[str, Tensor] | None = None, **_: Any) -> None:
        """Writes the weights alone, as a trainer's checkpoint needs them: the nested configuration cannot be written
        as JSON by its own class. A checkpoint to speak from has the files of the one that training started from."""
        weights = self.state_dict() if state_dict is None else state_dict
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        save_file({name: value.contiguous() for name, value in weights.items()},
                  Path(save_directory) / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})

    def get_input_embeddings(self) -> Any:
        return self.talker.model.codec_embedding

    def get_output_embeddings(self) -> Any:
        """The head over flat states: `.weight` (V, D + 8) and `.bias` (V,), both float32.

        The bias hides the ids that the sampler never draws; the extra column hides the end of speech on the states
        that choose the first two frames.
        """
        weight = self.talker.codec_head.weight.float()
        eos = self.config.talker_config.codec_eos_token_id
        extra = weight.new_zeros(len(weight), EXTRA_COLUMNS)
        extra[eos, 0] = MASKED
        bias = weight.new_zeros(len(weight))
        bias[suppressed_ids(len(weight), eos)] = MASKED
        return SimpleNamespace(weight=torch.cat([weight, extra], dim=1), bias=bias)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> BaseModelOutputWithPast:
        """States at the flat positions that predict policy tokens: `input_ids`, `attention_mask` (B, L) -> last
        hidden state (B, L, D + 8), float32. Padding may stand on either side of a row."""
        pairs = zip(input_ids, attention_mask, strict=True)
        rows = [self._parse(ids[mask.bool()], int(mask.argmax())) for ids, mask in pairs]
        states = self._run(rows)
        flat = states.new_zeros(*input_ids.shape, states.shape[-1] + EXTRA_COLUMNS)
        where = torch.tensor([position for row in rows for position in row.positions(self.books)], device=flat.device)
        index = torch.tensor(
            [(b, row.prefill - 1 + f) for b, row in enumerate(rows) for f in range(row.steps)], device=flat.device
        )
        early = states.new_tensor([float(f < MIN_FRAMES) for row in rows for f in range(row.steps)])
        chosen = states[index[:, 0], index[:, 1]]
        padded = torch.cat([chosen, torch.nn.functional.pad(early[:, None], (0, EXTRA_COLUMNS - 1))], dim=1)
        flat = flat.index_put((index[:, 0], where), padded)
        return BaseModelOutputWithPast(last_hidden_state=cast(torch.FloatTensor, flat))

    @property
    def books(self) -> int:
        return int(self.config.talker_config.num_code_groups)

    def _parse(self, ids: Tensor, start: int) -> _Row:
        """Splits a row's valid flat ids into prompt and frames; `start` is the column where they begin."""
        vocab = self.config.talker_config.vocab_size
        prompt = ids[ids >= vocab] - vocab
        completion = ids[len(prompt) :]
        count = len(completion) // self.books
        frames = completion[: count * self.books].view(count, self.books)
        ended = len(completion) > count * self.books
        text, codec = prefill_rows(self.config, prompt.tolist(), self.codec_prefix)
        return _Row(text, codec, frames, ended, start + len(prompt))

    def _run(self, rows: list[_Row]) -> Tensor:
        """Runs the talker once over right-padded rows: (B, S, D) float32 states."""
        length = max(row.prefill + len(row.frames) for row in rows)
        text = torch.full((len(rows), length), NONE, device=self.speaker.device)
        codec, has_frame = text.clone(), torch.zeros_like(text, dtype=torch.bool)
        frames = text.new_zeros(len(rows), length, self.books)
        for b, row in enumerate(rows):
            end = row.prefill + len(row.frames)
            text[b, : row.prefill], codec[b, : row.prefill] = text.new_tensor(row.text), text.new_tensor(row.codec)
            frames[b, row.prefill : end], has_frame[b, row.prefill : end] = row.frames, True
        x = embed_prefill(self.talker, text, codec, self.speaker)
        spoken = embed_frames(self.talker, frames, embed_text_pad(self.talker, self.config))
        x = torch.where(has_frame.unsqueeze(-1), spoken, x)
        return self.talker.model(inputs_embeds=x, use_cache=False).last_hidden_state.float()


class _Row:
    """One parsed row: prefill ids, frames (n, 16), whether it ended, and the flat column of its first code."""

    def __init__(self, text: list[int], codec: list[int], frames: Tensor, ended: bool, column: int) -> None:
        self.text, self.codec, self.frames, self.column = text, codec, frames, column
        self.prefill = len(text)
        # At least one state a row, so that a fully masked batch still has a gradient path.
        self.steps = max(1, len(frames) + int(ended))

    def positions(self, books: int) -> list[int]:
        """Flat columns whose state predicts a policy token: the one before each frame, and before the end."""
        return [self.column + books * step - 1 for step in range(self.steps)]
