"""Tokenizers whose ids are a policy's own, for trainers that insist on one: each id has a name, and nothing merges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def id_tokenizer(names: Sequence[str], eos: str, pad: str) -> PreTrainedTokenizerFast:
    """A tokenizer with left padding that reads names, one after another, as their indices; each name ends with `>`."""
    core = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token=pad))
    core.pre_tokenizer = pre_tokenizers.Split(">", "merged_with_previous")
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token=pad, eos_token=eos, padding_side="left")


def flat_tokenizer(config: Any) -> PreTrainedTokenizerFast:
    """The tokenizer of a Qwen3-TTS config: `<c17>` is codec id 17, `<t5>` text id 5, shifted past the codec ids.

    End of sequence is the codec's end of speech; padding is the codec's pad, which is never a sampled code.
    """
    talker = config.talker_config
    names = [f"<c{i}>" for i in range(talker.vocab_size)] + [f"<t{i}>" for i in range(talker.text_vocab_size)]
    return id_tokenizer(names, eos=f"<c{talker.codec_eos_token_id}>", pad=f"<c{talker.codec_pad_id}>")
