"""The text and token layout of OuteTTS 1.0: what a prompt looks like, and which sounds a completion holds.

A prompt is the speaker's text and the text to speak, then the speaker's own words as the model would have spoken them,
and the start of the next word. A word is its text, its features (duration, energy, spectral centroid, pitch) and a pair
of codec tokens, c1 and c2, a frame. Source: version 3 of the interface of the `outetts` package.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import ftfy
import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

BOS, EOS = "<|im_start|>", "<|im_end|>"
TEXT_START, TEXT_END = "<|text_start|>", "<|text_end|>"
AUDIO_START, AUDIO_END = "<|audio_start|>", "<|audio_end|>"
WORD_START, WORD_END = "<|word_start|>", "<|word_end|>"
FEATURES, CODE = "<|features|>", "<|code|>"
GLOBAL_START, GLOBAL_END = "<|global_features_start|>", "<|global_features_end|>"
BOOKS = 2

Percent = Annotated[int, Field(ge=0, le=100)]
Codes = list[Annotated[int, Field(ge=0)]]


class WordFeatures(BaseModel):
    """Loudness, brightness and pitch of a stretch of speech, each from 0 to 100."""

    model_config = ConfigDict(extra="forbid", strict=True)
    energy: Percent
    spectral_centroid: Percent
    pitch: Percent


class ProfileWord(BaseModel):
    """One spoken word: its text, its duration in seconds and its codes, one pair a frame."""

    model_config = ConfigDict(extra="forbid", strict=True)
    word: str
    duration: Annotated[float, Field(ge=0)]
    c1: Codes
    c2: Codes
    features: WordFeatures

    @model_validator(mode="after")
    def _pairs(self) -> ProfileWord:
        if len(self.c1) != len(self.c2):
            raise ValueError(f"word {self.word!r} has {len(self.c1)} c1 codes and {len(self.c2)} c2 codes")
        return self


class Profile(BaseModel):
    """A speaker: what was said in the reference clip, and how; the JSON that the published package writes."""

    model_config = ConfigDict(extra="forbid", strict=True)
    text: str
    words: Annotated[list[ProfileWord], Field(min_length=1)]
    global_features: WordFeatures
    interface_version: int = 3


def read_profile(data: Any, name: str) -> Profile:
    """Validates a speaker profile read from JSON. Raises ValueError, `name` and each faulty key in it."""
    try:
        profile = Profile.model_validate(data)
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()]
        raise ValueError(f"{name} is not a speaker profile: {'; '.join(faults[:4])}") from None
    if profile.interface_version != 3:
        raise ValueError(f"{name} is of interface version {profile.interface_version}; OuteTTS 1.0 needs version 3")
    return profile


# Text


_RULES = [(re.compile(pattern, flags), to) for pattern, to, flags in (
    ("…", "...", 0),
    (r"\.{2,}", "...", 0),
    ("[“”„‟«»]", '"', 0),
    ("[‘’‛‹›`´]", "'", 0),
    ("[–—―−‐]", "-", 0),
    ("-{2,}", "-", 0),
    (r"[\x00-\x1F\x7F-\x9F\u00AD\u200B-\u200D\uFEFF]", "", 0),
    (r"\s+", " ", 0),
    (r"\s+([,.?!:;])", r"\1", 0),
    (r"([,.?!:;])(?=[^\s,.?!:;])", r"\1 ", 0),
    (r"(\w)\s+'\s*(\w)", r"\1'\2", 0),
    (r"(\w)\s+'\s*([,.?!:;\s]|$)", r"\1'\2", 0),
    (r"(\w)\s*'\s*([tsdmre])\b", r"\1'\2", re.IGNORECASE),
    (r"([?!])\1+", r"\1", 0),
    (r"\s+", " ", 0),
    ('"', "", 0),
)]  # in this order; the model was trained on texts that went through it


def normalise_text(text: str) -> str:
    """A text as the model was trained to read it: plain quotes and dashes, single spaces, one after punctuation."""
    text = unicodedata.normalize("NFKC", ftfy.fix_text(text))
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text.strip()


def merge_text(text: str, speaker_text: str) -> tuple[str, str]:
    """The speaker's text and the one to speak in one, and the mark that had to be set between them ("" if none).

    The mark also ends the last word of the speaker, so that text and words agree.
    """
    text, spoken = text.strip(), speaker_text.strip()
    ideographic = any(_is_ideographic(character) for character in spoken)
    ends, mark = ("。？！?!", "。") if ideographic else (".?!", ".")
    if not spoken:
        return text, ""
    gap = "" if ideographic else " "
    if spoken[-1] in ends:
        return spoken + gap + text, ""
    return spoken + mark + gap + text, mark


def _is_ideographic(character: str) -> bool:
    """Hiragana, katakana and Chinese characters; Hangul is written with spaces and is not."""
    return "\u3040" <= character <= "\u30ff" or "\u4e00" <= character <= "\u9fff"


# Prompts


def completion_prompt(text: str, profile: Profile) -> str:
    """The prompt after which the model speaks `text` in the voice of the profile, word by word."""
    merged, mark = merge_text(normalise_text(text), profile.text)
    *words, last = profile.words
    closed = last.model_copy(update={"word": last.word + mark})
    return f"{_opening(merged)}{words_text([*words, closed])}\n{WORD_START}"


def training_text(profile: Profile) -> str:
    """A whole example of the training data: text, global features, every word, the end."""
    features = f"{GLOBAL_START}{_features(profile.global_features)}{GLOBAL_END}\n"
    return f"{_opening(normalise_text(profile.text))}{features}{words_text(profile.words)}\n{AUDIO_END}\n{EOS}\n"


def _opening(text: str) -> str:
    return f"{BOS}\n{TEXT_START}{text}{TEXT_END}\n{AUDIO_START}\n"


def words_text(words: Sequence[ProfileWord]) -> str:
    """Spoken words as the model reads and writes them, one a line."""
    return "\n".join(_word(word) for word in words)


def _word(word: ProfileWord) -> str:
    codes = "".join(f"<|c1_{c1}|><|c2_{c2}|>" for c1, c2 in zip(word.c1, word.c2, strict=True))
    features = f"<|t_{word.duration:.2f}|>{_features(word.features)}"
    return f"{WORD_START}{word.word}{FEATURES}{features}{CODE}{codes}{WORD_END}"


def _features(features: WordFeatures) -> str:
    return "".join(f"<|{name}_{value}|>" for name, value in features)


# Completions


class CodeTokens:
    """Which token ids are codec codes, and which code each is.

    `vocabulary`: token -> id. `codebook_size`: codes of a codebook; the token one past the last is padding, no sound.

    Raises:
        ValueError: the vocabulary lacks the token of a code: not an OuteTTS 1.0 tokenizer, or one for another codec.
    """

    def __init__(self, vocabulary: Mapping[str, int], codebook_size: int) -> None:
        size = max(vocabulary.values()) + 1
        self.book = np.zeros(size, dtype=np.int64)  # 1 or 2, 0 for every other token
        self.code = np.zeros(size, dtype=np.int64)
        for book in range(1, BOOKS + 1):
            for code in range(codebook_size):
                token = f"<|c{book}_{code}|>"
                if token not in vocabulary:
                    raise ValueError(f"the tokenizer has no {token}, but the codec has {codebook_size} codes a book")
                self.book[vocabulary[token]], self.code[vocabulary[token]] = book, code

    def parse(self, ids: np.ndarray) -> np.ndarray:
        """(2, frames) codes of a completion: every c1 that its c2 follows at once.

        A code without its partner is left out, the last one of a take that was cut as well as one in the middle, so
        that it never shifts the pairs after it. Any other token may stand anywhere.
        """
        ids = np.asarray(ids, dtype=np.int64)
        known = np.where(ids < len(self.book), ids, 0)
        book = np.where(ids < len(self.book), self.book[known], 0)
        first = np.flatnonzero((book[:-1] == 1) & (book[1:] == 2))
        return np.stack([self.code[known[first]], self.code[known[first + 1]]])
