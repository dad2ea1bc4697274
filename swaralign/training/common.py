"""What every trainer shares: the LoRA block, the schedule as trainer arguments, checkpoints and resuming."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from peft import LoraConfig
from transformers import TrainerCallback

from swaralign import artifacts
from swaralign.params import LoraParams, ScheduleParams

log = logging.getLogger(__name__)
COMPLETE = "complete.json"  # written last into a checkpoint; one without it was cut off


def lora_config(lora: LoraParams, targets: str) -> LoraConfig:
    """A fresh, zero-initialised adapter on the modules that the regular expression `targets` matches."""
    return LoraConfig(r=lora.r, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=targets, bias="none")


def schedule_arguments(schedule: ScheduleParams, seed: int, device: str, output: Path) -> dict[str, Any]:
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
        "bf16": device != "cpu",
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": schedule.save_every,
        "save_total_limit": schedule.keep_checkpoints,
        "report_to": "none",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_pin_memory": device != "cpu",
    }


class MarkComplete(TrainerCallback):
    """Marks each checkpoint as whole once everything in it has been written."""

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        artifacts.write_json(folder / COMPLETE, artifacts.sha256_tree(folder))


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
