"""Training the policy's own parameters instead of an adapter, whole on every GPU or sharded over them (FSDP)."""

from __future__ import annotations

import copy
import re
import shutil
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from trl import GRPOTrainer
from trl.models.utils import prepare_fsdp
from trl.trainer.utils import add_fused_lm_head

from swaralign.policy.base import TrainableVoice

_WRAPPED = "_fsdp_wrapped_module."  # what FSDP puts into the names of what it shards


def freeze_all_but(voice: TrainableVoice) -> None:
    """Leaves only the parameters of the policy itself, `voice.policy_parameters`, to be trained."""
    pattern = re.compile(voice.policy_parameters)
    for name, parameter in voice.model.named_parameters():
        parameter.requires_grad_(pattern.fullmatch(name) is not None)


def frozen_copy(model: Any) -> Any:
    """A copy that is never trained: the reference of the KL. What is no part of it, as its codec, is shared."""
    shared = {id(value): value for name, value in vars(model).items() if not name.startswith("_")}
    return copy.deepcopy(model, shared).requires_grad_(False).eval()


def attach_reference(trainer: GRPOTrainer, reference: Any, beta: float) -> None:
    """Gives the trainer its reference; TRL would load one by the name of the model's class, and ours has none there."""
    add_fused_lm_head(reference, temperature=trainer.temperature)
    accelerator = trainer.accelerator
    ready: Any = (prepare_fsdp(reference, accelerator) if trainer.is_fsdp_enabled
                  else accelerator.prepare_model(reference, evaluation_mode=True))
    trainer.ref_model, trainer.beta = ready, beta


def whole_weights(trainer: Any) -> AbstractContextManager[None]:
    """While it lasts, every process holds all parameters, so that it can roll out or save. Enter it on all of them."""
    if isinstance(trainer.model_wrapped, FullyShardedDataParallel):
        whole: AbstractContextManager[None] = FullyShardedDataParallel.summon_full_params(
            trainer.model_wrapped, writeback=False
        )
        return whole
    return nullcontext()


def trained_weights(trainer: Any, model: Any) -> dict[str, Tensor]:
    """The trained parameters under their official names, in float32 on the CPU. Call it on every process."""
    with whole_weights(trainer):
        return {name.replace(_WRAPPED, ""): parameter.detach().cpu().clone()
                for name, parameter in model.named_parameters() if parameter.requires_grad}


def write_checkpoint(start: Path, weights: dict[str, Tensor], out: Path) -> None:
    """Writes `out`: the checkpoint folder `start` with the trained weights, in float32, in place of its own.

    Raises ValueError if the checkpoint lacks one of them.
    """
    shutil.copytree(start, out)
    left = dict(weights)
    for path in sorted(out.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors = {name: left.pop(name) if name in left else file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        path.unlink()  # DVC may have made it read-only
        save_file(tensors, path, metadata={"format": "pt"})
    if left:
        raise ValueError(f"{start} holds no {', '.join(sorted(left)[:4])}, which was trained")
