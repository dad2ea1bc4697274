"""The codec: converted weights give the numbers that `descript-audio-codec` (1.0.0) computed with the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swaralign.policy.dac import DacCodec, convert_dac, fade, load_dac, to_level

FACTS: dict[str, Any] = json.loads((Path(__file__).parent / "data/outetts/dac.json").read_text())
LEVELS = json.loads((Path(__file__).parent / "data/outetts/audio.json").read_text())["levels"]


def published_state() -> dict[str, torch.Tensor]:
    """Random weights in the published layout, by the formula that the facts were computed with."""
    rng, state = np.random.default_rng(7), {}
    for name, shape in FACTS["shapes"].items():
        drawn = rng.standard_normal(shape).astype(np.float32)
        if name.endswith(("alpha", "weight_g")):
            drawn = (1 + 0.2 * np.tanh(drawn)) * (0.75 if name.endswith("weight_g") else 1)
        state[name] = torch.from_numpy(0.05 * drawn if name.endswith("bias") else drawn)
    return state


@pytest.fixture(scope="module")
def codec() -> DacCodec:
    torch.set_num_threads(1)
    return DacCodec(convert_dac(published_state(), FACTS["kwargs"]))


@pytest.fixture(scope="module")
def wave() -> np.ndarray:
    return (0.3 * np.random.default_rng(8).standard_normal(4001)).astype(np.float32)


def test_codes_and_audio_are_those_of_the_published_codec(codec: DacCodec, wave: np.ndarray) -> None:
    codes = codec.encode(wave)
    assert codes.tolist() == FACTS["codes"]
    audio = codec.decode([codes])[0]
    assert audio.dtype == np.float32 and len(audio) == FACTS["audio_samples"]
    np.testing.assert_allclose(audio[::61], FACTS["audio_every_61"], atol=1e-5, rtol=0)
    assert np.linalg.norm(audio) == pytest.approx(FACTS["audio_norm"], abs=1e-4)


@pytest.mark.parametrize(("samples", "lengths"), FACTS["lengths"].items())
def test_lengths_of_any_sample_count(codec: DacCodec, samples: str, lengths: list[int]) -> None:
    codes = codec.encode(np.zeros(int(samples), np.float32))
    assert [codes.shape[1], len(codec.decode([codes])[0])] == lengths
    assert codec.samples(codes.shape[1]) == lengths[1]


def test_long_audio_is_encoded_in_windows_of_five_seconds(codec: DacCodec) -> None:
    wave = (0.3 * np.random.default_rng(1).standard_normal(codec.window + 321)).astype(np.float32)
    codes = codec.encode(wave)
    assert codec.window == 120_000 and codes.shape == (2, 375 + 2)
    assert np.array_equal(codes[:, 375:], codec.encode(wave[codec.window :]))


def test_decoding_a_batch_equals_decoding_each_alone(codec: DacCodec) -> None:
    """Up to the last sample: a row must not hear the padding after it."""
    rng = np.random.default_rng(2)
    codes = [rng.integers(0, 16, (2, frames)) for frames in (7, 1, 30, 0, 13)]
    together = codec.decode(codes)
    assert [len(wave) for wave in together] == [2232, 312, 9592, 0, 4152]
    for each, wave in zip(codes, together, strict=True):
        np.testing.assert_allclose(wave, codec.decode([each])[0], atol=1e-5, rtol=0)


def test_both_layouts_load_from_a_folder(codec: DacCodec, wave: np.ndarray, tmp_path: Path) -> None:
    published, own = tmp_path / "published", tmp_path / "own"
    published.mkdir()
    torch.save({"state_dict": published_state(), "metadata": {"kwargs": FACTS["kwargs"]}}, published / "weights.pth")
    codec.model.save_pretrained(own)
    for folder in (published, own):
        assert np.array_equal(DacCodec(load_dac(folder)).encode(wave), codec.encode(wave))


def test_what_is_no_codec_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must hold config.json .* or one .pth file; found neither"):
        load_dac(tmp_path)
    (tmp_path / "a.pth").write_bytes(b"not weights")
    with pytest.raises(ValueError, match=r"a\.pth is not a weights file of descript-audio-codec"):
        load_dac(tmp_path)
    torch.save({"weights": 1}, tmp_path / "a.pth")
    with pytest.raises(ValueError, match="lacks state_dict and metadata"):
        load_dac(tmp_path)


@pytest.mark.parametrize(("changes", "told"), [
    ({"decoder_rates": [8, 4, 5, 2]}, r"decoder_rates \[8, 4, 5, 2\]; transformers' DacModel has \[8, 5, 4, 2\]"),
    ({"latent_dim": 72}, "latent_dim 72; transformers' DacModel has 64"),
    ({"n_codebooks": 1}, r"do not fit its own metadata: quantizer\.quantizers\.1"),
    ({"codebook_size": 32}, r"do not fit its own metadata: quantizer\.quantizers\.\d\.codebook"),
])
def test_a_codec_of_another_shape_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        convert_dac(published_state(), FACTS["kwargs"] | changes)


@pytest.mark.parametrize("name", ["tone_110", "tone_220_short", "noise"])
def test_level_is_the_published_one(name: str) -> None:
    peak, norm = LEVELS[name]
    levelled = to_level(fact_wave(name), 24_000)
    assert levelled.dtype == np.float32
    assert [float(np.abs(levelled).max()), float(np.linalg.norm(levelled))] == pytest.approx([peak, norm], rel=1e-5)


@pytest.mark.parametrize("wave", [np.zeros(0, np.float32), np.zeros(1000, np.float32),
                                  np.full(500, np.nan, np.float32)], ids=["empty", "silent", "not finite"])
def test_a_wave_without_loudness_is_left_alone(wave: np.ndarray) -> None:
    np.testing.assert_array_equal(to_level(wave, 24_000), wave)


def test_fades_are_fifteen_milliseconds() -> None:
    faded = fade(np.ones(2000, np.float32), 24_000)
    np.testing.assert_allclose(faded[[0, 1, 359, 360, 1639, 1640, 1999]], [0, 1 / 359, 1, 1, 1, 1, 0], atol=1e-6)
    np.testing.assert_allclose(fade(np.ones(3, np.float32), 24_000), [0, 1, 0])
    assert len(fade(np.zeros(0, np.float32), 24_000)) == 0


def fact_wave(name: str) -> np.ndarray:
    """The inputs that the published audio code was run on."""
    if name == "noise":
        return (0.2 * np.random.default_rng(3).standard_normal(4801)).astype(np.float32)
    frequency, seconds, amplitude, seed = {
        "tone_110": (110, 0.5, 0.5, 0), "tone_220_short": (220, 0.05, 0.1, 1), "tone_500": (500, 0.3, 0.9, 2),
    }[name]
    time = np.arange(int(24_000 * seconds)) / 24_000
    noise = np.random.default_rng(seed).standard_normal(len(time))
    return (amplitude * np.sin(2 * np.pi * frequency * time) + 0.01 * noise).astype(np.float32)
