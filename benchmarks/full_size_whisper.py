"""A Whisper of the shapes of large-v3-turbo with random weights, in transformers' layout.

    python -m benchmarks.full_size_whisper OUT --tokenizer tokenizer.json

The tokenizer is that of any multilingual Whisper. Random weights hear nothing and hardly ever end: a transcript has as
many tokens as it may have, more than speech of the same length would.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from swaralign.artifacts import atomic_folder

SHAPE = {"d_model": 1280, "encoder_layers": 32, "decoder_layers": 4, "encoder_attention_heads": 20,
         "decoder_attention_heads": 20, "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120, "num_mel_bins": 128}
FILES = ("config.json", "generation_config.json", "model.safetensors", "preprocessor_config.json", "tokenizer.json",
         "tokenizer_config.json")


def write_whisper(folder: Path, tokenizer: Path, seed: int, shape: Mapping[str, Any] = SHAPE) -> None:
    """Write the FILES; `tokenizer`: a tokenizer.json, whose tokens the model has, time stamps among them."""
    tokens = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer)).get_vocab()
    torch.manual_seed(seed)
    model = WhisperForConditionalGeneration(WhisperConfig(**shape, vocab_size=max(tokens.values()) + 1)).half()
    model.generation_config = GenerationConfig(
        suppress_tokens=[1], begin_suppress_tokens=[220, tokens["<|endoftext|>"]],
        lang_to_id={"<|hi|>": tokens["<|hi|>"]}, alignment_heads=[[0, 0]],
    )
    with atomic_folder(folder) as out:
        model.save_pretrained(out)
        WhisperFeatureExtractor(feature_size=shape["num_mel_bins"]).save_pretrained(out)
        shutil.copy(tokenizer, out / "tokenizer.json")
        (out / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "WhisperTokenizer"}))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write_whisper(args.out, args.tokenizer, args.seed)


if __name__ == "__main__":
    main()
