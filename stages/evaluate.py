"""Takes of the held-out prompts by one voice, scored: data/evaluate/VOICE/{scores.parquet,summary.json}.

    python -m stages.evaluate base|sft|grpo

`base` is the pinned checkpoint, `sft` the merged one that training starts from, `grpo` that with the trained adapter.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from stages import run
from swaralign.assets import resolve
from swaralign.evaluation import evaluate_takes, read_prompts, write_evaluation
from swaralign.params import load_params
from swaralign.policy import load_policy
from swaralign.rewards.asr import Transcriber
from swaralign.rewards.score import Scorer

MERGED, ADAPTER = Path("data/merge/checkpoint"), Path("data/train_grpo/adapter")
SPEAKER, PROMPTS = Path("data/speaker/embedding.json"), Path("data/split/validation.parquet")
OUT = Path("data/evaluate")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("voice", choices=("base", "sft", "grpo"))
    voice = parser.parse_args().voice
    params = load_params()
    runtime, wanted = params.runtime, params.evaluate
    torch.set_num_threads(runtime.threads)
    prompts = read_prompts(PROMPTS, wanted.prompts)
    checkpoint = resolve("base", params.assets) if voice == "base" else MERGED
    adapter = ADAPTER if voice == "grpo" else None
    asr = Transcriber(resolve("asr", params.assets), params.reward.asr, runtime.threads, runtime.device)
    policy = load_policy(checkpoint, json.loads(SPEAKER.read_text()), params.rollout, runtime, adapter)
    table = evaluate_takes(
        policy, prompts, wanted.samples_per_prompt, wanted.seed, wanted.sampling, Scorer(params.reward, asr),
        params.rollout.batch_size,
    )
    inputs = {"checkpoint": checkpoint, "adapter": adapter, "speaker": SPEAKER, "prompts": PROMPTS}
    write_evaluation(OUT / voice, table, params, inputs)


if __name__ == "__main__":
    run(main)
