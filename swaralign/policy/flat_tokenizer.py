"""A tokenizer whose ids are the flat ids, for trainers that insist on one: `<c17>` is codec id 17, `<t5>` text id 5."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def flat_tokenizer(config: Any) -> PreTrainedTokenizerFast:
    """Builds the tokenizer of a Qwen3-TTS config: codec ids first, text ids shifted past them, left padding.

    End of sequence is the codec's end of speech; padding is the codec's pad, which is never a sampled code.
    """
    talker = config.talker_config
    names = [f"<c{i}>" for i in range(talker.vocab_size)] + [f"<t{i}>" for i in range(talker.text_vocab_size)]
    vocabulary = {name: index for index, name in enumerate(names)}
    pad, eos = f"<c{talker.codec_pad_id}>", f"<c{talker.codec_eos_token_id}>"
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=pad))
    core.pre_tokenizer = pre_tokenizers.Split(">", "merged_with_previous")
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token=pad, eos_token=eos, padding_side="left")
