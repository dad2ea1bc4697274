"""Folders of work in progress, each named by all that goes into it: the same inputs resume, others start afresh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from swaralign import artifacts
from swaralign.params import Params


def stage_inputs(stage: str, params: Params, graph: Path = Path("dvc.yaml")) -> dict[str, Any]:
    """Everything that a stage's result depends on, as dvc.yaml lists it: its sections of the params, hashes of deps."""
    entry = YAML(typ="safe").load(graph.read_text(encoding="utf-8"))["stages"][stage]
    deps = {dep: artifacts.sha256_path(graph.parent / dep) for dep in entry["deps"]}
    return {"params": {name: getattr(params, name).model_dump() for name in entry["params"]}, "deps": deps}


def run_folder(stage: str, inputs: dict[str, Any], root: Path = Path("runs")) -> Path:
    """The folder of a running stage, named by what goes into it, with those inputs written beside.

    The same inputs find the same folder and resume; a changed parameter, dep or line of code starts afresh.
    """
    folder = root / stage / artifacts.fingerprint(inputs)
    artifacts.write_json(folder / "inputs.json", inputs)
    return folder
