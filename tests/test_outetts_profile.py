"""Speaker profiles: ranges and features as the published `outetts` package (0.4.4) computed them, and a real clip."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile as sf

from swaralign.assets import resolve
from swaralign.params import ProfileParams, load_params
from swaralign.speaker_profile import TimedWord, build_profile, features, make_profile, spelled
from tests.test_outetts_dac import fact_wave

ROOT = Path(__file__).resolve().parent.parent
BASE = ROOT / "data" / "outetts-micro" / "base"
FACTS: dict[str, Any] = json.loads((Path(__file__).parent / "data/outetts/audio.json").read_text())
PARAMS = ProfileParams(kind="profile", min_duration_s=1.0, transcript=None, language="en", compute_type="int8",
                       beam_size=1)
WORDS = [TimedWord(word["word"].strip(), word["start"], word["end"]) for word in FACTS["words"]]


class CountingCodec:
    """Codes that count the frames, as the facts were computed with."""

    sample_rate_hz, frames_per_second = 24_000, 75.0

    def encode(self, wave: np.ndarray) -> np.ndarray:
        count = np.arange(-(-len(wave) // 320))
        return np.stack([count % 1024, count * 7 % 1024])


@pytest.mark.parametrize("name", FACTS["features"])
def test_features_are_the_published_ones(name: str) -> None:
    made = {"zeros": np.zeros(1000, np.float32), "empty": np.zeros(0, np.float32)}
    wave = made[name] if name in made else fact_wave(name)
    assert features(wave, 24_000).model_dump() == FACTS["features"][name]


def test_a_sound_shorter_than_a_pitch_window_has_features() -> None:
    assert features(np.full(50, 0.5, np.float32), 24_000).energy == 50


def test_profile_is_the_published_one() -> None:
    time = np.arange(48_000) / 24_000
    noise = 0.01 * np.random.default_rng(4).standard_normal(48_000)
    wave = (0.4 * np.sin(2 * np.pi * 150 * time) + noise).astype(np.float32)
    made = make_profile(wave, WORDS, "One two three.", CountingCodec())  # type: ignore[arg-type]
    assert made.model_dump(exclude={"interface_version"}) == FACTS["profile"]


def test_transcript_spells_what_is_heard() -> None:
    assert [each.word for each in spelled(WORDS, "ONE, two three!", "a.wav")] == ["ONE,", "two", "three!"]
    assert spelled(WORDS, None, "a.wav") == WORDS
    with pytest.raises(ValueError, match=r"is 'One two', but in a\.wav the recogniser hears 'One two three\.'"):
        spelled(WORDS, "One two", "a.wav")


@pytest.fixture(scope="module")
def asr() -> Path:
    return resolve("asr", load_params(ROOT / "recipes" / "demo.yaml").assets, ROOT)


def test_a_real_clip_becomes_a_profile(asr: Path, tmp_path: Path) -> None:
    clip = ROOT / "data" / "demo" / "reference.flac"
    build_profile(clip, BASE, asr, PARAMS, tmp_path / "out")
    made = json.loads((tmp_path / "out" / "embedding.json").read_text())
    duration_s = sf.info(clip).duration
    frames = [len(word["c1"]) for word in made["words"]]
    assert made["text"] == " ".join(word["word"] for word in made["words"]) and len(made["words"]) >= 5
    assert 0.5 * duration_s * 75 < sum(frames) <= np.ceil(duration_s * 75)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["frames"] == sum(frames) and manifest["text"] == made["text"]
    build_profile(clip, BASE, asr, PARAMS, tmp_path / "again")
    assert (tmp_path / "again" / "embedding.json").read_bytes() == (tmp_path / "out" / "embedding.json").read_bytes()


def test_a_ready_profile_is_taken_as_it_is(asr: Path, tmp_path: Path) -> None:
    ready = Path(__file__).parent / "data" / "outetts" / "speaker.json"
    build_profile(ready, BASE, asr, PARAMS, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "embedding.json").read_text()) == json.loads(ready.read_text())
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match=r"bad\.json is not a speaker profile: text: Field required"):
        build_profile(tmp_path / "bad.json", BASE, asr, PARAMS, tmp_path / "out")


def test_a_long_clip_is_refused(asr: Path, tmp_path: Path) -> None:
    sf.write(tmp_path / "long.wav", np.sin(np.arange(21 * 8000)), 8000)
    with pytest.raises(ValueError, match=r"long\.wav lasts 21\.0 s, more than 20\.0"):
        build_profile(tmp_path / "long.wav", BASE, asr, PARAMS, tmp_path / "out")
