"""Takes of the held-out prompts by one voice, scored: data/evaluate/VOICE/{scores.parquet,summary.json}.

    python -m stages.evaluate base|sft|dpo|kto|grpo

`base` is the pinned checkpoint, `sft` the merged one that training starts from, the others that with their adapter.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from stages import run
from swaralign.assets import resolve
from swaralign.evaluation import evaluate_takes, hear_again, read_prompts, write_evaluation
from swaralign.params import load_params
from swaralign.policy import load_policy
from swaralign.rewards.asr import Transcriber
from swaralign.rewards.scorer import load_scorer

TRAINED = ("dpo", "kto", "grpo")
MERGED, SPEAKER = Path("data/merge/checkpoint"), Path("data/speaker/embedding.json")
ASSETS, PROMPTS = Path("data/assets.json"), Path("data/split/validation.parquet")
OUT = Path("data/evaluate")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("voice", choices=("base", "sft", *TRAINED))
    voice = parser.parse_args().voice
    params = load_params()
    runtime, wanted = params.runtime, params.evaluate
    torch.set_num_threads(runtime.threads)
    prompts = read_prompts(PROMPTS, wanted.prompts)
    checkpoint = resolve("base", params.assets) if voice == "base" else MERGED
    adapter = Path("data") / f"train_{voice}" / "adapter" if voice in TRAINED else None
    if (whole := Path("data") / f"train_{voice}" / "checkpoint").is_dir():  # of grpo.trainable full
        checkpoint, adapter = whole, None
    policy = load_policy(checkpoint, json.loads(SPEAKER.read_text()), params.rollout, runtime, adapter)
    second = None
    if wanted.second_asr is not None:
        second = Transcriber(resolve("second_asr", params.assets), wanted.second_asr, runtime.threads, runtime.device,
                             "evaluate.second_asr")
    table = evaluate_takes(
        policy, prompts, wanted.samples_per_prompt, wanted.seed, wanted.sampling,
        load_scorer(params, MERGED, every_metric=True), params.rollout.batch_size,
    )
    if second is not None:
        table = hear_again(table, second, params.reward.text_rule)
    inputs = {"checkpoint": checkpoint, "adapter": adapter, "speaker": SPEAKER, "prompts": PROMPTS}
    write_evaluation(OUT / voice, table, params, json.loads(ASSETS.read_text()), inputs)


if __name__ == "__main__":
    run(main)
