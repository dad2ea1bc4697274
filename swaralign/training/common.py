"""What every trainer shares: LoRA, schedule, the check of its start, checkpoints and resuming, what it writes."""

from __future__ import annotations

import functools
import json
import logging
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import torch
import trl.trainer.utils
from accelerate import PartialState
from peft import LoraConfig, PeftModel
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from swaralign import artifacts
from swaralign.evaluation import summarise
from swaralign.params import LoraParams, ScheduleParams
from swaralign.training.curves import Progress, curve_rows, write_csv
from swaralign.training.full import trained_weights, write_checkpoint
from swaralign.training.tracking import Tracker
from swaralign.training.validation import SUMMARY, FixedValidation

log = logging.getLogger(__name__)
COMPLETE = "complete.json"  # written last into a checkpoint; one without it was cut off

# TRL's head scores only positions with a label where it has Triton, and every position elsewhere, for compilers that
# want fixed shapes. Of 16 flat positions 15 have no label: on a CPU that would be most of an update's time.
trl.trainer.utils._use_triton = lambda device: True


@dataclass(frozen=True)
class Training:
    """A finished run. `columns`: those of its curves, with their keys in the log; `facts`: more for its manifest."""

    trainer: Trainer
    validation: FixedValidation
    columns: Mapping[str, str]
    facts: Mapping[str, Any]


def lora_config(lora: LoraParams, targets: str) -> LoraConfig:
    """A fresh, zero-initialised adapter on the modules that the regular expression `targets` matches."""
    return LoraConfig(r=lora.r, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=targets, bias="none")


def schedule_arguments(
    schedule: ScheduleParams, seed: int, device: str, output: Path, tracker: Tracker | None = None
) -> dict[str, Any]:
    """Arguments of a transformers TrainingArguments for a schedule: constant rate after a linear warm-up."""
    return {
        "output_dir": str(output),
        "max_steps": schedule.updates,
        "learning_rate": schedule.learning_rate,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": schedule.warmup_updates,
        "weight_decay": schedule.weight_decay,
        "max_grad_norm": schedule.max_grad_norm,
        "optim": "adamw_torch",
        "seed": seed,
        "data_seed": seed,
        "use_cpu": device == "cpu",
        "bf16": False,  # see `compute_in_bfloat16`
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": schedule.save_every,
        "save_total_limit": None,  # see `KeepCheckpoints`
        "ddp_find_unused_parameters": False,
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_pin_memory": device != "cpu",
        **(tracker.arguments(output) if tracker else {"report_to": "none"}),
    }


def on_one_gpu(config: TrainingArguments) -> Any:
    """A configuration that leaves other GPUs alone: each process has one, and the trainer would take all it sees."""
    config._n_gpu = min(config.n_gpu, 1)
    return config


def compute_in_bfloat16(model: Any, device: str) -> None:
    """On a GPU, makes the backbone of a float32 model compute in bfloat16; call it before a trainer takes the model.

    The trainer's own autocast would also round the head's logits, and with them the log-probabilities.
    """
    if device == "cpu" or model is None:
        return
    backbone = model.base_model
    forward = backbone.forward

    @functools.wraps(forward)
    def autocast(*inputs: Any, **named: Any) -> Any:
        with torch.autocast(device, torch.bfloat16):
            output = forward(*inputs, **named)
        output.last_hidden_state = output.last_hidden_state.float()
        return output

    backbone.forward = autocast


def fit(trainer: Trainer, folder: Path, validation: FixedValidation, tracker: Tracker | None) -> None:
    """Trains, resuming from the newest whole checkpoint in `folder`."""
    trainer.remove_callback(PrinterCallback)  # the bar shows what it would print
    if tracker and trainer.is_world_process_zero():
        tracker.attach(trainer, validation, folder)
    resume = newest_checkpoint(folder)
    if resume is not None:
        log.info("resuming from %s", resume)
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)


def callbacks(
    validation: FixedValidation, schedule: ScheduleParams, bounds: Mapping[str, float], shown: Mapping[str, str]
) -> list[TrainerCallback]:
    """What watches over every training; `bounds` as in `StartsAtReference`, `shown` as in `Progress`."""
    return [StartsAtReference(bounds), validation, KeepCheckpoints(validation, schedule), Progress(shown)]


