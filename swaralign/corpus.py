"""Rows of an IndicVoices-R-shaped corpus: parquet files on disk or on the hub, of which only some columns are read.

A file is read one row group at a time, and no further than its reader asks; the bytes of other columns, the audio
above all, are never touched.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from swaralign.hub import HubFile

TEXT_COLUMNS = ("text", "normalized", "scenario")
COLUMNS = (*TEXT_COLUMNS, "duration", "snr")
SPEAKER = "speaker_id"
_TEXTS = (*TEXT_COLUMNS, SPEAKER)


def read_rows(corpus: Iterable[Path | HubFile], columns: Sequence[str] = COLUMNS) -> Iterator[dict[str, Any]]:
    """The columns of every row in order; text columns that are class labels are decoded by their names.

    Raises ValueError if a column is missing, or a text column holds anything but strings or named labels.
    """
    for source in corpus:
        with _opened(source) as file:
            _check_columns(file.schema_arrow, columns, source)
            first = 0
            for group in range(file.num_row_groups):
                table = file.read_row_group(group, columns=list(columns), use_threads=False)
                yield from _rows(table, columns, file.schema_arrow, source, first)
                first += table.num_rows


def read_cell(corpus: Iterable[Path | HubFile], index: int, column: str) -> Any:
    """One column's value in row `index` of the corpus; the rest of its row group is read for it.

    Raises ValueError if the column is missing or there are not so many rows.
    """
    first = 0
    for source in corpus:
        with _opened(source) as file:
            _check_columns(file.schema_arrow, [column], source)
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if index < first + rows:
                    return file.read_row_group(group, columns=[column])[column][index - first].as_py()
                first += rows
    raise ValueError(f"row {index} is asked for, but the corpus has only {first}")


@contextmanager
def _opened(source: Path | HubFile) -> Iterator[pq.ParquetFile]:
    with source.open() if isinstance(source, HubFile) else source.open("rb") as stream:
        try:
            file = pq.ParquetFile(stream, pre_buffer=True)  # columns that lie side by side become one read
        except pa.ArrowInvalid as error:
            raise ValueError(f"{source} is not a parquet file: {error}") from error
        yield file


def _check_columns(schema: pa.Schema, columns: Sequence[str], source: Path | HubFile) -> None:
    missing = [column for column in columns if column not in schema.names]
    if missing:
        raise ValueError(f"{source} lacks the columns {', '.join(missing)}; it has {', '.join(schema.names)}")


def _rows(
    table: pa.Table, columns: Sequence[str], schema: pa.Schema, source: Path | HubFile, first: int
) -> Iterator[dict[str, Any]]:
    values = {name: table.column(name).to_pylist() for name in columns}
    for name in (name for name in columns if name in _TEXTS):
        values[name] = _as_text(values[name], name, schema, source, first)
    for row in zip(*values.values(), strict=True):
        yield dict(zip(columns, row, strict=True))


def _as_text(
    values: list[Any], column: str, schema: pa.Schema, source: Path | HubFile, first: int
) -> list[str | None]:
    kind = schema.field(column).type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind):
        return values
    names = _label_names(schema, column)
    if names is None or not pa.types.is_integer(kind):
        raise ValueError(
            f"{source}: column {column} holds {kind}, not strings, and the file records no label names to decode it "
            "by; fetch the pinned revision of the corpus, or a copy whose text columns are strings"
        )
    for index, value in enumerate(values, start=first):
        if value is not None and not 0 <= value < len(names):
            raise ValueError(
                f"{source}: row {index} of column {column} is label {value}, but it has {len(names)} names"
            )
    return [None if value is None else names[value] for value in values]


def _label_names(schema: pa.Schema, column: str) -> list[str] | None:
    """The names of a class-label column, from the features that `datasets` writes into a parquet file's metadata."""
    recorded = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    feature = recorded.get("info", {}).get("features", {}).get(column, {})
    return feature.get("names")
