"""GRPO on a voice policy: TRL's trainer, our rollout engine, and a reward from the same scorer that evaluation uses."""

from __future__ import annotations

import logging
import random
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from swaralign.params import GrpoParams, RuntimeParams
from swaralign.policy.base import Take, TrainableVoice
from swaralign.rewards.scorer import TakeScorer
from swaralign.seeds import take_seed
from swaralign.training import common
from swaralign.training.curves import GRPO_COLUMNS
from swaralign.training.full import attach_reference, freeze_all_but, frozen_copy, whole_weights
from swaralign.training.tracking import Tracker
from swaralign.training.validation import FixedValidation

log = logging.getLogger(__name__)
LOSS_TYPES = {"token": "dapo", "sequence": "grpo"}
START_KL = {"cpu": 1e-5, "cuda": 1e-3}  # what rounding may make of a KL of 0: float32, bfloat16
SHOWN = ("reward", "kl", "clip_fraction", "wer")  # on the progress bar


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
    """TRL's rollout function: samples the policy in training and hands each take to the reward.

    A process gets its share of the batch. A take's seed comes from its place in its group in the whole batch, whose
    groups may lie across processes.
    """

    def __init__(self, voice: TrainableVoice, grpo: GrpoParams) -> None:
        self.voice, self.grpo = voice, grpo

    def __call__(self, prompts: Sequence[str], trainer: GRPOTrainer) -> dict[str, Any]:
        counts: Counter[str] = Counter()
        seeds = []
        for text in gather_object(list(prompts)):
            seeds.append(take_seed(self.grpo.seed, "rollout", trainer.state.global_step, text, counts[text]))
            counts[text] += 1
        start = PartialState().process_index * len(prompts)
        with whole_weights(trainer):
            takes = self.voice.rollout(prompts, seeds[start : start + len(prompts)], self.grpo.sampling)
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
            for score in scores:
                if getattr(score, name) is not None:
                    log_metric(name, float(getattr(score, name)))
        return [s.composite for s in scores]


def grpo_config(grpo: GrpoParams, runtime: RuntimeParams, output: Path, tracker: Tracker | None) -> GRPOConfig:
    """TRL's configuration of a recipe; takes an update = micro_batch x processes x steps, all from one rollout."""
    steps = grpo.prompts_per_update * grpo.samples_per_prompt // (grpo.micro_batch * grpo.num_processes)
    shared = common.schedule_arguments(grpo.schedule, grpo.seed, runtime.device, output, tracker)
    return GRPOConfig(
        **shared | {"gradient_checkpointing": grpo.gradient_checkpointing},
        per_device_train_batch_size=grpo.micro_batch,
        gradient_accumulation_steps=steps,
        steps_per_generation=steps,
        num_generations=grpo.samples_per_prompt,
        num_iterations=grpo.iterations,
        max_completion_length=None,
        temperature=grpo.sampling.temperature,
        beta=grpo.beta if grpo.trainable == "lora" else 0.0,  # else `attach_reference` sets it
        epsilon=grpo.epsilon,
        loss_type=LOSS_TYPES[grpo.loss_aggregation],
        scale_rewards="group" if grpo.scale_by_std else "none",
        shuffle_dataset=False,
    )


def grpo_trainer(
    voice: TrainableVoice, plan: Sequence[dict[str, str]], scorer: TakeScorer, grpo: GrpoParams, runtime: RuntimeParams,
    folder: Path, callbacks: Sequence[Any] = (), tracker: Tracker | None = None,
) -> GRPOTrainer:
    """TRL's trainer of a fresh LoRA over the voice's model, or of the policy's own parameters.

    `plan`: from `plan_prompts`. Its rollouts and rewards are ours.
    """
    full = grpo.trainable == "full"
    if full:
        freeze_all_but(voice)
    reference = frozen_copy(voice.model) if full and grpo.beta else None
    for model in (voice.model, reference):
        common.compute_in_bfloat16(model, runtime.device)
    with warnings.catch_warnings():  # TRL's notice that rollout_func may change; the version is pinned
        warnings.filterwarnings("ignore", message="You are using 'rollout_func'")
        trainer = GRPOTrainer(
            model=voice.model,
            reward_funcs=Reward(voice, scorer),
            args=common.on_one_gpu(grpo_config(grpo, runtime, folder, tracker)),
            train_dataset=Dataset.from_list([{"prompt": row["text"], "id": row["id"]} for row in plan]),
            processing_class=voice.trl_tokenizer(),
            peft_config=None if full else common.lora_config(grpo.lora, voice.lora_targets),
            rollout_func=Rollout(voice, grpo),
            callbacks=list(callbacks),
        )
    if reference is not None:
        attach_reference(trainer, reference, grpo.beta)
    return trainer


def train_grpo(
    voice: TrainableVoice, train: Sequence[dict[str, str]], held_out: Sequence[dict[str, str]],
    scorer: TakeScorer, grpo: GrpoParams, runtime: RuntimeParams, folder: Path, tracker: Tracker | None = None,
) -> common.Training:
    """Trains over the voice's checkpoint, resuming from the newest whole checkpoint in `folder`.

    `train`, `held_out`: prompts as {"id", "text"}. The voice's model holds what was trained afterwards.
    Raises ValueError, before anything is sampled, for a text that cannot be scored or too few prompts.
    """
    scorer.check([*train, *held_out])
    plan = plan_prompts(train, grpo)
    validation = FixedValidation(
        voice, held_out, grpo.validation, scorer, folder / "validation", voice.settings.batch_size
    )
    callbacks = common.callbacks(
        validation, grpo.schedule, {"kl": START_KL[runtime.device]}, {name: GRPO_COLUMNS[name] for name in SHOWN}
    )
    trainer = grpo_trainer(voice, plan, scorer, grpo, runtime, folder, callbacks, tracker)
    validation.weights = lambda: whole_weights(trainer)
    common.fit(trainer, folder, validation, tracker)
    flat = [entry["frac_reward_zero_std"] for entry in trainer.state.log_history if "frac_reward_zero_std" in entry]
    facts = {"unused_prompts_per_epoch": len(train) % grpo.prompts_per_update, "flat_groups": sum(flat) / len(flat)}
    return common.Training(trainer, validation, GRPO_COLUMNS, facts)
