"""The Qwen3-TTS voice family: a loaded voice that encodes prompts, rolls out takes and decodes them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from swaralign.params import Qwen3TtsRolloutParams, SamplingParams
from swaralign.policy.base import Take
from swaralign.policy.codec_model import LORA_TARGETS, CodecPolicy
from swaralign.policy.engine import RolloutEngine
from swaralign.policy.flat_tokenizer import flat_tokenizer
from swaralign.policy.prompt import ROLE_TOKENS, TAIL_TOKENS, chat_text, prefill_rows
from swaralign.policy.slots import Frames, Prompt

log = logging.getLogger(__name__)
CPU_FRAMES, GPU_FRAMES = 48, 4096  # padded frames that the codec decodes side by side; a CPU is fastest in its cache


class Qwen3TtsVoice:
    """A codec-0 policy with its tokenizer, codec and rollout settings.

    `model` may be a CodecPolicy or a PEFT model around one, in training: each `rollout` takes a fresh snapshot of
    its weights, dropout never applies, and the model's own train or eval mode is left alone.
    """

    lora_targets = LORA_TARGETS
    policy_parameters = r"talker\.(model|codec_head)\..*"

    def __init__(self, model: Any, tokenizer: Any, rollout: Qwen3TtsRolloutParams) -> None:
        self.model, self.tokenizer, self.settings = model, tokenizer, rollout
        self.config = model.config
        self.codec = model.speech_tokenizer.model
        self.decode_frames = CPU_FRAMES if self.codec.device.type == "cpu" else GPU_FRAMES
        self.sample_rate_hz = int(model.speech_tokenizer.get_output_sample_rate())
        self.text_offset = self.config.talker_config.vocab_size
        model.set_language(rollout.language)
        self.books = self.config.talker_config.num_code_groups

    def text_ids(self, text: str) -> list[int]:
        """Token ids of the whole chat prompt of a text.

        Raises:
            ValueError: the text is empty, or tokenises into nothing.
        """
        ids: list[int] = self.tokenizer(chat_text(text))["input_ids"]
        if not text.strip() or len(ids) <= ROLE_TOKENS + TAIL_TOKENS:
            raise ValueError(f"a prompt needs words to speak, found {text!r}")
        return ids

    def encode(self, text: str) -> list[int]:
        """Flat prompt ids: text ids shifted past the codec vocabulary."""
        return [i + self.text_offset for i in self.text_ids(text)]

    def frame_budget(self, text_tokens: int) -> int:
        """Frames that a take of so many text tokens may have, before it counts as truncated."""
        s = self.settings
        words = text_tokens - ROLE_TOKENS - TAIL_TOKENS
        return min(s.max_frames, s.base_frames + round(s.frames_per_token * words))

    def rollout(self, texts: Sequence[str], seeds: Sequence[int], sampling: SamplingParams) -> list[Take]:
        """One take a text, `rollout.batch_size` side by side; long budgets start first, so that the end is short."""
        engine = RolloutEngine(self.model, self.model.speaker, self.settings.predictor)
        prompts = [self.prompt(text, seed) for text, seed in zip(texts, seeds, strict=True)]
        order = sorted(range(len(prompts)), key=lambda i: -prompts[i].budget)
        sampled = engine.rollout([prompts[i] for i in order], sampling, self.settings.batch_size)
        takes = {i: self._take(frames, prompts[i].seed) for i, frames in zip(order, sampled, strict=True)}
        return [takes[i] for i in range(len(prompts))]

    def prompt(self, text: str, seed: int) -> Prompt:
        """One row of a rollout: what is fed, the frame budget and the seed of the draws."""
        ids = self.text_ids(text)
        words, codec = prefill_rows(self.config, ids, self.model.codec_prefix)
        return Prompt(words, codec, self.frame_budget(len(ids)), seed)

    def _take(self, frames: Frames, seed: int) -> Take:
        ids = frames.codes.reshape(-1)
        if frames.ended:
            ids = np.append(ids, self.config.talker_config.codec_eos_token_id)
        return Take(ids, self.policy_mask(ids), len(frames.codes), not frames.ended, seed)

    def policy_mask(self, completion_ids: np.ndarray) -> np.ndarray:
        """True on codebook 0 of every frame and on the end of speech, which stands where a frame would begin."""
        return np.arange(len(completion_ids)) % self.books == 0

    def trl_tokenizer(self) -> PreTrainedTokenizerFast:
        """See `flat_tokenizer`."""
        return flat_tokenizer(self.config)

    @torch.inference_mode()
    def decode(self, takes: Sequence[Take]) -> list[np.ndarray]:
        """Waveforms, in the codec's own float32; takes of one batch are padded and trimmed again."""
        waves: list[np.ndarray] = [np.zeros(0, dtype=np.float32)] * len(takes)
        order = sorted((i for i, take in enumerate(takes) if take.frames), key=lambda i: takes[i].frames)
        while order:
            size = max(1, min(len(order), self.decode_frames // takes[order[-1]].frames))
            chosen, order = order[-size:], order[:-size]
            codes = [self._codes(takes[i]) for i in chosen]
            padded = torch.nn.utils.rnn.pad_sequence(codes, batch_first=True, padding_value=-1)
            decoded = self.codec.decode(padded, return_dict=True).audio_values
            for index, wave in zip(chosen, decoded, strict=True):
                waves[index] = wave.float().cpu().numpy()
        return waves

    def _codes(self, take: Take) -> Tensor:
        flat = torch.from_numpy(take.completion_ids[: take.frames * self.books])
        return flat.view(take.frames, self.books).to(self.codec.device)


def load_voice(
    checkpoint: Path, speaker: Sequence[float], rollout: Qwen3TtsRolloutParams, device: str, adapter: Path | None = None
) -> Qwen3TtsVoice:
    """Loads a checkpoint folder in the official layout, in float32, with its codec in float32.

    `speaker`: the x-vector, as long as the talker's hidden size. `adapter`: a PEFT folder over the checkpoint.

    Raises:
        ValueError: the speaker vector has another length, or the language is unknown to the model.
    """
    from transformers import AutoTokenizer
    from transformers.utils import logging as notices

    notices.disable_progress_bar()
    notices.set_verbosity_error()  # the loader remarks on the subclass, which is meant
    model = CodecPolicy.from_pretrained(str(checkpoint), dtype=torch.float32).to(device).eval()
    model.speech_tokenizer.model.to(device).float()
    model.set_speaker(speaker)
    voice_model: Any = model
    if adapter is not None:
        from peft import PeftModel

        voice_model = PeftModel.from_pretrained(model, str(adapter)).eval()
    tokenizer = AutoTokenizer.from_pretrained(str(checkpoint))
    return Qwen3TtsVoice(voice_model, tokenizer, rollout)
