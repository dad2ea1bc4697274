"""A Whisper checkpoint of transformers -> the CTranslate2 form that the recogniser runs, once, into the cache."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from swaralign.artifacts import atomic_folder, fingerprint, sha256_file, sha256_tree, write_json
from swaralign.hub import cache_root

COPIED = ("tokenizer.json", "preprocessor_config.json")  # the recogniser reads them beside the weights
NEEDED = ("config.json", "model.safetensors", *COPIED)
WEIGHTS_TYPE = "float16"  # as they are stored; reward.asr.compute_type decides what they are computed in


def to_ctranslate2(name: str, source: Path, files: Sequence[str]) -> Path:
    """The folder with the converted weights of the verified `files` in `source`, named by their content.

    Raises ValueError if a file that the conversion needs is not among them.
    """
    if missing := [file for file in NEEDED if file not in files]:
        raise ValueError(f"assets.{name}: a conversion needs {', '.join(missing)} among assets.{name}.files")
    made_from = {file: sha256_file(source / file) for file in sorted(files)}
    key = fingerprint({"files": made_from, "ctranslate2": version("ctranslate2"), "weights": WEIGHTS_TYPE})
    folder = cache_root() / "ctranslate2" / key
    record = folder.with_suffix(".json")
    if not (record.is_file() and json.loads(record.read_text(encoding="utf-8")) == sha256_tree(folder)):
        _convert(source, files, folder)
        write_json(record, sha256_tree(folder))
    return folder


def _convert(source: Path, files: Sequence[str], folder: Path) -> None:
    """Convert from a folder that holds the verified files alone: a loader would read what else lies beside them."""
    from ctranslate2.converters import TransformersConverter  # imports torch: only where there is work to do

    with atomic_folder(folder) as made, tempfile.TemporaryDirectory() as pinned:
        for file in files:
            (Path(pinned) / file).symlink_to((source / file).resolve())
        converter = TransformersConverter(pinned, copy_files=list(COPIED), load_as_float16=True)
        converted = Path(converter.convert(str(made / "converted"), quantization=WEIGHTS_TYPE))
        for path in converted.iterdir():
            shutil.move(path, made / path.name)
        converted.rmdir()
