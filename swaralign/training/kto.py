"""KTO on a voice policy (Ethayarajh et al. 2024, eq. 7 and 8): TRL's trainer on takes labelled one by one."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from datasets import Dataset
from trl import KTOConfig, KTOTrainer
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

from swaralign.params import KtoParams, RuntimeParams
from swaralign.policy.base import TrainableVoice
from swaralign.rewards.scorer import TakeScorer
from swaralign.training import common, offline
from swaralign.training.curves import KTO_COLUMNS
from swaralign.training.tracking import Tracker
from swaralign.training.validation import FixedValidation

log = logging.getLogger(__name__)
MASKS = {"completion_mask": ("completion_ids",), "KL_completion_mask": ("KL_completion_ids",)}
SHOWN = ("margin", "kl", "loss")  # on the progress bar


class LabelTrainer(offline.PlannedRows, KTOTrainer):
    """TRL's KTO trainer on planned rows of token ids: prompt_ids, completion_ids, KL_completion_ids, label."""


def read_labels(path: Path, kto: KtoParams) -> list[dict[str, Any]]:
    """The labelled takes of a preference set.

    Raises ValueError if they are too few for one update, and as `micro_batches` does.
    """
    takes = offline.read_rows(path, kto.takes_per_update, "kto.takes_per_update")
    micro_batches(takes, kto)
    return takes


def micro_batches(takes: Sequence[dict[str, Any]], kto: KtoParams) -> list[list[dict[str, Any]]]:
    """The takes in batches of `kto.micro_batch`, the same in every epoch, neighbours always of different prompts.

    TRL estimates the KL by giving each prompt of a batch its neighbour's completion, the first the last's. What fills
    no batch is left out. Raises ValueError if all takes are of one kind, or too many of one prompt to keep them apart.
    """
    order = offline.shuffled(takes, kto.seed, 0)
    count = len(order) // kto.micro_batch
    used = order[: count * kto.micro_batch]
    kinds = Counter(take["label"] for take in used)
    if len(kinds) < 2:
        raise ValueError(f"{kinds[True]} takes are desirable and {kinds[False]} undesirable, KTO needs both; raise "
                         "preferences.labels.top or bottom")
    owned = Counter(take["id"] for take in used)
    places = {prompt: place for place, prompt in enumerate(owned)}
    # Commonest prompt first, then dealt out like cards: no batch gets more of a prompt than it must.
    dealt = sorted(used, key=lambda take: (-owned[take["id"]], places[take["id"]]))
    return [_apart(dealt[index::count]) for index in range(count)]


