"""DPO on the merged voice with the preference pairs, and a fixed validation. The outs, under data/train_dpo/: the
adapter (PEFT), curves.csv, validation.csv, validation_samples.parquet, manifest.json.

    python -m stages.train_dpo

A run that was stopped resumes from its newest checkpoint in runs/train_dpo/; other inputs start a run of their own.
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
from swaralign.training.dpo import read_pairs, train_dpo
from swaralign.training.launch import refuse_several
from swaralign.training.tracking import load_tracker

STAGE, OUT = "train_dpo", Path("data/train_dpo")
CHECKPOINT, SPEAKER = Path("data/merge/checkpoint"), Path("data/speaker/embedding.json")
ROWS, HELD_OUT = Path("data/preferences/pairs.parquet"), Path("data/split/validation.parquet")


def main() -> None:
    refuse_several()
    params = load_params()
    runtime = params.runtime
    torch.set_num_threads(runtime.threads)
    tracker = load_tracker(params, STAGE)
    pairs, held_out = read_pairs(ROWS, params.dpo), read_prompts(HELD_OUT, params.dpo.validation.prompts)
    scorer = load_scorer(params, CHECKPOINT)
    voice = load_policy(CHECKPOINT, json.loads(SPEAKER.read_text()), params.rollout, runtime)
    inputs = stage_inputs(STAGE, params)
    result = train_dpo(voice, pairs, held_out, scorer, params.dpo, runtime, run_folder(STAGE, inputs), tracker)
    write_training(OUT, result, inputs)


if __name__ == "__main__":
    run(main)
