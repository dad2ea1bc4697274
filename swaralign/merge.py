"""The merge: an MLX adapter -> a PEFT adapter -> a merged checkpoint without a live adapter.

Each adapted weight becomes W + scale * (B A), made in float32 by sums of one fixed order and cast once, so that every
machine writes the same bytes. One tensor at a time is in memory, whatever the size of the checkpoint.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from swaralign.artifacts import atomic_folder, sha256_tree, write_json
from swaralign.mlx_lora import ADAPTER_CONFIG, WEIGHTS_FILE, LoraAdapter, read_adapter, some
from swaralign.official import Qwen3TTSForConditionalGeneration
from swaralign.params import AssetsParams, MergeParams

_BLOCK_ROWS = 64  # of a weight, worked on at once: they stay in a core's cache


def build_merge(
    base: Path, adapter: Path | None, assets: AssetsParams, params: MergeParams | None, out: Path
) -> None:
    """Write adapter/ (PEFT), checkpoint/ (the base's layout, merged) and manifest.json into the folder `out`.

    Without an adapter, checkpoint/ is the base as it is, and there is no adapter/.
    `base`, `adapter`: folders that hold the verified files of the assets of these names.
    Raises ValueError if the adapter does not fit (see `read_adapter`) or the base is not what its config says (see
    `check_topology`), before a weight of the base is read.
    """
    if adapter is None or params is None or assets.adapter is None:
        copy_base(base, assets, out)
        return
    lora = read_adapter(adapter, base, params)
    check_topology(base)
    with atomic_folder(out) as folder:
        write_peft_adapter(lora, assets.base.id, folder / "adapter")
        _copy(base, [file for file in assets.base.files if file != WEIGHTS_FILE], folder / "checkpoint")
        merge_weights(base / WEIGHTS_FILE, lora, folder / "checkpoint" / WEIGHTS_FILE)
        manifest: dict[str, Any] = {
            name: {"id": asset.id, "revision": asset.revision, "files": dict(asset.files)}
            for name, asset in (("base", assets.base), ("adapter", assets.adapter))
        }
        manifest |= {
            "orientation": params.orientation,
            "rank": lora.rank,
            "scale": lora.scale,
            "alpha": lora.scale * lora.rank,
            "modules": len(lora.factors),
            "tensors": 2 * len(lora.factors),
            "peft_adapter": sha256_tree(folder / "adapter"),
            "checkpoint": sha256_tree(folder / "checkpoint"),
        }
        write_json(folder / "manifest.json", manifest)


def copy_base(base: Path, assets: AssetsParams, out: Path) -> None:
    """Write the base as checkpoint/, and manifest.json, into the folder `out`: a voice that has no adapter."""
    with atomic_folder(out) as folder:
        _copy(base, assets.base.files, folder / "checkpoint")
        described = {"id": assets.base.id, "revision": assets.base.revision, "files": dict(assets.base.files)}
        manifest = {"base": described, "adapter": None, "checkpoint": sha256_tree(folder / "checkpoint")}
        write_json(folder / "manifest.json", manifest)


def _copy(source: Path, files: Iterable[str], target: Path) -> None:
    target.mkdir(parents=True)
    for file in files:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / file, target / file)


def check_topology(checkpoint: Path) -> None:
    """Raise ValueError unless the weights file has exactly the tensors of the official model, each in its shape.

    The model is built on the meta device from the checkpoint's config, and the file's header is read: no weight is.
    """
    config = Qwen3TTSForConditionalGeneration.config_class.from_pretrained(checkpoint)
    with torch.device("meta"):
        model = Qwen3TTSForConditionalGeneration(config)
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    with safe_open(checkpoint / WEIGHTS_FILE, framework="pt") as weights:
        found = {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
    faults = [f"{name} {found.get(name, 'missing')}, expected {wanted.get(name, 'none')}"
              for name in sorted(wanted.keys() | found.keys()) if wanted.get(name) != found.get(name)]
    if faults:
        raise ValueError(f"{checkpoint / WEIGHTS_FILE} does not hold what its config.json describes: {some(faults)}; "
                         "fetch both from one revision")


def write_peft_adapter(lora: LoraAdapter, base_id: str, folder: Path) -> None:
    """Write a PEFT adapter that `PeftModel.from_pretrained(official model, folder)` loads without renames."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for module, (a, b) in lora.factors.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = b
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "base_model_name_or_path": base_id,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": lora.scale * lora.rank,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": sorted(lora.factors),
        "task_type": None,
    }
    write_json(folder / ADAPTER_CONFIG, config)


def merge_weights(base: Path, lora: LoraAdapter, out: Path) -> None:
    """Write the weights file `base` with W + scale * (B A) in place of each adapted W.

    The sum is made in float32 and cast once to W's own dtype. All else, header, order and metadata included, stays
    byte for byte. Raises ValueError if a merged value is not finite in that dtype.
    """
    shutil.copyfile(base, out)
    offsets = _offsets(base)
    with out.open("r+b") as merged:
        for module, (a, b) in lora.factors.items():
            with safe_open(base, framework="pt") as weights:  # closed again, since what it maps counts as memory
                weight = weights.get_tensor(f"{module}.weight")
            updated = (weight.float() + product(b, a).mul_(lora.scale)).to(weight.dtype)
            if not torch.isfinite(updated).all():
                raise ValueError(f"{module}: not finite in {weight.dtype} once merged; is scale {lora.scale} right?")
            merged.seek(offsets[f"{module}.weight"])
            merged.write(updated.contiguous().view(torch.uint8).numpy().tobytes())


def product(b: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """B A of (out, r) and (r, in) in float32, the same bits on every machine: one fused multiply-add a rank, in order.

    A matrix product sums in an order of its library's choice. Here each step is made in float64, where the product of
    two float32 is exact, and rounded to float32.
    """
    left, right = b.double().numpy(), a.double().numpy()
    blocks = [_fused(left[start : start + _BLOCK_ROWS], right) for start in range(0, len(left), _BLOCK_ROWS)]
    return torch.from_numpy(np.concatenate(blocks))


def _fused(b: np.ndarray, a: np.ndarray) -> np.ndarray:
    total = np.zeros((len(b), a.shape[1]), np.float32)
    for column, row in zip(b.T, a, strict=True):
        step = np.multiply.outer(column, row)
        np.add(step, total, out=step)
        total = step.astype(np.float32)
    return total


def _offsets(path: Path) -> dict[str, int]:
    """Where each tensor's bytes begin in a safetensors file: 8 bytes of header length, the JSON header, the data."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}
