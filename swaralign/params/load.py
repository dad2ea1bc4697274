"""A params file, read and checked; every fault gets one line that names its key, the value and what would do."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from swaralign.params.root import Params


def load_params(path: str | Path = "params.yaml") -> Params:
    """Read and validate a params file.

    Raises:
        ValueError: the file is missing, is not YAML, or a key is unknown, missing, mistyped or out of range;
            the message has one line a fault, each naming its key, the value and what would do.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} does not exist; `cp recipes/demo.yaml params.yaml` makes one")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    return parse_text(text, str(path))


def parse_text(text: str, name: str) -> Params:
    """Validate the text of a params file; `name` stands in the messages. Raises ValueError as `load_params`."""
    try:
        data = YAML(typ="safe", pure=True).load(text)
    except (YAMLError, ValueError, RecursionError) as error:  # the second for a date of month 13
        raise ValueError(f"{name} is not valid YAML: {error}") from error
    return parse_params(data, name)


def parse_params(data: Any, name: str = "params") -> Params:
    """Validate an already parsed mapping; `name` stands in the messages. Raises ValueError as `load_params`."""
    if not isinstance(data, dict):
        raise ValueError(f"{name} must be a mapping of sections, found {type(data).__name__}")
    try:
        return Params.model_validate(data)
    except ValidationError as error:
        lines = [_explain(fault) for fault in error.errors()]
        raise ValueError(f"{name} is not valid:\n  " + "\n  ".join(lines)) from None


def _explain(fault: Any) -> str:
    where, models = _walk(fault["loc"])
    key = ".".join(where) or "(whole file)"
    if fault["type"] == "extra_forbidden":
        return f"{key}: unknown key; {_suggest(where[-1], models)}"
    if fault["type"] == "missing":
        return f"{key}: missing"
    told = isinstance(fault["input"], dict) or fault["type"] == "value_error"  # our own errors name the value
    value = "" if told else f", found {fault['input']!r}"
    return f"{key}: {fault['msg'].removeprefix('Value error, ')}{value}"


def _suggest(name: str, models: list[Any]) -> str:
    """Names the valid keys beside an unknown one, nearest first."""
    names = list(dict.fromkeys(field for model in models for field in model.model_fields))
    near = difflib.get_close_matches(name, names, n=1)
    return (f"did you mean {near[0]!r}? " if near else "") + f"valid keys here: {', '.join(names)}"


def _walk(loc: tuple[str | int, ...]) -> tuple[list[str], list[Any]]:
    """A fault's place as keys of the file, and the models around its last key.

    Pydantic also names the member of a union by its tag (`source: local`), which is no key.
    """
    keys: list[str] = []
    models, around = [Params], [Params]
    for part in map(str, loc):
        tagged = [model for model in models if part in _tags(model)]
        if tagged:
            models = tagged
            continue
        keys.append(part)
        around = models
        models = [each for model in models if part in model.model_fields
                  for each in _models(model.model_fields[part].annotation)]
    return keys, around


def _tags(model: Any) -> set[str]:
    """What the single-valued fields of a model hold: the tags that tell it from the others of its union."""
    choices = [get_args(field.annotation) for field in model.model_fields.values()
               if get_origin(field.annotation) is Literal]
    return {each[0] for each in choices if len(each) == 1}


def _models(annotation: Any) -> list[Any]:
    """The models that a field may hold: its own, or those of its union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models(inner)]
