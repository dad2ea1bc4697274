"""A training in several processes for the tests: the micro voice, and a reward that costs nothing.

    python -m tests.ranks FOLDER

FOLDER/grpo.json holds section `grpo` of the params; the run is in FOLDER/run, the outs in FOLDER/out. While FOLDER/slow
exists, an update takes a second more.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import DistributedType, PartialState

from swaralign.params import GrpoParams, RuntimeParams, load_params
from swaralign.training.launch import launch

MAX_FRAMES = 40


def main(folder: Path) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    grpo = GrpoParams.model_validate_json((folder / "grpo.json").read_text())
    runtime = RuntimeParams(device="cpu", threads=1)
    if launch("tests.ranks", grpo, runtime):
        return
    if grpo.sharding == "fsdp":
        shard_over_cpus()
    from swaralign.training.common import write_training
    from swaralign.training.grpo import train_grpo
    from tests.voices import PROMPTS, ROOT, LengthScorer, qwen3_tts

    class Slow(LengthScorer):
        def score(self, waves: Sequence[Any], *rest: Any) -> list[Any]:
            time.sleep(float((folder / "slow").exists()))
            return super().score(waves, *rest)

    voice = qwen3_tts(load_params(ROOT / "recipes" / "demo.yaml"), MAX_FRAMES)
    result = train_grpo(voice, PROMPTS, PROMPTS, Slow(), grpo, runtime, folder / "run")
    write_training(folder / "out", result, {})


def shard_over_cpus() -> None:
    """Accelerate shards over accelerators alone; PyTorch's FSDP itself does over CPUs too."""
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


if __name__ == "__main__":
    main(Path(sys.argv[1]))
