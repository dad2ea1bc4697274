"""Updates of a recipe at the published size: wall time by part, peak memory, and what the whole run would take.

    python -m benchmarks.update FOLDER [--recipe recipes/qwen3-hindi-grpo.yaml] [--device cuda] [--processes 1]
    python -m benchmarks.update FOLDER --recipe recipes/outetts-micro.yaml --size micro --device cpu

FOLDER/base is the checkpoint; one of the published shapes of the recipe's family with random weights is made where
there is none, and with `--size micro` it is the repository's own. What runs is the stage `train_grpo` itself, in a
workspace under FOLDER that holds what the stages before it would have made; only the reward is another, the duration of
sound. With `--asr` a Whisper in transformers' layout hears every take all the same, converted as the stage `assets`
does it, with the settings of `reward.asr`; without one its time is not in the figures. Random weights hardly ever end a
take, so that takes have the recipe's full length. Ends with a JSON line.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from ruamel.yaml import YAML
from trl import GRPOTrainer

from benchmarks.families import FAMILIES
from benchmarks.full_size import prompts
from benchmarks.full_size_whisper import FILES
from stages import train_grpo as stage
from swaralign import artifacts
from swaralign.conversion import to_ctranslate2
from swaralign.params import GrpoParams, Params, load_params
from swaralign.policy import load_policy
from swaralign.policy.base import TrainableVoice
from swaralign.rewards.asr import Transcriber
from swaralign.rewards.scorer import Recogniser, TakeScore
from swaralign.training.grpo import train_grpo
from swaralign.training.launch import launch, launched
from swaralign.training.validation import FixedValidation

PARTS = ("rollout", "decode", "score", "reference", "forward", "backward", "optimizer")
LOUD = 0.01  # of full scale
GOAL_MINUTES = 45.0
ROOT = Path(__file__).resolve().parent.parent
CODE = ("dvc.yaml", "recipes", "stages", "swaralign")  # which the stage reads or hashes


class SoundScorer:
    """Seconds of sound, as a share of the longest take's; a recogniser, if any, hears the takes for its time's sake."""

    elsewhere = False

    def __init__(self, full_s: float, recogniser: Recogniser | None) -> None:
        self.full_s = full_s
        self.recogniser = recogniser

    def score(
        self, waves: Sequence[np.ndarray], texts: Sequence[str], truncated: Sequence[bool], sample_rate_hz: int
    ) -> list[TakeScore]:
        if self.recogniser:
            self.recogniser.transcribe(waves, sample_rate_hz)
        return [self._one(float((np.abs(wave) > LOUD).sum()) / sample_rate_hz) for wave in waves]

    def check(self, prompts: Sequence[dict[str, str]]) -> None:
        """Any text will do."""

    def _one(self, seconds: float) -> TakeScore:
        missing = 1 - min(1.0, seconds / self.full_s)
        return TakeScore(1 - missing, missing, missing, missing, missing, 0, 1, 0, 1, None, None, "", ())


class Clock:
    """Seconds by part, of each update and each validation."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.updates: list[Counter[str]] = []
        self.validations: list[Counter[str]] = []
        self.now: Counter[str] = Counter()

    def begin(self, kind: list[Counter[str]]) -> None:
        self.now = Counter()
        kind.append(self.now)

    def wrap(self, part: str | Callable[[], str], call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, with its time added to a part of whatever is being timed."""

        def timed(*inputs: Any, **named: Any) -> Any:
            self._wait()
            began = time.perf_counter()
            result = call(*inputs, **named)
            self._wait()
            self.now[part if isinstance(part, str) else part()] += time.perf_counter() - began  # type: ignore[assignment]
            return result

        return timed

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def watch(self, voice: Any, scorer: SoundScorer) -> None:
        """Times what training calls: the voice and the scorer, and the trainer's own steps."""
        voice.rollout, voice.decode = self.wrap("rollout", voice.rollout), self.wrap("decode", voice.decode)
        scorer.score = self.wrap("score", scorer.score)  # type: ignore[method-assign]

        def replay() -> str:
            return "forward" if torch.is_grad_enabled() else "reference"

        steps: tuple[tuple[type, str, str | Callable[[], str]], ...] = (
            (GRPOTrainer, "_get_per_token_logps_and_entropies", replay),
            (Accelerator, "backward", "backward"),
            (AcceleratedOptimizer, "step", "optimizer"),
        )
        for owner, name, part in steps:
            setattr(owner, name, self.wrap(part, getattr(owner, name)))
        self._count(GRPOTrainer, "_generate_and_score_completions", self.updates)
        self._count(FixedValidation, "_validate", self.validations)

    def _count(self, owner: Any, name: str, kind: list[Counter[str]]) -> None:
        call = self.wrap("whole", getattr(owner, name))

        def counted(*inputs: Any, **named: Any) -> Any:
            self.begin(kind)
            return call(*inputs, **named)

        setattr(owner, name, counted)


def follows_weights(voice: TrainableVoice, text: str, grpo: GrpoParams) -> bool:
    """Whether a rollout samples from the weights of the moment: other weights, another take, and back again."""
    trained = [parameter for parameter in voice.model.parameters() if parameter.requires_grad]
    kept = [parameter.detach().clone() for parameter in trained]

    def take() -> list[int]:
        ids: list[int] = voice.rollout([text], [1], grpo.sampling)[0].completion_ids.tolist()
        return ids

    before = take()
    with torch.no_grad():
        for parameter in trained:
            parameter += 0.02 * torch.randn_like(parameter)
        changed = take()
        for parameter, value in zip(trained, kept, strict=True):
            parameter.copy_(value)
    return changed != before and take() == before


def recipe(args: argparse.Namespace) -> Params:
    """The recipe's params with the settings of the command line."""
    params = load_params(args.recipe)
    data = params.model_dump()
    data["runtime"] = {"device": args.device, "threads": args.threads}
    if args.longest:
        data["rollout"][params.rollout.longest_key] = args.longest
    data["grpo"]["num_processes"] = args.processes
    data["grpo"]["micro_batch"] = args.micro_batch or data["grpo"]["micro_batch"]
    data["grpo"]["sharding"] = args.sharding
    data["grpo"]["schedule"] |= {"updates": args.updates, "save_every": args.updates, "warmup_updates": 0,
                                 "keep_every": None}
    data["grpo"]["validation"]["every"] = args.updates
    if args.validation is not None:
        data["grpo"]["validation"]["prompts"] = args.validation
    return Params.model_validate(data)


def report(result: Any, clock: Clock, params: Params, args: argparse.Namespace) -> dict[str, Any]:
    """What is printed: a table of the last update, and the figures of the JSON line."""
    full = load_params(args.recipe).grpo
    update, validation = clock.updates[-1], clock.validations[-1]
    seconds = {part: round(update[part], 3) for part in PARTS}
    whole = update["whole"] + update["forward"] + update["backward"] + update["optimizer"]
    each = validation["whole"] / max(1, params.grpo.validation.prompts)
    validations = full.schedule.updates // full.validation.every + 1
    minutes = (full.schedule.updates * whole + validations * full.validation.prompts * each) / 60
    history = [entry for entry in result.trainer.state.log_history if "loss" in entry]
    figures = {
        "benchmark": "update", "family": params.rollout.family, "processes": args.processes,
        "trainable": params.grpo.trainable, "update_s": round(whole, 3), **seconds,
        "validation_s": round(validation["whole"], 3), "validation_takes": params.grpo.validation.prompts,
        "take_tokens": history[-1]["completions/mean_length"], "reward": history[-1]["reward"],
        "projected_minutes": round(minutes, 1), "ratio": round(GOAL_MINUTES / minutes, 2),
        "loss": history[0]["loss"], "grad_norm": history[0]["grad_norm"], "kl_at_start": history[0].get("kl"),
        "clipped_at_start": history[0]["clip_ratio/region_mean"],
    }
    if args.device == "cuda":
        figures["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--recipe", type=Path, default=Path("recipes/qwen3-hindi-grpo.yaml"))
    parser.add_argument("--size", choices=("full", "micro"), default="full")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--sharding", choices=("none", "fsdp"), default="none")
    parser.add_argument("--micro-batch", type=int, help="takes in a forward pass; the recipe's if left out")
    parser.add_argument("--updates", type=int, default=2)
    parser.add_argument("--validation", type=int, help="held-out prompts; as many as in the recipe if left out")
    parser.add_argument("--longest", type=int, help="frames or tokens of the longest take; the recipe's if left out")
    parser.add_argument("--asr", type=Path, help="a folder as `benchmarks.full_size_whisper` writes it")
    args = parser.parse_args()
    params = recipe(args)
    family = FAMILIES[params.rollout.family]
    base = family.micro if args.size == "micro" else args.folder / "base"
    if not base.is_dir():
        family.write_base(base, 0)
    whisper = to_ctranslate2("asr", args.asr, FILES) if args.asr else None  # before several processes begin
    workspace = args.folder / f"{params.grpo.trainable}-{args.processes}"
    if not launched():
        write_workspace(workspace, base, params)
    if launch("benchmarks.update", params.grpo, params.runtime):
        return
    run(workspace, whisper, params, args)


def write_workspace(folder: Path, base: Path, params: Params) -> None:
    """A folder as the stages before `train_grpo` leave it, in place of one that is there: the checkpoint, a speaker,
    prompts, and the code by links."""
    if folder.exists():
        shutil.rmtree(folder)
    data = folder / "data"
    for name in ("merge", "split"):
        (data / name).mkdir(parents=True)
    for name in CODE:
        (folder / name).symlink_to(ROOT / name)
    YAML().dump(params.model_dump(), folder / "params.yaml")
    (data / "merge/checkpoint").symlink_to(base.resolve())
    artifacts.write_json(data / "assets.json", {})
    artifacts.write_json(data / "speaker/embedding.json", FAMILIES[params.rollout.family].speaker(base))
    texts = prompts(max(params.grpo.validation.prompts, 2 * params.grpo.prompts_per_update))
    for name in ("train", "validation"):
        artifacts.write_parquet(data / f"split/{name}.parquet", pa.table({"extra_info": texts}))


def run(workspace: Path, whisper: Path | None, params: Params, args: argparse.Namespace) -> None:
    """The stage, its policy and trainer watched and its scorer replaced; prints the figures."""
    recogniser = None
    if whisper:
        recogniser = Transcriber(whisper, params.reward.asr, params.runtime.threads, params.runtime.device)
    scorer: Any = SoundScorer(params.rollout.longest / params.rollout.units_per_second, recogniser)
    clock = Clock(args.device)
    kept = watch_stage(scorer, clock)
    try:
        with chdir(workspace):
            stage.main()
    finally:
        for name, kind in (("update", clock.updates), ("validation", clock.validations)):
            for number, parts in enumerate(kind, start=1):
                print(f"{name} {number}:", {part: round(value, 3) for part, value in parts.items()}, flush=True)
    result = kept["result"]
    figures = report(result, clock, params, args)
    if params.grpo.sharding == "none":
        figures["follows_weights"] = follows_weights(kept["voice"], prompts(1)[0]["text"], params.grpo)
    if result.trainer.is_world_process_zero():
        print(json.dumps(figures))


def watch_stage(scorer: SoundScorer, clock: Clock) -> dict[str, Any]:
    """Gives the stage this scorer and times what it calls; returns its `voice` and its `result`, once it has run."""
    kept: dict[str, Any] = {}

    def load(*inputs: Any, **named: Any) -> Any:
        kept["voice"] = load_policy(*inputs, **named)
        clock.watch(kept["voice"], scorer)
        return kept["voice"]

    def train(*inputs: Any, **named: Any) -> Any:
        kept["result"] = train_grpo(*inputs, **named)
        return kept["result"]

    vars(stage).update(load_policy=load, load_scorer=lambda *_, **__: scorer, train_grpo=train)
    return kept


if __name__ == "__main__":
    main()
