"""The stages of the graph, one thin module each: read a section of the params, call the library, write the outs."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

# Idle OpenMP threads sleep instead of spinning: on a busy machine spinning slows small tensors several times.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch loads, so set before it


def run(main: Callable[[], None]) -> None:
    """Run a stage; a ValueError, a fault of the input, ends it with its message and not with a stack of frames."""
    try:
        main()
    except ValueError as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        sys.exit(f"error: {error}\n(raised by {frame.name} in {Path(frame.filename).name}, line {frame.lineno})")
