"""Speaker similarity: the cosine of a take's speaker embedding to the reference clip's, in [-1, 1].

Encoders: Resemblyzer (Wan et al. 2018, weights in its package), ECAPA-TDNN through SpeechBrain (Desplanques et al.
2020, weights as an asset), or the policy's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from swaralign.audio import check_speech, resample
from swaralign.params import SimilarityParams

MODEL_HZ = 16_000  # Resemblyzer and ECAPA; the policy's encoder takes 24 kHz
Encoder = Callable[[np.ndarray, int], np.ndarray]  # (samples,) wave and its rate in Hz -> (d,) float32 embedding


class SpeakerSimilarity:
    """Compares takes with one reference clip."""

    def __init__(self, encoder: Encoder, reference: np.ndarray, reference_hz: int) -> None:
        """Raises ValueError if the reference, (samples,) float32, holds no voice."""
        check_speech(reference, "the reference clip")
        self._encoder = encoder
        self._reference = _unit(encoder(reference, reference_hz))

    def compare(self, waves: Sequence[np.ndarray], sample_rate_hz: int) -> list[float]:
        """The cosine of each (samples,) float32 wave to the reference."""
        return [float(_unit(self._encoder(wave, sample_rate_hz)) @ self._reference) for wave in waves]


def load_encoder(params: SimilarityParams, weights: Path | None, checkpoint: Path | None, device: str) -> Encoder:
    """The encoder that `params` name.

    `weights`: the folder of the asset `speaker_encoder`, for ECAPA; `checkpoint`: the voice, for its own encoder.
    Raises ValueError if the engine's package is not installed, or what it needs is not given.
    """
    if params.engine == "resemblyzer":
        return _resemblyzer(device)
    if params.engine == "policy":
        if checkpoint is None:
            raise ValueError("reward.similarity.engine is policy, which needs the voice's checkpoint; name one")
        if not (checkpoint / "config.json").is_file():
            raise ValueError(f"{checkpoint} is no checkpoint; `dvc repro merge` makes data/merge/checkpoint")
        from swaralign.speaker import Extractor

        return Extractor(checkpoint, device)
    if weights is None:
        raise ValueError("reward.similarity.engine is ecapa, which needs the asset `speaker_encoder`; fill in "
                         "assets.speaker_encoder")
    return _ecapa(weights, device)


def _resemblyzer(device: str) -> Encoder:
    try:
        from resemblyzer import VoiceEncoder, preprocess_wav
    except ImportError as error:
        raise ValueError("reward.similarity.engine is resemblyzer, which is not installed; `pip install --no-deps "
                         "resemblyzer webrtcvad-wheels`, or set the engine to none") from error
    model = VoiceEncoder(device, verbose=False)

    def embed(wave: np.ndarray, sample_rate_hz: int) -> np.ndarray:
        wave = resample(wave, sample_rate_hz, MODEL_HZ)
        voiced = preprocess_wav(wave)
        # Its voice detection may leave nothing of an odd take; the take is then compared as it is.
        with _one_thread():
            return np.asarray(model.embed_utterance(voiced if len(voiced) else wave))

    return embed


@contextmanager
def _one_thread() -> Iterator[None]:
    """PyTorch on one core: the steps of an LSTM are so small that sharing them out takes three times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _ecapa(folder: Path, device: str) -> Encoder:
    try:
        from speechbrain.inference.speaker import EncoderClassifier
        from speechbrain.utils.fetching import LocalStrategy
    except ImportError as error:
        raise ValueError("reward.similarity.engine is ecapa, which is not installed; `pip install 'swaralign[ecapa]'`, "
                         "or choose resemblyzer") from error
    model: Any = EncoderClassifier.from_hparams(
        source=str(folder), savedir=str(folder), run_opts={"device": device}, local_strategy=LocalStrategy.NO_LINK,
        overrides={"pretrained_path": str(folder)},
    )

    def embed(wave: np.ndarray, sample_rate_hz: int) -> np.ndarray:
        with torch.inference_mode():
            batch = torch.from_numpy(resample(wave, sample_rate_hz, MODEL_HZ))[None].to(device)
            return np.asarray(model.encode_batch(batch).squeeze().cpu())

    return embed


def _unit(embedding: np.ndarray) -> np.ndarray:
    return embedding / max(float(np.linalg.norm(embedding)), 1e-12)
