"""Parquet files: rows as documents, a batch at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from megatrain.config.errors import InputError
from megatrain.data.files import optional_package
from megatrain.data.preprocess.inputs import InputFile
from megatrain.data.preprocess.lines import Row


@dataclass(frozen=True)
class Rows:
    """Neighbouring rows."""

    values: list[Row]
    num_bytes: int
    share_read: float
    """Of the whole file, up to the end of these."""


def require_columns(file: InputFile, names: Sequence[str]) -> None:
    """Raises InputError unless the file can be opened and has these columns, of text."""
    with _opened(file) as table:
        schema = table.schema_arrow
        for name in names:
            if name not in schema.names:
                raise InputError(
                    f"{file.path}: has no column {name!r}; it has {', '.join(map(repr, schema.names))}",
                    fix="name its columns with --json-keys",
                )
            if not _is_text(schema.field(name).type):
                raise InputError(
                    f"{file.path}: column {name!r} holds {schema.field(name).type}, not strings or lists of strings",
                    fix="name a column of text with --json-keys",
                )


def read_rows(file: InputFile, columns: Sequence[str], *, start: int, batch_bytes: int) -> Iterator[Rows]:
    """All rows from number `start` on, from 0, in batches of about `batch_bytes`."""
    row = start
    errors = _arrow().ArrowException
    try:
        with _opened(file) as table:
            for batch, end in _batches(table, columns, start, batch_bytes):
                row = end
                yield Rows(batch.to_pylist(), batch.nbytes, end / table.metadata.num_rows)
    except (OSError, errors) as error:
        file.require_unchanged()
        raise InputError(
            f"{file.path}: cannot be read any further after row {row}: {error}",
            fix="the file is cut short or damaged: copy or make it again",
        ) from error
    file.require_unchanged()


_READ_BYTES: Final = 1 << 20


def _arrow() -> Any:
    return optional_package("pyarrow", needed_for="reading .parquet files")


def _opened(file: InputFile) -> Any:
    parquet = optional_package("pyarrow.parquet", needed_for="reading .parquet files")
    try:
        return parquet.ParquetFile(
            file.path, buffer_size=_READ_BYTES, pre_buffer=False, page_checksum_verification=True
        )
    except (OSError, _arrow().ArrowException) as error:
        raise InputError(
            f"{file.path}: cannot be opened as a Parquet file: {error}", fix="copy or make it again"
        ) from error


def _batches(table: Any, columns: Sequence[str], start: int, batch_bytes: int) -> Iterator[tuple[Any, int]]:
    """Batches of rows, each with the number of rows up to its end."""
    end = 0
    for group in range(table.num_row_groups):
        facts = table.metadata.row_group(group)
        if not facts.num_rows or end + facts.num_rows <= start:
            end += facts.num_rows
            continue
        bytes_per_row = facts.total_byte_size / facts.num_rows
        batch_rows = max(int(batch_bytes / max(bytes_per_row, 1)), 1)
        for batch in table.iter_batches(
            batch_size=batch_rows, row_groups=[group], columns=list(columns), use_threads=False
        ):
            end += batch.num_rows
            if end > start:
                yield batch.slice(max(start - (end - batch.num_rows), 0)), end


def _is_text(kind: Any) -> bool:
    types = _arrow().types
    if types.is_list(kind) or types.is_large_list(kind):
        return _is_text(kind.value_type)
    if types.is_dictionary(kind):
        kind = kind.value_type
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))
