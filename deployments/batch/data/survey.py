"""What is to be done: which lines hold a request, which of them have a result, and the results of all others.

Lines are read on the cluster. This process keeps 16 bytes of each, and the results of those that hold no request.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import ray.data

from deployments.api.json_response import encode_json
from deployments.batch.answers import ENDPOINTS
from deployments.batch.data.line_source import MAX_LINE_BYTES, LineSource
from deployments.batch.input_lines import (
    LineError,
    custom_id_digest,
    duplicate_line,
    error_line,
    line_too_long,
    parse_line,
)
from engine.errors import ConfigError, shown

__all__ = ["Results", "Survey", "endpoint_of", "read_results", "remaining", "survey"]

DigestArray: TypeAlias = npt.NDArray[np.bytes_]

_SAMPLE = 100  # lines
_END: Final = b"\x01"  # after each digest: numpy cuts off the zero bytes at the end of its strings
_DIGEST: Final = "S17"
_CHECKED = pa.schema(
    [("path", pa.string()), ("number", pa.int64()), ("custom_id", pa.string()), ("error", pa.large_binary())]
)


@dataclass
class Survey:
    """The lines of an input.

    Attributes:
        digests: of the custom_ids of all requests.
        repeated: path and number of lines whose custom_id an earlier line has.
        bad_lines: the results of the lines that hold no request, those that are repeated included.
    """

    digests: set[bytes] = field(default_factory=set)
    repeated: set[tuple[str, int]] = field(default_factory=set)
    bad_lines: list[bytes] = field(default_factory=list)


@dataclass
class Results:
    """The results of requests in a directory.

    Attributes:
        digests: of their custom_ids.
        num_errors: how many of them are errors.
    """

    digests: set[bytes] = field(default_factory=set)
    num_errors: int = 0


def endpoint_of(source: LineSource) -> str:
    """Return the endpoint of an input: that of the first line with a valid one."""
    for row in ray.data.read_datasource(source).take(_SAMPLE):
        try:
            url = json.loads(row["text"])["url"]
        except (ValueError, RecursionError, KeyError, TypeError):
            continue
        if url in ENDPOINTS:
            return str(url)
    return ENDPOINTS[0]


def survey(source: LineSource, endpoint: str) -> Survey:
    """Read all lines of an input in their order."""
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True  # the first of the lines with the same custom_id is the same always
    try:
        lines = ray.data.read_datasource(source)
    finally:
        context.execution_options.preserve_order = False
    result = Survey()
    for row in _rows(lines.map_batches(partial(_check, endpoint=endpoint), batch_size=None, batch_format="pyarrow")):
        if row["error"] is not None:
            result.bad_lines.append(row["error"])
            continue
        digest = custom_id_digest(row["custom_id"])
        if digest in result.digests:
            result.repeated.add((row["path"], row["number"]))
            result.bad_lines.append(_error(row["path"], row["number"], duplicate_line(row["number"], row["custom_id"])))
        result.digests.add(digest)
    return result


def read_results(paths: list[str], known: set[bytes]) -> Results:
    """Read the results that earlier runs have written.

    Raises:
        ConfigError: one of them is not a result of a known request, or a request has two.
    """
    results = Results()
    if not paths:
        return results
    lines = ray.data.read_datasource(LineSource(paths))
    for row in _rows(lines.map_batches(_described, batch_size=None, batch_format="pyarrow")):
        digest = custom_id_digest(row["custom_id"])
        if digest not in known:
            raise ConfigError(
                f"custom_id {shown(row['custom_id'])} in '{row['path']}' is not one of this input; give another --out"
            )
        if digest in results.digests:
            raise ConfigError(
                f"custom_id {shown(row['custom_id'])} has two results in --out: two jobs wrote there; give another one"
            )
        results.digests.add(digest)
        results.num_errors += row["is_error"]
    return results


def remaining(source: LineSource, endpoint: str, surveyed: Survey, done: set[bytes]) -> ray.data.Dataset:
    """Return the lines that hold a request without a result."""
    known = ray.put((_sorted(done), surveyed.repeated))
    select = partial(_select, endpoint=endpoint, known=known)
    lines: ray.data.Dataset = ray.data.read_datasource(source)
    return lines.map_batches(select, batch_size=None, batch_format="pyarrow")


def _sorted(digests: Collection[bytes]) -> DigestArray:
    """Return digests as an array, which tasks read in Ray's object store without a copy."""
    return np.array(sorted(digest + _END for digest in digests), dtype=_DIGEST)


def _holds(digests: DigestArray, digest: bytes) -> bool:
    """Whether ``_sorted`` has put a digest into an array."""
    wanted = np.array(digest + _END, dtype=_DIGEST)
    position = int(np.searchsorted(digests, wanted))
    return position < len(digests) and bool(digests[position] == wanted)


def _rows(lines: ray.data.Dataset) -> Iterator[dict[str, Any]]:
    batches: Iterator[Any] = iter(lines.iter_batches(batch_size=None, batch_format="pyarrow"))
    for batch in batches:
        yield from batch.to_pylist()


def _parsed(row: dict[str, Any], endpoint: str) -> str:
    """Return the custom_id of a line, or raise LineError."""
    if row["text"] is None:
        raise line_too_long(row["number"], MAX_LINE_BYTES)
    try:
        custom_id = parse_line(row["text"], endpoint).custom_id
        custom_id.encode()
        return custom_id
    except UnicodeEncodeError:
        problem = f"line {row['number']}: custom_id has half of a surrogate pair, which UTF-8 cannot hold; change it"
        raise LineError("invalid_custom_id", problem) from None
    except LineError as error:
        raise LineError(error.code, f"line {row['number']}: {error.message}", error.custom_id) from None


def _check(lines: pa.Table, endpoint: str) -> pa.Table:
    checked = []
    for row in lines.to_pylist():
        result = {"path": row["path"], "number": row["number"], "custom_id": None, "error": None}
        try:
            result["custom_id"] = _parsed(row, endpoint)
        except LineError as error:
            result["error"] = _error(row["path"], row["number"], error)
        checked.append(result)
    return pa.Table.from_pylist(checked, schema=_CHECKED)


def _error(path: str, number: int, error: LineError) -> bytes:
    return encode_json(error_line(path, number, error)).encode(errors="backslashreplace")


def _described(lines: pa.Table) -> pa.Table:
    """Return the path, the custom_id and the kind of each result."""
    rows = []
    for row in lines.to_pylist():
        try:
            content = json.loads(row["text"])
            is_error = content.get("response") is None or content["response"]["status_code"] != 200
            rows.append({"path": row["path"], "custom_id": str(content["custom_id"]), "is_error": is_error})
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
            rows.append({"path": row["path"], "custom_id": "", "is_error": True})
    schema = [("path", pa.string()), ("custom_id", pa.string()), ("is_error", pa.bool_())]
    return pa.Table.from_pylist(rows, schema=pa.schema(schema))


def _select(lines: pa.Table, endpoint: str, known: Any) -> pa.Table:
    done, repeated = ray.get(known)
    keep = []
    for row in lines.to_pylist():
        try:
            digest = custom_id_digest(_parsed(row, endpoint))
        except LineError:
            keep.append(False)
            continue
        keep.append(not _holds(done, digest) and (row["path"], row["number"]) not in repeated)
    return lines.filter(pa.array(keep, pa.bool_()))
