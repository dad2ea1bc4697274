"""LoRA in plain mlx-lm form: A is (in, rank), B is (rank, out), y = W x + scale * (x A) B."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

KEYS = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
TARGET = re.compile(rf"talker\.(code_predictor\.)?model\.layers\.\d+\.({'|'.join(map(re.escape, KEYS))})")


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


def linear(model: nn.Module, name: str) -> nn.Linear:
    """The linear layer of that name."""
    module = model.get_submodule(name)
    if not isinstance(module, nn.Linear):
        raise TypeError(f"{name} is a {type(module).__name__}, not a linear layer")
    return module


def add_lora(model: nn.Module, rank: int, scale: float) -> dict[str, LoraLinear]:
    """Wrap the seven projections of every layer of both stacks; returns them by their official module name."""
    wrapped = {}
    for name in [name for name, _ in model.named_modules() if TARGET.fullmatch(name)]:
        wrapped[name] = LoraLinear(linear(model, name), rank, scale)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, wrapped[name])
    return wrapped


def remove_lora(model: nn.Module, wrapped: dict[str, LoraLinear]) -> None:
    """Put the untouched linear layers back."""
    for name, module in wrapped.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, module.base)


def adapter_config(rank: int, scale: float) -> dict[str, Any]:
    """What mlx_lm writes beside its adapters; num_layers -1 is its way to say all layers."""
    parameters = {"rank": rank, "scale": scale, "dropout": 0.0, "keys": KEYS}
    return {"fine_tune_type": "lora", "num_layers": -1, "lora_parameters": parameters}


def save_adapter(folder: Path, wrapped: dict[str, LoraLinear]) -> None:
    """Write adapters.safetensors (float32) and adapter_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, module in wrapped.items():
        tensors[f"{name}.lora_a"] = module.lora_a.detach().float().cpu().contiguous()
        tensors[f"{name}.lora_b"] = module.lora_b.detach().float().cpu().contiguous()
    save_file(tensors, folder / "adapters.safetensors", metadata={"format": "mlx"})
    first = next(iter(wrapped.values()))
    config = adapter_config(first.lora_a.shape[1], first.scale)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=4) + "\n")


@torch.no_grad()
def merge_adapter(model: nn.Module, tensors: dict[str, Tensor], scale: float) -> None:
    """Add scale * (A B)^T to the weights, in float32."""
    for key, a in tensors.items():
        if key.endswith(".lora_a"):
            name = key.removesuffix(".lora_a")
            linear(model, name).weight += scale * (a @ tensors[f"{name}.lora_b"]).T
