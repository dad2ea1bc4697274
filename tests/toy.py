"""The stages of a small graph for the tests of the flow: `python toy.py STAGE`, run by DVC in a throw-away repository.

What ran is appended to runs/executed.log. `train` counts steps with a checkpoint each; while runs/slow exists it takes
its time, and starts a child that does not heed SIGTERM. While runs/fail exists, `right` fails; while runs/hold exists,
`source` waits; runs/flaky has it fail once.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(600)
"""
RUNS = Path("runs")
STEPS = 400


def source() -> None:
    if (RUNS / "flaky").exists():
        (RUNS / "flaky").unlink()
        sys.exit("source: not this time")
    while (RUNS / "hold").exists():
        time.sleep(0.1)
    Path("data/source.txt").write_text("source\n")


def right() -> None:
    if (RUNS / "fail").exists():
        sys.exit("right: no such luck")
    Path("data/right.txt").write_text(Path("data/source.txt").read_text())


def train() -> None:
    checkpoint, stubborn = RUNS / "step", None
    first = int(checkpoint.read_text()) + 1 if checkpoint.exists() else 1
    print(f"train begins at step {first}")
    if (RUNS / "slow").exists():
        stubborn = subprocess.Popen([sys.executable, "-c", STUBBORN])
    for step in range(first, STEPS + 1):
        if (RUNS / "slow").exists():
            time.sleep(1)
        (RUNS / "step.new").write_text(str(step))
        (RUNS / "step.new").replace(checkpoint)
        print(f"train step {step}")
    if stubborn:
        stubborn.kill()
    checkpoint.unlink()
    read = [line for line in Path("params.yaml").read_text().splitlines(keepends=True) if "beta:" in line]
    Path("data/train.txt").write_text("".join(read))


def compare() -> None:
    Path("results/comparison.md").write_text("| voice | reward |\n|---|---|\n| grpo | 0.8 |\n")
    Path("results/comparison.json").write_text(json.dumps({"grpo": {"reward": 0.8}}))
    Path("results/report.html").write_text("<!doctype html><title>Report</title><p>The report")


if __name__ == "__main__":
    name = sys.argv[1]
    for folder in ("data", "results", "runs"):
        Path(folder).mkdir(exist_ok=True)
    with (RUNS / "executed.log").open("a") as log:
        log.write(f"{name}\n")
    print(f"{name}: says toy.py")
    {"source": source, "right": right, "train": train, "compare": compare}[name]()
