"""Rows of the corpus -> training and held-out prompts: data/split/{train.parquet,validation.parquet,manifest.json}.

    python -m stages.split
"""

from __future__ import annotations

from pathlib import Path

from stages import run
from swaralign.assets import open_corpus
from swaralign.params import load_params
from swaralign.split import build_split

OUT = Path("data/split")


def main() -> None:
    params = load_params()
    build_split(open_corpus(params.assets), params.assets.prompts, params.split, OUT)


if __name__ == "__main__":
    run(main)
