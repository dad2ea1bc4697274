"""The codec of OuteTTS: transformers' DacModel, its weights in that layout or in the published one, and its level.

The published `.pth` holds weight-normed convolutions, each as a direction `weight_v` and a length `weight_g` an output
channel; they are folded into plain weights here. Sources: the `descript-audio-codec` package (layout), the codec
interface of the `outetts` package (windows, level, fades).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import pyloudnorm
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DacConfig, DacModel

LOUDNESS_LUFS, PEAK_DBFS, BLOCK_S = -18.0, -1.0, 0.4  # what the model's training audio was brought to
WINDOW_S, FADE_S = 5.0, 0.015
CPU_FRAMES, GPU_FRAMES = 1024, 65_536  # padded frames that are decoded side by side


def load_dac(folder: Path) -> DacModel:
    """The codec of a folder that holds either transformers' layout or one `.pth` in the published layout.

    In float32, in eval mode. Raises ValueError if it holds neither, or if the file is not a DAC that fits the class.
    """
    if (folder / "config.json").is_file():
        return DacModel.from_pretrained(str(folder), dtype=torch.float32).eval()
    published = sorted(folder.glob("*.pth"))
    if len(published) != 1:
        raise ValueError(f"{folder} must hold config.json and model.safetensors, or one .pth file; "
                         f"found {', '.join(path.name for path in published) or 'neither'}")
    try:
        stored = torch.load(published[0], map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError) as error:
        raise ValueError(f"{published[0]} is not a weights file of descript-audio-codec: {error}") from error
    if not isinstance(stored, dict) or not {"state_dict", "metadata"} <= set(stored):
        raise ValueError(f"{published[0]} lacks state_dict and metadata; is it a weights file of descript-audio-codec?")
    return convert_dac(stored["state_dict"], stored["metadata"]["kwargs"])


def convert_dac(state: Mapping[str, Tensor], kwargs: Mapping[str, Any]) -> DacModel:
    """A DacModel from a state dict and the constructor arguments of `descript-audio-codec`, in float32.

    Raises ValueError if the shape is one that DacModel does not have, or tensors are missing or left over.
    """
    model = DacModel(_config(kwargs))
    folded = {_renamed(name, len(kwargs["encoder_rates"])): tensor.float() for name, tensor in _fold(state).items()}
    wanted = model.state_dict()
    wrong = sorted(set(folded) ^ set(wanted))
    wrong += [name for name in folded.keys() & wanted.keys() if folded[name].shape != wanted[name].shape]
    if wrong:
        raise ValueError(f"the codec's weights do not fit its own metadata: {', '.join(wrong[:4])}")
    model.load_state_dict(folded)
    return model.eval()


def _config(kwargs: Mapping[str, Any]) -> DacConfig:
    config = DacConfig(
        encoder_hidden_size=kwargs["encoder_dim"],
        downsampling_ratios=list(kwargs["encoder_rates"]),
        decoder_hidden_size=kwargs["decoder_dim"],
        n_codebooks=kwargs["n_codebooks"],
        codebook_size=kwargs["codebook_size"],
        codebook_dim=kwargs["codebook_dim"],
        sampling_rate=kwargs["sample_rate"],
    )
    for name, found, known in (
        ("decoder_rates", list(kwargs["decoder_rates"]), list(config.upsampling_ratios)),
        ("latent_dim", kwargs.get("latent_dim") or config.hidden_size, config.hidden_size),
    ):
        if found != known:
            raise ValueError(f"the codec has {name} {found}; transformers' DacModel has {known} for such an encoder")
    return config


def _fold(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weight norm undone: weight = g v / |v|, the length taken over all but the first dimension."""
    folded = {}
    for name, tensor in state.items():
        if name.endswith(".weight_g"):
            module = name.removesuffix(".weight_g")
            direction = state[f"{module}.weight_v"]
            length = torch.linalg.vector_norm(direction, dim=tuple(range(1, direction.ndim)), keepdim=True)
            folded[f"{module}.weight"] = tensor * direction / length
        elif not name.endswith(".weight_v"):
            folded[name] = tensor
    return folded


def _renamed(name: str, stages: int) -> str:
    """transformers' name of a published tensor; `stages`: strided blocks of encoder and decoder each."""
    side, _, rest = name.partition(".")
    if side == "quantizer":
        return name
    index, _, inside = rest.removeprefix("block." if side == "encoder" else "model.").partition(".")
    position = int(index) - 1
    outer = {-1: "conv1", stages: "snake1", stages + 1: "conv2"}
    if position in outer:
        return f"{side}.{outer[position]}.{inside}"
    block, unit = f"{side}.block.{position}", re.match(r"block\.(\d)\.(.*)", inside)
    if unit is None:
        return name
    number, rest = int(unit[1]), unit[2]
    first_unit, parts = (0, {3: "snake1", 4: "conv1"}) if side == "encoder" else (2, {0: "snake1", 1: "conv_t1"})
    if number in parts:
        return f"{block}.{parts[number]}.{rest}"
    layer, _, leaf = rest.removeprefix("block.").partition(".")
    return f"{block}.res_unit{number - first_unit + 1}.{('snake1', 'conv1', 'snake2', 'conv2')[int(layer)]}.{leaf}"


