"""The candidate pool: scored takes of the training prompts, data/candidates/{candidates.parquet,manifest.json}.

    python -m stages.candidates

A pool that was stopped, even killed, goes on where it was: its chunks lie in runs/candidates/.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from stages import run
from swaralign.candidates import build_pool, write_pool
from swaralign.evaluation import read_prompts
from swaralign.params import load_params
from swaralign.policy import load_policy
from swaralign.rewards.scorer import load_scorer
from swaralign.runs import run_folder, stage_inputs

STAGE, OUT = "candidates", Path("data/candidates")
CHECKPOINT, SPEAKER = Path("data/merge/checkpoint"), Path("data/speaker/embedding.json")
PROMPTS = Path("data/split/train.parquet")


def main() -> None:
    params = load_params()
    torch.set_num_threads(params.runtime.threads)
    prompts = read_prompts(PROMPTS, params.candidates.prompts)
    scorer = load_scorer(params, CHECKPOINT, every_metric=True)
    voice = load_policy(CHECKPOINT, json.loads(SPEAKER.read_text()), params.rollout, params.runtime)
    inputs = stage_inputs(STAGE, params)
    pool = build_pool(voice, prompts, scorer, params.candidates, run_folder(STAGE, inputs))
    write_pool(OUT, pool, inputs)


if __name__ == "__main__":
    run(main)
