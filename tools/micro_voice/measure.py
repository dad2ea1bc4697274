"""Word error rate of a voice, bare or with an adapter merged in memory, on the last Read rows of a corpus.

    python -m tools.micro_voice.measure --base data/demo/base --adapter data/demo/sft_adapter_mlx \
        --reference data/demo/reference.flac --corpus data/demo/corpus.parquet --whisper WHISPER --temperature 1.0 0.8
"""

from __future__ import annotations

import argparse
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path

import jiwer
import numpy as np
import pyarrow.parquet as pq
import soundfile
import soxr
import torch
from ctranslate2 import StorageView
from faster_whisper import WhisperModel
from faster_whisper.tokenizer import Tokenizer
from numpy.typing import NDArray
from qwen_tts import Qwen3TTSModel
from safetensors.torch import load_file
from whisper_normalizer.english import EnglishTextNormalizer

from tools.micro_voice.lora import merge_adapter

FRAME_BUDGET = 80  # codec frames a take, 6.4 s
WINDOW_S = 10  # mel window given to Whisper; the longest take fits
SAMPLE_RATE_HZ = 24_000
WHISPER_RATE_HZ = 16_000

Wave = NDArray[np.float32]


@dataclass(frozen=True)
class Sampling:
    """Temperatures of codebook 0 and of the residual books, top-k and top-p off; residual 0 means greedy."""

    temperature: float
    residual: float

    def options(self) -> dict[str, float | int | bool]:
        """Keyword arguments of the official `generate`."""
        return {
            "temperature": self.temperature,
            "top_k": 0,
            "top_p": 1.0,
            "repetition_penalty": 1.0,
            "subtalker_dosample": self.residual > 0,
            "subtalker_temperature": self.residual or 1.0,
            "subtalker_top_k": 0,
            "subtalker_top_p": 1.0,
            "max_new_tokens": FRAME_BUDGET,
        }


class Ear:
    """Whisper, int8, beam 1, English, temperature 0, over a mel window shorter than its usual 30 s."""

    def __init__(self, folder: Path, threads: int) -> None:
        self.whisper = WhisperModel(str(folder), device="cpu", compute_type="int8", cpu_threads=threads)
        self.tokenizer = Tokenizer(self.whisper.hf_tokenizer, True, task="transcribe", language="en")
        self.prompt = [*self.tokenizer.sot_sequence, self.tokenizer.no_timestamps]

    def mel(self, wave: Wave) -> NDArray[np.float32]:
        """Log-mel features (bins, 100 * WINDOW_S) of a 24 kHz waveform."""
        audio = soxr.resample(wave, SAMPLE_RATE_HZ, WHISPER_RATE_HZ)[: WINDOW_S * WHISPER_RATE_HZ]
        padded = np.pad(audio, (0, WINDOW_S * WHISPER_RATE_HZ - len(audio)))
        return self.whisper.feature_extractor(padded, padding=0)[:, : 100 * WINDOW_S].astype(np.float32)

    def transcribe(self, waves: list[Wave], batch: int = 8) -> list[str]:
        """One transcript per waveform."""
        heard = []
        for start in range(0, len(waves), batch):
            mels = np.ascontiguousarray(np.stack([self.mel(wave) for wave in waves[start : start + batch]]))
            encoded = self.whisper.model.encode(StorageView.from_array(mels))
            results = self.whisper.model.generate(
                encoded, [self.prompt] * len(mels), beam_size=1, max_length=64, suppress_blank=True
            )
            heard += [self.tokenizer.decode(result.sequences_ids[0]).strip() for result in results]
        return heard


NORMALISER = EnglishTextNormalizer()


def normalise(text: str) -> str:
    """Whisper's English normaliser, after clock times were written one way: `2:00` and `two o'clock` agree."""
    text = re.sub(r"(\d+):00", r"\1 oclock", text.lower().replace("’", "'"))
    return str(NORMALISER(text.replace("o'clock", "oclock")))


def read_texts(corpus: Path, count: int) -> list[str]:
    """Texts of the last `count` Read rows; `normalized` where it is not empty, else `text`."""
    rows = pq.read_table(corpus, columns=["scenario", "normalized", "text"]).to_pylist()
    return [row["normalized"] or row["text"] for row in rows if row["scenario"] == "Read"][-count:]


def load_voice(base: Path, adapter: Path | None) -> Qwen3TTSModel:
    """The voice in float32, with the adapter, if any, merged into its weights."""
    voice = Qwen3TTSModel.from_pretrained(str(base), dtype=torch.float32)
    if adapter is not None:
        scale = json.loads((adapter / "adapter_config.json").read_text())["lora_parameters"]["scale"]
        merge_adapter(voice.model, load_file(adapter / "adapters.safetensors"), scale)
    return voice


def speak(voice: Qwen3TTSModel, texts: list[str], reference: Path, sampling: Sampling, seed: int) -> list[Wave]:
    """One take of each text in the non-streaming, x-vector only, language Auto layout."""
    prompt = voice.create_voice_clone_prompt(soundfile.read(reference, dtype="float32"), x_vector_only_mode=True)
    torch.manual_seed(seed)
    waves, _ = voice.generate_voice_clone(
        texts,
        language="Auto",
        voice_clone_prompt=prompt * len(texts),
        non_streaming_mode=True,
        **sampling.options(),
    )
    return list(waves)


def report(texts: list[str], heard: list[str], waves: list[Wave]) -> str:
    """Corpus-level WER and CER, the share of takes that hit the frame budget, and the mean length in seconds."""
    said, got = [normalise(text) for text in texts], [normalise(text) for text in heard]
    seconds = [len(wave) / SAMPLE_RATE_HZ for wave in waves]
    truncated = np.mean([s * 12.5 >= FRAME_BUDGET - 1 for s in seconds])
    wer, cer = 100 * jiwer.wer(said, got), 100 * jiwer.cer(said, got)
    return f"WER {wer:.1f} % CER {cer:.1f} % truncated {truncated:.0%} mean {np.mean(seconds):.2f} s"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--adapter", type=Path, help="mlx-lm adapter folder")
    parser.add_argument("--reference", type=Path, required=True, help="24 kHz mono clip")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--whisper", type=Path, required=True, help="faster-whisper model folder")
    parser.add_argument("--count", type=int, default=48, help="sentences, one take each")
    parser.add_argument("--temperature", type=float, nargs="+", default=[1.0])
    parser.add_argument("--residual", type=float, nargs="+", help="default: the temperature itself; 0 is greedy")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=0, help="transcripts to print")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    texts = read_texts(args.corpus, args.count)
    voice, ear = load_voice(args.base, args.adapter), Ear(args.whisper, args.threads)
    for temperature in args.temperature:
        for residual in args.residual or [temperature]:
            began = time.monotonic()
            waves = speak(voice, texts, args.reference, Sampling(temperature, residual), args.seed)
            spoke_s = time.monotonic() - began
            heard = ear.transcribe(waves)
            took = f"({spoke_s:.0f} s to speak, {time.monotonic() - began - spoke_s:.0f} s to transcribe)"
            name = f"{args.base.name} {args.adapter.name if args.adapter else 'bare'}"
            print(f"{name} temperature {temperature:g}/{residual:g} {report(texts, heard, waves)} {took}", flush=True)
            for text, guess in list(zip(texts, heard, strict=True))[: args.show]:
                print(f"    {text} | {guess}")


if __name__ == "__main__":
    main()