def _apart(batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A batch whose takes of one prompt stand together, reordered so that, in a ring, they stand apart."""
    prompt, most = Counter(take["id"] for take in batch).most_common(1)[0]
    if most > len(batch) // 2:
        raise ValueError(f"prompt {prompt} has {most} of the {len(batch)} takes of a micro-batch, and each must stand "
                         "beside another prompt's; label takes of more prompts, or change kto.micro_batch")
    by_size = sorted(batch, key=lambda take: -sum(other["id"] == take["id"] for other in batch))
    ring = list(batch)
    ring[0::2], ring[1::2] = by_size[: len(ring[0::2])], by_size[len(ring[0::2]) :]
    return ring


def loss_weights(takes: Sequence[dict[str, Any]], kto: KtoParams) -> tuple[float, float]:
    """The weights of desirable and undesirable takes: as given, and where null so that both kinds weigh the same.

    With both null they average 1 over the takes. Balance: n_desirable x w_d = n_undesirable x w_u.
    """
    desirable = sum(take["label"] for take in takes)
    undesirable = len(takes) - desirable
    w_d, w_u = kto.desirable_weight, kto.undesirable_weight
    if w_d is None:
        w_d = len(takes) / (2 * desirable) if w_u is None else w_u * undesirable / desirable
    if w_u is None:
        w_u = w_d * desirable / undesirable
    return w_d, w_u


def kto_config(
    kto: KtoParams, weights: tuple[float, float], runtime: RuntimeParams, output: Path, tracker: Tracker | None
) -> KTOConfig:
    """TRL's configuration of a recipe; the KL is estimated within each micro-batch."""
    return KTOConfig(
        **common.schedule_arguments(kto.schedule, kto.seed, runtime.device, output, tracker),
        per_device_train_batch_size=kto.micro_batch,
        gradient_accumulation_steps=kto.takes_per_update // kto.micro_batch,
        beta=kto.beta,
        desirable_weight=weights[0],
        undesirable_weight=weights[1],
        max_length=None,
        precompute_ref_log_probs=True,
        disable_dropout=False,  # the adapter's own is a param
    )


def label_trainer(
    voice: TrainableVoice, batches: Sequence[list[dict[str, Any]]], kto: KtoParams, runtime: RuntimeParams,
    folder: Path, callbacks: Sequence[Any] = (), tracker: Tracker | None = None,
) -> LabelTrainer:
    """The trainer on `micro_batches`: a fresh LoRA, the reference being adapter off."""
    tokenizer = voice.trl_tokenizer()
    rows = [{"prompt_ids": voice.encode(take["text"]), "completion_ids": take["completion_ids"],
             "KL_completion_ids": neighbour["completion_ids"], "label": take["label"]}
            for batch in batches for take, neighbour in zip(batch, batch[-1:] + batch[:-1], strict=True)]
    wanted = kto.schedule.updates * kto.takes_per_update // kto.micro_batch
    order = offline.plan_epochs(len(batches), wanted, kto.seed)
    return LabelTrainer(
        plan=[index * kto.micro_batch + place for index in order for place in range(kto.micro_batch)],
        model=voice.model,
        args=common.on_one_gpu(kto_config(kto, loss_weights(list(chain(*batches)), kto), runtime, folder, tracker)),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        data_collator=offline.PolicyTokens(
            DataCollatorForUnpairedPreference(tokenizer.pad_token_id), voice.policy_mask, MASKS
        ),
        peft_config=common.lora_config(kto.lora, voice.lora_targets),
        callbacks=list(callbacks),
    )


def train_kto(
    voice: TrainableVoice, takes: Sequence[dict[str, Any]], held_out: Sequence[dict[str, str]], scorer: TakeScorer,
    kto: KtoParams, runtime: RuntimeParams, folder: Path, tracker: Tracker | None = None,
) -> common.Training:
    """Trains a fresh LoRA over the voice's checkpoint, resuming from the newest whole checkpoint in `folder`.

    `takes`: from `read_labels`. `held_out`: prompts as {"id", "text"}. The voice's model holds the trained adapter
    afterwards. Raises ValueError, before anything is sampled, for a held-out text that cannot be scored.
    """
    scorer.check(held_out)
    batches = micro_batches(takes, kto)
    if left := len(takes) - len(batches) * kto.micro_batch:
        log.warning("%d of %d labelled takes fill no micro-batch of %d and are left out", left, len(takes),
                    kto.micro_batch)
    validation = FixedValidation(
        voice, held_out, kto.validation, scorer, folder / "validation", voice.settings.batch_size
    )
    common.compute_in_bfloat16(voice.model, runtime.device)
    bound = offline.start_bound(runtime)
    bounds = {"rewards/chosen": kto.beta * bound, "rewards/rejected": kto.beta * bound, "kl": bound}
    callbacks = common.callbacks(validation, kto.schedule, bounds, {name: KTO_COLUMNS[name] for name in SHOWN})
    trainer = label_trainer(voice, batches, kto, runtime, folder, callbacks, tracker)
    common.fit(trainer, folder, validation, tracker)
    return common.Training(trainer, validation, KTO_COLUMNS, _facts(takes, batches, trainer))


def _facts(
    takes: Sequence[dict[str, Any]], batches: Sequence[list[dict[str, Any]]], trainer: LabelTrainer
) -> dict[str, Any]:
    used = list(chain(*batches))
    desirable = sum(take["label"] for take in used)
    return {
        "takes": len(used),
        "desirable": desirable,
        "undesirable": len(used) - desirable,
        "dropped_takes": len(takes) - len(used),
        "desirable_weight": trainer.desirable_weight,
        "undesirable_weight": trainer.undesirable_weight,
        "epochs": len(trainer.plan) / len(used),
    }
