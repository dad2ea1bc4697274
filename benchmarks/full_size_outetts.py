"""A checkpoint of the shapes of OuteTTS 1.0 with random weights, in the real file layout, and a speaker for it.

    python -m benchmarks.full_size_outetts OUT [--seed 0]

Writes OUT/base: a Llama 3.2-1B in bfloat16, a tokenizer whose text tokens are the words of the English prompt lists,
and a DAC of the published widths. What is measured with it is size, not speech. So that a take is sound all the same,
the model answers every code with one of the other book; it never ends a take.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.full_size import prompts
from benchmarks.outetts_rollout import SHAPES
from swaralign.artifacts import atomic_folder
from swaralign.policy.outetts import CODEC
from swaralign.policy.outetts_prompt import BOS, EOS, WORD_START, Profile
from swaralign.split import read_sentences
from tools.micro_outetts.make import make_codec, make_tokenizer, spoken

MICRO = Path("data/outetts-micro/base")
SENTENCES = Path("data/prompts/english")
SHAPE = {**SHAPES["1b"], "max_position_embeddings": 131_072,
         "rope_parameters": {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "low_freq_factor": 1.0,
                             "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}
WIDTHS = {"codes": 1024, "encoder": 64, "decoder": 1536}  # of ibm-research/DAC.speech.v1.0
TEXT_VOCAB = 128_256  # more than the lists have words: each is one token, as common words are in the published one
SPEAKER_WORDS = 60  # 6.4 s
MARK, GAIN = 0.2, 1000.0  # of the two directions that tell codes apart: in the embeddings, and in the final norm


def write_base(folder: Path, seed: int, shape: Mapping[str, Any] = SHAPE, widths: Mapping[str, int] = WIDTHS) -> None:
    """Write the checkpoint; weights are as their classes draw them, but for `answer_in_pairs`."""
    texts = [text for path in sorted(SENTENCES.glob("*.txt")) for text in read_sentences(path)]
    tokenizer = make_tokenizer([*texts, *(row["text"] for row in prompts(1000))], widths["codes"], TEXT_VOCAB)
    vocabulary = tokenizer.get_vocab()
    settings: dict[str, Any] = {**shape, "bos_token_id": vocabulary[BOS], "eos_token_id": vocabulary[EOS]}
    config = LlamaConfig.from_pretrained(str(MICRO), **settings)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    answer_in_pairs(model, vocabulary)
    with atomic_folder(folder) as out:
        tokenizer.save_pretrained(out)
        model.save_pretrained(out)
        make_codec(**widths).save_pretrained(out / CODEC)


@torch.no_grad()
def answer_in_pairs(model: Any, vocabulary: Mapping[str, int]) -> None:
    """Gives codes two directions of the residual stream, so that a c1 is followed by some c2, and that by some c1.

    The first says that a token is a code or begins a word, the second which book it is of. No layer writes into them;
    the final norm enlarges both and turns the second one round.
    """
    embedding = model.get_input_embeddings().weight
    embedding[:, :2] = 0
    embedding[vocabulary[WORD_START], 0] = MARK
    for book, sign in ((1, 1), (2, -1)):
        ids = [index for token, index in vocabulary.items() if token.startswith(f"<|c{book}_")]
        embedding[ids, 0], embedding[ids, 1] = MARK, sign * MARK
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[:2] = 0
        layer.mlp.down_proj.weight[:2] = 0
    model.model.norm.weight[:2] = torch.tensor([GAIN, -GAIN])


def speaker(base: Path) -> dict[str, Any]:
    """A ready profile, its words those of a prompt list and its sounds made by rule; any base can speak as it."""
    text = " ".join(read_sentences(SENTENCES / "train_easy.txt"))
    words = spoken(" ".join(text.split()[:SPEAKER_WORDS]), random.Random(5))
    profile = Profile(text=" ".join(word.word for word in words), words=words, global_features=words[0].features)
    return profile.model_dump()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write_base(args.out / "base", args.seed)


if __name__ == "__main__":
    main()
