"""The comparison as one page that opens without a network, with takes to hear: results/report.html.

    python -m stages.report
"""

from __future__ import annotations

import json
from pathlib import Path

from stages import run
from swaralign.artifacts import write_text
from swaralign.comparison import START, evaluated, read_evaluations
from swaralign.params import load_params
from swaralign.report.page import Inputs, read_clips, read_curves, render_page, widest

DATA, OUT = Path("data"), Path("results")
EVALUATIONS = DATA / "evaluate"
MANIFESTS = ("assets.json", "split/manifest.json", "merge/manifest.json", "speaker/manifest.json",
             "candidates/manifest.json", "preferences/manifest.json")


def main() -> None:
    params = load_params()
    voices = evaluated(EVALUATIONS)
    evaluations = read_evaluations(EVALUATIONS, voices)
    trainings = {voice: path for voice in voices if (path := DATA / f"train_{voice}").is_dir()}
    manifests = [DATA / name for name in MANIFESTS]
    manifests += [path / "manifest.json" for path in trainings.values()]
    manifests += [EVALUATIONS / voice / "summary.json" for voice in voices]
    inputs = Inputs(
        evaluations=evaluations,
        start=START,
        result=json.loads((OUT / "comparison.json").read_text(encoding="utf-8")),
        clips=read_clips(EVALUATIONS, voices, widest(evaluations, params.report.prompts_with_audio)),
        curves={voice: read_curves(path / "curves.csv") for voice, path in trainings.items()},
        validations={voice: read_curves(path / "validation.csv") for voice, path in trainings.items()},
        manifests={path.as_posix(): json.loads(path.read_text("utf-8")) for path in manifests if path.is_file()},
        params={name: getattr(params, name).model_dump() for name in ("compare", "report")},
    )
    write_text(OUT / "report.html", render_page(inputs))


if __name__ == "__main__":
    run(main)
