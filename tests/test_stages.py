"""How a stage ends: a fault of the input by its message, a fault of the code by its traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stages import run


def fail(error: Exception) -> None:
    raise error


def test_a_fault_of_the_input_ends_a_stage_with_its_message(tmp_path: Path, root: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "stages.split"], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True, text=True, check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: params.yaml does not exist; `cp recipes/demo.yaml params.yaml` makes one")
    assert "(raised by load_params in load.py, line " in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_fault_of_the_code_keeps_its_traceback() -> None:
    with pytest.raises(KeyError):
        run(lambda: fail(KeyError("codec")))
