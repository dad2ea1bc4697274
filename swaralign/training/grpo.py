"""GRPO on a voice policy: TRL's trainer, our rollout engine, and a reward from the same scorer that evaluation uses."""

from __future__ import annotations

import logging
import random
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from swaralign import artifacts
from swaralign.evaluation import summarise
from swaralign.params import GrpoParams, RuntimeParams
from swaralign.policy.base import Take, TrainableVoice
from swaralign.rewards.scorer import TakeScorer
from swaralign.seeds import take_seed
from swaralign.training import common
from swaralign.training.curves import GRPO_COLUMNS, Progress, curve_rows, write_csv
from swaralign.training.validation import FixedValidation

log = logging.getLogger(__name__)
warnings.filterwarnings("ignore", message="You are using 'rollout_func'")  # TRL's notice that it may change; pinned
VALIDATION_COLUMNS = ("step", "composite", "wer_corpus", "wer_mean", "cer_corpus", "cer_mean", "mos",
                      "speaker_similarity", "failed", "duration_s")
LOSS_TYPES = {"token": "dapo", "sequence": "grpo"}


@dataclass(frozen=True)
class GrpoResult:
    """A finished run. `unused`: prompts that each epoch leaves over, since they fill no batch."""

    trainer: GRPOTrainer
    validation: FixedValidation
    unused: int


