"""Runs one command in a process group of its own, and leaves none of it behind.

    python flows/supervisor.py GRACE_S COMMAND [ARGUMENT ...]

Standard input is a leash that the caller holds: when it is closed, which happens however the caller ends, SIGKILL
included, the group gets SIGTERM and, after the grace time, SIGKILL. SIGTERM to this process does the same. The exit
status is the command's own, 128 + N after signal N.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from types import FrameType

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
POLL_S = 0.05


class LetGoError(Exception):
    """The leash was let go: stop the command."""


def supervise(command: list[str], grace_s: float) -> int:
    """Run the command until it ends or the leash is let go; returns its exit status. Nothing of its group remains."""
    if sys.platform == "linux":  # orphans of the group become our children, so that their end can be seen
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, _let_go)
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        threading.Thread(target=_watch_leash, daemon=True).start()
        status = process.wait()
    except LetGoError:
        status = -signal.SIGTERM
    stop_group(process.pid, grace_s)
    return status if status >= 0 else 128 - status


def stop_group(group: int, grace_s: float) -> None:
    """SIGTERM to a process group, SIGKILL to what is left of it after the grace time; returns when it is empty."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _signal_group(group, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while _alive(group):
        if time.monotonic() > deadline:
            _signal_group(group, signal.SIGKILL)
        time.sleep(POLL_S)


def _watch_leash() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _let_go(_signal: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise LetGoError


def _alive(group: int) -> bool:
    """Whether a group has a process that is not yet reaped, those that are ours being reaped first."""
    try:
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
    return _signal_group(group, 0)


def _signal_group(group: int, number: int) -> bool:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(supervise(sys.argv[2:], float(sys.argv[1])))
