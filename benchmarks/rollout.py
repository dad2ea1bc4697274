"""Rollout speed: the engine against the official `generate` and a plain loop over the official modules, in one run.

    python -m benchmarks.rollout [--checkpoint data/demo/base] [--batch 8 64] [--repeats 3]

Prints milliseconds a frame step (a step samples one frame for every take of the batch) and the ratio to `generate`.
Only ratios of one run mean anything on another machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the stages have it; read when torch loads

import torch

from benchmarks.plain_rollout import plain_rollout
from swaralign.params import Qwen3TtsRolloutParams, SamplingParams, load_params
from swaralign.policy.engine import RolloutEngine
from swaralign.policy.qwen3_tts import Qwen3TtsVoice, load_voice

TEXT = "The weather in London is sunny today."
SAMPLING = SamplingParams(temperature=1.0, top_k=0, top_p=1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, default=Path("data/demo/base"))
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    params = load_params()
    if not isinstance(params.rollout, Qwen3TtsRolloutParams):
        raise ValueError(f"this measures rollout.family qwen3_tts, found {params.rollout.family}")
    torch.set_num_threads(params.runtime.threads)
    voice = load_voice(args.checkpoint, [0.0] * _hidden(args.checkpoint), params.rollout, params.runtime.device)
    print(f"{params.runtime.device}, {params.runtime.threads} threads, {params.rollout.predictor}")
    print("| batch | official generate, ms a step | plain loop, ms a step and take | engine, ms a step | ratio |")
    print("|---|---|---|---|---|")
    for batch in args.batch:
        official, plain, engine = (
            measure(call, args.repeats) for call in (
                lambda b=batch: generate(voice, b), lambda: plain_steps(voice), lambda b=batch: engine_steps(voice, b)
            )
        )
        print(f"| {batch} | {official:.1f} | {plain:.1f} | {engine:.2f} | {official / engine:.1f} |", flush=True)


def measure(call: Callable[[], int], repeats: int) -> float:
    """Median milliseconds a frame step of a call that returns how many steps it took; one call warms up."""
    call()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        steps = call()
        times.append(1000 * (time.perf_counter() - began) / steps)
    return statistics.median(times)


def generate(voice: Qwen3TtsVoice, batch: int) -> int:
    """The official `generate` with the same settings: non-streaming, x-vector only, no repetition penalty."""
    model, predictor = voice.model, voice.settings.predictor
    prompt = {"ref_spk_embedding": [model.speaker] * batch, "ref_code": None, "x_vector_only_mode": [True] * batch,
              "icl_mode": [False] * batch}
    torch.manual_seed(0)
    codes, _ = model.generate(
        input_ids=[torch.tensor([voice.text_ids(TEXT)])] * batch, voice_clone_prompt=prompt,
        languages=[voice.settings.language] * batch, non_streaming_mode=True, max_new_tokens=voice.settings.max_frames,
        top_k=SAMPLING.top_k, top_p=SAMPLING.top_p, temperature=SAMPLING.temperature,
        subtalker_dosample=predictor.temperature > 0, subtalker_temperature=predictor.temperature or 1.0,
        subtalker_top_k=predictor.top_k, subtalker_top_p=predictor.top_p, repetition_penalty=1.0,
    )
    return max(len(row) for row in codes)


def plain_steps(voice: Qwen3TtsVoice) -> int:
    prompt = voice.prompt(TEXT, 0)
    return len(plain_rollout(voice.model, voice.model.speaker, prompt, SAMPLING, voice.settings.predictor).codes)


def engine_steps(voice: Qwen3TtsVoice, batch: int) -> int:
    engine = RolloutEngine(voice.model, voice.model.speaker, voice.settings.predictor)
    frames = engine.rollout([voice.prompt(TEXT, seed) for seed in range(batch)], SAMPLING)
    return max(len(take.codes) for take in frames)


def _hidden(checkpoint: Path) -> int:
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    return int(config["talker_config"]["hidden_size"])


if __name__ == "__main__":
    main()