def plan_prompts(prompts: Sequence[dict[str, str]], grpo: GrpoParams) -> list[dict[str, str]]:
    """The prompts of every rollout batch of the run, in order: whole shuffled epochs, cut into full batches.

    The plan lasts the whole run, so that a resumed run never replays an epoch's order. A batch never holds a prompt
    twice: what an epoch leaves over when it does not divide into batches is dropped from it.
    """
    if grpo.prompts_per_update > len(prompts):
        raise ValueError(f"grpo.prompts_per_update is {grpo.prompts_per_update}, the split has {len(prompts)} prompts")
    batches = -(-grpo.schedule.updates // grpo.iterations)
    per_epoch = len(prompts) // grpo.prompts_per_update * grpo.prompts_per_update
    plan: list[dict[str, str]] = []
    for epoch in range(-(-batches * grpo.prompts_per_update // per_epoch)):
        order = list(prompts)
        random.Random(take_seed(grpo.seed, "epoch", epoch)).shuffle(order)
        plan += order[:per_epoch]
    return plan[: batches * grpo.prompts_per_update]


class Rollout:
    """TRL's rollout function: samples the policy in training and hands each take to the reward."""

    def __init__(self, voice: TrainableVoice, grpo: GrpoParams) -> None:
        self.voice, self.grpo = voice, grpo

    def __call__(self, prompts: Sequence[str], trainer: GRPOTrainer) -> dict[str, Any]:
        counts: Counter[str] = Counter()
        seeds = []
        for text in prompts:
            seeds.append(take_seed(self.grpo.seed, "rollout", trainer.state.global_step, text, counts[text]))
            counts[text] += 1
        takes = self.voice.rollout(prompts, seeds, self.grpo.sampling)
        return {
            "prompt_ids": [self.voice.encode(text) for text in prompts],
            "completion_ids": [take.completion_ids.tolist() for take in takes],
            "logprobs": None,
            "env_mask": [take.policy_mask.astype(int).tolist() for take in takes],
            "take": takes,
        }


class Reward:
    """TRL's reward function: decodes the takes and asks the scorer, logging the metrics behind the reward."""

    __name__ = "reward"

    def __init__(self, voice: TrainableVoice, scorer: TakeScorer) -> None:
        self.voice, self.scorer = voice, scorer

    def __call__(self, prompts: Sequence[str], take: Sequence[Take], log_metric: Any, **_: Any) -> list[float | None]:
        waves = self.voice.decode(take)
        scores = self.scorer.score(waves, prompts, [t.truncated for t in take], self.voice.sample_rate_hz)
        for name in ("wer", "cer", "mos", "speaker_similarity", "failed"):
            measured = [value for score in scores if (value := getattr(score, name)) is not None]
            if measured:
                log_metric(name, sum(measured) / len(measured))
        return [s.composite for s in scores]


class StartsAtReference(TrainerCallback):
    """Stops a run whose first update, made before any change to the policy, saw a KL to the reference other than 0.

    Without KL in the loss (`beta` 0) there is no reference, and nothing to check.
    """

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if state.global_step == 1 and logs and (logs.get("kl") or 0.0) > 1e-5:
            raise RuntimeError(
                f"KL to the start policy is {logs['kl']:.3g} before the first update, and must be 0: the reference is "
                "not the start policy (does the checkpoint carry a live adapter?)"
            )


def grpo_config(grpo: GrpoParams, runtime: RuntimeParams, output: Path) -> GRPOConfig:
    """TRL's configuration of a recipe; takes an update = micro_batch x accumulation, all from one rollout."""
    takes = grpo.prompts_per_update * grpo.samples_per_prompt
    return GRPOConfig(
        **common.schedule_arguments(grpo.schedule, grpo.seed, runtime.device, output),
        per_device_train_batch_size=grpo.micro_batch,
        gradient_accumulation_steps=takes // grpo.micro_batch,
        steps_per_generation=takes // grpo.micro_batch,
        num_generations=grpo.samples_per_prompt,
        num_iterations=grpo.iterations,
        max_completion_length=None,
        temperature=grpo.sampling.temperature,
        beta=grpo.beta,
        epsilon=grpo.epsilon,
        loss_type=LOSS_TYPES[grpo.loss_aggregation],
        scale_rewards="group" if grpo.scale_by_std else "none",
        shuffle_dataset=False,
    )


def train_grpo(
    voice: TrainableVoice, train: Sequence[dict[str, str]], held_out: Sequence[dict[str, str]],
    scorer: TakeScorer, grpo: GrpoParams, runtime: RuntimeParams, folder: Path,
) -> GrpoResult:
    """Trains a fresh LoRA over the voice's checkpoint, resuming from the newest whole checkpoint in `folder`.

    `train`, `held_out`: prompts as {"id", "text"}. The voice's model holds the trained adapter afterwards.
    Raises ValueError, before anything is sampled, for a text that cannot be scored or too few prompts.
    """
    scorer.check([*train, *held_out])
    plan = plan_prompts(train, grpo)
    validation = FixedValidation(
        voice, held_out, grpo.validation, scorer, folder / "validation", voice.settings.batch_size
    )
    trainer = GRPOTrainer(
        model=voice.model,
        reward_funcs=Reward(voice, scorer),
        args=grpo_config(grpo, runtime, folder),
        train_dataset=Dataset.from_list([{"prompt": row["text"], "id": row["id"]} for row in plan]),
        processing_class=voice.trl_tokenizer(),
        peft_config=common.lora_config(grpo.lora, voice.lora_targets),
        rollout_func=Rollout(voice, grpo),
        callbacks=[StartsAtReference(), validation, common.MarkComplete(), Progress()],
    )
    trainer.remove_callback(PrinterCallback)  # the bar shows what it would print
    resume = common.newest_checkpoint(folder)
    if resume is not None:
        log.info("resuming from %s", resume)
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    return GrpoResult(trainer, validation, len(train) % grpo.prompts_per_update)


def write_training(out: Path, result: GrpoResult, inputs: dict[str, Any]) -> None:
    """Writes the adapter, the curves, the validation takes and a manifest into the folder `out`, atomically."""
    curve = curve_rows(result.trainer.state.log_history, GRPO_COLUMNS)
    flat = [row["frac_reward_zero_std"] for row in curve if row["frac_reward_zero_std"] is not None]
    takes = result.validation.table()
    steps = sorted(set(takes.column("step").to_pylist()))
    rows = [{"step": step, **summarise(takes.filter(pc.field("step") == step))} for step in steps]
    with artifacts.atomic_folder(out) as folder:
        common.save_adapter(result.trainer.model, folder / "adapter")
        write_csv(folder / "curves.csv", curve, list(GRPO_COLUMNS))
        write_csv(folder / "validation.csv", rows, VALIDATION_COLUMNS)
        artifacts.write_parquet(folder / "validation_samples.parquet", takes)
        manifest = {
            "inputs": inputs,
            "fingerprint": artifacts.fingerprint(inputs),
            "updates": len(curve),
            "unused_prompts_per_epoch": result.unused,
            "flat_groups": sum(flat) / len(flat),
            "files": artifacts.sha256_tree(folder),
        }
        artifacts.write_json(folder / "manifest.json", manifest)
