"""The lines of a batch's input: where each is, and the request in it. A line that holds none has an error instead.

It knows JSONL and the shape of a line, and not what an endpoint accepts.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from deployments.large_json import decode_json
from engine.errors import shown

__all__ = [
    "InputLine",
    "Line",
    "LineError",
    "RawLine",
    "custom_id_digest",
    "duplicate_line",
    "error_line",
    "input_lines",
    "line_id",
    "line_too_long",
    "parse_line",
    "raw_lines",
    "read_line",
]

_BOM = b"\xef\xbb\xbf"
_MAX_CUSTOM_ID = 512  # characters
_YIELD_EVERY = 64 * 2**10  # bytes; the event loop's thread waits for this one otherwise


class LineError(Exception):
    """What is wrong with a line.

    Args:
        code: short name for programs.
        message: text for the client.
        custom_id: of the line, if it has a valid one.
    """

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.custom_id = custom_id


@dataclass(frozen=True, slots=True)
class InputLine:
    """Where a line is, and its error, if it holds no request.

    Attributes:
        index: among the lines that are not blank, from 0.
        offset: bytes before it.
        length: bytes, the line feed included.
    """

    index: int
    offset: int
    length: int
    error: LineError | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """The request in a line."""

    custom_id: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RawLine:
    """A line that is not blank.

    Attributes:
        number: among all lines, from 1.
        offset: bytes before it.
        length: bytes, the line feed included.
        text: its bytes; None if it is too long.
    """

    number: int
    offset: int
    length: int
    text: bytes | None


def raw_lines(file: BufferedIOBase, max_line_bytes: int) -> Iterator[RawLine]:
    """Yield the lines of a file that are not blank, from its beginning."""
    offset = number = 0
    while data := file.readline(max_line_bytes + 1):
        number += 1
        start, length, text = offset, len(data), None
        if length <= max_line_bytes or data.endswith(b"\n"):
            text = data if number > 1 else data.removeprefix(_BOM)
            start += length - len(text)
        else:
            length += _skip_line(file, 2**20)
        if text is None or not text.isspace():
            yield RawLine(number, start, offset + length - start, text)
        offset += length


def input_lines(path: Path, endpoint: str, max_line_bytes: int) -> Iterator[InputLine]:
    """Yield the lines of a file that are not blank."""
    custom_ids: set[bytes] = set()
    unyielded = 0
    with path.open("rb") as file:
        for index, line in enumerate(raw_lines(file, max_line_bytes)):
            error = (
                line_too_long(line.number, max_line_bytes)
                if line.text is None
                else _check(line.text, line.number, endpoint, custom_ids)
            )
            yield InputLine(index, line.offset, line.length, error)
            unyielded += line.length
            if unyielded > _YIELD_EVERY:
                unyielded = 0
                time.sleep(0)


def line_too_long(number: int, max_line_bytes: int) -> LineError:
    """Return the error of a line that is too long."""
    return LineError("line_too_long", f"line {number} is longer than {max_line_bytes} bytes; split it")


def _skip_line(file: BufferedIOBase, size: int) -> int:
    """Read to the end of a line; returns the number of bytes."""
    length = 0
    while data := file.readline(size):
        length += len(data)
        if data.endswith(b"\n"):
            break
    return length


def _check(data: bytes, number: int, endpoint: str, custom_ids: set[bytes]) -> LineError | None:
    try:
        line = parse_line(data, endpoint)
    except LineError as error:
        return LineError(error.code, f"line {number}: {error.message}", error.custom_id)
    digest = custom_id_digest(line.custom_id)
    if digest in custom_ids:
        return duplicate_line(number, line.custom_id)
    custom_ids.add(digest)
    return None


def custom_id_digest(custom_id: str) -> bytes:
    """Return 16 bytes by which a custom_id is remembered."""
    return hashlib.blake2b(custom_id.encode(errors="surrogatepass"), digest_size=16).digest()


def duplicate_line(number: int, custom_id: str) -> LineError:
    """Return the error of a line whose custom_id an earlier one has."""
    problem = f"line {number}: custom_id {shown(custom_id)} was used by an earlier line; give each its own"
    return LineError("duplicate_custom_id", problem, custom_id)


def parse_line(data: bytes, endpoint: str) -> Line:
    """Return the request in a line.

    Raises:
        LineError: there is none.
    """
    try:
        content = decode_json(data.decode())
    except (ValueError, RecursionError) as error:
        raise LineError("invalid_json_line", f"it is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise LineError("invalid_json_line", f"it must be a JSON object, not {type(content).__name__}")
    custom_id = content.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= _MAX_CUSTOM_ID:
        problem = f"custom_id={shown(custom_id)} is invalid; give a string of 1 to {_MAX_CUSTOM_ID} characters"
        raise LineError("invalid_custom_id", problem)
    if content.get("method") != "POST":
        problem = f"method={shown(content.get('method'))} is invalid; give POST"
        raise LineError("invalid_method", problem, custom_id)
    if content.get("url") != endpoint:
        problem = f"url={shown(content.get('url'))} is not the endpoint of the batch; give {endpoint}"
        raise LineError("invalid_url", problem, custom_id)
    body = content.get("body")
    if not isinstance(body, dict):
        raise LineError("invalid_body", f"body={shown(body)} is invalid; give a JSON object", custom_id)
    for name in ("stream", "background"):
        if body.get(name):
            problem = f"{name}={shown(body[name])} is not possible in a batch; leave it out"
            raise LineError("invalid_body", problem, custom_id)
    return Line(custom_id, body)


def read_line(path: Path, line: InputLine) -> bytes:
    """Return the bytes of a line."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.pread(descriptor, line.length, line.offset)
    finally:
        os.close(descriptor)


def line_id(batch_id: str, index: int) -> str:
    """Return the id of a line's request, the same after a restart."""
    return f"batch_req_{hashlib.sha256(f'{batch_id} {index}'.encode()).hexdigest()[:32]}"


def error_line(batch_id: str, index: int, error: LineError) -> dict[str, Any]:
    """Return the line of the error file for a line that was not answered."""
    return {
        "id": line_id(batch_id, index),
        "custom_id": error.custom_id,
        "response": None,
        "error": {"code": error.code, "message": error.message},
    }
