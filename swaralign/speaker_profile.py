"""A reference clip -> the speaker profile that OuteTTS speaks as: its words, with their codes and features.

Word times come from the speech recogniser. The ranges of codes and the features are those of the published package, so
that a profile reads as the model's training data did. Source: version 3 of the interface of the `outetts` package.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from faster_whisper import WhisperModel

from swaralign.artifacts import atomic_folder, sha256_file, write_json
from swaralign.audio import resample
from swaralign.params import ProfileParams
from swaralign.policy.dac import DacCodec, load_dac, to_level
from swaralign.policy.outetts import CODEC
from swaralign.policy.outetts_prompt import Profile, ProfileWord, WordFeatures, read_profile
from swaralign.speaker import EMBEDDING, read_reference

ASR_HZ, MAX_CLIP_S = 16_000, 20.0
MARGIN_FRAMES = 20  # of silence that the first and the last word keep
FRAME, HOP = 400, 160  # samples of a pitch window, and from one to the next
MIN_HZ, MAX_HZ, VOICED = 75.0, 600.0, 0.3  # of a voice, and the autocorrelation peak from which a window has a pitch
_PLAIN = str.maketrans({"…": "...", "“": '"', "”": '"', "‘": "'", "’": "'", "–": "-", "—": "-"})


@dataclass(frozen=True)
class TimedWord:
    """A word as heard, and where it stands in the clip, in seconds."""

    word: str
    start: float
    end: float


def build_profile(reference: Path, checkpoint: Path, asr: Path, params: ProfileParams, out: Path) -> None:
    """Write the profile as JSON, and manifest.json, into `out`.

    `reference`: a clip, or a ready profile (`.json`). `checkpoint`: an OuteTTS voice. `asr`: a CTranslate2 Whisper.

    Raises:
        ValueError: the clip cannot be used (see `read_reference`), lasts over 20 s, holds no words, or holds others
            than the transcript says; or the ready profile is faulty.
    """
    manifest: dict[str, Any] = {"reference": reference.name, "reference_sha256": sha256_file(reference)}
    if reference.suffix == ".json":
        profile = read_profile(json.loads(reference.read_text(encoding="utf-8")), str(reference))
    else:
        wave, sample_rate_hz = read_reference(reference, params)
        manifest["duration_s"] = duration_s = len(wave) / sample_rate_hz
        if duration_s > MAX_CLIP_S:
            raise ValueError(f"{reference} lasts {duration_s:.1f} s, more than {MAX_CLIP_S}; use a shorter clip")
        words = spelled(hear(resample(wave, sample_rate_hz, ASR_HZ), asr, params), params.transcript, reference.name)
        codec = DacCodec(load_dac(checkpoint / CODEC))
        profile = make_profile(resample(wave, sample_rate_hz, codec.sample_rate_hz), words, params.transcript, codec)
    manifest |= {"text": profile.text, "words": len(profile.words), "frames": sum(len(w.c1) for w in profile.words)}
    with atomic_folder(out) as folder:
        write_json(folder / EMBEDDING, profile.model_dump())
        write_json(folder / "manifest.json", manifest)


def hear(wave: np.ndarray, asr: Path, params: ProfileParams) -> list[TimedWord]:
    """The words of a (samples,) wave at 16 kHz with their times. Raises ValueError if there are none."""
    whisper = WhisperModel(str(asr), device="cpu", compute_type=params.compute_type, cpu_threads=1, num_workers=1,
                           local_files_only=True)
    if params.language not in whisper.supported_languages:
        known = ", ".join(whisper.supported_languages)
        raise ValueError(f"speaker.language is {params.language!r}; the Whisper of assets.asr knows {known}")
    segments, _ = whisper.transcribe(wave, language=params.language, beam_size=params.beam_size, temperature=0.0,
                                     condition_on_previous_text=False, word_timestamps=True)
    words = [TimedWord(word.word.strip(), word.start, word.end) for segment in segments for word in segment.words or ()]
    if not words:
        raise ValueError("the recogniser hears no words in the reference clip; use one with clear speech")
    return words


def spelled(heard: Sequence[TimedWord], transcript: str | None, name: str) -> list[TimedWord]:
    """The heard words as the transcript spells them, or as heard without one. Raises ValueError if they differ."""
    if transcript is None:
        return list(heard)
    written = transcript.split()
    if [_letters(word) for word in written] != [_letters(each.word) for each in heard]:
        found = " ".join(each.word for each in heard)
        raise ValueError(f"speaker.transcript is {transcript!r}, but in {name} the recogniser hears {found!r}; "
                         "correct it, or make it null to take what is heard")
    return [TimedWord(word, each.start, each.end) for word, each in zip(written, heard, strict=True)]


def _letters(word: str) -> str:
    return "".join(character for character in word.casefold() if character.isalnum())


def make_profile(wave: np.ndarray, words: Sequence[TimedWord], transcript: str | None, codec: DacCodec) -> Profile:
    """The profile of a (samples,) wave at the codec's rate whose words stand at the given times."""
    codes, rate = codec.encode(to_level(wave, codec.sample_rate_hz)), codec.frames_per_second
    ends = [int(word.end * rate) for word in words]
    ends[-1] = min(codes.shape[1], ends[-1] + MARGIN_FRAMES)
    starts = [max(0, int(words[0].start * rate) - MARGIN_FRAMES), *ends[:-1]]
    spoken = []
    for word, start, end in zip(words, starts, ends, strict=True):
        sounds = wave[int(word.start * codec.sample_rate_hz) : int(word.end * codec.sample_rate_hz)]
        c1, c2 = codes[:, start:end].tolist()
        spoken.append(ProfileWord(word=word.word, duration=round(len(c1) / rate, 2), c1=c1, c2=c2,
                                  features=features(sounds, codec.sample_rate_hz)))
    text = " ".join((transcript or " ".join(word.word for word in words)).translate(_PLAIN).split())
    return Profile(text=text, words=spoken, global_features=features(wave, codec.sample_rate_hz))


