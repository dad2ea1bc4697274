"""Make data/outetts-micro/base: tokenizer, language model and codec of the published layout, at micro size.

    python -m tools.micro_outetts.make --out data/outetts-micro/base --steps 500

The codec keeps its random weights: it makes noise. The language model learns the grammar of a completion (words,
features, pairs of codes, the end) from made-up examples, so that takes end and decode; it speaks no language.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from tqdm import trange
from transformers import DacConfig, DacModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from swaralign.artifacts import atomic_folder
from swaralign.policy.outetts import CODEC
from swaralign.policy.outetts_prompt import (
    AUDIO_END,
    AUDIO_START,
    BOS,
    CODE,
    EOS,
    FEATURES,
    GLOBAL_END,
    GLOBAL_START,
    TEXT_END,
    TEXT_START,
    WORD_END,
    WORD_START,
    Profile,
    ProfileWord,
    WordFeatures,
    completion_prompt,
    words_text,
)
from swaralign.split import read_sentences

CODES, MAX_DURATION_S, TEXT_VOCAB = 64, 3.0, 600
SEED = 20261


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--texts", type=Path, default=Path("data/prompts/english"))
    parser.add_argument("--steps", type=int, default=500)
    args = parser.parse_args()
    torch.manual_seed(SEED)
    texts = [text for path in sorted(args.texts.glob("*.txt")) for text in read_sentences(path)]
    tokenizer = make_tokenizer(texts)
    model = make_model(tokenizer)
    learn_grammar(model, tokenizer, texts, args.steps)
    with atomic_folder(args.out) as folder:
        tokenizer.save_pretrained(folder)
        model.to(torch.bfloat16).save_pretrained(folder)
        make_codec().save_pretrained(folder / CODEC)


def special_tokens(codes: int = CODES) -> list[str]:
    """The tokens of the layout, in one fixed order: marks, codes and their padding, features, durations."""
    marks = [BOS, EOS, TEXT_START, TEXT_END, AUDIO_START, AUDIO_END, WORD_START, WORD_END, FEATURES, CODE,
             GLOBAL_START, GLOBAL_END]
    pairs = [f"<|c{book}_{code}|>" for book in (1, 2) for code in range(codes + 1)]
    features = [f"<|{name}_{value}|>" for name in WordFeatures.model_fields for value in range(101)]
    durations = [f"<|t_{hundredths / 100:.2f}|>" for hundredths in range(round(100 * MAX_DURATION_S) + 1)]
    return [*marks, *pairs, *features, *durations]


def make_tokenizer(texts: Iterable[str], codes: int = CODES, text_vocab: int = TEXT_VOCAB) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, as Llama's is, with the special tokens after its text tokens."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=text_vocab, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token=BOS, eos_token=EOS)
    tokenizer.add_tokens(special_tokens(codes), special_tokens=True)
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast) -> Any:
    """A Llama of the published shape, rotary scaling and tied embeddings included, at micro size."""
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=96, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=24, max_position_embeddings=4096, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 1024},
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    ))


def make_codec(codes: int = CODES, encoder: int = 8, decoder: int = 64) -> DacModel:
    """A DAC with the published strides, 75 frames a second of two codes, and random weights loud enough to be heard."""
    torch.manual_seed(SEED)
    codec = DacModel(DacConfig(encoder_hidden_size=encoder, decoder_hidden_size=decoder,
                               downsampling_ratios=[2, 4, 5, 8], n_codebooks=2, codebook_size=codes, codebook_dim=8,
                               sampling_rate=24_000))
    for module in codec.modules():
        if isinstance(module, torch.nn.Conv1d | torch.nn.ConvTranspose1d):
            torch.nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
        if isinstance(module, torch.nn.Embedding):
            torch.nn.init.normal_(module.weight)
    return codec


# Examples


def spoken(text: str, rng: random.Random) -> list[ProfileWord]:
    """Made-up sounds of a text: five frames and one for every two letters of a word, codes near its first letter's."""
    return [_spoken_word(word, rng) for word in text.split()]


def _spoken_word(word: str, rng: random.Random) -> ProfileWord:
    frames = 5 + len(word) // 2 + rng.randrange(3)
    centre = ord(word[0]) % CODES
    c1, c2 = ([(centre + rng.randrange(-4, 5)) % CODES for _ in range(frames)] for _ in range(2))
    features = WordFeatures(energy=rng.randrange(10, 40), spectral_centroid=rng.randrange(10, 40),
                            pitch=rng.randrange(10, 40))
    return ProfileWord(word=word, duration=round(frames / 75, 2), c1=c1, c2=c2, features=features)


def example(texts: list[str], tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> tuple[list[int], int]:
    """The ids of one whole example, prompt and completion, and where the completion begins."""
    said, text = rng.sample(texts, 2)
    words = spoken(" ".join(said.split()[:4]), rng)
    profile = Profile(text=" ".join(word.word for word in words), words=words, global_features=words[0].features)
    prompt = completion_prompt(text, profile)
    completion = words_text(spoken(text, rng)).removeprefix(WORD_START) + f"\n{AUDIO_END}\n{EOS}"
    before, after = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (prompt, completion))
    return [*before, *after], len(before)


def learn_grammar(model: Any, tokenizer: PreTrainedTokenizerFast, texts: list[str], steps: int) -> None:
    """Trains the completion's tokens alone, on fresh examples at every step; short texts, so that takes are short."""
    rng = random.Random(SEED)
    short = [text for text in texts if len(text.split()) <= 10]
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, total_steps=steps)
    bar = trange(steps, desc="grammar")
    for _ in bar:
        ids, labels = _batch([example(short, tokenizer, rng) for _ in range(16)])
        loss = model(input_ids=ids, labels=labels).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        bar.set_postfix(loss=f"{float(loss):.3f}")


def _batch(examples: list[tuple[list[int], int]]) -> tuple[Tensor, Tensor]:
    """Right-padded ids (0 where there are none: a causal model's earlier tokens never see them) and labels."""
    length = max(len(ids) for ids, _ in examples)
    ids = torch.zeros(len(examples), length, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for row, (tokens, start) in enumerate(examples):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        labels[row, start : len(tokens)] = ids[row, start : len(tokens)]
    return ids, labels


if __name__ == "__main__":
    main()
