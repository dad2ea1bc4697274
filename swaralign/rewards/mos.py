"""Predicted mean opinion scores, 1 to 5: DistillMOS (weights in its package) or UTMOS (weights as an asset).

Each take is predicted alone, so that its score depends on nothing else.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from swaralign.audio import resample
from swaralign.params import MosParams

MODEL_HZ = 16_000  # both predictors
UTMOS_WEIGHTS = "utmos_state_dict.pt"
_SEGMENT, _COLUMN = 122_880, 320  # samples that DistillMOS sees at once, and that one column of its features spans
_EDGE = 8  # columns that the end of the input may reach into, with room to spare: the CNN's field is under 6 a side


class MosPredictor(Protocol):
    """What the scorer needs of a MOS engine."""

    def predict(self, waves: Sequence[np.ndarray], sample_rate_hz: int) -> list[float]:
        """The MOS of each (samples,) float32 wave."""
        ...


def load_mos(params: MosParams, weights: Path | None, device: str) -> MosPredictor:
    """The engine that `params` name; `weights`: the folder of the asset `mos`, for UTMOS.

    Raises ValueError if the engine's package is not installed or its weights do not fit.
    """
    if params.engine == "distillmos":
        return DistillMos(device)
    if weights is None:
        raise ValueError("reward.mos.engine is utmos, which needs the asset `mos`; fill in assets.mos")
    return Utmos(weights / UTMOS_WEIGHTS, device)


class DistillMos:
    """DistillMOS (Stahl & Gamper 2025). It sees 7.68 s; shorter takes are padded with silence, as the package does.

    Away from the edges the CNN's features of silence are all alike, so they are computed for a few columns and
    repeated: a take of 2 s costs a third, and the score is the package's own up to rounding.
    """

    def __init__(self, device: str) -> None:
        try:
            from distillmos import ConvTransformerSQAModel
        except ImportError as error:
            raise ValueError("reward.mos.engine is distillmos, which is not installed; `pip install distillmos`, or "
                             "set the engine to none") from error
        with contextlib.redirect_stdout(io.StringIO()):
            self._model: Any = ConvTransformerSQAModel().eval().to(device)
        self._device = device

    @torch.inference_mode()
    def predict(self, waves: Sequence[np.ndarray], sample_rate_hz: int) -> list[float]:
        """The MOS of each (samples,) float32 wave."""
        return [self._predict(resample(wave, sample_rate_hz, MODEL_HZ)) for wave in waves]

    def _predict(self, wave: np.ndarray) -> float:
        x = torch.from_numpy(np.ascontiguousarray(wave))[None].to(self._device)
        columns = -(-x.shape[1] // _COLUMN) + 2 * _EDGE
        if columns >= _SEGMENT // _COLUMN:
            return float(self._model(x))
        x = x / (x.abs().max() + 1e-8)
        features = self._model.cnn(torch.nn.functional.pad(x, (0, columns * _COLUMN - x.shape[1]))).permute(0, 2, 1)
        return float(1 + 4 * self._model.transformer_pool_attn(_lengthen(features, _SEGMENT // _COLUMN)))


class Utmos:
    """UTMOS (Saeki et al. 2022), the strong learner, through `utmos-pytorch`."""

    def __init__(self, weights: Path, device: str) -> None:
        try:
            from utmos_pytorch import UTMOSScoreTorch
        except ImportError as error:
            raise ValueError("reward.mos.engine is utmos, which is not installed; `pip install 'swaralign[utmos]'`, or "
                             "choose distillmos") from error
        if not weights.is_file():
            raise ValueError(f"{weights} does not exist; pin {UTMOS_WEIGHTS} in assets.mos.files")
        self._model: Any = UTMOSScoreTorch(str(weights), device)
        self._device = device
        self._check(weights)

    def _check(self, weights: Path) -> None:
        """The package loads whatever fits and leaves the rest random; a weight that is missing must not pass."""
        given = torch.load(weights, map_location="cpu", weights_only=True)
        folded = {name.removesuffix("_g") for name in given if name.endswith(".weight_g")}  # weight norm
        missing = [name for name in self._model.model.state_dict() if name not in given and name not in folded]
        if missing:
            raise ValueError(f"{weights} lacks {len(missing)} tensors of UTMOS, the first {missing[0]}; fetch it again")

    @torch.inference_mode()
    def predict(self, waves: Sequence[np.ndarray], sample_rate_hz: int) -> list[float]:
        """The MOS of each (samples,) float32 wave."""
        at_rate = [torch.from_numpy(resample(wave, sample_rate_hz, MODEL_HZ)).to(self._device) for wave in waves]
        return [float(self._model.score(wave)) for wave in at_rate]


def _lengthen(features: Tensor, columns: int) -> Tensor:
    """(1, n, C) features to (1, columns, C), by repeating a column of silence, `_EDGE / 2` from the end."""
    at = features.shape[1] - _EDGE // 2
    silence = features[:, at : at + 1].expand(-1, columns - features.shape[1], -1)
    return torch.cat([features[:, :at], silence, features[:, at:]], dim=1)
