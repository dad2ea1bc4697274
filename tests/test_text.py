"""Text rules and error rates."""

from __future__ import annotations

import random

import jiwer
import pytest

from swaralign.rewards.text import (
    INDIC_PUNCTUATION,
    Errors,
    character_errors,
    corpus_rate,
    mean_rate,
    normalise,
    word_errors,
)

SAME = [
    ("ten", "10"),
    ("twenty", "20"),
    ("twenty-five", "25"),
    ("ten dollars", "$10"),
    ("ten dollars", "10 dollars"),
    ("fifteen dollars", "$15"),
    ("This cup costs fifteen dollars.", "This cup costs $15.00"),
    ("It is two o'clock", "It is 2 o'clock."),
    ("It is two o'clock", "It's 2:00"),
    ("It is two o'clock", "It is 2:00 o’clock."),
    ("It is two o'clock", "it is 2 o clock"),
    ("It is one o'clock in the morning.", "It is 1:00 in the morning"),
    ("two thirty", "2:30"),
    ("twelve fifteen", "12:15"),
    ("We'll go", "we will go"),
    ("the grey cat", "The gray cat."),
    ("um, the cat", "the cat"),
    ("one", "1"),
    ("the cat", "The cat..."),
    ("the cat", "...the cat\u2026"),
    ("the cat ran", "The cat... ran.."),
    ("the cat", "the - cat %"),
    ("ten percent", "10 %"),
]
DIFFERENT = [("two", "ten"), ("two o'clock", "three o'clock"), ("two o'clock", "two"), ("ten dollars", "ten"),
             ("fifteen dollars", "$50"), ("2:30", "2:00")]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_english_rule_makes_equal(one: str, other: str) -> None:
    assert normalise(one, "english") == normalise(other, "english") != ""


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_english_rule_keeps_apart(one: str, other: str) -> None:
    assert normalise(one, "english") != normalise(other, "english")


@pytest.mark.parametrize("text", ["...", "\u2026", "%", " - "])
def test_english_rule_leaves_nothing_of_marks_alone(text: str) -> None:
    assert normalise(text, "english") == ""


def test_english_rule_survives_any_transcript() -> None:
    """A transcript is whatever an ASR writes: no text may stop the run."""
    words = [" two ", " o'clock", " and a half ", "double ", " point ", "hundred ", "5th "]
    pieces = [*"abc 0159.,$%:'’²½१€¢()[]", *words]
    draw = random.Random(0)
    for _ in range(3000):
        normalised = normalise("".join(draw.choices(pieces, k=draw.randint(0, 8))), "english")
        assert normalised == " ".join(normalised.split())


def test_indic_rule_keeps_every_mark() -> None:
    text = "प्राचीन संस्कृतियों और जनजातियों"
    assert normalise(text, "indic") == text
    assert word_errors(text, text, "indic") == Errors(edits=0, length=4)
    assert normalise("हाँ, दुःख पढ़ना", "indic") == "हाँ दुःख पढ़ना"


def test_indic_rule_turns_the_published_punctuation_into_spaces() -> None:
    listed = "। ॥ . , ! ? ; : \" ' ` ´ ’ ‘ “ ” ( ) [ ] { } < > / \\ | @ # % ^ & * _ + = ~ – — -".replace(" ", "")
    assert sorted(INDIC_PUNCTUATION) == sorted(listed)
    for mark in listed:
        assert normalise(f"क{mark}ख", "indic") == "क ख"
    assert normalise("क$ख", "indic") == "क$ख"
    assert normalise("  नमस्ते।\n\tHello,   World! ", "indic") == "नमस्ते hello world"


def test_indic_rule_composes_as_nfc_does() -> None:
    """U+0958 is excluded from composition, U+0929 is not: both spellings of each are equal after the rule."""
    assert normalise("\u0958", "indic") == normalise("\u0915\u093c", "indic") == "\u0915\u093c"
    assert normalise("\u0928\u093c", "indic") == normalise("\u0929", "indic") == "\u0929"
    assert character_errors("\u0958लम", "\u0915\u093cलम", "indic").edits == 0


def test_errors_are_counted_in_words_and_characters() -> None:
    assert word_errors("the red cat sat", "the bad cat", "indic") == Errors(edits=2, length=4)
    assert character_errors("cat", "cut", "indic") == Errors(edits=1, length=3)
    assert character_errors("a b", "ab", "indic") == Errors(edits=1, length=3)
    assert word_errors("four", "4", "english") == Errors(edits=0, length=1)


def test_errors_of_an_empty_and_of_a_long_transcript() -> None:
    assert word_errors("the cat", "", "english") == Errors(edits=2, length=2)
    assert character_errors("the cat", " ... ", "indic") == Errors(edits=7, length=7)
    assert word_errors("cat", "a b c", "indic").rate == 3.0


@pytest.mark.parametrize(("text", "rule"), [("", "english"), ("um.", "english"), ("।?!", "indic")])
def test_empty_reference_is_refused(text: str, rule: str) -> None:
    for errors in (word_errors, character_errors):
        with pytest.raises(ValueError, match=rf"empty after the {rule} rule"):
            errors(text, "hello", rule)  # type: ignore[arg-type]


def test_corpus_rate_and_mean_rate_are_two_numbers() -> None:
    errors = [Errors(edits=1, length=1), Errors(edits=0, length=9)]
    assert corpus_rate(errors) == 0.1
    assert mean_rate(errors) == 0.5


def test_rates_agree_with_jiwer() -> None:
    draw = random.Random(1)
    words = ["red", "cat", "sat", "blue", "hat", "का", "था"]
    pairs = [(" ".join(draw.choices(words, k=draw.randint(1, 9))), " ".join(draw.choices(words, k=draw.randint(0, 9))))
             for _ in range(200)]
    references, transcripts = map(list, zip(*pairs, strict=True))
    counted = [word_errors(one, other, "indic") for one, other in pairs]
    assert corpus_rate(counted) == pytest.approx(jiwer.wer(references, transcripts))
    assert [each.rate for each in counted] == pytest.approx([jiwer.wer(one, other) for one, other in pairs])
    counted = [character_errors(one, other, "indic") for one, other in pairs]
    assert corpus_rate(counted) == pytest.approx(jiwer.cer(references, transcripts))
