"""The shipped recipes, complete params files, and the published smoke form of each."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from ruamel.yaml import YAML

from swaralign.params import load_params

RECIPES = Path("recipes")


def recipes() -> dict[str, Path]:
    """Name -> file of each recipe. Raises ValueError outside a clone."""
    found = {path.stem: path for path in sorted(RECIPES.glob("*.yaml"))}
    if not found:
        raise ValueError(f"no recipes in {RECIPES}/; run this in the root of a clone")
    return found


def forms(path: Path) -> dict[str, str]:
    """The text of a recipe as shipped, under "", and of its smoke form, if it is valid, under " (smoke)"."""
    found = {"": path.read_text(encoding="utf-8")}
    with suppress(ValueError):
        found[" (smoke)"] = smoke(path)
    return found


def smoke(path: Path) -> str:
    """A recipe with two GRPO updates at the full rate, a checkpoint each, and no validation; the rest as it is."""
    iterations = load_params(path).grpo.iterations
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    grpo = YAML().load(path)["grpo"]
    edits = ((grpo["schedule"], "updates", 2 * iterations), (grpo["schedule"], "save_every", iterations),
             (grpo["schedule"], "warmup_updates", 0), (grpo["validation"], "prompts", 0))
    for section, key, value in edits:
        line, column = section.lc.value(key)
        lines[line] = lines[line][:column] + lines[line][column:].replace(str(section[key]), str(value), 1)
    return "".join(lines)
