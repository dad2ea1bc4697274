"""LoRA in plain mlx-lm form: A is (in, rank), B is (rank, out), y = W x + scale * (x A) B."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from swaralign.artifacts import atomic_folder, write_text
from swaralign.merge import merge_weights
from swaralign.mlx_lora import ADAPTER_CONFIG, ADAPTER_FILE, PROJECTION, WEIGHTS_FILE, LoraAdapter

KEYS = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]


class LoraLinear(nn.Module):
    """A frozen linear layer and its low-rank update, initialised as mlx-lm does (B zero, so no change at first)."""

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        bound = 1 / math.sqrt(base.in_features)
        self.base, self.scale = base, scale
        self.lora_a = nn.Parameter(torch.empty(base.in_features, rank, device=base.weight.device))
        self.lora_b = nn.Parameter(torch.zeros(rank, base.out_features, device=base.weight.device))
        nn.init.uniform_(self.lora_a, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        return self.base(x) + self.scale * (x @ self.lora_a) @ self.lora_b


def add_lora(model: nn.Module, rank: int, scale: float) -> dict[str, LoraLinear]:
    """Wrap the seven projections of every layer of both stacks; returns them by their official module name."""
    wrapped = {}
    for name in [name for name, _ in model.named_modules() if PROJECTION.fullmatch(name)]:
        linear: Any = model.get_submodule(name)
        wrapped[name] = LoraLinear(linear, rank, scale)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, wrapped[name])
    return wrapped


def start_from(model: nn.Module, folder: Path, rank: int, scale: float) -> None:
    """Copy a saved adapter into the LoRA layers of `model`.

    Raises ValueError if it has another rank or scale than they, or adapts other modules.
    """
    recorded = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))["lora_parameters"]
    if (recorded["rank"], recorded["scale"]) != (rank, scale):
        raise ValueError(f"{folder} has rank {recorded['rank']} and scale {recorded['scale']}, not {rank} and {scale}")
    loaded = model.load_state_dict(load_file(folder / ADAPTER_FILE), strict=False)
    strays = loaded.unexpected_keys + [name for name in loaded.missing_keys if ".lora_" in name]
    if strays:
        raise ValueError(f"{folder} does not fit the model: {len(strays)} tensors lack a partner, first {strays[0]}")


def adapter_config(rank: int, scale: float) -> dict[str, Any]:
    """What mlx_lm writes beside its adapters; num_layers -1 is its way to say all layers."""
    parameters = {"rank": rank, "scale": scale, "dropout": 0.0, "keys": KEYS}
    return {"fine_tune_type": "lora", "num_layers": -1, "lora_parameters": parameters}


def factors(wrapped: dict[str, LoraLinear]) -> dict[str, tuple[Tensor, Tensor]]:
    """(A, B) of each module in mlx-lm's orientation, float32, on the CPU."""
    pairs = {name: (module.lora_a, module.lora_b) for name, module in wrapped.items()}
    return {name: (a.detach().float().cpu(), b.detach().float().cpu()) for name, (a, b) in pairs.items()}


def save_adapter(folder: Path, wrapped: dict[str, LoraLinear], rank: int, scale: float) -> None:
    """Write adapters.safetensors (float32) and adapter_config.json."""
    tensors = {}
    for name, (a, b) in factors(wrapped).items():
        tensors[f"{name}.lora_a"], tensors[f"{name}.lora_b"] = a.contiguous(), b.contiguous()
    with atomic_folder(folder) as new:
        save_file(tensors, new / ADAPTER_FILE, metadata={"format": "mlx"})
        write_text(new / ADAPTER_CONFIG, json.dumps(adapter_config(rank, scale), indent=4) + "\n")


def save_merged(folder: Path, source: Path, lora: LoraAdapter) -> None:
    """Write the checkpoint `source` with the adapter merged into its weights, in their own dtype."""
    with atomic_folder(folder) as new:
        for path in filter(Path.is_file, source.rglob("*")):
            copy = new / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            if path != source / WEIGHTS_FILE:
                shutil.copyfile(path, copy)
        merge_weights(source / WEIGHTS_FILE, lora, new / WEIGHTS_FILE)
