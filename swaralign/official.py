"""The official Qwen3-TTS class, imported without the notices that its package prints about optional tools."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def _muted() -> Iterator[None]:
    """Silences this process and its children on both streams; an exception still comes through."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    void = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(void, 1)
        os.dup2(void, 2)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, descriptor in enumerate(kept, start=1):
            os.dup2(descriptor, stream)
            os.close(descriptor)
        os.close(void)


with _muted():
    from qwen_tts.core.models.modeling_qwen3_tts import Qwen3TTSForConditionalGeneration

logging.getLogger("qwen_tts").setLevel(logging.WARNING)  # it remarks on every configuration that it reads

__all__ = ["Qwen3TTSForConditionalGeneration"]
