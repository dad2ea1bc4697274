"""Every voice against the start policy, each difference with its interval and p-value: results/comparison.{md,json},
results/scores.parquet (all takes, without audio) and results/plots/differences.csv.

    python -m stages.compare
"""

from __future__ import annotations

from pathlib import Path

from stages import run
from swaralign.artifacts import write_json, write_parquet, write_text
from swaralign.comparison import START, VOICES, all_takes, compare, differences_csv, evaluated, read_evaluations
from swaralign.params import load_params
from swaralign.report.markdown import render

EVALUATIONS, OUT = Path("data/evaluate"), Path("results")


def main() -> None:
    params = load_params()
    voices = evaluated(EVALUATIONS)
    evaluations = read_evaluations(EVALUATIONS, voices)
    result = compare(evaluations, START, params.compare)
    write_json(OUT / "comparison.json", result)
    missing = [voice for voice in VOICES if voice not in voices]
    write_text(OUT / "comparison.md", render(evaluations, START, result, missing))
    write_parquet(OUT / "scores.parquet", all_takes(evaluations))
    write_text(OUT / "plots" / "differences.csv", differences_csv(result, voices, START))


if __name__ == "__main__":
    run(main)
