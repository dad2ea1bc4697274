"""MLX adapter -> PEFT adapter -> merged checkpoint: data/merge/{adapter,checkpoint,manifest.json}.

    python -m stages.merge

Without an adapter the base is the voice that training starts from, as it is.
"""

from __future__ import annotations

from pathlib import Path

import torch

from stages import run
from swaralign.assets import resolve
from swaralign.merge import build_merge
from swaralign.params import load_params

OUT = Path("data/merge")


def main() -> None:
    params = load_params()
    torch.set_num_threads(params.runtime.threads)
    base = resolve("base", params.assets)
    adapter = resolve("adapter", params.assets) if params.assets.adapter else None
    build_merge(base, adapter, params.assets, params.merge, OUT)


if __name__ == "__main__":
    run(main)
