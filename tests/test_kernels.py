"""The GPU's kernels: where there is no GPU, Triton's interpreter runs them, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CHECKS = Path(__file__).resolve().parent / "kernel_checks.py"


def test_kernels() -> None:
    pytest.importorskip("triton")
    interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}  # read when Triton is imported
    command = [sys.executable, "-m", "pytest", "-q", str(CHECKS)]
    done = subprocess.run(command, env={**os.environ, **interpreted}, cwd=CHECKS.parent.parent, capture_output=True)
    assert done.returncode == 0, done.stdout.decode()
