"""Reference clip -> what the voice speaks as, an embedding or a profile: data/speaker/{embedding.json,manifest.json}.

    python -m stages.speaker
"""

from __future__ import annotations

from pathlib import Path

import torch

from stages import run
from swaralign.assets import resolve, resolve_file
from swaralign.params import ProfileParams, load_params
from swaralign.policy.outetts_profile import build_profile
from swaralign.speaker import build_speaker

CHECKPOINT, OUT = Path("data/merge/checkpoint"), Path("data/speaker")


def main() -> None:
    params = load_params()
    torch.set_num_threads(params.runtime.threads)
    reference = resolve_file("reference", params.assets)
    if isinstance(params.speaker, ProfileParams):
        build_profile(reference, CHECKPOINT, resolve("asr", params.assets), params.speaker, OUT)
    else:
        build_speaker(reference, CHECKPOINT, params.speaker, OUT)


if __name__ == "__main__":
    run(main)
