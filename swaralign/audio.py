"""Read, resample and encode audio: mono float32 arrays in [-1, 1] inside, files and bytes outside."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import soundfile as sf
import soxr

SILENCE_DBFS = -60.0  # dB below full scale; a reference below it holds no voice


def read_audio(source: Path | bytes) -> tuple[np.ndarray, int]:
    """Decode a file, or the bytes of one, to a (samples,) float32 mono wave and its sample rate in Hz.

    Channels are averaged. Raises ValueError naming the file if it is missing or is not audio.
    """
    name = f"audio of {len(source)} bytes" if isinstance(source, bytes) else str(source)
    if isinstance(source, Path) and not source.is_file():
        raise ValueError(f"{name} does not exist")
    try:
        stream = io.BytesIO(source) if isinstance(source, bytes) else source
        wave, sample_rate_hz = sf.read(stream, dtype="float32", always_2d=True)
    except sf.LibsndfileError as error:
        raise ValueError(f"{name} is not audio that can be read ({error.error_string}); give WAV or FLAC") from error
    return wave.mean(axis=1, dtype=np.float32), int(sample_rate_hz)


def check_speech(wave: np.ndarray, name: object) -> None:
    """Raises ValueError, naming the (samples,) wave, if it is empty, not finite or silent: it holds no voice."""
    if not np.isfinite(wave).all():
        raise ValueError(f"{name} holds samples that are not finite; encode it again")
    level_dbfs = 20 * np.log10(max(float(np.std(wave, dtype=np.float64)), 1e-10)) if len(wave) else -np.inf
    if level_dbfs < SILENCE_DBFS:
        raise ValueError(
            f"{name} is silent: its level is {level_dbfs:.1f} dBFS, below {SILENCE_DBFS}; use a clip with speech"
        )


def resample(wave: np.ndarray, from_hz: int, to_hz: int) -> np.ndarray:
    """A (samples,) wave at another sample rate, as float32; unchanged if the rates are equal."""
    if from_hz == to_hz:
        return wave.astype(np.float32, copy=False)
    return soxr.resample(wave.astype(np.float32, copy=False), from_hz, to_hz)


def encode_flac(wave: np.ndarray, sample_rate_hz: int) -> bytes:
    """A (samples,) wave as 16-bit FLAC; samples beyond full scale are clipped, an empty wave gives no bytes at all.

    Raises ValueError if a sample is not finite: FLAC cannot hold it.
    """
    if not np.isfinite(wave).all():
        raise ValueError(f"{int((~np.isfinite(wave)).sum())} of {len(wave)} samples are not finite")
    encoded = io.BytesIO()
    sf.write(encoded, wave, sample_rate_hz, format="FLAC", subtype="PCM_16")
    return encoded.getvalue()
