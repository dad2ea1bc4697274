"""A LoRA adapter trained in MLX -> a PEFT adapter -> a merged checkpoint without a live adapter.

MLX computes y = W x + scale * (x A) B with A of shape (in, r) and B of shape (r, out); PEFT stores A as (r, in) and
B as (out, r) and multiplies by alpha / r, so alpha = scale * r. Everything is validated from headers and the small
adapter before a weight of the base is read. The merge is done in float32, one tensor at a time, and cast once.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from swaralign.artifacts import atomic_folder, sha256_tree, write_json
from swaralign.params import AssetsParams, MergeParams

ADAPTER_FILE, ADAPTER_CONFIG, WEIGHTS_FILE = "adapters.safetensors", "adapter_config.json", "model.safetensors"
PROJECTION = re.compile(
    r"talker\.(?:code_predictor\.)?model\.layers\.\d+\.(?:self_attn\.[qkvo]_proj|mlp\.(?:gate|up|down)_proj)"
)
LORA_PARAMETERS = ("rank", "scale", "dropout", "keys")
FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class LoraAdapter:
    """Low-rank updates W + scale * (B A) of linear layers.

    `factors`: official module name -> (A, B), float32, in PEFT's orientation: A (rank, in), B (out, rank).
    """

    rank: int
    scale: float
    factors: dict[str, tuple[torch.Tensor, torch.Tensor]]


def build_merge(
    base: Path, adapter: Path | None, assets: AssetsParams, params: MergeParams | None, out: Path
) -> None:
    """Write adapter/ (PEFT), checkpoint/ (the base's layout, merged) and manifest.json into the folder `out`.

    Without an adapter, checkpoint/ is the base as it is, and there is no adapter/.
    `base`, `adapter`: folders that hold the verified files of the assets of these names.
    Raises ValueError if the adapter does not fit (see `read_adapter`), before a weight of the base is read.
    """
    if adapter is None or params is None or assets.adapter is None:
        copy_base(base, assets, out)
        return
    lora = read_adapter(adapter, base, params)
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


# Reading and checking the MLX adapter


def read_adapter(adapter: Path, base: Path, params: MergeParams) -> LoraAdapter:
    """Read an MLX adapter and check it against the base that it is for.

    Raises:
        ValueError: DoRA or another kind of fine-tuning, a quantised base, no scale or two that differ, unknown or
            missing or non-finite tensors, a shape that does not fit its weight, ranks that differ, or a module
            count other than `params.expected_modules`; names what was expected and found.
    """
    config = _read_config(adapter)
    scale = _scale(config, params.scale)
    pairs = _pairs(_read_tensors(adapter / ADAPTER_FILE))
    shapes = _weight_shapes(base)
    _check_modules(pairs, shapes, params.expected_modules)
    factors = {name: _oriented(name, *pairs[name], shapes[name], params.orientation) for name in sorted(pairs)}
    return LoraAdapter(_rank(factors, config), scale, factors)


def _read_config(adapter: Path) -> dict[str, Any]:
    """adapter_config.json, checked for kinds of fine-tuning that cannot be merged; {} where there is none."""
    path = adapter / ADAPTER_CONFIG
    if not path.is_file():
        return {}
    config = _read_json(path)
    kind = "dora" if config.get("use_dora") else config.get("fine_tune_type", "lora")
    if kind != "lora":
        raise ValueError(f"{path}: fine_tune_type is {kind!r}; only plain 'lora' can be merged")
    _check_not_quantised(config, path)
    if not isinstance(config.setdefault("lora_parameters", {}), dict):
        raise ValueError(f"{path}: lora_parameters must be an object, found {config['lora_parameters']!r}")
    unknown = sorted(set(config["lora_parameters"]) - set(LORA_PARAMETERS))
    if unknown:
        raise ValueError(
            f"{path}: unknown lora_parameters {', '.join(unknown)}; known are {', '.join(LORA_PARAMETERS)}. "
            "If they change the scale, write the effective one into lora_parameters.scale; then remove them"
        )
    return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{path} must hold a JSON object, found {type(loaded).__name__}")
    return loaded


def _check_not_quantised(config: Mapping[str, Any], path: Path) -> None:
    for key in ("quantization", "quantization_config"):
        if config.get(key):
            raise ValueError(
                f"{path}: {key} is {json.dumps(config[key])}, so the base is quantised; a merge needs plain weights "
                "(an adapter over quantised ones corrects their rounding too): use an unquantised base and its adapter"
            )


def _scale(config: Mapping[str, Any], stated: float | None) -> float:
    recorded = config.get("lora_parameters", {}).get("scale")
    if recorded is not None and (isinstance(recorded, bool) or not isinstance(recorded, int | float) or recorded <= 0):
        raise ValueError(f"{ADAPTER_CONFIG}: lora_parameters.scale is {recorded!r}, not a positive number")
    if recorded is None and stated is None:
        raise ValueError(
            f"no scale: {ADAPTER_CONFIG} records none in lora_parameters.scale and merge.scale is null; "
            "set merge.scale to the factor that the adapter was trained with"
        )
    if recorded is not None and stated is not None and recorded != stated:
        raise ValueError(
            f"merge.scale is {stated}, but {ADAPTER_CONFIG} records lora_parameters.scale {recorded}; "
            "set merge.scale to null to use the recorded one"
        )
    return float(recorded if recorded is not None else stated)  # type: ignore[arg-type]


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    if not path.is_file():
        raise ValueError(f"{path} does not exist; an MLX adapter is a folder that holds {ADAPTER_FILE}")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error
    for name, tensor in sorted(tensors.items()):
        if not tensor.is_floating_point():
            raise ValueError(f"{path}: {name} is {tensor.dtype}, not a float type; is it a LoRA adapter?")
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{path}: {name} holds values that are not finite; use an earlier checkpoint")
    return tensors


def _pairs(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """(lora_a, lora_b) of each module, as stored; every tensor must belong to such a pair."""
    magnitudes = sorted(name for name in tensors if name.endswith(".m"))
    if magnitudes:
        raise ValueError(f"the adapter is DoRA, it holds {_some(magnitudes)}; only plain LoRA can be merged")
    split = {name: name.rpartition(".") for name in sorted(tensors)}
    unknown = [n for n, (module, _, kind) in split.items() if kind not in ("lora_a", "lora_b") or not _known(module)]
    if unknown:
        raise ValueError(
            f"the adapter holds unknown tensors: {_some(unknown)}; only lora_a and lora_b of the attention and MLP "
            "projections of the talker and its code predictor can be merged" + _tied_note(unknown)
        )
    modules = sorted({module for module, _, _ in split.values()})
    missing = [f"{m}.{kind}" for m in modules for kind in ("lora_a", "lora_b") if f"{m}.{kind}" not in tensors]
    if missing:
        raise ValueError(f"the adapter lacks tensors whose partner it holds: {_some(missing)}")
    return {module: (tensors[f"{module}.lora_a"], tensors[f"{module}.lora_b"]) for module in modules}


def _known(module: str) -> bool:
    return PROJECTION.fullmatch(module) is not None


def _tied_note(names: Iterable[str]) -> str:
    tied = any("head" in name or "embed" in name for name in names)
    return " (an adapted head or embedding may be tied to another weight, and is then lost on reload)" if tied else ""


def _weight_shapes(base: Path) -> dict[str, tuple[int, ...]]:
    """Shapes (out, in) of the base's projections by module name, read from headers; refuses a quantised base."""
    config = _read_json(base / "config.json")
    for section in (config, config.get("talker_config", {})):
        _check_not_quantised(section, base / "config.json")
    shapes = {}
    with safe_open(base / WEIGHTS_FILE, framework="pt") as weights:
        for key in weights.keys():  # noqa: SIM118 (a safetensors handle is not a mapping)
            module = key.removesuffix(".weight")
            if not _known(module):
                continue
            view = weights.get_slice(key)
            if view.get_dtype() not in FLOATS:
                raise ValueError(
                    f"{base / WEIGHTS_FILE}: {key} is {view.get_dtype()}, so the base is quantised; "
                    f"a merge needs one of {', '.join(FLOATS)}"
                )
            shapes[module] = tuple(view.get_shape())
    return shapes


def _check_modules(pairs: Mapping[str, Any], shapes: Mapping[str, Any], expected: int) -> None:
    extra = sorted(set(pairs) - set(shapes))
    if extra:
        raise ValueError(f"the adapter is for another base: this one does not have the modules {_some(extra)}")
    if len(pairs) != expected:
        without = sorted(set(shapes) - set(pairs))
        raise ValueError(
            f"merge.expected_modules: expected {expected}, found {len(pairs)} adapted modules; "
            f"projections of the base without one: {_some(without) or 'none'}"
        )


def _oriented(
    module: str, a: torch.Tensor, b: torch.Tensor, weight: tuple[int, ...], orientation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B in PEFT's orientation and float32, their shapes checked against the weight's (out, in)."""
    out_size, in_size = weight
    found = f"found {tuple(a.shape)} and {tuple(b.shape)} over a weight of ({out_size}, {in_size})"
    if not _fits(a, b, weight, orientation):
        other = "peft" if orientation == "mlx_lm" else "mlx_lm"
        fits = {"mlx_lm": f"({in_size}, r) and (r, {out_size})", "peft": f"(r, {in_size}) and ({out_size}, r)"}
        raise ValueError(
            f"{module}: orientation {orientation} expects lora_a and lora_b of shapes {fits[orientation]}, {found}; "
            + (f"set merge.orientation to {other}" if _fits(a, b, weight, other) else "use the adapter's own base")
        )
    a, b = (a.T, b.T) if orientation == "mlx_lm" else (a, b)
    if len(a) >= min(weight):
        raise ValueError(f"{module}: rank {len(a)} is not low, {found}, so that no check can tell the orientation")
    return a.float().contiguous(), b.float().contiguous()


def _fits(a: torch.Tensor, b: torch.Tensor, weight: tuple[int, ...], orientation: str) -> bool:
    """Whether lora_a and lora_b have the sizes of the weight's (out, in) and one rank between them."""
    if not a.ndim == b.ndim == 2:
        return False
    (a_in, a_rank), (b_rank, b_out) = (a.shape, b.shape) if orientation == "mlx_lm" else (a.shape[::-1], b.shape[::-1])
    return (b_out, a_in) == tuple(weight) and a_rank == b_rank


def _rank(factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]], config: Mapping[str, Any]) -> int:
    ranks = {name: len(a) for name, (a, _) in factors.items()}
    first, rank = next(iter(ranks.items()))
    differing = next((name for name in ranks if ranks[name] != rank), None)
    if differing:
        raise ValueError(f"all modules must share one rank; {first} has {rank}, {differing} has {ranks[differing]}")
    recorded = config.get("lora_parameters", {}).get("rank", rank)
    if recorded != rank:
        raise ValueError(f"{ADAPTER_CONFIG} records lora_parameters.rank {recorded}, the tensors have rank {rank}")
    return rank


def _some(names: list[str]) -> str:
    """The first four names, and how many more there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


# Writing


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
    byte for byte; one tensor is in memory at a time. Raises ValueError if a merged value is not finite in that dtype.
    """
    shutil.copyfile(base, out)
    offsets = _offsets(base)
    with safe_open(base, framework="pt") as weights, out.open("r+b") as merged:
        for module, (a, b) in lora.factors.items():
            weight = weights.get_tensor(f"{module}.weight")
            updated = (weight.float() + lora.scale * (b @ a)).to(weight.dtype)
            if not torch.isfinite(updated).all():
                raise ValueError(f"{module}: not finite in {weight.dtype} once merged; is scale {lora.scale} right?")
            merged.seek(offsets[f"{module}.weight"])
            merged.write(updated.contiguous().view(torch.uint8).numpy().tobytes())


def _offsets(path: Path) -> dict[str, int]:
    """Where each tensor's bytes begin in a safetensors file: 8 bytes of header length, the JSON header, the data."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}
