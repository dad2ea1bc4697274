"""Paired statistics of two voices on the same prompts: an interval and a p-value for the difference of a metric.

A metric is a ratio of sums over prompts, kept as a (prompts, 2) array of each prompt's numerator and denominator: so a
corpus rate (edits over words) and a mean (a sum over takes) are one case. A prompt's draws are not independent
evidence, so prompts are what is resampled and what is swapped, never takes.
"""

from __future__ import annotations

import numpy as np

_TIE = 1e-12  # sums in another order differ by less


def difference(voice: np.ndarray, start: np.ndarray) -> float:
    """The voice's metric less the start's; both (prompts, 2)."""
    return float(_difference(voice.sum(0), start.sum(0)))


def resample_prompts(prompts: int, resamples: int, seed: int) -> np.ndarray:
    """(resamples, prompts) float64: how often each prompt stands in a draw of as many prompts with replacement."""
    shares = np.full(prompts, 1 / prompts)
    return np.random.default_rng(seed).multinomial(prompts, shares, size=resamples).astype(np.float64)


def bootstrap_interval(
    voice: np.ndarray, start: np.ndarray, weights: np.ndarray, confidence: float
) -> tuple[float, float]:
    """The percentile interval of the difference (Efron & Tibshirani 1993, chapter 13); `weights`: (resamples, prompts).

    A resample in which a voice has nothing measured (denominator 0) has no difference and is left out.
    """
    tail = (1 - confidence) / 2
    low, high = np.nanquantile(_difference(weights @ voice, weights @ start), [tail, 1 - tail])
    return float(low), float(high)


def swap_prompts(prompts: int, resamples: int, seed: int) -> np.ndarray:
    """(swaps, prompts) float64 of 0 and 1: on which prompts the two voices change places; the first row is none.

    Every one of the 2^prompts ways if they are no more than `resamples`, else that many at random besides the first:
    counting what was observed among them is the usual correction by one (Phipson & Smyth 2010).
    """
    if 2**prompts <= resamples:
        return (np.arange(2**prompts)[:, None] >> np.arange(prompts) & 1).astype(np.float64)
    drawn = np.random.default_rng(seed).integers(0, 2, size=(resamples, prompts))
    return np.concatenate([np.zeros((1, prompts)), drawn])


def sign_flip_p(voice: np.ndarray, start: np.ndarray, swaps: np.ndarray) -> float:
    """Two-sided p-value of the difference: the share of `swaps` under which it is at least as large either way.

    For a mean over equally many takes a swap flips the sign of a prompt's difference, hence the name. A swap that
    leaves a voice with nothing measured counts as large.
    """
    moved = swaps @ (start - voice)
    swapped = _difference(voice.sum(0) + moved, start.sum(0) - moved)
    return float(np.mean(~(np.abs(swapped) < abs(difference(voice, start)) - _TIE)))


def _difference(voice: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Of (..., 2) sums; not a number where a denominator is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return voice[..., 0] / voice[..., 1] - start[..., 0] / start[..., 1]
