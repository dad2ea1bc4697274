"""One stage of one flow run: asks DVC whether it changed, has DVC run it, and says what became of it."""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
from prefect import State, get_run_logger
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.concurrency.sync import concurrency
from prefect.states import Cancelled, Completed

from flows.graph import BUSY_S, Stage, changes
from flows.patience import AWAY, RETRY_S, is_away
from flows.processes import Processes

GPU_LIMIT = "gpu"
SLOT_WAIT_S = 20.0  # between two looks at whether the run was stopped meanwhile
SLOT_LEASE_S = 60.0  # after which the slot of a run that was killed comes free; the least that Prefect takes
TAIL_LINES = 20
BUSY = "is busy, it is being blocked by"  # DVC, when another of its processes has the stage's files


class StageFailedError(RuntimeError):
    """A stage's command failed; the message holds its last lines and the command that reruns it."""


class Run:
    """What the stages of one flow run share."""

    def __init__(self, path: Path, stages: dict[str, Stage], processes: Processes, force: bool, pull: bool, push: bool
                 ) -> None:
        """`path`: the folder to run in; `pull`, `push`: whether DVC's default remote and its run cache take part."""
        self.path, self.stages, self.processes = path, stages, processes
        self.force, self.pull, self.push = force, pull, push
        self.changed: dict[str, list[str]] = {}
        self.seconds: dict[str, float] = {}

    def stage(self, name: str) -> State[None]:
        """Bring one stage up to date. Its state is `Completed` when it ran, `Cached` when its outs were there.

        Raises:
            StageFailedError: its command failed.
        """
        began = time.monotonic()
        try:
            self.changed[name] = changes(self.path, name)
            ran = bool(self.force or self.changed[name]) and self._reproduce(name)
            if self.push and not self.processes.stopped.is_set():
                self._dvc("push", "--run-cache", name, name=name)
        finally:
            self.seconds[name] = time.monotonic() - began
        if self.processes.stopped.is_set():
            return Cancelled(message="stopped with its flow run")
        if ran:
            return Completed()
        return Completed(name="Cached", message="its outs were in DVC's cache" if self.changed[name] else "unchanged")

    def _reproduce(self, name: str) -> bool:
        """Whether the stage's command ran: DVC may find the outs in its run cache or, with `pull`, in the remote."""
        options = [*(["--force"] if self.force else []), *(["--pull"] if self.pull else [])]
        slot = gpu_slot(self.processes.stopped.is_set, get_run_logger().warning)
        with slot if self.stages[name].gpu else contextlib.nullcontext():
            return self._dvc("repro", "--single-item", *options, name, name=name)

    def _dvc(self, *arguments: str, name: str) -> bool:
        """Run DVC, its output into the task's log; returns whether it ran the stage's command."""
        logger, tail, started = get_run_logger(), deque[str](maxlen=TAIL_LINES), False

        def log(line: str) -> None:
            nonlocal started
            started = started or line == f"Running stage '{name}':"
            tail.append(line)
            logger.info(line)

        command = ["dvc", "--wait-for-lock", *arguments]
        while status := self.processes.run([sys.executable, "-m", *command], self.path, log):
            if self.processes.stopped.is_set():
                return started
            if started or BUSY not in "\n".join(tail):
                raise StageFailedError(failure(name, status, command, self.path, tail))
            tail.clear()
            time.sleep(BUSY_S)
        return started


def failure(name: str, status: int, command: list[str], path: Path, tail: deque[str]) -> str:
    """What a person needs: which stage, its last words, and how to run it by hand."""
    last = "\n".join(f"    {line}" for line in tail)
    path_of_stages = f"{shlex.quote(str(Path(sys.executable).parent))}:\"$PATH\""  # of which DVC takes `python`
    return (f"{name} failed with exit status {status}; its last lines:\n{last}\n"
            f"By hand: cd {shlex.quote(str(path))} && PATH={path_of_stages} {shlex.join(command)}")


@contextlib.contextmanager
def gpu_slot(stopped: Callable[[], bool], warn: Callable[[str], None]) -> Iterator[None]:
    """A slot of the concurrency limit `gpu`, while the block runs; no limit of that name, no wait.

    A server that is away is waited for. One that goes away later takes no slot from a running stage: renewal and
    release are tried, and the lease expires.
    """
    slot = contextlib.ExitStack()
    while not stopped():
        try:
            slot.enter_context(concurrency(GPU_LIMIT, timeout_seconds=SLOT_WAIT_S, lease_duration=SLOT_LEASE_S,
                                           raise_on_lease_renewal_failure=False))
            break
        except TimeoutError:
            continue
        except ConcurrencySlotAcquisitionError as error:  # of which Prefect makes every error of the call
            if not is_away(error.__cause__):
                raise
            warn(AWAY.format(error.__cause__))
            time.sleep(RETRY_S)
    try:
        yield
    finally:
        with contextlib.suppress(httpx.HTTPError):
            slot.close()
