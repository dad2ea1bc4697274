"""Scorers behind the audio scorer protocol, version "1": a client and a server, which load neither torch nor a model.

A scorer of one's own is an `AudioScorer`; docs/scorer.md shows one.
"""

from swaralign.scoring.messages import AudioTake, Scalar
from swaralign.scoring.plugins import AudioScorer

__all__ = ["AudioScorer", "AudioTake", "Scalar"]
