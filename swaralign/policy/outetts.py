"""The OuteTTS voice family: a plain causal language model whose vocabulary holds the codec's codes.

Every token of a completion is the policy's own: words, features, codes and the end.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from swaralign.params import OuteTtsRolloutParams, SamplingParams
from swaralign.policy.base import Take
from swaralign.policy.dac import DacCodec, fade, load_dac, to_level
from swaralign.policy.flat_tokenizer import id_tokenizer
from swaralign.policy.outetts_prompt import EOS, CodeTokens, Profile, completion_prompt, normalise_text, read_profile
from swaralign.policy.outetts_rollout import Completion, Prompt, rollout

log = logging.getLogger(__name__)
CODEC = "codec"  # the folder of a checkpoint that holds its codec
LORA_TARGETS = r".*layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"


class OuteTtsVoice:
    """A language model with its tokenizer, codec, speaker and rollout settings.

    `model` may be a causal language model or a PEFT model around one, in training: each `rollout` takes a fresh
    snapshot of its weights (bfloat16 on a GPU), dropout never applies, and the model's own mode is left alone.

    Raises:
        ValueError: the tokenizer lacks the tokens of the codec's codes or of the speaker's features.
    """

    lora_targets = LORA_TARGETS
    policy_parameters = r".*"

    def __init__(
        self, model: Any, tokenizer: Any, codec: DacCodec, profile: Profile, settings: OuteTtsRolloutParams
    ) -> None:
        self.model, self.tokenizer, self.codec = model, tokenizer, codec
        self.profile, self.settings = profile, settings
        self.sample_rate_hz = codec.sample_rate_hz
        vocabulary = tokenizer.get_vocab()
        self.codes = CodeTokens(vocabulary, codec.codebook_size)
        self.padding = f"<|c1_{codec.codebook_size}|>"  # one past the last code: stands for no sound
        needed = re.findall(r"<\|[^|]+\|>", completion_prompt("", profile))
        if missing := [token for token in (EOS, self.padding, *needed) if token not in vocabulary]:
            raise ValueError(f"the tokenizer has no {', '.join(missing[:4])}; the layout or the speaker needs it")
        self.eos = int(vocabulary[EOS])

    def encode(self, text: str) -> list[int]:
        """Token ids of the whole prompt of a text. Raises ValueError if there is nothing to speak in it."""
        if not any(character.isalnum() for character in normalise_text(text)):
            raise ValueError(f"a prompt needs words to speak, found {text!r}")
        ids: list[int] = self.tokenizer(completion_prompt(text, self.profile), add_special_tokens=False)["input_ids"]
        return ids

    def token_budget(self, text: str) -> int:
        """Tokens that a take of a text may have, before it counts as truncated."""
        s = self.settings
        spoken = len(self.tokenizer(normalise_text(text), add_special_tokens=False)["input_ids"])
        return min(s.max_tokens, s.base_tokens + round(s.tokens_per_text_token * spoken))

    def rollout(self, texts: Sequence[str], seeds: Sequence[int], sampling: SamplingParams) -> list[Take]:
        """One take a text, `rollout.batch_size` of them side by side.

        Raises:
            ValueError: there is nothing to speak in a text, or it is longer than the model's positions.
        """
        pairs = zip(texts, seeds, strict=True)
        prompts = [Prompt(self.encode(text), self.token_budget(text), seed) for text, seed in pairs]
        completions = sample_completions(self.model, prompts, self.eos, sampling, self.settings.batch_size)
        return [self._take(each, prompt.seed) for each, prompt in zip(completions, prompts, strict=True)]

    def _take(self, completion: Completion, seed: int) -> Take:
        ids = completion.ids
        return Take(ids, self.policy_mask(ids), self.codes.parse(ids).shape[1], not completion.ended, seed)

    def policy_mask(self, completion_ids: np.ndarray) -> np.ndarray:
        """True everywhere: no token comes from an environment."""
        return np.ones(len(completion_ids), dtype=bool)

    def decode(self, takes: Sequence[Take]) -> list[np.ndarray]:
        """Waveforms, by the codec in float32, faded at both ends and brought to the published level."""
        waves = self.codec.decode([self.codes.parse(take.completion_ids) for take in takes])
        return [to_level(fade(wave, self.sample_rate_hz), self.sample_rate_hz) for wave in waves]

    def round_trip(self, wave: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A (samples,) wave at the voice's rate, brought to the published level, and what its codec makes of it."""
        level = to_level(wave, self.sample_rate_hz)
        return level, self.codec.decode([self.codec.encode(level)])[0]

    def trl_tokenizer(self) -> PreTrainedTokenizerFast:
        """Every id under a name of its own, since sampled ids need not be those that their text tokenises to."""
        names = [f"<{index}>" for index in range(self.model.config.vocab_size)]
        padding = self.tokenizer.get_vocab()[self.padding]
        return id_tokenizer(names, eos=names[self.eos], pad=names[padding])


def sample_completions(
    model: Any, prompts: Sequence[Prompt], eos: int, sampling: SamplingParams, batch: int
) -> list[Completion]:
    """Every prompt's completion, `batch` of them side by side, by the weights that a model has now.

    `model`: a causal language model, or a PEFT model around one. On a GPU the weights are bfloat16, else float32.

    Raises:
        ValueError: a prompt and its budget are longer than the positions that the model knows.
    """
    known = model.config.max_position_embeddings
    for prompt in prompts:
        if len(prompt.ids) + prompt.budget > known:
            raise ValueError(f"a prompt of {len(prompt.ids)} tokens and a budget of {prompt.budget} need more "
                             f"positions than the model's {known}; lower rollout.max_tokens, or use a shorter "
                             "speaker clip")
    if model.device.type == "cuda":
        from swaralign.policy import outetts_cuda  # needs Triton, which only a GPU's PyTorch brings

        if outetts_cuda.fits(model.config):
            return outetts_cuda.TokenEngine(model, torch.bfloat16).rollout(prompts, eos, sampling, batch)
        _warn_of_slow(model.config.model_type)
    return rollout(model, prompts, eos, sampling, batch)


@cache
def _warn_of_slow(model_type: str) -> None:
    log.warning("the GPU's kernels do not know this %s; its own code samples it, several times slower", model_type)


def load_voice(
    checkpoint: Path, speaker: Any, rollout: OuteTtsRolloutParams, device: str, adapter: Path | None = None
) -> OuteTtsVoice:
    """Loads a checkpoint folder (transformers' layout, the codec in `codec/`), in float32.

    `speaker`: a speaker profile, as its JSON reads. `adapter`: a PEFT folder over the checkpoint.

    Raises:
        ValueError: the profile is faulty, the codec is not there, or either does not fit the tokenizer.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as notices

    notices.disable_progress_bar()
    profile = read_profile(speaker, "the speaker")
    codec = DacCodec(load_dac(checkpoint / CODEC), device)
    tokenizer = AutoTokenizer.from_pretrained(str(checkpoint))
    model: Any = AutoModelForCausalLM.from_pretrained(str(checkpoint), dtype=torch.float32)
    model = model.to(device).eval()
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(adapter)).eval()
    return OuteTtsVoice(model, tokenizer, codec, profile, rollout)
