"""LineSource: reads the lines of JSONL files and the rows of Parquet files, as JSON, with the number of each."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from ray.data.datasource import FileBasedDatasource

from deployments.api.json_response import encode_json
from deployments.batch.input_lines import raw_lines

__all__ = ["LINES", "LineSource", "is_parquet"]

MAX_LINE_BYTES = 64 * 2**20
_BLOCK_BYTES, _BLOCK_LINES = 4 * 2**20, 1024
_FORMATS = ("jsonl", "parquet")
_JSON_COLUMNS = ("body", "response", "error")  # whose strings hold JSON
# text is null if a line is too long
LINES = pa.schema([("path", pa.string()), ("number", pa.int64()), ("text", pa.large_binary())])


def is_parquet(path: str) -> bool:
    """Whether a file is read as Parquet; any other one is read as JSONL."""
    return path.lower().endswith(".parquet")


class LineSource(FileBasedDatasource):
    """Files as rows of ``LINES``.

    Args:
        paths: files or directories, at any address that Ray Data reads.
        defaults: columns that a Parquet file need not have.

    Attributes:
        file_format: of the first file: ``jsonl`` or ``parquet``.

    Raises:
        OSError: a file cannot be found.
        ValueError: there are no files.
    """

    def __init__(self, paths: Sequence[str], defaults: Mapping[str, Any] | None = None) -> None:
        super().__init__(list(paths))
        self.file_format = _FORMATS[is_parquet(self._paths()[0])]
        self._defaults = dict(defaults or {})

    def _open_input_source(self, filesystem: Any, path: str, **options: Any) -> Any:
        if is_parquet(path):
            return filesystem.open_input_file(path)
        return super()._open_input_source(filesystem, path, **options)

    def _read_stream(self, f: Any, path: str) -> Iterator[Any]:
        lines = _rows(f, self._defaults) if is_parquet(path) else _lines(f)
        texts: list[tuple[int, bytes | None]] = []
        size = 0
        for number, text in lines:
            texts.append((number, text))
            size += len(text or b"")
            if size >= _BLOCK_BYTES or len(texts) >= _BLOCK_LINES:
                yield _table(path, texts)
                texts, size = [], 0
        if texts:
            yield _table(path, texts)


def _lines(file: Any) -> Iterator[tuple[int, bytes | None]]:
    """Yield the number and the text of each line of a JSONL file that is not blank."""
    for line in raw_lines(io.BufferedReader(file, 2**20), MAX_LINE_BYTES):
        yield line.number, line.text


def _rows(file: Any, defaults: Mapping[str, Any]) -> Iterator[tuple[int, bytes | None]]:
    """Yield the number and the JSON of each row of a Parquet file."""
    number = 0
    for batch in pq.ParquetFile(file).iter_batches(batch_size=_BLOCK_LINES):
        for row in batch.to_pylist():
            number += 1
            yield number, _encoded(row, defaults)


def _encoded(row: Mapping[str, Any], defaults: Mapping[str, Any]) -> bytes:
    """Return a row as JSON. A null is a column, or a field of a struct, that only other rows have."""
    content: dict[str, Any] = {**defaults, **_without_nulls(row)}
    for name in _JSON_COLUMNS:
        if isinstance(content.get(name), str):
            try:
                content[name] = json.loads(content[name])  # its nulls are the client's
            except (ValueError, RecursionError):
                continue  # it stays text, which the check of the line refuses
    try:
        return encode_json(content).encode(errors="backslashreplace")
    except (TypeError, ValueError, RecursionError):
        return b"a column has values that JSON does not have"


def _without_nulls(value: Any) -> Any:
    """Leave out the nulls of a row, in its structs too."""
    if isinstance(value, dict):
        return {name: _without_nulls(field) for name, field in value.items() if field is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _table(path: str, texts: list[tuple[int, bytes | None]]) -> Any:
    numbers = [number for number, _ in texts]
    return pa.table([[path] * len(texts), numbers, [text for _, text in texts]], schema=LINES)
