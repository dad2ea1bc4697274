"""Sentences and codec codes as padded tensors in the non-streaming, x-vector only, language Auto prompt layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

NO_CODEC = -1  # a position without a codec embedding
SPEAKER = -2  # the position that carries the raw speaker vector
IGNORE = -100  # a label that no loss counts
HELD_PREFIX = "h"  # keys of the sentences that no training step may see


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


def prompt_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of the assistant turn that the official `generate` is given for `text`."""
    templated = f"<|im_start|>assistant\n{text}<|im_end|>\n<|im_start|>assistant\n"
    return list(tokenizer(templated)["input_ids"])


def prefill(ids: list[int], config: Any) -> tuple[list[int], list[int]]:
    """Text and codec ids of the len(ids) + 2 prefill positions, NO_CODEC and SPEAKER standing for what has no id."""
    talker = config.talker_config
    body = ids[3:-5]
    text = ids[:3] + [config.tts_pad_token_id] * 4 + [config.tts_bos_token_id]
    text += body + [config.tts_eos_token_id, config.tts_pad_token_id]
    tag = [talker.codec_nothink_id, talker.codec_think_bos_id, talker.codec_think_eos_id]
    codec = [NO_CODEC] * 3 + tag + [SPEAKER, talker.codec_pad_id]
    codec += [talker.codec_pad_id] * (len(body) + 1) + [talker.codec_bos_id]
    return text, codec


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
    rows = [prefill(prompt_ids(tokenizer, str(text)), config) for text in archive["texts"]]
    codes, frames = unpack_codes(archive)
    is_held = torch.tensor([str(key).startswith(HELD_PREFIX) for key in archive["keys"]])
    return Corpus(
        prefill_text=pad_rows([text for text, _ in rows], config.tts_pad_token_id).to(device),
        prefill_codec=pad_rows([codec for _, codec in rows], NO_CODEC).to(device),
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


def make_batch(corpus: Corpus, sentences: Tensor, offsets: Tensor) -> Batch:
    """The positions of `sentences` (B,), each at its time offset `offsets` (B,): prefill, frames, padding."""
    start = corpus.prefill_len[sentences][:, None]
    count = corpus.frames[offsets, sentences][:, None]
    codes = corpus.codes[offsets, sentences].long()
    length = corpus.prefill_text.shape[1] + codes.shape[1]
    position = torch.arange(length, device=codes.device).expand(len(sentences), -1)
    in_prefill = position < start
    heard, said = position - start, position - start + 1
    frames_out, has_out = take(codes, said), (said >= 0) & (said < count)
    labels = torch.where(has_out, frames_out[..., 0], torch.where(said == count, corpus.eos_codec, IGNORE))
    return Batch(
        text=torch.where(in_prefill, take(corpus.prefill_text[sentences], position), corpus.pad_text),
        codec=torch.where(in_prefill, take(corpus.prefill_codec[sentences], position), NO_CODEC),
        frames_in=take(codes, heard),
        has_in=(heard >= 0) & (heard < count),
        frames_out=frames_out,
        has_out=has_out,
        labels=labels,
    )


def draw_batch(corpus: Corpus, size: int, generator: torch.Generator) -> Batch:
    """`size` training sentences, drawn with replacement, each at a drawn time offset."""
    device = corpus.train.device
    pick = torch.randint(len(corpus.train), (size,), generator=generator, device=device)
    offsets = torch.randint(len(corpus.codes), (size,), generator=generator, device=device)
    return make_batch(corpus, corpus.train[pick], offsets)
