"""Every voice against the start policy, each difference with its interval: results/comparison.{md,json}.

    python -m stages.compare
"""

from __future__ import annotations

from pathlib import Path

from stages import run
from swaralign.artifacts import write_json, write_text
from swaralign.comparison import compare, read_evaluations, render
from swaralign.params import load_params

VOICES, START = ("base", "sft", "grpo"), "sft"
EVALUATIONS, OUT = Path("data/evaluate"), Path("results")


def main() -> None:
    params = load_params()
    evaluations = read_evaluations(EVALUATIONS, VOICES)
    result = compare(evaluations, START, params.compare)
    write_json(OUT / "comparison.json", result)
    write_text(OUT / "comparison.md", render(evaluations, START, result))


if __name__ == "__main__":
    run(main)
