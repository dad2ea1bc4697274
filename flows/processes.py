"""The processes of one flow run: each under a supervisor, its output a line at a time, all of them stopped together."""

from __future__ import annotations

import io
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

SUPERVISOR = Path(__file__).with_name("supervisor.py")


class Processes:
    """Runs commands and can stop them all. Nothing outlives this process: supervisors see its end by a closed pipe."""

    def __init__(self, grace_s: float) -> None:
        """`grace_s`: seconds between SIGTERM and SIGKILL."""
        self.grace_s = grace_s
        self.stopped = threading.Event()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()

    def run(self, command: list[str], cwd: Path, log: Callable[[str], None]) -> int:
        """Run a command to its end, handing every line of its stdout and stderr to `log`; returns its exit status.

        Each state of a progress bar is a line. Blank lines, and those that repeat the one before, are left out.
        """
        with self._lock:
            if self.stopped.is_set():
                return 128
            process = subprocess.Popen(
                [sys.executable, str(SUPERVISOR), str(self.grace_s), *command], cwd=cwd, env=environment(),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            )
            self._running.add(process)
        assert process.stdout is not None  # it was asked for
        try:
            lines = map(str.rstrip, io.TextIOWrapper(process.stdout, encoding="utf-8", errors="replace"))
            for line, _ in itertools.groupby(filter(None, lines)):
                log(line)
            return process.wait()
        finally:
            self._let_go(process)

    def stop(self) -> None:
        """Stop every running command, and let no other start; returns at once, `run` returns when they are gone."""
        with self._lock:
            self.stopped.set()
            running = list(self._running)
        for process in running:
            self._let_go(process)

    def _let_go(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._running.discard(process)
            if process.stdin is not None:
                process.stdin.close()


def environment() -> dict[str, str]:
    """That of this process: its Python first on the path, output unbuffered, bars seldom drawn, no DVC telemetry."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    seldom = {"TQDM_MININTERVAL": "10", **os.environ}  # seconds between two states of a progress bar
    return {**seldom, "PATH": path, "PYTHONUNBUFFERED": "1", "DVC_NO_ANALYTICS": "1"}
