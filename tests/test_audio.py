"""Decoding, resampling and encoding on signals whose samples are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile as sf

from swaralign.audio import encode_flac, read_audio, resample


def sine(hz: float, sample_rate_hz: int, duration_s: float = 0.5) -> np.ndarray:
    time_s = np.arange(int(duration_s * sample_rate_hz)) / sample_rate_hz
    return (0.5 * np.sin(2 * np.pi * hz * time_s)).astype(np.float32)


def test_flac_holds_sixteen_bits_and_clips() -> None:
    wave = np.array([0, 0.5, -1, 1, 2, -2, 1e-5], np.float32)
    decoded, sample_rate_hz = read_audio(encode_flac(wave, 24_000))
    assert sample_rate_hz == 24_000 and decoded.dtype == np.float32
    assert (decoded * 32_768).tolist() == [0, 16_384, -32_768, 32_767, 32_767, -32_768, 0]


def test_equal_waves_give_equal_bytes() -> None:
    assert encode_flac(sine(440, 24_000), 24_000) == encode_flac(sine(440, 24_000), 24_000)


def test_an_empty_wave_has_no_bytes() -> None:
    assert encode_flac(np.zeros(0, np.float32), 24_000) == b""


def test_non_finite_samples_cannot_be_encoded() -> None:
    with pytest.raises(ValueError, match="2 of 3 samples are not finite"):
        encode_flac(np.array([np.nan, 0, np.inf], np.float32), 24_000)


def test_channels_are_averaged(tmp_path: Path) -> None:
    sf.write(tmp_path / "stereo.wav", np.array([[0.5, 0.25], [-0.5, 0.0]]), 8_000, subtype="FLOAT")
    wave, sample_rate_hz = read_audio(tmp_path / "stereo.wav")
    assert wave.tolist() == [0.375, -0.25] and sample_rate_hz == 8_000


def test_what_is_not_audio_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes.flac").write_text("not audio")
    with pytest.raises(ValueError, match=r"notes\.flac is not audio"):
        read_audio(tmp_path / "notes.flac")
    with pytest.raises(ValueError, match="audio of 9 bytes is not audio"):
        read_audio(b"not audio")
    with pytest.raises(ValueError, match=r"absent\.flac does not exist"):
        read_audio(tmp_path / "absent.flac")


@pytest.mark.parametrize("from_hz", [48_000, 16_000])
def test_resampling_keeps_a_tone(from_hz: int) -> None:
    resampled = resample(sine(440, from_hz), from_hz, 24_000)
    assert resampled.dtype == np.float32 and len(resampled) == 12_000
    middle = slice(1_000, -1_000)  # the filter rings at the ends
    assert np.abs(resampled[middle] - sine(440, 24_000)[middle]).max() < 1e-3


def test_an_equal_rate_changes_nothing() -> None:
    wave = sine(440, 24_000)
    assert np.array_equal(resample(wave, 24_000, 24_000), wave)


def test_a_file_cut_off_in_its_header_is_not_audio() -> None:
    with pytest.raises(ValueError, match="audio of 40 bytes is not audio"):
        read_audio(encode_flac(sine(440, 24_000), 24_000)[:40])
