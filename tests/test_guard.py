"""The guard: what may not be scored."""

from __future__ import annotations

import numpy as np
import pytest

from swaralign.flags import GUARD_REASONS
from swaralign.params import GuardParams
from swaralign.rewards.guard import guard, rms_dbfs

RATE_HZ = 1000
PARAMS = GuardParams(min_duration_s=0.2, min_rms_dbfs=-40.0)


def square(samples: int, amplitude: float = 0.1) -> np.ndarray:
    return np.tile(np.array([amplitude, -amplitude], np.float32), samples)[:samples]


def with_value(value: float) -> np.ndarray:
    wave = square(500)
    wave[7] = value
    return wave


CASES = [
    (square(0), "empty"),
    (with_value(np.nan), "nonfinite"),
    (with_value(-np.inf), "nonfinite"),
    (np.zeros(500, np.float32), "silent"),
    (square(500, 0.0099), "silent"),  # 0.01 is -40 dB
    (square(500, 0.0101), None),
    (np.full(500, 0.5, np.float32), "constant"),
    (square(199), "too_short"),
    (square(200), None),
    (square(2000), None),
    (square(2001), "too_long"),
]


@pytest.mark.parametrize(("wave", "reason"), CASES)
def test_guard(wave: np.ndarray, reason: str | None) -> None:
    assert guard(wave, RATE_HZ, PARAMS, window_s=2.0) == reason


def test_every_reason_has_a_case() -> None:
    assert {reason for _, reason in CASES if reason} == set(GUARD_REASONS)


def test_level_is_in_db_below_full_scale() -> None:
    assert rms_dbfs(square(10, 1.0)) == 0.0
    assert rms_dbfs(square(10, 0.1)) == pytest.approx(-20.0, abs=1e-6)
    assert rms_dbfs(np.zeros(10, np.float32)) == -np.inf
