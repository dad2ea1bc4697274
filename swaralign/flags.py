"""The flags that a take can carry: here, apart from what sets them, for those who read takes and load no model."""

from __future__ import annotations

GUARD_REASONS = ("empty", "nonfinite", "silent", "constant", "too_short", "too_long")  # set by `rewards.guard`
FAILURES = (*GUARD_REASONS, "truncated")  # of a failed take: the worst composite, no model is asked
FLAGS = (*FAILURES, "repeats")
