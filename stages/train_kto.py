"""KTO on the merged voice with the labelled takes, and a fixed validation. The outs, under data/train_kto/: the
adapter (PEFT), curves.csv, validation.csv, validation_samples.parquet, manifest.json.

    python -m stages.train_kto

A run that was stopped resumes from its newest checkpoint in runs/train_kto/; other inputs start a run of their own.
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
from swaralign.training.kto import read_labels, train_kto
from swaralign.training.launch import refuse_several
from swaralign.training.tracking import load_tracker

STAGE, OUT = "train_kto", Path("data/train_kto")
CHECKPOINT, SPEAKER = Path("data/merge/checkpoint"), Path("data/speaker/embedding.json")
ROWS, HELD_OUT = Path("data/preferences/labels.parquet"), Path("data/split/validation.parquet")


def main() -> None:
    refuse_several()
    params = load_params()
    runtime = params.runtime
    torch.set_num_threads(runtime.threads)
    tracker = load_tracker(params, STAGE)
    takes, held_out = read_labels(ROWS, params.kto), read_prompts(HELD_OUT, params.kto.validation.prompts)
    scorer = load_scorer(params, CHECKPOINT)
    voice = load_policy(CHECKPOINT, json.loads(SPEAKER.read_text()), params.rollout, runtime)
    inputs = stage_inputs(STAGE, params)
    result = train_kto(voice, takes, held_out, scorer, params.kto, runtime, run_folder(STAGE, inputs), tracker)
    write_training(OUT, result, inputs)


if __name__ == "__main__":
    run(main)
