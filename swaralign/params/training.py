"""The trainers: what they share, then DPO, KTO and GRPO."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from swaralign.params.base import Count, Positive, Section, Seed
from swaralign.params.rollout import SamplingParams


class LoraParams(Section):
    r: Count
    alpha: Count
    dropout: Annotated[float, Field(ge=0, lt=1)]


class ScheduleParams(Section):
    updates: Count
    learning_rate: Positive
    warmup_updates: Annotated[int, Field(ge=0)]
    weight_decay: Annotated[float, Field(ge=0)]
    max_grad_norm: Positive
    save_every: Count
    keep_checkpoints: Annotated[int, Field(ge=2)]  # the one before must stay while a new one is written
    keep_best: bool
    keep_every: Count | None

    @model_validator(mode="after")
    def _kept_ones_are_saved(self) -> Self:
        if self.keep_every and self.keep_every % self.save_every:
            raise ValueError(f"keep_every {self.keep_every} is not a multiple of save_every {self.save_every}: not all "
                             f"of them would be saved; {-(-self.keep_every // self.save_every) * self.save_every} "
                             "would do")
        return self


class ValidationParams(Section):
    every: Count
    prompts: Annotated[int, Field(ge=0)]
    seed: Seed
    sampling: SamplingParams


def _best_one_is_saved(schedule: ScheduleParams, validation: ValidationParams) -> None:
    save_every, every = schedule.save_every, validation.every
    if schedule.keep_best and validation.prompts and every % save_every:
        raise ValueError(f"validation.every {every} is not a multiple of schedule.save_every {save_every}: keep_best "
                         f"could find the best one unsaved; {-(-every // save_every) * save_every} would do")


class DpoParams(Section):
    seed: Seed
    beta: Positive
    pairs_per_update: Count
    micro_batch: Count
    lora: LoraParams
    schedule: ScheduleParams
    validation: ValidationParams

    @model_validator(mode="after")
    def _batch_arithmetic(self) -> Self:
        _divides(self.micro_batch, self.pairs_per_update, "pairs_per_update")
        _best_one_is_saved(self.schedule, self.validation)
        return self


class KtoParams(Section):
    seed: Seed
    beta: Positive
    desirable_weight: Positive | None
    undesirable_weight: Positive | None
    takes_per_update: Annotated[int, Field(ge=2)]
    micro_batch: Annotated[int, Field(ge=2)]  # a take is compared with its neighbour in the batch
    lora: LoraParams
    schedule: ScheduleParams
    validation: ValidationParams

    @model_validator(mode="after")
    def _batch_arithmetic(self) -> Self:
        _divides(self.micro_batch, self.takes_per_update, "takes_per_update", least=2)
        _best_one_is_saved(self.schedule, self.validation)
        return self


def _divides(micro_batch: int, batch: int, key: str, least: int = 1) -> None:
    if batch % micro_batch:
        fits = [n for n in _divisors(batch) if n >= least]
        raise ValueError(f"micro_batch {micro_batch} does not divide {key} {batch}; it could be one of {fits}")


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


class GrpoParams(Section):
    seed: Seed
    prompts_per_update: Count
    samples_per_prompt: Annotated[int, Field(ge=2)]
    micro_batch: Count
    num_processes: Count
    sharding: Literal["none", "fsdp"]
    trainable: Literal["lora", "full"]
    gradient_checkpointing: bool
    iterations: Count
    sampling: SamplingParams
    beta: Annotated[float, Field(ge=0)]
    epsilon: Positive
    loss_aggregation: Literal["token", "sequence"]
    scale_by_std: bool
    lora: LoraParams
    schedule: ScheduleParams
    validation: ValidationParams

    @model_validator(mode="after")
    def _no_penalty(self) -> Self:
        if self.sampling.repetition_penalty > 1:
            raise ValueError(f"sampling.repetition_penalty is {self.sampling.repetition_penalty}, GRPO needs 1 (off): "
                             "it depends on the tokens before, so replayed log-probs would be another policy's")
        return self

    @model_validator(mode="after")
    def _no_dropout(self) -> Self:
        if self.lora.dropout:
            raise ValueError(f"lora.dropout is {self.lora.dropout}, GRPO needs 0: rollouts are sampled without "
                             "dropout, so replay under it would be another policy's")
        return self

    @model_validator(mode="after")
    def _shards(self) -> Self:
        if self.sharding == "fsdp" and (self.num_processes < 2 or self.trainable != "full"):
            raise ValueError(f"sharding fsdp is for trainable full over 2 or more num_processes, found trainable "
                             f"{self.trainable} over {self.num_processes}; set sharding to none")
        return self

    @model_validator(mode="after")
    def _batch_arithmetic(self) -> Self:
        takes, ranks = self.prompts_per_update * self.samples_per_prompt, self.num_processes
        made_of = f"(prompts_per_update {self.prompts_per_update} x samples_per_prompt {self.samples_per_prompt})"
        if takes % ranks:
            fits = _divisors(takes)
            raise ValueError(f"num_processes {ranks} does not divide the {takes} takes of an update {made_of}; "
                             f"it could be one of {fits}")
        if takes // ranks % self.micro_batch:
            fits = _divisors(takes // ranks)
            share = f" x num_processes {ranks}" if ranks > 1 else ""
            raise ValueError(f"micro_batch {self.micro_batch}{share} does not divide the {takes} takes of an update "
                             f"{made_of}; micro_batch could be one of {fits}")
        for key, value in (("updates", self.schedule.updates), ("save_every", self.schedule.save_every)):
            if value % self.iterations:
                raise ValueError(
                    f"schedule.{key} {value} is not a multiple of iterations {self.iterations}: a rollout batch would "
                    f"be cut; {value // self.iterations * self.iterations or self.iterations} would do"
                )
        _best_one_is_saved(self.schedule, self.validation)
        return self