class StartsAtReference(TrainerCallback):
    """Stops a run whose first update, made before any change to the policy, saw it differ from its reference.

    `bounds`: keys of the trainer's log that must be 0 there, each with the rounding it may have. A key that is not
    logged is not checked: without KL in the loss, GRPO has no reference.
    """

    def __init__(self, bounds: Mapping[str, float]) -> None:
        self.bounds = bounds

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if state.global_step != 1 or not logs:
            return
        for key, bound in self.bounds.items():
            if not abs(logs.get(key) or 0.0) <= bound:  # so that NaN does not pass
                raise RuntimeError(
                    f"{key} is {logs[key]:.3g} before the first update, and must be 0: the reference is not the start "
                    "policy (does the checkpoint carry a live adapter?)"
                )


class KeepCheckpoints(TrainerCallback):
    """Marks each checkpoint as whole once every process has written its part, then deletes those that no rule keeps."""

    def __init__(self, validation: FixedValidation, schedule: ScheduleParams) -> None:
        self.validation, self.schedule = validation, schedule

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        processes = PartialState()
        processes.wait_for_everyone()
        if not processes.is_main_process:
            return
        found = {int(path.name.split("-")[1]): path for path in Path(args.output_dir).glob("checkpoint-*")}
        folder = found[state.global_step]
        (folder / COMPLETE).unlink(missing_ok=True)  # of a damaged one, which was written over
        artifacts.write_json(folder / COMPLETE, artifacts.sha256_tree(folder))
        for step in found.keys() - kept_checkpoints(found.keys(), self.schedule, self.validation.composites()):
            shutil.rmtree(found[step])


def kept_checkpoints(steps: Collection[int], schedule: ScheduleParams, composites: Mapping[int, float]) -> set[int]:
    """The updates whose checkpoints are kept: the newest, every so many, the best of those that were validated.

    `composites`: the mean composite of each validation by its update. Of equally good ones the newest is the best.
    """
    kept = set(sorted(steps)[-schedule.keep_checkpoints :])
    if schedule.keep_every:
        kept |= {step for step in steps if step % schedule.keep_every == 0}
    validated = [step for step in steps if step in composites]
    if schedule.keep_best and validated:
        kept.add(max(validated, key=lambda step: (composites[step], step)))
    return kept


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that is whole: its marker is there and every file still has its hash."""
    found = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]), reverse=True)
    for path in found:
        if _is_whole(path):
            return path
        log.warning("%s is not whole (killed while it was written?); falling back to the one before", path)
    return None


def _is_whole(checkpoint: Path) -> bool:
    marker = checkpoint / COMPLETE
    if not marker.is_file():
        return False
    hashes: dict[str, str] = json.loads(marker.read_text(encoding="utf-8"))
    return all((checkpoint / name).is_file() and artifacts.sha256_file(checkpoint / name) == digest
               for name, digest in hashes.items())


def save_adapter(model: Any, folder: Path) -> None:
    """Writes the trained adapter as PEFT reads it onto the official class: official names, no note of our subclass."""
    model.save_pretrained(str(folder))
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["auto_mapping"] = None
    artifacts.write_json(path, config)
    (folder / "README.md").unlink(missing_ok=True)


def write_training(out: Path, result: Training, inputs: dict[str, Any]) -> None:
    """Writes what was trained (`adapter/`, or `checkpoint/` where it was the model itself), the curves, the validation
    takes and a manifest into the folder `out`, atomically. Every process calls it, the first one writes."""
    model = result.validation.policy.model
    weights = trained_weights(result.trainer, model)
    if not result.trainer.is_world_process_zero():
        return
    curve = curve_rows(result.trainer.state.log_history, result.columns)
    takes = result.validation.table()
    steps = sorted(set(takes.column("step").to_pylist()))
    rows = [{"step": step, **summarise(takes.filter(pc.field("step") == step))} for step in steps]
    with artifacts.atomic_folder(out) as folder:
        if isinstance(result.trainer.model, PeftModel):
            save_adapter(result.trainer.model, folder / "adapter")
        else:
            write_checkpoint(Path(model.config.name_or_path), weights, folder / "checkpoint")
        write_csv(folder / "curves.csv", curve, list(result.columns))
        write_csv(folder / "validation.csv", rows, ("step", *SUMMARY))
        artifacts.write_parquet(folder / "validation_samples.parquet", takes)
        manifest = {
            "inputs": inputs,
            "fingerprint": artifacts.fingerprint(inputs),
            "updates": len(curve),
            **result.facts,
            "files": artifacts.sha256_tree(folder),
        }
        artifacts.write_json(folder / "manifest.json", manifest)
