"""Seeds of single draws, derived from a run's seed and what a draw is for, so that none depends on its neighbours."""

from __future__ import annotations

import hashlib


def take_seed(run_seed: int, *parts: str | int) -> int:
    """A 63-bit seed for one draw: the same for the same run seed and parts, whatever else is drawn."""
    text = "\x1f".join(str(part) for part in (run_seed, *parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
