"""What a take is worth: `scorer` decides it, for the pool, training, validation and evaluation alike.

In a notebook: `from swaralign.rewards import score`.
"""

from __future__ import annotations

from typing import Any


def score(audio: Any, target_text: str, sample_rate: int, **options: Any) -> dict[str, Any]:
    """One take's sub-metrics and composite, in one call; see `notebook.score` for the options and what it raises."""
    from swaralign.rewards import notebook  # loads the models' libraries, which a text rule does not need

    return notebook.score(audio, target_text, sample_rate, **options)
