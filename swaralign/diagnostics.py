"""The `swaralign diagnose` commands: does the reward hear, does the codec keep speech, what does a rollout sound like,
which samples are worth listening to. They read params.yaml and what the stages have written, and change none of it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import soundfile as sf

from swaralign.audio import read_audio, resample
from swaralign.params import Params, load_params
from swaralign.scoring.commands import positive

if TYPE_CHECKING:
    from swaralign.policy.base import TrainableVoice
    from swaralign.rewards.scorer import TakeScore

CHECKPOINT, SPEAKER = Path("data/merge/checkpoint"), Path("data/speaker/embedding.json")
HELD_OUT, EVALUATIONS = Path("data/split/validation.parquet"), Path("data/evaluate")
START = "sft"


def register(commands: Any) -> None:
    """Adds `diagnose` and its actions to the parser's commands."""
    diagnose = commands.add_parser("diagnose", help="look at the reward, the codec, a rollout or samples on their own")
    actions = diagnose.add_subparsers(required=True, metavar="rewards|codec|rollout|samples")

    rewards = actions.add_parser("rewards", help="score a clip, and silence, noise and the clip cut short beside it")
    rewards.add_argument("clip", type=Path)
    rewards.add_argument("text", help="what the clip says")
    rewards.set_defaults(run=run_rewards)

    codec = actions.add_parser("codec", help="a clip through the voice's codec and back: SNR, scores before and after")
    codec.add_argument("clip", type=Path)
    codec.add_argument("text", help="what the clip says")
    codec.add_argument("-o", "--out", type=Path, help="write the result here (WAV)")
    codec.set_defaults(run=run_codec)

    rollout = actions.add_parser("rollout", help="takes of held-out prompts by the start voice, as GRPO samples them")
    rollout.add_argument("--prompts", type=positive, default=4)
    rollout.add_argument("--seed", type=int, default=0)
    rollout.add_argument("-o", "--out", type=Path, help="write the takes into this folder (WAV)")
    rollout.set_defaults(run=run_rollout)

    samples = actions.add_parser("samples", help="every voice's takes of the prompts that the start voice says worst")
    samples.add_argument("--prompts", type=positive, default=3)
    samples.add_argument("-o", "--out", type=Path, default=Path("results/samples"))
    samples.set_defaults(run=run_samples)


