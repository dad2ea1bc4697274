"""A clip -> the speaker embedding that conditions every take, by the voice's own extractor.

The embedding is the x-vector of the official `extract_speaker_embedding`: one vector for the whole clip, used raw.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from swaralign.artifacts import atomic_folder, sha256_file, write_json
from swaralign.audio import check_speech, read_audio, resample
from swaralign.official import Qwen3TTSForConditionalGeneration
from swaralign.params import ProfileParams, SpeakerParams

EMBEDDING = "embedding.json"
EXTRACTOR_HZ = 24_000  # the official extractor takes no other rate


def build_speaker(clip: Path, checkpoint: Path, params: SpeakerParams, out: Path) -> None:
    """Write embedding.json (a list of floats, as long as the talker's hidden size) and manifest.json into `out`.

    `checkpoint`: a voice in the official layout. Raises ValueError as `read_reference` and `extract` do, the former
    before the voice is loaded.
    """
    wave, sample_rate_hz = read_reference(clip, params)
    about = {"clip": clip.name, "clip_sha256": sha256_file(clip)}
    with atomic_folder(out) as folder:
        write_embedding(wave, sample_rate_hz, checkpoint, about, folder)


def write_embedding(
    wave: np.ndarray, sample_rate_hz: int, checkpoint: Path, about: dict[str, Any], folder: Path
) -> None:
    """Write embedding.json and manifest.json, with what is `about` the clip, into a folder; raises as `extract`."""
    embedding = extract(resample(wave, sample_rate_hz, EXTRACTOR_HZ), checkpoint)
    write_json(folder / EMBEDDING, embedding)
    manifest = about | {
        "duration_s": len(wave) / sample_rate_hz,
        "sample_rate_hz": sample_rate_hz,
        "extractor_sample_rate_hz": EXTRACTOR_HZ,
        "dimension": len(embedding),
        "embedding_sha256": sha256_file(folder / EMBEDDING),
    }
    write_json(folder / "manifest.json", manifest)


def read_reference(clip: Path | bytes, params: SpeakerParams | ProfileParams) -> tuple[np.ndarray, int]:
    """The clip, a file or the bytes of one, as a (samples,) float32 wave and its sample rate in Hz.

    Raises ValueError if it is missing, not audio, too short, not finite, or silent; names the clip and what to do.
    """
    wave, sample_rate_hz = read_audio(clip)
    name = "the clip of the chosen row" if isinstance(clip, bytes) else clip
    duration_s = len(wave) / sample_rate_hz
    if duration_s < params.min_duration_s:
        raise ValueError(
            f"{name} lasts {duration_s:.2f} s, speaker.min_duration_s is {params.min_duration_s}; use a longer clip"
        )
    check_speech(wave, name)
    return wave, sample_rate_hz


def extract(wave: np.ndarray, checkpoint: Path) -> list[float]:
    """The embedding of a (samples,) wave at 24 kHz, computed in float32.

    Raises ValueError if the voice has no extractor, or if the embedding is not finite or does not fit the talker.
    """
    extractor = Extractor(checkpoint, "cpu")
    embedding = extractor(wave, EXTRACTOR_HZ)
    if embedding.shape != (extractor.hidden_size,):
        raise ValueError(f"{checkpoint}: the speaker embedding has shape {embedding.shape}, "
                         f"the talker needs ({extractor.hidden_size},)")
    if not np.isfinite(embedding).all():
        raise ValueError(f"{checkpoint}: the speaker embedding is not finite; its speaker encoder is damaged")
    return [float(value) for value in embedding]


class Extractor:
    """The speaker encoder of a voice, in float32."""

    def __init__(self, checkpoint: Path, device: str) -> None:
        """Load it. Raises ValueError if the voice has none."""
        model = Qwen3TTSForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
        if model.speaker_encoder is None:
            raise ValueError(f"{checkpoint} is of type {model.tts_model_type!r}, without a speaker encoder; use a base")
        self._model = model.to(device)
        self.hidden_size = int(model.config.talker_config.hidden_size)

    def __call__(self, wave: np.ndarray, sample_rate_hz: int) -> np.ndarray:
        """The raw (d,) float32 x-vector of a (samples,) wave."""
        embedding = self._model.extract_speaker_embedding(resample(wave, sample_rate_hz, EXTRACTOR_HZ), EXTRACTOR_HZ)
        return np.asarray(embedding.detach().float().cpu())
