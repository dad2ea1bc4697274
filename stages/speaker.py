"""Reference clip -> speaker embedding: data/speaker/{embedding.json,manifest.json}.

    python -m stages.speaker
"""

from __future__ import annotations

from pathlib import Path

import torch

from stages import run
from swaralign.assets import resolve_file
from swaralign.params import load_params
from swaralign.speaker import build_speaker

CHECKPOINT, OUT = Path("data/merge/checkpoint"), Path("data/speaker")


def main() -> None:
    params = load_params()
    torch.set_num_threads(params.runtime.threads)
    build_speaker(resolve_file("reference", params.assets), CHECKPOINT, params.speaker, OUT)


if __name__ == "__main__":
    run(main)
