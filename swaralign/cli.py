"""The `swaralign` command: check the params and the machine, choose a recipe, serve a scorer, hand over, listen."""

from __future__ import annotations

import argparse
import difflib
import io
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import soundfile as sf

from swaralign import diagnostics, export
from swaralign.artifacts import write_text
from swaralign.checks import check
from swaralign.params import load_params
from swaralign.recipes import forms, recipes
from swaralign.scoring.commands import add_commands

PARAMS = Path("params.yaml")
EVALUATIONS = Path("data/evaluate")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status, 1 after a fault, which is told on stderr."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except (ValueError, OSError, sf.LibsndfileError) as error:  # what was asked for, or where it is to be written
        print(f"swaralign: {error}", file=sys.stderr)
        return 1


def run_check(arguments: argparse.Namespace) -> int:
    """Print one line a fact, faults marked; 1 if there is any fault."""
    facts = check(full=arguments.full)
    for fact in facts:
        print(f"{'ok   ' if fact.ok else 'FAULT'} {fact.subject:<11} {fact.found}")
    faults = sum(not fact.ok for fact in facts)
    if faults:
        print(f"{faults} fault{'s' if faults > 1 else ''}: mend and check again before `dvc repro`", file=sys.stderr)
    return 1 if faults else 0


def run_recipe_list(arguments: argparse.Namespace) -> int:
    """Print the recipes' names, the one that params.yaml is a copy of marked."""
    current = _current_params()
    for name, path in recipes().items():
        form = next((form for form, text in forms(path).items() if text == current), None)
        print(f"{' ' if form is None else '*'} {name}{form or ''}")
    return 0


def run_recipe_use(arguments: argparse.Namespace) -> int:
    """Copy a recipe over params.yaml, never over edits that no recipe holds unless told to."""
    found = recipes()
    recipe = found[_known(arguments.name, found, "recipe")]
    load_params(recipe)
    shipped = {text for path in found.values() for text in forms(path).values()}
    if _current_params() not in {None, *shipped} and not arguments.force:
        raise ValueError(f"{PARAMS} has edits that no recipe holds; keep a copy of it, or overwrite it with --force")
    form = " (smoke)" if arguments.smoke else ""
    write_text(PARAMS, forms(recipe)[form])
    print(f"{PARAMS} is now {recipe}{form}")
    return 0


def _current_params() -> str | None:
    """The text of params.yaml, to be compared alone: what is no UTF-8 in it is no recipe's."""
    return PARAMS.read_text(encoding="utf-8", errors="replace") if PARAMS.is_file() else None


def run_listen(arguments: argparse.Namespace) -> int:
    """Write one take of an evaluation to a WAV file, and print its text, its transcript and its WER."""
    take = find_take(EVALUATIONS, arguments.method, arguments.prompt_id, arguments.draw)
    out = arguments.out or Path(f"{arguments.method}-{arguments.prompt_id}-{arguments.draw}.wav")
    flags = ", ".join(take["flags"])
    if take["audio"] is None:
        raise ValueError(f"that take of {arguments.prompt_id} has no audio to write; its flags: {flags}")
    wave, sample_rate_hz = sf.read(io.BytesIO(take["audio"]["bytes"]), dtype="int16")
    out.parent.mkdir(parents=True, exist_ok=True)
    sf.write(out, wave, sample_rate_hz, subtype="PCM_16", format="WAV")
    missing = f"(failed: {flags})" if flags else "(nobody listened)"
    heard = take["transcript"] if take["transcript"] is not None else missing
    wer = f"{take['wer']:.1%}" if take["wer"] is not None else "(not measured)"
    print(f"text        {take['text']}\ntranscript  {heard}\nWER         {wer}\naudio       {out}")
    return 0


def find_take(evaluations: Path, method: str, prompt_id: str, draw: int) -> dict[str, Any]:
    """The row of one take in METHOD/scores.parquet; its audio is FLAC bytes, None when the take had none.

    Raises ValueError naming what there is when there is no such voice, prompt or draw.
    """
    voices = sorted(path.parent.name for path in evaluations.glob("*/scores.parquet"))
    if not voices:
        raise ValueError(f"no takes under {evaluations}; `dvc repro` makes them")
    scores = evaluations / _known(method, voices, "voice") / "scores.parquet"
    _known(prompt_id, pq.read_table(scores, columns=["id"])["id"].unique().to_pylist(), "prompt id")
    rows = pq.read_table(scores, filters=[("id", "==", prompt_id)]).to_pylist()
    draws = {row["draw"]: row for row in rows}
    if draw not in draws:
        raise ValueError(f"no draw {draw} of {prompt_id}; its draws are {', '.join(map(str, sorted(draws)))}")
    return dict(draws[draw])


def _known(name: str, names: Iterable[str], what: str) -> str:
    """The name itself, or a ValueError that tells the nearest ones."""
    names = list(names)
    if name not in names:
        near = sorted(difflib.get_close_matches(name, names, n=3, cutoff=0.4)) or names[:3]
        more = f" and {len(names) - len(near)} more" if len(names) > len(near) else ""
        raise ValueError(f"no {what} {name!r}; there is {', '.join(near)}{more}")
    return name


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="swaralign", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("check", help="validate params.yaml, the environment and the machine")
    command.add_argument("--full", action="store_true", help="hash every asset too")
    command.set_defaults(run=run_check)

    recipe = commands.add_parser("recipe", help="list the shipped recipes, or make one params.yaml")
    actions = recipe.add_subparsers(required=True, metavar="list|use")
    actions.add_parser("list", help="names of the recipes").set_defaults(run=run_recipe_list)
    use = actions.add_parser("use", help="copy a recipe over params.yaml")
    use.add_argument("name")
    use.add_argument("--smoke", action="store_true", help="two GRPO updates, a checkpoint each, no validation")
    use.add_argument("--force", action="store_true", help="overwrite edits of params.yaml")
    use.set_defaults(run=run_recipe_use)

    add_commands(commands.add_parser("scorer", help="serve a reward over HTTP, or check somebody's server"))
    diagnostics.register(commands)
    export.add_commands(commands)

    listen = commands.add_parser("listen", help="write one evaluated take to a WAV file")
    listen.add_argument("method", help="the voice: base, sft, dpo, kto, grpo")
    listen.add_argument("prompt_id", help="as in the comparison, e.g. demo-en-00000300")
    listen.add_argument("--draw", type=int, default=0)
    listen.add_argument("-o", "--out", type=Path, help="the file to write (default: VOICE-ID-DRAW.wav)")
    listen.set_defaults(run=run_listen)
    return parser


if __name__ == "__main__":
    sys.exit(main())
