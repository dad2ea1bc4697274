"""Run folders: named by what goes in, and one process at a time in each."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from swaralign.runs import run_folder

INPUTS = {"params": {"seed": 1}, "deps": {"a.parquet": "00"}}
HOLD = "import json, sys; from pathlib import Path; from swaralign.runs import run_folder\n" \
       "print(run_folder('train_dpo', json.loads(sys.argv[1]), Path(sys.argv[2])), flush=True); sys.stdin.read()"


def holder(root: Path) -> subprocess.Popen[str]:
    """A process that asks for the folder of INPUTS, prints it, and keeps it until its input ends."""
    command = [sys.executable, "-c", HOLD, json.dumps(INPUTS), str(root)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_the_same_inputs_find_the_same_folder(tmp_path: Path) -> None:
    first, again = run_folder("train_dpo", INPUTS, tmp_path), run_folder("train_dpo", INPUTS, tmp_path)
    other = run_folder("train_dpo", INPUTS | {"params": {"seed": 2}}, tmp_path)
    assert first == again and first != other and first.parent == tmp_path / "train_dpo"
    assert json.loads((first / "inputs.json").read_text()) == INPUTS


def test_a_second_process_waits_until_the_first_has_died(tmp_path: Path) -> None:
    first = holder(tmp_path)
    assert first.stdout and first.stdout.readline().strip()
    second = holder(tmp_path)
    assert second.stderr and second.stdout
    said = second.stderr.readline()
    assert "another process works in" in said and "waiting for it to end" in said
    time.sleep(0.2)
    assert second.poll() is None
    first.kill()
    folder = second.stdout.readline().strip()
    assert Path(folder).is_dir()
    for process in (first, second):
        process.communicate()
