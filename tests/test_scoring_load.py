"""A thousand takes at once, from another process, at a server with room for 64."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx

from tests.scoring import metrics, process, request

ROOT = Path(__file__).resolve().parent.parent
TAKES = 1000
MIB = 2**20


def burst(url: str) -> list[tuple[int, int, float | None, str | None]]:
    command = [sys.executable, "-m", "tests.burst", url.rpartition(":")[2], str(TAKES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    return [tuple(each) for each in json.loads(done.stdout)]


def memory(url: str) -> tuple[int, int, int]:
    """Of the server's objects: how many are as big as a take, and the bytes of all, now and at the most."""
    told = httpx.post(f"{url}/score", json=request(prompt="memory"), timeout=60, trust_env=False).json()
    return told["big"], told["held"], told["peak"]


def test_a_thousand_at_once() -> None:
    """Each is answered once, with its own score or 429; their 250 MiB are never all held, and none is kept."""
    with process("tests.scorers:Weighed", "--set", "delay_s=0.05", "--queue", "64", PYTHONTRACEMALLOC="1") as server:
        big, before, _ = memory(server.url)
        fates = burst(server.url)
        big_after, after, peak = memory(server.url)
        fates_again = burst(server.url)
        big_after_again, after_again, peak_again = memory(server.url)
        told = metrics(server.url)
    for each in (fates, fates_again):
        assert [number for number, *_ in each] == list(range(TAKES))
        assert {status for _, status, *_ in each} == {200, 429}
        scored = [(number, score, name) for number, status, score, name in each if status == 200]
        assert len(scored) >= 64
        assert scored == [(number, number, f"take-{number}") for number, *_ in scored]
    for wanted in (200, 429):
        answered = sum(status == wanted for _, status, *_ in [*fates, *fates_again])
        lone = 3 if wanted == 200 else 0  # those that asked for the memory
        assert f'scorer_requests_total{{endpoint="/score",status="{wanted}"}} {answered + lone:.1f}' in told
    assert max(peak, peak_again) - before < 125 * MIB
    assert big == big_after == big_after_again
    assert after_again - after < 4 * MIB  # what was read of those that were refused is 15 MiB
