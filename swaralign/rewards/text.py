"""Text as it is compared, and the error rates of a transcript against it.

Reference and transcript go through the same function, `normalise`. Edits and lengths are kept apart, so that a corpus
rate can be told from the mean of utterance rates.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Literal

import jiwer
from whisper_normalizer.english import EnglishTextNormalizer

TextRule = Literal["english", "indic"]

INDIC_PUNCTUATION = "।॥.,!?;:\"'`´’‘“”()[]{}<>/\\|@#%^&*_+=~–—-"
_TO_SPACES = str.maketrans(dict.fromkeys(INDIC_PUNCTUATION, " "))
_FULL_HOUR = re.compile(r"\b(\d{1,2}):00\b(?:\s*o['’]clock\b)?", re.IGNORECASE)
_TIME = re.compile(r"\b(\d{1,2}):([0-5]\d)\b")
_OCLOCK = re.compile(r"\bo\s?['’]?\s?clock\b", re.IGNORECASE)
_PERCENT = re.compile(r"(?<=\d)\s+%")
_DOTS = re.compile(r"\.{2,}|…")


@dataclass(frozen=True)
class Errors:
    """Edits (substitutions, deletions, insertions) that turn a reference of `length` units into a transcript."""

    edits: int
    length: int

    @property
    def rate(self) -> float:
        """Edits per unit of the reference; above 1 if the transcript is much longer."""
        return self.edits / self.length


def normalise(text: str, rule: TextRule) -> str:
    """Text as it is compared: `english` puts numbers, money and times into digits, `indic` is the published rule."""
    return _english(text) if rule == "english" else _indic(text)


def word_errors(reference: str, transcript: str, rule: TextRule) -> Errors:
    """Errors of a transcript in words. Raises ValueError if nothing of the reference is left to compare with."""
    spoken = reference_text(reference, rule)
    return _errors(jiwer.process_words(spoken, normalise(transcript, rule)))


def character_errors(reference: str, transcript: str, rule: TextRule) -> Errors:
    """Errors of a transcript in characters (code points), single spaces among them. Raises as `word_errors`."""
    spoken = reference_text(reference, rule)
    return _errors(jiwer.process_characters(spoken, normalise(transcript, rule)))


def reference_text(reference: str, rule: TextRule) -> str:
    """A reference as it is compared. Raises ValueError if it is then empty: there is no error rate against nothing."""
    spoken = normalise(reference, rule)
    if not spoken:
        raise ValueError(f"the text {reference!r} is empty after the {rule} rule and cannot be scored; drop its prompt")
    return spoken


def corpus_rate(errors: Iterable[Errors]) -> float:
    """Sum of edits over sum of reference lengths, of at least one utterance."""
    errors = list(errors)
    return sum(each.edits for each in errors) / sum(each.length for each in errors)


def mean_rate(errors: Iterable[Errors]) -> float:
    """Mean of the rates of at least one utterance: another number than the corpus rate."""
    rates = [each.rate for each in errors]
    return sum(rates) / len(rates)


def _errors(alignment: jiwer.WordOutput | jiwer.CharacterOutput) -> Errors:
    missed = alignment.substitutions + alignment.deletions
    return Errors(edits=missed + alignment.insertions, length=missed + alignment.hits)


def _indic(text: str) -> str:
    """NFC, punctuation to spaces, lower case, spaces folded; vowel signs, virama, anusvara and nukta stay.

    Whisper's basic normaliser would turn every combining mark into a space and words into letters.
    """
    return _fold(unicodedata.normalize("NFC", text).translate(_TO_SPACES).lower())


def _english(text: str) -> str:
    """Whisper's English normaliser, after times: it knows no `2:00` and reads `two o'clock` as `20 clock`.

    Of a text that ends in dots it leaves one, as a word; so nothing that holds no letter or digit is one.
    """
    text = _FULL_HOUR.sub(r"\1 oclock", text)
    text = _TIME.sub(r"\1\2", text)
    text = _OCLOCK.sub("oclock", text)
    text = _DOTS.sub(" ", text)
    text = _PERCENT.sub("%", text)
    return " ".join(word for word in _english_normaliser()(text).split() if any(map(str.isalnum, word)))


@cache
def _english_normaliser() -> Callable[[str], str]:
    return EnglishTextNormalizer()


def _fold(text: str) -> str:
    return " ".join(text.split())
