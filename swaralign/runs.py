"""Folders of work in progress, each named by all that goes into it: the same inputs resume, others start afresh."""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path
from typing import IO, Any

from ruamel.yaml import YAML

from swaralign import artifacts
from swaralign.params import Params

log = logging.getLogger(__name__)
_HELD: dict[Path, IO[bytes]] = {}  # open lock files, by run folder: the system lets go when the process ends


def stage_inputs(stage: str, params: Params, graph: Path = Path("dvc.yaml")) -> dict[str, Any]:
    """Everything that a stage's result depends on, as dvc.yaml lists it: its sections of the params, hashes of deps."""
    entry = YAML(typ="safe").load(graph.read_text(encoding="utf-8"))["stages"][stage]
    deps = {dep: artifacts.sha256_path(graph.parent / dep) for dep in entry["deps"]}
    return {"params": {name: getattr(params, name).model_dump() for name in entry["params"]}, "deps": deps}


def run_folder(stage: str, inputs: dict[str, Any], root: Path = Path("runs")) -> Path:
    """The folder of a running stage, named by what goes into it, with those inputs written beside.

    The same inputs find the same folder and resume; a changed parameter, dep or line of code starts afresh. One
    process at a time works in it, for as long as it lives; another one waits (of several ranks, the first).
    """
    folder = root / stage / artifacts.fingerprint(inputs)
    if os.environ.get("RANK", "0") == "0":
        _hold(folder)
        artifacts.write_json(folder / "inputs.json", inputs)
    return folder


def _hold(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    key = folder.resolve()
    if key in _HELD:
        return
    _HELD[key] = lock = (folder / "lock").open("wb")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.warning("another process works in %s; waiting for it to end", folder)
        fcntl.flock(lock, fcntl.LOCK_EX)
