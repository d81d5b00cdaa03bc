"""ResultSink: writes the results of a job as files that are there whole or not at all."""

from __future__ import annotations

import json
import os
import posixpath
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.fs import FileSelector, FileType, LocalFileSystem
from ray.data.datasource import BlockBasedFileDatasink

from deployments.api.json_response import encode_json

__all__ = ["RESULTS", "ResultSink"]

BAD_LINES = "bad-lines"  # file of the lines that hold no request; each run writes it as a whole
_UNFINISHED = "_"  # first character of files that readers of directories leave out
RESULTS = pa.schema([("text", pa.large_binary())])  # a result as a line of JSONL, without a line feed
_COLUMNS = pa.schema([(name, pa.string()) for name in ("id", "custom_id", "response", "error")])


class ResultSink(BlockBasedFileDatasink):
    """A directory of results, at any address that Ray Data writes to. Takes rows of ``RESULTS``.

    Args:
        path: of the directory.
        file_format: ``jsonl`` or ``parquet``.
    """

    def __init__(self, path: str, file_format: str) -> None:
        super().__init__(path, file_format=file_format)

    @contextmanager
    def open_output_stream(self, path: str) -> Iterator[Any]:
        """Open a file that gets its name when it is complete."""
        directory, name = posixpath.split(path)
        unfinished = posixpath.join(directory, _UNFINISHED + name)
        with self.filesystem.open_output_stream(unfinished, **self.open_stream_args) as file:
            yield file
        if isinstance(self.filesystem.unwrap(), LocalFileSystem):
            _sync(unfinished)
        self.filesystem.move(unfinished, path)

    def write_block_to_file(self, block: Any, file: Any) -> None:
        """Write the results of a block."""
        self._write(block.to_arrow().column("text").to_pylist(), file)

    def write_bad_lines(self, texts: list[bytes]) -> None:
        """Write the results of all lines that hold no request."""
        path = self._path_of_bad_lines()
        if not texts:
            if self.filesystem.get_file_info(path).type != FileType.NotFound:
                self.filesystem.delete_file(path)
            return
        self.on_write_start()
        with self.open_output_stream(path) as file:
            self._write(texts, file)

    def results(self) -> list[str]:
        """Return the paths of the files with results of requests, and remove what a run that was killed has left."""
        names = []
        for file in self.filesystem.get_file_info(FileSelector(self.path, allow_not_found=True)):
            if file.base_name.startswith(_UNFINISHED):
                self.filesystem.delete_file(file.path)
            elif file.path != self._path_of_bad_lines():
                names.append(file.path)
        return names

    def _path_of_bad_lines(self) -> str:
        return posixpath.join(self.path, f"{BAD_LINES}.{self.file_format}")

    def _write(self, texts: Iterable[bytes], file: Any) -> None:
        if self.file_format == "jsonl":
            file.write(b"".join(text + b"\n" for text in texts))
            return
        rows = [json.loads(text) for text in texts]
        for row in rows:
            row |= {name: row[name] and encode_json(row[name]) for name in ("response", "error")}
        pq.write_table(pa.Table.from_pylist(rows, schema=_COLUMNS), file)


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
