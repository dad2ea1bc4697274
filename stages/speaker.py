"""Reference clip -> what the voice speaks as, an embedding or a profile: data/speaker/{embedding.json,manifest.json}.

    python -m stages.speaker

With speaker.dataset the clip is that of a training prompt, which is written too: data/speaker/reference.flac.
"""

from __future__ import annotations

from pathlib import Path

import torch

from stages import run
from swaralign.assets import open_corpus, resolve, resolve_file
from swaralign.params import ProfileParams, load_params
from swaralign.speaker import build_speaker
from swaralign.speaker_profile import build_profile
from swaralign.speaker_row import build_speaker_of_row

CHECKPOINT, TRAIN, OUT = Path("data/merge/checkpoint"), Path("data/split/train.parquet"), Path("data/speaker")


def main() -> None:
    params = load_params()
    torch.set_num_threads(params.runtime.threads)
    speaker, assets = params.speaker, params.assets
    if isinstance(speaker, ProfileParams):
        build_profile(resolve_file("reference", assets), CHECKPOINT, resolve("asr", assets), speaker, OUT)
    elif speaker.dataset:
        build_speaker_of_row(open_corpus(assets), TRAIN, CHECKPOINT, speaker, speaker.dataset.speaker_id, OUT)
    else:
        build_speaker(resolve_file("reference", assets), CHECKPOINT, speaker, OUT)


if __name__ == "__main__":
    run(main)