class DacCodec:
    """A codec in eval mode and float32: waveforms to codes, batches of codes to waveforms."""

    def __init__(self, model: Any, device: str = "cpu") -> None:
        self.model = model.to(device).float().eval()
        self.sample_rate_hz, self.hop = int(model.config.sampling_rate), int(model.config.hop_length)
        self.codebook_size = int(model.config.codebook_size)
        self.window = math.ceil(WINDOW_S * self.sample_rate_hz / self.hop) * self.hop
        self.side_by_side = CPU_FRAMES if device == "cpu" else GPU_FRAMES
        self._valid: Tensor | None = None
        for module in model.decoder.modules():
            if isinstance(module, torch.nn.Conv1d | torch.nn.ConvTranspose1d):
                module.register_forward_pre_hook(self._silence_padding)
            if isinstance(module, torch.nn.ConvTranspose1d):
                module.register_forward_hook(self._lengthen)

    @property
    def frames_per_second(self) -> float:
        return self.sample_rate_hz / self.hop

    @torch.inference_mode()
    def encode(self, wave: np.ndarray) -> np.ndarray:
        """(samples,) wave -> (codebooks, ceil(samples / hop)) codes; windows of five seconds, each on its own."""
        windows = [wave[start : start + self.window] for start in range(0, len(wave), self.window)]
        return np.concatenate([self._encode_window(window) for window in windows], axis=1)

    def _encode_window(self, window: np.ndarray) -> np.ndarray:
        padded = F.pad(torch.from_numpy(window).to(self.model.device), (0, -len(window) % self.hop))
        return self.model.encode(padded[None, None]).audio_codes[0].cpu().numpy()

    def samples(self, frames: int) -> int:
        """Samples that so many frames decode to: 8 fewer than frames x hop with the published strides."""
        for stride in self.model.config.upsampling_ratios:
            frames = _upsampled(frames, stride)
        return frames

    @torch.inference_mode()
    def decode(self, codes: Sequence[np.ndarray]) -> list[np.ndarray]:
        """(codebooks, frames) codes each -> (samples,) waves each, the same as if each were decoded alone.

        No codes decode to an empty wave.
        """
        waves = [np.zeros(0, dtype=np.float32)] * len(codes)
        order = sorted((i for i, each in enumerate(codes) if each.shape[1]), key=lambda i: codes[i].shape[1])
        while order:
            size = max(1, min(len(order), self.side_by_side // codes[order[-1]].shape[1]))
            chosen, order = order[-size:], order[:-size]
            for index, wave in zip(chosen, self._decode_batch([codes[i] for i in chosen]), strict=True):
                waves[index] = wave
        return waves

    def _decode_batch(self, codes: Sequence[np.ndarray]) -> list[np.ndarray]:
        lengths = [each.shape[1] for each in codes]
        padded = np.stack([np.pad(each, ((0, 0), (0, max(lengths) - each.shape[1]))) for each in codes])
        self._valid = torch.tensor(lengths, device=self.model.device)
        audio = self.model.decode(audio_codes=torch.from_numpy(padded).to(self.model.device)).audio_values
        return [wave[: self.samples(frames)].cpu().numpy() for wave, frames in zip(audio, lengths, strict=True)]

    def _silence_padding(self, _: Any, inputs: tuple[Tensor]) -> tuple[Tensor]:
        """Zeros past each row's end before a convolution, as its own padding is: a row then hears no neighbour."""
        x = inputs[0]
        if self._valid is None or bool((self._valid == x.shape[-1]).all()):
            return inputs
        return (x * (torch.arange(x.shape[-1], device=x.device) < self._valid[:, None])[:, None],)

    def _lengthen(self, module: torch.nn.ConvTranspose1d, *_: Any) -> None:
        if self._valid is not None:
            self._valid = _upsampled(self._valid, module.stride[0])


def _upsampled(length: Any, stride: int) -> Any:
    """Length after DAC's transposed convolution: kernel 2 s, padding ceil(s / 2)."""
    return (length - 1) * stride - 2 * math.ceil(stride / 2) + 2 * stride


def to_level(wave: np.ndarray, sample_rate_hz: int) -> np.ndarray:
    """A (samples,) wave at -18 LUFS, peaks at -1 dBFS at most: the level of the model's training audio.

    A wave without a loudness (empty, silent, not finite) comes back as it is, for the guard to judge.
    """
    block = int(BLOCK_S * sample_rate_hz)
    loudness = pyloudnorm.Meter(sample_rate_hz, block_size=BLOCK_S).integrated_loudness(
        np.pad(wave, (0, max(0, block - len(wave)))).astype(np.float64)
    )
    if not np.isfinite(loudness):
        return wave
    levelled = wave * 10 ** ((LOUDNESS_LUFS - loudness) / 20)
    peak, limit = float(np.abs(levelled).max()), 10 ** (PEAK_DBFS / 20)
    return (levelled * min(1.0, limit / peak)).astype(np.float32)


def fade(wave: np.ndarray, sample_rate_hz: int) -> np.ndarray:
    """The first and last 15 ms faded in and out, so that a take begins and ends without a click."""
    length = min(int(FADE_S * sample_rate_hz), len(wave) // 2)
    ramp = np.linspace(0, 1, length, dtype=np.float32)
    faded = wave.copy()
    faded[:length] *= ramp
    faded[len(wave) - length :] *= ramp[::-1]
    return faded
