"""What can be served, and how it is found: a reward of ours, an entry point, or any `module:attribute`."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

from swaralign.params import WeightsParams
from swaralign.scoring.messages import AudioTake, Scalar

GROUP = "swaralign.scorers"  # of the entry points
# Ours, by name: what each changes of a params file's section `reward`.
REWARDS: dict[str, dict[str, Any]] = {
    "composite": {},
    "whisper_cer": {"weights": WeightsParams(error_rate=1.0, mos=0.0, speaker_similarity=0.0), "metric": "cer"},
    "whisper_wer": {"weights": WeightsParams(error_rate=1.0, mos=0.0, speaker_similarity=0.0), "metric": "wer"},
    "mos": {"weights": WeightsParams(error_rate=0.0, mos=1.0, speaker_similarity=0.0)},
    "speaker_similarity": {"weights": WeightsParams(error_rate=0.0, mos=0.0, speaker_similarity=1.0)},
}


class AudioScorer(ABC):
    """A scorer that the server can serve. One thread builds it and calls `score`."""

    def check(self, take: AudioTake) -> None:  # noqa: B027 (most scorers take everything)
        """Raise ValueError with the reason if a take cannot be scored: its sender gets a 400. Must be fast."""

    @abstractmethod
    def score(self, takes: Sequence[AudioTake]) -> Sequence[float | Mapping[str, Scalar]]:
        """Of each take a finite score, higher better, or {"score": ..., further finite scalars}, in their order.

        An exception fails a take of its own with a 500; a batch that raises is asked again take by take.
        """


def find_factory(name: str) -> Callable[..., AudioScorer]:
    """What `name` stands for: an entry point of the group `swaralign.scorers`, or `module:attribute`.

    It is called with the scorer's settings as keywords. Raises ValueError if there is no such thing.
    """
    points = {point.name: point for point in metadata.entry_points(group=GROUP)}
    if name in points:
        return _callable(points[name].load(), name)
    module, colon, attribute = name.partition(":")
    if not colon or not module or module.startswith("."):
        installed = f"; installed: {', '.join(sorted(points))}" if points else ""
        raise ValueError(f"no scorer {name!r}{installed}; name one of your own as module:attribute")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(f"no scorer {name!r}: {error}; is its folder on PYTHONPATH?") from error
    return _callable(found, name)


def _callable(found: Any, name: str) -> Callable[..., AudioScorer]:
    if not callable(found):
        raise ValueError(f"the scorer {name!r} is a {type(found).__name__}; it must be a class or a function that "
                         "returns an AudioScorer")
    factory: Callable[..., AudioScorer] = found
    return factory
