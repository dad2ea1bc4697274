"""Trackers: where a training's curves go besides its artifacts, through the trainer's own `report_to`.

Keys come from the environment alone, as each tracker reads them itself; none passes through here or into a file.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.integrations.integration_utils import TensorBoardCallback, TrackioCallback, WandbCallback

from swaralign import artifacts
from swaralign.params import Params
from swaralign.training.validation import FixedValidation

CALLBACKS: dict[str, Any] = {"tensorboard": TensorBoardCallback, "trackio": TrackioCallback, "wandb": WandbCallback}


@dataclass(frozen=True)
class Tracker:
    """What goes to the tracker `kind`, under `project`: curves and validations, the seed and the resolved params."""

    kind: str
    project: str
    seed: int
    params: dict[str, Any]

    def arguments(self, folder: Path) -> dict[str, Any]:
        """Arguments of a transformers TrainingArguments; the run is called as its folder under runs/."""
        return {"report_to": self.kind, "project": self.project, "run_name": _name(folder)}

    def attach(self, trainer: Trainer, validation: FixedValidation, folder: Path) -> None:
        """Opens the run and hands it the params, which are also written into the folder, and the validations."""
        artifacts.write_json(folder / "params.json", self.params)
        if self.kind == "none":
            return
        config = {"seed": self.seed, "params": self.params}
        if self.kind == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(str(folder / "tensorboard"))
            writer.add_text("seed", str(self.seed))
            writer.add_text("params", f"```\n{(folder / 'params.json').read_text()}```")
            _swap(trainer, TensorBoardCallback, _TensorBoard(writer))
        elif self.kind == "wandb":  # its callback goes on with a run that is open
            wandb = importlib.import_module("wandb")
            wandb.init(project=self.project, name=_name(folder), config=config, dir=str(folder))
        else:
            _swap(trainer, TrackioCallback, _Trackio(config))
        callbacks = trainer.callback_handler.callbacks
        validation.reporter = next(each for each in callbacks if isinstance(each, CALLBACKS[self.kind]))


def load_tracker(params: Params, stage: str) -> Tracker:
    """The tracker of a training stage, `train_` and the section of the params that holds its seed.

    Raises ValueError if the package of `tracking.tracker` is not installed.
    """
    params.tracking.check_installed()
    seed = getattr(params, stage.removeprefix("train_")).seed
    return Tracker(params.tracking.tracker, params.tracking.project, seed, params.model_dump())


class _TensorBoard(TensorBoardCallback):
    """Without the model's configuration, which a nested one of Qwen3-TTS cannot write as JSON."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
        super().on_train_begin(args, state, control, **rest)


class _Trackio(TrackioCallback):
    """With a configuration for the run, which the callback opens itself."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.run_config = config

    def setup(self, *arguments: Any, **named: Any) -> None:
        super().setup(*arguments, **named)
        importlib.import_module("trackio").config.update(self.run_config, allow_val_change=True)


def _swap(trainer: Trainer, kind: type[TrainerCallback], ours: TrainerCallback) -> None:
    trainer.remove_callback(kind)
    trainer.add_callback(ours)


def _name(folder: Path) -> str:
    return f"{folder.parent.name}-{folder.name}"
