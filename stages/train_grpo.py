"""GRPO on the merged voice, with a fixed validation. The outs, under data/train_grpo/: the adapter (PEFT; of
grpo.trainable full, the checkpoint), curves.csv, validation.csv, validation_samples.parquet, manifest.json.

    python -m stages.train_grpo

With grpo.num_processes above 1 it runs itself so many times. A run that was stopped resumes from its newest checkpoint
in runs/train_grpo/; other inputs start a run of their own.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from stages import run
from swaralign.evaluation import read_prompts
from swaralign.params import load_params
from swaralign.policy import load_policy
from swaralign.rewards.scorer import load_scorer
from swaralign.runs import run_folder, stage_inputs
from swaralign.training.common import write_training
from swaralign.training.grpo import train_grpo
from swaralign.training.launch import launch
from swaralign.training.tracking import load_tracker

STAGE, OUT = "train_grpo", Path("data/train_grpo")
CHECKPOINT, SPEAKER = Path("data/merge/checkpoint"), Path("data/speaker/embedding.json")
TRAIN, HELD_OUT = Path("data/split/train.parquet"), Path("data/split/validation.parquet")


def main() -> None:
    params = load_params()
    runtime = params.runtime
    if launch(f"stages.{STAGE}", params.grpo, runtime):
        return
    torch.set_num_threads(runtime.threads)
    tracker = load_tracker(params, STAGE)
    train, held_out = read_prompts(TRAIN), read_prompts(HELD_OUT, params.grpo.validation.prompts)
    scorer = load_scorer(params, CHECKPOINT)
    voice = load_policy(CHECKPOINT, json.loads(SPEAKER.read_text()), params.rollout, runtime)
    inputs = stage_inputs(STAGE, params)
    result = train_grpo(voice, train, held_out, scorer, params.grpo, runtime, run_folder(STAGE, inputs), tracker)
    write_training(OUT, result, inputs)


if __name__ == "__main__":
    run(main)
