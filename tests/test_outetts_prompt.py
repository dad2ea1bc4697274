"""Prompt and token layout of OuteTTS, against what the published `outetts` package (0.4.4) writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swaralign.policy.outetts_prompt import (
    CodeTokens,
    Profile,
    completion_prompt,
    merge_text,
    normalise_text,
    read_profile,
    training_text,
)

FACTS: dict[str, Any] = json.loads((Path(__file__).parent / "data/outetts/prompt.json").read_text(encoding="utf-8"))


def profile(**changes: Any) -> Profile:
    return read_profile(FACTS["speaker"] | changes, "speaker.json")


def tokens() -> CodeTokens:
    vocabulary = {"other": 0}
    for book in (1, 2):
        vocabulary |= {f"<|c{book}_{code}|>": 100 * book + code for code in range(5)}
    return CodeTokens(vocabulary, 5)


@pytest.mark.parametrize(("text", "expected"), FACTS["normalise"])
def test_text_is_normalised_as_published(text: str, expected: str) -> None:
    assert normalise_text(text) == expected


@pytest.mark.parametrize(("text", "speaker", "merged", "mark"), FACTS["merge"])
def test_texts_are_merged_as_published(text: str, speaker: str, merged: str, mark: str) -> None:
    assert merge_text(text, speaker) == (merged, mark)


@pytest.mark.parametrize(("speaker_text", "text", "prompt"), FACTS["prompts"])
def test_prompt_is_the_published_one(speaker_text: str, text: str, prompt: str) -> None:
    speaker = profile(text=speaker_text)
    assert completion_prompt(text, speaker) == prompt
    assert completion_prompt(text, speaker) == prompt  # the profile is left as it was


def test_training_text_is_the_published_one() -> None:
    assert training_text(profile()) == FACTS["training"]


@pytest.mark.parametrize(("ids", "codes"), FACTS["parse"][:3])
def test_codes_are_read_as_published(ids: list[int], codes: list[list[int]]) -> None:
    assert tokens().parse(np.array(ids)).tolist() == codes


@pytest.mark.parametrize(
    ("ids", "codes"),
    [
        ([], [[], []]),
        ([100], [[], []]),
        ([100, 200, 101], [[0], [0]]),  # cut between c1 and c2
        ([100, 200, 101, 102, 203], [[0, 2], [0, 3]]),  # a c1 without its c2 does not shift the pairs after it
        ([201, 100, 200, 0, 104, 7, 204], [[0], [0]]),  # other tokens part a pair
        ([100, 200, 105, 205, 9999], [[0], [0]]),  # the padding code, and an id past the vocabulary, are no sounds
    ],
)
def test_codes_without_a_partner_are_left_out(ids: list[int], codes: list[list[int]]) -> None:
    parsed = tokens().parse(np.array(ids, dtype=np.int64))
    assert parsed.shape == (2, len(codes[0])) and parsed.tolist() == codes


def test_a_tokenizer_without_the_codes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no <\|c1_5\|>, but the codec has 6 codes"):
        CodeTokens({f"<|c{book}_{code}|>": 5 * book + code for book in (1, 2) for code in range(5)}, 6)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"words": []}, "words: List should have at least 1 item"),
        ({"words": [FACTS["speaker"]["words"][0] | {"c2": [3]}]}, "word 'A' has 2 c1 codes and 1 c2 codes"),
        ({"words": [FACTS["speaker"]["words"][0] | {"features": {"energy": 101}}]}, "words.0.features.energy"),
        ({"interface_version": 2}, "interface version 2; OuteTTS 1.0 needs version 3"),
        ({"extra": 1}, "extra: Extra inputs"),
    ],
)
def test_a_faulty_profile_is_told(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError) as caught:
        profile(**changes)
    assert "speaker.json" in str(caught.value) and told in str(caught.value)
