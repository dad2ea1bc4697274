"""The transcriber, with the demo's Whisper on clips of the demo corpus."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from faster_whisper import WhisperModel

from swaralign.audio import resample
from swaralign.rewards.asr import Transcriber, load_cublas, repeats
from swaralign.rewards.text import corpus_rate, word_errors
from tests.speech import RATE_HZ, asr_folder, clips, demo_params, transcriber

CLIPS = 12


@pytest.fixture(scope="module")
def waves() -> list[np.ndarray]:
    """Waves of several lengths, noise among them, which makes Whisper say odd things."""
    noise = np.random.default_rng(0).normal(0, 0.1, RATE_HZ * 3).astype(np.float32)
    return [*(wave for _, wave in clips(CLIPS)), noise, noise[: RATE_HZ // 2]]


@pytest.fixture(scope="module")
def transcripts(waves: list[np.ndarray]) -> list[str]:
    return transcriber(threads=1, batch_size=1).transcribe(waves, RATE_HZ)


def test_transcribes_speech(transcripts: list[str]) -> None:
    pairs = zip((text for text, _ in clips(CLIPS)), transcripts, strict=False)
    assert corpus_rate(word_errors(text, heard, "english") for text, heard in pairs) < 0.25


@pytest.mark.parametrize(("threads", "batch_size"), [(1, 8), (2, 3), (2, 16)])
def test_transcript_does_not_depend_on_the_batch(
    waves: list[np.ndarray], transcripts: list[str], threads: int, batch_size: int
) -> None:
    asr = transcriber(threads, batch_size=batch_size)
    assert asr.transcribe(waves, RATE_HZ) == transcripts
    assert asr.transcribe(waves[::-1], RATE_HZ) == transcripts[::-1]


def test_whole_window_is_faster_whisper() -> None:
    """Given a clip that silence fills up to 30 s, `WhisperModel.transcribe` hears the same, word for word."""
    whisper = WhisperModel(str(asr_folder()), device="cpu", compute_type="int8", cpu_threads=1)
    heard = []
    for _, wave in clips(3):
        padded = np.zeros(30 * 16000, np.float32)
        short = resample(wave, RATE_HZ, 16000)
        padded[: len(short)] = short
        segments, _ = whisper.transcribe(
            padded, language="en", beam_size=1, temperature=0.0, without_timestamps=True
        )
        heard.append("".join(segment.text for segment in segments).strip())
    assert transcriber(window_s=30.0).transcribe([wave for _, wave in clips(3)], RATE_HZ) == heard


def test_language_is_forced(waves: list[np.ndarray]) -> None:
    heard = transcriber(language="ja").transcribe(waves[:1], RATE_HZ)[0]
    assert any("\u3040" <= character <= "\u9fff" for character in heard)


def test_transcript_is_bounded(waves: list[np.ndarray], transcripts: list[str]) -> None:
    cut = transcriber(max_tokens=8).transcribe(waves[:1], RATE_HZ)[0]
    assert transcripts[0].startswith(cut)
    assert len(cut.split()) <= 8


def test_nothing_to_transcribe() -> None:
    assert transcriber().transcribe([], RATE_HZ) == []


def test_window_is_the_longest_take() -> None:
    asr = transcriber(window_s=8.0)
    assert asr.window_s == 8.0
    assert len(asr.transcribe([np.zeros(8 * RATE_HZ, np.float32)], RATE_HZ)) == 1
    with pytest.raises(ValueError, match=r"wave 1 lasts 8\.00 s, longer than reward\.asr\.window_s 8\.0"):
        asr.transcribe([np.zeros(10, np.float32), np.zeros(8 * RATE_HZ + 1, np.float32)], RATE_HZ)


def test_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lacks config\.json, model\.bin, tokenizer\.json in .*; install the"):
        Transcriber(tmp_path / "nowhere", demo_params().reward.asr, 1, "cpu")
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(asr_folder() / name, tmp_path)
    with pytest.raises(ValueError, match=r"lacks model\.bin in"):
        Transcriber(tmp_path, demo_params().reward.asr, 1, "cpu")


def test_a_gpu_without_its_cublas_is_told_what_to_install() -> None:
    with pytest.raises(ValueError, match=r"needs libcublasLt\.so\.12, found none .*; `pip install nvidia-cublas-cu12`"):
        load_cublas()


def test_impossible_arithmetic_is_refused() -> None:
    with pytest.raises(ValueError, match=r"reward\.asr\.compute_type is 'float16'; the cpu here can do .*int8"):
        transcriber(compute_type="float16")


def test_unknown_language_is_refused() -> None:
    with pytest.raises(ValueError, match=r"reward\.asr\.language is 'xx'; the Whisper in .* knows .*en, "):
        transcriber(language="xx")


@pytest.mark.parametrize("text", [
    "the the the the",
    "We go. and then and then and then and then",
    "Thank you very much. Thank you very much. Thank you very much. Thank you very much.",
    "a" * 60,
    "क्या " * 20,
])
def test_loops_are_found(text: str) -> None:
    assert repeats(text)


@pytest.mark.parametrize("text", [
    "",
    "the the the",
    "It is very very cold",
    "There are seven birds in the garden and seven birds in the park.",
    "her cat her cat her dog her cat",
    "no north no north",
])
def test_speech_is_no_loop(text: str) -> None:
    assert not repeats(text)
