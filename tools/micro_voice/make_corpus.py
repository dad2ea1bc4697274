"""Lay clips out as an IndicVoices-R-shaped corpus: 24 columns, rows that the published rules reject, edge values.

Audio, text, duration, samples, pitch and speaking rate are taken or measured from the clips; snr, c50 and cer are
drawn from a seeded generator.
The first `window` Read rows speak training sentences, the Read rows after them held-out ones.

    python -m tools.micro_voice.make_corpus --clips clips.parquet --out data/demo/corpus.parquet
"""

from __future__ import annotations

import argparse
import io
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import librosa
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import soundfile
from datasets import Audio, Features, Value
from numpy.typing import NDArray

SAMPLE_RATE_HZ = 24_000
ABOUT = ["age_group", "job_type", "qualification", "area", "district", "state", "occupation"]
KINDS = {
    **dict.fromkeys(["text", "lang"], "string"),
    "samples": "int64",
    **dict.fromkeys(["verbatim", "normalized", "speaker_id", "scenario", "task_name", "gender", *ABOUT], "string"),
    "audio": "audio",
    **dict.fromkeys(["utterance_pitch_mean", "utterance_pitch_std", "snr", "c50", "speaking_rate"], "float32"),
    "cer": "string",
    "duration": "float64",
}

Wave = NDArray[np.float32]


@dataclass
class Clip:
    """A sentence and its audio: `flac` as given, replaced when the audio is edited. key: h... is held out."""

    key: str
    text: str
    flac: bytes

    def wave(self) -> Wave:
        """Samples at 24 kHz, float32."""
        return np.asarray(soundfile.read(io.BytesIO(self.flac), dtype="float32")[0])


@dataclass(frozen=True)
class Fault:
    """An edit that makes a row worth testing, and how many rows get it in the window and after it."""

    name: str
    window: int
    after: int
    columns: dict[str, Any] = field(default_factory=dict)


LOW_SNR = "low_snr"
FAULTS = [
    # rejected by the published rules
    Fault("short", 4, 2),
    Fault("long", 2, 0),
    Fault("null_duration", 1, 0, {"duration": None}),
    Fault(LOW_SNR, 24, 11),
    Fault("null_snr", 4, 2, {"snr": None}),
    Fault("nan_snr", 2, 1, {"snr": float("nan")}),
    Fault("infinite_snr", 1, 0, {"snr": float("inf")}),
    Fault("no_text", 1, 0, {"text": "", "normalized": "  "}),
    # accepted
    Fault("null_normalized", 6, 4, {"normalized": None}),
    Fault("empty_normalized", 4, 3, {"normalized": ""}),
    Fault("snr_at_bound", 2, 1, {"snr": 20.0}),
    Fault("shortest", 1, 0),
    Fault("longest", 1, 0),
]


def encode(wave: Wave) -> bytes:
    """16-bit FLAC at 24 kHz."""
    target = io.BytesIO()
    soundfile.write(target, wave, SAMPLE_RATE_HZ, format="FLAC", subtype="PCM_16")
    return target.getvalue()


def fit_length(clip: Clip, seconds: float) -> Clip:
    """Cut the clip, or lengthen it with silence, to exactly `seconds`."""
    length = round(seconds * SAMPLE_RATE_HZ)
    wave = clip.wave()[:length]
    return Clip(clip.key, clip.text, encode(np.pad(wave, (0, length - len(wave)))))


def join(clips: list[Clip], seconds: float) -> Clip:
    """Clips said one after another until they last longer than `seconds`."""
    texts: list[str] = []
    waves: list[Wave] = []
    for clip in clips:
        if sum(map(len, waves)) > seconds * SAMPLE_RATE_HZ:
            break
        texts.append(clip.text)
        waves.append(clip.wave())
    return Clip(clips[0].key, " ".join(texts), encode(np.concatenate(waves)))


def edit_audio(clip: Clip, fault: str, spare: list[Clip], rng: random.Random) -> Clip:
    """The clip as the fault wants it, audio and text in keeping with each other as far as a cut allows."""
    if fault == "short":
        return fit_length(clip, rng.uniform(0.7, 0.98))
    if fault == "shortest":
        return fit_length(clip, 1.0)
    if fault == "longest":
        return fit_length(clip, 14.0)
    if fault == "long":
        return join([spare.pop() for _ in range(14)], 14.2)
    return clip


