"""The flags that a take can carry: here, apart from what sets them, for those who read takes and load no model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

GUARD_REASONS = ("empty", "nonfinite", "silent", "constant", "too_short", "too_long")  # set by `rewards.guard`
FAILURES = (*GUARD_REASONS, "truncated")  # of a failed take: the worst composite, no model is asked
FLAGS = (*FAILURES, "repeats")


def is_failed(flags: Iterable[str]) -> bool:
    """Whether a take with these flags failed."""
    return any(flag in FAILURES for flag in flags)


def count_flags(takes: Sequence[Iterable[str]]) -> dict[str, Any]:
    """Of the flags of takes: how many takes failed (`failed`), and how many carry each of `FLAGS` (`flags`)."""
    return {
        "failed": sum(is_failed(flags) for flags in takes),
        "flags": {flag: sum(flag in flags for flags in takes) for flag in FLAGS},
    }
