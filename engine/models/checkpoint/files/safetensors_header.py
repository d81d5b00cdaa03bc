"""read_header: the names, types, shapes and positions of a safetensors file's tensors, all checked against the file.

The format is documented at https://huggingface.co/docs/safetensors: eight bytes with the header's length, the header as
JSON, then the tensors without gaps. The package's own reader checks the same, but its errors do not name the tensor.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import ModelLoadError, listed, shown

__all__ = ["StoredTensor", "read_header"]

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # as in the safetensors package
MAX_DIMENSIONS = 64  # as in torch

_BITS = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
_REMEDY = "download the file again"


class StoredTensor(NamedTuple):
    """Where a tensor is stored, and its type and shape."""

    path: Path
    file: int  # descriptor
    dtype: str  # as safetensors calls it
    shape: tuple[int, ...]
    start: int  # bytes from the start of the file
    stop: int
    is_transposed: bool = False  # its matrices are stored as [columns, rows]; ``shape`` is that of the model


def read_header(path: Path, file: int) -> dict[str, StoredTensor]:
    """Return the tensors of an open safetensors file by name, in the order of their bytes.

    Args:
        path: of the file, for messages.
        file: its descriptor.

    Raises:
        ModelLoadError: if the header is malformed, or does not describe the file's bytes exactly.
        OSError: if the file cannot be read.
    """
    size = os.fstat(file).st_size
    length = int.from_bytes(os.pread(file, LENGTH_BYTES, 0), "little")
    data = LENGTH_BYTES + length
    if size < LENGTH_BYTES or length > MAX_HEADER_BYTES or data > size:
        raise _error(path, f"its header would take {length} bytes, and the file has {size}")
    header = _parse(path, os.pread(file, length, LENGTH_BYTES))
    tensors = {name: _stored(path, file, name, entry, data) for name, entry in header.items()}
    return _require_contiguous(path, tensors, data, size)


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    """Return the entries of the header's JSON, without its metadata."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) < len(pairs):
            names = [name for name, _ in pairs]
            raise _error(path, f"its header has the key {shown(max(names, key=names.count))} twice")
        return entries

    try:
        header = json.loads(text.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise _error(path, f"its header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise _error(path, f"its header is a {type(header).__name__}, not an object")
    header.pop("__metadata__", None)
    return header


def _stored(path: Path, file: int, name: str, entry: Any, data: int) -> StoredTensor:
    """Return the tensor that an entry of the header describes; ``data`` is where the file's tensors begin."""
    fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
    dtype: Any = fields.get("dtype")
    shape: Any = fields.get("shape")
    offsets: Any = fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise _error(path, f"the tensor {shown(name)} has the unknown dtype {shown(dtype)}")
    if not _is_list_of_sizes(shape):
        raise _error(path, f"the tensor {shown(name)} has the shape {shown(shape)}, which is not a list of sizes")
    if not _is_list_of_sizes(offsets) or len(offsets) != 2:
        raise _error(path, f"the tensor {shown(name)} has the data_offsets {shown(offsets)}, which are not two offsets")
    start, stop = offsets
    if (stop - start) * 8 != math.prod(shape) * _BITS[dtype]:
        raise _error(
            path,
            f"the tensor {shown(name)} of shape {shown(shape)} and dtype {dtype} does not fit its data_offsets "
            f"{shown(offsets)}",
        )
    return StoredTensor(path, file, dtype, tuple(shape), data + start, data + stop)


def _is_list_of_sizes(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= MAX_DIMENSIONS
        and all(type(number) is int and 0 <= number < 2**63 for number in value)
    )


def _require_contiguous(path: Path, tensors: dict[str, StoredTensor], start: int, end: int) -> dict[str, StoredTensor]:
    """Return the tensors in the order of their bytes; they must fill the file from ``start`` to ``end``."""
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)))
    for name, tensor in ordered.items():
        if tensor.start != start:
            raise _error(path, f"the tensor {shown(name)} begins at byte {tensor.start}, but should at {start}")
        start = tensor.stop
    if start > end:
        cut = [name for name, tensor in ordered.items() if tensor.stop > end]
        raise _error(path, f"it has {end} of {start} bytes, so it is cut off in the tensors {listed(cut)}")
    if start < end:
        raise _error(path, f"it has {end} bytes, but its tensors end at byte {start}")
    return ordered


def _error(path: Path, problem: str) -> ModelLoadError:
    return ModelLoadError(f"'{path}' is not a readable safetensors file: {problem}; {_REMEDY}")
