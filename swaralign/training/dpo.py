"""DPO on a voice policy (Rafailov et al. 2023, eq. 7): TRL's trainer on pairs of takes of one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from trl import DPOConfig, DPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference

from swaralign.params import DpoParams, RuntimeParams
from swaralign.policy.base import TrainableVoice
from swaralign.rewards.scorer import TakeScorer
from swaralign.training import common, offline
from swaralign.training.curves import DPO_COLUMNS
from swaralign.training.tracking import Tracker
from swaralign.training.validation import FixedValidation

MASKS = {"completion_mask": ("chosen_ids", "rejected_ids")}
SHOWN = ("margin", "accuracy", "loss")  # on the progress bar


class PairTrainer(offline.PlannedRows, DPOTrainer):
    """TRL's DPO trainer on planned rows of token ids: prompt_ids, chosen_ids, rejected_ids."""


def read_pairs(path: Path, dpo: DpoParams) -> list[dict[str, Any]]:
    """The pairs of a preference set. Raises ValueError if they are too few for one update."""
    return offline.read_rows(path, dpo.pairs_per_update, "dpo.pairs_per_update")


def dpo_config(dpo: DpoParams, runtime: RuntimeParams, output: Path, tracker: Tracker | None) -> DPOConfig:
    """TRL's configuration of a recipe; an update is the mean over its pairs, however they are split."""
    return DPOConfig(
        **common.schedule_arguments(dpo.schedule, dpo.seed, runtime.device, output, tracker),
        per_device_train_batch_size=dpo.micro_batch,
        gradient_accumulation_steps=dpo.pairs_per_update // dpo.micro_batch,
        beta=dpo.beta,
        max_length=None,
        precompute_ref_log_probs=True,
        disable_dropout=False,  # the adapter's own is a param
    )


def pair_trainer(
    voice: TrainableVoice, pairs: Sequence[dict[str, Any]], dpo: DpoParams, runtime: RuntimeParams, folder: Path,
    callbacks: Sequence[Any] = (), tracker: Tracker | None = None,
) -> PairTrainer:
    """The trainer on pairs {"text", "chosen_ids", "rejected_ids"}: a fresh LoRA, the reference being adapter off."""
    tokenizer = voice.trl_tokenizer()
    rows = [{"prompt_ids": voice.encode(pair["text"]), "chosen_ids": pair["chosen_ids"],
             "rejected_ids": pair["rejected_ids"]} for pair in offline.shuffled(pairs, dpo.seed, 0)]
    return PairTrainer(
        plan=offline.plan_epochs(len(rows), dpo.schedule.updates * dpo.pairs_per_update, dpo.seed),
        model=voice.model,
        args=common.on_one_gpu(dpo_config(dpo, runtime, folder, tracker)),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        data_collator=offline.PolicyTokens(
            DataCollatorForPreference(tokenizer.pad_token_id), voice.policy_mask, MASKS
        ),
        peft_config=common.lora_config(dpo.lora, voice.lora_targets),
        callbacks=list(callbacks),
    )


def train_dpo(
    voice: TrainableVoice, pairs: Sequence[dict[str, Any]], held_out: Sequence[dict[str, str]], scorer: TakeScorer,
    dpo: DpoParams, runtime: RuntimeParams, folder: Path, tracker: Tracker | None = None,
) -> common.Training:
    """Trains a fresh LoRA over the voice's checkpoint, resuming from the newest whole checkpoint in `folder`.

    `pairs`: from `read_pairs`. `held_out`: prompts as {"id", "text"}. The voice's model holds the trained adapter
    afterwards. Raises ValueError, before anything is sampled, for a held-out text that cannot be scored.
    """
    scorer.check(held_out)
    validation = FixedValidation(
        voice, held_out, dpo.validation, scorer, folder / "validation", voice.settings.batch_size
    )
    common.compute_in_bfloat16(voice.model, runtime.device)
    bounds = dict.fromkeys(("rewards/chosen", "rewards/rejected"), dpo.beta * offline.start_bound(runtime))
    callbacks = common.callbacks(validation, dpo.schedule, bounds, {name: DPO_COLUMNS[name] for name in SHOWN})
    trainer = pair_trainer(voice, pairs, dpo, runtime, folder, callbacks, tracker)
    common.fit(trainer, folder, validation, tracker)
    facts = {"pairs": len(pairs), "epochs": len(trainer.plan) / len(pairs)}
    return common.Training(trainer, validation, DPO_COLUMNS, facts)