# Features


def features(wave: np.ndarray, sample_rate_hz: int) -> WordFeatures:
    """Energy (RMS), spectral centroid over half the sample rate, and mean pitch over 75 to 600 Hz, as percentages."""
    if not len(wave) or not np.isfinite(wave).all():
        return WordFeatures(energy=0, spectral_centroid=0, pitch=0)
    sound = torch.from_numpy(np.ascontiguousarray(wave, dtype=np.float32))
    spectrum = torch.fft.rfft(sound).abs()
    frequencies = torch.linspace(0, 1, len(spectrum))  # of half the sample rate
    parts = {
        "energy": sound.square().mean().sqrt(),
        "spectral_centroid": (frequencies * spectrum).sum() / (spectrum.sum() + 1e-10),
        "pitch": ((_pitch(sound, sample_rate_hz).mean() - MIN_HZ) / (MAX_HZ - MIN_HZ)).clamp(0, 1),
    }
    return WordFeatures(**{name: min(100, round(100 * float(value))) for name, value in parts.items()})


def _pitch(sound: torch.Tensor, sample_rate_hz: int) -> torch.Tensor:
    """(windows,) pitch in Hz by autocorrelation, clamped to a voice's range; a window without a pitch is at the floor.

    A sound shorter than a window is filled up to one.
    """
    padding = max((FRAME - len(sound) % HOP) % HOP, FRAME - len(sound))
    windows = torch.nn.functional.pad(sound, (0, padding)).unfold(0, FRAME, HOP) * torch.hann_window(FRAME)
    power = torch.fft.rfft(windows, n=2 * FRAME).abs().square()
    autocorrelation = torch.fft.irfft(power)[:, :FRAME]
    first, last = max(1, int(sample_rate_hz / MAX_HZ)), min(FRAME, int(sample_rate_hz / MIN_HZ))
    peak, lag = autocorrelation[:, first:last].max(dim=1)
    lag = (lag + first).clamp(max=FRAME - 2)
    before, at, after = (autocorrelation.gather(1, (lag + shift)[:, None])[:, 0] for shift in (-1, 0, 1))
    offset = 0.5 * (before - after) / (before - 2 * at + after + 1e-8)  # top of the parabola through the three
    voiced = peak / (autocorrelation[:, 0] + 1e-8) > VOICED
    return torch.where(voiced, sample_rate_hz / (lag + offset), 0.0).clamp(MIN_HZ, MAX_HZ)
