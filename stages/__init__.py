"""The stages of the graph, one thin module each: read a section of the params, call the library, write the outs."""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

# An idle OpenMP thread spins for some microseconds, then sleeps. Spinning longer slows a busy machine several times,
# sleeping at once slows small tensors as much. Read when torch loads, so set before it.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# Of several processes the first one shows progress; read when tqdm loads.
if os.environ.get("RANK", "0") != "0":
    os.environ["TQDM_DISABLE"] = "1"

OURS = Path(__file__).resolve().parent.parent / "swaralign"


def run(main: Callable[[], None]) -> None:
    """Run a stage; a ValueError, a fault of the input, ends it with its message and not with a stack of frames.

    SIGTERM ends it as an exception does, so that half-written outs are removed; one of several processes it ends at
    once, since that may wait for the others.
    """
    if "LOCAL_RANK" not in os.environ:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        main()
    except ValueError as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        if OURS not in Path(frame.filename).parents:
            raise  # not a check of ours: the whole stack is wanted
        sys.exit(f"error: {error}\n(raised by {frame.name} in {Path(frame.filename).name}, line {frame.lineno})")
