"""What may be scored at all, decided before any ASR hears it: Whisper writes fluent text on silence and noise."""

from __future__ import annotations

import math

import numpy as np

from swaralign.params import GuardParams


def guard(wave: np.ndarray, sample_rate_hz: int, params: GuardParams, window_s: float) -> str | None:
    """Why a (samples,) wave in [-1, 1] is a failed take, the first of `flags.GUARD_REASONS` that holds; None if none.

    `window_s`: what the ASR hears at once, in seconds; a longer take is refused, never cut.
    """
    duration_s = len(wave) / sample_rate_hz
    if not len(wave):
        return "empty"
    if not np.isfinite(wave).all():
        return "nonfinite"
    if rms_dbfs(wave) < params.min_rms_dbfs:
        return "silent"
    if wave.min() == wave.max():
        return "constant"
    if duration_s < params.min_duration_s:
        return "too_short"
    return "too_long" if duration_s > window_s else None


def rms_dbfs(wave: np.ndarray) -> float:
    """Root mean square of a wave in dB below full scale (1.0); minus infinity for zeros."""
    power = float(np.mean(np.square(wave, dtype=np.float64)))
    return 10 * math.log10(power) if power else -math.inf
