"""What a voice family is measured with at full size: random checkpoints, speakers, the length of its takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import full_size, full_size_outetts


@dataclass(frozen=True)
class Family:
    """`micro`: the repository's own checkpoint. `write_base`: writes one of the published shapes, from a seed.
    `speaker`: one for a checkpoint."""

    micro: Path
    write_base: Callable[[Path, int], None]
    speaker: Callable[[Path], Any]


FAMILIES = {
    "qwen3_tts": Family(full_size.MICRO, full_size.write_base, full_size.speaker),
    "outetts": Family(full_size_outetts.MICRO, full_size_outetts.write_base, full_size_outetts.speaker),
}
