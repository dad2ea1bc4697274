"""Sentences and codec codes as padded tensors, prompted as the pipeline prompts them.

A pair is a sentence and the codes that stand for its speech: its own, another sentence's, or the beginning of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from swaralign.policy.prompt import NONE, chat_text, language_prefix, prefill_rows

IGNORE = -100  # a label that no loss counts
HELD_PREFIX = "h"  # keys of the sentences that no training step may see
CUT_TO = (0.25, 0.85)  # share of its frames that a cut sentence keeps, drawn uniformly


@dataclass(frozen=True)
class Corpus:
    """S sentences, each coded at V time offsets; every tensor lies on one device.

    prefill_text, prefill_codec: (S, P) ids, padded to the longest prefill; prefill_len: (S,).
    codes: (V, S, F, Q) codebook entries; frames: (V, S) frames of each.
    train, held: indices of the sentences of either split. pad_text, eos_codec: the ids of those names.
    """

    prefill_text: Tensor
    prefill_codec: Tensor
    prefill_len: Tensor
    codes: Tensor
    frames: Tensor
    train: Tensor
    held: Tensor
    pad_text: int
    eos_codec: int


@dataclass(frozen=True)
class Batch:
    """B rows of L positions. frames_in: codes heard at a position; frames_out: codes predicted there, (B, L, Q).

    labels: codebook 0 or EOS predicted at a position, IGNORE elsewhere; has_in, has_out: (B, L) masks.
    """

    text: Tensor
    codec: Tensor
    frames_in: Tensor
    has_in: Tensor
    frames_out: Tensor
    has_out: Tensor
    labels: Tensor


def pad_rows(rows: list[list[int]], fill: int) -> Tensor:
    """Lists of ids as one (len(rows), longest) tensor, filled at the right."""
    table = torch.full((len(rows), max(map(len, rows))), fill)
    for row, values in zip(table, rows, strict=True):
        row[: len(values)] = torch.tensor(values)
    return table


def unpack_codes(archive: Any) -> tuple[Tensor, Tensor]:
    """`codes0..`, `nfr0..` of the archive as padded (V, S, F, Q) codes and (V, S) frame counts."""
    counts = np.stack([archive[f"nfr{v}"] for v in range(int(archive["nvar"]))])
    books = archive["codes0"].shape[1]
    codes = np.zeros((*counts.shape, counts.max(), books), dtype=np.uint8)
    for v, lengths in enumerate(counts):
        taken = np.arange(counts.max()) < lengths[:, None]
        codes[v][taken] = archive[f"codes{v}"]
    return torch.from_numpy(codes), torch.from_numpy(counts)


def load_corpus(path: Path, tokenizer: PreTrainedTokenizerBase, config: Any, device: str) -> Corpus:
    """Read a codes archive (see README.md) and lay out the prompt of each of its sentences."""
    archive = np.load(path, allow_pickle=False)
    prefix = language_prefix(config, "auto")
    texts = [tokenizer(chat_text(str(text)))["input_ids"] for text in archive["texts"]]
    rows = [prefill_rows(config, ids, prefix) for ids in texts]
    codes, frames = unpack_codes(archive)
    is_held = torch.tensor([str(key).startswith(HELD_PREFIX) for key in archive["keys"]])
    return Corpus(
        prefill_text=pad_rows([text for text, _ in rows], config.tts_pad_token_id).to(device),
        prefill_codec=pad_rows([codec for _, codec in rows], NONE).to(device),
        prefill_len=torch.tensor([len(text) for text, _ in rows], device=device),
        codes=codes.to(device),
        frames=frames.to(device),
        train=(~is_held).nonzero()[:, 0].to(device),
        held=is_held.nonzero()[:, 0].to(device),
        pad_text=config.tts_pad_token_id,
        eos_codec=config.talker_config.codec_eos_token_id,
    )


def take(table: Tensor, index: Tensor) -> Tensor:
    """Rows of table (B, N, ...) at index (B, L), clamped to the table: (B, L, ...)."""
    rows = torch.arange(len(table), device=table.device)[:, None]
    return table[rows, index.clamp(0, table.shape[1] - 1)]


def make_batch(corpus: Corpus, sentences: Tensor, spoken: Tensor, offsets: Tensor, count: Tensor) -> Batch:
    """The positions of B pairs: prefill, frames, padding; each argument is (B,).

    `sentences` gives the prompts; the codes are the first `count` frames of the sentences `spoken` at the time offsets
    `offsets`, and the end of speech is placed after them.
    """
    start, count = corpus.prefill_len[sentences][:, None], count[:, None]
    codes = corpus.codes[offsets, spoken].long()
    length = corpus.prefill_text.shape[1] + codes.shape[1]
    position = torch.arange(length, device=codes.device).expand(len(sentences), -1)
    in_prefill = position < start
    heard, said = position - start, position - start + 1
    frames_out, has_out = take(codes, said), (said >= 0) & (said < count)
    labels = torch.where(has_out, frames_out[..., 0], torch.where(said == count, corpus.eos_codec, IGNORE))
    return Batch(
        text=torch.where(in_prefill, take(corpus.prefill_text[sentences], position), corpus.pad_text),
        codec=torch.where(in_prefill, take(corpus.prefill_codec[sentences], position), NONE),
        frames_in=take(codes, heard),
        has_in=(heard >= 0) & (heard < count),
        frames_out=frames_out,
        has_out=has_out,
        labels=labels,
    )


def held_batch(corpus: Corpus) -> Batch:
    """Every held-out sentence with its own codes, whole, at the first time offset."""
    first = torch.zeros_like(corpus.held)
    return make_batch(corpus, corpus.held, corpus.held, first, corpus.frames[0, corpus.held])


def cut_some(frames: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Frame counts (B,), each with probability `share` cut to a drawn part of itself, rounded up."""
    is_cut, part = torch.rand(2, len(frames), generator=generator, device=frames.device)
    low, high = CUT_TO
    return torch.where(is_cut < share, (frames * (low + (high - low) * part)).ceil().long(), frames)


def draw_batch(corpus: Corpus, size: int, generator: torch.Generator, shuffled: bool, cut_share: float) -> Batch:
    """`size` pairs of training sentences, drawn with replacement, each at a drawn time offset.

    `shuffled`: the codes are those of another drawn training sentence. `cut_share`: of the pairs that are cut.
    """

    def draw(limit: int) -> Tensor:
        return torch.randint(limit, (size,), generator=generator, device=corpus.train.device)

    sentences, offsets = corpus.train[draw(len(corpus.train))], draw(len(corpus.codes))
    spoken = corpus.train[draw(len(corpus.train))] if shuffled else sentences
    count = cut_some(corpus.frames[offsets, spoken], cut_share, generator)
    return make_batch(corpus, sentences, spoken, offsets, count)