def pitch(wave: Wave) -> tuple[float, float]:
    """Mean and standard deviation in Hz of the YIN pitch over the louder half of the frames."""
    contour = librosa.yin(wave, fmin=60, fmax=300, sr=SAMPLE_RATE_HZ, frame_length=1024)
    loudness = librosa.feature.rms(y=wave, frame_length=1024, hop_length=256)[0]
    voiced = contour[loudness[: len(contour)] >= np.median(loudness)]
    return float(voiced.mean()), float(voiced.std())


def row_of(clip: Clip, scenario: str, fault: Fault | None, rng: random.Random) -> dict[str, Any]:
    """One row of the corpus."""
    wave = clip.wave()
    mean_hz, std_hz = pitch(wave)
    seconds = len(wave) / SAMPLE_RATE_HZ
    low = fault is not None and fault.name == LOW_SNR
    return {
        "text": clip.text,
        "lang": "en",
        "samples": len(wave),
        "verbatim": clip.text.lower().rstrip(".?"),
        "normalized": clip.text,
        "speaker_id": "micro-joe",
        "scenario": scenario,
        "task_name": "Simple sentences" if scenario == "Read" else "Everyday answers",
        "gender": "Male",
        **dict.fromkeys(ABOUT, "synthetic"),
        "audio": {"bytes": clip.flac, "path": f"{clip.key}.flac"},
        "utterance_pitch_mean": mean_hz,
        "utterance_pitch_std": std_hz,
        "snr": rng.uniform(8.0, 19.9) if low else rng.uniform(21.0, 60.0),
        "c50": rng.uniform(40.0, 60.0),
        "speaking_rate": sum(map(str.isalpha, clip.text)) / seconds,
        "cer": f"{rng.uniform(0.0, 0.08):.4f}",
        "duration": seconds,
        **(fault.columns if fault else {}),
    }


def read_rows(clips: list[Clip], faults: list[Fault | None], spare: list[Clip], rng: random.Random) -> list[Any]:
    """Read rows of the clips in their order, the faults spread over them at random."""
    rng.shuffle(faults)
    pairs = zip(clips, faults, strict=True)
    edited = [edit_audio(clip, fault.name, spare, rng) if fault else clip for clip, fault in pairs]
    return [row_of(clip, "Read", fault, rng) for clip, fault in zip(edited, faults, strict=True)]


def assign(count: int, side: str) -> list[Fault | None]:
    """The faults of one side of the corpus, filled up with None to `count` rows."""
    faults: list[Fault | None] = [fault for fault in FAULTS for _ in range(getattr(fault, side))]
    return faults + [None] * (count - len(faults))


def interleave(rows: list[Any], guests: list[Any], rng: random.Random) -> list[Any]:
    """Put the guests at random places between the rows, whose own order stays."""
    mixed = list(rows)
    for guest in guests:
        mixed.insert(rng.randrange(len(mixed)), guest)
    return mixed


def build(clips: list[Clip], window: int, extempore: int, seed: int) -> list[dict[str, Any]]:
    """All rows of the corpus, in order."""
    rng = random.Random(seed)
    held = [clip for clip in clips if clip.key.startswith("h")]
    known = [clip for clip in clips if not clip.key.startswith("h")]
    rng.shuffle(held)
    rng.shuffle(known)
    free, spare = known[window : window + extempore], known[window + extempore :]
    first = read_rows(known[:window], assign(window, "window"), spare, rng)
    later = read_rows(held, assign(len(held), "after"), spare, rng)
    guests = [row_of(clip, "Extempore", None, rng) for clip in free]
    half = extempore // 2
    return interleave(first, guests[:half], rng) + interleave(later, guests[half:], rng)


def features() -> Features:
    """The data set's columns in its order, audio as encoded bytes."""
    audio = Audio(sampling_rate=SAMPLE_RATE_HZ)
    return Features({name: audio if kind == "audio" else Value(kind) for name, kind in KINDS.items()})


def load_clips(path: Path) -> list[Clip]:
    """Clips of a parquet file with the columns key, text and flac."""
    return [Clip(**row) for row in pq.read_table(path, columns=["key", "text", "flac"]).to_pylist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clips", type=Path, required=True, help="parquet: key, text, flac (24 kHz mono)")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--window", type=int, default=240, help="Read rows of training sentences")
    parser.add_argument("--extempore", type=int, default=30, help="rows of the other scenario, spread over the corpus")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = build(load_clips(args.clips), args.window, args.extempore, args.seed)
    pq.write_table(pa.Table.from_pylist(rows, schema=features().arrow_schema), args.out, row_group_size=100)
    print(f"{args.out}: {len(rows)} rows")


if __name__ == "__main__":
    main()
