"""A thousand takes at once, from another process, at a server with room for 64."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil

from tests.scoring import metrics, process

ROOT = Path(__file__).resolve().parent.parent
TAKES = 1000
MIB = 2**20


def burst(url: str) -> list[tuple[int, int, float | None, str | None]]:
    command = [sys.executable, "-m", "tests.burst", url.rpartition(":")[2], str(TAKES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    return [tuple(each) for each in json.loads(done.stdout)]


def test_a_thousand_at_once() -> None:
    """Each is answered once, with its own score or 429; the second thousand finds the memory as the first left it."""
    with process("tests.scorers:Number", "--set", "delay_s=0.05", "--queue", "64") as server:
        memory = psutil.Process(server.process.pid)
        before = memory.memory_info().rss
        fates = burst(server.url)
        after = memory.memory_info().rss
        fates_again = burst(server.url)
        after_again = memory.memory_info().rss
        told = metrics(server.url)
    for each in (fates, fates_again):
        assert [number for number, *_ in each] == list(range(TAKES))
        assert {status for _, status, *_ in each} == {200, 429}
        scored = [(number, score, name) for number, status, score, name in each if status == 200]
        assert len(scored) >= 64
        assert scored == [(number, number, f"take-{number}") for number, *_ in scored]
    for wanted in (200, 429):
        answered = sum(status == wanted for _, status, *_ in [*fates, *fates_again])
        assert f'scorer_requests_total{{endpoint="/score",status="{wanted}"}} {answered:.1f}' in told
    assert after - before < 220 * MIB  # the bodies are 250 MiB
    assert after_again - after < 30 * MIB
