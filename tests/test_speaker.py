"""The reference clip and its embedding, by the demo voice's own extractor."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile as sf
import torch

from swaralign.audio import encode_flac, read_audio, resample
from swaralign.params import SpeakerParams
from swaralign.speaker import EXTRACTOR_HZ, build_speaker, extract, read_reference
from swaralign.speaker_row import build_speaker_of_row, choose_row

DEMO = Path(__file__).resolve().parent.parent / "data" / "demo"
PARAMS = SpeakerParams(min_duration_s=1.0)


def write_clip(path: Path, wave: np.ndarray, sample_rate_hz: int = 24_000) -> Path:
    sf.write(path, wave, sample_rate_hz, subtype="FLOAT")
    return path


def noise(samples: int, rms: float = 0.1) -> np.ndarray:
    wave = np.random.default_rng(1).normal(size=samples)
    return ((wave - wave.mean()) / wave.std() * rms).astype(np.float32)


def test_a_clip_of_exactly_the_shortest_duration_passes(tmp_path: Path) -> None:
    wave, sample_rate_hz = read_reference(write_clip(tmp_path / "clip.wav", noise(24_000)), PARAMS)
    assert (len(wave), sample_rate_hz) == (24_000, 24_000)


def test_a_shorter_clip_is_refused_with_its_duration(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"clip\.wav lasts 0\.50 s, speaker\.min_duration_s is 1\.0; use a longer"):
        read_reference(write_clip(tmp_path / "clip.wav", noise(12_000)), PARAMS)


def test_what_is_not_audio_is_refused(tmp_path: Path) -> None:
    (tmp_path / "clip.flac").write_text("not audio")
    with pytest.raises(ValueError, match=r"clip\.flac is not audio"):
        read_reference(tmp_path / "clip.flac", PARAMS)


@pytest.mark.parametrize(("wave", "level"), [
    (np.zeros(30_000, np.float32), r"-200\.0"),
    (np.full(30_000, 0.5, np.float32), r"-200\.0"),  # a constant is not a voice
    (noise(30_000, rms=10 ** (-61 / 20)), r"-61\.0"),
])
def test_a_silent_clip_is_refused_with_its_level(tmp_path: Path, wave: np.ndarray, level: str) -> None:
    with pytest.raises(ValueError, match=rf"clip\.wav is silent: its level is {level} dBFS, below -60\.0"):
        read_reference(write_clip(tmp_path / "clip.wav", wave), PARAMS)


def test_a_quiet_voice_passes(tmp_path: Path) -> None:
    read_reference(write_clip(tmp_path / "clip.wav", noise(30_000, rms=10 ** (-59 / 20))), PARAMS)


def test_samples_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    wave = noise(30_000)
    wave[7] = np.nan
    with pytest.raises(ValueError, match=r"clip\.wav holds samples that are not finite"):
        read_reference(write_clip(tmp_path / "clip.wav", wave), PARAMS)


def test_a_bad_clip_is_refused_before_the_voice_is_loaded(tmp_path: Path) -> None:
    clip = write_clip(tmp_path / "clip.wav", np.zeros(30_000))
    with pytest.raises(ValueError, match="is silent"):
        build_speaker(clip, tmp_path / "no voice", PARAMS, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_embedding_is_the_official_one(tmp_path: Path) -> None:
    from swaralign.official import Qwen3TTSForConditionalGeneration

    build_speaker(DEMO / "reference.flac", DEMO / "base", PARAMS, tmp_path / "out")
    embedding = json.loads((tmp_path / "out" / "embedding.json").read_text())
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    model = Qwen3TTSForConditionalGeneration.from_pretrained(DEMO / "base", dtype=torch.float32)
    wave, sample_rate_hz = sf.read(DEMO / "reference.flac", dtype="float32")
    official = model.extract_speaker_embedding(wave, sample_rate_hz)
    assert torch.equal(torch.tensor(embedding), official)
    assert len(embedding) == model.config.talker_config.hidden_size == manifest["dimension"]
    assert manifest["duration_s"] == len(wave) / sample_rate_hz and manifest["sample_rate_hz"] == 24_000


def test_another_sample_rate_gives_the_same_voice() -> None:
    wave, sample_rate_hz = read_audio(DEMO / "reference.flac")
    at_48k = resample(wave, sample_rate_hz, 48_000)
    one = np.array(extract(wave, DEMO / "base"))
    other = np.array(extract(resample(at_48k, 48_000, EXTRACTOR_HZ), DEMO / "base"))
    assert one @ other / np.linalg.norm(one) / np.linalg.norm(other) > 0.999


def test_a_damaged_speaker_encoder_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    voice = Path(shutil.copytree(DEMO / "base", tmp_path / "voice"))
    weights = load_file(voice / "model.safetensors")
    weights["speaker_encoder.fc.bias"][0] = torch.nan
    save_file(weights, voice / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="the speaker embedding is not finite; its speaker encoder is damaged"):
        extract(noise(30_000), voice)


# A row of the corpus


def write_rows(path: Path) -> Path:
    """Six rows of two speakers; the clip of row n is the demo's, n * 0.1 s shorter."""
    wave, rate = read_audio(DEMO / "reference.flac")
    snrs = [25.0, 31.0, 40.0, 31.0, 33.0, 50.0]
    rows = [
        {"text": "a", "normalized": None, "scenario": "Read", "duration": 2.0, "snr": snr, "speaker_id": "ab"[row % 2],
         "audio": {"bytes": encode_flac(wave[: len(wave) - row * rate // 10], rate), "path": None}}
        for row, snr in enumerate(snrs)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    return path


@pytest.mark.parametrize(("speaker_id", "row"), [(None, 4), ("a", 4), ("b", 1)])  # rows 1 and 3 tie: the first
def test_the_row_of_highest_snr_among_the_training_prompts(tmp_path: Path, speaker_id: str | None, row: int) -> None:
    corpus = [write_rows(tmp_path / "corpus.parquet")]
    assert choose_row(corpus, {0, 1, 3, 4}, speaker_id)["source_index"] == row


def test_a_speaker_of_no_training_prompt(tmp_path: Path) -> None:
    corpus = [write_rows(tmp_path / "corpus.parquet")]
    with pytest.raises(ValueError, match=r"speaker_id is 'c', who speaks none of the 3 .*most are of b \(2\), a \(1\)"):
        choose_row(corpus, {0, 1, 3}, "c")


def test_the_chosen_rows_clip_gives_the_embedding_and_is_recorded(tmp_path: Path) -> None:
    corpus = [write_rows(tmp_path / "corpus.parquet")]
    rows = [{"extra_info": {"id": f"demo-en-{index:08d}"}} for index in (0, 1)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    build_speaker_of_row(corpus, tmp_path / "train.parquet", DEMO / "base", PARAMS, "b", tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["rule"] == "highest snr of the training prompts of speaker b"
    assert (manifest["source_index"], manifest["speaker_id"], manifest["snr_db"]) == (1, "b", 31.0)
    wave, rate = read_audio(DEMO / "reference.flac")
    assert manifest["duration_s"] == (len(wave) - rate // 10) / rate
    build_speaker(tmp_path / "out" / "reference.flac", DEMO / "base", PARAMS, tmp_path / "again")
    first, second = ((tmp_path / name / "embedding.json").read_bytes() for name in ("out", "again"))
    assert first == second


@pytest.mark.parametrize("cell", [None, {"bytes": None, "path": "clips/1.wav"}])
def test_a_row_without_its_audio_is_named(tmp_path: Path, cell: dict[str, Any] | None) -> None:
    rows = pq.read_table(write_rows(tmp_path / "corpus.parquet")).to_pylist()
    rows[1]["audio"] = cell
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "corpus.parquet")
    train = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist([{"extra_info": {"id": "demo-en-00000001"}}]), train)
    with pytest.raises(ValueError, match=r"row 1 of the corpus holds no bytes of audio; .* assets\.reference"):
        build_speaker_of_row([tmp_path / "corpus.parquet"], train, DEMO / "base", PARAMS, None, tmp_path / "out")
