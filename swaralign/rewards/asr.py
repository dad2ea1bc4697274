"""What a take says: faster-whisper (CTranslate2) with every choice fixed: a transcript depends on its take alone.

The language is forced, decoding is a beam at temperature 0 with no fallback ladder, no previous text, no time stamps
and no voice detection. Three things make it several times faster than `WhisperModel.transcribe` on a CPU: the encoder
sees `window_s` seconds instead of 30 (below 8 the transcripts loop), each thread works on a batch of its own, and
within a batch takes are encoded one by one, since the attention of one take fits the cache, then decoded side by side,
since a decoding step costs nearly the same for eight takes as for one.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ctranslate2
import numpy as np
from faster_whisper import WhisperModel
from faster_whisper.tokenizer import Tokenizer
from faster_whisper.transcribe import get_compression_ratio, get_suppressed_tokens

from swaralign.audio import resample
from swaralign.params import AsrParams

MODEL_FILES = ("config.json", "model.bin", "tokenizer.json")
MAX_COMPRESSION_RATIO = 2.4  # Whisper's own threshold of a degenerate transcript (Radford et al. 2022, section 4.5)
_LOOP = re.compile(r"(?<!\S)(\S+(?: \S+)*?)(?: \1){3}(?!\S)")


class Transcriber:
    """A Whisper model that transcribes takes; the transcript of a take does not depend on its neighbours.

    Attributes:
        window_s: the longest take in seconds.
    """

    def __init__(
        self, model_dir: Path, params: AsrParams, threads: int, device: str, key: str = "reward.asr"
    ) -> None:
        """Load a CTranslate2 Whisper from a folder; `threads` batches are worked on at once on a CPU.

        `key`: where its params stand, for messages. Raises ValueError if a model file is missing, or the device or the
        model cannot do what the params ask.
        """
        _check(model_dir, params, device, key)
        workers = threads if device == "cpu" else 1
        self.window_s = params.window_s
        self._params, self._key = params, key
        self._workers = workers
        self._encode_batch = 1 if device == "cpu" else params.batch_size
        self._whisper = WhisperModel(
            str(model_dir),
            device=device,
            device_index=int(os.environ.get("LOCAL_RANK", "0")) if device == "cuda" else 0,  # of several processes
            compute_type=params.compute_type,
            cpu_threads=1,
            num_workers=workers,
            local_files_only=True,
        )
        multilingual = self._whisper.model.is_multilingual
        if params.language not in self._whisper.supported_languages:
            known = ", ".join(self._whisper.supported_languages)
            raise ValueError(f"{key}.language is {params.language!r}; the Whisper in {model_dir} knows {known}")
        self._tokenizer = Tokenizer(self._whisper.hf_tokenizer, multilingual, "transcribe", params.language)
        self._prompt = self._whisper.get_prompt(self._tokenizer, [], without_timestamps=True)
        self._suppressed = get_suppressed_tokens(self._tokenizer, [-1])

    def transcribe(self, waves: Sequence[np.ndarray], sample_rate_hz: int) -> list[str]:
        """The transcript of each (samples,) float32 wave. Raises ValueError if one is longer than the window."""
        for index, wave in enumerate(waves):
            if len(wave) > self.window_s * sample_rate_hz:
                raise ValueError(
                    f"wave {index} lasts {len(wave) / sample_rate_hz:.2f} s, longer than {self._key}.window_s "
                    f"{self.window_s}; raise that, or lower rollout.max_frames"
                )
        size = _batch_size(len(waves), self._params.batch_size, self._workers)
        batches = [list(waves[start : start + size]) for start in range(0, len(waves), size)]
        with ThreadPoolExecutor(self._workers) as pool:
            texts = pool.map(lambda batch: self._transcribe_batch(batch, sample_rate_hz), batches)
            return [text for batch in texts for text in batch]

    def _transcribe_batch(self, waves: list[np.ndarray], sample_rate_hz: int) -> list[str]:
        features = np.stack([self._features(wave, sample_rate_hz) for wave in waves])
        results = self._whisper.model.generate(
            self._encode(features),
            [self._prompt] * len(waves),
            beam_size=self._params.beam_size,
            max_length=len(self._prompt) + self._params.max_tokens,
            suppress_blank=True,
            suppress_tokens=self._suppressed,
        )
        return [self._tokenizer.decode(result.sequences_ids[0]).strip() for result in results]

    def _features(self, wave: np.ndarray, sample_rate_hz: int) -> np.ndarray:
        """(mels, frames) log-mel spectrogram of a wave that silence fills up to the window, as Whisper was trained."""
        extractor = self._whisper.feature_extractor
        wave = resample(wave, sample_rate_hz, extractor.sampling_rate)
        frames = round(self.window_s * extractor.sampling_rate / extractor.hop_length)
        padded = np.zeros(frames * extractor.hop_length, np.float32)
        padded[: len(wave)] = wave[: len(padded)]
        return extractor(padded)[:, :frames]

    def _encode(self, features: np.ndarray) -> ctranslate2.StorageView:
        size = self._encode_batch
        encoded = [
            self._whisper.model.encode(ctranslate2.StorageView.from_array(features[start : start + size]))
            for start in range(0, len(features), size)
        ]
        return encoded[0] if len(encoded) == 1 else ctranslate2.StorageView.from_array(np.concatenate(encoded))


def repeats(transcript: str) -> bool:
    """Whether a transcript loops, as on noise: it compresses too well, or says a phrase four times in succession."""
    if not transcript:
        return False
    return get_compression_ratio(transcript) > MAX_COMPRESSION_RATIO or bool(_LOOP.search(transcript.lower()))


def load_cublas() -> None:
    """Load the cuBLAS of CUDA 12, which CTranslate2 asks for by name when it first needs it.

    PyTorch brings another version, and the package nvidia-cublas-cu12 keeps its own off the loader's path. Raises
    ValueError if there is none.
    """
    package = importlib.util.find_spec("nvidia.cublas") if importlib.util.find_spec("nvidia") else None
    folders = package.submodule_search_locations if package else None
    for name in ("libcublasLt.so.12", "libcublas.so.12"):
        installed = [path for folder in folders or () if (path := Path(folder) / "lib" / name).is_file()]
        try:
            ctypes.CDLL(str(installed[0]) if installed else name, ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise ValueError(f"runtime.device is cuda, for which faster-whisper needs {name}, found none ({error}); "
                             "`pip install nvidia-cublas-cu12` brings it") from None


def _check(model_dir: Path, params: AsrParams, device: str, key: str) -> None:
    missing = [name for name in MODEL_FILES if not (model_dir / name).is_file()]
    if missing:
        raise ValueError(
            f"the Whisper of {key} lacks {', '.join(missing)} in {model_dir}; install the packages, or put the files "
            "there, that its asset names (a CTranslate2 conversion such as Systran/faster-whisper-base)"
        )
    if device == "cuda" and not ctranslate2.get_cuda_device_count():
        raise ValueError("runtime.device is cuda, but CTranslate2 finds no CUDA device; set it to cpu")
    if device == "cuda":
        load_cublas()
    able = ctranslate2.get_supported_compute_types(device)
    if params.compute_type not in able:
        raise ValueError(
            f"{key}.compute_type is {params.compute_type!r}; the {device} here can do {', '.join(sorted(able))}"
        )


def _batch_size(takes: int, limit: int, workers: int) -> int:
    """The size, at most `limit`, that gives every worker the same number of batches of nearly equal size."""
    batches = workers * math.ceil(takes / (workers * limit))
    return max(1, math.ceil(takes / max(1, batches)))
