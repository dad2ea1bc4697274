"""What tests of the comparison and the report share: evaluations made of texts and transcripts, without any model."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Features

from swaralign.audio import encode_flac
from swaralign.comparison import Evaluation
from swaralign.evaluation import SECOND, features
from swaralign.params import CompareParams, load_params
from swaralign.rewards.text import character_errors, word_errors

RATE_HZ = 24000
PARAMS = CompareParams(confidence=0.95, resamples=10_000, seed=7, catastrophic_wer=0.5)
SCHEMA = Features({**features(RATE_HZ), **SECOND}).arrow_schema
WORDS = ["red", "cat", "sat", "blue", "hat", "dog"]
SPOILT = {"base": 0.9, "sft": 0.4, "dpo": 0.35, "kto": 0.3, "grpo": 0.2}  # share of words that a voice says at random


def settings() -> dict[str, Any]:
    """What `evaluate` writes of the demo recipe's params."""
    params = load_params(Path(__file__).resolve().parent.parent / "recipes" / "demo.yaml")
    sections = {name: getattr(params, name).model_dump() for name in ("rollout", "reward", "evaluate")}
    return {**sections, "assets": {"asr": {"model.bin": "ab12"}}}


def take(prompt: int, draw: int, text: str, transcript: str | None, voice: str = "sft") -> dict[str, Any]:
    """A take's row; one without transcript is silent. The second ASR hears what the first does."""
    words, characters = (errors(text, transcript or "", "indic") for errors in (word_errors, character_errors))
    heard = transcript is not None
    return {
        "id": f"p-{prompt}", "draw": draw, "seed": 100 * prompt + draw, "text": text, "transcript": transcript,
        "composite": 1 - min(1.0, characters.rate), "wer": words.rate, "wer_capped": min(1.0, words.rate),
        "wer_edits": words.edits, "wer_length": words.length, "cer": characters.rate,
        "cer_capped": min(1.0, characters.rate), "cer_edits": characters.edits, "cer_length": characters.length,
        "mos": 2.0 + prompt % 3 if heard else None, "speaker_similarity": 0.5 + draw / 10 if heard else None,
        "duration_s": 1.0 + prompt, "frames": 13, "flags": [] if heard else ["silent"],
        "second_transcript": transcript, "second_wer": words.rate, "second_wer_edits": words.edits,
        "second_wer_length": words.length, "audio": {"bytes": tone(voice), "path": None} if heard else None,
    }


@cache
def tone(voice: str) -> bytes:
    """A quarter of a second of FLAC, another pitch for each voice."""
    wave = np.sin(2 * np.pi * (220 + 110 * list(SPOILT).index(voice)) * np.arange(RATE_HZ // 4) / RATE_HZ)
    return encode_flac((0.2 * wave).astype(np.float32), RATE_HZ)


def evaluation(
    rows: list[dict[str, Any]], changed: dict[str, Any] | None = None, speaker: str = "5eed"
) -> Evaluation:
    """An evaluation of takes, with their audio."""
    summary = {"settings": changed or settings(), "inputs": {"speaker": speaker}}
    return Evaluation(pa.Table.from_pylist(rows, schema=SCHEMA), summary)


def tiny() -> dict[str, Evaluation]:
    """Two prompts with two draws: the start says every word, the other voice one wrong, and fails once."""
    texts = ["a b c d", "a b"]
    start = [take(p, d, texts[p], texts[p]) for p in range(2) for d in range(2)]
    other = [take(0, 0, "a b c d", "a b c x"), take(0, 1, "a b c d", "a b c d"),
             take(1, 0, "a b", None), take(1, 1, "a b", "a b")]
    return {"base": evaluation(other), "sft": evaluation(start)}


def random_voices(
    prompts: int = 60, draws: int = 3, voices: tuple[str, ...] = ("sft", "grpo")
) -> dict[str, Evaluation]:
    """Voices that say some words at random, of texts of several lengths."""
    rng = np.random.default_rng(0)
    rows: dict[str, list[dict[str, Any]]] = {voice: [] for voice in voices}
    for prompt in range(prompts):
        text = rng.choice(WORDS, size=rng.integers(1, 9))
        for draw in range(draws):
            for voice in voices:
                spoilt = np.where(rng.random(len(text)) < SPOILT[voice], rng.choice(WORDS, size=len(text)), text)
                rows[voice].append(take(prompt, draw, " ".join(text), " ".join(spoilt), voice))
    return {voice: evaluation(rows[voice]) for voice in voices}


def write(folder: Path, voices: dict[str, Evaluation]) -> None:
    """Writes evaluations as `evaluate` does."""
    for voice, evaluated in voices.items():
        (folder / voice).mkdir(parents=True)
        pq.write_table(evaluated.takes, folder / voice / "scores.parquet")
        (folder / voice / "summary.json").write_text(json.dumps(evaluated.summary))
