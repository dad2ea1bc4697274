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


WRITES = """
import time
from pathlib import Path
from stages import run
from swaralign.artifacts import atomic_folder

def main():
    with atomic_folder("out") as folder:
        (folder / "half").touch()
        print("writing", flush=True)
        time.sleep(60)

run(main)
"""


def test_a_stage_that_is_stopped_leaves_nothing_half_written(tmp_path: Path, root: Path) -> None:
    stage = subprocess.Popen([sys.executable, "-c", WRITES], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(root)},
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert stage.stdout and stage.stdout.readline() == "writing\n"
    assert len(list(tmp_path.iterdir())) == 1
    stage.terminate()
    assert stage.communicate()[1] == "stopped by SIGTERM\n" and stage.returncode == 1
    assert list(tmp_path.iterdir()) == []


def test_a_fault_of_the_code_keeps_its_traceback() -> None:
    with pytest.raises(KeyError):
        run(lambda: fail(KeyError("codec")))
