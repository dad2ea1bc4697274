"""Verify every file that comes from outside against its SHA-256: params.yaml -> data/assets.json.

    python -m stages.assets
"""

from __future__ import annotations

from pathlib import Path

from stages import run
from swaralign.artifacts import write_json
from swaralign.assets import pin_assets
from swaralign.params import load_params

OUT = Path("data/assets.json")


def main() -> None:
    write_json(OUT, pin_assets(load_params().assets))


if __name__ == "__main__":
    run(main)
