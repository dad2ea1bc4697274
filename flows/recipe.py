"""The params of one run: params.yaml or a recipe, with overrides, checked before anything runs."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from swaralign.params import Params, parse_text

PARAMS = Path("params.yaml")
RECIPES = Path("recipes")
ABSENT = "(absent)"  # stands in a table of differences for a key that one side lacks


def params_text(root: Path, recipe: str | None, overrides: dict[str, Any]) -> str:
    """The text of the params file that a run uses, comments kept.

    Args:
        recipe: a file in recipes/, with or without its suffix; None for params.yaml as it is.
        overrides: values by dotted key, e.g. `{"grpo.schedule.updates": 4}`.

    Raises:
        ValueError: no such recipe, or what `swaralign.params` refuses, naming the valid keys.
    """
    path = root / PARAMS if recipe is None else _recipe(root, recipe)
    if not path.is_file():
        raise ValueError(f"{PARAMS} does not exist; name a recipe, or make one with `swaralign recipe use demo`")
    text = path.read_text(encoding="utf-8")
    if overrides:
        text = _overridden(text, overrides)
    check(text, f"set_params over {path.relative_to(root)}" if overrides else str(path.relative_to(root)))
    return text


def check(text: str, name: str = str(PARAMS)) -> Params:
    """The validated params of a file's text. Raises ValueError as `swaralign.params.parse_text`."""
    return parse_text(text, name)


def nearest_recipe(root: Path, text: str) -> tuple[str, list[dict[str, str]]]:
    """The recipe that differs in the fewest keys, and those keys: rows of `key`, `recipe`, `this run`."""
    mine = YAML(typ="safe", pure=True).load(text)
    found: dict[str, list[dict[str, str]]] = {}
    for path in sorted((root / RECIPES).glob("*.yaml")):
        theirs = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
        if not isinstance(theirs, dict):
            continue  # somebody's file that is being written; it must not fail a run that has ended
        found[path.stem] = [{"key": key, "recipe": str(old), "this run": str(new)}
                            for key, old, new in differing(theirs, mine)]
    return min(found.items(), key=lambda item: len(item[1]))


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """The dotted keys whose values differ, each with both values, `ABSENT` where a side lacks it."""
    first, second = dict(leaves(one)), dict(leaves(other))
    found = [(key, first.get(key, ABSENT), second.get(key, ABSENT)) for key in {**first, **second}]
    return [row for row in found if row[1] != row[2]]


def leaves(data: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of nested mappings with its dotted key."""
    for name, value in data.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _recipe(root: Path, name: str) -> Path:
    names = {path.stem: path for path in sorted((root / RECIPES).glob("*.yaml"))}
    stem = Path(name).name.removesuffix(".yaml")
    if stem not in names:
        raise ValueError(f"recipe: no {name!r} in {RECIPES}/; there is {', '.join(names)}")
    return names[stem]


def _overridden(text: str, overrides: dict[str, Any]) -> str:
    """The text with values set. A key that is not there is set too: the params model names it and the valid ones."""
    yaml = YAML()  # keeps comments
    data = yaml.load(text)
    for key, value in overrides.items():
        *sections, last = key.split(".")
        section = data
        for part in sections:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                raise ValueError(f"set_params: {key}: {part} is the value {section!r}, not a section")
        section[last] = value
    stream = io.StringIO()
    yaml.dump(data, stream)
    return stream.getvalue()