def run_rewards(arguments: argparse.Namespace) -> int:
    """Scores a clip as it is and spoilt: the composite should fall from the first row to the last ones."""
    params = load_params()
    wave, rate = read_audio(arguments.clip)
    noise = (0.1 * np.random.default_rng(0).standard_normal(len(wave))).astype(np.float32)
    waves = {"clip": wave, "first half": wave[: len(wave) // 2], "noise": noise, "silence": np.zeros_like(wave)}
    print_scores(_score(params, list(waves.values()), [arguments.text] * len(waves), rate), list(waves))
    return 0


def run_codec(arguments: argparse.Namespace) -> int:
    """Encodes and decodes a clip. Raises ValueError for a voice whose codec only decodes."""
    params = load_params()
    voice = _voice(params)
    if not hasattr(voice, "round_trip"):
        raise ValueError(f"a voice of rollout.family {params.rollout.family} has a codec that only decodes here")
    wave, rate = read_audio(arguments.clip)
    before, after = voice.round_trip(resample(wave, rate, voice.sample_rate_hz))
    if arguments.out:
        sf.write(arguments.out, after, voice.sample_rate_hz)
    print(f"SNR {snr_db(before, after):.2f} dB over {len(after) / voice.sample_rate_hz:.2f} s")
    print_scores(_score(params, [before, after], [arguments.text] * 2, voice.sample_rate_hz), ["before", "after"])
    return 0


def run_rollout(arguments: argparse.Namespace) -> int:
    """Samples with `grpo.sampling` outside the trainer, and prints what came of each take."""
    from swaralign.evaluation import read_prompts
    from swaralign.seeds import take_seed

    params = load_params()
    prompts = read_prompts(HELD_OUT, arguments.prompts)
    voice = _voice(params)
    texts = [prompt["text"] for prompt in prompts]
    seeds = [take_seed(arguments.seed, prompt["id"], 0) for prompt in prompts]
    takes = voice.rollout(texts, seeds, params.grpo.sampling)
    waves = voice.decode(takes)
    for prompt, take, wave in zip(prompts, takes, waves, strict=True):
        state = "truncated" if take.truncated else "ended"
        print(f"{prompt['id']}  {len(take.completion_ids)} tokens, {take.frames} frames, {state}: {prompt['text']}")
        if arguments.out:
            arguments.out.mkdir(parents=True, exist_ok=True)
            sf.write(arguments.out / f"{prompt['id']}.wav", wave, voice.sample_rate_hz)
    cut = [take.truncated for take in takes]
    print_scores(_score(params, waves, texts, voice.sample_rate_hz, cut), [prompt["id"] for prompt in prompts])
    return 0


def run_samples(arguments: argparse.Namespace) -> int:
    """Writes OUT/PROMPT/VOICE.flac and text.txt for the prompts with the highest WER of the start voice."""
    for prompt_id, text, wer in worst_prompts(EVALUATIONS / START / "scores.parquet", arguments.prompts):
        folder = arguments.out / prompt_id
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "text.txt").write_text(text + "\n", encoding="utf-8")
        for scores in sorted(EVALUATIONS.glob("*/scores.parquet")):
            rows = pq.read_table(scores, columns=["draw", "audio"], filters=[("id", "==", prompt_id)]).to_pylist()
            first = min(rows, key=lambda row: row["draw"], default={"audio": None})  # a voice may lack the prompt
            if first["audio"] is not None:
                (folder / f"{scores.parent.name}.flac").write_bytes(first["audio"]["bytes"])
        print(f"{folder}  {START} WER {wer:.1%}: {text}")
    return 0


def worst_prompts(scores: Path, count: int) -> list[tuple[str, str, float]]:
    """(id, text, mean WER) of the prompts that a voice says worst, worst first; ties in the order of ids.

    Raises ValueError if the voice has not been evaluated, or its takes have no WER.
    """
    if not scores.is_file():
        raise ValueError(f"{scores} does not exist; `dvc repro evaluate` makes it")
    rates: dict[tuple[str, str], list[float]] = {}
    for row in pq.read_table(scores, columns=["id", "text", "wer"]).to_pylist():
        if row["wer"] is None:
            raise ValueError(f"{scores} has no WER of {row['id']}: the scorer gave no transcripts; with a recogniser "
                             "(reward.http.transcripts, or reward.kind local) `dvc repro evaluate` measures it")
        rates.setdefault((row["id"], row["text"]), []).append(row["wer"])
    means = [(prompt_id, text, float(np.mean(values))) for (prompt_id, text), values in rates.items()]
    return sorted(means, key=lambda each: (-each[2], each[0]))[:count]


def snr_db(before: np.ndarray, after: np.ndarray) -> float:
    """Power of a wave over that of its difference to another, in dB, over the samples that both have."""
    length = min(len(before), len(after))
    difference = before[:length].astype(np.float64) - after[:length]
    power, error = float(np.square(before[:length], dtype=np.float64).sum()), float(np.square(difference).sum())
    return 10 * np.log10(power / error) if error else float("inf")


def print_scores(scores: Sequence[TakeScore], names: Sequence[str]) -> None:
    """One line a take: its name, the composite, what it is made of, and what was heard."""
    for name, score in zip(names, scores, strict=True):
        print(f"{name:<18} composite {score.composite:.3f}  " + "  ".join(_metrics(score)))


def _metrics(score: TakeScore) -> Iterator[str]:
    for name, value in (("WER", score.wer), ("MOS", score.mos), ("similarity", score.speaker_similarity)):
        if value is not None:
            yield f"{name} {value:.3f}"
    yield f"({', '.join(score.flags)})" if score.failed else f"heard: {score.transcript}"


def _voice(params: Params) -> TrainableVoice:
    from swaralign.policy import load_policy

    if not SPEAKER.is_file():
        raise ValueError(f"{SPEAKER} does not exist; `dvc repro speaker` makes the voice and what it speaks as")
    return load_policy(CHECKPOINT, json.loads(SPEAKER.read_text(encoding="utf-8")), params.rollout, params.runtime)


def _score(
    params: Params, waves: Sequence[np.ndarray], texts: Sequence[str], sample_rate_hz: int,
    truncated: Sequence[bool] | None = None,
) -> list[TakeScore]:
    from swaralign.rewards.scorer import load_scorer

    scorer = load_scorer(params, CHECKPOINT, every_metric=True)
    return scorer.score(waves, texts, truncated or [False] * len(waves), sample_rate_hz)
