"""Micro-batches: takes a second that `swaralign scorer serve` scores, against serving the same model one at a time.

    python -m benchmarks.scorer [--reward whisper_cer] [--takes 48] [--concurrency 1 8 32]

Two servers, each in a process of its own, score the same clips of the demo corpus for the same client, in turn. In
brackets stand the CPU seconds that the server spent on a take: batches win by cores that work side by side where these
are equal, by less work where they fall. The last line is JSON. Only ratios of one run mean anything on another machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pyarrow.parquet as pq

from swaralign.audio import read_audio
from swaralign.params import HttpParams
from swaralign.scoring import AudioTake
from swaralign.scoring.client import ScorerClient

CORPUS = Path("data/demo/corpus.parquet")
SERVERS = {"one at a time": 1, "micro-batches": 16}  # takes that go through the model together


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--reward", default="whisper_cer")
    parser.add_argument("--takes", type=int, default=48)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    arguments = parser.parse_args()
    takes = read_takes(arguments.takes)
    print("| concurrency | " + " | ".join(f"{name}, takes a second (CPU s a take)" for name in SERVERS) + " | ratio |")
    print("|---|---|---|---|")
    rows = []
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(served(arguments.reward, size)) for name, size in SERVERS.items()}
        for url, _ in servers.values():
            takes_a_second(url, takes[:8], 8)  # warms up
        for concurrency in arguments.concurrency:
            row: dict[str, float] = {"concurrency": concurrency}
            for name, (url, process) in servers.items():
                before = cpu_s(process)
                row[name] = takes_a_second(url, takes, concurrency)
                row[f"{name}, CPU s"] = (cpu_s(process) - before) / len(takes)
            row["ratio"] = row["micro-batches"] / row["one at a time"]
            cells = [f"{row[name]:.2f} ({row[f'{name}, CPU s']:.2f})" for name in SERVERS]
            print(f"| {concurrency} | {' | '.join(cells)} | {row['ratio']:.2f} |", flush=True)
            rows.append({name: round(value, 3) for name, value in row.items()})
    print(json.dumps({"reward": arguments.reward, "takes": len(takes), "cores": os.cpu_count(), "rows": rows}))


def read_takes(count: int) -> list[AudioTake]:
    """The first rows of the demo corpus that have a text."""
    rows = pq.read_table(CORPUS, columns=["normalized", "audio"]).to_pylist()
    spoken = [row for row in rows if row["normalized"]][:count]
    return [AudioTake(*read_audio(row["audio"]["bytes"]), row["normalized"], {"id": f"take-{index}"})
            for index, row in enumerate(spoken)]


@contextlib.contextmanager
def served(reward: str, max_batch: int) -> Iterator[tuple[str, psutil.Process]]:
    """The URL and the process of a server with that limit on its batches."""
    command = [sys.executable, "-m", "swaralign.cli", "scorer", "serve", reward, "--port", "0",
               "--max-batch", str(max_batch)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            first = process.stderr.readline() if process.stderr else ""
            found = re.search(r" on (http://\S+)", first)
            if not found:
                raise ValueError(f"the server did not start: {first}{process.stderr.read() if process.stderr else ''}")
            yield found[1], psutil.Process(process.pid)
        finally:
            process.terminate()


def cpu_s(process: psutil.Process) -> float:
    """CPU seconds of a process so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def takes_a_second(url: str, takes: Sequence[AudioTake], concurrency: int) -> float:
    """How fast the server at `url` scores the takes, so many requests in flight."""
    client = ScorerClient(HttpParams(urls=[url], timeout_s=600.0, retries=2, backoff_s=0.5, concurrency=concurrency,
                                     token_env=None, transcripts=False, failed_score=0.0))
    client.wait_ready()
    began = time.perf_counter()
    client.score(takes)
    return len(takes) / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
