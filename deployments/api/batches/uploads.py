"""read_upload: a multipart/form-data body with one file, written to the disk while it comes."""

from __future__ import annotations

import asyncio
import errno
from dataclasses import dataclass, field

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from deployments.api.body import BYTES_PER_S
from deployments.batch.file_store import StorageFullError, Upload
from deployments.errors import ApiError
from engine.errors import shown

__all__ = ["UploadForm", "read_upload", "storage_error"]

_BUFFER_BYTES = 2**20
_MAX_FIELDS, _MAX_FIELD_BYTES = 16, 1024
_OVERHEAD_BYTES = 2**16  # of the form around the file


@dataclass
class UploadForm:
    """The fields of a form, without the content of the file.

    Attributes:
        filename: as the client has given it; None without a file.
    """

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None


async def read_upload(request: Request, upload: Upload, max_bytes: int, timeout_s: float) -> UploadForm:
    """Write the file of a form to ``upload``; returns the rest of the form.

    Args:
        request: whose body is the form.
        upload: takes the part ``file``.
        max_bytes: a longer file is rejected.
        timeout_s: for the whole body, and a second more for each BYTES_PER_S of it that have come.

    Raises:
        ApiError: 413 for a longer file, 408 for a slow client, 400 for another form.
        StorageFullError: there is no room for it.
        OSError: it cannot be written.
    """
    parts = _Parts(_boundary(request), max_bytes)
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes + _OVERHEAD_BYTES:
        raise _too_large(max_bytes)
    started, num_bytes = asyncio.get_running_loop().time(), 0
    try:
        async with asyncio.timeout(timeout_s) as timeout:
            async for chunk in request.stream():
                num_bytes += len(chunk)
                parts.parse(chunk)
                if len(parts.buffer) >= _BUFFER_BYTES:
                    await _flush(parts, upload)
                timeout.reschedule(started + timeout_s + num_bytes / BYTES_PER_S)
    except TimeoutError:
        problem = f"only {num_bytes} bytes of the body came in time; send it without pauses"
        raise ApiError(408, problem, code="timeout") from None
    parts.finish()
    await _flush(parts, upload)
    return parts.form


async def _flush(parts: _Parts, upload: Upload) -> None:
    data = bytes(parts.buffer)
    parts.buffer.clear()
    await asyncio.to_thread(upload.write, data)


def storage_error(error: OSError | StorageFullError) -> ApiError:
    """Return the answer to a request that the disk could not serve."""
    if isinstance(error, StorageFullError):
        problem = f"{error}; delete some, or let the operator raise batches.max_total_bytes"
        return ApiError(400, problem, code="storage_limit_exceeded")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ApiError(507, "the disk of the batch directory is full; free some space on it", code="storage_full")
    problem = f"the batch directory cannot be used: {error.strerror}; see args.batches.directory"
    return ApiError(500, problem, code="storage_error")


def _too_large(max_bytes: int) -> ApiError:
    problem = f"the file exceeds {max_bytes} bytes; split it, or raise batches.max_file_bytes"
    return ApiError(413, problem, param="file", code="file_too_large")


def _boundary(request: Request) -> bytes:
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not boundary:
        given = kind.decode("latin-1")[:80]
        raise ApiError(400, f"content-type '{given}' is not supported; send multipart/form-data with a boundary")
    return boundary


class _Parts:
    """The parts of a form, as far as they have come."""

    def __init__(self, boundary: bytes, max_bytes: int) -> None:
        self.form = UploadForm()
        self.buffer = bytearray()  # of the file, to be written
        self._max_bytes = max_bytes
        self._num_file_bytes = 0
        self._header = (bytearray(), bytearray())
        self._name = ""  # of the part
        self._value: bytearray | None = None  # of a part that is not the file
        self._has_ended = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._on_part_begin,
                    "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
                    "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_headers_finished,
                    "on_part_data": self._on_part_data,
                    "on_part_end": self._on_part_end,
                    "on_end": self._on_end,
                },
            )
        except FormParserError as error:
            raise _invalid(str(error)) from None

    def parse(self, data: bytes) -> None:
        """Take in the next bytes of the body."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _invalid(str(error)) from None

    def finish(self) -> None:
        """Raise ApiError unless the form is complete."""
        if not self._has_ended:
            raise _invalid("it has no end")

    def _on_part_begin(self) -> None:
        self._name, self._value, self._filename = "", bytearray(), None
        if len(self.form.fields) >= _MAX_FIELDS:
            raise _invalid(f"it has more than {_MAX_FIELDS} fields")

    def _on_header_end(self) -> None:
        name, value = (bytes(part).decode("utf-8", "replace") for part in self._header)
        for part in self._header:
            part.clear()
        if name.strip().lower() != "content-disposition":
            return
        _, options = parse_options_header(value.encode().decode("latin-1"))
        texts = {key: option.decode("utf-8", "replace") for key, option in options.items()}
        self._name, self._filename = texts.get(b"name", ""), texts.get(b"filename")

    def _on_headers_finished(self) -> None:
        if not self._name:
            raise _invalid("a part has no name")
        if self._name != "file":
            return
        if self.form.filename is not None:
            raise ApiError(400, "the form has several files; send one", param="file")
        self.form.filename = _base_name(self._filename or "upload.jsonl")
        self._value = None

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._value is None:
            self._num_file_bytes += end - start
            if self._num_file_bytes > self._max_bytes:
                raise _too_large(self._max_bytes)
            self.buffer += memoryview(data)[start:end]
            return
        if len(self._value) + end - start > _MAX_FIELD_BYTES:
            raise _invalid(f"{shown(self._name)} is longer than {_MAX_FIELD_BYTES} bytes")
        self._value += data[start:end]

    def _on_part_end(self) -> None:
        if self._value is not None:
            self.form.fields[self._name] = self._value.decode("utf-8", "replace")

    def _on_end(self) -> None:
        self._has_ended = True

    _filename: str | None = None  # of the part


def _base_name(filename: str) -> str:
    """Return a name without directories, which the client may have sent; it is shown and never opened."""
    name = filename.replace("\\", "/").rpartition("/")[2]
    return "".join(character for character in name if character.isprintable())[:255] or "upload.jsonl"


def _invalid(problem: str) -> ApiError:
    return ApiError(400, f"the form is invalid: {problem}; send purpose and file as multipart/form-data")
