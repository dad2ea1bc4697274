"""Hashes and atomic writes: what every stage uses to read and write artifacts.

An artifact is a function of what went in. Nothing here writes a time, a host name or an absolute path, and a killed
process leaves either the old artifact or the new one, never half of one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

_CHUNK_BYTES = 1 << 20


def sha256_file(path: str | Path) -> str:
    """SHA-256 of a file's bytes, in hex, read a chunk at a time."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def sha256_tree(folder: str | Path) -> dict[str, str]:
    """SHA-256 of every file below a folder, keyed by its POSIX path relative to the folder, sorted.

    `__pycache__` is left out, as .dvcignore leaves it out: what Python keeps there bears the time stamps of the source.
    """
    root = Path(folder)
    paths = [path.relative_to(root) for path in root.rglob("*") if path.is_file()]
    files = sorted(path.as_posix() for path in paths if "__pycache__" not in path.parts)
    return {name: sha256_file(root / name) for name in files}


def sha256_path(path: str | Path) -> str | dict[str, str]:
    """`sha256_tree` of a folder, `sha256_file` of a file."""
    return sha256_tree(path) if Path(path).is_dir() else sha256_file(path)


def content_sha256(rows: list[dict[str, Any]]) -> str:
    """SHA-256 of rows as UTF-8 JSON: keys sorted, separators `,` and `:`, non-ASCII kept (ValueError on NaN)."""
    return hashlib.sha256(_canonical(rows)).hexdigest()


def fingerprint(obj: Any) -> str:
    """The first 16 hex digits of the SHA-256 of an object's canonical JSON: the key of a run folder or a cache."""
    return hashlib.sha256(_canonical(obj)).hexdigest()[:16]


def write_text(path: str | Path, text: str) -> None:
    """Write UTF-8 text atomically, making the parent folder if needed."""
    with _replacing(Path(path)) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: str | Path, obj: Any) -> None:
    """Write JSON atomically: indented by 2, keys sorted, non-ASCII kept, a newline at the end (ValueError on NaN)."""
    write_text(path, json.dumps(obj, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n")


def write_parquet(path: str | Path, table: pa.Table) -> None:
    """Write a table atomically; equal tables give equal bytes."""
    with _replacing(Path(path)) as temporary:
        pq.write_table(table, temporary, compression="zstd")


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Yield an empty temporary folder beside `path`; it takes the place of `path` when the block ends well.

    An error in the block removes it and leaves whatever was at `path` as it was.
    """
    target = Path(path)
    temporary, old = _beside(target, "tmp"), _beside(target, "old")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        temporary.mkdir()
        yield temporary
        if target.exists():
            target.replace(old)
        temporary.replace(target)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """Yield a temporary path beside `target`, moved over it when the block ends well and removed when it does not."""
    temporary = _beside(target, "tmp")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield temporary
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _beside(target: Path, kind: str) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}.{kind}")


def _canonical(obj: Any) -> bytes:
    text = json.dumps(obj, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8")
