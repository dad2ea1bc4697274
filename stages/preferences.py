"""The pool -> pairs for DPO and labelled takes for KTO: data/preferences/{pairs.parquet,labels.parquet,manifest.json}.

    python -m stages.preferences
"""

from __future__ import annotations

from pathlib import Path

from stages import run
from swaralign.params import load_params
from swaralign.preferences import write_preferences

POOL, OUT = Path("data/candidates/candidates.parquet"), Path("data/preferences")


def main() -> None:
    write_preferences(OUT, POOL, load_params().preferences)


if __name__ == "__main__":
    run(main)
