"""A LoRA adapter trained in MLX, read and checked against its base.

MLX computes y = W x + scale * (x A) B with A of shape (in, r) and B of shape (r, out); PEFT stores A as (r, in) and
B as (out, r) and multiplies by alpha / r, so alpha = scale * r. Everything is validated from headers and the small
adapter before a weight of the base is read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from swaralign.params import MergeParams

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
    number = isinstance(recorded, int | float) and not isinstance(recorded, bool) and math.isfinite(recorded)
    if recorded is not None and (not number or recorded <= 0):
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
        raise ValueError(f"the adapter is DoRA, it holds {some(magnitudes)}; only plain LoRA can be merged")
    split = {name: name.rpartition(".") for name in sorted(tensors)}
    unknown = [n for n, (module, _, kind) in split.items() if kind not in ("lora_a", "lora_b") or not _known(module)]
    if unknown:
        raise ValueError(
            f"the adapter holds unknown tensors: {some(unknown)}; only lora_a and lora_b of the attention and MLP "
            "projections of the talker and its code predictor can be merged" + _tied_note(unknown)
        )
    modules = sorted({module for module, _, _ in split.values()})
    missing = [f"{m}.{kind}" for m in modules for kind in ("lora_a", "lora_b") if f"{m}.{kind}" not in tensors]
    if missing:
        raise ValueError(f"the adapter lacks tensors whose partner it holds: {some(missing)}")
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
        raise ValueError(f"the adapter is for another base: this one does not have the modules {some(extra)}")
    if len(pairs) != expected:
        without = sorted(set(shapes) - set(pairs))
        raise ValueError(
            f"merge.expected_modules: expected {expected}, found {len(pairs)} adapted modules; "
            f"projections of the base without one: {some(without) or 'none'}"
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


def some(names: list[str]) -> str:
    """The first four names, and how many more there are, for a message."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
