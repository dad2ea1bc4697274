"""The composite reward: error rate, MOS and speaker similarity, each mapped to [0, 1], averaged by weight."""

from __future__ import annotations

import math

from swaralign.params import WeightsParams

WORST = 0.0  # composite of a failed take


def error_rate_term(rate: float) -> float:
    """1 - min(1, CER or WER)."""
    return 1.0 - min(1.0, rate)


def mos_term(mos: float) -> float:
    """A mean opinion score from [1, 5], clamped, to [0, 1]."""
    return (min(5.0, max(1.0, mos)) - 1.0) / 4.0


def speaker_similarity_term(cosine: float) -> float:
    """A cosine from [-1, 1] to [0, 1]."""
    return (cosine + 1.0) / 2.0


def composite(error_rate: float | None, mos: float | None, cosine: float | None, weights: WeightsParams) -> float:
    """The weighted mean of the terms; weights are normalised to sum 1.

    A metric may be None only if its weight is 0: a take cannot be rewarded for what was not measured (ValueError),
    nor for what is not finite.
    """
    for name, value in (("error rate", error_rate), ("MOS", mos), ("speaker similarity", cosine)):
        if value is not None and not math.isfinite(value):
            raise ValueError(f"the {name} is {value}: its engine made no number of this take")
    terms = {
        "error_rate": (weights.error_rate, None if error_rate is None else error_rate_term(error_rate)),
        "mos": (weights.mos, None if mos is None else mos_term(mos)),
        "speaker_similarity": (weights.speaker_similarity, None if cosine is None else speaker_similarity_term(cosine)),
    }
    total = 0.0
    for name, (weight, term) in terms.items():
        if weight and term is None:
            raise ValueError(f"reward.weights.{name} is {weight}, but {name} was not measured")
        total += weight * (term or 0.0)
    return total / sum(weight for weight, _ in terms.values())
